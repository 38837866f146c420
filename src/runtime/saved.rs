//! Writes a file as a whole: a reader sees all of it or none.

use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use tempfile::NamedTempFile;

/// Writes `bytes` to a file beside `file`, brings them to the disk, and renames the file. Makes the folder if there is none.
///
/// # Errors
/// When the file cannot be written; what was begun is removed. The error names the file that was being written.
pub fn save_whole(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", file.display()));
    let folder = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(named)?;
    let write = || {
        let mut partial = partial_in(folder, file)?;
        partial.write_all(bytes)?;
        partial.as_file().sync_all()?;
        partial.persist(file)?;
        File::open(folder)?.sync_all()
    };
    write().map_err(named)
}

/// A new file beside `file`, removed again unless it is renamed. Its rights are those of any new file.
///
/// # Errors
/// When the folder cannot be written.
pub fn partial_in(folder: &Path, file: &Path) -> io::Result<NamedTempFile> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let prefix = format!(".{}.", name.trim_start_matches('.'));
    // Rank numbers and process numbers repeat over machines; a random name does not.
    tempfile::Builder::new()
        .prefix(&prefix)
        .suffix(".partial")
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_a_failure_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("deep/state.json");
        save_whole(&file, b"one").unwrap();
        save_whole(&file, b"two").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"two");
        fs::create_dir(folder.path().join("deep/taken")).unwrap();
        fs::write(folder.path().join("deep/taken/file"), "x").unwrap();
        let error = save_whole(&folder.path().join("deep/taken"), b"three").unwrap_err();
        assert!(error.to_string().contains("deep/taken: "), "{error}");
        let left = fs::read_dir(folder.path().join("deep")).unwrap().count();
        assert_eq!(left, 2);
    }
}
