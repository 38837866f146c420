//! `[reward.judges]`: judges with names, each with a rubric, a scale, a model and an excerpt of its own; and the prices of
//! the endpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::RunConfig;
use super::check::Check;
use super::rewards::{RewardName, WeightedReward};

/// The longest excerpt, in characters: it goes along with every answer.
const PROMPT_CHARS_MAX: u64 = 1 << 20;

/// `[reward.judges.NAME]`: what differs from the judge without a name.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct JudgeConfig {
    /// File of its rubric; absent: `reward.rubric`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rubric: Option<PathBuf>,
    /// Lowest and highest score; absent: `reward.judge_scale`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale: Option<[f64; 2]>,
    /// Model of the endpoint; absent: `endpoint.default_model`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Characters of the prompt; absent: `reward.judge_prompt_chars`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_chars: Option<u64>,
}

/// Judges by name.
pub type Judges = BTreeMap<String, JudgeConfig>;

/// A judge with everything that its requests follow from.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "the fields are those of the table")]
pub struct JudgeSettings<'a> {
    pub rubric: Option<&'a Path>,
    pub scale: [f64; 2],
    /// Absent: no source names one.
    pub model: Option<&'a str>,
    pub prompt_chars: u64,
}

impl RunConfig {
    /// The judge with this name; the one without a name where there is none.
    #[must_use]
    pub fn judge(&self, name: Option<&str>) -> JudgeSettings<'_> {
        let reward = &self.reward;
        let own = name.and_then(|name| reward.judges.as_ref()?.get(name));
        let rubric = own.and_then(|own| own.rubric.as_deref());
        let model = own.and_then(|own| own.model.as_deref());
        JudgeSettings {
            rubric: rubric.or(reward.rubric.as_deref()),
            scale: own.and_then(|own| own.scale).unwrap_or(reward.judge_scale),
            model: model.or(self.endpoint.default_model.as_deref()),
            prompt_chars: own.and_then(|own| own.prompt_chars).unwrap_or(reward.judge_prompt_chars),
        }
    }

    /// The judges that the reward names, by the words that name them.
    #[must_use]
    pub fn named_judges(&self) -> Vec<(String, JudgeSettings<'_>)> {
        let judges = self.grpo.rewards().iter().filter(|part| part.name == RewardName::Judge);
        judges.map(|part| (part.word(), self.judge(part.judge.as_deref()))).collect()
    }

    /// Where the questions to judges go, for people: a settings file may have named another service than the configuration. And
    /// the judges that no reward names.
    #[must_use]
    pub fn judges_notes(&self) -> Vec<String> {
        let judges = self.named_judges();
        let mut notes = Vec::new();
        if !judges.is_empty() {
            let models: BTreeSet<&str> = judges.iter().filter_map(|(_, judge)| judge.model).collect();
            let endpoint = &self.endpoint;
            notes.push(format!(
                "judges: {} at {}, {}, with the key in {}",
                models.into_iter().collect::<Vec<_>>().join(", "),
                endpoint.api_base.as_deref().unwrap_or("an address that no source names"),
                endpoint.style.words(),
                endpoint.api_key_env
            ));
        }
        for name in self.reward.judges.iter().flat_map(BTreeMap::keys) {
            let word = WeightedReward { name: RewardName::Judge, judge: Some(name.clone()), weight: 1.0 }.word();
            if judges.iter().all(|(named, _)| *named != word) {
                notes.push(format!("reward.judges.{name} is not used: grpo.reward_fn does not name {word}"));
            }
        }
        notes
    }
}

