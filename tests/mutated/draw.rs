//! Random numbers that are the same on every machine and in every version.

use longstraw::runtime::random::{STEP, split_mix};

/// A generator of its own for each case.
pub(crate) struct Draw {
    state: u64,
}

impl Draw {
    pub(crate) fn new(seed: u64) -> Draw {
        Draw { state: seed.wrapping_mul(STEP) }
    }

    fn next(&mut self) -> u64 {
        let number = split_mix(self.state);
        self.state = self.state.wrapping_add(STEP);
        number
    }

    /// A number below `count`, which is not 0.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        let count = u64::try_from(count).expect("64 bits");
        usize::try_from(self.next() % count).expect("below a usize")
    }

    /// True in `of` draws out of a hundred.
    pub(crate) fn percent(&mut self, of: usize) -> bool {
        self.below(100) < of
    }

    pub(crate) fn one<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}
