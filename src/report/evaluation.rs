//! Measurements on held-out prompts: what each prompt has shown, what a set has shown, and the best of several evaluations.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::averages::mean;
use crate::endpoint::Spent;
use crate::runtime::units::{float, from_index};
use crate::step::rollout::CallCounts;

/// What a set of held-out prompts has shown.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct HeldOut {
    /// Mean over prompts of the best-rewarded answers' log-probability minus that of the others, in nats; absent where no
    /// prompt has better and worse answers.
    pub margin: Option<f64>,
    /// Share of those prompts whose best-rewarded answer is the most probable.
    pub accuracy: Option<f64>,
    /// Mean reward of sampled answers; absent where none is sampled.
    pub reward: Option<f64>,
    /// Mean tokens of a sampled answer.
    pub tokens: Option<f64>,
    /// Share of sampled answers that were cut off at the greatest length.
    pub truncated_share: Option<f64>,
    /// Mean reward of one greedy answer to each prompt, of the most probable token at each place; absent where none is drawn.
    pub greedy: Option<f64>,
    /// Mean tokens of a greedy answer.
    pub greedy_tokens: Option<f64>,
    /// Share of greedy answers that were cut off at the greatest length.
    pub greedy_truncated_share: Option<f64>,
    /// Answers of the policy, sampled and greedy, without a reward.
    pub missing: u64,
    /// Number of prompts.
    pub prompts: usize,
}

impl HeldOut {
    /// Sums up what the prompts of a set have shown, in the order of `lines`.
    #[must_use]
    pub fn of(lines: &[EvalLine]) -> HeldOut {
        let drawn = |greedy: bool| lines.iter().flat_map(|line| &line.answers).filter(move |one| one.greedy == greedy);
        let share = |yes: bool| if yes { 1.0 } else { 0.0 };
        let rewards = |greedy| mean(&drawn(greedy).filter_map(|one| one.reward).collect::<Vec<_>>());
        let tokens = |greedy| mean(&drawn(greedy).map(|one| float(one.tokens)).collect::<Vec<_>>());
        let truncated = |greedy| mean(&drawn(greedy).map(|one| share(one.truncated)).collect::<Vec<_>>());
        let missing = lines.iter().flat_map(|line| &line.answers).filter(|one| one.reward.is_none()).count();
        HeldOut {
            margin: mean(&lines.iter().filter_map(|line| line.margin).collect::<Vec<_>>()),
            accuracy: mean(&lines.iter().filter_map(|line| line.best_is_first.map(share)).collect::<Vec<_>>()),
            reward: rewards(false),
            tokens: tokens(false),
            truncated_share: truncated(false),
            greedy: rewards(true),
            greedy_tokens: tokens(true),
            greedy_truncated_share: truncated(true),
            missing: from_index(missing),
            prompts: lines.len(),
        }
    }

    /// Every measurement with the last parts of its name.
    pub(super) fn numbers(&self) -> [(&'static str, Option<f64>); 9] {
        [
            ("margin", self.margin),
            ("accuracy", self.accuracy),
            ("sampled/reward", self.reward),
            ("sampled/tokens", self.tokens),
            ("sampled/truncated_share", self.truncated_share),
            ("greedy/reward", self.greedy),
            ("greedy/tokens", self.greedy_tokens),
            ("greedy/truncated_share", self.greedy_truncated_share),
            ("missing", self.reward.or(self.greedy).map(|_| float(self.missing))),
        ]
    }

    /// The measurements in one line of text.
    #[must_use]
    pub fn text(&self) -> String {
        let prompts = self.prompts;
        let numbers = self.numbers().into_iter().filter(|(name, _)| *name != "missing" || self.missing > 0);
        let words = numbers.filter_map(|(name, value)| Some(format!("{} {:.4}", name.replace('/', " "), value?)));
        format!("{} on {prompts} prompts", words.collect::<Vec<_>>().join(", "))
    }
}

/// All sets after some updates.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Evaluation {
    /// Updates made before; 0 before the first one.
    pub step: u64,
    /// Seconds that it took.
    pub seconds: f64,
    /// What each set has shown, by its name.
    pub sets: BTreeMap<String, HeldOut>,
    /// What was sent to the judges for it; absent where nothing was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judge: Option<Spent>,
}

impl Evaluation {
    /// Every measurement by its whole name, `eval/SET/…`; an absent one has no entry.
    #[must_use]
    pub fn numbers(&self) -> Vec<(String, f64)> {
        let of_set = |(set, held_out): (&String, &HeldOut)| {
            let named = held_out.numbers().into_iter().filter_map(|(name, value)| Some((name, value?)));
            named.map(|(name, value)| (format!("eval/{set}/{name}"), value)).collect::<Vec<_>>()
        };
        self.sets.iter().flat_map(of_set).collect()
    }
}

/// A line of metrics.jsonl about an evaluation: its only key tells it from a line about an update.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct EvaluationLine {
    pub(super) evaluation: Evaluation,
}

/// The checkpoint of the best evaluation so far.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Best {
    /// Name of the measurement.
    pub metric: String,
    /// Its value there.
    pub value: f64,
    /// Updates that were made before it.
    pub step: u64,
    /// Its folder within the run directory.
    pub checkpoint: String,
}

