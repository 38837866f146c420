//! Sampled answers: what a rank holds while it samples, where the prompt's pages are, and how long a token takes.
//!
//! All answers of a group get their tokens in lock-step. Every rank computes the rows of all answers. The prompt's pages
//! stay on their owners, the answers' keys and values are spread over the ranks, and only partial outputs are exchanged.

use serde::Serialize;

use super::addend::{Addend, product, within};
use super::block::LatentSizes;
use super::error::Error;
use super::operations::partial;
use super::sizes::{Sizes, adapter_elements};
use crate::model::attention::KEYS_MAX;
use crate::model::shape::Layer;
use crate::prompt::pages::Residency;
use crate::runtime::failure::Phase;
use crate::runtime::units::{Bytes, Tokens, float, from_dim};

/// How answers are sampled.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rollout {
    /// Whether pages of all layers are on the device; otherwise they are staged layer by layer for every token.
    pub pages_on_device: bool,
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
    /// Limit of `seconds_per_token`.
    #[serde(skip)]
    token_sec_max: f64,
}

impl Rollout {
    /// `None` where answers come with the data.
    pub(super) fn new(sizes: &Sizes<'_>) -> Option<Rollout> {
        let pages_on_device = sizes.choice.pages_stay();
        let moved = if pages_on_device { 0 } else { sizes.state_of(sizes.layers) };
        sizes.config.rollout.sample.then(|| Rollout {
            pages_on_device,
            tokens: sizes.config.sampled_len(),
            bytes_moved_per_token: product(&[sizes.prompt_rows, moved]),
            seconds_per_token: None,
            seconds: None,
            token_sec_max: sizes.config.rollout.token_sec_max,
        })
    }

    /// Sets the predicted seconds of all tokens.
    pub(super) fn time(&mut self, seconds: f64) {
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
        let pages = if self.pages_on_device {
            "pages of all layers on the device".to_owned()
        } else {
            format!("pages layer by layer for every token, {} to a rank", self.moved())
        };
        let seconds = match (self.seconds_per_token, self.seconds) {
            (Some(token), Some(all)) => format!("; {token:.4} s a token, {all:.1} s in all by the prediction"),
            _ => String::new(),
        };
        format!("{answers} answers of up to {} tokens sampled together, {pages}{seconds}", self.tokens)
    }
}

/// The setting that makes the addends of a group's tokens smaller.
const FEWER_ANSWERS: &str = "choose a smaller grpo.group_size";

impl Sizes<'_> {
    /// What a rank holds while it samples.
    pub(super) fn rollout(&self) -> Vec<Addend> {
        if !self.config.rollout.sample {
            return Vec::new();
        }
        let mut sum: Vec<Addend> = self.pages_for_answers().into_iter().collect();
        sum.extend(self.answers_state());
        sum.extend(self.token());
        sum
    }

    /// The prompt's pages on the device, if they do not stay there anyway. Without a GPU this is a second copy.
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
            product(&[self.prompt_rows, all]),
            format!(
                "{} positions × {}, a copy of those that wait in host memory",
                self.prompt_rows,
                self.state_words(self.layers, all)
            ),
            "set rollout.pages_on_device = false, or use more ranks (parallel.cp_size)",
        ))
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

    /// Answers that are sampled at one time: a group, and for held-out prompts one that is greedy.
    fn sampled_answers(&self) -> u64 {
        self.config.grpo.group_size.saturating_add(u64::from(self.config.data.held_out.is_some()))
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
