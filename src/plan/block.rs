//! Bytes of one micro-block in a layer: segments, rows at experts, attention over gathered keys, and the choice of keys.

use super::addend::product;
use super::sizes::{Sizes, kind_of};
use crate::model::experts::PAIRS_MAX;
use crate::model::latent::GATHERED_ELEMENTS_MAX;
use crate::model::shape::{Index, Layer, Mix};
use crate::runtime::units::{as_dim, from_dim};
use crate::tensor::selection::Scoring;

/// The sizes of attention over latents in a layer.
#[derive(Clone, Copy)]
pub(super) struct LatentSizes {
    heads: u64,
    /// Elements of a key.
    key: u64,
    latent: u64,
    top: u64,
}

impl LatentSizes {
    /// Those of a layer; `None` where its rows meet in another way.
    pub(super) fn of(layer: &Layer) -> Option<LatentSizes> {
        match layer.mix {
            Mix::Latent { heads, latent, rotated, index } => {
                Some(LatentSizes { heads, key: latent + rotated, latent, top: index.top })
            }
            _ => None,
        }
    }
}

impl Sizes<'_> {
    /// Bytes of one micro-block of at most `rows` rows in a layer: the larger of segment B with its experts, and, where keys are
    /// gathered, of attention and of the choice of keys. `graph` tells whether it is a backward.
    pub(super) fn block(&self, layer: &Layer, rows: u64, graph: bool) -> u64 {
        let micro = self.config.memory.micro_rows().0.min(rows);
        let (width, ffn_width) = (self.shape.width, layer.ffn_width - layer.chosen * layer.expert_width);
        let wide = if graph { 7 * ffn_width + 8 * width } else { 3 * ffn_width + 4 * width };
        let gate = if graph { self.gating(layer) } else { 0 };
        let segment = product(&[micro, wide * self.model_bytes + gate]).0;
        let segment = segment.saturating_add(self.at_experts(layer, micro, graph));
        let Some(sizes) = LatentSizes::of(layer) else { return segment };
        // Queries and outputs stay while the block runs.
        let held = product(&[micro, sizes.heads, sizes.key + sizes.latent, self.model_bytes]).0;
        let attention = self.attending(sizes, micro, graph);
        let choosing = layer.mix.chooses().map_or(0, |index| self.choosing(index, micro));
        held.saturating_add(segment.max(attention)).max(choosing)
    }

    /// Bytes of a row that a graph keeps of the gate that multiplies the mixer's output: of attention the gate's sigmoid and the
    /// product; of a delta rule the output before and after its norm, z, and silu of z, in the accumulation dtype.
    fn gating(&self, layer: &Layer) -> u64 {
        match layer.mix {
            Mix::Grouped { gated: true, query_heads, head_dim, .. } => 2 * query_heads * head_dim * self.model_bytes,
            Mix::Delta { value_heads, value_dim, .. } => {
                value_heads * value_dim * (4 * self.acc_bytes + self.model_bytes)
            }
            _ => 0,
        }
    }

    /// Bytes of the pairs of some rows and their experts in one round, if all experts get as many rows.
    fn at_experts(&self, layer: &Layer, rows: u64, graph: bool) -> u64 {
        let spread = self.config.parallel.ep_size.max(1);
        let pairs = rows.saturating_mul(layer.chosen).min(from_dim(PAIRS_MAX) / spread);
        // Rows, and their gradient and its way back; gate, up and their products, or theirs and their gradients.
        let (rows, inners, wide_inners) = if graph { (3, 4, 2) } else { (2, 3, 0) };
        // Where pairs travel, a copy lies in the order of the senders.
        let rows = rows + u64::from(spread > 1);
        let model = rows * self.shape.width + inners * layer.expert_width;
        product(&[pairs, self.model_bytes * model + self.acc_bytes * wide_inners * layer.expert_width]).0
    }

    /// Bytes that attention over gathered keys takes besides queries and outputs of `rows` rows.
    pub(super) fn attending(&self, sizes: LatentSizes, rows: u64, graph: bool) -> u64 {
        let (model, acc) = (self.model_bytes, self.acc_bytes);
        let LatentSizes { heads, key, latent, .. } = sizes;
        let top = sizes.top.min(self.config.context.max_seq_len.0);
        let at_once = (from_dim(GATHERED_ELEMENTS_MAX) / (top * key).max(1)).clamp(1, rows.max(1));
        if graph {
            // Half as many queries: keys, their gradient in two parts; scores, weights and gradients.
            let part = key * model + (key + latent) * acc;
            let block = product(&[at_once.div_ceil(2), top, part + heads * (3 * acc + 2 * model)]).0;
            return product(&[rows, heads, latent * model + key * acc]).0.saturating_add(block);
        }
        let block = product(&[at_once, top, key * model + heads * (2 * acc + model)]).0;
        product(&[rows, heads, latent, acc]).0.saturating_add(block)
    }

    /// Bytes of the choice of keys for `rows` rows: index queries, and scratch of the form of the scores that takes more.
    pub(super) fn choosing(&self, index: Index, rows: u64) -> u64 {
        let kind = kind_of(self.config.model.dtype);
        // Scores are formed for a few thousand rows at a time, however many there are.
        let few = as_dim(rows.min(1 << 20));
        let scratch = |scoring: Scoring| scoring.scratch_bytes(few, as_dim(index.heads), kind, as_dim(index.top)).0;
        // The plain form takes as many keys at a time as there are, up to a bound; candidates are the keys and the best so far.
        let keys = self.config.context.max_seq_len.0;
        let of_a_key = index.heads * self.acc_bytes + 2 * (2 * (self.acc_bytes + 8) + 3 * 8);
        let plain = product(&[rows, keys, of_a_key]).0;
        let compiled = if self.copies_overlap { scratch(Scoring::Compiled) } else { 0 };
        let queries = product(&[rows, index.heads, index.dim, self.model_bytes]).0;
        queries.saturating_add(scratch(Scoring::Plain).min(plain).max(compiled))
    }
}
