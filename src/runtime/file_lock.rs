//! Locks on files that end with the process, however the process ends. Some file systems have none.

use std::fs::{File, TryLockError};
use std::io;

use rustix::io::Errno;

/// What came of the request for a lock.
#[derive(Debug)]
pub enum Locked {
    /// This process holds the lock as long as the file is open.
    Held,
    /// Another process holds it.
    Busy,
    /// The file system has no locks, so nothing can be said of other processes.
    Unsupported(io::Error),
}

/// Requests the exclusive lock of an open file, and returns at once.
///
/// # Errors
/// When the system refuses for another reason than that it has no locks.
pub fn lock(file: &File) -> io::Result<Locked> {
    match file.try_lock() {
        Ok(()) => Ok(Locked::Held),
        Err(TryLockError::WouldBlock) => Ok(Locked::Busy),
        Err(TryLockError::Error(source)) if is_unsupported(&source) => Ok(Locked::Unsupported(source)),
        Err(TryLockError::Error(source)) => Err(source),
    }
}

/// What file systems without `flock` answer: Lustre clients without the option `flock`, NFS without a lock service, FUSE.
fn is_unsupported(error: &io::Error) -> bool {
    let unsupported = [Errno::NOSYS, Errno::OPNOTSUPP, Errno::NOLCK];
    unsupported.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_holder_is_busy_until_the_first_file_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let open = || File::create(folder.path().join("lock")).unwrap();
        let (first, second) = (open(), open());
        assert!(matches!(lock(&first), Ok(Locked::Held)));
        assert!(matches!(lock(&second), Ok(Locked::Busy)));
        drop(first);
        assert!(matches!(lock(&second), Ok(Locked::Held)));
    }

    #[test]
    fn three_errors_say_that_there_are_no_locks_and_others_do_not() {
        for errno in [Errno::NOSYS, Errno::OPNOTSUPP, Errno::NOLCK] {
            assert!(is_unsupported(&io::Error::from(errno)), "{errno:?}");
        }
        assert!(!is_unsupported(&io::Error::from(Errno::IO)) && !is_unsupported(&io::Error::other("no number")));
    }
}
