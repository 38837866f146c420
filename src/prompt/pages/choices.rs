//! What was chosen for rows of a span, between the passes that use it: index sets and experts.
//!
//! A choice is not a function of the numbers alone once they are rounded: two engines, or two runs of one, may choose
//! differently where scores are nearly equal. So what a forward pass chooses is kept for every later pass over the same rows.

use std::cell::RefCell;

use tch::Tensor;

use super::{HiddenPool, Residency, Slot, StagedHidden};
use crate::runtime::memory::{Ledger, Purpose};
use crate::runtime::units::{Bytes, LayerIndex};
use crate::tensor;

/// Choices of this rank's rows by span and layer. Every rank keeps a choice, or none does; a rank without rows keeps one
/// without rows.
#[derive(Debug)]
pub struct ChoicePool {
    index: RefCell<HiddenPool>,
    experts: RefCell<HiddenPool>,
}

/// What a choice is of: keys or experts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Choice {
    /// Positions of the keys that an index chose, [t, n] int32, in a slot of the layer that chose.
    Index,
    /// Experts, [t, k] int64.
    Experts,
}

impl ChoicePool {
    /// An empty pool that counts its bytes in `ledger`.
    #[must_use]
    pub fn new(residency: Residency, ledger: &Ledger) -> Self {
        let pool = || RefCell::new(HiddenPool::new(residency, Purpose::Choices, ledger.clone()));
        ChoicePool { index: pool(), experts: pool() }
    }

    fn pool(&self, choice: Choice) -> &RefCell<HiddenPool> {
        match choice {
            Choice::Index => &self.index,
            Choice::Experts => &self.experts,
        }
    }

    /// Whether the choice has been made.
    #[must_use]
    pub fn holds(&self, choice: Choice, slot: Slot) -> bool {
        self.pool(choice).borrow().holds(slot)
    }

    /// Keeps a choice.
    ///
    /// # Errors
    /// When there is no more memory for it.
    pub fn put(&self, choice: Choice, slot: Slot, rows: &Tensor) -> Result<(), tensor::Error> {
        self.pool(choice).borrow_mut().put(slot, rows)
    }

    /// The choice on the device; `None` where it has not been made.
    ///
    /// # Errors
    /// When it cannot be copied to the device.
    pub fn stage(&self, choice: Choice, slot: Slot) -> Result<Option<StagedHidden>, tensor::Error> {
        let pool = self.pool(choice).borrow();
        if pool.holds(slot) { pool.stage(slot).map(Some) } else { Ok(None) }
    }

    /// Makes the computation wait until choices that were put here have left the device; then their memory there is free.
    ///
    /// # Errors
    /// When a copy has failed.
    pub fn settle(&self) -> Result<(), tensor::Error> {
        self.index.borrow_mut().settle()?;
        self.experts.borrow_mut().settle()
    }

    /// Drops a choice; its memory is freed.
    pub fn release(&self, choice: Choice, slot: Slot) {
        self.pool(choice).borrow_mut().release(slot);
    }

    /// Bytes of all choices.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.index.borrow().bytes().0 + self.experts.borrow().bytes().0)
    }
}

/// The choices of one span.
#[derive(Clone, Copy, Debug)]
pub struct SpanChoices<'a> {
    pool: &'a ChoicePool,
    spans: Spans<'a>,
}

/// Which spans of a pool, of [`SpanChoices`].
#[derive(Clone, Copy, Debug)]
enum Spans<'a> {
    One(usize),
    /// Sequences of a packed span: the number of each one's own span, and its rows on this rank.
    Packed(&'a [(usize, i64)]),
}

impl ChoicePool {
    /// The choices of the span with this number.
    #[must_use]
    pub fn of(&self, span: usize) -> SpanChoices<'_> {
        SpanChoices { pool: self, spans: Spans::One(span) }
    }

    /// The choices of a packed span, which are kept for each of its `sequences` apart: the number of its own span, and its rows on
    /// this rank.
    #[must_use]
    pub fn of_packed<'a>(&'a self, sequences: &'a [(usize, i64)]) -> SpanChoices<'a> {
        let spans = match sequences {
            [(span, _)] => Spans::One(*span),
            _ => Spans::Packed(sequences),
        };
        SpanChoices { pool: self, spans }
    }
}

impl SpanChoices<'_> {
    /// As [`ChoicePool::put`].
    ///
    /// # Errors
    /// As [`ChoicePool::put`].
    pub fn put(&self, choice: Choice, layer: LayerIndex, rows: &Tensor) -> Result<(), tensor::Error> {
        let sequences = match self.spans {
            Spans::One(span) => return self.pool.put(choice, Slot { span, layer }, rows),
            Spans::Packed(sequences) => sequences,
        };
        let mut first = 0;
        for &(span, own) in sequences {
            self.pool.put(choice, Slot { span, layer }, &rows.narrow(0, first, own))?;
            first += own;
        }
        Ok(())
    }

    /// As [`ChoicePool::stage`].
    ///
    /// # Errors
    /// As [`ChoicePool::stage`].
    ///
    /// # Panics
    /// When some sequences of a packed span have a choice and others have none.
    pub fn stage(&self, choice: Choice, layer: LayerIndex) -> Result<Option<StagedHidden>, tensor::Error> {
        let sequences = match self.spans {
            Spans::One(span) => return self.pool.stage(choice, Slot { span, layer }),
            Spans::Packed(sequences) => sequences,
        };
        let mut parts = Vec::with_capacity(sequences.len());
        for &(span, _) in sequences {
            parts.extend(self.pool.stage(choice, Slot { span, layer })?.map(StagedHidden::keep));
        }
        assert!(
            parts.is_empty() || parts.len() == sequences.len(),
            "a pass chooses for all answers of a pack, or for none"
        );
        Ok((!parts.is_empty()).then(|| StagedHidden::of(Tensor::cat(&parts, 0))))
    }
}
