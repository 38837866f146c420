//! Addends that dense decoders do not have: states at a border, index sets, gathered latents, experts.
//!
//! No family that has them is trained yet. These addends follow the design, and no run has been compared with them:
//! docs/memory.md says which they are.

use super::addend::{Addend, Place, addend, product, within};
use super::sizes::Sizes;
use crate::model::shape::{INDEX_BYTES, Layer, Mix};
use crate::runtime::failure::Phase;
use crate::runtime::units::Bytes;

/// Positions of a chunk in the chunked form of a delta rule.
pub(super) const DELTA_CHUNK: u64 = 64;

/// Queries of one block while keys are chosen.
const CHOOSING: u64 = 64;

/// Phases that run layers, each with whether it has a graph.
const RUNNING: [(Phase, bool); 3] = [(Phase::Capture, false), (Phase::Replay, true), (Phase::Sweep, true)];

impl Sizes<'_> {
    /// Phases that run layers. The sweep has rows of its own only where the tail is long.
    fn running(&self) -> impl Iterator<Item = (Phase, bool)> {
        let travels = self.tail_is_long;
        RUNNING.into_iter().filter(move |&(phase, _)| phase != Phase::Sweep || travels)
    }

    /// States of a delta rule at the end of the prompt, where answers start, and at the start of the tail; and what its
    /// chunks compute in, with the transitions of every rank.
    pub(super) fn borders(&self) -> Vec<Addend> {
        let border = |layer: &Layer| {
            let (inputs, state) = layer.mix.border();
            inputs * self.model_bytes + state * self.acc_bytes
        };
        let bytes = self.shape.sum(border);
        let layers = self.shape.sum(|layer| u64::from(border(layer) > 0));
        if bytes == 0 {
            return Vec::new();
        }
        let prompt = self.config.context.prompt_len;
        let tail = self.config.tail(prompt);
        let borders = 1 + u64::from(tail.0 > 0 && tail < prompt);
        let mut sum = vec![addend(
            "states at a border",
            self.keeping.pages.into(),
            product(&[bytes, borders]),
            format!("{borders} × {bytes} B of recurrent states and convolution inputs of {layers} layers"),
            "nothing: it does not grow with the prompt",
        )];
        let micro = self.config.memory.micro_block.0;
        let chunks = self.config.cp_size(self.ranks).saturating_mul(2);
        for (phase, graph) in self.running() {
            let scratch = |layer: &Layer| match layer.mix {
                Mix::Delta { value_heads, key_dim, value_dim, .. } => {
                    let row = (4 * DELTA_CHUNK + 3 * key_dim + 3 * value_dim) * if graph { 2 } else { 1 };
                    let rows = product(&[micro, row]).0;
                    let transitions = product(&[chunks, key_dim, key_dim + value_dim]).0;
                    product(&[value_heads, rows.saturating_add(transitions)]).0
                }
                _ => 0,
            };
            sum.push(within(
                phase,
                "delta-rule scratch",
                product(&[self.shape.most(scratch), self.acc_bytes]),
                format!("{micro} rows in chunks of {DELTA_CHUNK}, and transitions of {chunks} runs"),
                "choose a smaller memory.micro_block",
            ));
        }
        sum
    }

    /// Sets of chosen keys: those of all answers, those of the prompt where they are kept, and one layer's on the device.
    pub(super) fn index_sets(&self) -> Vec<Addend> {
        let top = self.shape.most(|layer| layer.mix.chooses().map_or(0, |index| index.top));
        let owners = self.shape.sum(|layer| u64::from(layer.mix.chooses().is_some()));
        if owners == 0 {
            return Vec::new();
        }
        let set = top * INDEX_BYTES;
        let group = self.config.grpo.group_size;
        let mut sum = vec![addend(
            "answers' index sets",
            Place::Host,
            product(&[group, self.answer_rows, owners, set]),
            format!("{group} answers × {} rows × {owners} layers × {set} B", self.answer_rows),
            "choose a smaller grpo.group_size, or a shorter context.answer_len",
        )];
        if self.tail_is_long && self.choice.keeping.index_sets {
            sum.push(addend(
                "prompt's index sets",
                self.keeping.tail.into(),
                product(&[self.tail_rows, owners, set]),
                format!("{} positions × {owners} layers × {set} B", self.tail_rows),
                "leave the plan less host memory: it chooses them again then",
            ));
        }
        let prompt = self.config.context.prompt_len.0;
        for (phase, graph) in self.running() {
            let rows = match phase {
                Phase::Capture => self.prompt_rows,
                Phase::Sweep => self.tail_rows,
                _ => self.answer_rows,
            };
            sum.push(within(
                phase,
                "a layer's index sets",
                product(&[rows, set]),
                format!("{rows} positions × {set} B, until the next layer that chooses"),
                "use more ranks (parallel.cp_size)",
            ));
            let latent =
                self.shape.most(|layer| layer.mix.widths().carries) * self.model_bytes * if graph { 3 } else { 1 };
            sum.push(within(
                phase,
                "choosing",
                Bytes(product(&[CHOOSING, 2, prompt, self.acc_bytes]).0.saturating_add(CHOOSING * top * latent)),
                format!("{CHOOSING} queries × ({prompt} scores and their order; {top} latents)"),
                "choose a shorter context.prompt_len",
            ));
        }
        sum
    }

    /// Latents of the whole prompt, which every rank gathers layer by layer; their gradient in the sweep; and a block's
    /// queries and outputs, which have the width of a latent for every head.
    pub(super) fn latents(&self) -> Vec<Addend> {
        let latent = |layer: &Layer| matches!(layer.mix, Mix::Latent { .. });
        let most = |width: fn(&Layer) -> u64| self.shape.most(|layer| if latent(layer) { width(layer) } else { 0 });
        let state = most(|layer| layer.mix.widths().state) * self.model_bytes;
        if state == 0 {
            return Vec::new();
        }
        let prompt = self.config.context.prompt_len.0;
        let micro = self.config.memory.micro_block.0;
        let carries = most(|layer| layer.mix.widths().carries) * self.acc_bytes;
        let ask = most(|layer| layer.mix.widths().ask);
        let output = most(|layer| layer.mix.widths().output);
        let alone = self.config.cp_size(self.ranks) == 1;
        let mut sum = Vec::new();
        for (phase, graph) in self.running() {
            let row = (ask + output) * (self.model_bytes + self.acc_bytes) * if graph { 2 } else { 1 };
            sum.push(within(
                phase,
                "latent queries and outputs",
                product(&[micro, row]),
                format!("{micro} rows × ({ask} and {output} wide)"),
                "choose a smaller memory.micro_block",
            ));
            if !alone {
                sum.push(within(
                    phase,
                    "gathered latents",
                    product(&[prompt, state]),
                    format!("{prompt} positions × {state} B, one layer's"),
                    "choose a shorter context.prompt_len",
                ));
            }
            if graph && self.tail_is_long && !alone {
                sum.push(within(
                    phase,
                    "gradient of gathered latents",
                    product(&[prompt, carries]),
                    format!("{prompt} positions × {carries} B, one layer's"),
                    "set grpo.gradient = \"response\"",
                ));
            }
        }
        if self.through_host() {
            sum.push(addend(
                "messages between ranks",
                Place::Host,
                product(&[prompt, state + if self.tail_is_long { carries } else { 0 }]),
                format!("{prompt} positions' latents of a layer, and their gradients"),
                "choose a shorter context.prompt_len",
            ));
        }
        sum
    }

    /// Rows on their way to experts and back, if all experts get the same number of rows.
    pub(super) fn experts(&self) -> Vec<Addend> {
        let chosen = self.shape.most(|layer| layer.chosen);
        if chosen == 0 {
            return Vec::new();
        }
        let micro = self.config.memory.micro_block.0;
        let rows = |(phase, graph): (Phase, bool)| {
            let copies = if graph { 4 } else { 2 };
            within(
                phase,
                "rows at experts",
                product(&[micro, chosen, self.shape.width, self.model_bytes, copies]),
                format!("{micro} rows × {chosen} experts × {} wide × {copies}, evenly spread", self.shape.width),
                "choose a smaller memory.micro_block",
            )
        };
        self.running().map(rows).collect()
    }
}
