//! One communicator with collectives over bytes that never exceed a C int.

use std::any::Any;
use std::cell::{Cell, OnceCell};
use std::thread;
use std::time::{Duration, Instant};

use mpi::datatype::{Partition, PartitionMut};
use mpi::request;
use mpi::topology::{Communicator, SimpleCommunicator};
use mpi::traits::{CommunicatorCollectives, Destination, Root, Source};

use crate::runtime::liveness::{Place, Waiting};
use crate::runtime::units::Rank;

/// Marks the message that ends a sleep.
const WAKE: i32 = 7;
/// Marks the message that tells rank 0 of a stop that was asked for elsewhere.
const HURRY: i32 = 8;
/// A sleeping rank looks up after so long at first, and then ever less often.
const NAP_LEAST: Duration = Duration::from_micros(200);
const NAP_MOST: Duration = Duration::from_millis(50);
/// How often a sleeping rank says that it is alive.
const ALIVE: Duration = Duration::from_secs(5);

/// Some ranks in a fixed order, and the collectives among them.
pub struct Axis {
    communicator: SimpleCommunicator,
    /// Most bytes that one rank sends in one MPI call.
    round_bytes: Cell<usize>,
    /// Another transport between the same ranks, for the module that knows it.
    transport: OnceCell<Box<dyn Any>>,
    /// Told of every call that ends only when other ranks come too.
    place: Place,
}

impl Axis {
    pub(super) fn new(communicator: SimpleCommunicator, place: Place) -> Self {
        let size = usize::try_from(communicator.size()).unwrap_or(1);
        // Receive displacements are C ints too, so the limit is shared by all ranks.
        Axis { communicator, round_bytes: Cell::new((1 << 30) / size.max(1)), transport: OnceCell::new(), place }
    }

    pub(super) fn split(&self, index: usize) -> Axis {
        let _waiting = self.place.waits();
        let part = self.communicator.split_by_color(super::color(index));
        Axis::new(part.expect("every rank names a color"), self.place.clone())
    }

    /// The same ranks on a communicator of their own; every rank takes part.
    #[must_use]
    pub fn duplicate(&self) -> Axis {
        self.split(0)
    }

    /// The ranks of the axis that share this rank's machine.
    pub(super) fn split_by_machine(&self) -> Axis {
        let _waiting = self.place.waits();
        Axis::new(self.communicator.split_shared(0), self.place.clone())
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

    /// Most bytes that one rank sends in one MPI call.
    #[must_use]
    pub fn round_bytes(&self) -> usize {
        self.round_bytes.get()
    }

    /// Makes rounds smaller, so that tests can see several of them. All ranks must agree.
    pub fn set_round_bytes(&self, bytes: usize) {
        self.round_bytes.set(bytes.clamp(1, (1 << 30) / self.size()));
    }

    /// The rank goes into a call of another library that ends only when other ranks of the axis come too.
    #[must_use]
    pub fn waits(&self) -> Waiting {
        self.place.waits()
    }

    /// Keeps another transport between these ranks' GPUs, for [`Axis::transport`]; the first one stays.
    pub fn set_transport<R: 'static>(&self, transport: R) {
        self.place.link();
        let _ = self.transport.set(Box::new(transport));
    }

