//! Rollout: the policy samples a group's answers, all of them in step, from the captured pages.
//!
//! ```text
//!   row P−1 ──head──▶ sample token 0 of every answer ──▶ row P of every answer through all layers ──head──▶ sample token 1 …
//! ```
//!
//! How it departs from serving one answer after another:
//! 1. One pass over the pages serves the whole group: answers stand at the same position, so in each layer their queries are
//!    rows of one rectangle over the same keys.
//! 2. Every rank of a prompt computes all rows, since a row's time is the reading of weights; the prompt's pages and the
//!    answers' own state are shared out, and ranks' parts are merged by log-sum-exp in rank order.
//! 3. Noise is a function of seed, group, answer, token and vocabulary entry, and the token with the largest sum of
//!    log-probability and Gumbel noise is sampled (Gumbel 1954; Maddison et al. 2014), so rounding, which differs between
//!    numbers of ranks, changes a token only where two sums are equal but for it. The prompt's first rank samples for all.
//! 4. An answer may call a tool. The reply comes token by token in the place of drawn tokens, so that answers stay in step.

mod answer;
mod calls;
mod choices;
mod fused;
mod noise;
mod sampling;

use std::rc::Rc;

use tch::{Kind, Tensor};

use answer::Origin;
use calls::Calling;
use choices::Drawn;

use crate::model::answers::{AnswerRows, AnswerState};
use crate::model::decoder::{Decoder, FinishRows, Values};
use crate::model::head::Head;
use crate::model::latent::IndexSet;
use crate::model::lora::Adapters;
use crate::model::pass::Pass;
use crate::model::past::Past;
use crate::model::token::{self, Drawer};
use crate::prompt::handoff::Captured;
use crate::prompt::layout::PromptLayout;
use crate::prompt::pages::{Choice, Staged};
use crate::runtime::failure::{Classified, Exit, Failure};
use crate::runtime::liveness::Tracker;
use crate::runtime::units::{LayerIndex, Rank, Tokens, as_dim, from_index};
use crate::world::exchange::gather_rows;

pub use answer::{CallCounts, Replied, SampledAnswer};
pub use calls::{Call, Caller, Calls, Reply};
pub use choices::ChangedChoices;
pub(crate) use choices::changed;
pub use noise::Stream;
pub use sampling::Sampling;
use sampling::Token;

/// Why no token can be sampled.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub enum Error {
    /// The policy's distribution is none.
    #[error(
        "the policy's log-probabilities after {tokens} tokens of answer {answer} are not finite, so none can be sampled; the \
         adapters or the model are broken, or optimizer.lr is far too large"
    )]
    NotFinite {
        answer: usize,
        /// Tokens that it has.
        tokens: usize,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        Exit::NotFinite
    }
}

/// What is sampled for one group.
#[derive(Clone, Copy, Debug)]
pub struct SampleRequest<'a> {
    /// How many answers.
    pub answers: usize,
    /// How many of them, the last ones, take the most probable token at each place instead of a sampled one.
    pub greedy: usize,
    /// Tokens of an answer, at most; at least 1.
    pub longest: Tokens,
    /// Tokens that end an answer, and belong to it.
    pub ends: &'a [i64],
    /// From which tokens.
    pub sampling: Sampling,
    /// The group's noise.
    pub stream: Stream,
    /// How many layers, the first ones, have their pages on the device meanwhile; those of the others come for every token.
    /// Equal on all ranks.
    pub resident: usize,
    /// Whether kernels of a decode step draw where there are some; else single operations do.
    pub fused: bool,
    /// What becomes of the keys and experts that are chosen.
    pub choices: DrawnChoices,
    /// Who answers the calls in answers; `None`: they are text as any other. Single operations draw where there is one.
    pub calls: Option<Calls<'a>>,
}

/// What becomes of the keys and experts that are chosen when answers are sampled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DrawnChoices {
    /// The passes that score and train the answers use them.
    Use,
    /// Those passes choose again; what differs is counted.
    Compare,
    /// No other pass follows over these answers.
    Drop,
}

