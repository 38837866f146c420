//! Page runs of all ranks, one after another past every rank.
//!
//! ```text
//!   step      0     1     2     3        rank r holds run (r − step) mod R; while it computes on that run, the run
//!   rank 0   [0]   [3]   [2]   [1]       leaves for rank r+1 and the next one arrives from rank r−1. A rank never
//!   rank 1   [1]   [0]   [3]   [2]       holds more than two runs that are not its own.
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

/// A run on its way, with its bytes counted while this rank holds it.
struct Travelling {
    /// As messages take it: in host memory, or on the GPU where the transport goes from GPU to GPU.
    wire: Vec<Tensor>,
    held: Vec<Held>,
}

/// How the ring of one axis turns, for runs that are computed with on one device.
struct Turn<'a> {
    axis: &'a Axis,
    ledger: &'a Ledger,
    /// Where runs are computed with.
    device: Device,
    /// From GPU to GPU, if there is such a transport.
    link: Option<&'a Link>,
}

impl<'a> Turn<'a> {
    fn of(axis: &'a Axis, ledger: &'a Ledger, own: &[Tensor]) -> Turn<'a> {
        let device = own.first().map_or(Device::Cpu, Tensor::device);
        let link = direct::transport(axis, device);
        if axis.size() > 1 && link.is_none() {
            // The host is about to write into pinned memory by itself: a block that was let go may still be read or
            // written by what was asked of the device before. (Work of the device among itself is ordered by its streams.)
            gpu::synchronize(device).unwrap_or_else(|error| panic!("{error}"));
        }
        Turn { axis, ledger, device, link }
    }

    /// A run or sums of this rank as they leave for another one; from a GPU through pinned memory, which they leave at the
    /// bus's own rate, or as they are.
    fn leaving(&self, planes: &[Tensor]) -> Vec<Tensor> {
        let wire = |plane: &Tensor| match (self.device, self.link) {
            // A rank that is alone sends nothing: nothing needs to lie in host memory.
            _ if self.axis.size() == 1 => plane.shallow_clone(),
            (Device::Cpu, _) => outgoing(plane),
            (_, Some(_)) => plane.detach().contiguous(),
            (_, None) => {
                let mut held = page_locked(plane);
                held.copy_(&plane.detach());
                held
            }
        };
        planes.iter().map(wire).collect()
    }

    /// Buffers for the run that comes next.
    fn arriving(&self, like: &[Tensor], rows: i64) -> Travelling {
        let plane = |plane: &Tensor| {
            let mut shape = plane.size();
            shape[0] = rows;
            let device = if self.link.is_some() { self.device } else { Device::Cpu };
            let empty = Tensor::empty(shape, (plane.kind(), device));
            if self.device == Device::Cpu || self.link.is_some() { empty } else { page_locked(&empty) }
        };
        let planes: Vec<Tensor> = like.iter().map(plane).collect();
        let through_host = self.device != Device::Cpu && self.link.is_none();
        let space = if through_host { MemorySpace::Host } else { MemorySpace::Device };
        let held = vec![foreign(self.ledger, space, &planes)];
        Travelling { wire: planes, held }
    }

    /// One step: `leaving` goes to the next rank and `arriving` fills from the previous one while `work` runs.
    fn step(&self, leaving: &[Tensor], arriving: &mut Travelling, work: impl FnOnce()) {
        let (me, size) = (self.axis.rank().0, self.axis.size());
        let Some(link) = self.link else {
            let leaving: Vec<&[u8]> = leaving.iter().map(views::view).collect();
            let into = arriving.wire.iter_mut().map(views::view_mut).collect();
            return self.axis.ring_step(&leaving, into, work);
        };
        let (next, previous) = (Rank((me + 1) % size), Rank((me + size - 1) % size));
        let send = direct::parcels(leaving, next);
        let done = direct::exchange(link, send, direct::parcels(&arriving.wire, previous));
        work();
        direct::wait(&done);
    }

    /// A run that has arrived, where it is computed with. On a CPU, and from another GPU, that is where it arrived.
    fn here(&self, arrived: &mut Travelling) -> Vec<Tensor> {
        let here: Vec<Tensor> = arrived.wire.iter().map(|plane| plane.to_device(self.device)).collect();
        if self.device != Device::Cpu && self.link.is_none() {
            arrived.held.push(foreign(self.ledger, MemorySpace::Device, &here));
        }
        here
    }
}