    /// The transport of this kind, if one was opened.
    #[must_use]
    pub fn transport<R: 'static>(&self) -> Option<&R> {
        self.transport.get()?.downcast_ref()
    }

    /// Rank 0 ends what the others [`Axis::sleep`] through.
    pub(super) fn wake(&self) {
        for rank in 1..self.communicator.size() {
            self.communicator.process_at_rank(rank).send_with_tag(&[1u8][..], WAKE);
        }
    }

    /// Whether a sleeping rank has told rank 0 that a stop was asked for there.
    pub(super) fn is_hurried(&self) -> bool {
        let mut hurried = false;
        for rank in 1..self.communicator.size() {
            let process = self.communicator.process_at_rank(rank);
            if process.immediate_probe_with_tag(HURRY).is_some() {
                let (_, _): (Vec<u8>, _) = process.receive_vec_with_tag(HURRY);
                hurried = true;
            }
        }
        hurried
    }

    /// Sleeps until rank 0 calls [`Axis::wake`], without a core at work as in a collective; `alive` is called every few
    /// seconds.
    pub(super) fn sleep(&self, alive: impl Fn(), stop_requested: impl Fn() -> bool) {
        let _waiting = self.place.waits();
        let first = self.communicator.process_at_rank(0);
        let (mut nap, mut told, mut passed_on) = (NAP_LEAST, Instant::now(), false);
        while first.immediate_probe_with_tag(WAKE).is_none() {
            if !passed_on && stop_requested() {
                first.send_with_tag(&[1u8][..], HURRY);
                passed_on = true;
            }
            thread::sleep(nap);
            nap = (2 * nap).min(NAP_MOST);
            if told.elapsed() > ALIVE {
                told = Instant::now();
                alive();
            }
        }
        let (_, _): (Vec<u8>, _) = first.receive_vec_with_tag(WAKE);
    }

    /// Waits until every rank of the axis has come here.
    pub fn barrier(&self) {
        let _waiting = self.place.waits();
        super::barrier(&self.communicator);
    }

    /// Every rank's bytes, one after another in rank order, on every rank. `counts[r]` is what rank r sends.
    ///
    /// # Panics
    /// When `send` is not as long as this rank's count says.
    #[must_use]
    pub fn all_gather(&self, send: &[u8], counts: &[usize]) -> Vec<u8> {
        let me = self.rank().0;
        assert_eq!((send.len(), counts.len()), (counts[me], self.size()), "this rank sends what it announced");
        let ends = ends(counts);
        let mut gathered = vec![0u8; ends.last().copied().unwrap_or(0)];
        for round in Rounds::over(counts.iter().copied().max().unwrap_or(0), self.round_bytes()) {
            let part: Vec<_> = counts.iter().map(|&count| round.of(count)).collect();
            let (sizes, displacements) = table(&part);
            let mut received = solid(sizes.iter().map(|&size| index(size)).sum());
            let mut sent = solid(0);
            sent.extend_from_slice(&send[part[me].clone()]);
            let mut partition = PartitionMut::new(&mut received, &sizes[..], &displacements[..]);
            let waiting = self.place.waits();
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

    /// Slice r of `send` goes to rank r; what arrives lies in rank order. All ranks know all counts.
    ///
    /// # Panics
    /// When the counts do not add up to the bytes.
    #[must_use]
    pub fn all_to_all(&self, send: &[u8], send_counts: &[usize], receive_counts: &[usize], most: usize) -> Vec<u8> {
        assert_eq!(send.len(), send_counts.iter().sum::<usize>(), "this rank sends what it announced");
        let (send_ends, receive_ends) = (ends(send_counts), ends(receive_counts));
        let mut arrived = vec![0u8; receive_ends.last().copied().unwrap_or(0)];
        for round in Rounds::over(most, self.round_bytes()) {
            let out: Vec<_> = send_counts.iter().map(|&count| round.of(count)).collect();
            let into: Vec<_> = receive_counts.iter().map(|&count| round.of(count)).collect();
            let mut packed = solid(0);
            for (rank, range) in out.iter().enumerate() {
                let start = send_ends[rank] - send_counts[rank];
                packed.extend_from_slice(&send[start + range.start..start + range.end]);
            }
            let ((out_sizes, out_at), (in_sizes, in_at)) = (table(&out), table(&into));
            let mut received = solid(in_sizes.iter().map(|&size| index(size)).sum());
            let partition = Partition::new(&packed[..], &out_sizes[..], &out_at[..]);
            let mut target = PartitionMut::new(&mut received, &in_sizes[..], &in_at[..]);
            let waiting = self.place.waits();
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

    /// One step of a ring: the buffers of `send` go to the next rank and those of `receive` fill from the previous one
    /// while `work` runs. Both sides know all sizes.
    pub fn ring_step<T>(&self, send: &[&[u8]], receive: Vec<&mut [u8]>, work: impl FnOnce() -> T) -> T {
        let size = i32::try_from(self.size()).unwrap_or(1);
        let rank = self.communicator.rank();
        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        let limit = self.round_bytes();
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
            let result = work();
            let _waiting = self.place.waits();
            for request in arriving {
                request.wait();
            }
            for request in leaving {
                request.wait();
            }
            result
        })
    }

    /// Rank 0's bytes, on every rank.
    pub fn broadcast(&self, bytes: &mut [u8]) {
        let _waiting = self.place.waits();
        for part in bytes.chunks_mut(self.round_bytes()) {
            self.communicator.process_at_rank(0).broadcast_into(part);
        }
    }

    /// Every rank's bytes on rank 0, one after another in rank order; nothing elsewhere. All ranks send equally many,
    /// at most one round.
    #[must_use]
    pub fn gather_round(&self, send: &[u8]) -> Vec<u8> {
        let _waiting = self.place.waits();
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

    /// One number of every rank, on every rank.
    #[must_use]
    pub fn gather_numbers(&self, value: u64) -> Vec<u64> {
        let _waiting = self.place.waits();
        let mut all = vec![0u64; self.size()];
        self.communicator.all_gather_into(&value, &mut all[..]);
        all
    }

    /// One float of every rank, on every rank.
    #[must_use]
    pub fn gather_floats(&self, value: f64) -> Vec<f64> {
        let _waiting = self.place.waits();
        let mut all = vec![0f64; self.size()];
        self.communicator.all_gather_into(&value, &mut all[..]);
        all
    }

    pub(super) fn gather_codes(&self, value: i32) -> Vec<i32> {
        let _waiting = self.place.waits();
        let mut all = vec![0i32; self.size()];
        self.communicator.all_gather_into(&value, &mut all[..]);
        all
    }

    /// One text of every rank, on every rank.
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

/// Parts of a message, so that none exceeds a limit.
#[derive(Clone, Copy)]
struct Round {
    index: usize,
    limit: usize,
}

impl Round {
    /// This round's part of a message of `count` bytes.
    fn of(self, count: usize) -> std::ops::Range<usize> {
        (self.index * self.limit).min(count)..((self.index + 1) * self.limit).min(count)
    }
}

struct Rounds;

impl Rounds {
    /// As many rounds as the longest message needs, and at least one: every rank enters every collective.
    fn over(longest: usize, limit: usize) -> impl Iterator<Item = Round> {
        (0..longest.div_ceil(limit).max(1)).map(move |index| Round { index, limit })
    }
}

/// Zeros in memory of their own. An empty vector points at address 1, which is what Open MPI calls `MPI_IN_PLACE`: a
/// rank with nothing to send would be taken for one whose data lies in the receive buffer.
fn solid(bytes: usize) -> Vec<u8> {
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
            let parts: Vec<_> = Rounds::over(longest, limit).map(|round| round.of(count)).collect();
            assert!(!parts.is_empty());
            assert_eq!(parts.iter().map(ExactSizeIterator::len).sum::<usize>(), count);
            assert!(parts.windows(2).all(|two| two[0].end == two[1].start));
        }
    }
}
