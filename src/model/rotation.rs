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
