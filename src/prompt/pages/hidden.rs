//! Hidden states of answers and tail rows in host memory, staged one (span, layer) at a time.
//!
//! Slot (span, layer) stores the input of that layer's block. Later the gradient of that input replaces it, so the pool
//! never takes more than spans × rows × width × layers × dtype.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Deref;

use tch::{Device, Tensor};

use super::Residency;
use super::transit::{self, Arrival, Outbox};
use crate::runtime::memory::{Held, Ledger, MemorySpace, Purpose};
use crate::runtime::units::{Bytes, LayerIndex};
use crate::tensor;
use crate::tensor::boundary::storage_bytes;

/// Address of a hidden state: the rows it belongs to, and the layer that reads it.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Slot {
    /// Pack of answers, or answer where each is kept apart; 0 in the tail's own pool.
    pub span: usize,
    /// The layer whose block reads it.
    pub layer: LayerIndex,
}

/// A slot that is being copied to the device.
#[derive(Debug)]
struct Arriving {
    // Before the tensor, because fields are dropped in order: the copy must end before its target is freed.
    arrival: Arrival,
    x: Tensor,
    held: Held,
}

/// Hidden states between phases, in host memory or on the device.
#[derive(Debug)]
pub struct HiddenPool {
    // First, because fields are dropped in order: copies must end before their memory is freed.
    outbox: RefCell<Outbox>,
    /// Slots whose copies have started before they are staged.
    arriving: RefCell<BTreeMap<Slot, Arriving>>,
    slots: BTreeMap<Slot, (Tensor, Held)>,
    residency: Residency,
    purpose: Purpose,
    device: Device,
    ledger: Ledger,
}

impl HiddenPool {
    /// An empty pool that counts its bytes in `ledger`.
    #[must_use]
    pub fn new(residency: Residency, purpose: Purpose, ledger: Ledger) -> Self {
        HiddenPool {
            slots: BTreeMap::new(),
            residency,
            purpose,
            device: Device::Cpu,
            ledger,
            outbox: RefCell::default(),
            arriving: RefCell::default(),
        }
    }

    /// Copies `x_tw` into the slot; a slot of the same shape is overwritten in place.
    ///
    /// # Errors
    /// When there is no more memory for it.
    pub fn put(&mut self, slot: Slot, x_tw: &Tensor) -> Result<(), tensor::Error> {
        self.device = x_tw.device();
        self.arriving.get_mut().remove(&slot);
        let outbox = self.outbox.get_mut();
        let place = self.slots.get(&slot).map(|(held, _)| held);
        let place = place.filter(|held| held.size() == x_tw.size() && held.kind() == x_tw.kind());
        if let Some(place) = place {
            match self.residency {
                Residency::Host => drop(outbox.send(x_tw, Some(place))?),
                Residency::Device => place.shallow_clone().copy_(&x_tw.detach()),
            }
            return Ok(());
        }
        let kept = match self.residency {
            Residency::Host => outbox.send(x_tw, None)?,
            Residency::Device => x_tw.detach().contiguous().copy(),
        };
        let held = self.ledger.hold(self.purpose, self.residency.space(), storage_bytes(&kept));
        self.slots.insert(slot, (kept, held));
        Ok(())
    }

    /// Makes the computation wait until stored tensors have left the device; then their memory there is free. Staging a
    /// slot does the same.
    ///
    /// # Errors
    /// When a copy has failed.
    pub fn settle(&mut self) -> Result<(), tensor::Error> {
        self.outbox.get_mut().settle()
    }

    /// Whether the slot is filled.
    #[must_use]
    pub fn holds(&self, slot: Slot) -> bool {
        self.slots.contains_key(&slot)
    }

    /// Starts to copy a filled slot to the device, for a later [`HiddenPool::stage`].
    ///
    /// # Errors
    /// When the copy cannot be made.
    pub fn prefetch(&self, slot: Slot) -> Result<(), tensor::Error> {
        let Some((held, _)) = self.slots.get(&slot) else { return Ok(()) };
        if self.residency == Residency::Device || !transit::is_concurrent(self.device) {
            return Ok(());
        }
        self.outbox.borrow_mut().settle()?;
        let arriving = self.fetch(held)?;
        self.arriving.borrow_mut().insert(slot, arriving);
        Ok(())
    }

    fn fetch(&self, waiting: &Tensor) -> Result<Arriving, tensor::Error> {
        let (x, arrival) = transit::fetch(waiting, self.device)?;
        let held = self.ledger.hold(Purpose::Stage, MemorySpace::Device, storage_bytes(&x));
        Ok(Arriving { arrival, x, held })
    }

    /// The hidden state on the device, until the stage is dropped.
    ///
    /// # Errors
    /// When the copy cannot be made.
    ///
    /// # Panics
    /// When the slot is empty: the phases read only what they wrote.
    pub fn stage(&self, slot: Slot) -> Result<StagedHidden, tensor::Error> {
        let (held, _) = self.slots.get(&slot).expect("a slot is read after it was written");
        if self.residency == Residency::Device {
            return Ok(StagedHidden::of(held.shallow_clone()));
        }
        self.outbox.borrow_mut().settle()?;
        let arriving = self.arriving.borrow_mut().remove(&slot);
        let Arriving { x, arrival, held } = arriving.map_or_else(|| self.fetch(held), Ok)?;
        arrival.wait()?;
        Ok(StagedHidden { x, poison: true, _held: Some(held) })
    }

    /// Empties a slot; its memory is freed.
    pub fn release(&mut self, slot: Slot) {
        self.arriving.get_mut().remove(&slot);
        self.slots.remove(&slot);
    }

    /// Bytes of all filled slots.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.slots.values().map(|(held, _)| storage_bytes(held)).sum()
    }
}

/// A hidden state on the device. Dropping it overwrites the buffer, if that is a copy.
#[derive(Debug)]
pub struct StagedHidden {
    x: Tensor,
    poison: bool,
    _held: Option<Held>,
}

impl StagedHidden {
    /// Wraps a tensor that is on the device already.
    #[must_use]
    pub fn of(x: Tensor) -> StagedHidden {
        StagedHidden { x, poison: false, _held: None }
    }

    /// Returns the tensor and never overwrites it.
    pub fn keep(mut self) -> Tensor {
        self.poison = false;
        self.x.shallow_clone()
    }
}

impl Deref for StagedHidden {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.x
    }
}

impl Drop for StagedHidden {
    fn drop(&mut self) {
        if self.poison {
            super::poison(&self.x);
        }
    }
}
