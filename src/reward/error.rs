//! What can be wrong with rewards: before the first answer, which ends a run, and with one answer, which then has no reward.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::verdict::ReplyFault;
use crate::config::RewardName;
use crate::endpoint;
use crate::program::stderr_words;
use crate::runtime::failure::{Classified, Exit, Failure};

/// Why answers cannot be scored as the configuration says.
#[expect(missing_docs, reason = "the fields are parts of the message, which says what they are")]
#[derive(Debug, Error)]
pub enum Error {
    /// The configuration's pattern cannot be compiled.
    #[error("reward.pattern = {pattern:?} is no pattern: {reason}; correct it (docs.rs/regex has the syntax)")]
    Pattern { pattern: String, reason: String },
    /// The rubric cannot be read.
    #[error("reward.rubric: {file}: {source}; name a file of text, or leave the key out for the general rubric")]
    Rubric { file: PathBuf, source: io::Error },
    /// The rubric is empty, or too long to be sent with every answer.
    #[error(
        "reward.rubric: {file}: has {bytes} bytes, and should have from 1 to {bytes_max}: it goes along with every answer"
    )]
    RubricLength {
        file: PathBuf,
        /// Bytes of its text, without blanks around it.
        bytes: u64,
        /// The most there may be.
        bytes_max: u64,
    },
    /// The program cannot be started.
    #[error("reward.command: cannot start {program}: {source}; name a program that this machine has and may run")]
    Program { program: String, source: io::Error },
    /// The service refuses a request for its temperature.
    #[error(
        "{error}: the request states temperature {temperature}; where the service takes none, set reward.judge_temperature = \"none\""
    )]
    Temperature { error: endpoint::Error, temperature: f64 },
    /// A record has no expected answer, or one that cannot be compared.
    #[error(
        "record {record}: its reward_data.expected {found}, and the reward {} compares with it: give a text that is not \
         blank, a number, true or false, or a list of texts",
        .reward.word()
    )]
    Expected { record: String, reward: RewardName, found: &'static str },
    /// A record's passages are none.
    #[error(
        "record {record}: its reward_data.evidence is {found}, and the judge gets what lies around it (prompt_chars): give a list \
         of texts of the prompt, or of [start, end] in its characters"
    )]
    Evidence { record: String, found: String },
    /// There is no pattern for a record.
    #[error(
        "record {record}: has no reward_data.pattern, and reward.pattern is not set: the reward regex needs one of them"
    )]
    NoPattern { record: String },
    /// A record's pattern cannot be compiled.
    #[error(
        "record {record}: its reward_data.pattern {pattern} is no pattern: {reason}; correct it (docs.rs/regex has the syntax)"
    )]
    RecordPattern { record: String, pattern: String, reason: String },
}

/// The failure of a tiny message that stated this temperature; one that is about the temperature names the key.
#[must_use]
pub fn message_failure(error: endpoint::Error, temperature: Option<f64>) -> Failure {
    match temperature {
        Some(temperature) if error.to_string().contains("temperature") => {
            Error::Temperature { error, temperature }.into()
        }
        _ => error.into(),
    }
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Pattern { .. } | Error::Rubric { .. } | Error::RubricLength { .. } | Error::Program { .. } => {
                Exit::Config
            }
            Error::Temperature { error, .. } => error.exit(),
            Error::Expected { .. } | Error::Evidence { .. } | Error::NoPattern { .. } | Error::RecordPattern { .. } => {
                Exit::Data
            }
        }
    }
}

/// Why an answer has no reward. The answer then takes no part in its group; its reward is not 0.
#[expect(missing_docs, reason = "the fields are parts of the message, which says what they are")]
#[derive(Clone, Debug, Error, PartialEq)]
pub enum Missing {
    /// The data set gives none.
    #[error("the data set gives this answer no reward")]
    NotGiven,
    /// The record lacks what the reward needs.
    #[error("{words}")]
    Record { words: String },
    /// The program's run came to nothing.
    #[error("{fault}{}", stderr_words(.stderr))]
    Program {
        fault: ProgramFault,
        /// The last of what it wrote on standard error.
        stderr: String,
    },
    /// The service did not answer, after all attempts.
    #[error("{0}")]
    Service(endpoint::Error),
    /// The judge's reply holds no score, or more than one.
    #[error("the judge's reply {fault}: {said:?}")]
    Reply { fault: ReplyFault, said: String },
    /// The run was asked to stop.
    #[error("the run was asked to stop before the answer was scored")]
    Stopped,
    /// The weighted sum is beyond what a number holds.
    #[error("the weighted sum of its rewards is not finite: grpo.reward_fn has weights that are too large")]
    Sum,
}

impl Missing {
    /// One word for counting; docs/rewards.md explains it.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Missing::NotGiven => "not_given",
            Missing::Record { .. } => "record",
            Missing::Program { fault, .. } => fault.kind(),
            Missing::Service(error) => error.fault.kind(),
            Missing::Reply { fault, .. } => fault.kind(),
            Missing::Stopped => "stopped",
            Missing::Sum => "sum_not_finite",
        }
    }
}

/// What was wrong with a run of the program, or with its line for one answer.
#[expect(missing_docs, reason = "the fields are parts of the message, which says what they are")]
#[derive(Clone, Debug, Error, PartialEq)]
pub enum ProgramFault {
    /// The system could not start it this time.
    #[error("the program could not be run ({reason})")]
    Run { reason: String },
    /// It took too long, and was ended with everything that it had started.
    #[error("the program was ended after {seconds} s (reward.command_sec)")]
    TimeOut { seconds: u64 },
    /// It ended with a failure.
    #[error("the program failed ({status})")]
    Exit { status: String },
    /// It wrote too much, and was ended.
    #[error("the program wrote more than {bytes_max} bytes")]
    TooLong { bytes_max: u64 },
    /// It wrote another number of lines than there were answers.
    #[error("the program wrote {lines} lines for {answers} answers")]
    Lines { lines: usize, answers: usize },
    /// A line that is no reward.
    #[error("the program's line {line:?} is no number, null or {{\"reward\": …}}")]
    Line { line: String },
    /// A line that is no finite number.
    #[error("the program's reward {line:?} is not finite")]
    NotFinite { line: String },
    /// The program itself reports that it has no reward.
    #[error("the program gives no reward{}", .reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default())]
    None { reason: Option<String> },
}

impl ProgramFault {
    fn kind(&self) -> &'static str {
        match self {
            ProgramFault::Run { .. } => "program_run",
            ProgramFault::TimeOut { .. } => "program_time_out",
            ProgramFault::Exit { .. } => "program_exit",
            ProgramFault::TooLong { .. } => "program_too_long",
            ProgramFault::Lines { .. } => "program_lines",
            ProgramFault::Line { .. } => "program_line",
            ProgramFault::NotFinite { .. } => "program_not_finite",
            ProgramFault::None { .. } => "program_none",
        }
    }
}
