//! One communicator with collectives over bytes that never exceed a C int.

use std::any::Any;
use std::cell::{Cell, OnceCell};
use std::panic::{self, AssertUnwindSafe};
use std::thread;
use std::time::{Duration, Instant};

use mpi::datatype::{Partition, PartitionMut};
use mpi::request;
use mpi::topology::{Color, Communicator, SimpleCommunicator};
use mpi::traits::{CommunicatorCollectives, Destination, Root, Source};

use crate::runtime::liveness::{SharedSite, Waiting};
use crate::runtime::units::{Bytes, Rank, from_index};

/// Tag of the message that ends a sleep.
const WAKE_TAG: i32 = 7;
/// Tag of the message that reports to rank 0 that another rank was requested to stop.
const STOP_TAG: i32 = 8;
/// A sleeping rank polls at these intervals: the first, doubled each time up to the second.
const POLL_INTERVAL_MIN: Duration = Duration::from_micros(200);
const POLL_INTERVAL_MAX: Duration = Duration::from_millis(50);
/// Interval at which a sleeping rank reports that it is alive.
const ALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// Some ranks in a fixed order, and the collectives among them.
pub struct Axis {
    communicator: SimpleCommunicator,
    /// Most bytes that one rank sends in one MPI call.
    round_bytes: Cell<usize>,
    /// Another transport between the same ranks; its type belongs to the module that opened it.
    transport: OnceCell<Box<dyn Any>>,
    /// Bytes that this rank has sent to others.
    sent: Cell<u64>,
    /// Records every call that ends only when other ranks take part.
    site: SharedSite,
}

impl Axis {
    pub(super) fn new(communicator: SimpleCommunicator, site: SharedSite) -> Self {
        let size = usize::try_from(communicator.size()).unwrap_or(1);
        // Receive displacements are C ints too, so the limit is shared by all ranks.
        let round_bytes = Cell::new((1 << 30) / size.max(1));
        Axis { communicator, round_bytes, transport: OnceCell::new(), sent: Cell::new(0), site }
    }

    pub(super) fn split(&self, index: usize) -> Axis {
        let _waiting = self.site.begin_wait();
        let color = Color::with_value(i32::try_from(index).unwrap_or(i32::MAX));
        let part = self.communicator.split_by_color(color);
        Axis::new(part.expect("every rank names a color"), self.site.clone())
    }

    /// The same ranks on a new communicator; every rank takes part.
    #[must_use]
    pub fn duplicate(&self) -> Axis {
        self.split(0)
    }

    /// The ranks of the axis that share this rank's machine.
    pub(super) fn split_by_machine(&self) -> Axis {
        let _waiting = self.site.begin_wait();
        Axis::new(self.communicator.split_shared(0), self.site.clone())
    }

    /// This rank's index on the axis.
    #[must_use]
    pub fn rank(&self) -> Rank {
        Rank(usize::try_from(self.communicator.rank()).unwrap_or(0))
    }

    /// Ranks on the axis.
    #[must_use]
    pub fn size(&self) -> usize {
        usize::try_from(self.communicator.size()).unwrap_or(1)
    }

    /// Bytes of tensors that this rank has sent to others of the axis so far, by MPI and by [`Axis::transport`].
    #[must_use]
    pub fn sent_bytes(&self) -> Bytes {
        Bytes(self.sent.get())
    }

    /// Counts bytes that are sent to another rank.
    pub(super) fn count_sent(&self, bytes: usize) {
        self.sent.set(self.sent.get() + from_index(bytes));
    }

    /// Most bytes that one rank sends in one MPI call.
    #[must_use]
    pub fn round_bytes(&self) -> usize {
        self.round_bytes.get()
    }

    /// Makes rounds smaller, so that tests see several of them. All ranks must set the same number.
    pub fn set_round_bytes(&self, bytes: usize) {
        self.round_bytes.set(bytes.clamp(1, (1 << 30) / self.size()));
    }

    /// Marks that the rank enters a call of another library that ends only when other ranks of the axis take part.
    #[must_use]
    pub fn begin_wait(&self) -> Waiting {
        self.site.begin_wait()
    }

