//! The conventional schedule: whole sequences under plain autograd, prompt graph and all.
//!
//! The reference that tests judge the paged schedule by. It shares with it the formulas of the segments and nothing else:
//! no pages, no ranks, no log-sum-exp merging, no hand-written backward. It takes memory for one answer's whole graph;
//! the form that `bench` runs, as conventional trainers do, takes that of the layers' inputs and one layer's graph.

use tch::{Device, Kind, Tensor};

use crate::config::{KlEstimator, Loss};
use crate::model::decoder::{Decoder, FinishRows, Values};
use crate::model::latent::IndexSet;
use crate::model::latent::index::choose_plainly;
use crate::model::lora::Adapters;
use crate::model::planes::Planes;
use crate::runtime::units::{LayerIndex, Tokens, as_dim, from_index};
use crate::step::objective::Objective;
use crate::step::replay::TrainedAnswer;
use crate::tensor::boundary::backward;
use crate::tensor::{self, accumulation};

/// One group for the conventional schedule.
#[derive(Clone, Copy)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Group<'a> {
    pub prompt_ids: &'a [i64],
    pub answers: &'a [Vec<i64>],
    /// How many of the prompt's last positions carry gradient; earlier ones are constants.
    pub tail: Tokens,
    /// Logits are divided by this.
    pub temperature: f64,
}

/// What an answer is pulled towards, in the accumulation dtype, [tokens].
#[derive(Debug)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Target {
    /// Frozen log-probabilities of its tokens.
    pub old: Tensor,
    /// Log-probabilities of its tokens under the reference policy.
    pub reference: Tensor,
    /// Importance weights of its tokens; `None`: 1.
    pub importance: Option<Tensor>,
    pub advantage: f64,
    /// Weight of each token.
    pub weight: f64,
    /// 1 for tokens that are trained, 0 for the others, [tokens]; `None`: all are.
    pub trained: Option<Tensor>,
}

