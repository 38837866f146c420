//! What a group's step asks of a rank, phase by phase: operations, and bytes between device and host.
//!
//! ```text
//!              segment A          segment B          attention        what it follows
//!              forward backward   forward backward   forward backward
//!   capture       1                  1                  1             `capture::one_layer`
//!   score         1                  1                  1             `Pass::forward`
//!   replay        3      1           2      1           2      1      up: `Pass::forward`; down: `Pass::backward`, which
//!                                                                     projects, mixes, and runs both segments with a graph
//!   sweep         2      1           1      1         0 or 1   1      `Pass::backward_tail`; 0 where outputs were kept;
//!                 + (k − 1)/k of a forward                            `Replay::fill_tail`, where one layer in k is kept
//! ```
//!
//! A rollout's token is a row of every answer, on every rank; only attention is dealt to the ranks. Where it is drawn, the
//! policy's prompt is captured before that, and again if a reference comes between.
//!
//! Frozen weights have no gradient, so a backward costs what its forward costs; an adapter's costs twice that. Attention's
//! backward is counted as 2.5 forwards, as its rate is. A multiplication and an addition are two operations.

use crate::config::{RunConfig, When};
use crate::model::shape::{INDEX_BYTES, Layer, Mix, Segment, Shape};
use crate::prompt::pages::Residency;
use crate::runtime::failure::Phase;
use crate::runtime::units::{float, from_index};

use super::sizes::{adapter_elements, widths};
use super::special::DELTA_CHUNK;
use super::{Choice, Plan};

/// What one phase asks of the rank that has most to do.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Asked {
    /// Operations of matrix products.
    pub(super) products: f64,
    /// Operations of attention, forward.
    pub(super) attention_forward: f64,
    /// Operations of attention, backward.
    pub(super) attention_backward: f64,
    /// Index scores among which the largest are chosen.
    pub(super) choosing: f64,
    /// Bytes from host memory to the device.
    pub(super) bytes_in: f64,
    /// Bytes back.
    pub(super) bytes_out: f64,
    /// Bytes that the device reads of its own memory, where that may take longer than computing.
    pub(super) reads: f64,
    /// Small operations, where it is the host that sets their pace.
    pub(super) launches: f64,
    /// Messages that nothing runs beside.
    pub(super) messages: f64,
    /// Bytes of them, from device to device.
    pub(super) message_bytes: f64,
}

impl Asked {
    /// All of it so many times.
    fn times(self, by: f64) -> Asked {
        Asked {
            products: self.products * by,
            attention_forward: self.attention_forward * by,
            attention_backward: self.attention_backward * by,
            choosing: self.choosing * by,
            bytes_in: self.bytes_in * by,
            bytes_out: self.bytes_out * by,
            reads: self.reads * by,
            launches: self.launches * by,
            messages: self.messages * by,
            message_bytes: self.message_bytes * by,
        }
    }
}

/// How often a phase runs each part of a layer.
#[derive(Clone, Copy, Default)]
struct Runs {
    a: [f64; 2],
    b: [f64; 2],
    attention: [f64; 2],
    choosing: f64,
}

impl Runs {
    /// One pass without a graph.
    const FORWARD: Runs = Runs { a: [1.0, 0.0], b: [1.0, 0.0], attention: [1.0, 0.0], choosing: 1.0 };
}

/// Small operations of a layer for one token: norms, seven projections with their adapters, rotation, attention, merging.
const LAYER_LAUNCHES: f64 = 100.0;

/// Consecutive rows of a sequence.
#[derive(Clone, Copy)]
struct Rows {
    start: f64,
    count: f64,
}

impl Rows {
    /// Pairs of a row and a key that it sees, itself included: all before it, or the `most` nearest or chosen ones.
    fn pairs(self, most: Option<u64>) -> f64 {
        let Rows { start, count } = self;
        let most = most.map_or(f64::INFINITY, float);
        let growing = (most - start).clamp(0.0, count);
        let beyond = count - growing;
        let full = if beyond > 0.0 { beyond * most } else { 0.0 };
        growing * start + growing * (growing + 1.0) / 2.0 + full
    }
}

