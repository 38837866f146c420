//! Sampled answers: what a rank holds while they are drawn, where the prompt's pages are then, and what a token takes.
//!
//! The answers of a group get their tokens in lock-step. Every rank computes the rows of all of them; the prompt's pages
//! stay on the ranks that own them, the answers' own keys and values are dealt to the ranks, and only partial outputs meet.

use serde::Serialize;

use super::seconds::{Rates, phase_seconds};
use super::sizes::{Sizes, adapter_elements, product, within};
use super::work::{Work, partial};
use super::{Addend, Error, Plan};
use crate::config::RunConfig;
use crate::model::attention::KEYS_MAX;
use crate::model::shape::{Layer, Mix, Shape};
use crate::prompt::pages::Residency;
use crate::runtime::failure::Phase;
use crate::runtime::units::{Bytes, Tokens, float, from_dim};

/// How answers are drawn.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rollout {
    /// Whether pages of all layers lie on the device meanwhile; otherwise they come layer by layer for every token.
    pub pages_on_device: bool,
    /// Tokens of the longest answer.
    pub tokens: Tokens,
    /// Bytes of pages that come to a rank's device for every token.
    pub bytes_moved_per_token: Bytes,
    /// Predicted seconds of a token of all answers, half-way through the longest; absent where nothing is predicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_per_token: Option<f64>,
    /// Predicted seconds of answers that are as long as may be; absent where nothing is predicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// The most seconds that a token may take.
    #[serde(skip)]
    token_sec_max: f64,
}

impl Rollout {
    /// What `sizes` says of it; nothing where answers come with the data.
    pub(super) fn of(sizes: &Sizes<'_>) -> Option<Rollout> {
        let pages_on_device = sizes.choice.all_pages || sizes.keeping.pages == Residency::Device;
        let moved = if pages_on_device { 0 } else { sizes.state_of(sizes.layers) };
        sizes.config.rollout.sample.then(|| Rollout {
            pages_on_device,
            tokens: sizes.config.sampled_len(),
            bytes_moved_per_token: product(&[sizes.rows, moved]),
            seconds_per_token: None,
            seconds: None,
            token_sec_max: sizes.config.rollout.token_sec_max,
        })
    }

    /// Refuses tokens that take too long by the prediction, where there is one.
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

    /// In the unit of the rate that it is divided by.
    fn moved(&self) -> String {
        format!("{:.1} GB", float(self.bytes_moved_per_token.0) / 1e9)
    }

    /// In words.
    pub(super) fn text(&self, answers: u64) -> String {
        let pages = if self.pages_on_device {
            "pages of all layers on the device".to_owned()
        } else {
            format!("pages layer by layer for every token, {} to a rank", self.moved())
        };
        let seconds = match (self.seconds_per_token, self.seconds) {
            (Some(token), Some(all)) => format!("; {token:.4} s a token, {all:.1} s in all by the prediction"),
            _ => String::new(),
        };
        format!("{answers} answers of up to {} tokens drawn together, {pages}{seconds}", self.tokens)
    }
}

impl Plan {
    /// Predicts what a token takes that is drawn.
    pub(super) fn time_answers(&mut self, config: &RunConfig, shape: &Shape, rates: &Rates) {
        if self.rollout.is_none() {
            return;
        }
        let all = phase_seconds(Phase::Rollout, &Work::of(config, self, shape).rollout(), rates).seconds;
        if let Some(rollout) = &mut self.rollout {
            rollout.seconds = Some(all);
            rollout.seconds_per_token = Some(all / float(rollout.tokens.0.max(1)));
        }
    }
}

/// What each addend of a group's tokens grows with.
const FEWER_ANSWERS: &str = "choose a smaller grpo.group_size";

impl Sizes<'_> {
    /// What a rank holds while answers are drawn.
    pub(super) fn rollout(&self) -> Vec<Addend> {
        if !self.config.rollout.sample {
            return Vec::new();
        }
        let mut sum: Vec<Addend> = self.pages_for_answers().into_iter().collect();
        sum.extend(self.answers_state());
        sum.extend(self.token());
        sum
    }

    /// The prompt's pages where they do not lie on the device anyway. Without a GPU all layers' are a second copy.
    fn pages_for_answers(&self) -> Option<Addend> {
        if self.keeping.pages == Residency::Device {
            return None;
        }
        if !self.choice.all_pages {
            return Some(self.staged(Phase::Rollout, 1));
        }
        let all = self.state_of(self.layers);
        Some(within(
            Phase::Rollout,
            "pages of all layers",
            product(&[self.rows, all]),
            format!(
                "{} positions × {}, a copy of those that wait in host memory",
                self.rows,
                self.state_words(self.layers, all)
            ),
            "set rollout.pages_on_device = false, or use more ranks (parallel.cp_size)",
        ))
    }

    /// Keys and values of the answers on this rank, and recurrent states, which every rank has of all answers.
    fn answers_state(&self) -> Vec<Addend> {
        let group = self.config.grpo.group_size;
        let own = self.config.sampled_len().0.div_ceil(self.config.cp_size(self.ranks));
        let (all, most) = (self.state_of(self.layers), self.state_of(1));
        let mut sum = vec![within(
            Phase::Rollout,
            "answers' keys and values",
            product(&[group, own, all + most]),
            format!("{group} answers × {own} rows × ({all} B in all layers; {most} B while one grows)"),
            "choose a smaller rollout.max_tokens, or a smaller grpo.group_size",
        )];
        let border = self.shape.sum(|layer| {
            let (inputs, state) = layer.mix.border();
            inputs * self.model + state * self.acc
        });
        if border > 0 {
            sum.push(within(
                Phase::Rollout,
                "answers' recurrent states",
                product(&[group, border]),
                format!("{group} answers × {border} B"),
                FEWER_ANSWERS,
            ));
        }
        sum
    }

    /// What the rows of one token compute in.
    fn token(&self) -> Vec<Addend> {
        let (group, model, acc) = (self.config.grpo.group_size, self.model, self.acc);
        let sharers = self.config.cp_size(self.ranks);
        let (width, vocabulary) = (self.shape.width, self.shape.vocabulary);
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
            let keys = self.rows.min(from_dim(KEYS_MAX));
            let heads = self.shape.most(|layer| match layer.mix {
                Mix::Grouped { query_heads, .. } => query_heads,
                _ => 0,
            });
            sum.push(within(
                "scores of the answers",
                product(&[group, heads, keys, acc, 3]),
                format!("{group} answers × {heads} heads × {keys} keys × 3"),
            ));
        }
        let chosen = |layer: &Layer| layer.mix.chooses().map_or(0, |index| index.top * layer.mix.widths().carries);
        let latents = self.shape.most(chosen);
        if latents > 0 {
            let scores = 2 * self.rows * acc;
            sum.push(within(
                "choosing",
                product(&[group, scores + latents * model]),
                format!("{group} answers × ({} scores and their order; the latents that are chosen)", self.rows),
            ));
        }
        sum
    }
}
