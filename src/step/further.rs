//! A further update of a group on a prompt that was captured under earlier adapters.
//!
//! ```text
//!   update 1        capture ▶ … ▶ replay        the pages stay
//!   updates 2 … n   the tail's rows again ▶ replay on the pages of update 1
//!   update n        ▶ capture ▶ score           what lies between both is the drift
//! ```
//!
//! Prompt positions without gradient are constants of the adapters that captured them. Everything else is of the present
//! adapters, so the gradient is that of a loss in which these constants stand.

use std::rc::Rc;

use super::capture;
use super::drift::{self, Drift};
use super::observer::Observer;
use super::outcome::Trained;
use super::replay::{FrozenScores, ReplayTargets, TrainedAnswer};
use super::transaction::Transaction;
use crate::model::lora::Adapters;
use crate::model::pass::Pass;
use crate::prompt::handoff::{Captured, Leaves};
use crate::runtime::failure::{Failure, Phase};

impl Transaction<'_> {
    /// Captures a prompt under `earlier` adapters, with the bits that it had then.
    ///
    /// # Errors
    /// When the phase fails.
    pub fn capture_under(
        &self,
        earlier: &Adapters,
        prompt_ids: &[i64],
        answers: Vec<Vec<i64>>,
        observer: &mut Observer,
    ) -> Result<Captured, Failure> {
        let then = Transaction { policy: Pass { adapters: earlier, ..self.policy }, ..*self };
        let group = then.placed(prompt_ids, answers);
        if self.pins_memory {
            then.pin(&group, observer)?;
        }
        then.captured(&group, observer)
    }

    /// Trains `answers` against their frozen scores on a prompt that was captured under earlier adapters of the policy.
    ///
    /// # Errors
    /// When a phase fails.
    pub fn train_on_reused(
        &self,
        prompt_ids: &[i64],
        captured: Captured,
        answers: &[TrainedAnswer],
        given: Rc<FrozenScores>,
        observer: &mut Observer,
    ) -> Result<Trained, Failure> {
        let mut captured = captured.lend(self.policy.adapters.stamp(), self.policy.cp_group.ledger);
        let group = self.placed(prompt_ids, Vec::new());
        observer.device_phase(Phase::Capture, |tracker| {
            tch::no_grad(|| capture::renew_tail(&self.policy, &group, &mut captured, tracker))
        })?;
        self.train(prompt_ids, Some(captured), answers, Some(given), observer)
    }

    /// Captures the prompt of a group that was `trained` on reused pages anew, and compares log-probabilities and loss.
    ///
    /// # Errors
    /// When a phase fails.
    pub fn drift(
        &self,
        answers: &[TrainedAnswer],
        trained: &Trained,
        observer: &mut Observer,
    ) -> Result<Drift, Failure> {
        let mut fresh = self.captured(&trained.group, observer)?;
        // What was chosen when answers were sampled is used in both; else it is chosen again, as an update on fresh pages would.
        fresh.choices = trained.scores.choices.borrow().clone().unwrap_or(fresh.choices);
        let (scores, _) = self.scored(&trained.group, &fresh, Leaves::Nothing, observer)?;
        let targets = ReplayTargets { answers, scores: &trained.scores, objective: &self.objective };
        Ok(drift::measure(self.policy.cp_group.axis, &trained.group, &targets, &trained.replayed.logprobs, &scores))
    }
}
