//! Sampled answers with their rewards: the lines of `answers.jsonl` in the run directory.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::step::rollout::CallCounts;

/// One sampled answer.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct AnswerLine {
    /// The update that it was sampled for, counted from 1.
    pub step: u64,
    /// Name of the prompt.
    pub prompt: String,
    /// Index in the group.
    pub answer: u64,
    /// Its text as the model wrote it, without the token that ends its turn.
    pub text: String,
    /// Its length in tokens.
    pub tokens: u64,
    /// The sampled tokens; tokenizing `text` may give others.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ids: Vec<i64>,
    /// Sum of the sampled tokens' log-probabilities at the run's temperature; absent where the answer comes with the data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprob: Option<f64>,
    /// `None` where there is no reward.
    pub reward: Option<f64>,
    /// Parts of the reward by name, as far as they are known.
    pub parts: BTreeMap<String, f64>,
    /// Advantage within the group.
    pub advantage: Option<f64>,
    /// Whether it was cut off at the greatest length of an answer.
    pub truncated: bool,
    /// The record's data for rewards.
    pub reward_data: Map<String, Value>,
    /// Why there is no reward.
    pub failure: Option<String>,
    /// How its calls have ended; absent without a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calls: Option<CallCounts>,
    /// Which of its tokens were sampled; the others are of replies to its calls. Absent where all were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask: Option<Vec<bool>>,
}
