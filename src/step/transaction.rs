//! The transaction: what one group goes through, from its prompt to its gradient in the adapters.
//!
//! ```text
//!   capture ─▶ sample ─▶ reward ─▶ capture, score (reference) ─▶ capture ─▶ score ─▶ replay and sweep
//!   └ answers are sampled ┘   │    └ the objective has a KL term ┘         └ first update of the round ┘
//!                             └─▶ skipped
//! ```
//!
//! 1. One captured prompt is held at a time. The policy's prompt serves sampling, scoring and replay; where a reference
//!    policy scores in between, the policy captures its prompt again.
//! 2. Scores are frozen when they are computed. Further updates of the same answers capture and replay, with the scores
//!    of the first update.
//! 3. Gradients add up in the adapters' `.grad`. `finalize` and `update` follow once for all groups of an update.

use std::rc::Rc;

use super::capture;
use super::observer::Observer;
use super::replay::{self, FrozenScores, ReplayTargets, Replayed, TrainedAnswer};
use super::rollout::{self, SampleRequest, SampledAnswer};
use super::score;
use crate::config::Gradient;
use crate::model::head::Head;
use crate::model::lora::Adapters;
use crate::model::pass::Pass;
use crate::prompt::handoff::{Captured, Keeping, PlacedGroup, Scores};
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
    /// Rows at a time, and temperature, of all log-probabilities.
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

/// The caller's decision once the answers are there.
pub enum Verdict {
    /// The group has no gradient: nothing further runs.
    Skip,
    /// These answers are scored, and nothing is trained.
    Score(Vec<Vec<i64>>),
    /// These answers are trained.
    Train {
        /// The answers, with advantage and weight.
        answers: Vec<TrainedAnswer>,
        /// Scores of an earlier update on the same answers; `None`: they are computed here and frozen.
        scores: Option<Rc<FrozenScores>>,
    },
}

/// What became of a group.
pub enum Outcome {
    /// It was skipped.
    Skipped,
    /// Its answers were scored.
    Scored(Scored),
    /// Its answers were scored, unless scores were given, and replayed.
    Trained(Trained),
}

/// A group that was scored. The prompt stays captured for as long as this lives.
#[expect(missing_docs, reason = "the names and types say everything")]
pub struct Scored {
    pub group: PlacedGroup,
    pub captured: Captured,
    pub scores: Scores,
}

/// A group that was replayed; its gradient is in the adapters.
#[expect(missing_docs, reason = "the names and types say everything")]
pub struct Trained {
    pub group: PlacedGroup,
    pub scores: Rc<FrozenScores>,
    pub replayed: Replayed,
}

