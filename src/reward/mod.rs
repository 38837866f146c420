//! Rewards of answers: rules, a program, or the endpoint's judgement, as one weighted sum.
//!
//! A reward that could not be had is missing and says why. It never becomes 0: that would teach the policy that an answer
//! was bad because a service was down.

mod candidate;
mod error;
mod excerpt;
mod judge;
mod kinds;
mod program;
mod text;
mod verdict;

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Map, Value};

pub use candidate::{Candidate, Part, Rewarded, missing_by_kind};
pub use error::{Error, Missing, ProgramFault, message_failure};
pub use verdict::ReplyFault;

use crate::config::{EndpointConfig, Environment, RewardName, RunConfig};
use crate::endpoint::{Spent, cost_of};
use crate::runtime::failure::Failure;
use judge::Judge;
use kinds::Reward;

/// Reads the rubrics of the judges that the reward names.
///
/// # Errors
/// The first that is no text, or none that can be sent.
pub fn check_rubrics(config: &RunConfig) -> Result<(), Error> {
    config
        .named_judges()
        .iter()
        .filter_map(|(_, judge)| judge.rubric)
        .try_for_each(|file| judge::rubric(file).map(drop))
}

/// One addend of the sum.
struct Addend {
    name: RewardName,
    word: String,
    weight: f64,
    reward: Reward,
}

/// Scores answers as a configuration says.
pub struct Scorer {
    addends: Vec<Addend>,
    /// Only what follows the last of these texts is scored.
    after: Option<String>,
    /// With the prices of what judges are sent.
    endpoint: EndpointConfig,
}

impl Scorer {
    /// Opens what each named reward needs: compiles the pattern, reads the rubric, looks for the program, opens the endpoint.
    ///
    /// # Errors
    /// [`Error`] where one of them is wrong, or what opening the endpoint ends in. Nothing is sent yet.
    pub fn open(config: &RunConfig, environment: &Environment) -> Result<Scorer, Failure> {
        let parts = config.grpo.rewards().iter();
        let addends = parts.map(|part| {
            let reward = Reward::open(part, config, environment)?;
            Ok(Addend { name: part.name, word: part.word(), weight: part.weight, reward })
        });
        Ok(Scorer {
            addends: addends.collect::<Result<_, Failure>>()?,
            after: config.reward.after.clone(),
            endpoint: config.endpoint.clone(),
        })
    }

