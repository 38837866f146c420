//! Hidden states of answers and tail rows in host memory, staged one (span, layer) at a time.
//!
//! Slot (span, layer) holds the input of that layer's block, and later, in its place, the gradient of that input: the
//! pool never takes more than spans × rows × width × layers × dtype.

use std::collections::BTreeMap;
use std::ops::Deref;

use tch::Tensor;

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

/// Hidden states that wait in host memory.
#[derive(Debug, Default)]
pub struct HiddenPool {
    slots: BTreeMap<Slot, (Tensor, Held)>,
    ledger: Ledger,
}

impl HiddenPool {
    /// An empty pool that counts in `ledger`.
    #[must_use]
    pub fn new(ledger: Ledger) -> Self {
        HiddenPool { slots: BTreeMap::new(), ledger }
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
        let kept = within(Purse::Host, || x_tw.detach().contiguous().copy());
        let held = self.ledger.hold(Purpose::Hidden, storage_bytes(&kept));
        self.slots.insert(slot, (kept, held));
    }

    /// A copy on the device, until the stage is dropped.
    ///
    /// # Panics
    /// When nothing was put there: the phases read only what they wrote.
    #[must_use]
    pub fn stage(&self, slot: Slot) -> StagedHidden {
        let (held, _) = self.slots.get(&slot).expect("a slot is read after it was written");
        StagedHidden(held.copy())
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

/// A hidden state on the device. Dropping it overwrites the buffer.
#[derive(Debug)]
pub struct StagedHidden(Tensor);

impl Deref for StagedHidden {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.0
    }
}

impl Drop for StagedHidden {
    fn drop(&mut self) {
        super::poison(std::slice::from_ref(&self.0));
    }
}
