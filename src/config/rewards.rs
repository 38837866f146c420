//! `grpo.reward_fn`: one reward by its name, or several with weights.

use serde::de::{self, SeqAccess, Visitor};
use serde::ser::SerializeSeq as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

use super::set_name::is_set_name;

/// What the name of a judge follows in `grpo.reward_fn`.
const JUDGE: &str = "judge:";

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

    /// Whether it follows from what an answer says.
    #[must_use]
    pub fn reads_text(self) -> bool {
        !matches!(self, RewardName::Synthetic | RewardName::Data | RewardName::One | RewardName::Length)
    }

    /// Whether it refuses a record without `reward_data.expected`.
    #[must_use]
    pub fn reads_expected(self) -> bool {
        matches!(self, RewardName::ExactMatch | RewardName::Contains | RewardName::JsonField)
    }
}

/// Whether this is the name of a reward: a known word, or a judge's name after `judge:`.
pub(super) fn is_reward(text: &str) -> bool {
    RewardName::WORDS.contains(&text) || text.strip_prefix(JUDGE).is_some_and(is_set_name)
}

/// One reward and its factor in the sum.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct WeightedReward {
    /// Where its value comes from.
    pub name: RewardName,
    /// The judge's name, for one of `[reward.judges]`.
    pub judge: Option<String>,
    /// Its factor in the sum.
    pub weight: f64,
}

/// A [`WeightedReward`] as a configuration spells it.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Written {
    name: String,
    weight: f64,
}

impl TryFrom<Written> for WeightedReward {
    type Error = de::value::Error;

    fn try_from(written: Written) -> Result<WeightedReward, Self::Error> {
        WeightedReward::parse(&written.name, written.weight)
    }
}

impl From<WeightedReward> for Written {
    fn from(reward: WeightedReward) -> Written {
        Written { name: reward.word(), weight: reward.weight }
    }
}

impl WeightedReward {
    fn parse<E: de::Error>(word: &str, weight: f64) -> Result<WeightedReward, E> {
        if let Some(judge) = word.strip_prefix(JUDGE) {
            return Ok(WeightedReward { name: RewardName::Judge, judge: Some(judge.to_owned()), weight });
        }
        let name = RewardName::deserialize(de::value::StrDeserializer::new(word))?;
        Ok(WeightedReward { name, judge: None, weight })
    }

    /// The name as a configuration spells it, with that of the judge.
    #[must_use]
    pub fn word(&self) -> String {
        self.judge.as_ref().map_or_else(|| self.name.word().to_owned(), |judge| format!("{JUDGE}{judge}"))
    }
}

/// Where rewards come from: a weighted sum, most often of one addend.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardFn(Vec<WeightedReward>);

impl RewardFn {
    /// One reward with the weight 1.
    #[must_use]
    pub fn only(name: RewardName) -> RewardFn {
        RewardFn(vec![WeightedReward { name, judge: None, weight: 1.0 }])
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
        if let [only] = &self.0[..]
            && only.weight.to_bits() == 1.0_f64.to_bits()
        {
            return only.word().serialize(serializer);
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
                Ok(RewardFn(vec![WeightedReward::parse(word, 1.0)?]))
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

    #[test]
    fn a_judge_with_a_name_comes_back_as_it_was_written() {
        for text in [r#""judge:clarity""#, r#"[{"name":"judge:clarity","weight":0.5},{"name":"judge","weight":1.0}]"#] {
            let rewards: RewardFn = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&rewards).unwrap(), text);
            assert_eq!(
                (rewards.parts()[0].name, rewards.parts()[0].word().as_str()),
                (RewardName::Judge, "judge:clarity")
            );
        }
        assert!(is_reward("judge") && is_reward("judge:a-1") && !is_reward("judge:") && !is_reward("jury:a"));
    }
}
