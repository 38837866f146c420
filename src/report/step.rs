//! The numbers of one update.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use super::averages::{deviation, ends, mean};
use super::receipt::Seconds;
use super::sources::SourceStep;
use super::tool_numbers::ToolNumbers;
use crate::endpoint::Spent;
use crate::runtime::units::{float, from_index};
use crate::step::objective;

/// The numbers of one update: one line of metrics.jsonl. A field that an earlier version did not write has its default.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Step {
    /// Updates made, this one included.
    pub step: u64,
    /// Index of the update among those on the same group, from 0 (`grpo.updates_per_group`).
    pub group_update: u64,
    pub gradient: String,
    /// Loss over the whole batch.
    #[serde(deserialize_with = "finite_or_nan")]
    pub loss: f64,
    /// Mean reward over the answers that have one.
    pub reward_mean: Option<f64>,
    /// Population standard deviation over the same answers.
    pub reward_std: Option<f64>,
    /// Least and largest of the same rewards.
    pub reward_range: Option<[f64; 2]>,
    /// Mean over groups of the population standard deviation within the group.
    pub group_std: Option<f64>,
    /// Share of groups whose rewards are all equal: they add nothing to the gradient.
    pub frac_groups_zero_std: f64,
    /// Groups left out of the update.
    pub groups_skipped: u64,
    /// Answers without a reward.
    pub reward_missing: u64,
    /// Number of them by kind of failure.
    pub reward_failures: BTreeMap<String, u64>,
    /// Mean of each part of the reward by name.
    pub reward_parts: BTreeMap<String, f64>,
    /// Smallest and largest ratio to the frozen scores.
    #[serde(deserialize_with = "ends_or_nan")]
    pub ratio: Option<[f64; 2]>,
    /// Tokens whose loss a clip changed.
    pub clipped_tokens: u64,
    /// Share of the trained tokens that were clipped from below: their probability fell and should fall further.
    pub clip_low_share: f64,
    /// Share of the trained tokens that were clipped from above.
    pub clip_high_share: f64,
    /// Share of the trained tokens whose loss the dual clip bounded; absent without one.
    pub clip_dual_share: Option<f64>,
    /// Estimate (k3, whatever `grpo.kl_estimator` says) of the divergence from the starting policy, mean over trained tokens, in
    /// nats; absent without a KL term.
    pub kl: Option<f64>,
    /// Mean importance weight of the trained tokens; absent without weights.
    pub importance_mean: Option<f64>,
    /// Share of the trained tokens whose importance weight is the largest that is allowed, or 0 by a mask; absent without
    /// weights.
    pub importance_capped_share: Option<f64>,
    /// What advantages were divided by over the whole batch; absent where they are not scaled by the batch.
    pub advantage_scale: Option<f64>,
    /// Mean entropy of the distributions that tokens were sampled from, in nats; absent without sampling.
    pub entropy: Option<f64>,
    /// Largest difference between a token's log-probability at sampling and its frozen score, in nats.
    pub sampled_gap: Option<f64>,
    /// Share of the experts and index sets of sampled rows that were chosen differently when the rows were scored; absent where
    /// those of sampling were used, or nothing chooses.
    pub choices_changed: Option<f64>,
    /// Of the pages that an earlier update captured (`run.reuse_capture`); absent where this one has captured them.
    pub reuse: Option<Reuse>,
    /// Norm of the adapters' gradient before clipping.
    #[serde(deserialize_with = "finite_or_nan")]
    pub grad_norm: f64,
    /// Alarms that this update has raised (`[alarm]`), each with the number that did, if that is finite.
    pub alarms: BTreeMap<String, Option<f64>>,
    pub learning_rate: f64,
    /// What each source of the data has given (`data.sources`); absent where there is one file.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, SourceStep>,
    /// What was sent to the judges since the update before; absent where nothing was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub judge: Option<Spent>,
    /// Prompts of this update, over all ranks.
    pub prompts: Vec<String>,
    /// Sum of the prompts' lengths in tokens.
    pub prompt_tokens: u64,
    /// Mean, least and most tokens of an answer.
    pub answer_tokens: Option<[f64; 3]>,
    /// Share of sampled answers that were cut off at the greatest length; absent without sampling.
    pub truncated_share: Option<f64>,
    /// Calls in sampled answers; absent where nobody answers them.
    pub tools: Option<ToolNumbers>,
    /// Prompt and answer tokens, each counted once, per second of the update.
    pub tokens_per_second: f64,
    /// Seconds by phase on rank 0.
    pub seconds: Seconds,
    /// Peak bytes of each phase on rank 0: on the device, and in host memory.
    pub memory: BTreeMap<String, [u64; 2]>,
}

