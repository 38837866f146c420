//! The work of a rank in a step on one group, phase by phase: operations, and bytes between device and host.
//!
//! ```text
//!              segment A          segment B          attention        what it follows
//!              forward backward   forward backward   forward backward
//!   capture       1                  1                  1             `capture::one_layer`
//!   score         1                  1                  1             `Pass::forward`
//!   replay        2      1           1      1         0 or 1   1      `Pass::backward` projects, mixes unless outputs were
//!                 + 1/L of a forward in the top layer                 kept, and runs both segments with a graph
//!                 + 1 forward where scores were given before          `answers::up` of a further update
//!   sweep         2      1           1      1         0 or 1   1      `Pass::backward_tail`; 0 where outputs were kept;
//!                 + (k − 1)/k of a forward                            `Replay::fill_tail`, where one layer in k is kept
//! ```
//!
//! A token of rollout is one row of every answer. Every rank computes all of these rows, and only attention is spread over
//! the ranks. With sampling and a reference the policy's prompt is captured twice: before rollout, and after the reference.
//!
//! Frozen weights have no gradient, so their backward costs one forward, and that of an adapter costs two. Attention's
//! backward is counted as 2.5 forwards, as in its rates. A multiplication and an addition are two operations.

use super::drawing::{TokenReads, token_bytes};
use super::offload_choice::OffloadChoice;
use super::operations::{Passes, Rows, Runs, Work, delta_exchange, delta_rule, mixing, partial};
use super::sizes::{adapter_elements, element_bytes};
use super::special::EXPERT_BYTES;
use crate::config::{RunConfig, When};
use crate::model::shape::{INDEX_BYTES, Layer, Mix, Segment, Shape};
use crate::prompt::pages::Residency;
use crate::runtime::failure::Phase;
use crate::runtime::units::{float, from_index};

/// The work of one configuration under one choice. Bytes are those of an element in the model's dtype and in the
/// accumulation dtype.
pub(super) struct StepWork<'a> {
    config: &'a RunConfig,
    pub(super) shape: &'a Shape,
    pub(super) choice: OffloadChoice,
    /// Ranks in the world.
    ranks: f64,
    /// Ranks that share a prompt.
    pub(super) sharers: f64,
    /// Prompt positions on the rank that holds most.
    pub(super) prompt_rows: f64,
    /// Prompt positions with gradient on a rank, if they are spread as evenly as the prompt.
    tail_rows: f64,
    model_bytes: f64,
    acc_bytes: f64,
}

/// How often an update on a group captures the prompt, scores the answers, and brings them up again before replay.
#[derive(Clone, Copy)]
pub(super) struct Repeats {
    pub(super) captures: f64,
    pub(super) scores: f64,
    pub(super) ups: f64,
}

impl Repeats {
    /// A further update on the same group: at known scores.
    pub(super) const FURTHER: Repeats = Repeats { captures: 1.0, scores: 0.0, ups: 1.0 };
}

