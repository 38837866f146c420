//! Which group comes next: a shuffled order that depends on the seed alone, so all ranks and later versions agree.

use serde::{Deserialize, Serialize};

use super::error::Error;
use super::random::Random;
use crate::runtime::units::from_index;

/// A position in the endless order of a dataset: epoch after epoch, each with a permutation of its own.
///
/// All ranks hold the same cursor and take the same indices; data-parallel ranks pick different ones among them. A
/// checkpoint stores the cursor, and a resumed run continues from it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct GroupOrder {
    /// `None`: the order of the file.
    seed: Option<u64>,
    groups: usize,
    epoch: u64,
    offset: usize,
}

impl GroupOrder {
    /// The start of the order over `groups` groups. Without a seed, groups come in the order of the file.
    ///
    /// # Panics
    /// When `groups` is 0; a dataset holds at least one.
    #[must_use]
    pub fn new(seed: impl Into<Option<u64>>, groups: usize) -> GroupOrder {
        assert!(groups > 0, "an order needs at least one group");
        GroupOrder { seed: seed.into(), groups, epoch: 0, offset: 0 }
    }

    /// Whole passes over the dataset so far.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Groups taken within this pass.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Groups taken so far, over all epochs.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.epoch * from_index(self.groups) + from_index(self.offset)
    }

    /// Takes the next dataset index.
    pub fn next_index(&mut self) -> usize {
        self.take(1)[0]
    }

    /// Takes the next `count` dataset indices, across the end of an epoch if needed.
    pub fn take(&mut self, count: usize) -> Vec<usize> {
        let mut taken = Vec::with_capacity(count);
        while taken.len() < count {
            let order = self.order();
            let end = self.groups.min(self.offset + (count - taken.len()));
            taken.extend_from_slice(&order[self.offset..end]);
            self.offset = end;
            if end == self.groups {
                self.offset = 0;
                self.epoch += 1;
            }
        }
        taken
    }

    /// Checks that a stored cursor belongs to a dataset of `groups` groups.
    ///
    /// # Errors
    /// When the dataset has another size than the cursor's, or the stored offset is outside it.
    pub fn check(&self, groups: usize) -> Result<(), Error> {
        if self.groups == groups && self.offset < groups {
            return Ok(());
        }
        Err(Error::OtherDataset { saved: self.groups, found: groups })
    }

    fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.groups).collect();
        if let Some(seed) = self.seed {
            Random::new(seed, self.epoch).shuffle(&mut order);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_holds_every_group_once_in_another_order() {
        let mut cursor = GroupOrder::new(7, 13);
        let (first, second) = (cursor.take(13), cursor.take(13));
        assert_ne!(first, second);
        assert_eq!(cursor.epoch(), 2);
        for mut order in [first, second] {
            order.sort_unstable();
            assert_eq!(order, (0..13).collect::<Vec<_>>());
        }
    }

    #[test]
    fn without_a_seed_groups_come_in_file_order() {
        assert_eq!(GroupOrder::new(None, 3).take(7), [0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn taking_one_by_one_equals_taking_many_over_the_end_of_an_epoch() {
        let (mut one, mut many) = (GroupOrder::new(3, 5), GroupOrder::new(3, 5));
        let singles: Vec<usize> = (0..17).map(|_| one.next_index()).collect();
        assert_eq!(singles, many.take(17));
        assert_eq!((many.epoch(), many.offset(), many.taken()), (3, 2, 17));
        assert_eq!(one, many);
    }

    #[test]
    fn a_stored_cursor_continues_where_it_stopped() {
        let mut cursor = GroupOrder::new(11, 9);
        cursor.take(4);
        let mut restored: GroupOrder = serde_json::from_str(&serde_json::to_string(&cursor).unwrap()).unwrap();
        restored.check(9).unwrap();
        assert_eq!(restored.take(20), cursor.take(20));
    }

    #[test]
    fn rejects_a_cursor_of_another_dataset() {
        let error = GroupOrder::new(1, 9).check(10).unwrap_err();
        assert!(error.to_string().contains("over 9 groups, the dataset now holds 10"), "{error}");
    }
}