/// JSON has no word for a number that is not finite: null stands for it.
fn finite_or_nan<'de, D: Deserializer<'de>>(number: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(number)?.unwrap_or(f64::NAN))
}

fn ends_or_nan<'de, D: Deserializer<'de>>(ends: D) -> Result<Option<[f64; 2]>, D::Error> {
    let ends: Option<[Option<f64>; 2]> = Option::deserialize(ends)?;
    Ok(ends.map(|ends| ends.map(|end| end.unwrap_or(f64::NAN))))
}

/// What an update on reused pages saves, costs and errs. Seconds are those of rank 0, the other numbers are of all ranks.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct Reuse {
    /// Updates since the pages were captured.
    pub age: u64,
    /// Seconds of the captures that the update did without; 0 where a run that goes on, or an evaluation, had to capture again.
    pub saved_s: f64,
    /// Seconds that the measurement of the drift has taken; 0 without one. They are a part of `seconds`.
    pub measured_s: f64,
    /// |reused − fresh| / fresh of `nll`; this and what follows is absent where the update did not measure.
    pub drift: Option<f64>,
    /// Mean negative log-likelihood of the trained tokens on reused pages and on pages captured anew, nats.
    #[serde(deserialize_with = "ends_or_nan")]
    pub nll: Option<[f64; 2]>,
    /// Loss of the update on both.
    #[serde(deserialize_with = "ends_or_nan")]
    pub loss: Option<[f64; 2]>,
    /// Estimated divergence (k3) between both, mean over trained tokens, nats.
    pub k3: Option<f64>,
    /// The largest difference between both of a token's log-probability, nats.
    pub gap: Option<f64>,
}

impl Step {
    /// Sets what follows from the rewards of all groups: mean, deviations, range, and the number of missing rewards.
    #[must_use]
    pub fn with_rewards(self, groups: &[Vec<Option<f64>>]) -> Step {
        let known: Vec<Vec<f64>> =
            groups.iter().map(|group| group.iter().filter_map(|&reward| reward).collect()).collect();
        let all: Vec<f64> = known.iter().flatten().copied().collect();
        let deviations: Vec<f64> = known.iter().filter_map(|group| deviation(group)).collect();
        let equal = groups.iter().filter(|rewards| objective::spread(rewards).is_none()).count();
        Step {
            reward_mean: mean(&all),
            reward_std: deviation(&all),
            reward_range: ends(&all),
            group_std: mean(&deviations),
            frac_groups_zero_std: float(from_index(equal)) / float(from_index(groups.len().max(1))),
            reward_missing: from_index(groups.iter().map(Vec::len).sum::<usize>() - all.len()),
            ..self
        }
    }

    /// Sets what follows from the lengths of prompts and answers, in tokens, and from `seconds`, which must be set before.
    #[must_use]
    pub fn with_lengths(self, prompts: &[u64], answers: &[u64]) -> Step {
        let lengths: Vec<f64> = answers.iter().map(|&tokens| float(tokens)).collect();
        let prompt_tokens = prompts.iter().sum();
        let total = self.seconds.total;
        let tokens = float(prompt_tokens) + lengths.iter().sum::<f64>();
        Step {
            prompt_tokens,
            answer_tokens: mean(&lengths).zip(ends(&lengths)).map(|(mean, [least, most])| [mean, least, most]),
            tokens_per_second: if total > 0.0 { tokens / total } else { 0.0 },
            ..self
        }
    }

