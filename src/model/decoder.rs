//! The unit that phases drive: a block is segment A, a mixer, segment B, and phases know nothing of what is inside.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::experts::{Experts, Routed};
use super::latent::{IndexProjected, Indexer};
use super::lora::Adapters;
use super::mixer::{Mixer, MixerInput};
use super::planes::Planes;
use super::spec::Spec;
use super::weights::Weights;
use crate::prompt::layout::Positions;
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
    /// What `change` makes of every plane.
    #[must_use]
    pub fn map(&self, change: impl Fn(&Tensor) -> Tensor) -> Projected {
        let MixerInput { queries, state } = &self.input;
        let input = MixerInput { queries: queries.map(&change), state: state.map(&change) };
        Projected { input, handed: self.handed.map(&change) }
    }

    /// Every tensor of it; gradients of it stand in the same order.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.input.queries, &self.input.state, &self.handed].into_iter().flat_map(Planes::tensors)
    }
}

/// Which values of a segment's output are read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Values {
    /// All of them are.
    All,
    /// Those that a gradient depends on. What leaves the segment as the sum of a linear layer (v of plain attention, what the
    /// feed-forward adds) may be NaN: gradients go through it, and its product is left out.
    ForGradient,
    /// Those besides the state: keys may be left out, and values be NaN.
    WithoutState,
}

/// What segment B reads.
#[derive(Clone, Copy, Debug)]
pub struct FinishRows<'a> {
    /// The block's input, [t, w].
    pub x_tw: &'a Tensor,
    /// The mixer's output for these rows.
    pub mixed: &'a Tensor,
    /// What segment A has handed on.
    pub handed: &'a Planes,
    /// Experts that an earlier pass over the rows has chosen, [t, k] int64.
    pub kept: Option<&'a Tensor>,
}

/// Output of segment B for some rows.
#[derive(Debug)]
pub struct Finished {
    /// The block's output, [t, w]; in a layer with experts, without what they add. With [`Values::ForGradient`] without
    /// `unread_tw` too.
    pub y_tw: Tensor,
    /// What the feed-forward adds to the output where nobody reads that sum: the output's gradient is its gradient too.
    pub unread_tw: Option<Tensor>,
    /// What goes to experts, in a layer that has them.
    pub routed: Option<Routed>,
}

/// What a decoder consists of whose blocks are plain attention and a plain feed-forward.
#[derive(Clone, Copy)]
pub struct Dense<'a> {
    /// Its sizes and formulas.
    pub spec: &'a Spec,
    /// Its weights, none of them in fp8.
    pub weights: &'a Weights,
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
    fn project(
        &self,
        layer: LayerIndex,
        x_tw: &Tensor,
        positions: &Positions,
        adapters: &Adapters,
        values: Values,
    ) -> Projected;

    /// The query part of [`Decoder::project`] alone.
    fn project_queries(&self, layer: LayerIndex, x_tw: &Tensor, positions: &Positions, adapters: &Adapters) -> Planes {
        self.project(layer, x_tw, positions, adapters, Values::All).input.queries
    }

    /// The state part of [`Decoder::project`] alone.
    fn project_state(&self, layer: LayerIndex, x_tw: &Tensor, positions: &Positions, adapters: &Adapters) -> Planes {
        self.project(layer, x_tw, positions, adapters, Values::All).input.state
    }

    /// The layer whose index chooses the keys of this one; `None` where rows see all keys.
    fn index_owner(&self, layer: LayerIndex) -> Option<LayerIndex>;

    /// What chooses keys, in layers that own an index.
    fn indexer(&self, layer: LayerIndex) -> Option<&Indexer>;

    /// What the index reads and leaves of rows, in a layer that owns one; without a graph.
    fn project_index(
        &self,
        layer: LayerIndex,
        x_tw: &Tensor,
        positions: Range<i64>,
        adapters: &Adapters,
    ) -> IndexProjected;

    /// The keys of [`Decoder::project_index`] alone, [t, i].
    fn project_index_keys(
        &self,
        layer: LayerIndex,
        x_tw: &Tensor,
        positions: Range<i64>,
        adapters: &Adapters,
    ) -> Tensor;

    /// The experts of this layer, if it has them.
    fn experts(&self, layer: LayerIndex) -> Option<&Experts>;

    /// What mixes rows in this layer.
    fn mixer(&self, layer: LayerIndex) -> &dyn Mixer;

    /// Segment B: output projection, residual, feed-forward.
    fn finish(&self, layer: LayerIndex, rows: &FinishRows, adapters: &Adapters, values: Values) -> Finished;

    /// What computes attention where no window cuts it; must be equal on all ranks.
    fn kernel(&self) -> Kernel;

    /// Name of what computes attention, for receipts; must be equal on all ranks.
    fn attention_name(&self) -> &'static str;

    /// Name of what computes index scores; `None` where no layer has an index. Must be equal on all ranks.
    fn index_scores_name(&self) -> Option<&'static str>;

    /// Name of what computes gated delta rules, for receipts; `None` where no layer has one. Must be equal on all ranks.
    fn delta_rule_name(&self) -> Option<&'static str>;

    /// Sizes, formulas and weights, where every block is plain attention and a plain feed-forward; else `None`.
    fn dense(&self) -> Option<Dense<'_>>;

    /// Last norm and head: logits of rows, [t, v].
    fn logits(&self, x_tw: &Tensor) -> Tensor;
}
