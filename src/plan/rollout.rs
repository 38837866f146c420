//! Sampled answers: what a rank holds while it samples, where the prompt's pages are, and how long a token takes.
//!
//! All answers of a group get their tokens in lock-step. Every rank computes the rows of all answers. The prompt's pages
//! stay on their owners, the answers' keys and values are spread over the ranks, and only partial outputs are exchanged.

use serde::Serialize;

use super::addend::{Addend, product, within};
use super::block::LatentSizes;
use super::drawing::drawer;
use super::error::Error;
use super::operations::partial;
use super::sizes::{Sizes, adapter_elements};
use crate::model::attention::KEYS_MAX;
use crate::model::shape::{Layer, Mix, Segment};
use crate::model::token::{Drawer, Reason};
use crate::prompt::pages::Residency;
use crate::runtime::failure::Phase;
use crate::runtime::units::{Bytes, Tokens, float, from_dim, from_index};

/// How answers are sampled.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rollout {
    /// What computes a token of a group.
    pub drawn_by: Drawer,
    /// Whether pages of all layers are on the device.
    pub pages_on_device: bool,
    /// How many layers, the first ones, have their pages on the device; those of the others are staged layer by layer for every
    /// token.
    pub resident_layers: usize,
    /// Tokens of the longest answer.
    pub tokens: Tokens,
    /// Bytes of pages that are copied to a rank's device for every token.
    pub bytes_moved_per_token: Bytes,
    /// Predicted seconds of one token of all answers, half-way through the longest; absent without a prediction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_per_token: Option<f64>,
    /// Predicted seconds of answers of the greatest length; absent without a prediction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Of these: how long the host link takes for `bytes_moved_per_token`; absent where nothing moves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bus_seconds: Option<f64>,
    /// Limit of `seconds_per_token`.
    #[serde(skip)]
    token_sec_max: f64,
}

impl Rollout {
    /// `None` where answers come with the data.
    pub(super) fn new(sizes: &Sizes<'_>) -> Option<Rollout> {
        let layers = sizes.shape.layers.len();
        let resident_layers = sizes.choice.resident_of(layers);
        let moved = sizes.state_in(resident_layers..layers);
        let group = sizes.config.grpo.group_size;
        let on_gpu = || drawer(sizes.config, sizes.shape, group);
        sizes.config.rollout.sample.then(|| Rollout {
            drawn_by: if sizes.copies_overlap { on_gpu() } else { Drawer::Operations(Reason::Cpu) },
            pages_on_device: resident_layers == layers,
            resident_layers,
            tokens: sizes.config.sampled_len(),
            bytes_moved_per_token: product(&[sizes.prompt_rows, moved]),
            seconds_per_token: None,
            seconds: None,
            bus_seconds: None,
            token_sec_max: sizes.config.rollout.token_sec_max,
        })
    }

    /// Sets the predicted seconds of all tokens; `host` is the rate of the host link, GB/s.
    pub(super) fn time(&mut self, seconds: f64, host: f64) {
        let moved = self.bytes_moved_per_token;
        self.bus_seconds = (moved > Bytes(0)).then(|| float(moved.0) / (host * 1e9));
        self.seconds = Some(seconds);
        self.seconds_per_token = Some(seconds / float(self.tokens.0.max(1)));
    }

    /// Refuses a predicted token time above the limit.
    pub(super) fn refuse(self) -> Result<(), Error> {
        let most = self.token_sec_max;
        let Some(seconds) = self.seconds_per_token.filter(|&seconds| seconds > most) else { return Ok(()) };
        let (why, how) = if self.pages_on_device {
            (
                "each reads all weights and the prompt's keys and values on every device".to_owned(),
                "use more ranks (parallel.cp_size), choose a shorter context.prompt_len, or set rollout.token_sec_max \
                 higher",
            )
        } else {
            (
                format!("each brings {} of pages to every device", self.moved()),
                "set rollout.pages_on_device = true, use more ranks (parallel.cp_size) so that a rank has fewer \
                 positions, choose a shorter context.prompt_len, or set rollout.token_sec_max higher",
            )
        };
        Err(Error::TooSlow { at: String::new(), seconds, most, why, how })
    }

    /// In GB, the unit of the host rate.
    fn moved(&self) -> String {
        format!("{:.1} GB", float(self.bytes_moved_per_token.0) / 1e9)
    }