    /// The numbers of a source, from the rewards of each of its groups, the lengths of their prompts and answers, and the answers
    /// that were cut off, where the policy gave them.
    #[must_use]
    pub fn of_source(
        rewards: &[Vec<Option<f64>>],
        prompt_tokens: &[u64],
        answer_tokens: &[u64],
        truncated: Option<u64>,
    ) -> SourceStep {
        let step = Step::default().with_rewards(rewards).with_lengths(prompt_tokens, answer_tokens);
        let answers = float(from_index(answer_tokens.len().max(1)));
        SourceStep {
            groups: from_index(rewards.len()),
            epoch: 0.0,
            reward_mean: step.reward_mean,
            reward_std: step.reward_std,
            group_std: step.group_std,
            frac_groups_zero_std: step.frac_groups_zero_std,
            reward_missing: step.reward_missing,
            prompt_tokens: step.prompt_tokens,
            answer_tokens: step.answer_tokens,
            truncated_share: truncated.map(|truncated| float(truncated) / answers),
        }
    }

    /// Every number with its tag in event files; an absent number has no entry.
    #[must_use]
    pub fn numbers(&self) -> Vec<(String, f64)> {
        let mut numbers: Vec<(String, f64)> = Vec::new();
        let mut put = |tag: &str, value: Option<f64>| numbers.extend(value.map(|value| (tag.to_owned(), value)));
        put("loss", Some(self.loss));
        put("grad_norm", Some(self.grad_norm));
        put("learning_rate", Some(self.learning_rate));
        put("kl", self.kl);
        put("importance/mean", self.importance_mean);
        put("importance/capped_share", self.importance_capped_share);
        put("advantage_scale", self.advantage_scale);
        put("entropy", self.entropy);
        put("sampled_gap", self.sampled_gap);
        put("choices_changed", self.choices_changed);
        put("reuse/age", self.reuse.as_ref().map(|reuse| float(reuse.age)));
        put("reuse/saved_s", self.reuse.as_ref().map(|reuse| reuse.saved_s));
        put("reuse/measured_s", self.reuse.as_ref().map(|reuse| reuse.measured_s));
        put("reuse/drift", self.reuse.as_ref().and_then(|reuse| reuse.drift));
        put("reuse/k3", self.reuse.as_ref().and_then(|reuse| reuse.k3));
        put("reuse/gap", self.reuse.as_ref().and_then(|reuse| reuse.gap));
        put("tokens_per_second", Some(self.tokens_per_second));
        put("reward/mean", self.reward_mean);
        put("reward/std", self.reward_std);
        put("reward/group_std", self.group_std);
        put("reward/least", self.reward_range.map(|[least, _]| least));
        put("reward/most", self.reward_range.map(|[_, most]| most));
        put("reward/groups_zero_std_share", Some(self.frac_groups_zero_std));
        put("reward/groups_skipped", Some(float(self.groups_skipped)));
        put("reward/missing", Some(float(self.reward_missing)));
        for (kind, &count) in &self.reward_failures {
            put(&format!("reward/failures/{kind}"), Some(float(count)));
        }
        for (part, &mean) in &self.reward_parts {
            put(&format!("reward/parts/{part}"), Some(mean));
        }
        for (source, step) in &self.sources {
            for (number, value) in step.numbers() {
                put(&format!("source/{source}/{number}"), value);
            }
        }
        for (number, value) in self.judge.iter().flat_map(Spent::numbers) {
            put(&format!("judge/{number}"), value);
        }
        for (alarm, &value) in &self.alarms {
            put(&format!("alarm/{alarm}"), value);
        }
        put("ratio/least", self.ratio.map(|[least, _]| least));
        put("ratio/most", self.ratio.map(|[_, most]| most));
        put("clip/low_share", Some(self.clip_low_share));
        put("clip/high_share", Some(self.clip_high_share));
        put("clip/dual_share", self.clip_dual_share);
        put("clip/tokens", Some(float(self.clipped_tokens)));
        put("prompts/tokens", Some(float(self.prompt_tokens)));
        for (at, name) in ["mean", "least", "most"].into_iter().enumerate() {
            put(&format!("answers/tokens_{name}"), self.answer_tokens.map(|lengths| lengths[at]));
        }
        put("answers/truncated_share", self.truncated_share);
        for (name, value) in self.tools.iter().flat_map(ToolNumbers::means) {
            put(&format!("tools/{name}"), Some(value));
        }
        for (phase, seconds) in self.seconds.phases() {
            put(&format!("time/{phase}"), Some(seconds));
        }
        put("time/total", Some(self.seconds.total));
        for (phase, &[device, host]) in &self.memory {
            put(&format!("memory/{phase}/device"), Some(float(device)));
            put(&format!("memory/{phase}/host"), Some(float(host)));
        }
        numbers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deviations_are_of_the_population_over_all_answers_and_within_groups() {
        let groups = [vec![Some(0.0), Some(1.0)], vec![Some(1.0), Some(1.0)], vec![None, None]];
        let step = Step::default().with_rewards(&groups);
        assert_eq!((step.reward_mean, step.group_std), (Some(0.75), Some(0.25)));
        assert_eq!(step.reward_range, Some([0.0, 1.0]));
        assert!((step.reward_std.unwrap() - 0.1875_f64.sqrt()).abs() < 1e-15);
        assert_eq!(step.reward_missing, 2);
        assert!((step.frac_groups_zero_std - 2.0 / 3.0).abs() < 1e-15);
        let none = Step::default().with_rewards(&[vec![None]]);
        assert_eq!((none.reward_mean, none.reward_std, none.group_std, none.reward_missing), (None, None, None, 1));
    }

    #[test]
    fn each_token_counts_once_in_tokens_per_second() {
        let seconds = Seconds { total: 2.0, ..Seconds::default() };
        let step = Step { seconds, ..Step::default() }.with_lengths(&[100, 40], &[3, 5, 10]);
        assert_eq!((step.prompt_tokens, step.answer_tokens), (140, Some([6.0, 3.0, 10.0])));
        assert!((step.tokens_per_second - 79.0).abs() < 1e-12);
        assert_eq!(Step::default().with_lengths(&[], &[]), Step::default());
    }

    #[test]
    fn a_line_of_an_earlier_version_is_read() {
        let line = r#"{"step":3,"gradient":"exact","loss":0.5,"reward_mean":0.25,"frac_groups_zero_std":0.0,
            "ratio":[1.0,1.0],"clipped_tokens":0,"grad_norm":2.0,"learning_rate":0.001,"prompts":["a"],
            "seconds":{"capture":1.0,"score":2.0,"replay":3.0,"sweep":4.0,"finalize":5.0,"update":6.0,"total":21.0}}"#;
        let step: Step = serde_json::from_str(line).unwrap();
        assert_eq!((step.step, step.seconds.sweep, step.seconds.rollout), (3, 4.0, 0.0));
        assert_eq!((step.kl, step.reward_std, step.memory.len()), (None, None, 0));
    }

