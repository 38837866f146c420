//! What could not be done with a file: an error that says which file, and what was tried.

use std::io;
use std::path::{Path, PathBuf};

/// A file or folder with which something could not be done.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot {action}: {source}", file.display())]
#[expect(missing_docs, reason = "the message says what each field means")]
pub struct FileError {
    pub file: PathBuf,
    pub action: &'static str,
    pub source: io::Error,
}

impl FileError {
    /// Adds file and action to an I/O error.
    pub fn at(file: &Path, action: &'static str) -> impl Fn(io::Error) -> FileError {
        move |source| FileError { file: file.to_owned(), action, source }
    }
}
