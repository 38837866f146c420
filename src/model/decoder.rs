//! The unit that phases drive: a block is segment A, a mixer, segment B, and phases know nothing of what is inside.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::lora::Adapters;
use super::mixer::{Mixer, MixerInput};
use super::planes::Planes;
use crate::runtime::units::LayerIndex;
use crate::tensor::kernels::Kernel;

/// Output of segment A for some rows.
#[derive(Debug)]
pub struct Projected {
    /// Input of the mixer; for attention q, k, v.
    pub input: MixerInput,
    /// What segment B reads past the mixer; an output gate, for example. No planes for dense decoders.
    pub handed: Planes,
}

impl Projected {
    /// The rows of all `parts`, one part after another.
    #[must_use]
    pub fn join(parts: Vec<Projected>) -> Projected {
        let mut queries = Vec::with_capacity(parts.len());
        let mut state = Vec::with_capacity(parts.len());
        let mut handed = Vec::with_capacity(parts.len());
        for part in parts {
            queries.push(part.input.queries);
            state.push(part.input.state);
            handed.push(part.handed);
        }
        let input = MixerInput { queries: Planes::join(queries), state: Planes::join(state) };
        Projected { input, handed: Planes::join(handed) }
    }

    /// Every tensor of it; gradients of it stand in the same order.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.input.queries, &self.input.state, &self.handed].into_iter().flat_map(Planes::tensors)
    }
}

/// A decoder as a stack of blocks over rows of hidden states, [t, w] in the model's dtype.
pub trait Decoder {
    /// How many blocks.
    fn layers(&self) -> usize;

    /// Width of a hidden state.
    fn width(&self) -> i64;

    /// Tokens of the vocabulary.
    fn vocabulary(&self) -> i64;

    /// The model's dtype.
    fn kind(&self) -> Kind;

    /// The weights' device.
    fn device(&self) -> Device;

    /// Rows of the embedding, [t, w].
    fn embed(&self, ids: &[i64]) -> Tensor;

    /// Segment A: norm, projections, rotation. Rows stand at `positions`.
    fn project(&self, layer: LayerIndex, x_tw: &Tensor, positions: Range<i64>, adapters: &Adapters) -> Projected;

    /// What mixes rows in this layer.
    fn mixer(&self, layer: LayerIndex) -> &dyn Mixer;

    /// Segment B: output projection, residual, feed-forward. `mixed` is the mixer's output for these rows.
    fn finish(&self, layer: LayerIndex, x_tw: &Tensor, mixed: &Tensor, handed: &Planes, adapters: &Adapters) -> Tensor;

    /// What computes attention where no window cuts it; must be equal on all ranks.
    fn kernel(&self) -> Kernel;

    /// Last norm and head: logits of rows, [t, v].
    fn logits(&self, x_tw: &Tensor) -> Tensor;
}
