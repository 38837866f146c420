//! What an answer is worth: rules, a program, or the endpoint's judgement, as one weighted sum.
//!
//! A reward that could not be had is missing and says why. It never becomes 0: that would teach the policy that an answer
//! was bad because a service was down.

mod error;
mod judge;
mod process;
mod program;
mod text;
mod verdict;

use std::collections::BTreeMap;
use std::time::Duration;

use regex::Regex;
use serde_json::{Map, Value};

pub use error::{Error, Missing, ProgramFault};
pub use verdict::Unread;

use crate::config::{Environment, RewardName, RunConfig, WeightedReward};
use crate::runtime::failure::Failure;
use crate::runtime::units::Tokens;
use judge::Judge;
use program::Program;

/// One answer to be scored.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The record's name.
    pub prompt: &'a str,
    /// Which of its answers.
    pub answer: usize,
    /// What it says, without special tokens.
    pub text: &'a str,
    /// Its tokens.
    pub tokens: u64,
    /// The most that it may have.
    pub tokens_max: u64,
    /// Whether it was cut off there.
    pub truncated: bool,
    /// What the record gives rewards to go by.
    pub reward_data: &'a Map<String, Value>,
    /// The data set's own reward.
    pub given: Option<f64>,
}

/// One addend of a reward.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Which.
    pub name: RewardName,
    /// Its factor in the sum.
    pub weight: f64,
    /// Without its weight; none where it could not be had.
    pub value: Option<f64>,
    /// Why it could not.
    pub failure: Option<Missing>,
}

