//! Random numbers whose sequence is part of the project: the same on every machine, rank and version.

use crate::runtime::random::{STEP, split_mix};

/// A sequence of numbers of [`split_mix`].
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A sequence of its own for every pair (`seed`, `stream`).
    #[must_use]
    pub fn new(seed: u64, stream: u64) -> Random {
        let mut random = Random { state: seed };
        random.state = random.next() ^ stream.wrapping_mul(0xd134_2543_de82_ef95);
        random
    }

    /// The sequence from a state on.
    #[must_use]
    pub fn from_state(state: u64) -> Random {
        Random { state }
    }

    /// 64 random bits.
    #[expect(clippy::should_implement_trait, reason = "it never ends, and an iterator's `next` says that it may")]
    pub fn next(&mut self) -> u64 {
        let number = split_mix(self.state);
        self.state = self.state.wrapping_add(STEP);
        number
    }

    /// A number below `bound`, every one equally likely to within `bound` / 2^64.
    ///
    /// # Panics
    /// When `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        assert!(bound > 0, "a number below 0 does not exist");
        let scaled = (u128::from(self.next()) * bound as u128) >> 64;
        usize::try_from(scaled).expect("a number below a usize is a usize")
    }

    /// Fisher–Yates, in place.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_never_changes() {
        let mut random = Random { state: 0 };
        // The first outputs of the published algorithm from state 0.
        assert_eq!([random.next(), random.next()], [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    }

    #[test]
    fn a_shuffle_keeps_every_item() {
        let mut items: Vec<usize> = (0..100).collect();
        Random::new(1, 2).shuffle(&mut items);
        assert_ne!(items, (0..100).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
    }
}