    /// Stores another transport between the GPUs of these ranks, for [`Axis::transport`]; only the first one is kept.
    pub fn set_transport<R: 'static>(&self, transport: R) {
        self.site.set_gpu_linked();
        let _ = self.transport.set(Box::new(transport));
    }

    /// The transport of type `R`, if one is stored.
    #[must_use]
    pub fn transport<R: 'static>(&self) -> Option<&R> {
        self.transport.get()?.downcast_ref()
    }

    /// Rank 0 ends the [`Axis::sleep`] of the others.
    pub(super) fn wake(&self) {
        for rank in 1..self.communicator.size() {
            self.communicator.process_at_rank(rank).send_with_tag(&[1u8][..], WAKE_TAG);
        }
    }

    /// Whether a sleeping rank has reported to rank 0 that it was requested to stop.
    pub(super) fn stop_reported(&self) -> bool {
        let mut reported = false;
        for rank in 1..self.communicator.size() {
            let process = self.communicator.process_at_rank(rank);
            if process.immediate_probe_with_tag(STOP_TAG).is_some() {
                let (_, _): (Vec<u8>, _) = process.receive_vec_with_tag(STOP_TAG);
                reported = true;
            }
        }
        reported
    }

    /// Sleeps until rank 0 calls [`Axis::wake`]. Unlike in a collective, no core is busy meanwhile. `report_alive` is
    /// called every few seconds. If `stop_requested` turns true, rank 0 learns of it once.
    pub(super) fn sleep(&self, report_alive: impl Fn(), stop_requested: impl Fn() -> bool) {
        let _waiting = self.site.begin_wait();
        let first = self.communicator.process_at_rank(0);
        let mut poll_interval = POLL_INTERVAL_MIN;
        let mut last_report = Instant::now();
        let mut stop_reported = false;
        while first.immediate_probe_with_tag(WAKE_TAG).is_none() {
            if !stop_reported && stop_requested() {
                first.send_with_tag(&[1u8][..], STOP_TAG);
                stop_reported = true;
            }
            thread::sleep(poll_interval);
            poll_interval = (2 * poll_interval).min(POLL_INTERVAL_MAX);
            if last_report.elapsed() > ALIVE_INTERVAL {
                last_report = Instant::now();
                report_alive();
            }
        }
        let (_, _): (Vec<u8>, _) = first.receive_vec_with_tag(WAKE_TAG);
    }

    /// Waits until every rank of the axis has entered the barrier.
    pub fn barrier(&self) {
        let _waiting = self.site.begin_wait();
        CommunicatorCollectives::barrier(&self.communicator);
    }

    /// As [`Axis::barrier`], for long waits: a rank that is early sleeps, so that no core is busy.
    pub fn quiet_barrier(&self) {
        let _waiting = self.site.begin_wait();
        let mut entered = self.communicator.immediate_barrier();
        let mut poll_interval = POLL_INTERVAL_MIN;
        while let Err(waiting) = entered.test() {
            entered = waiting;
            thread::sleep(poll_interval);
            poll_interval = (2 * poll_interval).min(POLL_INTERVAL_MAX);
        }
    }

    /// Concatenates every rank's bytes in rank order, on every rank. Rank r sends `counts[r]` bytes.
    ///
    /// # Panics
    /// When `send` is not as long as this rank's count says.
    #[must_use]
    pub fn all_gather(&self, send: &[u8], counts: &[usize]) -> Vec<u8> {
        let me = self.rank().0;
        assert_eq!((send.len(), counts.len()), (counts[me], self.size()), "this rank sends what it announced");
        self.count_sent(send.len() * (self.size() - 1));
        let ends = ends(counts);
        let mut gathered = vec![0u8; ends.last().copied().unwrap_or(0)];
        for round in Rounds::over(counts.iter().copied().max().unwrap_or(0), self.round_bytes()) {
            let part: Vec<_> = counts.iter().map(|&count| round.part(count)).collect();
            let (sizes, displacements) = table(&part);
            let mut received = allocated(sizes.iter().map(|&size| index(size)).sum());
            let mut sent = allocated(0);
            sent.extend_from_slice(&send[part[me].clone()]);
            let mut partition = PartitionMut::new(&mut received, &sizes[..], &displacements[..]);
            let waiting = self.site.begin_wait();
            self.communicator.all_gather_varcount_into(&sent[..], &mut partition);
            drop(waiting);
            for (rank, range) in part.iter().enumerate() {
                let start = ends[rank] - counts[rank] + range.start;
                let from = index(displacements[rank]);
                gathered[start..start + range.len()].copy_from_slice(&received[from..from + range.len()]);
            }
        }
        gathered
    }

    /// Sends slice r of `send` to rank r and returns what arrives, in rank order. All ranks know all counts;
    /// `bytes_max` is the largest of them over all ranks.
    ///
    /// # Panics
    /// When the counts do not add up to the bytes.
    #[must_use]
    pub fn all_to_all(
        &self,
        send: &[u8],
        send_counts: &[usize],
        receive_counts: &[usize],
        bytes_max: usize,
    ) -> Vec<u8> {
        assert_eq!(send.len(), send_counts.iter().sum::<usize>(), "this rank sends what it announced");
        self.count_sent(send.len() - send_counts[self.rank().0]);
        let send_ends = ends(send_counts);
        let receive_ends = ends(receive_counts);
        let mut arrived = vec![0u8; receive_ends.last().copied().unwrap_or(0)];
        for round in Rounds::over(bytes_max, self.round_bytes()) {
            let out: Vec<_> = send_counts.iter().map(|&count| round.part(count)).collect();
            let into: Vec<_> = receive_counts.iter().map(|&count| round.part(count)).collect();
            let mut packed = allocated(0);
            for (rank, range) in out.iter().enumerate() {
                let start = send_ends[rank] - send_counts[rank];
                packed.extend_from_slice(&send[start + range.start..start + range.end]);
            }
            let (out_sizes, out_at) = table(&out);
            let (in_sizes, in_at) = table(&into);
            let mut received = allocated(in_sizes.iter().map(|&size| index(size)).sum());
            let partition = Partition::new(&packed[..], &out_sizes[..], &out_at[..]);
            let mut target = PartitionMut::new(&mut received, &in_sizes[..], &in_at[..]);
            let waiting = self.site.begin_wait();
            self.communicator.all_to_all_varcount_into(&partition, &mut target);
            drop(waiting);
            for (rank, range) in into.iter().enumerate() {
                let start = receive_ends[rank] - receive_counts[rank] + range.start;
                let from = index(in_at[rank]);
                arrived[start..start + range.len()].copy_from_slice(&received[from..from + range.len()]);
            }
        }
        arrived
    }

    /// One step of a ring: sends the buffers of `send` to the next rank and fills those of `receive` from the previous
    /// rank while `work` runs. Both sides know all sizes. A panic of `work` goes on once everything has been sent and received:
    /// until then MPI uses the buffers, and a request that is dropped before its end is a second panic.
    pub fn ring_step<T>(&self, send: &[&[u8]], receive: Vec<&mut [u8]>, work: impl FnOnce() -> T) -> T {
        let size = i32::try_from(self.size()).unwrap_or(1);
        let rank = self.communicator.rank();
        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        let limit = self.round_bytes();
        if size > 1 {
            self.count_sent(send.iter().map(|buffer| buffer.len()).sum());
        }
        request::scope(|scope| {
            let arriving: Vec<_> = receive
                .into_iter()
                .flat_map(|buffer| buffer.chunks_mut(limit))
                .map(|part| self.communicator.process_at_rank(previous).immediate_receive_into(scope, part))
                .collect();
            let leaving: Vec<_> = send
                .iter()
                .flat_map(|buffer| buffer.chunks(limit))
                .map(|part| self.communicator.process_at_rank(next).immediate_send(scope, part))
                .collect();
            let result = panic::catch_unwind(AssertUnwindSafe(work));
            let _waiting = self.site.begin_wait();
            for request in arriving {
                request.wait();
            }
            for request in leaving {
                request.wait();
            }
            result.unwrap_or_else(|payload| panic::resume_unwind(payload))
        })
    }

    /// Rank 0's bytes, on every rank.
    pub fn broadcast(&self, bytes: &mut [u8]) {
        let _waiting = self.site.begin_wait();
        for part in bytes.chunks_mut(self.round_bytes()) {
            self.communicator.process_at_rank(0).broadcast_into(part);
        }
    }

    /// Concatenates every rank's bytes in rank order, on rank 0; returns nothing elsewhere. All ranks send the same
    /// number of bytes, at most one round.
    #[must_use]
    pub fn gather_round(&self, send: &[u8]) -> Vec<u8> {
        let _waiting = self.site.begin_wait();
        let root = self.communicator.process_at_rank(0);
        if self.rank() == Rank(0) {
            let mut all = vec![0u8; send.len() * self.size()];
            root.gather_into_root(send, &mut all[..]);
            all
        } else {
            root.gather_into(send);
            Vec::new()
        }
    }

    /// Every rank's number, in rank order, on every rank.
    #[must_use]
    pub fn gather_numbers(&self, value: u64) -> Vec<u64> {
        let _waiting = self.site.begin_wait();
        let mut all = vec![0u64; self.size()];
        self.communicator.all_gather_into(&value, &mut all[..]);
        all
    }

    /// Every rank's float, in rank order, on every rank.
    #[must_use]
    pub fn gather_floats(&self, value: f64) -> Vec<f64> {
        let _waiting = self.site.begin_wait();
        let mut all = vec![0f64; self.size()];
        self.communicator.all_gather_into(&value, &mut all[..]);
        all
    }

    pub(super) fn gather_codes(&self, value: i32) -> Vec<i32> {
        let _waiting = self.site.begin_wait();
        let mut all = vec![0i32; self.size()];
        self.communicator.all_gather_into(&value, &mut all[..]);
        all
    }

    /// Every rank's text, in rank order, on every rank.
    #[must_use]
    pub fn gather_texts(&self, text: &str) -> Vec<String> {
        let lengths = self.gather_numbers(text.len() as u64);
        let counts: Vec<_> = lengths.iter().map(|&length| crate::runtime::units::as_index(length)).collect();
        let all = self.all_gather(text.as_bytes(), &counts);
        let ends = ends(&counts);
        ends.iter()
            .zip(&counts)
            .map(|(&end, &count)| String::from_utf8_lossy(&all[end - count..end]).into_owned())
            .collect()
    }
}

