//! Why nothing is said about a run.

use std::io;
use std::path::PathBuf;

use crate::runtime::failure::{Classified, Exit};

/// Each is told in one line; none ends a run.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each variant and field means")]
pub enum Error {
    #[error("{}: cannot {action}: {source}", file.display())]
    Io { file: PathBuf, action: &'static str, source: io::Error },
    #[error("only {seconds:.1} s are left, too little to ask")]
    NoTime { seconds: f64 },
    #[error("the model's reply is empty")]
    Empty,
    #[error(
        "{} holds no answer with a reward: only runs that sample answers (rollout.sample = true) have some to look at",
        file.display()
    )]
    NoAnswers { file: PathBuf },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Io { .. } | Error::NoAnswers { .. } => Exit::Data,
            Error::NoTime { .. } | Error::Empty => Exit::Endpoint,
        }
    }
}
