//! Page runs of all ranks, one after another past every rank.
//!
//! ```text
//!   step      0     1     2     3        rank r holds run (r − step) mod R; while it computes on that run, the run
//!   rank 0   [0]   [3]   [2]   [1]       leaves for rank r+1 and the next one arrives from rank r−1. A rank never
//!   rank 1   [1]   [0]   [3]   [2]       holds more than two runs that are not its own.
//! ```

use tch::{Device, Tensor};

use super::outgoing;
use crate::layout::Run;
use crate::tensor::boundary::storage_bytes;
use crate::tensor::{gpu, views};
use crate::units::{Rank, as_dim};
use crate::watch::{Held, Ledger, Purpose, Purse};
use crate::world::Axis;

/// A run on its way, with its bytes counted while this rank holds it.
struct Travelling {
    /// As messages take it, in host memory.
    wire: Vec<Tensor>,
    held: Vec<Held>,
}

impl Travelling {
    /// This rank's own run sets out.
    fn own(planes: &[Tensor], alone: bool) -> Travelling {
        // A rank that is alone sends nothing: nothing needs to lie in host memory.
        let wire = |plane: &Tensor| if alone { plane.shallow_clone() } else { pinned(plane) };
        Travelling { wire: planes.iter().map(wire).collect(), held: Vec::new() }
    }

    /// The run where it is computed with. On a CPU that is where it arrived.
    fn here(&mut self, device: Device, ledger: &Ledger) -> Vec<Tensor> {
        let here: Vec<Tensor> = self.wire.iter().map(|plane| plane.to_device(device)).collect();
        if device != Device::Cpu {
            self.held.push(foreign(ledger, Purse::Device, &here));
        }
        here
    }
}

/// A run as it leaves for another rank: from a GPU through pinned memory, which it leaves at the bus's own rate.
fn pinned(x: &Tensor) -> Tensor {
    if x.device() == Device::Cpu {
        return outgoing(x);
    }
    let mut held = page_locked(x);
    held.copy_(&x.detach());
    held
}

/// Waits for the device before the host writes into pinned memory by itself: a block that was let go may still be read or
/// written by what was asked of the device before. (Work of the device among itself is ordered by its streams.)
fn quiet(device: Device, ranks: usize) -> Device {
    if ranks > 1 {
        gpu::synchronize(device).unwrap_or_else(|error| panic!("{error}"));
    }
    device
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
pub fn ring<E>(
    axis: &Axis,
    ledger: &Ledger,
    own: Vec<Tensor>,
    run_of: impl Fn(Rank) -> Run,
    mut visit: impl FnMut(&Run, &[Tensor]) -> Result<(), E>,
) -> Result<(), E> {
    let (me, size) = (axis.rank().0, axis.size());
    let device = quiet(device_of(&own), size);
    let mut holding = Travelling::own(&own, size == 1);
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
        let mut next = arriving(&holding.wire, next_rows, device, ledger);
        let leaving: Vec<&[u8]> = holding.wire.iter().map(views::view).collect();
        axis.ring_step(&leaving, next.wire.iter_mut().map(views::view_mut).collect(), || compute(&here));
        here = next.here(device, ledger);
        holding = next;
    }
    outcome
}

/// As [`ring`], with sums that travel with their run and come home: `home` are this rank's sums for its own run, one
/// tensor a plane, contiguous on CPU, and `sum_rows` tells how many rows those of a rank's run have. Each rank adds its
/// share while the run is there; one hop more brings them back to their owner, who gets them complete. Sums of a run are
/// formed in ring order from its owner on, the same in every run of the program.
pub fn ring_home(
    axis: &Axis,
    ledger: &Ledger,
    own: Vec<Tensor>,
    home: Vec<Tensor>,
    shape: &Travel,
    mut visit: impl FnMut(&Run, &[Tensor], &[Tensor]),
) -> Vec<Tensor> {
    let (me, size) = (axis.rank().0, axis.size());
    let device = quiet(device_of(&own), size);
    let mut holding = Travelling::own(&own, size == 1);
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
            let mut arriving_next = arriving(&holding.wire, rows, device, ledger);
            let leaving: Vec<&[u8]> = holding.wire.iter().map(views::view).collect();
            let into = arriving_next.wire.iter_mut().map(views::view_mut).collect();
            axis.ring_step(&leaving, into, || compute(&here));
            here = arriving_next.here(device, ledger);
            holding = arriving_next;
        }
        if size == 1 {
            break;
        }
        // Sums leave only when this rank's share is in them, so they cannot overlap with it.
        let leaving_sums: Vec<Tensor> = sums.iter().map(pinned).collect();
        let mut sums_next = arriving(&leaving_sums, (shape.sum_rows)(next), device, ledger);
        let leaving: Vec<&[u8]> = leaving_sums.iter().map(views::view).collect();
        axis.ring_step(&leaving, sums_next.wire.iter_mut().map(views::view_mut).collect(), || ());
        sums = sums_next.here(device, ledger);
        held = sums_next.held;
    }
    drop(held);
    sums
}

/// Where a run is computed with.
fn device_of(planes: &[Tensor]) -> Device {
    planes.first().map_or(Device::Cpu, Tensor::device)
}

/// Which runs travel in [`ring_home`], and how many rows their sums have.
pub struct Travel<'a> {
    /// The run of a rank.
    pub run_of: &'a dyn Fn(Rank) -> Run,
    /// Rows of the sums of a rank's run.
    pub sum_rows: &'a dyn Fn(Rank) -> i64,
}

/// Counts planes of another rank.
fn foreign(ledger: &Ledger, purse: Purse, planes: &[Tensor]) -> Held {
    ledger.hold(Purpose::Foreign, purse, planes.iter().map(storage_bytes).sum())
}

/// Buffers for the run that comes next, to be computed with on `device`.
fn arriving(like: &[Tensor], rows: i64, device: Device, ledger: &Ledger) -> Travelling {
    let planes: Vec<Tensor> = like
        .iter()
        .map(|plane| {
            let mut shape = plane.size();
            shape[0] = rows;
            let empty = Tensor::empty(shape, (plane.kind(), Device::Cpu));
            if device == Device::Cpu { empty } else { page_locked(&empty) }
        })
        .collect();
    let purse = if device == Device::Cpu { Purse::Device } else { Purse::Host };
    let held = vec![foreign(ledger, purse, &planes)];
    Travelling { wire: planes, held }
}