/// One of the parts that a message is sent in, so that none exceeds the limit.
#[derive(Clone, Copy)]
struct Round {
    index: usize,
    limit: usize,
}

impl Round {
    /// This round's part of a message of `count` bytes.
    fn part(self, count: usize) -> std::ops::Range<usize> {
        (self.index * self.limit).min(count)..((self.index + 1) * self.limit).min(count)
    }
}

struct Rounds;

impl Rounds {
    /// As many rounds as the longest message needs, at least one, because every rank enters every collective.
    fn over(longest: usize, limit: usize) -> impl Iterator<Item = Round> {
        (0..longest.div_ceil(limit).max(1)).map(move |index| Round { index, limit })
    }
}

/// Zeros in allocated memory, also for 0 bytes. An empty vector points at address 1, which is Open MPI's
/// `MPI_IN_PLACE`: a rank with nothing to send would be taken for one whose data are in the receive buffer.
fn allocated(bytes: usize) -> Vec<u8> {
    let mut buffer = Vec::with_capacity(bytes.max(1));
    buffer.resize(bytes, 0);
    buffer
}

fn ends(counts: &[usize]) -> Vec<usize> {
    counts
        .iter()
        .scan(0, |sum, &count| {
            *sum += count;
            Some(*sum)
        })
        .collect()
}

/// Sizes and displacements of a round as C ints.
fn table(parts: &[std::ops::Range<usize>]) -> (Vec<i32>, Vec<i32>) {
    let sizes: Vec<i32> = parts.iter().map(|part| bounded(part.len())).collect();
    let displacements = sizes
        .iter()
        .scan(0i32, |sum, &size| {
            let at = *sum;
            *sum += size;
            Some(at)
        })
        .collect();
    (sizes, displacements)
}

fn bounded(count: usize) -> i32 {
    i32::try_from(count).expect("a round is at most 2^30 bytes")
}

fn index(count: i32) -> usize {
    usize::try_from(count).expect("a count is not negative")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_cover_a_message_once_and_an_empty_one_still_takes_a_round() {
        for (count, longest, limit) in [(10, 10, 3), (0, 10, 3), (10, 10, 10), (10, 10, 11), (0, 0, 4)] {
            let parts: Vec<_> = Rounds::over(longest, limit).map(|round| round.part(count)).collect();
            assert!(!parts.is_empty());
            assert_eq!(parts.iter().map(ExactSizeIterator::len).sum::<usize>(), count);
            assert!(parts.windows(2).all(|two| two[0].end == two[1].start));
        }
    }
}
