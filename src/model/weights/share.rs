//! What one rank does of work that ranks share, what it holds of weights that they spread, and in which form.

use std::ops::Range;

use tch::Kind;

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

/// How weights that a checkpoint holds in fp8 are held in memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Form {
    /// Dequantised to the model's dtype when they are loaded.
    Plain,
    /// As in the file, dequantised where they are used: the same numbers.
    Fp8,
}

impl Form {
    /// A sentence for the user on a checkpoint with so many weights in fp8, if there are any. `kind` is the model's dtype.
    pub(super) fn note(self, weights: usize, kind: Kind) -> Option<String> {
        let words = match self {
            Form::Plain => {
                format!("dequantised to {kind:?} while they are loaded (model.weights = \"fp8\" keeps them)")
            }
            Form::Fp8 => format!("kept so, and dequantised to {kind:?} where they are used"),
        };
        (weights > 0).then(|| format!("{weights} weights of the checkpoint are fp8: {words}"))
    }
}
