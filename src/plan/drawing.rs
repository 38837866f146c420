//! One token of several answers: the bytes that a device reads for it, and whether kernels of a decode step compute it.

use tch::Kind;

use crate::model::shape::{Layer, Mix, Shape};
use crate::runtime::units::{as_dim, float};
use crate::tensor::decode::{Sizes, covers};

/// What a token of several answers reads, on one rank.
#[derive(Clone, Copy, Debug)]
pub struct TokenReads {
    /// Prompt positions whose pages this rank has.
    pub prompt_rows: f64,
    /// Answers that get a token.
    pub answers: f64,
    /// Rows of each answer that lie on this rank.
    pub own_rows: f64,
    /// Ranks that share the prompt.
    pub sharers: f64,
    /// Share of the experts that lie on this rank.
    pub expert_share: f64,
    /// Elements of all adapters, which are applied in the model's dtype.
    pub adapters: u64,
    /// Bytes of an element in the model's dtype.
    pub model_bytes: f64,
    /// Bytes of an element in the accumulation dtype.
    pub acc_bytes: f64,
}

/// Bytes that are read for one token of all answers: weights but the embedding once for all of them, experts as if all were
/// chosen, adapters, and keys and values of the prompt once and of each answer.
#[must_use]
pub fn token_bytes(shape: &Shape, of: &TokenReads) -> f64 {
    let head = float(shape.width) * float(shape.vocabulary);
    let weights = float(shape.sum(|layer| layer.parameters)) + float(shape.experts()) * of.expert_share + head;
    let states: f64 = shape.layers.iter().map(|layer| state_bytes(layer, of)).sum();
    (weights + float(of.adapters)) * of.model_bytes + states
}

/// Whether there are kernels of a decode step on a GPU for a model in `kind` with adapters of this `rank`.
pub(super) fn has_step(shape: &Shape, kind: Kind, rank: u64) -> bool {
    let covered = |layer: &Layer| match layer.mix {
        Mix::Grouped { query_heads, kv_heads, head_dim, gated: false, .. } if layer.experts == 0 => {
            let sizes = Sizes {
                head_dim: as_dim(head_dim),
                heads_each: as_dim(query_heads / kv_heads.max(1)),
                width: as_dim(shape.width),
                ffn_width: as_dim(layer.ffn_width),
                rank: as_dim(rank),
            };
            covers(kind, &sizes)
        }
        _ => false,
    };
    shape.layers.iter().all(covered)
}

/// Bytes of the state that the mixer of a layer reads.
fn state_bytes(layer: &Layer, of: &TokenReads) -> f64 {
    let widths = layer.mix.widths();
    let answers = of.answers * of.own_rows;
    match layer.mix {
        Mix::Grouped { window, .. } => {
            let seen = window.map_or(of.prompt_rows, |window| of.prompt_rows.min(float(window)));
            (seen + answers) * float(widths.state) * of.model_bytes
        }
        Mix::Latent { index, .. } => {
            let chosen = of.answers * float(index.top) / of.sharers * float(widths.carries);
            let scored = if index.owner { (of.prompt_rows + answers) * float(index.dim) } else { 0.0 };
            (chosen + scored) * of.model_bytes
        }
        Mix::Delta { .. } => {
            // Read, and written again.
            let (inputs, state) = layer.mix.border();
            2.0 * of.answers * (float(inputs) * of.model_bytes + float(state) * of.acc_bytes)
        }
    }
}