impl Group<'_> {
    /// Log-probabilities of every token of answer `index`, [tokens], with a graph back to the adapters.
    #[must_use = "the graph is in the result"]
    pub fn logprobs(&self, decoder: &dyn Decoder, adapters: &Adapters, index: usize) -> Tensor {
        let prompt = as_dim(from_index(self.prompt_ids.len()));
        let cut = prompt - self.tail.dim();
        // A GPU is asked for lengths at which scores of all constant rows cannot be written out.
        let fused = decoder.device() != Device::Cpu;
        let x_tw = decoder.embed(&self.sequence(index));
        let rows = x_tw.size()[0];
        let mut constant = x_tw.narrow(0, 0, cut);
        let mut live = x_tw.narrow(0, cut, rows - cut);
        // Keys of the constant rows and of the others, where layers choose them.
        let mut keys: Option<[IndexSet; 2]> = None;
        for layer in (0..decoder.layers()).map(LayerIndex) {
            let mixer = decoder.mixer(layer);
            let before = tch::no_grad(|| decoder.project(layer, &constant, &(0..cut).into(), adapters, Values::All));
            let now = decoder.project(layer, &live, &(cut..rows).into(), adapters, Values::All);
            if let Some(indexer) = decoder.indexer(layer) {
                let parts = [(&constant, 0..cut), (&live, cut..rows)];
                let parts = parts.map(|(x_tw, at)| decoder.project_index(layer, x_tw, at, adapters));
                let key_si = Tensor::cat(&[&parts[0].key_ti, &parts[1].key_ti], 0);
                keys = Some(parts.map(|part| choose_plainly(&part.rows, &key_si, indexer.top)));
            }
            let lent = |part: usize| keys.as_ref().map(|parts| parts[part].lend());
            let old_constant = constant;
            constant = tch::no_grad(|| {
                let mixed = mixer.plain(0..cut, &before.input.queries, &before.input.state, lent(0), fused);
                finish(decoder, adapters, layer, &old_constant, &mixed, &before.handed)
            });
            let state = Planes::join(vec![before.input.state, now.input.state]);
            let mixed = mixer.plain(cut..rows, &now.input.queries, &state, lent(1), false);
            live = finish(decoder, adapters, layer, &live, &mixed, &now.handed);
        }
        self.head(decoder, &Tensor::cat(&[&constant, &live], 0), index)
    }

    /// The group's loss; gradients add up in the adapters' `.grad`, answer by answer.
    #[must_use]
    pub fn backward(&self, decoder: &dyn Decoder, adapters: &Adapters, targets: &[Target], terms: &Objective) -> f64 {
        let mut total = 0.0;
        for (index, target) in targets.iter().enumerate() {
            let loss = target.loss(&self.logprobs(decoder, adapters, index), terms);
            if loss.requires_grad() {
                loss.backward();
            }
            total += loss.to_kind(Kind::Double).double_value(&[]);
        }
        total
    }

    /// The full-sequence gradient as a conventional trainer computes it: the library's attention kernel, and activation
    /// checkpointing, so that of the whole sequence only the inputs of the layers and one layer's graph are alive.
    /// Returns the loss; gradients add up in the adapters' `.grad`.
    ///
    /// # Errors
    /// When libtorch refuses.
    ///
    /// # Panics
    /// Never: a decoder has a first layer.
    pub fn backward_checkpointed(
        &self,
        decoder: &dyn Decoder,
        adapters: &Adapters,
        targets: &[Target],
        terms: &Objective,
    ) -> Result<f64, tensor::Error> {
        let mut total = 0.0;
        for (index, target) in targets.iter().enumerate() {
            let inputs = tch::no_grad(|| self.layer_inputs(decoder, adapters, index));
            let (top, below) = inputs.split_last().expect("the input of layer 0 is always there");
            let leaf = top.detach().set_requires_grad(true);
            let loss = target.loss(&self.head(decoder, &leaf, index), terms);
            loss.backward();
            total += loss.to_kind(Kind::Double).double_value(&[]);
            let mut dy_tw = leaf.grad();
            for (layer, x_tw) in below.iter().enumerate().rev() {
                let x_tw = x_tw.detach().set_requires_grad(true);
                let layer = LayerIndex(layer);
                let mut index = tch::no_grad(|| index_of(decoder, adapters, layer, below));
                let y_tw = whole_layer(decoder, adapters, layer, &x_tw, &mut index);
                backward(&[(&y_tw, &dy_tw)])?;
                dy_tw = x_tw.grad();
            }
        }
        Ok(total)
    }

    /// Log-probabilities of answer `index` as the checkpointed schedule scores them, without a graph.
    pub fn score(&self, decoder: &dyn Decoder, adapters: &Adapters, index: usize) -> Tensor {
        tch::no_grad(|| {
            let mut x_tw = decoder.embed(&self.sequence(index));
            let mut keys = None;
            for layer in (0..decoder.layers()).map(LayerIndex) {
                x_tw = whole_layer(decoder, adapters, layer, &x_tw, &mut keys);
            }
            self.head(decoder, &x_tw, index)
        })
    }

    /// Prompt and answer but for the last token, which is no input.
    fn sequence(&self, index: usize) -> Vec<i64> {
        let answer = &self.answers[index];
        self.prompt_ids.iter().chain(&answer[..answer.len() - 1]).copied().collect()
    }

    /// Inputs of all layers and the output of the last.
    fn layer_inputs(&self, decoder: &dyn Decoder, adapters: &Adapters, index: usize) -> Vec<Tensor> {
        let mut inputs = vec![decoder.embed(&self.sequence(index))];
        let mut index = None;
        for layer in (0..decoder.layers()).map(LayerIndex) {
            inputs.push(whole_layer(decoder, adapters, layer, &inputs[layer.0], &mut index));
        }
        inputs
    }

    /// Log-probabilities of the answer's tokens from the last hidden states of the whole sequence.
    fn head(&self, decoder: &dyn Decoder, x_tw: &Tensor, index: usize) -> Tensor {
        let answer = &self.answers[index];
        let (prompt, rows) = (as_dim(from_index(self.prompt_ids.len())), as_dim(from_index(answer.len())));
        let last = x_tw.narrow(0, prompt - 1, rows);
        let logits = decoder.logits(&last).to_kind(accumulation(decoder.kind())) / self.temperature;
        let targets = Tensor::from_slice(answer).to_device(decoder.device()).unsqueeze(1);
        logits.log_softmax(-1, accumulation(decoder.kind())).gather(1, &targets, false).squeeze_dim(1)
    }
}

impl Target {
    /// `answer` with its own scores as reference. An answer without an advantage takes no part: nothing of it is left with
    /// a weight of 0.
    #[must_use]
    pub fn new(answer: &TrainedAnswer, old: Tensor) -> Target {
        let numbers = |mask: &Vec<bool>| mask.iter().map(|&trained| f32::from(u8::from(trained))).collect::<Vec<_>>();
        Target {
            trained: answer.mask.as_ref().map(|mask| Tensor::from_slice(&numbers(mask)).to_device(old.device())),
            reference: old.shallow_clone(),
            importance: None,
            advantage: answer.advantage.unwrap_or(0.0),
            weight: answer.advantage.map_or(0.0, |_| answer.weight),
            old,
        }
    }

