//! Why a run cannot be reported.

use std::path::PathBuf;

use crate::runtime::failure::{Classified, Exit};

/// Why a run cannot be reported.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its variant and its fields are")]
pub enum Error {
    #[error("another run is writing to {} ({holder}); choose another place with --run-dir", folder.display())]
    Busy { folder: PathBuf, holder: String },
    #[error("cannot write {}: {source}; choose another place with --run-dir", file.display())]
    Write { file: PathBuf, source: std::io::Error },
    #[error("cannot read {}: {source}; choose another place with --out", file.display())]
    Read { file: PathBuf, source: std::io::Error },
    #[error(
        "the logs' filter \"{filter}\" is none: {reason}; set LONGSTRAW_LOG to error, warn, info, debug or trace, or to \
         module=level,…"
    )]
    Filter { filter: String, reason: String },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Write { .. } | Error::Read { .. } => Exit::Data,
            Error::Busy { .. } | Error::Filter { .. } => Exit::Config,
        }
    }
}