/// Samples a group's answers after a captured prompt. Every rank of the prompt takes part and gets the same answers.
///
/// # Errors
/// When the pages were captured under other adapters than the pass's, or a distribution is not finite.
pub fn run(
    pass: &Pass,
    head: &Head,
    layout: &PromptLayout,
    captured: &mut Captured,
    request: &SampleRequest,
    tracker: &Tracker,
) -> Result<Vec<SampledAnswer>, Failure> {
    tch::no_grad(|| {
        let adapters = pass.adapters.applied(pass.decoder.kind());
        let pass = Pass { adapters: &adapters, ..*pass };
        let (answers, drawn) = Rollout::begin(&pass, head, layout, captured, request)?.all(tracker)?;
        let Some(drawn) = drawn else { return Ok(answers) };
        let lengths: Vec<usize> = answers.iter().map(|answer| answer.ids.len()).collect();
        let drawn = drawn.pool(&pass, layout, &lengths)?;
        if request.choices == DrawnChoices::Use {
            captured.choices = Rc::new(drawn);
            captured.from_sampling = true;
        } else {
            captured.drawn = Some(drawn);
        }
        Ok(answers)
    })
}

/// Who draws `answers` answers under these adapters, where nothing asks for single operations.
#[must_use]
pub fn computed_by(decoder: &dyn Decoder, adapters: &Adapters, answers: usize) -> Drawer {
    token::drawer(decoder, token::adapter_rank(adapters), from_index(answers))
}

struct Rollout<'a> {
    pass: &'a Pass<'a>,
    head: &'a Head,
    layout: &'a PromptLayout,
    captured: &'a Captured,
    request: &'a SampleRequest<'a>,
    /// Pages of the first layers, which stay.
    staged: Vec<Staged>,
    states: Vec<AnswerState>,
    /// Answers that have not ended, in order: the rows of every tensor here.
    live: Vec<usize>,
    sampled: Vec<SampledAnswer>,
    /// `None` where no pass uses them.
    drawn: Option<Drawn>,
    /// The calls of the answers; `None` where nobody answers them.
    calling: Option<Calling<'a>>,
}

impl<'a> Rollout<'a> {
    fn begin(
        pass: &'a Pass<'a>,
        head: &'a Head,
        layout: &'a PromptLayout,
        captured: &'a Captured,
        request: &'a SampleRequest<'a>,
    ) -> Result<Self, Failure> {
        let mut rollout = Rollout {
            pass,
            head,
            layout,
            captured,
            request,
            staged: Vec::new(),
            states: Vec::new(),
            live: (0..request.answers).collect(),
            sampled: vec![SampledAnswer::default(); request.answers],
            drawn: (request.choices != DrawnChoices::Drop).then(|| Drawn::new(pass)),
            calling: request.calls.map(|calls| Calling::new(calls, request.answers, request.longest, request.ends)),
        };
        let layers = pass.decoder.layers();
        let resident = request.resident.min(layers);
        let staged = (0..resident).map(|layer| rollout.stage(layer, Some(layer + 1).filter(|&next| next < layers)));
        rollout.staged = staged.collect::<Result<_, _>>()?;
        Ok(rollout)
    }

    fn stage(&self, layer: usize, next: Option<usize>) -> Result<Staged, Failure> {
        let stamp = self.pass.adapters.stamp();
        Ok(self.captured.pages.stage(LayerIndex(layer), next.map(LayerIndex), stamp)?)
    }

    /// Pages of a layer that do not stay; `None` where they do.
    fn passing(&self, layer: usize) -> Result<Option<Staged>, Failure> {
        let (layers, first) = (self.pass.decoder.layers(), self.staged.len());
        // After the last layer the next token starts from the first one that does not stay.
        let next = if layer + 1 < layers { layer + 1 } else { first };
        (layer >= first).then(|| self.stage(layer, Some(next))).transpose()
    }

