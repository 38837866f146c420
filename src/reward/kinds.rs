//! The kinds of reward, each with what it needs. A new rule is a variant here, a name in `config::rewards` and a row in
//! docs/rewards.md.

use std::time::Duration;

use regex::Regex;
use serde_json::{Map, Value};

use super::candidate::Candidate;
use super::error::{Error, Missing};
use super::judge::Judge;
use super::program::Program;
use super::text;
use crate::config::{Environment, RewardName, RunConfig, WeightedReward};
use crate::runtime::failure::Failure;
use crate::runtime::units::Tokens;

/// Where the value of a reward comes from.
pub(super) enum Reward {
    Rule(Rule),
    Command(Program),
    Judge(Box<Judge>),
}

/// A reward that compares texts or counts, and needs nobody else.
pub(super) enum Rule {
    /// 0 and 1 in turn.
    Synthetic,
    One,
    /// The data set's own.
    Data,
    ExactMatch,
    Contains,
    /// The pattern for records without a pattern of their own.
    Regex(Option<Regex>),
    /// Dotted path of the field.
    JsonField(String),
    /// Tokens up to which the reward is 1.
    Length(Tokens),
}

impl Reward {
    /// # Errors
    /// Where the configuration's pattern, rubric or program is wrong, or the endpoint cannot be opened.
    pub(super) fn open(
        part: &WeightedReward,
        config: &RunConfig,
        environment: &Environment,
    ) -> Result<Reward, Failure> {
        let settings = &config.reward;
        Ok(Reward::Rule(match part.name {
            RewardName::Synthetic => Rule::Synthetic,
            RewardName::Data => Rule::Data,
            RewardName::One => Rule::One,
            RewardName::ExactMatch => Rule::ExactMatch,
            RewardName::Contains => Rule::Contains,
            RewardName::Regex => Rule::Regex(settings.pattern.as_deref().map(text::common_pattern).transpose()?),
            RewardName::JsonField => Rule::JsonField(settings.field.clone().unwrap_or_default()),
            RewardName::Length => Rule::Length(settings.length_tokens.unwrap_or_default()),
            RewardName::Command => return Ok(Reward::Command(Program::open(config)?)),
            RewardName::Judge => {
                let judge = Judge::open(part.judge.as_deref(), config, environment)?;
                return Ok(Reward::Judge(Box::new(judge)));
            }
        }))
    }

    /// Checks that a record's reward data has what the reward needs.
    pub(super) fn check(&self, name: RewardName, record: &str, data: &Map<String, Value>) -> Result<(), Error> {
        match self {
            Reward::Rule(Rule::ExactMatch | Rule::Contains | Rule::JsonField(_)) => {
                text::expected(record, name, data).map(drop)
            }
            Reward::Rule(Rule::Regex(common)) => text::pattern(record, data, common.as_ref()).map(drop),
            Reward::Judge(judge) => judge.check(record, data),
            _ => Ok(()),
        }
    }

    /// The judge, where the reward is one.
    pub(super) fn judge(&self) -> Option<&Judge> {
        match self {
            Reward::Judge(judge) => Some(judge),
            Reward::Rule(_) | Reward::Command(_) => None,
        }
    }

    /// The values of the reward, in the order of `candidates`; `texts` are the parts of them that are scored.
    ///
    /// # Errors
    /// Where every further answer would end in the same.
    pub(super) fn score(
        &self,
        name: RewardName,
        candidates: &[Candidate<'_>],
        texts: &[&str],
        alive: &mut dyn FnMut(),
    ) -> Result<Vec<Result<f64, Missing>>, Failure> {
        match self {
            Reward::Rule(rule) => {
                let each = candidates.iter().zip(texts);
                Ok(each.map(|(candidate, text)| rule.score(name, candidate, text)).collect())
            }
            Reward::Command(program) => Ok(program.score(candidates, texts, alive)?),
            Reward::Judge(judge) => Ok(judge.score(candidates, texts, alive)?),
        }
    }

    /// The longest that so many answers may take.
    pub(super) fn longest(&self, answers: usize) -> Duration {
        match self {
            Reward::Rule(_) => Duration::ZERO,
            Reward::Command(program) => program.longest(),
            Reward::Judge(judge) => judge.longest(answers),
        }
    }
}

impl Rule {
    fn score(&self, name: RewardName, candidate: &Candidate<'_>, text: &str) -> Result<f64, Missing> {
        let Candidate { prompt, reward_data: data, .. } = *candidate;
        let lacks = |error: Error| Missing::Record { words: error.to_string() };
        let expected = || text::expected(prompt, name, data).map_err(lacks);
        let holds = match self {
            Rule::Synthetic => candidate.answer % 2 == 1,
            Rule::One => true,
            Rule::Data => return candidate.given.ok_or(Missing::NotGiven),
            Rule::ExactMatch => text::any(text, expected()?, |answer, value| answer == value),
            Rule::Contains => text::any(text, expected()?, text::stands_in),
            Rule::Regex(common) => text::pattern(prompt, data, common.as_ref()).map_err(lacks)?.is_match(text),
            Rule::JsonField(path) => text::has_field(text, path, expected()?),
            Rule::Length(free) => {
                let Candidate { tokens, tokens_max, truncated, .. } = *candidate;
                return Ok(text::brevity(tokens, free.0, tokens_max, truncated));
            }
        };
        Ok(f64::from(u8::from(holds)))
    }
}