impl<'a> StepWork<'a> {
    /// The work on a rank in a world of `ranks`, under one choice.
    pub(super) fn new(config: &'a RunConfig, ranks: u64, shape: &'a Shape, choice: OffloadChoice) -> StepWork<'a> {
        let (model_bytes, acc_bytes) = element_bytes(config.model.dtype);
        let sharers = float(config.cp_size(ranks));
        StepWork {
            config,
            shape,
            choice,
            ranks: float(ranks),
            sharers,
            prompt_rows: float(config.pages_per_rank(ranks).0) * float(config.context.page_size.0),
            tail_rows: float(config.tail(config.context.prompt_len).0) / sharers,
            model_bytes: float(model_bytes),
            acc_bytes: float(acc_bytes),
        }
    }

    /// The phases of a step on one group, in their order.
    pub(super) fn phases(&self) -> Vec<(Phase, Work)> {
        let Repeats { captures, scores, .. } = self.repeats();
        let mut phases = vec![(Phase::Capture, self.capture().times(captures))];
        if self.config.rollout.sample {
            phases.push((Phase::Rollout, self.rollout()));
        }
        phases.push((Phase::Score, self.score().times(scores)));
        phases.extend([
            (Phase::Replay, self.replay(false)),
            (Phase::Sweep, self.sweep()),
            (Phase::Finalize, self.finalize()),
        ]);
        phases
    }

    /// How often the first update captures and scores. With a reference the prompt and the answers run under the starting policy
    /// too, and its pages replace the policy's.
    pub(super) fn repeats(&self) -> Repeats {
        let (captures, scores) = match (self.config.grpo.kl_coef > 0.0, self.config.rollout.sample) {
            (true, true) => (3.0, 2.0),
            (true, false) => (2.0, 2.0),
            (false, _) => (1.0, 1.0),
        };
        Repeats { captures, scores, ups: 0.0 }
    }

    /// The phases of one more update on the same group: scores stay, the prompt is captured again.
    pub(super) fn further(&self) -> [(Phase, Work); 4] {
        [
            (Phase::Capture, self.capture()),
            (Phase::Replay, self.replay(true)),
            (Phase::Sweep, self.sweep()),
            (Phase::Finalize, self.finalize()),
        ]
    }

    pub(super) fn prompt(&self) -> Rows {
        Rows { start: 0.0, count: float(self.config.context.prompt_len.0) }
    }

    /// Prompt positions that carry gradient, on all ranks.
    pub(super) fn tail(&self) -> Rows {
        let count = float(self.config.tail(self.config.context.prompt_len).0);
        Rows { start: float(self.config.context.prompt_len.0) - count, count }
    }

    /// Rows of an answer. Its last token is never an input.
    pub(super) fn answer(&self) -> Rows {
        let context = &self.config.context;
        Rows { start: float(context.prompt_len.0), count: float(context.answer_len.0.saturating_sub(1)) }
    }

    pub(super) fn group(&self) -> f64 {
        float(self.config.grpo.group_size)
    }

    /// Whether the tail is long, so that its rows stay and page state travels.
    pub(super) fn travels(&self) -> bool {
        self.config.tail(self.config.context.prompt_len) > self.config.memory.micro_rows()
    }

    /// Operations of `rows` in all layers, on all ranks that share the prompt together.
    fn layers(&self, rows: Rows, runs: Runs) -> Work {
        let mut work = Work::default();
        for layer in &self.shape.layers {
            self.segments(layer, rows, runs, &mut work);
            mixing(layer, rows, runs, &mut work);
            delta_rule(layer, rows.count, runs, self.sharers > 1.0, [self.model_bytes, self.acc_bytes], &mut work);
        }
        work
    }

    fn segments(&self, layer: &Layer, rows: Rows, runs: Runs, work: &mut Work) {
        let lora = &self.config.lora;
        for (segment, Passes { forward, backward }) in [(Segment::A, runs.a), (Segment::B, runs.b)] {
            let frozen = layer.products(segment);
            let adapters = float(lora.rank) * float(Shape::adapted(layer, segment, lora.targets.as_deref()));
            let operations = (forward + backward) * frozen + (forward + 2.0 * backward) * adapters;
            work.products += 2.0 * rows.count * operations;
        }
        // Products of experts stand among those of segment B.
        let experts = 3.0 * float(layer.chosen) * float(self.shape.width) * float(layer.expert_width);
        let experts = 2.0 * rows.count * (runs.b.forward + runs.b.backward) * experts;
        work.products -= experts;
        work.experts += experts;
        work.products += 2.0 * rows.count * runs.choosing * float(layer.constant);
    }

    /// A rank's share of what the ranks of its prompt do together.
    fn share(&self, work: Work) -> Work {
        Work {
            products: work.products / self.sharers,
            attention_forward: work.attention_forward / self.sharers,
            attention_backward: work.attention_backward / self.sharers,
            gathered_forward: work.gathered_forward / self.sharers,
            gathered_backward: work.gathered_backward / self.sharers,
            choosing: work.choosing / self.sharers,
            experts: work.experts / self.sharers,
            delta_forward: work.delta_forward / self.sharers,
            delta_backward: work.delta_backward / self.sharers,
            moved: work.moved / self.sharers,
            ..work
        }
    }

    /// Operations of `times` passes over the head's rows of all answers.
    fn head(&self, times: f64) -> f64 {
        let rows = self.group() * self.answer().count;
        2.0 * times * rows * float(self.shape.width) * float(self.shape.vocabulary)
    }

    fn capture(&self) -> Work {
        let mut work = self.share(self.layers(self.prompt(), Runs::FORWARD));
        let keeping = self.choice.keeping;
        if keeping.pages == Residency::Host {
            work.bytes_out += self.prompt_rows * self.state();
        }
        if keeping.tail == Residency::Host {
            work.bytes_out += self.tail_bytes();
        }
        self.travel(&mut work, false, |_| true);
        self.exchange_maps(&mut work, 2.0 * self.sharers, Runs::FORWARD);
        self.to_experts(&mut work, self.prompt_rows, Runs::FORWARD);
        work
    }

    /// All tokens of answers of the greatest length.
    pub(super) fn rollout(&self) -> Work {
        self.token().times(self.sampled())
    }

    fn sampled(&self) -> f64 {
        float(self.config.sampled_len().0)
    }

    /// One token of every answer, half-way through the longest.
    fn token(&self) -> Work {
        let row = Rows { start: float(self.config.context.prompt_len.0) + self.sampled() / 2.0, count: 1.0 };
        let mut rows = Work::default();
        let mut mixed = Work::default();
        for layer in &self.shape.layers {
            self.segments(layer, row, Runs::FORWARD, &mut rows);
            mixing(layer, row, Runs::FORWARD, &mut mixed);
            // Every rank goes on with the state of every answer.
            delta_rule(layer, row.count, Runs::FORWARD, false, [self.model_bytes, self.acc_bytes], &mut rows);
        }
        let mut work = self.share(mixed);
        (work.delta_forward, work.moved) = (rows.delta_forward, rows.moved);
        work.products += rows.products + 2.0 * float(self.shape.width) * float(self.shape.vocabulary);
        work.experts += rows.experts / float(self.config.parallel.ep_size.max(1));
        let mut work = work.times(self.group());
        work.reads = self.token_reads();
        work.layer_steps = float(self.shape.depth()) + 1.0;
        work.bytes_in += self.moved_for_token();
        let others = self.sharers - 1.0;
        let attends = |layer: &Layer| layer.mix.widths().beside > 0;
        let partial = |layer: &Layer| if attends(layer) { partial(layer) } else { 0 };
        let bytes = others * self.group() * float(self.shape.sum(partial)) * self.acc_bytes;
        // Partial outputs in every layer with attention, and the tokens that the first rank has sampled.
        work.messages = others * (float(self.shape.sum(|layer| u64::from(attends(layer)))) + 1.0);
        if self.through_host() {
            work.bytes_in += bytes;
            work.bytes_out += bytes;
        } else {
            work.message_bytes = bytes;
        }
        work
    }

    /// Bytes that a rank reads for a token, half-way through the longest answer.
    fn token_reads(&self) -> f64 {
        let of = TokenReads {
            prompt_rows: self.prompt_rows,
            answers: self.group(),
            own_rows: self.sampled() / 2.0 / self.sharers,
            sharers: self.sharers,
            expert_share: 1.0 / float(self.config.parallel.ep_size.max(1)),
            adapters: adapter_elements(self.config, self.shape),
            model_bytes: self.model_bytes,
            acc_bytes: self.acc_bytes,
        };
        token_bytes(self.shape, &of)
    }

    fn score(&self) -> Work {
        let mut work = self.layers(self.answer(), Runs::FORWARD).times(self.group());
        work.products += self.head(1.0);
        let mut work = self.share(work);
        let hidden = self.hidden();
        work.bytes_in += self.staged() + hidden + self.group() * self.gathered();
        work.bytes_out += hidden + self.group() * self.gathered();
        self.travel(&mut work, false, latent);
        self.exchange_maps(&mut work, self.group() * self.sharers, Runs::FORWARD);
        self.to_experts(&mut work, self.answer_rows(), Runs::FORWARD);
        work
    }

    /// The answers from the top layer down; `up` tells whether they go up first.
    fn replay(&self, up: bool) -> Work {
        let top = 1.0 / float(self.shape.depth()).max(1.0);
        let upwards = if up { 1.0 - top } else { 0.0 };
        let kept = self.choice.keeping.answer_attention;
        let again = top + upwards;
        let mixed = if kept { top } else { 1.0 };
        let runs = Runs {
            a: Passes::back(2.0 + again),
            b: Passes::back(1.0 + again),
            attention: Passes::back(mixed + again),
            // What the score pass has chosen is used.
            choosing: if up { 1.0 } else { 0.0 },
        };
        let mut work = self.layers(self.answer(), runs).times(self.group());
        // Log-probabilities, then the same rows with a graph and back.
        work.products += self.head(3.0);
        let mut work = self.share(work);
        let hidden = self.hidden();
        let gathered = self.group() * self.gathered();
        // Pages are staged down the layers, and up; rows are gathered in forwards, and once with twice the tensors in backward.
        let outputs = if kept { self.answers_mixed_bytes() } else { 0.0 };
        work.bytes_in +=
            (1.0 + upwards) * self.staged() + (2.0 + upwards) * hidden + (2.0 + mixed + again) * gathered + outputs;
        work.bytes_out += (1.0 + upwards) * hidden + (2.0 + mixed + again) * gathered + upwards * outputs;
        if up {
            self.travel(&mut work, false, latent);
        }
        self.travel(&mut work, self.travels(), latent);
        self.exchange_maps(&mut work, self.group() * self.sharers, runs);
        self.to_experts(&mut work, self.answer_rows(), runs);
        work
    }

    /// Bytes of the answers' mixer outputs on a rank, below the top layer.
    fn answers_mixed_bytes(&self) -> f64 {
        let (outputs, beside) = self.mixed_row();
        let below = 1.0 - 1.0 / float(self.shape.depth()).max(1.0);
        self.answer_rows() * below * (outputs + beside)
    }

    fn sweep(&self) -> Work {
        let keeping = self.choice.keeping;
        let tail = self.tail();
        if tail.count <= 0.0 {
            return Work::default();
        }
        let travels = self.travels();
        let again = self.again();
        let mixed = if travels && keeping.attention { 0.0 } else { 1.0 };
        let runs = Runs {
            a: Passes::back(2.0 + again),
            b: Passes::back(1.0 + again),
            attention: Passes::back(mixed * (1.0 + again)),
            choosing: if self.choice.keeping.index_sets { 0.0 } else { 1.0 },
        };
        let mut work = self.share(self.layers(tail, runs));
        if keeping.tail == Residency::Host {
            work.bytes_in += self.tail_bytes();
        }
        if travels {
            work.bytes_in += again * self.staged();
            self.travel(&mut work, true, |_| true);
            self.exchange_maps(&mut work, 2.0 * self.sharers, runs);
        }
        self.to_experts(&mut work, self.tail_rows, runs);
        work
    }

    /// Share of the layers whose input the sweep computes again.
    pub(super) fn again(&self) -> f64 {
        let every = if self.travels() { float(from_index(self.choice.keeping.every)).max(1.0) } else { 1.0 };
        (every - 1.0) / every
    }

    /// Rank 0 sums the gradients of all ranks in host memory, in rank order, and sends the sum back.
    fn finalize(&self) -> Work {
        let bytes = float(adapter_elements(self.config, self.shape)) * self.acc_bytes;
        Work { bytes_in: bytes, bytes_out: bytes * self.ranks, ..Work::default() }
    }

    /// Bytes of a position's page state in all layers.
    fn state(&self) -> f64 {
        float(self.shape.sum(|layer| layer.mix.widths().state)) * self.model_bytes
    }

    /// Bytes of pages that are staged for one pass through the layers.
    fn staged(&self) -> f64 {
        if self.choice.keeping.pages == Residency::Host { self.prompt_rows * self.state() } else { 0.0 }
    }

    /// Bytes of pages that come to the device for every sampled token: those of all layers but the resident ones.
    fn moved_for_token(&self) -> f64 {
        let layers = &self.shape.layers;
        let staged = &layers[self.choice.resident_of(layers.len())..];
        let state: u64 = staged.iter().map(|layer| layer.mix.widths().state).sum();
        self.prompt_rows * float(state) * self.model_bytes
    }

    /// Rows of all answers on a rank.
    fn answer_rows(&self) -> f64 {
        self.group() * self.answer().count / self.sharers
    }

    /// Bytes of the hidden states of a rank's answer rows in all layers.
    fn hidden(&self) -> f64 {
        self.answer_rows() * float(self.shape.width) * float(self.shape.depth()) * self.model_bytes
    }

    /// Bytes of a row's kept mixer outputs in all layers, and of what is saved beside them. Of layers with a delta rule none is
    /// kept.
    fn mixed_row(&self) -> (f64, f64) {
        let output = |layer: &Layer| if layer.mix.widths().beside > 0 { layer.mix.widths().output } else { 0 };
        let outputs = float(self.shape.sum(output)) * self.model_bytes;
        (outputs, float(self.shape.sum(|layer| layer.mix.widths().beside)) * self.acc_bytes)
    }

    /// Bytes of the tail that wait in host memory.
    fn tail_bytes(&self) -> f64 {
        let keeping = self.choice.keeping;
        let every = if self.travels() { float(from_index(keeping.every)).max(1.0) } else { 1.0 };
        let inputs = float(self.shape.width) * self.model_bytes * (float(self.shape.depth()) / every).ceil();
        let (outputs, beside) = self.mixed_row();
        let outputs = outputs + beside;
        let sets = self.shape.sum(|layer| layer.mix.chooses().map_or(0, |index| index.top));
        let sets = float(sets) * float(INDEX_BYTES);
        let experts = float(self.shape.sum(|layer| layer.chosen)) * float(EXPERT_BYTES);
        let kept = |kept: bool, bytes: f64| if kept && self.travels() { bytes } else { 0.0 };
        self.tail_rows * (inputs + experts + kept(keeping.attention, outputs) + kept(keeping.index_sets, sets))
    }

    /// Whether ranks exchange tensors through host memory. From GPU to GPU the time of a message is small.
    fn through_host(&self) -> bool {
        self.sharers > 1.0 && self.config.run.direct == When::Never
    }

    /// Bytes of one answer's queries to every rank and of partial outputs back, in all layers, through host memory.
    fn gathered(&self) -> f64 {
        if !self.through_host() {
            return 0.0;
        }
        let queries = |layer: &Layer| if layer.mix.travels() { layer.mix.widths().ask } else { 0 };
        let output = |layer: &Layer| if layer.mix.travels() { layer.mix.widths().output } else { 0 };
        let row = float(self.shape.sum(queries)) * self.model_bytes + float(self.shape.sum(output)) * self.acc_bytes;
        self.answer().count * row
    }

    /// Page runs that pass through a rank's host memory, or latents that every rank gathers; in a backward (`back`) with
    /// their gradients.
    fn travel(&self, work: &mut Work, back: bool, layers: impl Fn(&Layer) -> bool) {
        if !self.through_host() {
            return;
        }
        let all = (self.sharers - 1.0) * self.prompt_rows;
        for layer in self.shape.layers.iter().filter(|layer| layers(layer)) {
            let widths = layer.mix.widths();
            let state = float(widths.state) * self.model_bytes;
            let sums = if back { float(widths.carries) * self.acc_bytes } else { 0.0 };
            work.bytes_in += all * (state + if layer.mix.travels() { sums } else { 0.0 });
            // A run is sent on to the next rank. Latents are sent once, by their owner; their gradients, by every rank.
            work.bytes_out +=
                if layer.mix.travels() { all * (state + sums) } else { self.prompt_rows * state + all * sums };
        }
    }

    /// Maps of `pieces` pieces of all ranks in every layer with a delta rule, gathered on every rank: no computation runs
    /// beside them.
    fn exchange_maps(&self, work: &mut Work, pieces: f64, runs: Runs) {
        if self.sharers <= 1.0 {
            return;
        }
        let all: f64 = self.shape.layers.iter().map(|layer| delta_exchange(layer, pieces, runs, self.acc_bytes)).sum();
        let received = all * (1.0 - 1.0 / self.sharers);
        if self.through_host() {
            work.bytes_in += received;
            work.bytes_out += all / self.sharers;
        } else {
            work.message_bytes += received;
        }
    }

    /// Rows that go to experts on other ranks and come back; likewise their gradients.
    fn to_experts(&self, work: &mut Work, rows: f64, runs: Runs) {
        if !self.through_host() {
            return;
        }
        let spread = float(self.config.parallel.ep_size.max(1));
        let row = float(self.shape.sum(|layer| layer.chosen)) * float(self.shape.width) * self.model_bytes;
        let bytes = 2.0 * (runs.b.forward + runs.b.backward) * rows * row * (1.0 - 1.0 / spread);
        work.bytes_in += bytes;
        work.bytes_out += bytes;
    }
}

/// Whether a layer gathers latents for answers too.
fn latent(layer: &Layer) -> bool {
    matches!(layer.mix, Mix::Latent { .. })
}
