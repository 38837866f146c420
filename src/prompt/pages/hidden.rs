//! Hidden states of answers and tail rows in host memory, staged one (span, layer) at a time.
//!
//! Slot (span, layer) holds the input of that layer's block, and later, in its place, the gradient of that input: the
//! pool never takes more than spans × rows × width × layers × dtype.

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

/// Which hidden state: whose rows, and the layer it enters.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Slot {
    /// Answer index; 0 in the tail's own pool.
    pub span: usize,
    /// The layer whose block reads it.
    pub layer: LayerIndex,
}

/// A slot on its way to the device.
#[derive(Debug)]
struct Coming {
    // Before the tensor, because fields are dropped in order: the copy ends before the memory goes that it writes.
    arrival: Arrival,
    x: Tensor,
    held: Held,
}

/// Hidden states that wait, in host memory or where they were made.
#[derive(Debug)]
pub struct HiddenPool {
    // First, because fields are dropped in order: copies end before the memory goes that they read or write.
    outbox: RefCell<Outbox>,
    /// Slots that set out for the device before they were asked for.
    coming: RefCell<BTreeMap<Slot, Coming>>,
    slots: BTreeMap<Slot, (Tensor, Held)>,
    residency: Residency,
    purpose: Purpose,
    device: Device,
    ledger: Ledger,
}

impl HiddenPool {
    /// An empty pool that counts what it holds in `ledger`.
    #[must_use]
    pub fn new(residency: Residency, purpose: Purpose, ledger: Ledger) -> Self {
        HiddenPool {
            slots: BTreeMap::new(),
            residency,
            purpose,
            device: Device::Cpu,
            ledger,
            outbox: RefCell::default(),
            coming: RefCell::default(),
        }
    }

    /// Copies `x_tw` into the slot; a slot of the same shape is overwritten in place.
    ///
    /// # Errors
    /// When there is no more memory for it.
    pub fn put(&mut self, slot: Slot, x_tw: &Tensor) -> Result<(), tensor::Error> {
        self.device = x_tw.device();
        self.coming.get_mut().remove(&slot);
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

    /// The computation goes on after what was put has left the device; its memory there is free from then on. Until this,
    /// or until something is asked for, what was put stays alive there.
    ///
    /// # Errors
    /// When a copy had failed.
    pub fn settle(&mut self) -> Result<(), tensor::Error> {
        self.outbox.get_mut().settle()
    }

    /// Whether something was put there.
    #[must_use]
    pub fn holds(&self, slot: Slot) -> bool {
        self.slots.contains_key(&slot)
    }

    /// The slot sets out for the device, if it is there and waits elsewhere: it will be asked for soon.
    ///
    /// # Errors
    /// When the copy cannot be made.
    pub fn prefetch(&self, slot: Slot) -> Result<(), tensor::Error> {
        let Some((held, _)) = self.slots.get(&slot) else { return Ok(()) };
        if self.residency == Residency::Device || !transit::beside(self.device) {
            return Ok(());
        }
        self.outbox.borrow_mut().settle()?;
        let arriving = self.fetch(held)?;
        self.coming.borrow_mut().insert(slot, arriving);
        Ok(())
    }

    fn fetch(&self, waiting: &Tensor) -> Result<Coming, tensor::Error> {
        let (x, arrival) = transit::fetch(waiting, self.device)?;
        let held = self.ledger.hold(Purpose::Stage, MemorySpace::Device, storage_bytes(&x));
        Ok(Coming { arrival, x, held })
    }

    /// The slot on the device, until the stage is dropped.
    ///
    /// # Errors
    /// When the copy cannot be made.
    ///
    /// # Panics
    /// When nothing was put there: the phases read only what they wrote.
    pub fn stage(&self, slot: Slot) -> Result<StagedHidden, tensor::Error> {
        let (held, _) = self.slots.get(&slot).expect("a slot is read after it was written");
        if self.residency == Residency::Device {
            return Ok(StagedHidden::of(held.shallow_clone()));
        }
        self.outbox.borrow_mut().settle()?;
        let coming = self.coming.borrow_mut().remove(&slot);
        let Coming { x, arrival, held } = coming.map_or_else(|| self.fetch(held), Ok)?;
        arrival.wait()?;
        Ok(StagedHidden { x, poison: true, _held: Some(held) })
    }

    /// Forgets a slot.
    pub fn release(&mut self, slot: Slot) {
        self.coming.get_mut().remove(&slot);
        self.slots.remove(&slot);
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.slots.values().map(|(held, _)| storage_bytes(held)).sum()
    }
}

/// A hidden state on the device. Dropping it overwrites a buffer that was copied for it.
#[derive(Debug)]
pub struct StagedHidden {
    x: Tensor,
    poison: bool,
    _held: Option<Held>,
}

impl StagedHidden {
    /// A tensor that was made on the device and needs no stage.
    #[must_use]
    pub fn of(x: Tensor) -> StagedHidden {
        StagedHidden { x, poison: false, _held: None }
    }

    /// The tensor itself, for as long as it is needed.
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
            super::poison(std::slice::from_ref(&self.x));
        }
    }
}
