//! The lock of a run directory: one run at a time writes there.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use super::error::Error;
use crate::runtime::file_lock::{Locked, lock};

/// The file that is locked. It stays when the run has ended; only the lock says whether a run goes on.
const FILE: &str = ".lock";

/// The lock of a run directory. It ends with this value, or with the process.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
    /// Why the file system gave no lock.
    unsupported: Option<io::Error>,
}

impl RunLock {
    /// Takes the lock of `folder`, and makes the folder where it is absent. `job` is the number of this job, which
    /// [`RunLock::is_of_job`] compares.
    ///
    /// # Errors
    /// When another run holds the lock, or the folder cannot be written.
    pub fn take(folder: &Path, job: u64) -> Result<RunLock, Error> {
        let file = folder.join(FILE);
        let write = |source| Error::Write { file: file.clone(), source };
        fs::create_dir_all(folder).map_err(|source| Error::Write { file: folder.into(), source })?;
        let opened = OpenOptions::new().create(true).read(true).write(true).truncate(false).open(&file);
        let mut opened = opened.map_err(write)?;
        let unsupported = match lock(&opened).map_err(write)? {
            Locked::Held => None,
            Locked::Unsupported(error) => Some(error),
            Locked::Busy => {
                let holder = fs::read_to_string(&file).unwrap_or_default().trim().replace('\n', ", ");
                return Err(Error::Busy { folder: folder.into(), holder });
            }
        };
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let words = format!("job {job}\nhost {host}\nprocess {}\n", std::process::id());
        let written = opened.set_len(0).and_then(|()| opened.seek(SeekFrom::Start(0)));
        written.and_then(|_| opened.write_all(words.as_bytes())).map_err(write)?;
        Ok(RunLock { _file: opened, unsupported })
    }

    /// A sentence for the user where the file system has no locks.
    #[must_use]
    pub fn warning(&self, folder: &Path) -> Option<String> {
        self.unsupported.as_ref().map(|error| no_locks(folder, error))
    }

    /// Whether `folder` is the run directory of the job with this number, as this machine sees it.
    #[must_use]
    pub fn is_of_job(folder: &Path, job: u64) -> bool {
        let found = fs::read_to_string(folder.join(FILE)).unwrap_or_default();
        found.lines().next() == Some(&format!("job {job}"))
    }
}

/// What it means for a run directory that its file system has no locks.
#[must_use]
pub fn no_locks(folder: &Path, error: &io::Error) -> String {
    format!(
        "the file system of {} has no file locks ({error}): a second run in the same folder would not be noticed, so start \
         only one",
        folder.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_run_is_told_who_holds_the_folder_and_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let first = RunLock::take(&run, 7).unwrap();
        assert!(first.warning(&run).is_none() && RunLock::is_of_job(&run, 7) && !RunLock::is_of_job(&run, 8));
        let refused = RunLock::take(&run, 8).unwrap_err().to_string();
        let holder = format!("process {}", std::process::id());
        assert!(refused.contains("another run is writing to") && refused.contains(&holder), "{refused}");
        assert!(RunLock::is_of_job(&run, 7));
        drop(first);
        drop(RunLock::take(&run, 9).unwrap());
        assert!(RunLock::is_of_job(&run, 9) && !RunLock::is_of_job(folder.path(), 9));
    }
}
