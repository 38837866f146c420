//! A folder that appears whole or not at all.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use tempfile::TempDir;

use super::error::Error;

/// The file by which a folder is known as an earlier conversion.
pub(super) const MARK: &str = "conversion.json";

/// A folder under construction beside its destination; dropped unfinished, it leaves nothing.
#[derive(Debug)]
pub(super) struct Folder {
    destination: PathBuf,
    force: bool,
    room: TempDir,
}

impl Folder {
    /// Opens a folder beside `destination`, which must be free, an earlier conversion, or given up by `force`.
    pub(super) fn beside(destination: &Path, force: bool) -> Result<Folder, Error> {
        may_replace(destination, force)?;
        let parent = match destination.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let io = |action| move |source| Error::Io { file: parent.to_owned(), action, source };
        fs::create_dir_all(parent).map_err(io("make the folder"))?;
        let room = tempfile::Builder::new()
            .prefix(".convert-")
            .tempdir_in(parent)
            .map_err(io("make a temporary folder in it"))?;
        let folder = Folder { destination: destination.to_owned(), force, room };
        fs::create_dir(folder.path()).map_err(io("make a temporary folder in it"))?;
        Ok(folder)
    }

    /// Where files go until [`Folder::put`].
    pub(super) fn path(&self) -> PathBuf {
        self.room.path().join("new")
    }

    /// Writes one JSON file, indented except for tokenizer.json's size.
    pub(super) fn write(&self, name: &str, json: &Json) -> Result<(), Error> {
        let file = self.path().join(name);
        let text = if name == "tokenizer.json" { json.to_string() } else { format!("{json:#}\n") };
        fs::write(&file, text).map_err(|source| Error::Io { file, action: "write it", source })
    }

    /// Puts the folder in its place; what stood there is deleted afterwards.
    pub(super) fn put(self) -> Result<(), Error> {
        let target = self.destination.as_path();
        let io = |action| move |source| Error::Io { file: target.to_owned(), action, source };
        may_replace(target, self.force)?;
        let old = self.room.path().join("old");
        let replaces = target.symlink_metadata().is_ok();
        if replaces {
            fs::rename(target, &old).map_err(io("move the earlier folder aside"))?;
        }
        if let Err(cause) = fs::rename(self.path(), target) {
            if replaces {
                fs::rename(&old, target).map_err(io("move the earlier folder back"))?;
            }
            return Err(io("put the new folder in place")(cause));
        }
        Ok(())
    }
}

/// Whether `destination` is free, or may be replaced.
fn may_replace(destination: &Path, force: bool) -> Result<(), Error> {
    let taken = destination.symlink_metadata().is_ok();
    if taken && !force && !destination.join(MARK).is_file() {
        return Err(Error::Exists { destination: destination.to_owned() });
    }
    Ok(())
}
