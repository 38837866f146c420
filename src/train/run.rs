//! A run before its loop and after it.

use super::checkpoints::Checkpoints;
use super::session::Session;
use super::stop_files::StopFiles;
use crate::config::Loaded;
use crate::report::{Receipt, Reporter};
use crate::runtime::failure::Failure;
use crate::world::World;

/// Where a run begins and ends.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunOptions {
    /// Goes on from the newest checkpoint.
    pub resume: bool,
    /// Stops after this update, as if a stop were requested.
    pub stop_after: Option<u64>,
}

/// A run that is open, before its first update.
#[expect(missing_docs, reason = "the names and types say everything")]
pub struct Run {
    pub session: Session,
    pub(super) checkpoints: Checkpoints,
    pub(super) stop_files: StopFiles,
    pub(super) options: RunOptions,
}

/// A run that has ended well and whose receipt is still to be written: a gate judges it first.
#[expect(missing_docs, reason = "the names and types say everything")]
pub struct Finished {
    pub receipt: Receipt,
    pub session: Session,
    pub(super) reporter: Reporter,
}

impl Finished {
    /// Writes the receipt as it is now, and prints its table; all ranks agree that it is written.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&mut self, world: &World) -> Result<(), Failure> {
        world.on_root(|| Ok(self.reporter.receipt(&self.receipt)?))?;
        self.reporter.table(&self.receipt);
        Ok(())
    }
}

impl Run {
    /// Opens everything that the run needs.
    ///
    /// # Errors
    /// When something cannot be loaded, or does not fit.
    pub fn open(loaded: &Loaded, options: RunOptions, world: &mut World) -> Result<Run, Failure> {
        let checkpoints = Checkpoints::open(loaded, options.resume, world)?;
        let stop_files = StopFiles::open(&loaded.rank.dir, world)?;
        Ok(Run { session: Session::open(loaded, world)?, checkpoints, stop_files, options })
    }
}
