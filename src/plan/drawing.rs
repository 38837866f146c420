//! One token of several answers: the bytes that a device reads for it, and who draws it.

use crate::config::{DeviceChoice, RunConfig, Weights};
use crate::model::shape::{Layer, Mix, Shape};
use crate::model::token::{Drawer, DrawnWith, Reason};
use crate::plan::sizes::kind_of;
use crate::runtime::units::float;

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

/// Who draws `answers` answers of `config`; on a GPU one with enough shared memory.
pub(super) fn drawer(config: &RunConfig, shape: &Shape, answers: u64) -> Drawer {
    if config.run.device == DeviceChoice::Cpu {
        return Drawer::Operations(Reason::Cpu);
    }
    if config.tools.command.is_some() {
        return Drawer::Operations(Reason::Calls);
    }
    let with = DrawnWith {
        kind: kind_of(config.model.dtype),
        plain_weights: config.model.weights != Weights::Fp8,
        rank: config.lora.rank,
        answers,
    };
    Drawer::of(shape, &with)
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
