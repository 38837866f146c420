//! A round: the groups of `grpo.updates_per_group` updates, with the answers and scores that stay the same in all of them.
//!
//! ```text
//!   update 1    each group: capture, answers, rewards, scores (frozen), replay      update k > 1    each group: capture, replay
//! ```

use std::collections::BTreeMap;
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::answer::{Answer, GroupPlace, MissingReward, RewardedGroup};
use super::reuse::{EarlierAdapters, HeldPrompt};
use crate::data::GroupOrder;
use crate::report::{Step, ToolNumbers};
use crate::runtime::failure::{Classified, Exit};
use crate::runtime::units::{float, from_index};
use crate::step::objective::{self, Aggregation, Counted};
use crate::step::replay::{FrozenScores, TrainedAnswer};
use crate::step::rollout::CallCounts;

/// Too many answers of an update lack a reward.
#[derive(Debug, thiserror::Error)]
#[error(
    "{missing} of the {answers} answers of update {step} have no reward, more than reward.missing_share_max = {share_max} \
     allows; most often ({times} of them): {kind}: {words}"
)]
pub(super) struct TooFewRewards {
    missing: usize,
    answers: usize,
    step: u64,
    share_max: f64,
    times: usize,
    kind: String,
    words: String,
    /// Whether the judge failed to give one of them.
    service: bool,
}

impl Classified for TooFewRewards {
    fn exit(&self) -> Exit {
        if self.service { Exit::Endpoint } else { Exit::Data }
    }
}

/// One group of this rank's prompt group as it stays through a round.
#[derive(Debug)]
pub(super) struct FrozenGroup {
    pub(super) place: GroupPlace,
    pub(super) answers: Vec<Answer>,
    /// Reward of each answer, where it has one.
    pub(super) rewards: Vec<Option<f64>>,
    pub(super) advantages: Vec<Option<f64>>,
    /// Scores that all updates of the round share; `None` where the group is left out, since it has no gradient.
    pub(super) scores: Option<Rc<FrozenScores>>,
    /// The prompt, between two updates that share a capture.
    pub(super) held: Option<HeldPrompt>,
}

impl FrozenGroup {
    /// Tokens of each answer.
    pub(super) fn ids(&self) -> Vec<Vec<i64>> {
        self.answers.iter().map(|answer| answer.ids.clone()).collect()
    }

    /// The answers as they are trained, each token with its weight before the batch's denominator.
    pub(super) fn trained_answers(&self, aggregation: Aggregation) -> Vec<TrainedAnswer> {
        let trained = |(answer, advantage): (&Answer, &Option<f64>)| TrainedAnswer {
            ids: answer.ids.clone(),
            mask: answer.mask.clone(),
            given: answer.given_logprobs.clone(),
            advantage: *advantage,
            weight: aggregation.share(answer.trained_tokens()),
        };
        self.answers.iter().zip(&self.advantages).map(trained).collect()
    }
}

/// What every rank knows of a group, whichever ranks work on it. Checkpoints hold these field names.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct GroupSummary {
    /// Reward of each answer.
    pub(super) rewards: Vec<Option<f64>>,
    /// Tokens of each answer.
    pub(super) tokens: Vec<u64>,
    /// Answers that were cut off.
    pub(super) truncated: u64,
    /// Parts of each answer's reward, by name.
    pub(super) parts: Vec<BTreeMap<String, f64>>,
    /// Why rewards are missing.
    #[serde(rename = "absent")]
    pub(super) missing: Vec<MissingReward>,
    /// Whether the group is left out.
    pub(super) skipped: bool,
    /// How the calls in its answers have ended.
    #[serde(default, skip_serializing_if = "has_no_call")]
    pub(super) calls: CallCounts,
}

fn has_no_call(counts: &CallCounts) -> bool {
    counts.calls == 0
}

/// The groups of one or several updates.
#[derive(Debug)]
pub(super) struct Round {
    /// All groups, in order; each prompt group of ranks takes its own share.
    pub(super) places: Vec<GroupPlace>,
    pub(super) made: u64,
    /// This prompt group's groups, once they are frozen.
    pub(super) mine: Vec<FrozenGroup>,
    /// All groups, once their answers are rewarded.
    pub(super) groups: Vec<GroupSummary>,
    /// All answers that take part.
    pub(super) counts: objective::Batch,
    /// Where the data stood before the round.
    pub(super) cursor_before: GroupOrder,
    /// The adapters that captured the prompts, between two updates that share a capture.
    pub(super) earlier: Option<Rc<EarlierAdapters>>,
    /// Seconds of the captures that the last update did without, and of what it spent on measuring the drift, on this rank.
    pub(super) saved_s: f64,
    pub(super) measured_s: f64,
}

impl Round {
    /// Takes the next `groups` groups of the data. Every rank knows the place of each.
    pub(super) fn take(cursor: &mut GroupOrder, groups: usize) -> Round {
        let cursor_before = cursor.clone();
        let first = cursor.taken();
        let places = (first..).zip(cursor.take(groups)).map(|(number, index)| GroupPlace { index, number });
        Round {
            places: places.collect(),
            made: 0,
            mine: Vec::new(),
            groups: Vec::new(),
            counts: objective::Batch::default(),
            cursor_before,
            earlier: None,
            saved_s: 0.0,
            measured_s: 0.0,
        }
    }