    /// The answer's share of the loss.
    fn loss(&self, logprobs: &Tensor, terms: &Objective) -> Tensor {
        let log_ratio = logprobs - &self.old;
        let token_ratio = log_ratio.exp();
        let ratio = match terms.loss {
            Loss::Grpo | Loss::Cispo => token_ratio.shallow_clone(),
            Loss::Gspo => self.mean(&log_ratio).exp().expand_as(&log_ratio),
        };
        let clipped = ratio.clamp(1.0 - terms.clip_low, 1.0 + terms.clip_high);
        let gain = match terms.loss {
            Loss::Cispo => clipped.detach() * self.advantage * logprobs,
            Loss::Grpo | Loss::Gspo => {
                let gain = (&ratio * self.advantage).minimum(&(clipped * self.advantage));
                match terms.clip_dual.filter(|_| self.advantage < 0.0) {
                    Some(most) => gain.clamp_min(most * self.advantage),
                    None => gain,
                }
            }
        };
        let mut token = -gain;
        if let Some(importance) = &self.importance {
            token *= importance;
        }
        if terms.kl_coef > 0.0 {
            token += self.divergence(logprobs, &token_ratio, terms.kl_estimator) * terms.kl_coef;
        }
        if let Some(trained) = &self.trained {
            token *= trained;
        }
        (token * self.weight).sum(logprobs.kind())
    }

    /// Mean over the trained tokens.
    fn mean(&self, x: &Tensor) -> Tensor {
        match &self.trained {
            Some(trained) => (x * trained).sum(x.kind()) / trained.sum(x.kind()).clamp_min(1.0),
            None => x.mean(x.kind()),
        }
    }

    /// The estimate of each token's divergence from the reference.
    fn divergence(&self, logprobs: &Tensor, token_ratio: &Tensor, estimator: KlEstimator) -> Tensor {
        let gap = &self.reference - logprobs;
        match estimator {
            KlEstimator::K1 => -gap,
            KlEstimator::K2 => gap.square() * 0.5,
            KlEstimator::K3 => gap.exp() - &gap - 1.0,
            KlEstimator::K3Ratio => token_ratio * (gap.exp() - &gap - 1.0),
        }
    }
}

/// One block over a whole sequence with the library's attention kernel. `index` holds the rows' keys in layers that choose
/// them; a layer that owns an index writes it, unless it is given there as it was chosen before.
fn whole_layer(
    decoder: &dyn Decoder,
    adapters: &Adapters,
    layer: LayerIndex,
    x_tw: &Tensor,
    index: &mut Option<IndexSet>,
) -> Tensor {
    let rows = x_tw.size()[0];
    let projected = decoder.project(layer, x_tw, &(0..rows).into(), adapters, Values::All);
    if let Some(indexer) = decoder.indexer(layer) {
        let own = decoder.project_index(layer, x_tw, 0..rows, adapters);
        *index = Some(choose_plainly(&own.rows, &own.key_ti, indexer.top));
    }
    let input = &projected.input;
    let lent = index.as_ref().map(IndexSet::lend);
    let mixed = decoder.mixer(layer).plain(0..rows, &input.queries, &input.state, lent, true);
    finish(decoder, adapters, layer, x_tw, &mixed, &projected.handed)
}

/// The keys that a layer below has chosen for this one; `None` where the layer chooses its own or sees all. `inputs` are those
/// of all layers.
fn index_of(decoder: &dyn Decoder, adapters: &Adapters, layer: LayerIndex, inputs: &[Tensor]) -> Option<IndexSet> {
    let owner = decoder.index_owner(layer).filter(|&owner| owner != layer)?;
    let (indexer, x_tw) = (decoder.indexer(owner)?, &inputs[owner.0]);
    let own = decoder.project_index(owner, x_tw, 0..x_tw.size()[0], adapters);
    Some(choose_plainly(&own.rows, &own.key_ti, indexer.top))
}

/// Segment B with plain experts.
fn finish(
    decoder: &dyn Decoder,
    adapters: &Adapters,
    layer: LayerIndex,
    x_tw: &Tensor,
    mixed: &Tensor,
    handed: &Planes,
) -> Tensor {
    let finished = decoder.finish(layer, &FinishRows { x_tw, mixed, handed, kept: None }, adapters, Values::All);
    match (decoder.experts(layer), &finished.routed) {
        (Some(experts), Some(routed)) => finished.y_tw + experts.plain(routed, adapters),
        _ => finished.y_tw,
    }
}
