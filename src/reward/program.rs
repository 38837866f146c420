//! The reward of a program: one JSON object a line to its standard input, one reward a line back, in the same order.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::candidate::Candidate;
use super::error::{Error, Missing, ProgramFault};
use super::process::{self, End, GONE_WITHIN, Limits, Ran};
use crate::config::RunConfig;
use crate::runtime::units::from_index;

/// The most that a program may write.
const STDOUT_BYTES_MAX: usize = 8 << 20;
/// Characters of a line, or of a program's reason, that are repeated.
const CHARS_MAX: usize = 120;
/// Last lines of standard error that are repeated.
const STDERR_LINES_MAX: usize = 3;

/// A program that scores answers.
pub(super) struct Program {
    file: String,
    arguments: Vec<String>,
    seconds: u64,
    /// The variable that holds the endpoint's key; it is removed from the program's environment.
    secret: String,
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
        let command = config.reward.command.clone().unwrap_or_default();
        let (file, arguments) = command.split_first().map_or((String::new(), &[][..]), |(p, a)| (p.clone(), a));
        let arguments = arguments.to_vec();
        if file.contains('/') {
            let found = Path::new(&file).metadata();
            let found = found.and_then(|found| if found.is_file() { Ok(()) } else { Err(no_file()) });
            found.map_err(|source| Error::Program { program: file.clone(), source })?;
        }
        Ok(Program { file, arguments, seconds: config.reward.command_sec, secret: config.endpoint.api_key_env.clone() })
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
        let mut command = Command::new(&self.file);
        command.args(&self.arguments).env_remove(&self.secret);
        let limits = Limits { time: Duration::from_secs(self.seconds), stdout_bytes_max: STDOUT_BYTES_MAX };
        let all = |fault: ProgramFault, stderr: String| vec![Err(Missing::Program { fault, stderr }); candidates.len()];
        match process::run(&mut command, input(candidates, texts).as_bytes(), limits, alive) {
            Ok(ran) => {
                let stderr = last_lines(&ran.stderr);
                tracing::debug!("{}: {:?}, standard error: {stderr}", self.file, ran.end);
                Ok(self.rewards(&ran, candidates.len(), &stderr).unwrap_or_else(|fault| all(fault, stderr)))
            }
            Err(source) if is_of_all(&source) => Err(Error::Program { program: self.file.clone(), source }),
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

/// Whether no further start would come to anything else: the file is not there, may not be run, or is no program.
fn is_of_all(error: &io::Error) -> bool {
    let is_no_program = error.raw_os_error() == Some(Errno::NOEXEC.raw_os_error());
    is_no_program || matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied)
}

/// What is named as a program is a folder, or a device.
fn no_file() -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, "it is no file")
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

/// The beginning of a text on one line.
fn short(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let shown: String = line.chars().filter(|c| !c.is_control()).take(CHARS_MAX).collect();
    if line.chars().count() > CHARS_MAX { format!("{shown}…") } else { shown }
}

/// The last lines of a text, on one.
fn last_lines(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<String> = text.lines().map(short).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(STDERR_LINES_MAX)..].join(" / ")
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

    #[test]
    fn the_end_of_standard_error_is_repeated_on_one_line() {
        assert_eq!(last_lines(b"one\ntwo\n\n  three\tx\nfour\n"), "two / three x / four");
        assert_eq!(last_lines(b" \n"), "");
        assert!(last_lines("y".repeat(500).as_bytes()).ends_with("y…"));
    }
}
