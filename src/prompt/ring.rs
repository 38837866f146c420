//! Page runs of all ranks, passed from rank to rank round the context-parallel group.
//!
//! ```text
//!   step      0     1     2     3        Rank r holds run (r − step) mod R. While it computes with that run, it sends
//!   rank 0   [0]   [3]   [2]   [1]       the run to rank r+1 and receives the next one from rank r−1, so it never holds
//!   rank 1   [1]   [0]   [3]   [2]       more than two runs of other ranks. Run q is a stretch of the token line:
//!   rank 2   [2]   [1]   [0]   [3]
//!   rank 3   [3]   [2]   [1]   [0]         |--0--|--1--|--2--|--3--|--3--|--2--|--1--|--0--|   first and second chunks
//! ```

use tch::{Device, Tensor};

use crate::prompt::layout::Run;
use crate::runtime::memory::{Held, Ledger, MemorySpace, Purpose};
use crate::runtime::units::{Rank, as_dim};
use crate::tensor::boundary::storage_bytes;
use crate::tensor::link::Link;
use crate::tensor::{gpu, views};
use crate::world::Axis;
use crate::world::exchange::{direct, outgoing};

/// Tensors that are sent or received, with their bytes in the ledger if they are another rank's.
struct Transfer {
    /// In host memory, or on the GPU if the transport goes from GPU to GPU.
    planes: Vec<Tensor>,
    held: Vec<Held>,
}

/// The ring of one axis, for runs on one device.
struct Ring<'a> {
    axis: &'a Axis,
    ledger: &'a Ledger,
    /// Where runs are computed with.
    device: Device,
    /// The transport from GPU to GPU, if one is open.
    link: Option<&'a Link>,
}

impl<'a> Ring<'a> {
    fn new(axis: &'a Axis, ledger: &'a Ledger, own: &[Tensor]) -> Ring<'a> {
        let device = own.first().map_or(Device::Cpu, Tensor::device);
        let link = direct::transport(axis, device);
        if axis.size() > 1 && link.is_none() {
            // The host is about to write into pinned memory. Queued work of the device may still use a block of it that
            // has been freed. (Work of the device alone is ordered by its streams.)
            gpu::synchronize(device).unwrap_or_else(|error| panic!("{error}"));
        }
        Ring { axis, ledger, device, link }
    }

    /// The rank whose run this rank holds at `step`.
    fn owner_at(&self, step: usize) -> Rank {
        let size = self.axis.size();
        Rank((self.axis.rank().0 + size - step % size) % size)
    }

    /// This rank's planes, ready to be sent: from a GPU through pinned memory, unless the transport reads the GPU.
    fn outgoing(&self, planes: &[Tensor]) -> Vec<Tensor> {
        let to_wire = |plane: &Tensor| match (self.device, self.link) {
            // A rank alone sends nothing.
            _ if self.axis.size() == 1 => plane.shallow_clone(),
            (Device::Cpu, _) => outgoing(plane),
            (_, Some(_)) => plane.detach().contiguous(),
            (_, None) => {
                let mut pinned = pinned_like(plane);
                pinned.copy_(&plane.detach());
                pinned
            }
        };
        planes.iter().map(to_wire).collect()
    }

    /// Buffers for planes like `like` with `rows` rows.
    fn incoming(&self, like: &[Tensor], rows: i64) -> Transfer {
        let buffer = |plane: &Tensor| {
            let mut shape = plane.size();
            shape[0] = rows;
            let device = if self.link.is_some() { self.device } else { Device::Cpu };
            let empty = Tensor::empty(shape, (plane.kind(), device));
            if self.device == Device::Cpu || self.link.is_some() { empty } else { pinned_like(&empty) }
        };
        let planes: Vec<Tensor> = like.iter().map(buffer).collect();
        let through_host = self.device != Device::Cpu && self.link.is_none();
        let space = if through_host { MemorySpace::Host } else { MemorySpace::Device };
        let held = vec![hold_foreign(self.ledger, space, &planes)];
        Transfer { planes, held }
    }

    /// Sends `outgoing` to the next rank and fills `incoming` from the previous one while `work` runs.
    fn step(&self, outgoing: &[Tensor], incoming: &mut Transfer, work: impl FnOnce()) {
        let Some(link) = self.link else {
            let send: Vec<&[u8]> = outgoing.iter().map(views::view).collect();
            let receive = incoming.planes.iter_mut().map(views::view_mut).collect();
            return self.axis.ring_step(&send, receive, work);
        };
        let rank = self.axis.rank().0;
        let size = self.axis.size();
        let next = Rank((rank + 1) % size);
        let previous = Rank((rank + size - 1) % size);
        let send = direct::messages(outgoing, next);
        let receive = direct::messages(&incoming.planes, previous);
        let done = direct::exchange(self.axis, link, send, receive);
        work();
        direct::wait(&done);
    }

    /// Received planes on the device of the computation: received there already, on a CPU and from another GPU.
    fn to_device(&self, received: &mut Transfer) -> Vec<Tensor> {
        let planes: Vec<Tensor> = received.planes.iter().map(|plane| plane.to_device(self.device)).collect();
        if self.device != Device::Cpu && self.link.is_none() {
            received.held.push(hold_foreign(self.ledger, MemorySpace::Device, &planes));
        }
        planes
    }
}

