//! The worst of the last sampled answers.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::Error;
use super::text::shortened;
use crate::runtime::file_error::FileError;

/// Longer answers are sent without their middle.
const ANSWER_CHARS_MAX: usize = 8_000;
/// The same for a question and an expected answer.
const FIELD_CHARS_MAX: usize = 2_000;

/// A line of `answers.jsonl`; ignores other fields.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Sampled {
    pub(super) step: u64,
    /// Name of the prompt.
    pub(super) prompt: String,
    /// Index in the group.
    pub(super) answer: u64,
    pub(super) text: String,
    pub(super) reward: Option<f64>,
    #[serde(default)]
    parts: Option<BTreeMap<String, Option<f64>>>,
    #[serde(default)]
    tokens: Option<u64>,
    #[serde(default)]
    truncated: bool,
    #[serde(default)]
    reward_data: Option<Map<String, Value>>,
    #[serde(default)]
    failure: Option<String>,
}

#[derive(Deserialize)]
struct StepOnly {
    step: u64,
}

impl Sampled {
    /// Worst first: by reward, then the latest step.
    fn cmp_worst(&self, other: &Sampled) -> Ordering {
        let reward = |answer: &Sampled| answer.reward.unwrap_or(f64::INFINITY);
        let rest = (Reverse(self.step), &self.prompt, self.answer);
        reward(self).total_cmp(&reward(other)).then(rest.cmp(&(Reverse(other.step), &other.prompt, other.answer)))
    }

    /// The message about this answer: numbers, the expected answer if the record has it, and the answer. `with_question`
    /// says whether texts of prompts may be sent.
    pub(super) fn message(&self, with_question: bool) -> String {
        let number = |value: Option<f64>| value.map_or_else(|| "none".to_owned(), |value| value.to_string());
        let mut lines = vec![format!("Reward: {}", number(self.reward))];
        if let Some(parts) = self.parts.as_ref().filter(|parts| !parts.is_empty()) {
            let parts: Vec<String> = parts.iter().map(|(name, part)| format!("{name} {}", number(*part))).collect();
            lines.push(format!("Parts of the reward: {}", parts.join(", ")));
        }
        if let Some(tokens) = self.tokens {
            lines.push(format!("Tokens: {tokens}"));
        }
        if self.truncated {
            lines.push("The answer was cut off at its longest.".to_owned());
        }
        if self.failure.is_some() {
            lines.push("A part of the scoring failed.".to_owned());
        }
        let fields = [("Question", "question"), ("Expected", "expected")];
        for (name, field) in fields.into_iter().filter(|(_, field)| with_question || *field != "question") {
            let value = self.reward_data.as_ref().and_then(|data| data.get(field)).filter(|value| !value.is_null());
            if let Some(value) = value {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                lines.push(format!("{name}: {}", shortened(&text, FIELD_CHARS_MAX)));
            }
        }
        lines.push(format!("<answer>\n{}\n</answer>", shortened(&self.text, ANSWER_CHARS_MAX)));
        lines.join("\n")
    }
}

/// The worst answers of the last quarter of the steps, at most `answers_max`: the worst of each prompt comes before the
/// second worst of any.
///
/// # Errors
/// When the file cannot be read, or has no answer with a reward.
pub(super) fn worst(file: &Path, answers_max: usize) -> Result<Vec<Sampled>, Error> {
    let (mut first, mut last) = (u64::MAX, 0);
    for_each::<StepOnly>(file, |StepOnly { step }| (first, last) = (first.min(step), last.max(step)))?;
    let from = (last + 1).saturating_sub((last.saturating_sub(first) + 1).div_ceil(4));
    let mut chosen = Chosen { by_prompt: BTreeMap::new(), answers_max };
    for_each::<Sampled>(file, |answer| {
        if answer.step >= from && answer.reward.is_some() {
            chosen.add(answer);
        }
    })?;
    let worst = chosen.worst();
    if worst.is_empty() { Err(Error::NoAnswers { file: file.to_owned() }) } else { Ok(worst) }
}

/// Passes every line that can be read as `T` to `take`; skips others, such as an incomplete last line.
fn for_each<T: DeserializeOwned>(file: &Path, mut take: impl FnMut(T)) -> Result<(), Error> {
    let io = FileError::at(file, "read it");
    let opened = match File::open(file) {
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => {
            return Err(Error::NoAnswers { file: file.to_owned() });
        }
        opened => opened.map_err(&io)?,
    };
    let (mut lines, mut line) = (BufReader::new(opened), Vec::new());
    while lines.read_until(b'\n', &mut line).map_err(&io)? > 0 {
        serde_json::from_slice(&line).into_iter().for_each(&mut take);
        line.clear();
    }
    Ok(())
}

/// The worst answers so far: at most `answers_max` of `answers_max` prompts, whatever the run's length.
struct Chosen {
    /// Each prompt's answers, the worst first.
    by_prompt: BTreeMap<String, Vec<Sampled>>,
    answers_max: usize,
}