    fn all(mut self, tracker: &Tracker) -> Result<(Vec<SampledAnswer>, Option<Drawn>), Failure> {
        let x_1w = self.last_row();
        let mut logprobs_av =
            self.head.log_softmax(self.pass.decoder, &x_1w).expand([as_dim(from_index(self.live.len())), -1], false);
        let mut tokens = self.sample(&logprobs_av, tracker)?;
        if self.live.is_empty() {
            return Ok(self.ended());
        }
        if let Some(step) = fused::begin(&self) {
            return self.all_fused(step, &tokens, tracker);
        }
        self.make_states();
        while !self.live.is_empty() {
            let x_aw = self.rows(&tokens, tracker)?;
            logprobs_av = self.head.log_softmax(self.pass.decoder, &x_aw);
            tokens = self.sample(&logprobs_av, tracker)?;
        }
        Ok(self.ended())
    }

    /// The answers, with what the prompt's first rank knows of their calls, and what was chosen for them.
    fn ended(mut self) -> (Vec<SampledAnswer>, Option<Drawn>) {
        if let Some(calling) = &self.calling {
            let told = self.pass.cp_group.axis.gather_texts(&calling.told());
            calls::note(&mut self.sampled, &told[0]);
        }
        (self.sampled, self.drawn)
    }

    /// State of the answers that go on, in every layer.
    fn make_states(&mut self) {
        let (pass, request) = (self.pass, self.request);
        let rows = AnswerRows {
            answers: self.live.len(),
            prompt_end: self.layout.end(),
            rows_max: request.longest,
            rank: pass.cp_group.axis.rank(),
            ranks: pass.cp_group.axis.size(),
        };
        let device = pass.decoder.device();
        let state = |layer: usize| {
            let planes = pass.decoder.mixer(LayerIndex(layer)).planes();
            AnswerState::new(&rows, &planes, device, pass.cp_group.ledger)
        };
        self.states = (0..pass.decoder.layers()).map(state).collect();
    }

    /// The last hidden state of row P−1 on every rank.
    fn last_row(&self) -> Tensor {
        let (axis, decoder) = (self.pass.cp_group.axis, self.pass.decoder);
        let none = || Tensor::zeros([0, decoder.width()], (decoder.kind(), decoder.device()));
        let own = self.captured.last_row.as_ref().map_or_else(none, Tensor::shallow_clone);
        gather_rows(axis, &own, &self.layout.last_row_counts())
    }

    /// Samples the next token of every answer that has not ended, unless it is one of a reply; returns those of the answers
    /// that go on.
    fn sample(&mut self, logprobs_av: &Tensor, tracker: &Tracker) -> Result<Vec<i64>, Failure> {
        let length = self.sampled[self.live[0]].ids.len();
        let mut bytes = vec![0; self.live.len() * sampling::TOKEN_BYTES];
        let mut origins = vec![Origin::Drawn.byte(); self.live.len()];
        let axis = self.pass.cp_group.axis;
        if axis.rank() == Rank(0) {
            let sampled = self.request.answers.saturating_sub(self.request.greedy);
            let stream = |answer: usize| self.request.stream.part(from_index(answer)).part(from_index(length));
            let streams: Vec<Option<Stream>> =
                self.live.iter().map(|&answer| (answer < sampled).then(|| stream(answer))).collect();
            bytes = sampling::sample(logprobs_av, &streams, &self.request.sampling);
            if let Some(calling) = &mut self.calling {
                let mut tokens = sampling::tokens(&bytes);
                let next = calling.next(&self.live, &self.sampled, &mut tokens, &mut || tracker.report_alive())?;
                origins = next.into_iter().map(Origin::byte).collect();
                bytes = sampling::bytes(&tokens);
            }
        }
        axis.broadcast(&mut bytes);
        if self.calling.is_some() {
            axis.broadcast(&mut origins);
        }
        let (mut rows, mut tokens) = (Vec::new(), Vec::new());
        for (row, (token, origin)) in sampling::tokens(&bytes).into_iter().zip(origins).enumerate() {
            if self.take(self.live[row], token, Origin::of_byte(origin))? {
                rows.push(row);
                tokens.push(token.id);
            }
        }
        if rows.len() < self.live.len() && !rows.is_empty() && !self.states.is_empty() {
            let kept: Vec<i64> = rows.iter().map(|&row| as_dim(from_index(row))).collect();
            let kept = Tensor::from_slice(&kept).to_device(self.pass.decoder.device());
            self.states.iter_mut().for_each(|state| state.keep(&kept));
        }
        self.live = rows.into_iter().map(|row| self.live[row]).collect();
        Ok(tokens)
    }

