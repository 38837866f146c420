//! What the evaluations of a run have shown so far: its curves, and which checkpoint is the best.

use std::collections::BTreeMap;

use serde_json::Value;

use super::session::{HeldOutSet, Session};
use super::signal::has_margin;
use crate::config::RunConfig;
use crate::report::{Best, Evaluation, HeldOut};
use crate::runtime::failure::{Classified, Exit};

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
    pub(super) fn restore(before: &Value, best: Value) -> Progress {
        let only = || serde_json::from_value::<Option<HeldOut>>(before.clone()).ok().flatten();
        let named = serde_json::from_value::<BTreeMap<String, HeldOut>>(before.clone()).ok();
        let before = named.or_else(|| only().map(|set| [("held_out".to_owned(), set)].into())).unwrap_or_default();
        Progress { before, best: serde_json::from_value(best).unwrap_or_default(), last: None }
    }

    /// Goes on with the evaluations that rank 0's metrics.jsonl has, up to the checkpoint after `made` updates: the best of
    /// them whose checkpoint is still there, where the saved one is of the same measurement and there, too.
    pub(super) fn go_on(&mut self, earlier: Vec<Evaluation>, metric: Option<&String>, is_there: impl Fn(u64) -> bool) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn evaluation(step: u64, greedy: f64) -> Evaluation {
        let sets = [("held_out".to_owned(), HeldOut { greedy: Some(greedy), ..HeldOut::default() })].into();
        Evaluation { step, seconds: 1.0, sets, judge: None }
    }

    #[test]
    fn a_checkpoint_of_an_earlier_version_holds_the_only_set_without_a_name() {
        let old = json!({"margin": 0.5, "accuracy": 1.0, "reward": null, "greedy": null, "missing": 0, "prompts": 3});
        let progress = Progress::restore(&old, Value::Null);
        assert_eq!(progress.before["held_out"].margin, Some(0.5));
        assert!(Progress::restore(&Value::Null, Value::Null).before.is_empty());
        let sets = json!(evaluation(0, 0.25).sets);
        assert_eq!(Progress::restore(&sets, Value::Null).before["held_out"].greedy, Some(0.25));
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
