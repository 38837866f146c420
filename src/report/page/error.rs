//! Why there is no page.

use std::io;
use std::path::PathBuf;

use crate::runtime::failure::{Classified, Exit};

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its variant and its fields are")]
pub enum Error {
    #[error(
        "{} is no run directory: it has no metrics.jsonl, receipt.json, config.resolved.toml or logs, and no gate's \
         receipt; name the folder that run.dir (--run-dir) named, or one of gates, such as runs/gates",
        folder.display()
    )]
    NoRun { folder: PathBuf },
    #[error("cannot read {}: {source}", file.display())]
    Read { file: PathBuf, source: io::Error },
    #[error("cannot write {}: {source}; choose another place with --out", file.display())]
    Write { file: PathBuf, source: io::Error },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        Exit::Data
    }
}