    /// Adds a token to an answer; returns whether the answer goes on.
    fn take(&mut self, answer: usize, token: Token, origin: Origin) -> Result<bool, Failure> {
        let sampled = &mut self.sampled[answer];
        if !(token.logprob.is_finite() && token.entropy.is_finite()) {
            return Err(Error::NotFinite { answer, tokens: sampled.ids.len() }.into());
        }
        sampled.push(token, origin);
        // A reply may hold what ends an answer, as the end of a turn.
        let ended = origin != Origin::Given && self.request.ends.contains(&token.id);
        let is_full = from_index(sampled.ids.len()) >= self.request.longest.0;
        sampled.truncated = !ended && (is_full || origin == Origin::DrawnLast);
        Ok(!ended && !sampled.truncated)
    }

    /// The answers' next rows through all layers, from the tokens that they read: last hidden states, [answers, w].
    fn rows(&mut self, tokens: &[i64], tracker: &Tracker) -> Result<Tensor, Failure> {
        let Pass { decoder, adapters, cp_group, .. } = *self.pass;
        let mut x_aw = decoder.embed(tokens);
        let mut keys: Option<IndexSet> = None;
        let layers = decoder.layers();
        for layer in 0..layers {
            let passing = self.passing(layer)?;
            let past = Past::without_gradient(passing.as_ref().unwrap_or_else(|| &self.staged[layer]), self.layout);
            let (index, mixer) = (LayerIndex(layer), decoder.mixer(LayerIndex(layer)));
            let length = from_index(self.sampled[self.live[0]].ids.len()) - 1;
            // Who watches sees every token, and a stop is heard there; every layer of each would cost a message of its own.
            if length == 0 || layer == 0 {
                tracker.layer(index)?;
            }
            // One position for all rows: the tables of one row serve every answer.
            let position = as_dim(self.layout.end().plus(Tokens(length)).0);
            let at = position..position + 1;
            let projected = decoder.project(index, &x_aw, &at.clone().into(), adapters, Values::All);
            let own = decoder.indexer(index).map(|_| decoder.project_index(index, &x_aw, at, adapters));
            let left = projected.input.state.first(usize::MAX).and(own.as_ref().map(|own| own.key_ti.shallow_clone()));
            self.states[layer].push(&left);
            if let (Some(indexer), Some(own)) = (decoder.indexer(index), &own) {
                let chosen = indexer.choose_next(&cp_group, &own.rows, &past, &self.states[layer]);
                if let Some(drawn) = &mut self.drawn {
                    drawn.add(Choice::Index, index, &self.live, chosen.lend().positions());
                }
                keys = Some(chosen);
            }
            let lent = keys.as_ref().map(IndexSet::lend);
            let mixed = mixer.decode(&cp_group, &projected.input, &past, &mut self.states[layer], lent);
            let rows = FinishRows { x_tw: &x_aw, mixed: &mixed, handed: &projected.handed, kept: None };
            let finished = decoder.finish(index, &rows, adapters, Values::All);
            x_aw = finished.y_tw;
            if let (Some(experts), Some(routed)) = (decoder.experts(index), &finished.routed) {
                x_aw += experts.replicated(cp_group.ep, routed, adapters);
                if let Some(drawn) = &mut self.drawn {
                    drawn.add(Choice::Experts, index, &self.live, &routed.expert_tk);
                }
            }
        }
        Ok(x_aw)
    }
}

/// The largest distance between log-probabilities of a token when it was sampled and when it was scored; 0 without tokens.
#[must_use]
pub fn gap(sampled: &[f64], scored: &Tensor) -> f64 {
    let sampled = Tensor::from_slice(sampled);
    if sampled.numel() == 0 {
        return 0.0;
    }
    (sampled - scored.to_kind(Kind::Double).to_device(tch::Device::Cpu)).abs().max().double_value(&[])
}
