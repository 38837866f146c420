//! State of all ranks, passed from rank to rank round the context-parallel group.
//!
//! ```text
//!   step      0     1     2     3        Rank r holds the state of rank (r − step) mod R. While it computes with it, it
//!   rank 0   [0]   [3]   [2]   [1]       sends it to rank r+1 and receives the next one from rank r−1, so it never holds
//!   rank 1   [1]   [0]   [3]   [2]       the state of more than two other ranks. That of rank q are its two chunks:
//!   rank 2   [2]   [1]   [0]   [3]
//!   rank 3   [3]   [2]   [1]   [0]         |--0--|--1--|--2--|--3--|--3--|--2--|--1--|--0--|
//! ```
//!
//! Both chunks travel together: the causal pairs of a rank's queries with the two chunks of another rank are as many on every
//! rank in every step, so that no rank waits for another. With one chunk after the other, rank R − 1 has nearly twice the pairs of
//! rank 0 in the first and next to none in the second.

use tch::{Device, Tensor};

use crate::runtime::memory::{Held, Ledger, MemorySpace, Purpose};
use crate::runtime::units::Rank;
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

    /// Buffers for planes like `like`, each with its number of rows.
    fn incoming(&self, like: &[&Tensor], rows: &[i64]) -> Transfer {
        let buffer = |(plane, &rows): (&&Tensor, &i64)| {
            let mut shape = plane.size();
            shape[0] = rows;
            let device = if self.link.is_some() { self.device } else { Device::Cpu };
            let empty = Tensor::empty(shape, (plane.kind(), device));
            if self.device == Device::Cpu || self.link.is_some() { empty } else { pinned_like(&empty) }
        };
        let planes: Vec<Tensor> = like.iter().zip(rows).map(buffer).collect();
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

/// Rows of the planes of a rank's state, the same for all ranks that ask.
pub type RowsOf<'a> = &'a dyn Fn(Rank) -> Vec<i64>;

/// Calls `visit` with every rank's state: this rank's own first, then that of the next lower rank, and so on round the ring. `own`
/// are this rank's planes, `rows_of` says how many rows those of a rank have; planes without rows are passed on too.
///
/// # Errors
/// The first error of `visit`, which is not called again; all state is passed on nevertheless, so that no rank is left waiting.
pub fn visit_runs<E>(
    axis: &Axis,
    ledger: &Ledger,
    own: Vec<Tensor>,
    rows_of: RowsOf,
    mut visit: impl FnMut(Rank, &[Tensor]) -> Result<(), E>,
) -> Result<(), E> {
    let ring = Ring::new(axis, ledger, &own);
    let mut current = Transfer { planes: ring.outgoing(&own), held: Vec::new() };
    let mut planes_here = own;
    let mut outcome = Ok(());
    for step in 0..axis.size() {
        let mut compute = |planes: &[Tensor]| {
            if outcome.is_ok() {
                outcome = visit(ring.owner_at(step), planes);
            }
        };
        if step + 1 == axis.size() {
            compute(&planes_here);
            break;
        }
        let mut next = ring.incoming(&current.planes.iter().collect::<Vec<_>>(), &rows_of(ring.owner_at(step + 1)));
        ring.step(&current.planes, &mut next, || compute(&planes_here));
        planes_here = ring.to_device(&mut next);
        current = next;
    }
    outcome
}

/// As [`visit_runs`], with sums that follow the state and return to its owner. `own_sums` are this rank's sums for its own state, one
/// tensor for each plane, of which `sum_rows` says the rows. What a rank adds while it holds some state is a sum of its own; the
/// sums of the ranks before it arrive meanwhile, and leave with its own part while it computes with the next state. So they are
/// formed in ring order from the owner on, and repeat bit for bit; only their way home has no computation beside it.
pub fn visit_runs_with_sums(
    axis: &Axis,
    ledger: &Ledger,
    own: Vec<Tensor>,
    own_sums: Vec<Tensor>,
    [rows_of, sum_rows]: [RowsOf; 2],
    mut visit: impl FnMut(Rank, &[Tensor], &[Tensor]),
) -> Vec<Tensor> {
    let ring = Ring::new(axis, ledger, &own);
    let size = axis.size();
    if size == 1 {
        visit(axis.rank(), &own, &own_sums);
        return own_sums;
    }
    let mut state = Transfer { planes: ring.outgoing(&own), held: Vec::new() };
    let mut planes_here = own;
    let mut part = own_sums;
    let mut part_held = None;
    // Complete up to this rank, for the state that was held the step before.
    let mut complete = Vec::new();
    for step in 0..size {
        let passed_on = if step + 1 < size { state.planes.len() } else { 0 };
        let mut like: Vec<&Tensor> = state.planes[..passed_on].iter().collect();
        let mut rows = if passed_on > 0 { rows_of(ring.owner_at(step + 1)) } else { Vec::new() };
        if step > 0 {
            like.extend(&part);
            rows.extend(sum_rows(ring.owner_at(step)));
        }
        let mut arriving = ring.incoming(&like, &rows);
        let mut leaving: Vec<Tensor> = state.planes[..passed_on].iter().map(Tensor::shallow_clone).collect();
        leaving.extend(ring.outgoing(&complete));
        ring.step(&leaving, &mut arriving, || visit(ring.owner_at(step), &planes_here, &part));
        let mut arrived = ring.to_device(&mut arriving);
        let sums = arrived.split_off(passed_on);
        for (sum, part) in sums.iter().zip(&part) {
            let _ = sum.shallow_clone().g_add_(part);
        }
        complete = if step == 0 { part } else { sums };
        planes_here = arrived;
        arriving.planes.truncate(passed_on);
        state = arriving;
        part = Vec::new();
        if step + 1 < size {
            let zeros = |(plane, rows): (&Tensor, i64)| {
                let mut shape = plane.size();
                shape[0] = rows;
                Tensor::zeros(shape, (plane.kind(), plane.device()))
            };
            part = complete.iter().zip(sum_rows(ring.owner_at(step + 1))).map(zeros).collect();
            part_held = Some(hold_foreign(ledger, MemorySpace::Device, &part));
        }
    }
    drop((part_held, planes_here));
    let like: Vec<&Tensor> = complete.iter().collect();
    let mut home = ring.incoming(&like, &sum_rows(axis.rank()));
    ring.step(&ring.outgoing(&complete), &mut home, || ());
    ring.to_device(&mut home)
}