/// Pinned memory of the shape of `like`.
fn pinned_like(like: &Tensor) -> Tensor {
    gpu::pinned_like(like).unwrap_or_else(|error| panic!("{error}"))
}

/// Counts planes of another rank.
fn hold_foreign(ledger: &Ledger, space: MemorySpace, planes: &[Tensor]) -> Held {
    ledger.hold(Purpose::Foreign, space, planes.iter().map(storage_bytes).sum())
}

/// Calls `visit` with every rank's run: this rank's own run first, then that of the next lower rank, and so on round
/// the ring. `run_of` returns the run of a rank; `own` are the filled rows of this rank's run, one tensor for each
/// plane. `visit` is not called for a run without rows, but the run is still passed on.
///
/// # Errors
/// The first error of `visit`; all runs are passed on nevertheless, so that no rank is left waiting.
pub fn visit_runs<E>(
    axis: &Axis,
    ledger: &Ledger,
    own: Vec<Tensor>,
    run_of: impl Fn(Rank) -> Run,
    mut visit: impl FnMut(&Run, &[Tensor]) -> Result<(), E>,
) -> Result<(), E> {
    let ring = Ring::new(axis, ledger, &own);
    let mut current = Transfer { planes: ring.outgoing(&own), held: Vec::new() };
    let mut planes_here = own;
    let mut outcome = Ok(());
    for step in 0..axis.size() {
        let run = run_of(ring.owner_at(step));
        let mut compute = |planes: &[Tensor]| {
            if outcome.is_ok() && run.rows().0 > 0 {
                outcome = visit(&run, planes);
            }
        };
        if step + 1 == axis.size() {
            compute(&planes_here);
            break;
        }
        let next_rows = as_dim(run_of(ring.owner_at(step + 1)).rows().0);
        let mut next = ring.incoming(&current.planes, next_rows);
        ring.step(&current.planes, &mut next, || compute(&planes_here));
        planes_here = ring.to_device(&mut next);
        current = next;
    }
    outcome
}

/// The runs of [`visit_runs_with_sums`], and the rows of their sums.
pub struct RingRuns<'a> {
    /// The run of a rank.
    pub run_of: &'a dyn Fn(Rank) -> Run,
    /// Rows of the sums for a rank's run.
    pub sum_rows: &'a dyn Fn(Rank) -> i64,
}

/// As [`visit_runs`], with sums that are passed on with their run and return to the run's owner. `own_sums` are this
/// rank's sums for its own run, one tensor for each plane. Each rank adds its part while it holds the run; one more
/// step returns the sums to their owner, complete. Sums are formed in ring order from the owner on, so they repeat bit
/// for bit.
pub fn visit_runs_with_sums(
    axis: &Axis,
    ledger: &Ledger,
    own: Vec<Tensor>,
    own_sums: Vec<Tensor>,
    runs: &RingRuns,
    mut visit: impl FnMut(&Run, &[Tensor], &[Tensor]),
) -> Vec<Tensor> {
    let ring = Ring::new(axis, ledger, &own);
    let mut current = Transfer { planes: ring.outgoing(&own), held: Vec::new() };
    let mut planes_here = own;
    let mut sums = own_sums;
    // Counts other ranks' sums while this rank holds them.
    let mut held = Vec::new();
    for step in 0..axis.size() {
        let run = (runs.run_of)(ring.owner_at(step));
        let next_owner = ring.owner_at(step + 1);
        let mut compute = |planes: &[Tensor]| {
            if run.rows().0 > 0 {
                visit(&run, planes, &sums);
            }
        };
        if step + 1 == axis.size() {
            compute(&planes_here);
        } else {
            let next_rows = as_dim((runs.run_of)(next_owner).rows().0);
            let mut next = ring.incoming(&current.planes, next_rows);
            ring.step(&current.planes, &mut next, || compute(&planes_here));
            planes_here = ring.to_device(&mut next);
            current = next;
        }
        if axis.size() == 1 {
            break;
        }
        // Sums are sent only after this rank has added its part, so sending cannot overlap with the computation.
        let outgoing = ring.outgoing(&sums);
        let mut incoming = ring.incoming(&outgoing, (runs.sum_rows)(next_owner));
        ring.step(&outgoing, &mut incoming, || ());
        sums = ring.to_device(&mut incoming);
        held = incoming.held;
    }
    drop(held);
    sums
}
