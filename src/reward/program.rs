//! The reward of a program: one JSON object a line to its standard input, one reward a line back, in the same order.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::candidate::Candidate;
use super::error::{Error, Missing, ProgramFault};
use crate::config::RunConfig;
use crate::program::{self, End, GONE_WITHIN, Limits, Ran, last_lines, never_starts, short};
use crate::runtime::units::from_index;

/// The most that a program may write.
const STDOUT_BYTES_MAX: usize = 8 << 20;

/// A program that scores answers.
pub(super) struct Program {
    program: program::Program,
    seconds: u64,
}

/// What the program reads of an answer.
#[derive(Serialize)]
struct Line<'a> {
    prompt: &'a str,
    answer: usize,
    text: &'a str,
    tokens: u64,
    truncated: bool,
    reward_data: &'a Map<String, Value>,
}

/// A line that is an object.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Object {
    reward: Option<f64>,
    reason: Option<String>,
}

impl Program {
    /// Looks whether the program is there, where it is named by its path; nothing is started.
    pub(super) fn open(config: &RunConfig) -> Result<Program, Error> {
        let command = config.reward.command.as_deref().unwrap_or_default();
        let opened = program::Program::open(command, config.endpoint.secret_variables());
        let named = || command.first().cloned().unwrap_or_default();
        let program = opened.map_err(|source| Error::Program { program: named(), source })?;
        Ok(Program { program, seconds: config.reward.command_sec })
    }

    /// The longest that a call may take.
    pub(super) fn longest(&self) -> Duration {
        Duration::from_secs(self.seconds).saturating_add(2 * GONE_WITHIN)
    }

    /// Scores all of `candidates` in one run. A program that cannot be started at all ends it.
    pub(super) fn score(
        &self,
        candidates: &[Candidate<'_>],
        texts: &[&str],
        alive: &mut dyn FnMut(),
    ) -> Result<Vec<Result<f64, Missing>>, Error> {
        let time = Duration::from_secs(self.seconds);
        let limits = Limits { time, stdout_bytes_max: STDOUT_BYTES_MAX, ends_at_stop: true };
        let all = |fault: ProgramFault, stderr: String| vec![Err(Missing::Program { fault, stderr }); candidates.len()];
        match self.program.run(&input(candidates, texts), limits, alive) {
            Ok(ran) => {
                let stderr = last_lines(&ran.stderr);
                Ok(self.rewards(&ran, candidates.len(), &stderr).unwrap_or_else(|fault| all(fault, stderr)))
            }
            Err(source) if never_starts(&source) => {
                Err(Error::Program { program: self.program.file().to_owned(), source })
            }
            Err(error) => Ok(all(ProgramFault::Run { reason: error.to_string() }, String::new())),
        }
    }

    /// The reward in each line of a run that has come to its end.
    fn rewards(&self, ran: &Ran, answers: usize, stderr: &str) -> Result<Vec<Result<f64, Missing>>, ProgramFault> {
        match ran.end {
            End::TimeOut => return Err(ProgramFault::TimeOut { seconds: self.seconds }),
            End::TooLong => return Err(ProgramFault::TooLong { bytes_max: from_index(STDOUT_BYTES_MAX) }),
            End::Exit(status) if !status.success() => return Err(ProgramFault::Exit { status: status.to_string() }),
            End::Exit(_) => {}
        }
        let text = String::from_utf8_lossy(&ran.stdout);
        let lines: Vec<&str> = text.lines().collect();
        if lines.len() != answers {
            return Err(ProgramFault::Lines { lines: lines.len(), answers });
        }
        let missing = |fault| Missing::Program { fault, stderr: stderr.to_owned() };
        Ok(lines.into_iter().map(|line| reward(line).map_err(missing)).collect())
    }
}

/// A line for each answer.
fn input(candidates: &[Candidate<'_>], texts: &[&str]) -> String {
    let lines = candidates.iter().zip(texts).map(|(candidate, text)| {
        let Candidate { prompt, answer, tokens, truncated, reward_data, .. } = *candidate;
        let line = Line { prompt, answer, text, tokens, truncated, reward_data };
        serde_json::to_string(&line).expect("names are texts, so there is a JSON form") + "\n"
    });
    lines.collect()
}

/// A number, null, or an object with either as its reward.
fn reward(line: &str) -> Result<f64, ProgramFault> {
    let shown = || short(line);
    let finite = |reward: f64| {
        if reward.is_finite() { Ok(reward) } else { Err(ProgramFault::NotFinite { line: shown() }) }
    };
    let text = line.trim();
    if let Ok(number) = text.parse() {
        return finite(number);
    }
    if text == "null" {
        return Err(ProgramFault::None { reason: None });
    }
    match serde_json::from_str(text) {
        Ok(Object { reward: Some(reward), .. }) => finite(reward),
        Ok(Object { reason, .. }) if text.contains("\"reward\"") => {
            Err(ProgramFault::None { reason: reason.map(|reason| short(&reason)) })
        }
        // As Python's json module writes them, and JSON does not have them.
        Err(_) if text.contains("NaN") || text.contains("Infinity") => Err(ProgramFault::NotFinite { line: shown() }),
        _ => Err(ProgramFault::Line { line: shown() }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_line_is_a_number_null_or_an_object() {
        for (line, value) in [
            ("1", 1.0),
            (" -0.25 ", -0.25),
            ("1e-3", 1e-3),
            (r#"{"reward": 0.5}"#, 0.5),
            (r#"{"reason": "half", "reward": 1}"#, 1.0),
        ] {
            assert_eq!(reward(line), Ok(value), "{line}");
        }
        assert_eq!(reward("null"), Err(ProgramFault::None { reason: None }));
        let reason = Some("no judge".to_owned());
        assert_eq!(reward(r#"{"reward": null, "reason": "no judge"}"#), Err(ProgramFault::None { reason }));
        for line in ["nan", "-inf", "1e999", r#"{"reward": NaN}"#, r#"{"reward": -Infinity}"#] {
            assert_eq!(reward(line), Err(ProgramFault::NotFinite { line: line.to_owned() }));
        }
        for line in
            ["", "yes", "true", "[1]", "1 2", r#"{"score": 1}"#, r#"{"reason": "x"}"#, r#"{"reward": "1"}"#, "{"]
        {
            assert_eq!(reward(line), Err(ProgramFault::Line { line: line.to_owned() }));
        }
    }

    #[test]
    fn an_answer_is_one_line_whatever_it_says() {
        let data = json!({ "expected": "a\nb" });
        let reward_data = data.as_object().unwrap();
        let (prompt, text) = ("one", "whole");
        let candidate = Candidate {
            prompt,
            answer: 2,
            text,
            tokens: 3,
            tokens_max: 8,
            truncated: true,
            reward_data,
            given: None,
            prompt_text: "",
        };
        assert_eq!(
            input(&[candidate], &["c\n\"d\""]),
            "{\"prompt\":\"one\",\"answer\":2,\"text\":\"c\\n\\\"d\\\"\",\"tokens\":3,\"truncated\":true,\
             \"reward_data\":{\"expected\":\"a\\nb\"}}\n"
        );
    }
}
