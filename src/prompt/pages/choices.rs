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

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    const LAYER: LayerIndex = LayerIndex(3);
    /// Numbers and rows of a pack's answers; of one no row is on this rank.
    const PACK: [(usize, i64); 3] = [(2, 2), (5, 0), (6, 3)];

    fn pool() -> ChoicePool {
        ChoicePool::new(Residency::Host, &Ledger::default())
    }

    /// What the pack's rows from `first` on have chosen.
    fn chosen(first: i64, rows: i64) -> Tensor {
        Tensor::arange_start(2 * first, 2 * (first + rows), (Kind::Int64, Device::Cpu)).view([rows, 2])
    }

    fn staged(choices: SpanChoices) -> Option<Tensor> {
        // What was staged before is overwritten when it is dropped.
        drop(choices.stage(Choice::Experts, LAYER).unwrap());
        choices.stage(Choice::Experts, LAYER).unwrap().map(StagedHidden::keep)
    }

    fn has(found: Option<Tensor>, expected: &Tensor) -> bool {
        found.is_some_and(|found| found.size() == expected.size() && found.equal(expected))
    }

    #[test]
    fn what_a_pack_has_chosen_is_the_choice_of_each_of_its_answers() {
        let pool = pool();
        pool.of_packed(&PACK).put(Choice::Experts, LAYER, &chosen(0, 5)).unwrap();
        assert!(has(staged(pool.of(2)), &chosen(0, 2)));
        assert!(has(staged(pool.of(5)), &chosen(2, 0)));
        assert!(has(staged(pool.of(6)), &chosen(2, 3)));
        assert!(staged(pool.of(3)).is_none(), "an answer of another pack");
        assert!(has(staged(pool.of_packed(&PACK)), &chosen(0, 5)));
        assert!(has(staged(pool.of_packed(&PACK[1..])), &chosen(2, 3)), "in a smaller pack");
        assert!(has(staged(pool.of_packed(&PACK[..1])), &chosen(0, 2)), "in a pack of one");
        assert!(pool.of_packed(&PACK).stage(Choice::Index, LAYER).unwrap().is_none(), "no keys were chosen");
        pool.of_packed(&PACK).put(Choice::Experts, LAYER, &chosen(7, 5)).unwrap();
        assert!(has(staged(pool.of(6)), &chosen(9, 3)), "chosen again");
    }

    #[test]
    fn what_answers_have_chosen_alone_is_the_choice_of_their_pack() {
        let pool = pool();
        assert!(staged(pool.of_packed(&PACK)).is_none(), "nothing was chosen yet");
        for (span, first, rows) in [(6, 2, 3), (2, 0, 2), (5, 2, 0)] {
            pool.of(span).put(Choice::Experts, LAYER, &chosen(first, rows)).unwrap();
        }
        assert!(has(staged(pool.of_packed(&PACK)), &chosen(0, 5)));
        assert_eq!(pool.bytes(), Bytes(5 * 2 * 8));
    }

    #[test]
    fn a_rank_without_rows_of_a_pack_keeps_a_choice_without_rows() {
        let pool = pool();
        let pack = [(0, 0), (4, 0)];
        pool.of_packed(&pack).put(Choice::Experts, LAYER, &chosen(0, 0)).unwrap();
        assert!(has(staged(pool.of(4)), &chosen(0, 0)));
        assert!(has(staged(pool.of_packed(&pack)), &chosen(0, 0)));
        assert!(staged(pool.of_packed(&[])).is_none(), "a pack of no answers has chosen nothing");
    }

    #[test]
    #[should_panic(expected = "for all answers of a pack")]
    fn a_pack_of_which_one_answer_has_not_chosen_is_refused() {
        let pool = pool();
        pool.of_packed(&PACK[..2]).put(Choice::Experts, LAYER, &chosen(0, 2)).unwrap();
        let _ = staged(pool.of_packed(&PACK));
    }
}