/// What an answer is worth.
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

    fn of(parts: Vec<Part>) -> Rewarded {
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

/// Scores answers as a configuration says.
pub struct Scorer {
    parts: Vec<WeightedReward>,
    after: Option<String>,
    pattern: Option<Regex>,
    field: String,
    length_tokens: Tokens,
    program: Option<Program>,
    judge: Option<Judge>,
}

impl Scorer {
    /// Compiles the pattern, reads the rubric, looks for the program, and opens the endpoint where the judge is named.
    ///
    /// # Errors
    /// [`Error`] where one of them is wrong, or what opening the endpoint ends in. Nothing is sent yet.
    pub fn open(config: &RunConfig, environment: &Environment) -> Result<Scorer, Failure> {
        let (wanted, reward) = (&config.grpo.reward_fn, &config.reward);
        let compiled = |text: &String| {
            let wrong = |error| Error::Pattern { pattern: text.clone(), reason: text::reason(&error) };
            Regex::new(text).map_err(wrong)
        };
        let asks = |name| wanted.names(name).then_some(());
        Ok(Scorer {
            parts: wanted.parts().to_vec(),
            after: reward.after.clone(),
            pattern: reward.pattern.as_ref().map(compiled).transpose()?,
            field: reward.field.clone().unwrap_or_default(),
            length_tokens: reward.length_tokens.unwrap_or_default(),
            program: asks(RewardName::Command).map(|()| Program::open(config)).transpose()?,
            judge: asks(RewardName::Judge).map(|()| Judge::open(config, environment)).transpose()?,
        })
    }

    /// Whether every record, its name and its reward data, has what the rewards need.
    ///
    /// # Errors
    /// [`Error`] of the first that lacks something, with its name.
    pub fn check<'a>(&self, records: impl Iterator<Item = (&'a str, &'a Map<String, Value>)>) -> Result<(), Error> {
        for (record, data) in records {
            for part in &self.parts {
                match part.name {
                    RewardName::ExactMatch | RewardName::Contains | RewardName::JsonField => {
                        text::expected(record, part.name, data)?;
                    }
                    RewardName::Regex => {
                        text::pattern(record, data, self.pattern.as_ref())?;
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Asks the judge for a word, where there is one, so that what is wrong with the service shows before anything long.
    ///
    /// # Errors
    /// What the request ends in.
    pub fn probe(&self) -> Result<(), Failure> {
        self.judge.as_ref().map_or(Ok(()), |judge| Ok(judge.probe()?))
    }

    /// Scores answers, each in its place. What could not be had is missing with its reason. `alive` is called whenever
    /// something comes back from a program or from the service.
    ///
    /// # Errors
    /// Where every further answer would end in the same: the service refuses the key, does not know the model or is not at
    /// the address; the program cannot be started.
    pub fn score(&self, asked: &[Asked<'_>], alive: &mut dyn FnMut()) -> Result<Vec<Rewarded>, Failure> {
        let mut parts: Vec<Vec<Part>> = asked.iter().map(|_| Vec::new()).collect();
        let texts: Vec<&str> = asked.iter().map(|asked| text::scored(asked.text, self.after.as_deref())).collect();
        for WeightedReward { name, weight } in self.parts.iter().copied() {
            let outcomes = match (name, &self.program, &self.judge) {
                // Without an answer there is nothing to start a program for.
                _ if asked.is_empty() => Vec::new(),
                (RewardName::Command, Some(program), _) => program.score(asked, &texts, alive)?,
                (RewardName::Judge, _, Some(judge)) => judge.score(asked, &texts, alive)?,
                _ => asked.iter().zip(&texts).map(|(asked, text)| self.rule(name, asked, text)).collect(),
            };
            for ((parts, asked), outcome) in parts.iter_mut().zip(asked).zip(outcomes) {
                if let Err(missing) = &outcome {
                    tracing::debug!("record {}, answer {}: no {}: {missing}", asked.prompt, asked.answer, name.word());
                }
                let (value, failure) =
                    outcome.map_or_else(|missing| (None, Some(missing)), |value| (Some(value), None));
                parts.push(Part { name, weight, value, failure });
            }
        }
        Ok(parts.into_iter().map(Rewarded::of).collect())
    }

    /// The longest that [`Scorer::score`] may take for so many answers, for whoever sets a deadline for it; 0 where it only
    /// compares texts.
    #[must_use]
    pub fn longest(&self, answers: usize) -> Duration {
        let program = self.program.as_ref().map(Program::longest).unwrap_or_default();
        let judge = self.judge.as_ref().map(|judge| judge.longest(answers)).unwrap_or_default();
        program.saturating_add(judge)
    }

    /// A reward that needs nobody else.
    fn rule(&self, name: RewardName, asked: &Asked<'_>, text: &str) -> Result<f64, Missing> {
        let Asked { prompt, reward_data: data, .. } = *asked;
        let lacks = |error: Error| Missing::Record { words: error.to_string() };
        let expected = || text::expected(prompt, name, data).map_err(lacks);
        let holds = match name {
            RewardName::Synthetic => asked.answer % 2 == 1,
            RewardName::One => true,
            RewardName::Data => return asked.given.ok_or(Missing::NotGiven),
            RewardName::ExactMatch => text::is_exactly(text, expected()?),
            RewardName::Contains => text::holds(text, expected()?),
            RewardName::Regex => text::pattern(prompt, data, self.pattern.as_ref()).map_err(lacks)?.is_match(text),
            RewardName::JsonField => text::has_field(text, &self.field, expected()?),
            RewardName::Length => {
                let Asked { tokens, tokens_max, truncated, .. } = *asked;
                return Ok(text::brevity(tokens, self.length_tokens.0, tokens_max, truncated));
            }
            RewardName::Command | RewardName::Judge => {
                unreachable!("opened with a program where it is named, and with a judge where it is")
            }
        };
        Ok(f64::from(u8::from(holds)))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::RewardFn;
    use crate::runtime::failure::{Classified as _, Exit};

    fn config(rewards: &Value) -> RunConfig {
        let mut config = RunConfig::laptop();
        config.grpo.reward_fn = serde_json::from_value::<RewardFn>(rewards.clone()).unwrap();
        config.reward.length_tokens = Some(Tokens(4));
        config.reward.field = Some("value".to_owned());
        config
    }

    fn scorer(rewards: &Value) -> Scorer {
        Scorer::open(&config(rewards), &Environment::default()).unwrap()
    }

    fn score(scorer: &Scorer, texts: &[&str], data: &Value, given: Option<f64>) -> Vec<Rewarded> {
        let reward_data = data.as_object().unwrap();
        let asked = texts.iter().enumerate().map(|(answer, text)| {
            let tokens = text.len().try_into().unwrap();
            Asked { prompt: "one", answer, text, tokens, tokens_max: 8, truncated: tokens >= 8, reward_data, given }
        });
        let scored = scorer.score(&asked.collect::<Vec<_>>(), &mut || panic!("a rule asks nobody")).unwrap();
        assert_eq!(scorer.longest(texts.len()), Duration::ZERO);
        scored
    }

    fn values(rewards: &Value, texts: &[&str], data: &Value) -> Vec<Option<f64>> {
        score(&scorer(rewards), texts, data, Some(0.75)).iter().map(|rewarded| rewarded.value).collect()
    }

    #[test]
    fn every_rule_gives_its_reward() {
        let data = json!({ "expected": ["7", 8] });
        let texts = ["7", " 8 ", "it is 7.", "9", ""];
        let of = |rewards: Value| values(&rewards, &texts, &data).into_iter().map(Option::unwrap).collect::<Vec<_>>();
        assert_eq!(of(json!("synthetic")), [0.0, 1.0, 0.0, 1.0, 0.0]);
        assert_eq!(of(json!("one")), [1.0; 5]);
        assert_eq!(of(json!("data")), [0.75; 5]);
        assert_eq!(of(json!("exact_match")), [1.0, 1.0, 0.0, 0.0, 0.0]);
        assert_eq!(of(json!("contains")), [1.0, 1.0, 1.0, 0.0, 0.0]);
        assert_eq!(of(json!("length")), [1.0, 1.0, 0.0, 1.0, 1.0]);
        let data = json!({ "expected": 8, "pattern": "^[89]$" });
        assert_eq!(values(&json!("regex"), &["8", "89", "9"], &data), [Some(1.0), Some(0.0), Some(1.0)]);
        assert_eq!(values(&json!("json_field"), &["{\"value\": 8.0}", "8"], &data), [Some(1.0), Some(0.0)]);
    }

    #[test]
    fn rewards_are_summed_by_their_weights() {
        let rewards = json!([{ "name": "contains", "weight": 1.0 }, { "name": "length", "weight": -0.5 }]);
        let rewarded = score(&scorer(&rewards), &["7 is", "7 is it", "no"], &json!({ "expected": 7 }), None);
        let sums: Vec<Option<f64>> = rewarded.iter().map(|rewarded| rewarded.value).collect();
        assert_eq!(sums, [Some(0.5), Some(0.875), Some(-0.5)]);
        let [contains, length] = &rewarded[1].parts[..] else { panic!("two parts") };
        assert_eq!((contains.value, length.value, length.weight), (Some(1.0), Some(0.25), -0.5));
        assert!(rewarded[1].failure().is_none() && missing_by_kind(&rewarded).is_empty());
    }

    #[test]
    fn a_sum_with_a_missing_part_is_missing_and_says_why() {
        let rewards = json!([{ "name": "one", "weight": 1.0 }, { "name": "data", "weight": 1.0 }]);
        let rewarded = score(&scorer(&rewards), &["a", "b"], &json!({}), None);
        assert_eq!((rewarded[0].value, rewarded[0].parts[0].value), (None, Some(1.0)));
        assert_eq!(rewarded[0].failure(), Some(&Missing::NotGiven));
        assert_eq!(missing_by_kind(&rewarded), BTreeMap::from([("not_given", 2)]));
        let huge = json!([{ "name": "one", "weight": 1e308 }, { "name": "data", "weight": 1e308 }]);
        let rewarded = score(&scorer(&huge), &["a"], &json!({}), Some(1.0));
        assert_eq!((rewarded[0].value, rewarded[0].failure()), (None, Some(&Missing::Sum)));
    }

    #[test]
    fn only_what_follows_the_mark_is_given_to_the_rules() {
        let mut config = config(&json!("exact_match"));
        config.reward.after = Some("</think>".to_owned());
        let scorer = Scorer::open(&config, &Environment::default()).unwrap();
        let rewarded = score(&scorer, &["7", "no</think>7", "7</think>no"], &json!({ "expected": 7 }), None);
        assert_eq!(rewarded.iter().map(|one| one.value).collect::<Vec<_>>(), [Some(0.0), Some(1.0), Some(0.0)]);
    }

    #[test]
    fn records_are_checked_before_any_answer_is_scored() {
        let good = json!({ "expected": "7", "pattern": "7" });
        let bad = json!({ "expected": {} });
        let check = |rewards: Value, data: &Value| {
            let records = [("one", good.as_object().unwrap()), ("two", data.as_object().unwrap())];
            scorer(&rewards).check(records.into_iter())
        };
        for name in ["exact_match", "contains", "json_field"] {
            assert!(check(json!(name), &good).is_ok());
            let error = check(json!(name), &bad).unwrap_err();
            assert_eq!(error.exit(), Exit::Data);
            assert!(error.to_string().starts_with("record two: its reward_data.expected holds an object"), "{error}");
        }
        assert!(
            check(json!("regex"), &bad).unwrap_err().to_string().starts_with("record two: has no reward_data.pattern")
        );
        let broken = check(json!("regex"), &json!({ "pattern": "[" })).unwrap_err();
        assert!(broken.to_string().contains("unclosed character class"), "{broken}");
        for name in ["data", "length", "one"] {
            assert!(check(json!(name), &bad).is_ok(), "{name} needs nothing of a record");
        }
        let rewarded = score(&scorer(&json!("contains")), &["7"], &json!({}), None);
        assert_eq!(missing_by_kind(&rewarded), BTreeMap::from([("record", 1)]), "a record that nobody has checked");
    }

    #[test]
    fn what_the_configuration_names_is_looked_at_when_it_is_opened() {
        let refused = |rewards: Value, change: fn(&mut RunConfig)| {
            let mut config = config(&rewards);
            change(&mut config);
            let failure = Scorer::open(&config, &Environment::default()).err().unwrap();
            (failure.exit(), failure.to_string())
        };
        let (exit, words) = refused(json!("regex"), |config| config.reward.pattern = Some("a(".to_owned()));
        assert_eq!(exit, Exit::Config);
        assert!(words.starts_with(r#"reward.pattern = "a(" is no pattern: unclosed group; correct it"#), "{words}");
        let (exit, words) =
            refused(json!("command"), |config| config.reward.command = Some(vec!["/no/such/program".to_owned()]));
        assert!(exit == Exit::Config && words.contains("cannot start /no/such/program: No such file"), "{words}");
        let (exit, _) = refused(json!("judge"), |config| config.reward.rubric = Some("/no/such/rubric".into()));
        assert_eq!(exit, Exit::Config);
        let (exit, words) = refused(json!("judge"), |config| {
            config.endpoint.api_base = Some("http://127.0.0.1:9".to_owned());
            config.endpoint.default_model = Some("m".to_owned());
        });
        assert!(exit == Exit::Endpoint && words.contains("TAOTOKEN_API_KEY"), "{words}");
    }

    #[test]
    fn every_kind_of_missing_reward_stands_in_the_document() {
        let document = include_str!("../../docs/rewards.md");
        let code =
            [include_str!("error.rs"), include_str!("verdict.rs"), include_str!("../endpoint/error.rs")].concat();
        let kind = Regex::new(r#"=> "([a-z_]+)","#).unwrap();
        let kinds: Vec<&str> = kind.captures_iter(&code).map(|found| found.get(1).unwrap().as_str()).collect();
        assert!(kinds.len() > 25, "{kinds:?}");
        for kind in kinds {
            assert!(document.contains(&format!("`{kind}`")), "docs/rewards.md does not tell of {kind}");
        }
    }
}
