//! Tensors between host memory and the device: beside the computation on a GPU, at once on a CPU.
//!
//! What leaves a GPU must stay until it has left, and what arrives must not be read before: an [`Outbox`] holds the one,
//! an [`Arrival`] guards the other. All order is the streams' own; the host waits for nothing on the common path.

use std::cell::Cell;

use tch::{Device, Tensor};

use crate::runtime::units::from_index;
use crate::tensor::boundary::{MemorySpace, within};
use crate::tensor::gpu::{self, Event};
use crate::tensor::{self};

/// Tensors on their way to host memory.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    leaving: Vec<(Tensor, Event)>,
}

impl Outbox {
    /// The copy of `x` in host memory, over `place` or in memory of its own. On a GPU its values are there after the next
    /// [`Outbox::settle`], for whatever is asked of the device from then on.
    pub(super) fn send(&mut self, x: &Tensor, place: Option<&Tensor>) -> Result<Tensor, tensor::Error> {
        let x = x.detach().contiguous();
        if x.device() == Device::Cpu {
            return Ok(match place {
                Some(place) => {
                    place.shallow_clone().copy_(&x);
                    place.shallow_clone()
                }
                None => within(MemorySpace::Host, || x.copy()),
            });
        }
        let kept = place.map_or_else(|| gpu::pinned_like(&x), |place| Ok(place.shallow_clone()))?;
        if small(&x) {
            gpu::copy_by_kernel(&kept, &x)?;
        } else if x.numel() > 0 {
            let left = gpu::copy_out(&kept, &x)?;
            self.leaving.push((x, left));
        }
        Ok(kept)
    }

    /// The computation goes on after all that is under way has left; its memory is free from then on.
    pub(super) fn settle(&mut self) -> Result<(), tensor::Error> {
        for (_, left) in &self.leaving {
            left.wait()?;
        }
        self.leaving.clear();
        Ok(())
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        for (_, left) in &self.leaving {
            // A copy that fails shows itself at the next wait of the computation.
            let _ = left.finish();
        }
    }
}

fn small(x: &Tensor) -> bool {
    let bytes = x.numel() * x.kind().elt_size_in_bytes();
    (1..=gpu::KERNEL_COPY_BYTES_MAX).contains(&from_index(bytes))
}

/// Whether copies to this device run beside the computation.
pub(super) fn beside(device: Device) -> bool {
    device != Device::Cpu
}

/// A tensor's way to the device.
#[derive(Debug)]
pub(super) struct Arrival {
    event: Option<Event>,
    awaited: Cell<bool>,
}

impl Arrival {
    /// The computation goes on after the tensor has arrived.
    pub(super) fn wait(&self) -> Result<(), tensor::Error> {
        self.event.as_ref().map_or(Ok(()), Event::wait)?;
        self.awaited.set(true);
        Ok(())
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        if let Some(event) = self.event.as_ref().filter(|_| !self.awaited.get()) {
            // Nobody wanted it; its memory must not be used for something else before the copy has ended.
            let _ = event.finish();
        }
    }
}

/// The copy of `held` on `device`, and when it may be read.
pub(super) fn fetch(held: &Tensor, device: Device) -> Result<(Tensor, Arrival), tensor::Error> {
    if device == Device::Cpu || held.numel() == 0 {
        return Ok((held.copy().to_device(device), Arrival { event: None, awaited: Cell::new(true) }));
    }
    let here = Tensor::empty(held.size(), (held.kind(), device));
    if small(held) {
        gpu::copy_by_kernel(&here, held)?;
        return Ok((here, Arrival { event: None, awaited: Cell::new(true) }));
    }
    let event = gpu::copy_in(&here, held)?;
    Ok((here, Arrival { event: Some(event), awaited: Cell::new(false) }))
}
