//! The transaction: what one group goes through, from its prompt to its gradient in the adapters.
//!
//! ```text
//!   capture ▶ sample ▶ reward ▶ [reference: capture ▶ score] ▶ capture ▶ score ▶ replay and sweep
//! ```
//!
//! 1. Answers that are given need no sampling, scores that are given no scoring.
//! 2. One captured prompt is held at a time. What the policy samples from, it scores and replays from; where a reference
//!    policy scores in between, the policy captures the prompt again.
//! 3. Gradients add up in the adapters' `.grad`. Finalize and update follow once for all groups of an update.

use std::rc::Rc;

use super::observer::Observer;
pub use super::outcome::{Outcome, Scored, Trained, Verdict};
use super::replay::{FrozenScores, ReplayTargets, TrainedAnswer};
use super::rollout::{SampleRequest, SampledAnswer};
use super::{capture, importance, replay, rollout, score};
use crate::config::Gradient;
use crate::model::head::Head;
use crate::model::lora::Adapters;
use crate::model::pass::Pass;
use crate::prompt::handoff::{AnswerStates, Captured, Keeping, Leaves, PlacedGroup, Scores};
use crate::prompt::layout::PromptLayout;
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::units::{Tokens, from_index};
use crate::step::objective::Objective;

/// What is the same for all groups of an update.
#[derive(Clone, Copy)]
pub struct Transaction<'a> {
    /// The policy: model, adapters, and the ranks that share a prompt.
    pub policy: Pass<'a>,
    /// Adapters of the reference policy; `None` where the objective has no KL term.
    pub reference: Option<&'a Adapters>,
    /// Rows at a time and temperature of all log-probabilities.
    pub head: Head,
    /// Loss of a token.
    pub objective: Objective,
    /// Which prompt positions carry gradient.
    pub gradient: Gradient,
    /// Positions in a page.
    pub page_size: Tokens,
    /// What is kept of a captured prompt, and where.
    pub keeping: Keeping,
    /// Whether host memory is pinned before the first capture, so that no phase waits for it.
    pub pins_memory: bool,
}

