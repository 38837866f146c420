//! `grpo.reward_fn`: one reward by its name, or several with weights.

use serde::de::{self, SeqAccess, Visitor};
use serde::ser::SerializeSeq as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// The rewards, in the order of [`RewardName::WORDS`].
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardName {
    /// 0 and 1 in turn.
    Synthetic,
    /// The data set's own rewards of its answers.
    Data,
    /// The reward 1 and the advantage +1 for every answer.
    One,
    /// 1 where the answer is what the record expects.
    ExactMatch,
    /// 1 where the answer contains what the record expects.
    Contains,
    /// 1 where a pattern matches the answer.
    Regex,
    /// 1 where a field of the answer, which is JSON, is what the record expects.
    JsonField,
    /// 1 for a short answer, less for a longer one.
    Length,
    /// A program's value.
    Command,
    /// The endpoint's score.
    Judge,
}

impl RewardName {
    /// The names as a configuration spells them: the choices of `grpo.reward_fn` and the rows of docs/rewards.md.
    pub const WORDS: &[&str] =
        &["synthetic", "data", "one", "exact_match", "contains", "regex", "json_field", "length", "command", "judge"];

    /// The name as a configuration spells it.
    #[must_use]
    pub fn word(self) -> &'static str {
        Self::WORDS[self as usize]
    }

    /// Whether it is for validation runs: it stands alone and needs no data set.
    #[must_use]
    pub fn is_for_validation(self) -> bool {
        matches!(self, RewardName::One | RewardName::Synthetic)
    }
}

/// One reward and its factor in the sum.
#[expect(missing_docs, reason = "both fields say what they are")]
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WeightedReward {
    pub name: RewardName,
    pub weight: f64,
}

/// Where rewards come from: a weighted sum, most often of one addend.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardFn(Vec<WeightedReward>);

impl RewardFn {
    /// One reward with the weight 1.
    #[must_use]
    pub fn only(name: RewardName) -> RewardFn {
        RewardFn(vec![WeightedReward { name, weight: 1.0 }])
    }

    /// The addends of the sum.
    #[must_use]
    pub fn parts(&self) -> &[WeightedReward] {
        &self.0
    }

    /// Whether it is this one reward alone, with the weight 1.
    #[must_use]
    pub fn is_only(&self, name: RewardName) -> bool {
        *self == RewardFn::only(name)
    }

    /// Whether `name` is one of the addends.
    #[must_use]
    pub fn names(&self, name: RewardName) -> bool {
        self.0.iter().any(|part| part.name == name)
    }
}

/// One name where there is one addend of weight 1, else a list.
impl Serialize for RewardFn {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if *self == RewardFn::only(self.0[0].name) {
            return self.0[0].name.serialize(serializer);
        }
        let mut list = serializer.serialize_seq(Some(self.0.len()))?;
        self.0.iter().try_for_each(|part| list.serialize_element(part))?;
        list.end()
    }
}

impl<'de> Deserialize<'de> for RewardFn {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct RewardVisitor;
        impl<'de> Visitor<'de> for RewardVisitor {
            type Value = RewardFn;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a reward's name, or a list of { name, weight }")
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<RewardFn, E> {
                let name = RewardName::deserialize(de::value::StrDeserializer::new(word))?;
                Ok(RewardFn::only(name))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<RewardFn, A::Error> {
                let mut parts = Vec::new();
                while let Some(part) = list.next_element()? {
                    parts.push(part);
                }
                if parts.is_empty() { Err(de::Error::invalid_length(0, &self)) } else { Ok(RewardFn(parts)) }
            }
        }
        deserializer.deserialize_any(RewardVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read_as_the_reward_of_that_name() {
        for word in RewardName::WORDS {
            let name = RewardName::deserialize(de::value::StrDeserializer::<de::value::Error>::new(word));
            assert_eq!(name.map(RewardName::word), Ok(*word));
        }
    }
}