impl Transaction<'_> {
    /// One group. With a `request` the policy samples the answers. `reward` gets them, or why there are none, or an empty
    /// list without a request; it says what becomes of the group. It is called in every case: ranks of other prompts may
    /// wait there.
    ///
    /// # Errors
    /// When a phase fails, or `reward` does.
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
        match reward(observer, answers)? {
            Verdict::Skip => Ok(Outcome::Skipped),
            Verdict::Score(answers) => {
                Ok(Outcome::Scored(self.finish_scoring(prompt_ids, captured, answers, observer)?))
            }
            Verdict::Train { answers, scores } => {
                Ok(Outcome::Trained(self.finish_training(prompt_ids, captured, &answers, scores, observer)?))
            }
        }
    }

    /// Captures the prompt and scores `answers` under the policy.
    ///
    /// # Errors
    /// When a phase fails.
    pub fn score(
        &self,
        prompt_ids: &[i64],
        answers: Vec<Vec<i64>>,
        observer: &mut Observer,
    ) -> Result<Scored, Failure> {
        self.finish_scoring(prompt_ids, None, answers, observer)
    }

    /// Trains `answers`: captures, scores unless `scores` are given, and replays.
    ///
    /// # Errors
    /// When a phase fails.
    pub fn train(
        &self,
        prompt_ids: &[i64],
        answers: &[TrainedAnswer],
        scores: Option<Rc<FrozenScores>>,
        observer: &mut Observer,
    ) -> Result<Trained, Failure> {
        self.finish_training(prompt_ids, None, answers, scores, observer)
    }

    fn finish_scoring(
        &self,
        prompt_ids: &[i64],
        captured: Option<Captured>,
        answers: Vec<Vec<i64>>,
        observer: &mut Observer,
    ) -> Result<Scored, Failure> {
        let group = self.placed(prompt_ids, answers, self.gradient);
        let captured = match captured {
            Some(captured) => captured,
            None => self.captured(&self.policy, &group, observer)?,
        };
        let scores = self.scored(&self.policy, &group, &captured, observer)?;
        Ok(Scored { group, captured, scores })
    }

    fn finish_training(
        &self,
        prompt_ids: &[i64],
        mut captured: Option<Captured>,
        answers: &[TrainedAnswer],
        given: Option<Rc<FrozenScores>>,
        observer: &mut Observer,
    ) -> Result<Trained, Failure> {
        let ids = || answers.iter().map(|answer| answer.ids.clone()).collect::<Vec<_>>();
        let masks = answers.iter().map(|answer| answer.mask.clone()).collect();
        let group = self.placed(prompt_ids, ids(), self.gradient).masked(masks);
        if self.pins_memory && captured.is_none() {
            self.pin(&group, observer)?;
        }
        let mut reference = None;
        if let (Some(adapters), None) = (self.reference, &given) {
            captured = None;
            reference = Some(self.reference_scores(prompt_ids, ids(), adapters, observer)?);
        }
        let captured = match captured {
            Some(captured) => captured,
            None => self.captured(&self.policy, &group, observer)?,
        };
        let scores = match given {
            Some(given) => given,
            None => Rc::new(FrozenScores { old: self.scored(&self.policy, &group, &captured, observer)?, reference }),
        };
        observer.enter(Phase::Replay);
        let advantages: Vec<Option<f64>> = answers.iter().map(|answer| answer.advantage).collect();
        let weights: Vec<f64> = answers.iter().map(|answer| answer.weight).collect();
        let targets = ReplayTargets {
            old: &scores.old,
            reference: scores.reference.as_ref(),
            advantages: &advantages,
            weights: &weights,
            terms: &self.objective,
        };
        let replayed = replay::run(&self.policy, &self.head, &group, &captured, targets, observer.tracker())?;
        observer.add(Phase::Replay, replayed.seconds.up);
        observer.add(Phase::Sweep, replayed.seconds.down);
        Ok(Trained { group, scores, replayed })
    }

    /// Captures the prompt under the policy and samples answers from it.
    fn sample(
        &self,
        prompt_ids: &[i64],
        request: &SampleRequest,
        observer: &mut Observer,
    ) -> Result<(Captured, Vec<SampledAnswer>), Failure> {
        if self.pins_memory {
            let longest = vec![vec![0; request.longest.index()]; request.answers];
            self.pin(&self.placed(prompt_ids, longest, self.gradient), observer)?;
        }
        let group = self.placed(prompt_ids, Vec::new(), self.gradient);
        let captured = self.captured(&self.policy, &group, observer)?;
        let answers = observer.device_phase(Phase::Rollout, |tracker| {
            rollout::run(&self.policy, &self.head, &group.layout, &captured, request, tracker)
        })?;
        Ok((captured, answers))
    }

    /// Scores answers under the reference policy, which captures the prompt for itself and keeps nothing of it: no
    /// position carries gradient.
    fn reference_scores(
        &self,
        prompt_ids: &[i64],
        answers: Vec<Vec<i64>>,
        adapters: &Adapters,
        observer: &mut Observer,
    ) -> Result<Scores, Failure> {
        let reference = Pass { adapters, ..self.policy };
        let group = self.placed(prompt_ids, answers, Gradient::Last(Tokens(0)));
        let captured = self.captured(&reference, &group, observer)?;
        self.scored(&reference, &group, &captured, observer)
    }

    /// Pins the host memory that `group` takes. A caller that measures time calls this before, and sets `pins_memory` to
    /// false.
    ///
    /// # Errors
    /// When the machine gives no more memory that can be pinned.
    pub fn pin(&self, group: &PlacedGroup, observer: &mut Observer) -> Result<(), Failure> {
        observer.pinning(|| capture::make_room(&self.policy, group, self.keeping))
    }

    fn captured(&self, pass: &Pass, group: &PlacedGroup, observer: &mut Observer) -> Result<Captured, Failure> {
        let captured =
            observer.device_phase(Phase::Capture, |tracker| capture::run(pass, group, self.keeping, tracker))?;
        observer.captured(pass, group, &captured)?;
        Ok(captured)
    }

    fn scored(
        &self,
        pass: &Pass,
        group: &PlacedGroup,
        captured: &Captured,
        observer: &mut Observer,
    ) -> Result<Scores, Failure> {
        observer.device_phase(Phase::Score, |tracker| score::run(pass, &self.head, group, captured, tracker))
    }

    /// A group dealt to the ranks that share its prompt.
    #[must_use]
    pub fn placed(&self, prompt_ids: &[i64], answers: Vec<Vec<i64>>, gradient: Gradient) -> PlacedGroup {
        let prompt_tokens = Tokens(from_index(prompt_ids.len()));
        let ranks = self.policy.cp_group.axis.size();
        let layout = PromptLayout::new(prompt_tokens, self.page_size, ranks, gradient.tail(prompt_tokens));
        PlacedGroup::new(layout, prompt_ids.to_vec(), answers)
    }
}
