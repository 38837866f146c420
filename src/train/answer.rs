//! Answers, and what they are worth: what ranks tell each other of a group.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::data;
use crate::runtime::units::from_index;
use crate::step::rollout::{CallCounts, SampledAnswer};

/// Which group it is.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct GroupPlace {
    /// Index in the data set.
    pub(super) index: usize,
    /// Ordinal of the group in the run; seeds its sampling noise.
    pub(super) number: u64,
}

/// One answer, sampled or from the data set.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct Answer {
    pub(super) ids: Vec<i64>,
    /// Which tokens are trained; `None`: all.
    pub(super) mask: Option<Vec<bool>>,
    /// The reward that the data set gives.
    pub(super) given: Option<f64>,
    /// Log-probability of each token under the policy that drew it, where the data set gives one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) given_logprobs: Option<Vec<Option<f64>>>,
    /// Whether the answer was cut off at the longest length.
    pub(super) truncated: bool,
    /// Sum over sampled tokens of the log-probability at sampling, nats; `None` for an answer of the data set.
    pub(super) logprob: Option<f64>,
    /// How its calls have ended; `None` without a call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) calls: Option<CallCounts>,
}

impl Answer {
    pub(super) fn sampled(sampled: SampledAnswer) -> Answer {
        let logprob = Some(sampled.logprobs.iter().sum());
        Answer {
            ids: sampled.ids,
            mask: sampled.mask,
            given: None,
            given_logprobs: None,
            truncated: sampled.truncated,
            logprob,
            calls: Some(sampled.calls).filter(|counts| counts.calls > 0),
        }
    }

    pub(super) fn from_data(answer: &data::Answer) -> Answer {
        let ids = answer.ids.clone();
        let mask = answer.mask.clone();
        let given_logprobs = answer.logprobs.clone();
        Answer { ids, mask, given: answer.reward, given_logprobs, truncated: false, logprob: None, calls: None }
    }

    pub(super) fn tokens(&self) -> u64 {
        from_index(self.ids.len())
    }

    /// Tokens that its author wrote: all but those of replies to its calls.
    pub(super) fn written_tokens(&self) -> u64 {
        self.tokens() - self.calls.as_ref().map_or(0, |counts| counts.tokens)
    }

    pub(super) fn trained_tokens(&self) -> u64 {
        let trained = |mask: &Vec<bool>| from_index(mask.iter().filter(|&&trained| trained).count());
        self.mask.as_ref().map_or(self.tokens(), trained)
    }
}

/// What one answer is worth.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct AnswerReward {
    /// The answer's text as the model wrote it, without the token that ends its turn; empty without a tokenizer.
    pub(super) text: String,
    /// The weighted sum of the parts; `None`: missing.
    pub(super) value: Option<f64>,
    /// Parts of the reward, by name.
    pub(super) parts: BTreeMap<String, f64>,
    /// Why the reward is missing.
    pub(super) missing: Option<MissingReward>,
}

/// Why a reward is missing. Checkpoints hold these field names.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct MissingReward {
    /// One word, for counting.
    pub(super) kind: String,
    pub(super) words: String,
    /// Whether the judge failed to give the reward.
    pub(super) service: bool,
    /// Whether the reward counts towards `reward.missing_share_max`: a data set may leave rewards out.
    pub(super) counts: bool,
}

/// A group's answers with their rewards; the same on every rank.
#[derive(Clone, Debug)]
pub(super) struct RewardedGroup {
    pub(super) answers: Vec<Answer>,
    pub(super) rewards: Vec<AnswerReward>,
}

impl RewardedGroup {
    /// Value of each answer's reward.
    pub(super) fn values(&self) -> Vec<Option<f64>> {
        self.rewards.iter().map(|reward| reward.value).collect()
    }

    /// How the calls in its answers have ended.
    pub(super) fn calls(&self) -> CallCounts {
        let mut counts = CallCounts::default();
        self.answers.iter().filter_map(|answer| answer.calls.as_ref()).for_each(|calls| counts.add(calls));
        counts
    }
}
