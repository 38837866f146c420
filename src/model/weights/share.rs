//! What one rank does of work that ranks share, and what it holds of weights that they spread.

use std::ops::Range;

use crate::runtime::units::from_index;
use crate::world::Axis;

/// The share of a checkpoint's tensors whose digests one rank makes: every `ranks`-th one from `rank` on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "the type's comment explains both")]
pub struct Share {
    pub rank: usize,
    pub ranks: usize,
}

impl Share {
    /// The share of a rank that is alone.
    pub const ALL: Share = Share { rank: 0, ranks: 1 };
}

/// The part of every layer's experts that one rank holds: consecutive ones, shares as equal as they can be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ExpertShare {
    /// Ordinal of the rank among those that share the experts.
    pub index: usize,
    /// How many ranks share the experts.
    pub of: usize,
}

impl ExpertShare {
    /// All experts on one rank.
    pub const ALL: ExpertShare = ExpertShare { index: 0, of: 1 };

    /// The share of this rank among those of `ep`, the ranks over which experts are spread.
    #[must_use]
    pub fn of(ep: &Axis) -> ExpertShare {
        ExpertShare { index: ep.rank().0, of: ep.size() }
    }

    /// Global numbers of the experts that this rank holds of `count`; empty where there are more ranks than experts.
    #[must_use]
    pub fn range(self, count: u64) -> Range<u64> {
        let of = from_index(self.of.max(1));
        let start = |index: usize| from_index(index) * count / of;
        start(self.index)..start(self.index + 1)
    }
}
