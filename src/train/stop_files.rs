//! Files of a run directory that request a stop, or another start.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::checkpoint;
use crate::runtime::failure::Failure;
use crate::world::{World, stop_requested};

/// How a run has ended, as far as another start depends on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    /// Before its last update.
    pub(super) stopped: bool,
    /// Whether this start has made an update.
    pub(super) progress: bool,
}

#[derive(Debug)]
pub(super) struct StopFiles {
    /// A user's request to stop.
    stop: PathBuf,
    /// Tells a batch system that a signal stopped the run before its end, so that it wants another start.
    requeue: PathBuf,
    /// Left by a start that a signal stopped before its first update.
    without_progress: PathBuf,
}

impl StopFiles {
    /// Removes an earlier start's request for another.
    pub(super) fn open(run_dir: &Path, world: &World) -> Result<StopFiles, Failure> {
        let file = |name: &str| run_dir.join(name);
        let files =
            StopFiles { stop: file("stop"), requeue: file("requeue"), without_progress: file("without_progress") };
        remove(&files.requeue, world)?;
        Ok(files)
    }

    /// Whether a stop is requested on any rank, by a signal or by the file; the same on every rank.
    pub(super) fn stop_requested(&self, world: &World) -> bool {
        world.any(stop_requested() || self.stop.exists())
    }

    /// Ends the requests of this run, and requests another start where a signal stopped the run before its end. A file that
    /// requested the stop requests no start. Nor does the second start in a row without progress: it would go on like that;
    /// a note for the user says so.
    pub(super) fn close(&self, world: &World, ended: Ended) -> Result<Option<&'static str>, Failure> {
        let Ended { stopped, progress } = ended;
        remove(&self.stop, world)?;
        let again = world.any(self.without_progress.exists());
        if progress || !stopped {
            remove(&self.without_progress, world)?;
        }
        if !(world.any(stop_requested()) && stopped) {
            return Ok(None);
        }
        if !progress {
            write(&self.without_progress, "stopped by a signal before an update was done\n", world)?;
        }
        if again && !progress {
            return Ok(Some(
                "this is the second start in a row that was stopped before an update was done, so it requests no other \
                 start: an update takes longer than the time limit leaves",
            ));
        }
        write(&self.requeue, "stopped by a signal before its end; `longstraw train --resume` goes on\n", world)?;
        Ok(None)
    }
}

/// Rank 0 writes a file.
fn write(file: &Path, words: &str, world: &World) -> Result<(), Failure> {
    let write = || fs::write(file, words).map_err(|source| cannot_write(file, source));
    world.on_root(write).map(drop)
}

/// Rank 0 removes a file, if it is there.
fn remove(file: &Path, world: &World) -> Result<(), Failure> {
    let remove = || match fs::remove_file(file) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(cannot_write(file, source)),
        _ => Ok(()),
    };
    world.on_root(remove).map(drop)
}

fn cannot_write(file: &Path, source: io::Error) -> Failure {
    checkpoint::Error::Write { file: file.to_owned(), source }.into()
}