impl Check<'_> {
    /// What one judge of the reward needs.
    pub(super) fn judge(&mut self, part: &WeightedReward) {
        const WITH: &[&str] = &["grpo.reward_fn"];
        let run = self.run;
        if !run.endpoint.usage.reward_scoring {
            let why = "grpo.reward_fn names the judge, and nothing is sent to it unless this key is true";
            self.should("endpoint.usage.reward_scoring", WITH, "true", why);
            return;
        }
        let word = part.word();
        let why = format!("grpo.reward_fn = \"{word}\" needs it");
        if run.endpoint.api_base.is_none() {
            self.should("endpoint.api_base", WITH, "set to the service's address", why.clone());
        }
        let judge = run.judge(part.judge.as_deref());
        if judge.model.is_none() {
            self.should("endpoint.default_model", WITH, "set to the model that judges", why);
        }
        if judge.prompt_chars > 0 && !run.endpoint.usage.prompt_text {
            let why = format!("{word} gets {} characters of each prompt (prompt_chars)", judge.prompt_chars);
            let with = ["grpo.reward_fn", "reward.judge_prompt_chars", "reward.judges"];
            self.should("endpoint.usage.prompt_text", &with, "true", why);
        }
        if let Some(name) = part.judge.as_deref().filter(|&name| !self.has_judge(name)) {
            let known = run.reward.judges.iter().flat_map(BTreeMap::keys).cloned().collect::<Vec<_>>();
            let others =
                if known.is_empty() { "there is none".to_owned() } else { format!("it has {}", known.join(", ")) };
            let be = format!("given a table {name}, as [reward.judges.{name}] with rubric = \"{name}.txt\"");
            self.should("reward.judges", WITH, be, format!("grpo.reward_fn names the judge {name} ({others})"));
        }
    }

    fn has_judge(&self, name: &str) -> bool {
        self.run.reward.judges.as_ref().is_some_and(|judges| judges.contains_key(name))
    }

    /// The values of all judges, whether a reward names them or not.
    pub(super) fn judges(&mut self) {
        let reward = &self.run.reward;
        self.at_most(
            "reward.judge_prompt_chars",
            reward.judge_prompt_chars,
            PROMPT_CHARS_MAX,
            "it goes along with every answer",
        );
        for (name, judge) in reward.judges.iter().flatten() {
            if let Some([least, most]) = judge.scale
                && !(least.is_finite() && most.is_finite() && least < most)
            {
                let why = format!("the scale of {name} is {:?}", [least, most]);
                self.should("reward.judges", &[], "with two finite numbers as scale, the lower first", why);
            }
            if let Some(chars) = judge.prompt_chars.filter(|&chars| chars > PROMPT_CHARS_MAX) {
                let be = format!("with prompt_chars of at most {PROMPT_CHARS_MAX}");
                self.should(
                    "reward.judges",
                    &[],
                    be,
                    format!("those of {name} go along with every answer (it is {chars})"),
                );
            }
        }
        let endpoint = &self.run.endpoint;
        for (key, price, other, other_price) in [
            ("endpoint.price_in", endpoint.price_in, "endpoint.price_out", endpoint.price_out),
            ("endpoint.price_out", endpoint.price_out, "endpoint.price_in", endpoint.price_in),
        ] {
            let Some(price) = price else { continue };
            self.range(key, price, price.is_finite() && price >= 0.0, "a finite number from 0");
            if other_price.is_none() {
                self.should(other, &[key], "set too", format!("{key} alone is the price of one half; 0 is a price"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_judge_does_not_say_is_that_of_the_one_without_a_name() {
        let mut config = RunConfig::laptop();
        config.reward.rubric = Some("all.txt".into());
        config.endpoint.default_model = Some("large".to_owned());
        let own = JudgeConfig { scale: Some([1.0, 5.0]), prompt_chars: Some(9), ..JudgeConfig::default() };
        config.reward.judges = Some([("clarity".to_owned(), own)].into());
        let clarity = config.judge(Some("clarity"));
        let wanted = (Some(Path::new("all.txt")), [1.0, 5.0], Some("large"), 9);
        assert_eq!((clarity.rubric, clarity.scale, clarity.model, clarity.prompt_chars), wanted);
        let plain = config.judge(None);
        assert_eq!((plain.scale, plain.prompt_chars), ([0.0, 10.0], 0));
    }
}