    /// The line about it.
    pub(super) fn text(&self, answers: u64) -> String {
        let moved = self.moved();
        let bus = self.bus_seconds.map(|seconds| format!(", {:.1} ms a token on the bus", 1e3 * seconds));
        let bus = bus.unwrap_or_default();
        let pages = match (self.pages_on_device, self.resident_layers) {
            (true, _) => "pages of all layers on the device".to_owned(),
            (false, 0) => format!("pages layer by layer for every token, {moved} to a rank{bus}"),
            (false, resident) => format!(
                "pages of {resident} layers on the device, those of the others layer by layer for every token, {moved} to a \
                 rank{bus}"
            ),
        };
        let seconds = match (self.seconds_per_token, self.seconds) {
            (Some(token), Some(all)) => format!("; {token:.4} s a token, {all:.1} s in all by the prediction"),
            _ => String::new(),
        };
        let drawn = match self.drawn_by.note() {
            Some(note) => format!("\nwarning: {note}"),
            None => format!(", by {}", self.drawn_by),
        };
        format!("{answers} answers of up to {} tokens sampled together, {pages}{seconds}{drawn}", self.tokens)
    }
}

/// Bytes of the graph of a decode step, with the tables and counters that it reads.
const GRAPH_BYTES: u64 = 64 << 20;

/// Bytes of a float32.
const FLOAT_BYTES: u64 = 4;

/// Multiprocessors of an H200: attention of a token is cut into about twice as many parts.
const MULTIPROCESSORS: u64 = 132;

/// Bytes of a token that is drawn: the root of its noise, its id, log-probability and entropy.
const TOKEN_BYTES: u64 = 4 * 8;

/// The setting that makes the addends of a group's tokens smaller.
const FEWER_ANSWERS: &str = "choose a smaller grpo.group_size";

