//! An answer that is to be scored, and the reward that it gets.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::error::Missing;
use crate::config::RewardName;

/// An answer that is to be scored.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The record's name.
    pub prompt: &'a str,
    /// Index within the answers of the record.
    pub answer: usize,
    /// The answer's text as the model wrote it, special tokens included, without the token that ends its turn.
    pub text: &'a str,
    /// Tokens of the answer.
    pub tokens: u64,
    /// Tokens that an answer may have.
    pub tokens_max: u64,
    /// Whether the answer was cut off at `tokens_max`.
    pub truncated: bool,
    /// What the record holds for its rewards: `expected`, `question`, `pattern`.
    pub reward_data: &'a Map<String, Value>,
    /// The data set's own reward.
    pub given: Option<f64>,
    /// The prompt as the tokenizer writes it; empty unless [`super::Scorer::reads_prompts`].
    pub prompt_text: &'a str,
}

/// One addend of a reward.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Where its value comes from.
    pub name: RewardName,
    /// The name as the configuration spells it, with that of the judge.
    pub word: String,
    /// Its factor in the sum.
    pub weight: f64,
    /// The value before the weight; none where it is missing.
    pub value: Option<f64>,
    /// Why the value is missing.
    pub failure: Option<Missing>,
}

/// The reward of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Rewarded {
    /// The weighted sum; none where a part of it is missing.
    pub value: Option<f64>,
    /// The parts, in the order of the configuration.
    pub parts: Vec<Part>,
}

impl Rewarded {
    /// Why there is no reward: the first part that is missing.
    #[must_use]
    pub fn failure(&self) -> Option<&Missing> {
        self.parts.iter().find_map(|part| part.failure.as_ref())
    }

    pub(super) fn sum(parts: Vec<Part>) -> Rewarded {
        let addends = parts.iter().map(|part| part.value.map(|value| part.weight * value));
        let mut rewarded = Rewarded { value: addends.sum(), parts };
        if rewarded.value.is_some_and(|value| !value.is_finite()) {
            rewarded.value = None;
            rewarded.parts[0].failure = Some(Missing::Sum);
        }
        rewarded
    }
}

/// How many answers have no reward, by the kind of the reason.
#[must_use]
pub fn missing_by_kind(rewarded: &[Rewarded]) -> BTreeMap<&'static str, u64> {
    let mut counts = BTreeMap::new();
    for missing in rewarded.iter().filter_map(Rewarded::failure) {
        *counts.entry(missing.kind()).or_default() += 1;
    }
    counts
}
