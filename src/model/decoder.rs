//! The unit that phases drive: a block is segment A, a mixer, segment B, and phases know nothing of what is inside.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::lora::Adapters;
use super::mixer::Mixer;
use crate::runtime::units::LayerIndex;
use crate::tensor::kernels::Kernel;

/// What segment A hands on.
#[derive(Debug)]
pub struct Projected {
    /// What the mixer reads, rows first; for attention q, k, v.
    pub mix: Vec<Tensor>,
    /// What only segment B reads, rows first; an output gate, for example. Empty for plain decoders.
    pub keep: Vec<Tensor>,
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

    /// Where the weights lie.
    fn device(&self) -> Device;

    /// Rows of the embedding, [t, w].
    fn embed(&self, ids: &[i64]) -> Tensor;

    /// Segment A: norm, projections, rotation. Rows stand at `positions`.
    fn project(&self, layer: LayerIndex, x_tw: &Tensor, positions: Range<i64>, adapters: &Adapters) -> Projected;

    /// What mixes rows in this layer.
    fn mixer(&self, layer: LayerIndex) -> &dyn Mixer;

    /// Segment B: output projection, residual, feed-forward. `mixed` is what the mixer made of these rows.
    fn finish(&self, layer: LayerIndex, x_tw: &Tensor, mixed: &Tensor, keep: &[Tensor], adapters: &Adapters) -> Tensor;

    /// What computes attention where no window cuts it; must be equal on all ranks.
    fn kernel(&self) -> Kernel;

    /// Last norm and head: logits of rows, [t, v].
    fn logits(&self, x_tw: &Tensor) -> Tensor;
}