impl Sizes<'_> {
    /// What a rank holds while it samples.
    pub(super) fn rollout(&self) -> Vec<Addend> {
        if !self.config.rollout.sample {
            return Vec::new();
        }
        let mut sum = self.pages_for_answers();
        sum.extend(self.answers_state());
        sum.extend(self.token());
        sum.extend(self.decode_step());
        sum
    }

    /// The prompt's pages on the device, if they do not stay there anyway: of resident layers a copy (without a GPU a second one),
    /// and what is staged of the others.
    fn pages_for_answers(&self) -> Vec<Addend> {
        if self.keeping.pages == Residency::Device {
            return Vec::new();
        }
        let layers = self.shape.layers.len();
        let resident = self.choice.resident_of(layers);
        let knob = "set rollout.pages_on_device = false, or use more ranks (parallel.cp_size)";
        let copied = |name, count: usize, bytes: u64| {
            let words = self.state_words(from_index(count), bytes);
            let reason = format!("{} positions × {words}, a copy of those that wait in host memory", self.prompt_rows);
            within(Phase::Rollout, name, product(&[self.prompt_rows, bytes]), reason, knob)
        };
        if resident == layers {
            return vec![copied("pages of all layers", layers, self.state_of(self.layers))];
        }
        let staged = self.staged(Phase::Rollout, 1);
        if resident == 0 {
            return vec![staged];
        }
        vec![copied("pages of resident layers", resident, self.state_in(0..resident)), staged]
    }

    /// Keys and values of this rank's share of the answers, and the recurrent states of all answers.
    fn answers_state(&self) -> Vec<Addend> {
        let group = self.sampled_answers();
        let own = self.config.sampled_len().0.div_ceil(self.config.cp_size(self.ranks));
        let all = self.state_of(self.layers);
        let most = self.state_of(1);
        let mut sum = vec![within(
            Phase::Rollout,
            "answers' keys and values",
            product(&[group, own, all + most]),
            format!("{group} answers × {own} rows × ({all} B in all layers; {most} B while one grows)"),
            "choose a smaller rollout.max_tokens, or a smaller grpo.group_size",
        )];
        sum.extend(self.answers_recurrent(group, FEWER_ANSWERS));
        sum
    }

    /// Answers that are sampled at one time: a group, or those to a held-out prompt.
    fn sampled_answers(&self) -> u64 {
        let config = self.config;
        let held_out = config.eval_samples().saturating_add(config.eval_greedy());
        config.grpo.group_size.max(if config.data.held_out.is_some() { held_out } else { 0 })
    }

    /// Buffers of fixed addresses and the graph of a decode step, where its kernels compute a token.
    fn decode_step(&self) -> Option<Addend> {
        // A greedy answer of a held-out group may be one too many; then kernels draw the other groups.
        let by_kernels = |&answers: &u64| drawer(self.config, self.shape, answers) == Drawer::Kernels;
        let answers = [self.sampled_answers(), self.config.grpo.group_size].into_iter().find(by_kernels);
        let answers = answers.filter(|_| self.copies_overlap)?;
        let outputs = |layer: &Layer| {
            let of_a = layer.projections.iter().filter(|projection| projection.segment == Segment::A);
            of_a.map(|projection| projection.outputs).sum::<u64>().max(2 * layer.ffn_width)
        };
        let raw = self.shape.most(outputs) + 3 * self.config.lora.rank;
        // An answer's own rows are cut into parts of 256.
        let own_parts = self.config.sampled_len().0.div_ceil(self.config.cp_size(self.ranks)).div_ceil(256);
        let parts = |layer: &Layer| match layer.mix {
            Mix::Grouped { query_heads, kv_heads, head_dim, .. } => {
                ((2 * MULTIPROCESSORS).div_ceil(kv_heads.max(1)).max(2) + own_parts) * query_heads * (head_dim + 1)
            }
            _ => 0,
        };
        let vocabulary = self.shape.vocabulary;
        let row = (2 * raw).max(vocabulary) + vocabulary + self.shape.most(parts);
        let tokens = self.config.sampled_len().0;
        Some(within(
            Phase::Rollout,
            "decode step",
            Bytes(GRAPH_BYTES.saturating_add(product(&[answers, row * FLOAT_BYTES + tokens * TOKEN_BYTES]).0)),
            format!(
                "the graph, and {answers} answers × ({row} float32: raw sums, logits, partial attention; {tokens} tokens × \
                 {TOKEN_BYTES} B)"
            ),
            FEWER_ANSWERS,
        ))
    }

    /// What the rows of one token are computed in.
    fn token(&self) -> Vec<Addend> {
        let Sizes { model_bytes: model, acc_bytes: acc, .. } = *self;
        let group = self.sampled_answers();
        let sharers = self.config.cp_size(self.ranks);
        let width = self.shape.width;
        let vocabulary = self.shape.vocabulary;
        let within = |name, bytes: Bytes, reason: String| within(Phase::Rollout, name, bytes, reason, FEWER_ANSWERS);
        let row = self.shape.most(|layer| {
            let widths = layer.mix.widths();
            4 * width + 3 * layer.ffn_width + widths.ask + widths.handed + widths.state + widths.output
        });
        let partial = self.shape.most(partial);
        let mut sum = vec![
            within(
                "logits",
                product(&[group, vocabulary, model + 2 * acc + 48]),
                format!("{group} answers × vocabulary {vocabulary}, in float64 with noise, order and sums"),
            ),
            within(
                "adapters as they are applied",
                product(&[adapter_elements(self.config, self.shape), model.max(acc)]),
                "a copy in the model's dtype, the scale in it".to_owned(),
            ),
            within("token rows", product(&[group, row, model]), format!("{group} answers × {row} elements of a layer")),
            within(
                "partial outputs",
                product(&[sharers, group, partial, acc]),
                format!("{sharers} ranks × {group} answers × {partial} elements"),
            ),
        ];
        if self.plain() {
            let keys = self.prompt_rows.min(from_dim(KEYS_MAX));
            let heads = self.query_heads();
            sum.push(within(
                "scores of the answers",
                product(&[group, heads, keys, acc, 3]),
                format!("{group} answers × {heads} heads × {keys} keys × 3"),
            ));
        }
        let latent = |layer: &Layer| {
            let chosen = layer.mix.chooses().map_or(0, |index| self.choosing(index, group));
            LatentSizes::of(layer).map_or(0, |sizes| chosen.max(self.attending(sizes, group, false)))
        };
        let latent = self.shape.most(latent);
        if latent > 0 {
            sum.push(within(
                "gathered keys of a token",
                Bytes(latent),
                format!("{group} answers: scores of a block of keys and the best of them, or the keys that are chosen"),
            ));
        }
        sum
    }
}
