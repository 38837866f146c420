//! Why there is no summary or diagnosis of a run.

use std::path::PathBuf;

use crate::runtime::failure::{Classified, Exit};
use crate::runtime::file_error::FileError;

/// Reported as one line each; none ends a run.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each variant and field means")]
pub enum Error {
    #[error(transparent)]
    File(#[from] FileError),
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

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::File(_) | Error::NoAnswers { .. } => Exit::Data,
            Error::NoTime { .. } | Error::Empty => Exit::Endpoint,
        }
    }
}