/// The work of one configuration.
pub(super) struct Work<'a> {
    config: &'a RunConfig,
    shape: &'a Shape,
    choice: Choice,
    /// Ranks of the world.
    ranks: f64,
    /// Ranks that share a prompt.
    sharers: f64,
    /// Prompt positions on the rank that holds most.
    rows: f64,
    /// Of these: those that carry gradient, if they lie as evenly as the prompt does.
    tail: f64,
    model: f64,
    acc: f64,
}

impl<'a> Work<'a> {
    pub(super) fn of(config: &'a RunConfig, plan: &Plan, shape: &'a Shape) -> Work<'a> {
        let (model, acc) = widths(config.model.dtype);
        let sharers = float(plan.cp_size);
        Work {
            config,
            shape,
            choice: Choice {
                keeping: plan.keeping,
                index_sets: plan.index_sets.unwrap_or(false),
                all_pages: plan.rollout.is_some_and(|rollout| rollout.pages_on_device),
            },
            ranks: float(plan.ranks),
            sharers,
            rows: float(plan.pages_per_rank.0) * float(config.context.page_size.0),
            tail: float(config.tail(config.context.prompt_len).0) / sharers,
            model: float(model),
            acc: float(acc),
        }
    }

    /// Every phase of a step on one group, in its order.
    pub(super) fn phases(&self) -> Vec<(Phase, Asked)> {
        // With a reference the prompt and the answers run under the starting policy too, which takes the pages' place.
        let (captures, scores) = match (self.config.grpo.kl_coef > 0.0, self.config.rollout.sample) {
            (true, true) => (3.0, 2.0),
            (true, false) => (2.0, 2.0),
            (false, _) => (1.0, 1.0),
        };
        let mut phases = vec![(Phase::Capture, self.capture().times(captures))];
        if self.config.rollout.sample {
            phases.push((Phase::Rollout, self.rollout()));
        }
        phases.push((Phase::Score, self.score().times(scores)));
        phases.extend([
            (Phase::Replay, self.replay()),
            (Phase::Sweep, self.sweep()),
            (Phase::Finalize, self.finalize()),
        ]);
        phases
    }

    /// The phases of a further update on the same group: its scores stay, the prompt's pages are made anew.
    pub(super) fn further(&self) -> [(Phase, Asked); 4] {
        [
            (Phase::Capture, self.capture()),
            (Phase::Replay, self.replay()),
            (Phase::Sweep, self.sweep()),
            (Phase::Finalize, self.finalize()),
        ]
    }

    fn prompt(&self) -> Rows {
        Rows { start: 0.0, count: float(self.config.context.prompt_len.0) }
    }

    /// Rows of an answer: its last token is never an input.
    fn answer(&self) -> Rows {
        let context = &self.config.context;
        Rows { start: float(context.prompt_len.0), count: float(context.answer_len.0.saturating_sub(1)) }
    }

    fn group(&self) -> f64 {
        float(self.config.grpo.group_size)
    }

    fn travels(&self) -> bool {
        self.config.tail(self.config.context.prompt_len) > self.config.memory.micro_block
    }

    /// Operations of `rows` in all layers, all ranks that share the prompt together.
    fn layers(&self, rows: Rows, runs: Runs) -> Asked {
        let mut asked = Asked::default();
        for layer in &self.shape.layers {
            self.segments(layer, rows, runs, &mut asked);
            mixing(layer, rows, runs, &mut asked);
        }
        asked
    }

    fn segments(&self, layer: &Layer, rows: Rows, runs: Runs, asked: &mut Asked) {
        let lora = &self.config.lora;
        for (segment, [forward, backward]) in [(Segment::A, runs.a), (Segment::B, runs.b)] {
            let frozen = layer.products(segment);
            let adapters = float(lora.rank) * float(Shape::adapted(layer, segment, lora.targets.as_deref()));
            let operations = (forward + backward) * frozen + (forward + 2.0 * backward) * adapters;
            asked.products += 2.0 * rows.count * operations;
        }
        asked.products += 2.0 * rows.count * runs.choosing * float(layer.constant);
    }

    /// The rank's share of what all ranks do together.
    fn share(&self, asked: Asked) -> Asked {
        Asked {
            products: asked.products / self.sharers,
            attention_forward: asked.attention_forward / self.sharers,
            attention_backward: asked.attention_backward / self.sharers,
            choosing: asked.choosing / self.sharers,
            ..asked
        }
    }

    /// Operations of `times` passes over the head's rows of all answers.
    fn head(&self, times: f64) -> f64 {
        let rows = self.group() * self.answer().count;
        2.0 * times * rows * float(self.shape.width) * float(self.shape.vocabulary)
    }

    fn capture(&self) -> Asked {
        let mut asked = self.share(self.layers(self.prompt(), Runs::FORWARD));
        let keeping = self.choice.keeping;
        if keeping.pages == Residency::Host {
            asked.bytes_out += self.rows * self.state();
        }
        if keeping.tail == Residency::Host {
            asked.bytes_out += self.tail_bytes();
        }
        self.travel(&mut asked, false, |_| true);
        self.to_experts(&mut asked, self.rows, Runs::FORWARD);
        asked
    }

    /// Every token of the longest answers.
    pub(super) fn rollout(&self) -> Asked {
        self.token().times(self.sampled())
    }

    fn sampled(&self) -> f64 {
        float(self.config.sampled_len().0)
    }

    /// One token of every answer, half-way through the longest.
    fn token(&self) -> Asked {
        let row = Rows { start: float(self.config.context.prompt_len.0) + self.sampled() / 2.0, count: 1.0 };
        let (mut rows, mut mixed) = (Asked::default(), Asked::default());
        for layer in &self.shape.layers {
            self.segments(layer, row, Runs::FORWARD, &mut rows);
            mixing(layer, row, Runs::FORWARD, &mut mixed);
        }
        let mut asked = self.share(mixed);
        asked.products += rows.products + 2.0 * float(self.shape.width) * float(self.shape.vocabulary);
        let mut asked = asked.times(self.group());
        asked.reads = self.token_reads();
        asked.launches = LAYER_LAUNCHES * (float(self.shape.depth()) + 1.0);
        if !self.choice.all_pages {
            asked.bytes_in += self.staged();
        }
        let others = self.sharers - 1.0;
        let meets = |layer: &Layer| layer.mix.widths().beside > 0;
        let partial = |layer: &Layer| if meets(layer) { partial(layer) } else { 0 };
        let bytes = others * self.group() * float(self.shape.sum(partial)) * self.acc;
        // Partial outputs in every layer that attends, and the tokens that the first rank has drawn.
        asked.messages = others * (float(self.shape.sum(|layer| u64::from(meets(layer)))) + 1.0);
        if self.through_host() {
            asked.bytes_in += bytes;
            asked.bytes_out += bytes;
        } else {
            asked.message_bytes = bytes;
        }
        asked
    }

    /// Bytes that a rank reads for a token: weights once for all answers, experts as if each were chosen, and keys and
    /// values of the rank's pages and of its share of the answers.
    fn token_reads(&self) -> f64 {
        let experts = float(self.shape.experts()) / float(self.config.parallel.ep_size.max(1));
        let head = float(self.shape.width) * float(self.shape.vocabulary);
        let weights = float(self.shape.sum(|layer| layer.parameters)) + experts + head;
        let adapters = float(adapter_elements(self.config, self.shape)) * self.acc;
        let answers = self.group() * self.sampled() / 2.0 / self.sharers;
        let keys = |layer: &Layer| {
            let widths = layer.mix.widths();
            match layer.mix {
                Mix::Grouped { window, .. } => {
                    let seen = window.map_or(self.rows, |window| self.rows.min(float(window)));
                    (seen + answers) * float(widths.state) * self.model
                }
                Mix::Latent { index, .. } => {
                    let chosen = self.group() * float(index.top) / self.sharers * float(widths.carries);
                    let scored = if index.owner { (self.rows + answers) * float(index.dim) } else { 0.0 };
                    (chosen + scored) * self.model
                }
                Mix::Delta { .. } => {
                    let (inputs, state) = layer.mix.border();
                    self.group() * (float(inputs) * self.model + float(state) * self.acc)
                }
            }
        };
        weights * self.model + adapters + self.shape.layers.iter().map(keys).sum::<f64>()
    }

    fn score(&self) -> Asked {
        let mut asked = self.layers(self.answer(), Runs::FORWARD).times(self.group());
        asked.products += self.head(1.0);
        let mut asked = self.share(asked);
        let hidden = self.hidden();
        asked.bytes_in += self.staged() + hidden + self.group() * self.gathered();
        asked.bytes_out += hidden + self.group() * self.gathered();
        self.travel(&mut asked, false, latent);
        self.to_experts(&mut asked, self.answer_rows(), Runs::FORWARD);
        asked
    }

    fn replay(&self) -> Asked {
        let runs = Runs { a: [3.0, 1.0], b: [2.0, 1.0], attention: [2.0, 1.0], choosing: 1.0 };
        let mut asked = self.layers(self.answer(), runs).times(self.group());
        // Log-probabilities, then the same rows with a graph and back.
        asked.products += self.head(3.0);
        let mut asked = self.share(asked);
        let (hidden, gathered) = (self.hidden(), self.group() * self.gathered());
        // Pages come up the layers and down; gathered rows forward twice, and once with twice the tensors back.
        asked.bytes_in += 2.0 * self.staged() + 3.0 * hidden + 4.0 * gathered;
        asked.bytes_out += 2.0 * hidden + 4.0 * gathered;
        self.travel(&mut asked, false, latent);
        self.travel(&mut asked, self.travels(), latent);
        self.to_experts(&mut asked, self.answer_rows(), runs);
        asked
    }

    fn sweep(&self) -> Asked {
        let keeping = self.choice.keeping;
        let count = float(self.config.tail(self.config.context.prompt_len).0);
        if count <= 0.0 {
            return Asked::default();
        }
        let travels = self.travels();
        let every = if travels { float(from_index(keeping.every)).max(1.0) } else { 1.0 };
        let again = (every - 1.0) / every;
        let mixed = if travels && keeping.attention { 0.0 } else { 1.0 };
        let runs = Runs {
            a: [2.0 + again, 1.0],
            b: [1.0 + again, 1.0],
            attention: [mixed * (1.0 + again), 1.0],
            choosing: if self.choice.index_sets { 0.0 } else { 1.0 },
        };
        let start = float(self.config.context.prompt_len.0) - count;
        let mut asked = self.share(self.layers(Rows { start, count }, runs));
        if keeping.tail == Residency::Host {
            asked.bytes_in += self.tail_bytes();
        }
        if travels {
            asked.bytes_in += again * self.staged();
            self.travel(&mut asked, true, |_| true);
        }
        self.to_experts(&mut asked, self.tail, runs);
        asked
    }

    /// Gradients of all ranks meet in the first one's host memory, in rank order, and their sum goes back.
    fn finalize(&self) -> Asked {
        let bytes = float(adapter_elements(self.config, self.shape)) * self.acc;
        Asked { bytes_in: bytes, bytes_out: bytes * self.ranks, ..Asked::default() }
    }

    /// Bytes of a position's state in all layers.
    fn state(&self) -> f64 {
        float(self.shape.sum(|layer| layer.mix.widths().state)) * self.model
    }

    /// Pages that come to the device for one way through the layers.
    fn staged(&self) -> f64 {
        if self.choice.keeping.pages == Residency::Host { self.rows * self.state() } else { 0.0 }
    }

    /// Rows of all answers on a rank.
    fn answer_rows(&self) -> f64 {
        self.group() * self.answer().count / self.sharers
    }

    /// Hidden states of a rank's answers in all layers.
    fn hidden(&self) -> f64 {
        self.answer_rows() * float(self.shape.width) * float(self.shape.depth()) * self.model
    }

    /// What of the tail waits in host memory.
    fn tail_bytes(&self) -> f64 {
        let keeping = self.choice.keeping;
        let every = if self.travels() { float(from_index(keeping.every)).max(1.0) } else { 1.0 };
        let inputs = float(self.shape.width) * self.model * (float(self.shape.depth()) / every).ceil();
        let outputs = float(self.shape.sum(|layer| layer.mix.widths().output)) * self.model
            + float(self.shape.sum(|layer| layer.mix.widths().beside)) * self.acc;
        let sets = self.shape.sum(|layer| layer.mix.chooses().map_or(0, |index| index.top));
        let sets = float(sets) * float(INDEX_BYTES);
        let kept = |kept: bool, bytes: f64| if kept && self.travels() { bytes } else { 0.0 };
        self.tail * (inputs + kept(keeping.attention, outputs) + kept(self.choice.index_sets, sets))
    }

    /// Whether ranks meet in host memory; from GPU to GPU a message takes a small part of the time.
    fn through_host(&self) -> bool {
        self.sharers > 1.0 && self.config.run.direct == When::Never
    }

    /// Queries of one answer that every rank gets, and partial outputs that come back, in all layers: through host memory,
    /// each way.
    fn gathered(&self) -> f64 {
        if !self.through_host() {
            return 0.0;
        }
        let asking = |layer: &Layer| if layer.mix.travels() { layer.mix.widths().ask } else { 0 };
        let output = |layer: &Layer| if layer.mix.travels() { layer.mix.widths().output } else { 0 };
        let row = float(self.shape.sum(asking)) * self.model + float(self.shape.sum(output)) * self.acc;
        self.answer().count * row
    }

    /// Page runs of layers that pass through a rank's host memory, or latents that every rank gathers; on the way `back`
    /// with their gradients.
    fn travel(&self, asked: &mut Asked, back: bool, layers: impl Fn(&Layer) -> bool) {
        if !self.through_host() {
            return;
        }
        let all = (self.sharers - 1.0) * self.rows;
        for layer in self.shape.layers.iter().filter(|layer| layers(layer)) {
            let widths = layer.mix.widths();
            let state = float(widths.state) * self.model;
            let sums = if back { float(widths.carries) * self.acc } else { 0.0 };
            asked.bytes_in += all * (state + if layer.mix.travels() { sums } else { 0.0 });
            // A run leaves again for the next rank; latents leave their owner once, their gradients every rank.
            asked.bytes_out += if layer.mix.travels() { all * (state + sums) } else { self.rows * state + all * sums };
        }
    }

    /// Rows that leave for experts on other ranks, and what comes back; likewise their gradients.
    fn to_experts(&self, asked: &mut Asked, rows: f64, runs: Runs) {
        if !self.through_host() {
            return;
        }
        let spread = float(self.config.parallel.ep_size.max(1));
        let row = float(self.shape.sum(|layer| layer.chosen)) * float(self.shape.width) * self.model;
        let bytes = 2.0 * (runs.b[0] + runs.b[1]) * rows * row * (1.0 - 1.0 / spread);
        asked.bytes_in += bytes;
        asked.bytes_out += bytes;
    }
}

