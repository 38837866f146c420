//! When a run evaluates, what has come out so far, and which checkpoint is the best.
//!
//! An evaluation follows its update's checkpoint. A run that is killed in an evaluation goes on from that checkpoint or from an
//! earlier one, and evaluates before the next update if metrics.jsonl has no line of it. So every evaluation stands there
//! once, with the same numbers as in a run that was not killed.

use std::collections::BTreeMap;
use std::time::Instant;

use serde_json::Value;

use super::evaluate::{Evaluator, has_margin};
use super::outcome::Outcome;
use super::session::{HeldOutSet, Session};
use super::trainer::Trainer;
use crate::config::RunConfig;
use crate::report::{Best, Evaluation, HeldOut};
use crate::runtime::failure::{Classified, Exit, Failure};
use crate::world::World;

/// A measurement that the data cannot give.
#[derive(Debug, thiserror::Error)]
#[error(
    "checkpoint.keep_best is {metric}, and no prompt of {set} has a better and a worse answer in its data, so there is no \
     margin: give answers with rewards in {key}, or name a reward of answers that the policy draws"
)]
pub(super) struct NoMargin {
    metric: String,
    set: String,
    key: String,
}

impl Classified for NoMargin {
    fn exit(&self) -> Exit {
        Exit::Data
    }
}

/// Refuses to choose checkpoints by a margin of prompts that have none.
pub(super) fn check_best(config: &RunConfig, sets: &[HeldOutSet]) -> Result<(), NoMargin> {
    let Some(metric) = &config.checkpoint.keep_best else { return Ok(()) };
    let of_answers = |set: &HeldOutSet| [format!("eval/{}/margin", set.name), format!("eval/{}/accuracy", set.name)];
    let Some(set) = sets.iter().find(|set| of_answers(set).contains(metric)) else { return Ok(()) };
    if (0..set.data.len()).any(|index| has_margin(set.data.group(index))) {
        return Ok(());
    }
    Err(NoMargin { metric: metric.clone(), set: set.name.clone(), key: set.key.clone() })
}

/// What the evaluations of a run have shown so far; the same on every rank.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    /// Each set before the first update, by its name; empty before that was measured, or without anything to measure.
    pub(super) before: BTreeMap<String, HeldOut>,
    /// The best checkpoint that is kept.
    pub(super) best: Option<Best>,
    /// The last evaluation.
    pub(super) last: Option<Evaluation>,
}

impl Progress {
    /// What a checkpoint holds of it. Earlier versions wrote the only set without a name.
    pub(super) fn restore(before: Value, best: Value) -> Progress {
        let only = || serde_json::from_value::<Option<HeldOut>>(before.clone()).ok().flatten();
        let named = serde_json::from_value::<BTreeMap<String, HeldOut>>(before.clone()).ok();
        let before = named.or_else(|| only().map(|set| [("held_out".to_owned(), set)].into())).unwrap_or_default();
        Progress { before, best: serde_json::from_value(best).unwrap_or_default(), last: None }
    }

    /// Goes on with the evaluations that rank 0's metrics.jsonl has, up to the checkpoint after `made` updates: the best of
    /// them whose checkpoint is still there, where the saved one is of the same measurement and there, too.
    fn go_on(&mut self, earlier: Vec<Evaluation>, metric: Option<&String>, is_there: impl Fn(u64) -> bool) {
        let Some(metric) = metric else {
            self.best = None;
            self.last = earlier.into_iter().last();
            return;
        };
        let saved = self.best.take().filter(|best| best.metric == *metric && is_there(best.step));
        let with_checkpoint = earlier.iter().filter(|evaluation| evaluation.step > 0 && is_there(evaluation.step));
        self.best = with_checkpoint.fold(saved, |best, evaluation| Best::of(best, metric, evaluation));
        self.last = earlier.into_iter().last();
    }

    /// Each set before the first and after the last update.
    pub(super) fn ends(&self, after: Option<&Evaluation>) -> BTreeMap<String, [Option<HeldOut>; 2]> {
        let mut ends: BTreeMap<String, [Option<HeldOut>; 2]> =
            self.before.iter().map(|(set, &before)| (set.clone(), [Some(before), None])).collect();
        for (set, &held_out) in after.iter().flat_map(|after| &after.sets) {
            ends.entry(set.clone()).or_default()[1] = Some(held_out);
        }
        ends
    }
}

/// Whether an evaluation on the way follows update `step`; the one after the last update is no such.
pub(super) fn is_due(session: &Session, step: u64) -> bool {
    let every = session.config().eval.every;
    every > 0 && step > 0 && step.is_multiple_of(every) && !session.data.held_out.is_empty()
}