impl Chosen {
    fn add(&mut self, answer: Sampled) {
        let of_prompt = self.by_prompt.entry(answer.prompt.clone()).or_default();
        of_prompt.push(answer);
        of_prompt.sort_by(Sampled::cmp_worst);
        of_prompt.truncate(self.answers_max);
        if self.by_prompt.len() > self.answers_max {
            let worst_of_each = self.by_prompt.values().filter_map(|answers| answers.first());
            if let Some(best) = worst_of_each.max_by(|a, b| a.cmp_worst(b)).map(|answer| answer.prompt.clone()) {
                self.by_prompt.remove(&best);
            }
        }
    }

    fn worst(self) -> Vec<Sampled> {
        let numbered = self.by_prompt.into_values().flat_map(|answers| answers.into_iter().enumerate());
        let mut all: Vec<(usize, Sampled)> = numbered.collect();
        all.sort_by(|(a, one), (b, other)| (*a > 0).cmp(&(*b > 0)).then_with(|| one.cmp_worst(other)));
        all.truncate(self.answers_max);
        all.into_iter().map(|(_, answer)| answer).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn file_of(lines: &[Value]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text: String = lines.iter().flat_map(|line| [line.to_string(), "\n".to_owned()]).collect();
        std::fs::write(file.path(), text + "{\"step\": 99, \"pro").unwrap();
        file
    }

    fn answer(step: u64, prompt: &str, index: u64, reward: Option<f64>) -> Value {
        json!({"step": step, "prompt": prompt, "answer": index, "text": "t", "tokens": 3, "reward": reward,
               "parts": {"exact": reward}, "advantage": null, "truncated": false, "reward_data": {}, "failure": null})
    }

    fn chosen(lines: &[Value], most: usize) -> Vec<(u64, String, u64)> {
        let found = worst(file_of(lines).path(), most).unwrap();
        found.into_iter().map(|one| (one.step, one.prompt, one.answer)).collect()
    }

    #[test]
    fn the_worst_of_each_prompt_comes_before_the_second_of_one() {
        let lines = [
            answer(1, "old", 0, Some(-9.0)),
            answer(7, "a", 0, Some(-1.0)),
            answer(7, "a", 1, Some(-0.5)),
            answer(7, "b", 0, Some(0.25)),
            answer(8, "b", 1, Some(0.25)),
            answer(8, "c", 0, Some(0.5)),
            answer(8, "d", 0, None),
        ];
        let is = |found: &[(u64, String, u64)]| -> Vec<String> {
            found.iter().map(|(step, prompt, index)| format!("{step}{prompt}{index}")).collect()
        };
        assert_eq!(
            is(&chosen(&lines, 4)),
            ["7a0", "8b1", "8c0", "7a1"],
            "the latest of equal ones; none without a reward"
        );
        assert_eq!(is(&chosen(&lines, 8)), ["7a0", "8b1", "8c0", "7a1", "7b0"]);
        assert_eq!(is(&chosen(&lines, 2)), ["7a0", "8b1"]);
    }

    #[test]
    fn a_run_of_many_prompts_keeps_the_worst_in_whatever_order_they_come() {
        let lines: Vec<Value> = (0_u32..200)
            .map(|at| answer(1, &format!("p{}", at % 50), u64::from(at / 50), Some(f64::from(at * 37 % 199))))
            .collect();
        let mut all: BTreeMap<String, f64> = BTreeMap::new();
        for line in &lines {
            let reward = line["reward"].as_f64().unwrap();
            let least = all.entry(line["prompt"].as_str().unwrap().to_owned()).or_insert(f64::INFINITY);
            *least = least.min(reward);
        }
        let mut expected: Vec<f64> = all.into_values().collect();
        expected.sort_by(f64::total_cmp);
        let found = worst(file_of(&lines).path(), 8).unwrap();
        let rewards: Vec<f64> = found.iter().filter_map(|one| one.reward).collect();
        assert_eq!(rewards, expected[..8]);
    }

    #[test]
    fn a_message_has_question_expected_answer_and_no_name() {
        let line = json!({"step": 3, "prompt": "the name", "answer": 1, "text": "in York", "tokens": 3, "reward": 0.0,
            "parts": {"exact": 0.0, "judge": null}, "truncated": true, "failure": "no reply",
            "reward_data": {"question": "Where?", "expected": ["Aldby", 7], "note": "not this"}});
        let message = serde_json::from_value::<Sampled>(line).unwrap().message(true);
        assert_eq!(
            message,
            "Reward: 0\nParts of the reward: exact 0, judge none\nTokens: 3\nThe answer was cut off at its longest.\n\
             A part of the scoring failed.\nQuestion: Where?\nExpected: [\"Aldby\",7]\n<answer>\nin York\n</answer>"
        );
    }

    #[test]
    fn a_run_without_samples_is_refused() {
        let absent = worst(Path::new("absent.jsonl"), 8).unwrap_err().to_string();
        assert!(absent.contains("rollout.sample = true"), "{absent}");
        let none = worst(file_of(&[answer(1, "a", 0, None)]).path(), 8).unwrap_err().to_string();
        assert!(none.contains("holds no answer with a reward"), "{none}");
    }
}
