//! Why nothing is said about a run.

use std::io;
use std::path::PathBuf;

use crate::runtime::failure::{Classified, Exit};

/// Each is told in one line; none ends a run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The process is ended before an answer could come.
    #[error("only {seconds:.1} s are left, too little to ask")]
    NoTime {
        /// Seconds until the end.
        seconds: f64,
    },
    /// A reply without text.
    #[error("the model's reply is empty")]
    Empty,
    /// Nothing to look at.
    #[error(
        "{} holds no answer with a reward: only runs that sample answers (rollout.sample = true) have some to look at",
        file.display()
    )]
    NoAnswers {
        /// Where answers would stand.
        file: PathBuf,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Io { .. } | Error::NoAnswers { .. } => Exit::Data,
            Error::NoTime { .. } | Error::Empty => Exit::Endpoint,
        }
    }
}