    #[test]
    fn a_number_that_is_not_finite_comes_back_as_none_of_the_finite_ones() {
        let broken = Step { step: 3, loss: f64::NAN, ratio: Some([0.5, f64::INFINITY]), ..Step::default() };
        let read: Step = serde_json::from_str(&serde_json::to_string(&broken).unwrap()).unwrap();
        assert!(read.loss.is_nan() && read.grad_norm == 0.0 && read.step == 3);
        assert!(read.ratio.is_some_and(|[least, most]| least.to_bits() == 0.5_f64.to_bits() && most.is_nan()));
    }

    #[test]
    fn tags_are_unique_and_absent_numbers_have_none() {
        let step = Step {
            kl: Some(0.25),
            reward_parts: [("exact_match".to_owned(), 0.5)].into(),
            sources: ["codes", "books"].map(|name| (name.to_owned(), SourceStep::default())).into(),
            judge: Some(Spent { requests: 3, cost: Some(0.5), ..Spent::default() }),
            memory: [("capture".to_owned(), [7, 9])].into(),
            ..Step::default()
        };
        let numbers = step.numbers();
        let of =
            |tag: &str| numbers.iter().filter(|(known, _)| known == tag).map(|(_, value)| *value).collect::<Vec<_>>();
        assert_eq!((of("kl"), of("reward/parts/exact_match")), (vec![0.25], vec![0.5]));
        assert_eq!(
            (of("source/codes/epoch"), of("judge/requests"), of("judge/cost")),
            (vec![0.0], vec![3.0], vec![0.5])
        );
        assert_eq!((of("memory/capture/host"), of("time/rollout"), of("entropy")), (vec![9.0], vec![0.0], vec![]));
        let mut tags: Vec<&String> = numbers.iter().map(|(tag, _)| tag).collect();
        tags.sort();
        tags.dedup();
        assert_eq!(tags.len(), numbers.len());
    }
}
