//! Why there is no summary or diagnosis of a run.

use std::io;
use std::path::{Path, PathBuf};

use crate::runtime::failure::{Classified, Exit};

/// Reported as one line each; none ends a run.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each variant and field means")]
pub enum Error {
    #[error("{}: cannot {action}: {source}", file.display())]
    Io { file: PathBuf, action: &'static str, source: io::Error },
    #[error("only {seconds:.1} s are left, too little for a request")]
    NoTime { seconds: f64 },
    #[error("the model's reply is empty")]
    Empty,
    #[error(
        "{} holds no answer with a reward: only runs that sample answers (rollout.sample = true) have such answers",
        file.display()
    )]
    NoAnswers { file: PathBuf },
}

impl Error {
    /// Adds file and action to an I/O error.
    pub(super) fn io(file: &Path, action: &'static str) -> impl Fn(io::Error) -> Error {
        move |source| Error::Io { file: file.to_owned(), action, source }
    }
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Io { .. } | Error::NoAnswers { .. } => Exit::Data,
            Error::NoTime { .. } | Error::Empty => Exit::Endpoint,
        }
    }
}
