//! What becomes of the last completed update when a run fails.
//!
//! 1. All ranks have agreed to fail: rank 0 saves, and the others wait for it as they leave.
//! 2. One rank fails or panics alone, and the others wait for it in a collective: that rank saves, before it ends the job.
//!
//! Nothing here is a collective, and all of it has a bound in time. What was saved before is never replaced.

use std::time::Duration;

use super::checkpoints::Checkpoints;
use super::trainer::Trainer;
use crate::report::say;
use crate::runtime::failure::{Exit, Failure};
use crate::runtime::units::Rank;
use crate::world::World;

/// The longest time that a save may take while a failed rank keeps the others waiting; less where `run.stall_sec` is less, since
/// the watchdog would end it.
const SAVE_MAX: Duration = Duration::from_mins(2);

impl Trainer {
    /// Runs `work`. If it fails or panics, the state of the last completed update is saved before the run ends.
    pub(super) fn or_save<T>(
        &mut self,
        world: &World,
        work: impl FnOnce(&mut Trainer) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        match world.catch_panic(|| work(self)) {
            Ok(done) => done.inspect_err(|failure| self.keep_what_was_learnt(failure, world.all_leave(), world)),
            Err(panicked) => {
                let failure = Failure::from(panicked);
                self.keep_what_was_learnt(&failure, false, world);
                world.abort_after_panic(&failure)
            }
        }
    }

    /// Saves the state of the last completed update if the checkpoints lack it. `all_leave`: whether all ranks have failed alike.
    fn keep_what_was_learnt(&self, failure: &Failure, all_leave: bool, world: &World) {
        let updates = self.totals.updates;
        // Where ranks differ, nobody knows whose state is right.
        let worth = self.options.keeps_progress && failure.exit() != Exit::Disagree && self.checkpoints.lack(updates);
        let first = world.all.rank() == Rank(0);
        if !worth || (all_leave && !first) {
            return;
        }
        if u64::from(self.session.policy.optimizer.steps()) != updates {
            tell(&format!("update {} failed after it had changed the adapters, so nothing is saved", updates + 1));
            return;
        }
        if !first && !self.folder.is_visible() {
            let rank = world.all.rank();
            tell(&format!(
                "rank {rank} saves nothing after update {updates}: rank 0's run directory is not on its machine"
            ));
            return;
        }
        let save = || {
            let run_dir = if first { &self.folder.dir } else { &self.folder.root_dir };
            let (session, reporter) = (&self.session, &self.reporter);
            Checkpoints::save_alone(run_dir, session, world, reporter, &self.evaluated, &self.completed)
        };
        let limit = match self.session.loaded.rank.stall_sec {
            // The limits that are computed are minutes more.
            0 => SAVE_MAX,
            stall_sec => SAVE_MAX.min(Duration::from_secs(stall_sec) * 3 / 4),
        };
        // The watchdog counts from here. The site stays that of the failure, which the message names.
        world.tracker().report_alive();
        match world.last_work(failure, limit, save) {
            Some(Ok(())) => tell(&format!(
                "saved after update {updates}; once the cause is gone, go on with `longstraw train --resume` in the same way"
            )),
            Some(Err(another)) => tell(&format!("update {updates} could not be saved: {another}")),
            None => {}
        }
    }
}

/// Prints a line from whichever rank this is.
fn tell(line: &str) {
    tracing::info!("{line}");
    say(line);
}
