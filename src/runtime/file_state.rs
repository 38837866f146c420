//! What a file is at one moment, to know later whether the file is still the same.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Length, times and inode of a file. A copy has another inode, and any change moves the time of the last change.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FileState {
    /// Name within its folder.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
    /// Time of the last write, nanoseconds since 1970.
    pub written_ns: i64,
    /// Time at which content, name or rights last changed, nanoseconds since 1970.
    pub changed_ns: i64,
    /// Number of the file within its file system.
    pub inode: u64,
}

impl FileState {
    /// The state of `file` now.
    ///
    /// # Errors
    /// When the file cannot be asked.
    pub fn of(file: &Path) -> io::Result<FileState> {
        let about = fs::metadata(file)?;
        let ns = |seconds: i64, rest: i64| seconds.saturating_mul(1_000_000_000).saturating_add(rest);
        Ok(FileState {
            name: file.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            bytes: about.len(),
            written_ns: ns(about.mtime(), about.mtime_nsec()),
            changed_ns: ns(about.ctime(), about.ctime_nsec()),
            inode: about.ino(),
        })
    }
}
