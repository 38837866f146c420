//! Addends that only some families have: choices of keys and experts, gathered keys.

use super::addend::{Addend, Place, addend, product, within};
use super::sizes::Sizes;
use crate::model::shape::{INDEX_BYTES, Layer, Mix};
use crate::runtime::failure::Phase;
use crate::runtime::units::Bytes;

/// Bytes of the number of a chosen expert.
pub(super) const EXPERT_BYTES: u64 = 8;

/// Phases that run layers, each with whether it has a graph.
const RUNNING: [(Phase, bool); 3] = [(Phase::Capture, false), (Phase::Replay, true), (Phase::Sweep, true)];

impl Sizes<'_> {
    /// Phases that run layers. The sweep has rows of its own only where the tail is long.
    fn running(&self) -> impl Iterator<Item = (Phase, bool)> {
        let travels = self.tail_is_long;
        RUNNING.into_iter().filter(move |&(phase, _)| phase != Phase::Sweep || travels)
    }

    /// Bytes of one row's choices in all layers: keys in the layers that choose them, and experts.
    fn choice_bytes(&self) -> (u64, u64) {
        let keys = self.shape.sum(|layer| layer.mix.chooses().map_or(0, |index| index.top * INDEX_BYTES));
        (keys, self.shape.sum(|layer| layer.chosen * EXPERT_BYTES))
    }

    /// Chosen keys and experts: those of all answers and of the tail, and a layer's keys on the device.
    pub(super) fn choices(&self) -> Vec<Addend> {
        let (keys, experts) = self.choice_bytes();
        let mut sum = self.kept_choices("answers' index sets", "prompt's index sets", keys, self.keeping.index_sets);
        sum.extend(self.kept_choices("answers' chosen experts", "tail's chosen experts", experts, true));
        let group = self.config.grpo.group_size;
        // The ranks of a prompt take turns.
        let tokens = self.config.sampled_len().0.div_ceil(self.config.cp_size(self.ranks));
        if self.config.rollout.sample && self.config.rollout.keep_choices && keys + experts > 0 {
            let name = "choices of sampled answers";
            let bytes = product(&[group, tokens, keys + experts]);
            let reason = format!("{group} answers × {tokens} tokens × {} B", keys + experts);
            let knob = "set rollout.keep_choices = false, or a smaller rollout.max_tokens";
            sum.push(Addend { place: Place::Host, ..within(Phase::Rollout, name, bytes, reason, knob) });
        }
        sum.extend(self.staged_sets());
        sum
    }

    /// Choices of `row` bytes that are kept of every answer row, and, if `tail_kept`, of every tail row.
    fn kept_choices(&self, answers: &'static str, tail: &'static str, row: u64, tail_kept: bool) -> Vec<Addend> {
        if row == 0 {
            return Vec::new();
        }
        let group = self.config.grpo.group_size;
        let mut sum = vec![addend(
            answers,
            Place::Host,
            product(&[group, self.answer_rows, row]),
            format!("{group} answers × {} rows × {row} B in all layers", self.answer_rows),
            "choose a smaller grpo.group_size, or a shorter context.answer_len",
        )];
        if self.tail_is_long && tail_kept {
            sum.push(addend(
                tail,
                self.keeping.tail.into(),
                product(&[self.tail_rows, row]),
                format!("{} positions × {row} B in all layers", self.tail_rows),
                "leave the plan less host memory: it chooses keys again then; or set grpo.gradient = \"response\"",
            ));
        }
        sum
    }

    /// A layer's chosen keys on the device, until the next layer that chooses.
    fn staged_sets(&self) -> Vec<Addend> {
        let set = self.shape.most(|layer| layer.mix.chooses().map_or(0, |index| index.top)) * INDEX_BYTES;
        let owners = self.shape.sum(|layer| u64::from(layer.mix.chooses().is_some()));
        if owners == 0 {
            return Vec::new();
        }
        let sets = |(phase, _)| {
            let (rows, sets, words) = match phase {
                Phase::Capture => {
                    // Parts are joined when the last micro-block is done: a third set, in the place of the block's tensors.
                    let block = self.shape.most(|layer| self.block(layer, self.prompt_rows, false));
                    let part = product(&[self.prompt_rows, set]).0;
                    let joined = part.saturating_sub(block);
                    let bytes = product(&[owners.min(2), part]).0.saturating_add(joined);
                    (self.prompt_rows, Bytes(bytes), "the set that is lent, the one that is chosen, and its parts")
                }
                Phase::Sweep => (self.tail_rows, product(&[self.tail_rows, set]), "that of the layer"),
                _ => {
                    let rows = self.config.context.answer_len.0;
                    (rows, product(&[rows, set]), "until the next layer that chooses")
                }
            };
            let reason = format!("{rows} positions × {set} B: {words}");
            within(phase, "a layer's index sets", sets, reason, "use more ranks (parallel.cp_size)")
        };
        self.running().map(sets).collect()
    }

    /// Keys of the whole prompt, which every rank gathers layer by layer in capture and in the sweep, and their gradient.
    /// Answers do not gather them: their queries go to every rank.
    pub(super) fn gathered(&self) -> Vec<Addend> {
        let latent = |layer: &Layer| matches!(layer.mix, Mix::Latent { .. });
        let most = |width: fn(&Layer) -> u64| self.shape.most(|layer| if latent(layer) { width(layer) } else { 0 });
        let state = most(|layer| layer.mix.widths().state) * self.model_bytes;
        if state == 0 {
            return Vec::new();
        }
        let prompt = self.config.context.prompt_len.0;
        let key = most(|layer| layer.mix.widths().carries);
        let shorter = "choose a shorter context.prompt_len";
        let mut sum = vec![within(
            Phase::Capture,
            "gathered keys",
            product(&[prompt, state]),
            format!("{prompt} positions × {state} B, one layer's keys and index keys on every rank"),
            shorter,
        )];
        if self.tail_is_long {
            sum.extend(self.swept_keys(key));
        }
        if self.through_host() {
            let carries = key * self.acc_bytes;
            sum.push(addend(
                "messages between ranks",
                Place::Host,
                product(&[prompt, state + if self.tail_is_long { carries } else { 0 }]),
                format!("{prompt} positions' keys of a layer, and their gradients"),
                shorter,
            ));
        }
        sum
    }

    /// Keys of `key` elements a position in the sweep, with their gradient; then, when the keys are dropped, the gradient's
    /// way to the owners of the keys.
    fn swept_keys(&self, key: u64) -> Vec<Addend> {
        let prompt = self.config.context.prompt_len;
        let tail = self.config.tail(prompt).0;
        let keys = product(&[prompt.0, key, self.model_bytes]).0;
        let gradient = product(&[tail, key, self.acc_bytes]);
        let knob = "set grpo.gradient = \"response\"";
        let mut sum = vec![
            within(
                Phase::Sweep,
                "gathered keys",
                Bytes(keys),
                format!("{prompt} positions × {key} × {} B, one layer's on every rank", self.model_bytes),
                knob,
            ),
            within(
                Phase::Sweep,
                "gradient of gathered keys",
                gradient,
                format!("{tail} positions × {key} × {} B, one layer's on every rank", self.acc_bytes),
                knob,
            ),
        ];
        if self.config.cp_size(self.ranks) > 1 {
            let block = self.shape.most(|layer| self.block(layer, self.tail_rows, true));
            // Twice the gradient, when neither the keys nor a micro-block's tensors are there any more.
            let further = product(&[gradient.0, 2]).0.saturating_sub(keys.saturating_add(block));
            sum.push(within(
                Phase::Sweep,
                "gradient on its way to its owners",
                Bytes(further),
                "sorted by owner, and the parts of all ranks; less what is dropped before".to_owned(),
                knob,
            ));
        }
        sum
    }
}