impl Transaction<'_> {
    /// One group from its prompt on. With a `request` the policy samples the answers. `reward` receives them, or why there
    /// are none; without a request it receives an empty list. Ranks of other prompts may wait in `reward`, so it is called
    /// in every case.
    ///
    /// # Errors
    /// When a phase or `reward` fails.
    pub fn run<E: From<Failure>>(
        &self,
        prompt_ids: &[i64],
        request: Option<&SampleRequest>,
        observer: &mut Observer,
        reward: impl FnOnce(&mut Observer, Result<Vec<SampledAnswer>, Failure>) -> Result<Verdict, E>,
    ) -> Result<Outcome, E> {
        let sampled = request.map(|request| self.sample(prompt_ids, request, observer)).transpose();
        let (captured, answers) = match sampled {
            Ok(Some((captured, answers))) => (Some(captured), Ok(answers)),
            Ok(None) => (None, Ok(Vec::new())),
            Err(failure) => (None, Err(failure)),
        };
        let sampled: Vec<Vec<i64>> = answers.iter().flatten().map(|answer| answer.ids.clone()).collect();
        match reward(observer, answers)? {
            Verdict::Skip => Ok(Outcome::Skipped),
            Verdict::Score(answers) => {
                let captured = captured.map(|held| held.for_answers(&sampled, &answers, self.policy.cp_group.ledger));
                Ok(Outcome::Scored(Box::new(self.score(prompt_ids, captured, answers, observer)?)))
            }
            Verdict::Train(answers) => {
                Ok(Outcome::Trained(Box::new(self.train(prompt_ids, captured, &answers, None, observer)?)))
            }
        }
    }

    /// The policy answers the prompt.
    fn sample(
        &self,
        prompt_ids: &[i64],
        request: &SampleRequest,
        observer: &mut Observer,
    ) -> Result<(Captured, Vec<SampledAnswer>), Failure> {
        if self.pins_memory {
            let longest = vec![vec![0; request.longest.index()]; request.answers];
            self.pin(&self.placed(prompt_ids, longest), observer)?;
        }
        let group = self.placed(prompt_ids, Vec::new());
        let mut captured = self.captured(&group, observer)?;
        let answers = observer.device_phase(Phase::Rollout, |tracker| {
            rollout::run(&self.policy, &self.head, &group.layout, &mut captured, request, tracker)
        })?;
        Ok((captured, answers))
    }

    /// Scores `answers` under the policy, from a prompt that it has `captured` or captures here.
    ///
    /// # Errors
    /// When a phase fails.
    pub fn score(
        &self,
        prompt_ids: &[i64],
        captured: Option<Captured>,
        answers: Vec<Vec<i64>>,
        observer: &mut Observer,
    ) -> Result<Scored, Failure> {
        let group = self.placed(prompt_ids, answers);
        let captured = captured.map_or_else(|| self.captured(&group, observer), Ok)?;
        let (scores, _) = self.scored(&group, &captured, Leaves::Nothing, observer)?;
        Ok(Scored { group, captured, scores })
    }

    /// Trains `answers`: scores them, unless an earlier update of the round has frozen their scores (`given`), and replays.
    ///
    /// # Errors
    /// When a phase fails.
    pub fn train(
        &self,
        prompt_ids: &[i64],
        mut captured: Option<Captured>,
        answers: &[TrainedAnswer],
        given: Option<Rc<FrozenScores>>,
        observer: &mut Observer,
    ) -> Result<Trained, Failure> {
        let ids: Vec<Vec<i64>> = answers.iter().map(|answer| answer.ids.clone()).collect();
        let masks = answers.iter().map(|answer| answer.mask.clone()).collect();
        let group = self.placed(prompt_ids, ids.clone()).masked(masks);
        if self.pins_memory && captured.is_none() {
            self.pin(&group, observer)?;
        }
        let mut reference = None;
        let given_choices = given.as_ref().and_then(|given| given.choices.borrow().clone());
        let from_sampling = captured.as_ref().filter(|captured| captured.from_sampling);
        let choices = given_choices.or_else(|| from_sampling.map(|captured| captured.choices.clone()));
        let drawn = captured.as_mut().and_then(|captured| captured.drawn.take());
        if let (Some(adapters), None) = (self.reference, &given) {
            captured = None;
            // The reference policy only scores: no prompt position carries gradient.
            let policy = Pass { adapters, ..self.policy };
            let frozen = Transaction { policy, gradient: Gradient::Last(Tokens(0)), ..*self };
            let placed = frozen.placed(prompt_ids, ids);
            let mut captured = frozen.captured(&placed, observer)?;
            // The same keys and experts: else the divergence would count what differs in the choice.
            captured.choices = choices.clone().unwrap_or(captured.choices);
            reference = Some(frozen.scored(&placed, &captured, Leaves::Nothing, observer)?.0);
        }
        let mut captured = captured.map_or_else(|| self.captured(&group, observer), Ok)?;
        captured.choices = choices.unwrap_or(captured.choices);
        let (scores, left) = if let Some(scores) = given {
            (scores, None)
        } else {
            let (scored, left) = self.scored(&group, &captured, Leaves::Replayable, observer)?;
            let cp = self.policy.cp_group.axis;
            let frozen = importance::freeze(self.objective.importance, scored, reference, &group, answers, cp);
            (Rc::new(frozen), Some(left))
        };
        let changed =
            drawn.map(|drawn| rollout::changed(&self.policy, &group, &drawn, &captured.choices)).transpose()?;
        observer.enter(Phase::Replay);
        let targets = ReplayTargets { answers, scores: &scores, objective: &self.objective };
        let replayed = replay::run(&self.policy, &self.head, &group, &captured, left, targets, observer.tracker())?;
        observer.add(Phase::Replay, replayed.seconds.up);
        observer.add(Phase::Sweep, replayed.seconds.down);
        let (choices, changed) = (captured.choices.clone(), changed.unwrap_or_default());
        Ok(Trained { group, scores, replayed, choices, changed, captured: Some(captured) })
    }

    /// Pins the host memory that `group` takes. A caller that measures calls this before, with `pins_memory` false.
    ///
    /// # Errors
    /// When the machine gives no more memory that can be pinned.
    pub fn pin(&self, group: &PlacedGroup, observer: &mut Observer) -> Result<(), Failure> {
        observer.pinning(|| capture::make_room(&self.policy, group, self.keeping))
    }

    pub(super) fn captured(&self, group: &PlacedGroup, observer: &mut Observer) -> Result<Captured, Failure> {
        let work = |tracker: &_| capture::run(&self.policy, group, self.keeping, tracker);
        let before = observer.seconds()[Phase::Capture];
        let captured = observer.device_phase(Phase::Capture, work)?;
        observer.captured(&self.policy, group, &captured, before)?;
        Ok(captured)
    }

    pub(super) fn scored(
        &self,
        group: &PlacedGroup,
        captured: &Captured,
        leaves: Leaves,
        observer: &mut Observer,
    ) -> Result<(Scores, AnswerStates), Failure> {
        let work = |tracker: &_| score::run(&self.policy, &self.head, group, captured, leaves, tracker);
        observer.device_phase(Phase::Score, work)
    }

    /// A group dealt to the ranks that share its prompt.
    #[must_use]
    pub fn placed(&self, prompt_ids: &[i64], answers: Vec<Vec<i64>>) -> PlacedGroup {
        let prompt_tokens = Tokens(from_index(prompt_ids.len()));
        let ranks = self.policy.cp_group.axis.size();
        let layout = PromptLayout::new(prompt_tokens, self.page_size, ranks, self.gradient.tail(prompt_tokens));
        PlacedGroup::new(layout, prompt_ids.to_vec(), answers)
    }
}
