//! Which group comes next: a shuffled order that depends on the seed alone, so all ranks and later versions agree.
//!
//! Several sources share the groups out by their weights. Which source a group comes from depends on its place alone: of
//! the sources that are below their share (drawn < place × share, with places from 1) it is the one whose next group is due
//! first (the least (drawn + 1) / share; of equal ones the first). This is the quota method of Balinski and Young (The quota
//! method of apportionment, 1975): at every place each source has its share of the groups, rounded down or up.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::error::Error;
use super::random::Random;
use crate::runtime::units::{as_index, float, from_index};

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
    /// Sources with epochs of their own; the two fields above stay 0 then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    sources: Vec<SourceOrder>,
}

/// A position in the endless order of one source among several.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
struct SourceOrder {
    /// In the same unit for all sources, at least 1.
    weight: u64,
    groups: usize,
    /// Groups taken so far, over all epochs.
    drawn: u64,
}

impl SourceOrder {
    /// Whether the source is below its share of `place` groups, which have `weights` in all.
    fn is_below(&self, place: u64, weights: u128) -> bool {
        u128::from(self.drawn) * weights < u128::from(place) * u128::from(self.weight)
    }

    /// Whether its next group is due before the other's.
    fn is_before(&self, other: &SourceOrder) -> bool {
        let due = |source: &SourceOrder, weight: u64| (u128::from(source.drawn) + 1) * u128::from(weight);
        due(self, other.weight) < due(other, self.weight)
    }

    /// Whole passes so far, and groups taken within this one.
    fn place(&self) -> (u64, usize) {
        let groups = from_index(self.groups);
        (self.drawn / groups, as_index(self.drawn % groups))
    }
}

impl GroupOrder {
    /// The start of the order over `groups` groups. Without a seed, groups come in the order of the file.
    ///
    /// # Panics
    /// When `groups` is 0; a dataset holds at least one.
    #[must_use]
    pub fn new(seed: impl Into<Option<u64>>, groups: usize) -> GroupOrder {
        assert!(groups > 0, "an order needs at least one group");
        GroupOrder { seed: seed.into(), groups, epoch: 0, offset: 0, sources: Vec::new() }
    }

    /// The start of the order over several sources, each with its weight and its number of groups. The groups of a source
    /// follow those of the source before in the index.
    ///
    /// # Panics
    /// When there is no source, or a weight or a number of groups is 0.
    #[must_use]
    pub fn mixed(seed: impl Into<Option<u64>>, sources: &[(u64, usize)]) -> GroupOrder {
        assert!(sources.iter().all(|&(weight, groups)| weight > 0 && groups > 0), "a source gives groups");
        let groups = sources.iter().map(|(_, groups)| groups).sum();
        let source = |&(weight, groups): &(u64, usize)| SourceOrder { weight, groups, drawn: 0 };
        GroupOrder { sources: sources.iter().map(source).collect(), ..GroupOrder::new(seed, groups) }
    }

    /// Passes over each source so far, parts of one included; empty where there is one file.
    #[must_use]
    pub fn passes(&self) -> Vec<f64> {
        self.sources.iter().map(|source| float(source.drawn) / float(from_index(source.groups))).collect()
    }

    /// Whole passes over the only file so far.
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
        let drawn: u64 = self.sources.iter().map(|source| source.drawn).sum();
        self.epoch * from_index(self.groups) + from_index(self.offset) + drawn
    }

    /// Takes the next dataset index.
    pub fn next_index(&mut self) -> usize {
        self.take(1)[0]
    }

    /// Takes the next `count` dataset indices, across the end of an epoch if needed.
    pub fn take(&mut self, count: usize) -> Vec<usize> {
        if !self.sources.is_empty() {
            return self.take_mixed(count);
        }
        let mut taken = Vec::with_capacity(count);
        while taken.len() < count {
            let order = order(self.seed, self.epoch, self.groups);
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

    fn take_mixed(&mut self, count: usize) -> Vec<usize> {
        let mut orders: BTreeMap<(usize, u64), Vec<usize>> = BTreeMap::new();
        let mut taken = Vec::with_capacity(count);
        for _ in 0..count {
            let at = self.next_source();
            let source = &mut self.sources[at];
            let (epoch, offset) = source.place();
            let groups = source.groups;
            source.drawn += 1;
            let seed = self.seed.map(|seed| seed_of(seed, at));
            let within = orders.entry((at, epoch)).or_insert_with(|| order(seed, epoch, groups))[offset];
            let first: usize = self.sources[..at].iter().map(|source| source.groups).sum();
            taken.push(first + within);
        }
        taken
    }

    /// The source of the next group.
    fn next_source(&self) -> usize {
        let place = self.taken() + 1;
        let weights = self.sources.iter().map(|source| u128::from(source.weight)).sum();
        let below = (0..self.sources.len()).filter(|&at| self.sources[at].is_below(place, weights));
        let first =
            below.reduce(|one, other| if self.sources[other].is_before(&self.sources[one]) { other } else { one });
        first.expect("shares sum to 1, so at every place a source is below its own")
    }
}

/// A permutation of `groups` groups for an epoch; without a seed their order in the file.
fn order(seed: Option<u64>, epoch: u64, groups: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..groups).collect();
    if let Some(seed) = seed {
        Random::new(seed, epoch).shuffle(&mut order);
    }
    order
}