impl Trainer {
    /// Goes on with the earlier start's evaluations, which rank 0 has read. `best` names the best checkpoint again, where a kill
    /// has kept it from that.
    pub(super) fn resume_evaluations(&mut self, earlier: Vec<Evaluation>, world: &World) -> Result<(), Failure> {
        let told = world.from_root(|| {
            let there = |step: u64| self.checkpoints.has(step);
            let steps: Vec<u64> = earlier.iter().map(|evaluation| evaluation.step).collect();
            let saved = self.evaluated.best.iter().map(|best| best.step);
            Ok((steps.into_iter().chain(saved).filter(|&step| there(step)).collect::<Vec<u64>>(), earlier.clone()))
        });
        let (there, earlier) = told?;
        let metric = self.session.config().checkpoint.keep_best.clone();
        self.evaluated.go_on(earlier, metric.as_ref(), |step| there.contains(&step));
        self.point_best(world)
    }

    /// Evaluates after update `step`, or before the first one, unless that was done before this start. Without rewards there
    /// is no evaluation, so the run fails.
    pub(super) fn evaluate(&mut self, step: u64, world: &World) -> Result<Outcome<()>, Failure> {
        if self.evaluated.last.as_ref().is_some_and(|last| last.step == step) {
            return Ok(Outcome::Done(()));
        }
        let start = Instant::now();
        let expected_s = self.evaluated.last.as_ref().map(|last| last.seconds);
        let (session, stop) = (&self.session, &self.stop);
        let mut evaluator = Evaluator { session, world, reporter: &mut self.reporter, stop };
        let measured = stop.droppable(expected_s, || {
            let mut sets = BTreeMap::new();
            for set in &session.data.held_out {
                sets.extend(evaluator.set(set)?.map(|held_out| (set.name.clone(), held_out)));
            }
            Ok(sets)
        });
        let sets = match Outcome::of(measured)? {
            Outcome::Done(sets) => sets,
            Outcome::Dropped { why } => {
                self.reporter.line(&format!("the held-out evaluation is {why}"));
                return Ok(Outcome::Dropped { why });
            }
            Outcome::NoRewards { failure } => return Err(failure),
        };
        world.tracker().end_step();
        if sets.is_empty() {
            return Ok(Outcome::Done(()));
        }
        let seconds = start.elapsed().as_secs_f64();
        self.take(Evaluation { step, seconds, sets }, world).map(Outcome::Done)
    }

    /// Reports an evaluation, and notes the best checkpoint.
    fn take(&mut self, evaluation: Evaluation, world: &World) -> Result<(), Failure> {
        if evaluation.step == 0 {
            self.evaluated.before.clone_from(&evaluation.sets);
        }
        world.on_root(|| Ok(self.reporter.evaluation(&evaluation)?))?;
        let metric = self.session.config().checkpoint.keep_best.clone();
        let before = self.evaluated.best.clone();
        if let Some(metric) = metric.filter(|_| evaluation.step > 0 && self.options.keeps_progress) {
            self.evaluated.best = Best::of(before.clone(), &metric, &evaluation);
        }
        self.evaluated.last = Some(evaluation);
        if self.evaluated.best == before { Ok(()) } else { self.point_best(world) }
    }

    fn point_best(&self, world: &World) -> Result<(), Failure> {
        let Some(best) = &self.evaluated.best else { return Ok(()) };
        world.on_root(|| self.checkpoints.point_best(best.step)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn evaluation(step: u64, greedy: f64) -> Evaluation {
        let sets = [("held_out".to_owned(), HeldOut { greedy: Some(greedy), ..HeldOut::default() })].into();
        Evaluation { step, seconds: 1.0, sets }
    }

    #[test]
    fn a_checkpoint_of_an_earlier_version_holds_the_only_set_without_a_name() {
        let old = json!({"margin": 0.5, "accuracy": 1.0, "reward": null, "greedy": null, "missing": 0, "prompts": 3});
        let progress = Progress::restore(old, Value::Null);
        assert_eq!(progress.before["held_out"].margin, Some(0.5));
        assert!(Progress::restore(Value::Null, Value::Null).before.is_empty());
        let sets = json!(evaluation(0, 0.25).sets);
        assert_eq!(Progress::restore(sets, Value::Null).before["held_out"].greedy, Some(0.25));
    }

    #[test]
    fn the_best_goes_on_from_the_saved_one_and_the_metrics_and_needs_its_checkpoint() {
        let metric = "eval/held_out/greedy/reward".to_owned();
        let saved = Best::of(None, &metric, &evaluation(2, 0.75));
        let best = |saved: &Option<Best>, metric: &String, there: &[u64]| {
            let mut progress = Progress { best: saved.clone(), ..Progress::default() };
            let earlier = vec![evaluation(0, 0.9), evaluation(4, 0.5), evaluation(6, 0.8)];
            progress.go_on(earlier, Some(metric), |step| there.contains(&step));
            assert_eq!(progress.last.map(|last| last.step), Some(6));
            progress.best.map(|best| best.step)
        };
        assert_eq!(best(&saved, &metric, &[2, 4, 6]), Some(6));
        assert_eq!(best(&saved, &metric, &[2, 4]), Some(2), "its checkpoint is gone");
        assert_eq!(best(&saved, &metric, &[4]), Some(4));
        assert_eq!(best(&saved, &"eval/held_out/margin".to_owned(), &[2, 4, 6]), None, "another measurement");
    }
}
