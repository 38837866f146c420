//! When a run evaluates.
//!
//! An evaluation follows its update's checkpoint. A run that is killed in an evaluation goes on from that checkpoint or from an
//! earlier one, and evaluates before the next update if metrics.jsonl has no line of it. So every evaluation stands there
//! once, with the same numbers as in a run that was not killed.

use std::collections::BTreeMap;
use std::time::Instant;

use super::evaluate::Evaluator;
use super::outcome::Outcome;
use super::trainer::Trainer;
use crate::report::{Best, Evaluation};
use crate::runtime::failure::Failure;
use crate::world::World;

impl Trainer {
    /// Goes on with the earlier start's evaluations, which rank 0 has read. `best` names the best checkpoint again, where a kill
    /// has kept it from that.
    pub(super) fn resume_evaluations(&mut self, earlier: &[Evaluation], world: &World) -> Result<(), Failure> {
        let told = world.from_root(|| {
            let there = |step: u64| self.checkpoints.has(step);
            let steps: Vec<u64> = earlier.iter().map(|evaluation| evaluation.step).collect();
            let saved = self.evaluated.best.iter().map(|best| best.step);
            Ok((steps.into_iter().chain(saved).filter(|&step| there(step)).collect::<Vec<u64>>(), earlier.to_vec()))
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
        // Held-out prompts take the memory of one that waits for a further update.
        self.session.data.release_prompts();
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
        let judge = self.session.take_spent();
        self.take(Evaluation { step, seconds, sets, judge }, world).map(Outcome::Done)
    }

    /// Reports an evaluation, and notes the best checkpoint.
    fn take(&mut self, evaluation: Evaluation, world: &World) -> Result<(), Failure> {
        if evaluation.step == 0 {
            self.evaluated.before.clone_from(&evaluation.sets);
        }
        self.totals.add_spent(evaluation.judge.as_ref());
        world.on_root(|| Ok(self.reporter.evaluation(&evaluation)?))?;
        let metric = self.session.config().checkpoint.keep_best.clone();
        let before = self.evaluated.best.clone();
        if let Some(metric) = metric.filter(|_| evaluation.step > 0 && self.options.keeps_progress) {
            if let Some((set, missing)) = Best::unscored(&metric, &evaluation) {
                self.reporter.line(&format!(
                    "warning: the evaluation after update {} is not compared by checkpoint.keep_best = {metric:?}: {missing} \
                     held-out answers of {set} have no reward",
                    evaluation.step
                ));
            }
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