    /// Adds a group whose answers are rewarded. An answer without an advantage takes no part: it is in no denominator.
    pub(super) fn add(&mut self, group: &RewardedGroup, advantages: &[Option<f64>], skipped: bool) {
        let rewards = group.values();
        for (answer, advantage) in group.answers.iter().zip(advantages) {
            self.counts.add(Counted { tokens: answer.trained_tokens(), scored: advantage.is_some() });
        }
        self.groups.push(GroupSummary {
            rewards,
            tokens: group.answers.iter().map(Answer::tokens).collect(),
            truncated: from_index(group.answers.iter().filter(|answer| answer.truncated).count()),
            parts: group.rewards.iter().map(|reward| reward.parts.clone()).collect(),
            missing: group.rewards.iter().filter_map(|reward| reward.missing.clone()).collect(),
            skipped,
            calls: group.calls(),
        });
    }

    /// How the calls in all answers of the batch have ended.
    pub(super) fn calls(&self) -> CallCounts {
        let mut counts = CallCounts::default();
        self.groups.iter().for_each(|group| counts.add(&group.calls));
        counts
    }

    /// Rewards of all answers of the batch.
    pub(super) fn rewards(&self) -> Vec<Option<f64>> {
        self.groups.iter().flat_map(|group| group.rewards.iter().copied()).collect()
    }

    /// Checks that at most a share of `share_max` of the answers lacks a reward.
    pub(super) fn check_rewards(&self, share_max: f64, step: u64) -> Result<(), TooFewRewards> {
        let answers: usize = self.groups.iter().map(|group| group.rewards.len()).sum();
        let missing: Vec<&MissingReward> =
            self.groups.iter().flat_map(|group| &group.missing).filter(|missing| missing.counts).collect();
        let share = float(from_index(missing.len())) / float(from_index(answers.max(1)));
        let times = |kind: &str| missing.iter().filter(|missing| missing.kind == kind).count();
        let commonest = missing.iter().max_by_key(|missing| times(&missing.kind));
        let Some(commonest) = commonest.filter(|_| share > share_max) else { return Ok(()) };
        Err(TooFewRewards {
            missing: missing.len(),
            answers,
            step,
            share_max,
            times: times(&commonest.kind),
            kind: commonest.kind.clone(),
            words: commonest.words.clone(),
            service: missing.iter().any(|missing| missing.service),
        })
    }

    /// Adds the numbers of an update that follow from its groups. `prompt_tokens`: tokens of each prompt; `sampled`: whether
    /// the policy gave the answers; `call_seconds`: of waits for replies, where calls are answered.
    pub(super) fn describe(&self, step: Step, prompt_tokens: &[u64], sampled: bool, call_seconds: Option<f64>) -> Step {
        let rewards: Vec<Vec<Option<f64>>> = self.groups.iter().map(|group| group.rewards.clone()).collect();
        let answer_tokens: Vec<u64> = self.groups.iter().flat_map(|group| group.tokens.iter().copied()).collect();
        let mut reward_failures: BTreeMap<String, u64> = BTreeMap::new();
        for missing in self.groups.iter().flat_map(|group| &group.missing) {
            *reward_failures.entry(missing.kind.clone()).or_default() += 1;
        }
        let mut parts: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for (name, value) in self.groups.iter().flat_map(|group| &group.parts).flatten() {
            parts.entry(name.clone()).or_default().push(*value);
        }
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / float(from_index(values.len().max(1)));
        let truncated = self.groups.iter().map(|group| group.truncated).sum();
        let truncated_share = float(truncated) / float(from_index(answer_tokens.len().max(1)));
        let step = Step {
            group_update: self.made,
            groups_skipped: from_index(self.groups.iter().filter(|group| group.skipped).count()),
            reward_failures,
            reward_parts: parts.into_iter().map(|(name, values)| (name, mean(values))).collect(),
            truncated_share: sampled.then_some(truncated_share),
            tools: call_seconds.map(|seconds| ToolNumbers::of(&self.calls(), from_index(answer_tokens.len()), seconds)),
            ..step
        };
        step.with_rewards(&rewards).with_lengths(prompt_tokens, &answer_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A round of `answers` answers, of which `missing` have no reward.
    fn round(answers: usize, missing: usize, counts: bool) -> Round {
        let kind = |index: usize| if index == 0 { "status_429" } else { "time_out" };
        let reason =
            |index| MissingReward { kind: kind(index).into(), words: "no answer".into(), service: true, counts };
        let missing = (0..missing).map(reason).collect();
        let mut round = Round::take(&mut GroupOrder::new(None, 1), 1);
        round.groups.push(GroupSummary { rewards: vec![None; answers], missing, ..GroupSummary::default() });
        round
    }

    #[test]
    fn more_missing_rewards_than_allowed_end_the_run_and_the_commonest_reason_is_named() {
        assert!(round(8, 2, true).check_rewards(0.25, 3).is_ok());
        assert!(round(8, 8, false).check_rewards(0.25, 3).is_ok(), "a data set may leave rewards out");
        assert!(round(0, 0, true).check_rewards(0.0, 1).is_ok());
        let error = round(8, 3, true).check_rewards(0.25, 3).unwrap_err();
        assert_eq!(error.exit(), Exit::Endpoint);
        let words = error.to_string();
        assert!(words.starts_with("3 of the 8 answers of update 3 have no reward"), "{words}");
        assert!(words.ends_with("most often (2 of them): time_out: no answer"), "{words}");
    }
}
