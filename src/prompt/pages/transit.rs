//! Copies between host memory and the device: concurrent with the computation on a GPU, immediate on a CPU.
//!
//! A tensor that is copied from a GPU must live until the copy has ended: an [`Outbox`] keeps it. A tensor that is
//! copied to a GPU must not be read before: an [`Arrival`] guards it. Streams order the copies; normally the host does
//! not wait.

use std::cell::Cell;

use tch::{Device, Tensor};

use crate::runtime::units::from_index;
use crate::tensor::boundary::{MemorySpace, within};
use crate::tensor::gpu::{self, Event};
use crate::tensor::{self};

/// Tensors that are being copied to host memory.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    leaving: Vec<(Tensor, Event)>,
}

impl Outbox {
    /// Copies `x` to host memory, over `place` or to new memory. From a GPU, work queued after the next
    /// [`Outbox::settle`] sees the values.
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

    /// Makes the computation wait until all copies have ended; then the memory of their sources is free.
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
            // A failed copy is reported by the next wait of the computation.
            let _ = left.finish();
        }
    }
}

fn small(x: &Tensor) -> bool {
    let bytes = x.numel() * x.kind().elt_size_in_bytes();
    (1..=gpu::KERNEL_COPY_BYTES_MAX).contains(&from_index(bytes))
}

/// Whether copies to this device run concurrently with the computation.
pub(super) fn is_concurrent(device: Device) -> bool {
    device != Device::Cpu
}

/// The end of a copy to the device.
#[derive(Debug)]
pub(super) struct Arrival {
    event: Option<Event>,
    awaited: Cell<bool>,
}

impl Arrival {
    /// Makes the computation wait until the tensor has arrived.
    pub(super) fn wait(&self) -> Result<(), tensor::Error> {
        self.event.as_ref().map_or(Ok(()), Event::wait)?;
        self.awaited.set(true);
        Ok(())
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        if let Some(event) = self.event.as_ref().filter(|_| !self.awaited.get()) {
            // The tensor is not used; its memory must not be reused before the copy has ended.
            let _ = event.finish();
        }
    }
}

/// A copy of `held` on `device`, and the end of that copy.
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
