//! Hidden states of answers and tail rows in host memory, staged one (span, layer) at a time.
//!
//! Slot (span, layer) holds the input of that layer's block, and later, in its place, the gradient of that input: the
//! pool never takes more than spans × rows × width × layers × dtype.

use std::collections::BTreeMap;
use std::ops::Deref;

use tch::Tensor;

use super::Residency;
use crate::tensor::boundary::{Purse, storage_bytes, within};
use crate::units::{Bytes, LayerIndex};
use crate::watch::{Held, Ledger, Purpose};

/// Which hidden state: whose rows, and the layer it enters.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Slot {
    /// Answer index; 0 in the tail's own pool.
    pub span: usize,
    /// The layer whose block reads it.
    pub layer: LayerIndex,
}

/// Hidden states that wait, in host memory or where they were made.
#[derive(Debug)]
pub struct HiddenPool {
    slots: BTreeMap<Slot, (Tensor, Option<Held>)>,
    residency: Residency,
    ledger: Ledger,
}

impl HiddenPool {
    /// An empty pool that counts what it holds in host memory in `ledger`.
    #[must_use]
    pub fn new(residency: Residency, ledger: Ledger) -> Self {
        HiddenPool { slots: BTreeMap::new(), residency, ledger }
    }

    /// Copies `x_tw` into the slot; a slot of the same shape is overwritten in place.
    pub fn put(&mut self, slot: Slot, x_tw: &Tensor) {
        if let Some((held, _)) = self.slots.get_mut(&slot)
            && held.size() == x_tw.size()
            && held.kind() == x_tw.kind()
        {
            held.copy_(&x_tw.detach());
            return;
        }
        let copy = || x_tw.detach().contiguous().copy();
        let kept = match self.residency {
            Residency::Host => within(Purse::Host, copy),
            Residency::Device => copy(),
        };
        let host = self.residency == Residency::Host;
        let held = host.then(|| self.ledger.hold(Purpose::Hidden, storage_bytes(&kept)));
        self.slots.insert(slot, (kept, held));
    }

    /// Whether something was put there.
    #[must_use]
    pub fn holds(&self, slot: Slot) -> bool {
        self.slots.contains_key(&slot)
    }

    /// The slot on the device, until the stage is dropped.
    ///
    /// # Panics
    /// When nothing was put there: the phases read only what they wrote.
    #[must_use]
    pub fn stage(&self, slot: Slot) -> StagedHidden {
        let (held, _) = self.slots.get(&slot).expect("a slot is read after it was written");
        match self.residency {
            Residency::Host => StagedHidden { x: held.copy(), poison: true },
            Residency::Device => StagedHidden { x: held.shallow_clone(), poison: false },
        }
    }

    /// Forgets a slot.
    pub fn release(&mut self, slot: Slot) {
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
}

impl StagedHidden {
    /// A tensor that was made on the device and needs no stage.
    #[must_use]
    pub fn of(x: Tensor) -> StagedHidden {
        StagedHidden { x, poison: false }
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
