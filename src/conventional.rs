//! The conventional schedule: whole sequences under plain autograd, prompt graph and all.
//!
//! The reference that tests judge the paged schedule by. It shares with it the formulas of the segments and nothing else:
//! no pages, no ranks, no log-sum-exp merging, no hand-written backward. It takes memory for one answer's whole graph.

use tch::{Kind, Tensor};

use crate::model::decoder::Decoder;
use crate::model::lora::Adapters;
use crate::objective::Terms;
use crate::tensor::accumulation;
use crate::units::{LayerIndex, Tokens, as_dim, from_index};

/// One group for the conventional schedule.
#[derive(Clone, Copy)]
pub struct Group<'a> {
    /// The prompt.
    pub prompt_ids: &'a [i64],
    /// The answers.
    pub answers: &'a [Vec<i64>],
    /// How many of the prompt's last positions carry gradient; earlier ones are constants.
    pub tail: Tokens,
    /// Logits are divided by this.
    pub temperature: f64,
}

/// What an answer is pulled towards, in the accumulation dtype, [tokens].
#[derive(Debug)]
pub struct Target {
    /// Frozen log-probabilities of its tokens.
    pub old: Tensor,
    /// Log-probabilities of its tokens under the reference policy.
    pub reference: Tensor,
    /// Its advantage.
    pub advantage: f64,
    /// Weight of each token.
    pub weight: f64,
}

impl Group<'_> {
    /// Log-probabilities of every token of answer `index`, [tokens], with a graph back to the adapters.
    #[must_use = "the graph is in the result"]
    pub fn logprobs(&self, decoder: &dyn Decoder, adapters: &Adapters, index: usize) -> Tensor {
        let prompt = as_dim(from_index(self.prompt_ids.len()));
        let cut = prompt - self.tail.dim();
        let answer = &self.answers[index];
        let ids: Vec<i64> = self.prompt_ids.iter().chain(&answer[..answer.len() - 1]).copied().collect();
        let rows = as_dim(from_index(ids.len()));
        let x_tw = decoder.embed(&ids);
        let mut constant = x_tw.narrow(0, 0, cut);
        let mut live = x_tw.narrow(0, cut, rows - cut);
        for layer in (0..decoder.layers()).map(LayerIndex) {
            let mixer = decoder.mixer(layer);
            let before = tch::no_grad(|| decoder.project(layer, &constant, 0..cut, adapters));
            let (before_ask, before_state) = mixer.split(before.mix);
            let now = decoder.project(layer, &live, cut..rows, adapters);
            let (ask, state) = mixer.split(now.mix);
            let all: Vec<Tensor> =
                before_state.iter().zip(&state).map(|(before, now)| Tensor::cat(&[before, now], 0)).collect();
            constant = tch::no_grad(|| {
                let mixed = mixer.plain(0..cut, &before_ask, &before_state);
                decoder.finish(layer, &constant, &mixed, &before.keep, adapters)
            });
            let mixed = mixer.plain(cut..rows, &ask, &all);
            live = decoder.finish(layer, &live, &mixed, &now.keep, adapters);
        }
        let last = Tensor::cat(&[&constant, &live], 0).narrow(0, prompt - 1, rows - prompt + 1);
        let logits = decoder.logits(&last).to_kind(accumulation(decoder.kind())) / self.temperature;
        let targets = Tensor::from_slice(answer).to_device(decoder.device()).unsqueeze(1);
        logits.log_softmax(-1, accumulation(decoder.kind())).gather(1, &targets, false).squeeze_dim(1)
    }

    /// The group's loss; gradients add up in the adapters' `.grad`, answer by answer.
    #[must_use]
    pub fn backward(&self, decoder: &dyn Decoder, adapters: &Adapters, targets: &[Target], terms: &Terms) -> f64 {
        let mut total = 0.0;
        for (index, target) in targets.iter().enumerate() {
            let logprobs = self.logprobs(decoder, adapters, index);
            let ratio = (&logprobs - &target.old).exp();
            let clipped = ratio.clamp(1.0 - terms.clip_low, 1.0 + terms.clip_high);
            let mut token = -(&ratio * target.advantage).minimum(&(clipped * target.advantage));
            if terms.kl_coef > 0.0 {
                let gap = &target.reference - &logprobs;
                token += (gap.exp() - &gap - 1.0) * terms.kl_coef;
            }
            let loss = (token * target.weight).sum(logprobs.kind());
            if loss.requires_grad() {
                loss.backward();
            }
            total += loss.to_kind(Kind::Double).double_value(&[]);
        }
        total
    }
}
