//! The run directory before a run: its lock, and what an earlier run in it means.

use std::path::{Path, PathBuf};

use crate::report::{RunLock, finish_set_aside};
use crate::runtime::failure::Failure;
use crate::world::World;

/// Where a run begins if its directory holds checkpoints of an earlier run.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Begin {
    /// Nowhere: it is refused.
    #[default]
    New,
    /// At the newest checkpoint.
    Resume,
    /// At its beginning, after everything of the earlier run was moved aside.
    Anew,
}

/// The run directory, locked by this run on rank 0.
#[derive(Debug)]
pub struct RunFolder {
    /// This rank's path of it.
    pub(super) dir: PathBuf,
    /// Rank 0's path of it, absolute.
    pub(super) root_dir: PathBuf,
    /// Number of this job, which stands in the lock.
    pub(super) job: u64,
    _lock: Option<RunLock>,
}

impl RunFolder {
    /// Locks rank 0's `dir` before anything in it is touched, and makes it where it is absent. A move of an
    /// earlier run that was interrupted is finished, with a line. Every rank takes part. A file system without locks is a
    /// warning.
    ///
    /// # Errors
    /// When another run holds the lock, or the directory cannot be written.
    pub fn take(dir: &Path, world: &World) -> Result<RunFolder, Failure> {
        let job = world.job_number();
        let taken = world.on_root(|| {
            let lock = RunLock::take(dir, job)?;
            Ok((lock, finish_set_aside(dir)?))
        })?;
        let (lock, finished) = taken.unzip();
        if let Some(place) = finished.flatten() {
            let (dir, place) = (dir.display(), place.display());
            world.warn_user(&format!(
                "a start that began anew in {dir} was interrupted; the rest of what an earlier run left is now in {place}, too"
            ));
        }
        if let Some(warning) = lock.as_ref().and_then(|lock| lock.warning(dir)) {
            world.warn_user(&warning);
        }
        Ok(RunFolder { dir: dir.to_owned(), root_dir: world.path_of_rank_0(dir), job, _lock: lock })
    }

    /// Whether rank 0's run directory lies at the same path on this rank's machine.
    pub(super) fn is_visible(&self) -> bool {
        RunLock::is_of_job(&self.root_dir, self.job)
    }
}
