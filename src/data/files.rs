//! The files of a folder.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::Error;

/// Levels of folders below the given one.
const DEPTH_MAX: usize = 16;

/// What to do with names that start with a dot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "the names say what each variant does")]
pub enum Hidden {
    Include,
    Skip,
}

/// Adds all plain files under `folder` to `files`, until there are `files_max`. Does not follow links, so that no file comes
/// twice.
///
/// # Errors
/// When a folder cannot be listed (exit 3).
pub fn list_files(folder: &Path, hidden: Hidden, files_max: usize, files: &mut Vec<PathBuf>) -> Result<(), Error> {
    list(folder, hidden, files_max, DEPTH_MAX, files)
}

fn list(folder: &Path, hidden: Hidden, files_max: usize, depth: usize, files: &mut Vec<PathBuf>) -> Result<(), Error> {
    let failed = Error::io(folder, "list it");
    for entry in fs::read_dir(folder).map_err(&failed)? {
        let entry = entry.map_err(&failed)?;
        let kind = entry.file_type().map_err(&failed)?;
        if files.len() >= files_max {
            break;
        }
        if hidden == Hidden::Skip && entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        if kind.is_file() {
            files.push(entry.path());
        } else if kind.is_dir() && depth > 0 {
            list(&entry.path(), hidden, files_max, depth - 1, files)?;
        }
    }
    Ok(())
}