impl Best {
    /// Held-out answers without a reward that keep an evaluation from being compared by `metric`, with the name of their set:
    /// the mean reward of a set is then that of the others. `None` where it is compared.
    #[must_use]
    pub fn unscored<'a>(metric: &'a str, evaluation: &Evaluation) -> Option<(&'a str, u64)> {
        let set = metric.split('/').nth(1).filter(|_| metric.ends_with("/reward"))?;
        let missing = evaluation.sets.get(set)?.missing;
        (missing > 0).then_some((set, missing))
    }

    /// The better one of `so_far` and an evaluation that has a checkpoint; of equal ones the earlier. Rewards of a set in which
    /// answers have none choose nothing.
    #[must_use]
    pub fn of(so_far: Option<Best>, metric: &str, evaluation: &Evaluation) -> Option<Best> {
        if Best::unscored(metric, evaluation).is_some() {
            return so_far;
        }
        let Some((_, value)) = evaluation.numbers().into_iter().find(|(name, _)| name == metric) else { return so_far };
        if so_far.as_ref().is_some_and(|best| best.value >= value) {
            return so_far;
        }
        let step = evaluation.step;
        Some(Best { metric: metric.to_owned(), value, step, checkpoint: format!("checkpoints/step_{step}") })
    }
}

/// What one held-out prompt has shown: a line of results.jsonl.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct EvalLine {
    /// Name of the set.
    pub set: String,
    /// Index of the prompt in the set.
    pub index: usize,
    /// Name of the prompt.
    pub prompt: String,
    /// Log-probability of the best-rewarded answer of the data minus the mean of the others', in nats; absent where they have
    /// no better and worse.
    pub margin: Option<f64>,
    /// Whether that answer is the most probable one.
    pub best_is_first: Option<bool>,
    /// What the policy has answered, the greedy answer last.
    pub answers: Vec<EvalAnswer>,
}

/// An answer of the policy to a held-out prompt.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct EvalAnswer {
    /// Whether it has the most probable token at each place; otherwise it was sampled.
    pub greedy: bool,
    /// Its text, without the token that ends its turn.
    pub text: String,
    /// Its length in tokens.
    pub tokens: u64,
    /// Whether it was cut off at the greatest length.
    pub truncated: bool,
    /// Sum of its tokens' log-probabilities, nats.
    pub logprob: Option<f64>,
    /// `None` where there is no reward.
    pub reward: Option<f64>,
    /// Parts of the reward by name, as far as they are known.
    pub parts: BTreeMap<String, f64>,
    /// Why there is no reward.
    pub failure: Option<String>,
    /// How its calls have ended; absent without a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calls: Option<CallCounts>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(greedy: bool, reward: Option<f64>, tokens: u64, truncated: bool) -> EvalAnswer {
        EvalAnswer { greedy, tokens, truncated, reward, ..EvalAnswer::default() }
    }

    fn evaluation(step: u64, greedy: f64) -> Evaluation {
        let sets = [("codes".to_owned(), HeldOut { greedy: Some(greedy), prompts: 2, ..HeldOut::default() })].into();
        Evaluation { step, seconds: 0.5, sets, judge: None }
    }

    #[test]
    fn sampled_and_greedy_answers_are_summed_up_apart_and_an_answer_without_a_reward_has_a_length() {
        let one = EvalLine {
            margin: Some(2.0),
            best_is_first: Some(true),
            answers: vec![
                answer(false, Some(1.0), 4, false),
                answer(false, None, 8, true),
                answer(true, Some(0.5), 2, true),
            ],
            ..EvalLine::default()
        };
        let two = EvalLine { answers: vec![answer(true, Some(0.0), 4, false)], ..EvalLine::default() };
        let expected = HeldOut {
            margin: Some(2.0),
            accuracy: Some(1.0),
            reward: Some(1.0),
            tokens: Some(6.0),
            truncated_share: Some(0.5),
            greedy: Some(0.25),
            greedy_tokens: Some(3.0),
            greedy_truncated_share: Some(0.5),
            missing: 1,
            prompts: 2,
        };
        assert_eq!(HeldOut::of(&[one, two]), expected);
        assert_eq!(HeldOut::of(&[]), HeldOut::default());
    }

    #[test]
    fn the_best_is_the_largest_and_of_equal_ones_the_earliest() {
        let metric = "eval/codes/greedy/reward";
        let values = [(2, 0.25), (4, 0.5), (6, 0.5), (8, 0.125)];
        let best = values.iter().fold(None, |best, &(step, value)| Best::of(best, metric, &evaluation(step, value)));
        let best = best.unwrap();
        assert_eq!((best.step, best.value, best.checkpoint.as_str()), (4, 0.5, "checkpoints/step_4"));
        let mut unscored = evaluation(8, 0.75);
        unscored.sets.get_mut("codes").unwrap().missing = 3;
        assert_eq!(Best::unscored(metric, &unscored), Some(("codes", 3)));
        assert_eq!(Best::of(Some(best.clone()), metric, &unscored), Some(best.clone()), "its mean is of other answers");
        assert_eq!(Best::unscored("eval/codes/margin", &unscored), None, "a margin has no rewards");
        assert_eq!(
            Best::of(Some(best.clone()), "eval/codes/margin", &evaluation(9, 1.0)),
            Some(best),
            "it has no margin"
        );
    }

    #[test]
    fn a_receipt_of_an_earlier_version_is_read() {
        let held_out: HeldOut =
            serde_json::from_str(r#"{"margin":1.5,"accuracy":0.5,"reward":null,"prompts":12}"#).unwrap();
        assert_eq!((held_out.margin, held_out.prompts, held_out.greedy), (Some(1.5), 12, None));
    }
}
