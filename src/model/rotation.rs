//! Angles of rotary embeddings where the model computes.

use std::cell::RefCell;
use tch::{Device, Kind, Tensor};

use super::rope::{Rope, RopeSpec};
use crate::prompt::layout::Positions;
use crate::tensor::accumulation;

/// Cosine and sine of rows' rotations, [t, d/2] each, d the rotary width.
#[derive(Debug)]
pub(super) struct Angles {
    positions: Positions,
    pub(super) cos_td: Tensor,
    pub(super) sin_td: Tensor,
}

impl Angles {
    fn shallow_clone(&self) -> Angles {
        let (cos_td, sin_td) = (self.cos_td.shallow_clone(), self.sin_td.shallow_clone());
        Angles { positions: self.positions.clone(), cos_td, sin_td }
    }
}

/// One rotary embedding where the model computes.
pub(super) struct Rotation {
    rope: Rope,
    inverse_frequencies_d: Tensor,
    kind: Kind,
    /// Of the last single position, or of the last rows of several sequences.
    last: RefCell<Option<Angles>>,
}

impl Rotation {
    pub(super) fn new(spec: &RopeSpec, kind: Kind, device: Device) -> Rotation {
        let rope = Rope::new(spec);
        let inverse_frequencies_d = rope.frequencies(accumulation(kind), device);
        Rotation { rope, inverse_frequencies_d, kind, last: RefCell::default() }
    }

    /// Angles of rows at `positions`. All layers rotate a sampled token alike, and the rows of several answers, so those are kept.
    pub(super) fn angles(&self, positions: &Positions) -> Angles {
        if let Some(last) = self.last.borrow().as_ref().filter(|last| last.positions == *positions) {
            return last.shallow_clone();
        }
        let (cos_td, sin_td) = self.rope.tables(positions, &self.inverse_frequencies_d, self.kind);
        let angles = Angles { positions: positions.clone(), cos_td, sin_td };
        if positions.is_single() || positions.runs().len() > 1 {
            self.last.replace(Some(angles.shallow_clone()));
        }
        angles
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::model::rope::Scaling;

    fn rotation() -> Rotation {
        let spec = RopeSpec { theta: 100.0, rotary_dim: 8, scaling: Scaling::Default };
        Rotation::new(&spec, Kind::Double, Device::Cpu)
    }

    /// Cosines and sines of `runs` one after another, each from an embedding that has given no angles before.
    fn of_each(runs: &[Range<i64>]) -> (Tensor, Tensor) {
        let alone: Vec<Angles> = runs.iter().map(|run| rotation().angles(&run.clone().into())).collect();
        let join = |of: fn(&Angles) -> &Tensor| Tensor::cat(&alone.iter().map(of).collect::<Vec<_>>(), 0);
        (join(|angles| &angles.cos_td), join(|angles| &angles.sin_td))
    }

    fn check(rotation: &Rotation, runs: &[Range<i64>]) {
        let found = rotation.angles(&runs.iter().cloned().collect());
        let (cos_td, sin_td) = of_each(runs);
        assert_eq!(found.cos_td.size(), cos_td.size(), "{runs:?}");
        assert!(found.cos_td.allclose(&cos_td, 0.0, 1e-15, false), "{runs:?}");
        assert!(found.sin_td.allclose(&sin_td, 0.0, 1e-15, false), "{runs:?}");
    }

    #[test]
    fn angles_of_several_runs_are_those_of_each_run() {
        check(&rotation(), &[40..43, 40..42, 41..46]);
        // On a rank that has no row of the second sequence.
        check(&rotation(), &[40..43, 42..42, 41..42]);
    }

    #[test]
    fn angles_that_are_kept_serve_their_own_runs_alone() {
        let rotation = rotation();
        let (several, others, longer) = ([40..43, 40..42], [40..42, 40..43], [40..43, 40..43]);
        for runs in [&several, &others, &several, &longer, &several, &several] {
            check(&rotation, runs);
        }
        // A sampled token between them, and the same rows as one run.
        for position in [40, 41] {
            check(&rotation, std::slice::from_ref(&(position..position + 1)));
            check(&rotation, &several);
        }
        assert!(rotation.angles(&(40..45).into()).cos_td.allclose(&of_each(&[40..42, 42..45]).0, 0.0, 1e-15, false));
        check(&rotation, &several);
    }
}