/// Pinned memory of the shape of `like`.
fn page_locked(like: &Tensor) -> Tensor {
    gpu::pinned_like(like).unwrap_or_else(|error| panic!("{error}"))
}

/// Shows `visit` every rank's run, this rank's own first, then from the next lower rank on round the ring. `run_of`
/// tells which run of a rank travels; `own` are this rank's filled rows of it, one tensor a plane, contiguous on CPU.
/// `visit` is not called for a run without rows, but the ring turns all the same.
///
/// # Errors
/// The first error of `visit`; the ring has been completed by then, so that no rank is left waiting.
pub fn visit_runs<E>(
    axis: &Axis,
    ledger: &Ledger,
    own: Vec<Tensor>,
    run_of: impl Fn(Rank) -> Run,
    mut visit: impl FnMut(&Run, &[Tensor]) -> Result<(), E>,
) -> Result<(), E> {
    let (me, size) = (axis.rank().0, axis.size());
    let turn = Turn::of(axis, ledger, &own);
    let mut holding = Travelling { wire: turn.leaving(&own), held: Vec::new() };
    let mut here = own;
    let mut outcome = Ok(());
    for step in 0..size {
        let run = run_of(Rank((me + size - step) % size));
        let mut compute = |planes: &[Tensor]| {
            if outcome.is_ok() && run.rows().0 > 0 {
                outcome = visit(&run, planes);
            }
        };
        if step + 1 == size {
            compute(&here);
            break;
        }
        let next_rows = as_dim(run_of(Rank((me + 2 * size - step - 1) % size)).rows().0);
        let mut next = turn.arriving(&holding.wire, next_rows);
        turn.step(&holding.wire, &mut next, || compute(&here));
        here = turn.here(&mut next);
        holding = next;
    }
    outcome
}

/// As [`visit_runs`], with sums that travel with their run and come home: `home` are this rank's sums for its own run, one
/// tensor a plane, contiguous on CPU, and `sum_rows` tells how many rows those of a rank's run have. Each rank adds its
/// share while the run is there; one hop more brings them back to their owner, who gets them complete. Sums of a run are
/// formed in ring order from its owner on, the same in every run of the program.
pub fn visit_runs_with_sums(
    axis: &Axis,
    ledger: &Ledger,
    own: Vec<Tensor>,
    home: Vec<Tensor>,
    shape: &RingRuns,
    mut visit: impl FnMut(&Run, &[Tensor], &[Tensor]),
) -> Vec<Tensor> {
    let (me, size) = (axis.rank().0, axis.size());
    let turn = Turn::of(axis, ledger, &own);
    let mut holding = Travelling { wire: turn.leaving(&own), held: Vec::new() };
    let (mut here, mut sums) = (own, home);
    // Bytes of foreign sums, counted while this rank holds them.
    let mut held = Vec::new();
    for step in 0..size {
        let run = (shape.run_of)(Rank((me + size - step) % size));
        let next = Rank((me + 2 * size - step - 1) % size);
        let mut compute = |planes: &[Tensor]| {
            if run.rows().0 > 0 {
                visit(&run, planes, &sums);
            }
        };
        if step + 1 == size {
            compute(&here);
        } else {
            let rows = as_dim((shape.run_of)(next).rows().0);
            let mut arriving = turn.arriving(&holding.wire, rows);
            turn.step(&holding.wire, &mut arriving, || compute(&here));
            here = turn.here(&mut arriving);
            holding = arriving;
        }
        if size == 1 {
            break;
        }
        // Sums leave only when this rank's share is in them, so they cannot overlap with it.
        let leaving = turn.leaving(&sums);
        let mut arriving = turn.arriving(&leaving, (shape.sum_rows)(next));
        turn.step(&leaving, &mut arriving, || ());
        sums = turn.here(&mut arriving);
        held = arriving.held;
    }
    drop(held);
    sums
}

/// Which runs travel in [`visit_runs_with_sums`], and how many rows their sums have.
pub struct RingRuns<'a> {
    /// The run of a rank.
    pub run_of: &'a dyn Fn(Rank) -> Run,
    /// Rows of the sums of a rank's run.
    pub sum_rows: &'a dyn Fn(Rank) -> i64,
}

/// Counts planes of another rank.
fn foreign(ledger: &Ledger, space: MemorySpace, planes: &[Tensor]) -> Held {
    ledger.hold(Purpose::Foreign, space, planes.iter().map(storage_bytes).sum())
}