    /// Checks that every record, given by its name and its reward data, has what the rewards need.
    ///
    /// # Errors
    /// [`Error`] of the first record that lacks something, with its name.
    pub fn check<'a>(&self, records: impl Iterator<Item = (&'a str, &'a Map<String, Value>)>) -> Result<(), Error> {
        for (record, data) in records {
            self.addends.iter().try_for_each(|addend| addend.reward.check(addend.name, record, data))?;
        }
        Ok(())
    }

    /// Sends each model that judges a tiny message, so that what is wrong with the service shows before anything long.
    ///
    /// # Errors
    /// What the request ends in.
    pub fn probe(&self) -> Result<(), Failure> {
        let mut asked = BTreeSet::new();
        self.judges().filter(|judge| asked.insert(judge.model().to_owned())).try_for_each(Judge::probe)
    }

    fn judges(&self) -> impl Iterator<Item = &Judge> {
        self.addends.iter().filter_map(|addend| addend.reward.judge())
    }

    /// Whether a judge gets parts of the prompts.
    #[must_use]
    pub fn reads_prompts(&self) -> bool {
        self.judges().any(Judge::reads_prompts)
    }

    /// What all judges were sent since the last time that this was asked.
    #[must_use]
    pub fn take_spent(&self) -> Spent {
        let mut spent = Spent::default();
        self.judges().for_each(|judge| spent.add(&judge.take_spent()));
        Spent { cost: cost_of(&self.endpoint, spent.tokens_in, spent.tokens_out), ..spent }
    }

    /// The rewards of `candidates`, in their order. `alive` is called whenever a program or the service has sent something.
    ///
    /// # Errors
    /// Where every further answer would end in the same: the service refuses the key, does not know the model or is not at
    /// the address; the program cannot be started.
    pub fn score(&self, candidates: &[Candidate<'_>], alive: &mut dyn FnMut()) -> Result<Vec<Rewarded>, Failure> {
        // Without an answer there is nothing to start a program for.
        if candidates.is_empty() {
            return Ok(Vec::new());
        }
        let mut parts: Vec<Vec<Part>> = candidates.iter().map(|_| Vec::new()).collect();
        let after = self.after.as_deref();
        let texts: Vec<&str> = candidates.iter().map(|candidate| text::scored(candidate.text, after)).collect();
        for Addend { name, word, weight, reward } in &self.addends {
            let outcomes = reward.score(*name, candidates, &texts, alive)?;
            for ((parts, candidate), outcome) in parts.iter_mut().zip(candidates).zip(outcomes) {
                if let Err(missing) = &outcome {
                    let Candidate { prompt, answer, .. } = candidate;
                    tracing::debug!("record {prompt}, answer {answer}: no {word}: {missing}");
                }
                let (value, failure) =
                    outcome.map_or_else(|missing| (None, Some(missing)), |value| (Some(value), None));
                parts.push(Part { name: *name, word: word.clone(), weight: *weight, value, failure });
            }
        }
        Ok(parts.into_iter().map(Rewarded::sum).collect())
    }

    /// The longest that [`Scorer::score`] may take for `answers` answers, as a deadline; 0 where it only compares texts.
    #[must_use]
    pub fn longest(&self, answers: usize) -> Duration {
        let all = self.addends.iter().map(|addend| addend.reward.longest(answers));
        all.fold(Duration::ZERO, Duration::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use regex::Regex;
    use serde_json::json;

    use super::*;
    use crate::config::RewardFn;
    use crate::runtime::failure::{Classified as _, Exit};
    use crate::runtime::units::Tokens;

    fn config(rewards: &Value) -> RunConfig {
        let mut config = RunConfig::laptop();
        config.grpo.reward_fn = Some(serde_json::from_value::<RewardFn>(rewards.clone()).unwrap());
        config.reward.length_tokens = Some(Tokens(4));
        config.reward.field = Some("value".to_owned());
        config
    }

    fn scorer(rewards: &Value) -> Scorer {
        Scorer::open(&config(rewards), &Environment::default()).unwrap()
    }

    fn score(scorer: &Scorer, texts: &[&str], data: &Value, given: Option<f64>) -> Vec<Rewarded> {
        let reward_data = data.as_object().unwrap();
        let candidates = texts.iter().enumerate().map(|(answer, text)| {
            let tokens = text.len().try_into().unwrap();
            Candidate {
                prompt: "one",
                answer,
                text,
                tokens,
                tokens_max: 8,
                truncated: tokens >= 8,
                reward_data,
                given,
                prompt_text: "",
            }
        });
        let scored = scorer.score(&candidates.collect::<Vec<_>>(), &mut || panic!("a rule asks nobody")).unwrap();
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
    fn the_rules_get_only_the_text_after_the_mark() {
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
    fn pattern_rubric_and_program_are_checked_when_opened() {
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
    fn every_reward_has_one_row_in_the_document_and_the_document_no_other() {
        let document = include_str!("../../docs/rewards.md");
        let table = document.split("| reward | value | needs |").nth(1).unwrap().lines().skip(2);
        let rows = table.map_while(|line| line.strip_prefix("| `")?.split_once('`'));
        let mut rows: Vec<&str> = rows.map(|(name, _)| name).collect();
        let mut words = RewardName::WORDS.to_vec();
        rows.sort_unstable();
        words.sort_unstable();
        assert_eq!(rows, words);
    }

    #[test]
    fn the_document_explains_every_kind_of_missing_reward() {
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
