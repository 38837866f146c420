//! What can be wrong with rewards: before the first answer, which ends a run, and with one answer, which then has none.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::verdict::Unread;
use crate::config::RewardName;
use crate::endpoint;
use crate::runtime::failure::{Classified, Exit};

/// Why answers cannot be scored as the configuration says.
#[derive(Debug, Error)]
pub enum Error {
    /// The configuration's pattern is none.
    #[error("reward.pattern = {pattern:?} is no pattern: {reason}; correct it (docs.rs/regex has the syntax)")]
    Pattern {
        /// As it is written.
        pattern: String,
        /// What the compiler of patterns says.
        reason: String,
    },
    /// The rubric cannot be read.
    #[error("reward.rubric: {file}: {source}; name a file of text, or leave the key out for the general rubric")]
    Rubric {
        /// The file.
        file: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The rubric is no text of a length that goes along with every answer.
    #[error(
        "reward.rubric: {file}: has {bytes} bytes, and should have from 1 to {bytes_max}: it goes along with every answer"
    )]
    RubricLength {
        /// The file.
        file: PathBuf,
        /// Bytes of its text, without blanks around it.
        bytes: u64,
        /// The most there may be.
        bytes_max: u64,
    },
    /// The program cannot be started.
    #[error("reward.command: cannot start {program}: {source}; name a program that this machine has and may run")]
    Program {
        /// As it is written.
        program: String,
        /// The system's reason.
        source: io::Error,
    },
    /// A record lacks what it expects, or it is of a kind that is not compared.
    #[error(
        "record {record}: its reward_data.expected {found}, and the reward {} compares with it: give a text that is not \
         blank, a number, true or false, or a list of texts",
        .reward.word()
    )]
    Expected {
        /// The record's name.
        record: String,
        /// What needs it.
        reward: RewardName,
        /// What stands there.
        found: &'static str,
    },
    /// There is no pattern for a record.
    #[error(
        "record {record}: has no reward_data.pattern, and reward.pattern is not set: the reward regex needs one of them"
    )]
    NoPattern {
        /// The record's name.
        record: String,
    },
    /// A record's pattern is none.
    #[error(
        "record {record}: its reward_data.pattern {pattern} is no pattern: {reason}; correct it (docs.rs/regex has the syntax)"
    )]
    RecordPattern {
        /// The record's name.
        record: String,
        /// As it is written.
        pattern: String,
        /// What the compiler of patterns says.
        reason: String,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Pattern { .. } | Error::Rubric { .. } | Error::RubricLength { .. } | Error::Program { .. } => {
                Exit::Config
            }
            Error::Expected { .. } | Error::NoPattern { .. } | Error::RecordPattern { .. } => Exit::Data,
        }
    }
}

/// Why an answer has no reward. It is not 0 then: the answer takes no part in its group.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum Missing {
    /// The data set gives none.
    #[error("the data set gives this answer no reward")]
    NotGiven,
    /// The record lacks what the reward needs.
    #[error("{words}")]
    Record {
        /// The words of what is wrong with it.
        words: String,
    },
    /// The program's run came to nothing.
    #[error("{fault}{}", behind(.stderr))]
    Program {
        /// What was wrong with it.
        fault: ProgramFault,
        /// The last of what it wrote on standard error.
        stderr: String,
    },
    /// The service did not answer, after all attempts.
    #[error("{0}")]
    Service(endpoint::Error),
    /// The judge's reply holds no score, or more than one.
    #[error("the judge's reply {unread}: {said:?}")]
    Reply {
        /// What was wrong with it.
        unread: Unread,
        /// How it begins.
        said: String,
    },
    /// The run was asked to stop.
    #[error("the run was asked to stop before the answer was scored")]
    Stopped,
    /// The weighted sum is beyond what a number holds.
    #[error("the weighted sum of its rewards is not finite: grpo.reward_fn has weights that are too large")]
    Sum,
}

impl Missing {
    /// One word for counting. Each stands in docs/rewards.md.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Missing::NotGiven => "not_given",
            Missing::Record { .. } => "record",
            Missing::Program { fault, .. } => fault.kind(),
            Missing::Service(error) => error.fault.kind(),
            Missing::Reply { unread, .. } => unread.kind(),
            Missing::Stopped => "stopped",
            Missing::Sum => "sum_not_finite",
        }
    }
}

/// What a program wrote, behind its fault.
fn behind(stderr: &str) -> String {
    if stderr.is_empty() { String::new() } else { format!("; it said: {stderr}") }
}

/// What was wrong with a program's run, or with its line for one answer.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum ProgramFault {
    /// The system could not run it this time.
    #[error("the program could not be run ({reason})")]
    Run {
        /// The system's reason.
        reason: String,
    },
    /// It took too long, and was ended with all that it had started.
    #[error("the program was ended after {seconds} s (reward.command_sec)")]
    TimeOut {
        /// Seconds that it may take.
        seconds: u64,
    },
    /// It said that it failed.
    #[error("the program failed ({status})")]
    Exit {
        /// Its exit status or signal, in words.
        status: String,
    },
    /// It wrote without end, and was ended.
    #[error("the program wrote more than {bytes_max} bytes")]
    TooLong {
        /// The most that is read.
        bytes_max: u64,
    },
    /// Which line belongs to which answer is not known.
    #[error("the program wrote {lines} lines for {answers} answers")]
    Lines {
        /// Lines that came.
        lines: usize,
        /// Lines that should have come.
        answers: usize,
    },
    /// A line is no reward.
    #[error("the program's line {line:?} is no number, null or {{\"reward\": …}}")]
    Line {
        /// How it begins.
        line: String,
    },
    /// A line is no finite number.
    #[error("the program's reward {line:?} is not finite")]
    NotFinite {
        /// How it begins.
        line: String,
    },
    /// The program itself says that it has none.
    #[error("the program gives no reward{}", .reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default())]
    None {
        /// Its reason.
        reason: Option<String>,
    },
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
