//! `grpo.reward_fn`: one reward by its name, or several with weights.

use serde::de::{self, SeqAccess, Visitor};
use serde::ser::SerializeSeq as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// The rewards there are.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardName {
    /// 0 and 1 in turn.
    Synthetic,
    /// The data set's own rewards of its answers.
    Data,
    /// Every answer has the reward 1 and the advantage +1, whatever the others have.
    One,
    /// 1 where the answer is what the record expects.
    ExactMatch,
    /// 1 where what the record expects stands in the answer.
    Contains,
    /// 1 where a pattern matches the answer.
    Regex,
    /// 1 where a field of the answer, which is JSON, is what the record expects.
    JsonField,
    /// 1 for a short answer, less for a longer one.
    Length,
    /// A program's.
    Command,
    /// The endpoint's.
    Judge,
}

impl RewardName {
    /// All of them, as a configuration names them.
    pub(super) const WORDS: &[&str] =
        &["synthetic", "data", "one", "exact_match", "contains", "regex", "json_field", "length", "command", "judge"];

    /// As a configuration names it.
    #[must_use]
    pub fn word(self) -> &'static str {
        Self::WORDS[self as usize]
    }
}

/// One reward and how much it counts.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WeightedReward {
    /// Which.
    pub name: RewardName,
    /// Its factor in the sum.
    pub weight: f64,
}

/// Where rewards come from: a weighted sum, most often of one.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardFn(Vec<WeightedReward>);

impl RewardFn {
    /// One alone, with the weight 1.
    #[must_use]
    pub fn only(name: RewardName) -> RewardFn {
        RewardFn(vec![WeightedReward { name, weight: 1.0 }])
    }

    /// The addends.
    #[must_use]
    pub fn parts(&self) -> &[WeightedReward] {
        &self.0
    }

    /// Whether it is among them.
    #[must_use]
    pub fn names(&self, name: RewardName) -> bool {
        self.0.iter().any(|part| part.name == name)
    }
}

/// A name alone where it has the weight 1, else a list.
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
