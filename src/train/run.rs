//! A run before its loop and after it.

use std::fs;

use serde_json::Value;

use super::checkpoints::{Checkpoints, Start};
use super::inputs::Work;
use super::open::Prepared;
use super::run_folder::{Begin, RunFolder};
use super::session::Session;
use super::stop_files::StopFiles;
use crate::config::Loaded;
use crate::report::{Receipt, Reporter};
use crate::runtime::failure::Failure;
use crate::world::World;

/// Where a run begins and ends.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunOptions {
    /// What an earlier run in the same directory means.
    pub begin: Begin,
    /// Stops after this update, as if a stop were requested.
    pub stop_after: Option<u64>,
    /// Saves at the end, at a stop and after a failure, and moves an earlier run aside. `false` for a measurement, whose
    /// adapters are worth nothing.
    pub keeps_progress: bool,
}

/// A run that is open, before its first update.
#[expect(missing_docs, reason = "the names and types say everything")]
pub struct Run {
    pub session: Session,
    pub(super) folder: RunFolder,
    pub(super) checkpoints: Checkpoints,
    pub(super) stop_files: StopFiles,
    pub(super) options: RunOptions,
    pub(super) start: Start,
}

/// A run that has ended well and whose receipt is still to be written: a gate judges it first.
#[expect(missing_docs, reason = "the names and types say everything")]
pub struct Finished {
    pub receipt: Receipt,
    pub session: Session,
    pub(super) reporter: Reporter,
    pub folder: RunFolder,
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
    /// Opens everything that the run needs: first what is quick to check, then the run directory's lock and the choice of a
    /// checkpoint, then model and data.
    ///
    /// # Errors
    /// When another run holds the directory, its checkpoints refuse this run, something cannot be loaded, or does not fit.
    pub fn open(loaded: &Loaded, options: RunOptions, world: &mut World) -> Result<Run, Failure> {
        let prepared = Prepared::new(loaded, options.begin, world)?;
        let folder = RunFolder::take(&loaded.rank.dir, world)?;
        Run::load(folder, prepared, options, world)
    }

    /// [`Run::open`] in a directory that this job has locked.
    ///
    /// # Errors
    /// As [`Run::open`], but for the lock.
    pub fn open_in(folder: RunFolder, loaded: &Loaded, options: RunOptions, world: &mut World) -> Result<Run, Failure> {
        let prepared = Prepared::new(loaded, options.begin, world)?;
        Run::load(folder, prepared, options, world)
    }

    fn load(folder: RunFolder, prepared: Prepared, options: RunOptions, world: &mut World) -> Result<Run, Failure> {
        let loaded = &prepared.loaded;
        let mut checkpoints = Checkpoints::open(&folder, &loaded.run, options.begin, world)?;
        let stop_files = StopFiles::open(&loaded.rank.dir, world)?;
        let mut session = Session::load(prepared, world, Work::Train)?;
        let start = match options.begin {
            Begin::Resume => checkpoints.resume(&mut session, world)?,
            Begin::New | Begin::Anew => Start::default(),
        };
        Ok(Run { session, folder, checkpoints, stop_files, options, start })
    }

    /// The receipt of an earlier start that has made every update of this run and ended with the adapters of the checkpoint;
    /// the same on every rank. There is nothing left to do then.
    ///
    /// # Errors
    /// When ranks cannot agree.
    pub fn finished_before(&self, world: &World) -> Result<Option<Value>, Failure> {
        let steps = self.session.config().run.steps;
        if !self.start.resumed || self.start.updates < steps {
            return Ok(None);
        }
        let adapters = self.session.policy.digest(world);
        world.from_root(|| {
            // A receipt that cannot be read is written again: the evaluation after the last update is all that is left.
            let text = fs::read(self.folder.dir.join("receipt.json")).unwrap_or_default();
            let receipt = serde_json::from_slice::<Value>(&text).ok();
            let of_this_run = |receipt: &Value| {
                receipt["passed"] == true && receipt["steps"] == steps && receipt["adapter_digest"][0] == adapters
            };
            Ok(receipt.filter(of_this_run))
        })
    }

    /// What a user should know where [`Run::finished_before`] has found a receipt.
    #[must_use]
    pub fn finished_words(&self) -> String {
        let dir = self.folder.dir.display();
        let steps = self.session.config().run.steps;
        format!(
            "this run is finished: update {steps} of {steps} was its last, and {dir}/receipt.json and {dir}/adapter are what came \
             out; nothing is done. A higher run.steps goes on from here, `longstraw train --anew` begins anew"
        )
    }
}