/// Elements of a row's partial output over some keys, with its log-sum-exp.
pub(super) fn partial(layer: &Layer) -> u64 {
    let widths = layer.mix.widths();
    widths.output + widths.beside
}

/// Whether latents of a layer are gathered for answers too, whose rows then stay.
fn latent(layer: &Layer) -> bool {
    matches!(layer.mix, Mix::Latent { .. })
}

/// Operations of `rows` in a layer's mixer.
fn mixing(layer: &Layer, rows: Rows, runs: Runs, asked: &mut Asked) {
    let [forward, backward] = runs.attention;
    let mut attention = |operations: f64| {
        asked.attention_forward += forward * operations;
        asked.attention_backward += 2.5 * backward * operations;
    };
    match layer.mix {
        Mix::Grouped { query_heads, head_dim, window, .. } => {
            attention(4.0 * float(query_heads) * float(head_dim) * rows.pairs(window));
        }
        Mix::Latent { heads, latent, rotated, index } => {
            let row = float(latent) * 2.0 + float(rotated);
            attention(2.0 * float(heads) * row * rows.pairs(Some(index.top)));
            if index.owner {
                let scores = runs.choosing * rows.pairs(None);
                asked.products += 2.0 * float(index.heads) * float(index.dim) * scores;
                asked.choosing += scores;
            }
        }
        Mix::Delta { value_heads, key_dim, value_dim, .. } => {
            let (key, value, chunk) = (float(key_dim), float(value_dim), float(DELTA_CHUNK));
            let row = 6.0 * key * value + chunk * (5.0 * key + 3.0 * value);
            // What the chunks computed is not kept, so a backward has a forward of its own, whatever is kept of the output.
            asked.products += (forward.max(backward) + 2.0 * backward) * rows.count * float(value_heads) * row;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_those_of_a_loop_over_rows() {
        for (start, count, most) in [(0, 9, None), (5, 4, None), (0, 9, Some(4)), (2, 7, Some(4)), (6, 3, Some(4))] {
            let seen = (start..start + count).map(|row| most.map_or(row + 1, |most: u64| most.min(row + 1)));
            let pairs = Rows { start: float(start), count: float(count) }.pairs(most);
            assert!((pairs - float(seen.sum())).abs() < 1e-9, "{start} {count} {most:?}: {pairs}");
        }
    }
}