/// The seed of a source by its place in the list, so that sources of one length have permutations of their own.
fn seed_of(seed: u64, source: usize) -> u64 {
    if source == 0 { seed } else { Random::new(seed, u64::MAX - from_index(source)).next() }
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

    /// How many of `taken` lie in each source.
    fn counts(taken: &[usize], sources: &[(u64, usize)]) -> Vec<usize> {
        let mut first = 0;
        let of = |&(_, groups): &(u64, usize)| {
            let range = first..first + groups;
            first += groups;
            taken.iter().filter(|index| range.contains(index)).count()
        };
        sources.iter().map(of).collect()
    }

    #[test]
    fn at_every_place_each_source_has_its_share_to_less_than_one_group() {
        let mixes: [&[(u64, usize)]; 4] = [
            &[(3, 5), (1, 2)],
            &[(700_000, 3), (200_000, 11), (100_000, 1)],
            &[(1, 4), (1, 4), (1, 4)],
            &[(999_999, 2), (1, 2), (1_000_000, 3), (5, 1), (31, 7)],
        ];
        for mix in mixes {
            let taken = GroupOrder::mixed(7, mix).take(2000);
            let weights: u64 = mix.iter().map(|(weight, _)| weight).sum();
            for n in 0..=2000 {
                for (count, (weight, _)) in counts(&taken[..n], mix).into_iter().zip(mix) {
                    let (low, rest) = (from_index(n) * weight / weights, from_index(n) * weight % weights);
                    let high = low + u64::from(rest > 0);
                    assert!((low..=high).contains(&from_index(count)), "{count} of {n} in {mix:?}");
                }
            }
        }
        let taken = GroupOrder::mixed(7, &[(3, 5), (1, 2)]).take(400);
        assert_eq!(counts(&taken, &[(3, 5), (1, 2)]), [300, 100]);
    }

    #[test]
    fn every_prompt_of_a_source_comes_once_before_any_comes_again() {
        let mix = [(3, 5), (1, 5), (2, 3)];
        let mut cursor = GroupOrder::mixed(11, &mix);
        let taken = cursor.take(600);
        let mut orders = Vec::new();
        for (range, drawn) in [(0..5, 300), (5..10, 100), (10..13, 200)] {
            let own: Vec<usize> = taken.iter().copied().filter(|index| range.contains(index)).collect();
            assert_eq!(own.len(), drawn);
            for epoch in own.chunks_exact(range.len()) {
                let mut sorted = epoch.to_vec();
                sorted.sort_unstable();
                assert_eq!(sorted, range.clone().collect::<Vec<_>>());
            }
            orders.push(own.iter().map(|index| index - range.start).take(50).collect::<Vec<_>>());
        }
        assert_ne!(orders[0], orders[1], "two sources of one length have orders of their own");
        assert_eq!(cursor.passes(), [60.0, 20.0, 200.0 / 3.0]);
        let in_order = GroupOrder::mixed(None, &[(1, 2), (1, 3)]).take(8);
        assert_eq!(in_order, [0, 2, 1, 3, 0, 4, 1, 2]);
    }

    #[test]
    fn a_mix_is_a_function_of_seed_and_place_and_goes_on_from_any_of_them() {
        let mix = [(5, 7), (2, 3), (1, 4)];
        let whole = GroupOrder::mixed(3, &mix).take(60);
        for place in 0..60 {
            let mut cursor = GroupOrder::mixed(3, &mix);
            for _ in 0..place {
                cursor.next_index();
            }
            let mut restored: GroupOrder = serde_json::from_str(&serde_json::to_string(&cursor).unwrap()).unwrap();
            assert_eq!(restored.taken(), from_index(place));
            assert_eq!(restored.take(60 - place), whole[place..], "from {place}");
        }
        assert_ne!(GroupOrder::mixed(4, &mix).take(60), whole);
        // One source alone is one file.
        assert_eq!(GroupOrder::mixed(3, &[(9, 7)]).take(30), GroupOrder::new(3, 7).take(30));
    }

    #[test]
    fn the_cursor_of_one_file_is_written_as_it_always_was() {
        let text = serde_json::to_string(&GroupOrder::new(3, 5)).unwrap();
        assert_eq!(text, r#"{"seed":3,"groups":5,"epoch":0,"offset":0}"#);
    }

    #[test]
    fn rejects_a_cursor_of_another_dataset() {
        let error = GroupOrder::new(1, 9).check(10).unwrap_err();
        assert!(error.to_string().contains("over 9 groups, the dataset now holds 10"), "{error}");
    }
}
