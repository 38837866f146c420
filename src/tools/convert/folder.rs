//! A folder that appears whole or not at all.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use tempfile::TempDir;

use super::error::Error;
use crate::runtime::file_error::FileError;

/// The file that marks a folder as a conversion.
pub(super) const MARK: &str = "conversion.json";

/// A folder under construction next to its destination; removed on drop unless it was published.
#[derive(Debug)]
pub(super) struct Folder {
    destination: PathBuf,
    force: bool,
    temporary: TempDir,
}

impl Folder {
    /// Creates a folder next to `destination`, which must be absent, an earlier conversion, or overwritten by `force`.
    pub(super) fn beside(destination: &Path, force: bool) -> Result<Folder, Error> {
        check_replaceable(destination, force)?;
        let parent = match destination.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        fs::create_dir_all(parent).map_err(FileError::at(parent, "create the folder"))?;
        let failed = FileError::at(parent, "create a temporary folder in it");
        let temporary = tempfile::Builder::new().prefix(".convert-").tempdir_in(parent).map_err(&failed)?;
        let folder = Folder { destination: destination.to_owned(), force, temporary };
        fs::create_dir(folder.path()).map_err(&failed)?;
        Ok(folder)
    }

    /// Holds the files until [`Folder::publish`].
    pub(super) fn path(&self) -> PathBuf {
        self.temporary.path().join("new")
    }

    /// Writes one JSON file, indented unless it is tokenizer.json, which is large.
    pub(super) fn write(&self, name: &str, json: &Json) -> Result<(), Error> {
        let file = self.path().join(name);
        let text = if name == "tokenizer.json" { json.to_string() } else { format!("{json:#}\n") };
        Ok(fs::write(&file, text).map_err(FileError::at(&file, "write it"))?)
    }

    /// Renames the folder to its destination; deletes an earlier folder afterwards.
    pub(super) fn publish(self) -> Result<(), Error> {
        let target = self.destination.as_path();
        let io = |action| FileError::at(target, action);
        check_replaceable(target, self.force)?;
        let old = self.temporary.path().join("old");
        let replaces = target.symlink_metadata().is_ok();
        if replaces {
            fs::rename(target, &old).map_err(io("move the earlier folder aside"))?;
        }
        if let Err(cause) = fs::rename(self.path(), target) {
            if replaces {
                fs::rename(&old, target).map_err(io("move the earlier folder back"))?;
            }
            return Err(io("rename the new folder to it")(cause).into());
        }
        Ok(())
    }
}

fn check_replaceable(destination: &Path, force: bool) -> Result<(), Error> {
    let taken = destination.symlink_metadata().is_ok();
    if taken && !force && !destination.join(MARK).is_file() {
        return Err(Error::Exists { destination: destination.to_owned() });
    }
    Ok(())
}
