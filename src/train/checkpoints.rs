//! When a run is saved, and where it goes on.
//!
//! An update takes its groups from the cursor when it begins, and the cursor is saved when an update has ended. So a prompt
//! that was captured and not trained on when the run was interrupted runs again, once.

use serde::{Deserialize, Serialize};

use super::round_state;
use super::session::Session;
use super::stop_policy::StopPolicy;
use crate::checkpoint::{self, State, Store};
use crate::config::Loaded;
use crate::report::{HeldOut, Reporter};
use crate::runtime::failure::{Failure, Phase};
use crate::world::World;

/// The checkpoints of a run.
#[derive(Debug)]
pub(super) struct Checkpoints {
    store: Store,
    /// Updates after which the run's present state was saved, if it was.
    saved: Option<u64>,
}

/// Where a run begins.
#[derive(Debug, Default)]
pub(super) struct Start {
    /// Updates that an earlier run has made.
    pub(super) updates: u64,
    /// Whether the run goes on from a checkpoint, which may have no update.
    pub(super) resumed: bool,
    /// The earlier run's evaluation before its first update.
    pub(super) held_out_before: Option<HeldOut>,
    /// What a user should know of the start.
    pub(super) notes: Vec<String>,
}

/// Rank 0's choice of a checkpoint.
#[derive(Deserialize, Serialize)]
struct Choice {
    /// Updates of the newest checkpoint that is whole.
    updates: Option<u64>,
    /// Why newer ones are passed over.
    notes: Vec<String>,
}

impl Checkpoints {
    /// Opens the checkpoints of a run directory. Without `resume` it refuses those of an earlier run: the two would be mixed,
    /// and lost.
    pub(super) fn open(loaded: &Loaded, resume: bool, world: &World) -> Result<Checkpoints, Failure> {
        let store = Store::of(&loaded.rank.dir);
        world.on_root(|| {
            if resume || store.all()?.is_empty() {
                return Ok(());
            }
            Err(checkpoint::Error::Earlier { folder: store.folder() }.into())
        })?;
        Ok(Checkpoints { store, saved: None })
    }

    /// Brings the session to where the newest whole checkpoint stands. Rank 0 chooses; every rank reads and compares.
    pub(super) fn resume(&mut self, session: &mut Session, world: &World) -> Result<Start, Failure> {
        let Choice { updates, mut notes } = world.from_root(|| self.choose())?;
        let Some(updates) = updates else {
            notes.push(format!("no checkpoint in {} to go on from: starting anew", self.store.folder().display()));
            return Ok(Start { notes, ..Start::default() });
        };
        world.agree(self.check(updates, session).map_err(Failure::from))?;
        let read = self.store.read(updates, &session.policy.adapters);
        let saved = world.agree(read.map_err(Failure::from))?;
        world.require_equal("the checkpoint to go on from (digest)", &saved.digest)?;
        let State { adapter_version, cursor, held_out, round, .. } = saved.state;
        session.policy.adapters.restore(&saved.masters, adapter_version);
        session.policy.optimizer.restore(saved.moments);
        session.data.cursor = cursor;
        world.require_equal("the adapters (digest)", &session.policy.adapters.digest())?;
        session.data.round = world.agree(round_state::restore(round, session, world).map_err(Failure::from))?;
        self.saved = Some(updates);
        notes.push(format!("going on from {}: update {} is next", self.store.place(updates).display(), updates + 1));
        let held_out_before = serde_json::from_value(held_out).unwrap_or_default();
        Ok(Start { updates, resumed: true, held_out_before, notes })
    }

    fn choose(&self) -> Result<Choice, Failure> {
        let newest = self.store.newest()?;
        let passed_over = newest.passed_over.iter();
        let notes = passed_over.map(|(place, error)| format!("{} is passed over: {error}", place.display())).collect();
        Ok(Choice { updates: newest.updates, notes })
    }

    /// Checks that the checkpoint after `updates` updates is of this run, and not beyond its end.
    fn check(&self, updates: u64, session: &Session) -> Result<(), checkpoint::Error> {
        let folder = self.store.place(updates);
        let steps = session.config().run.steps;
        let now = state(session, None, serde_json::Value::Null);
        let differences = self.store.state(updates)?.differences(&now);
        if !differences.is_empty() {
            return Err(checkpoint::Error::OtherRun { folder, differences });
        }
        if updates > steps {
            return Err(checkpoint::Error::Beyond { folder, updates, steps });
        }
        Ok(())
    }

    /// Writes a checkpoint of the session as it is now. `latest` names it once all ranks know that it is whole, and only then
    /// older ones are removed.
    pub(super) fn save(
        &mut self,
        session: &Session,
        world: &World,
        reporter: &Reporter,
        stop: &StopPolicy,
        held_out_before: Option<HeldOut>,
    ) -> Result<(), Failure> {
        stop.time_save(|| {
            world.tracker().enter(Phase::Save);
            // What rank 0 writes is every rank's.
            let policy = &session.policy;
            world.require_equal("the adapters (digest)", &policy.adapters.digest())?;
            let state = state(session, held_out_before, round_state::save(session, world));
            let updates = state.updates;
            world.on_root(|| {
                if self.saved == Some(updates) {
                    return Ok(());
                }
                reporter.settle()?;
                Ok(self.store.write(state, &policy.adapters, policy.optimizer.moments(), &policy.shape)?)
            })?;
            world.on_root(|| {
                self.store.point(updates)?;
                tracing::info!("saved {}", self.store.place(updates).display());
                if let Err(error) = self.store.trim(updates, session.config().checkpoint.keep) {
                    reporter.line(&format!("an older checkpoint stays: {error}"));
                }
                Ok(())
            })?;
            self.saved = Some(updates);
            world.tracker().end_step();
            Ok(())
        })
    }

    /// Writes the adapters into the run directory, for other programs.
    pub(super) fn export_adapters(session: &Session, world: &World) -> Result<(), Failure> {
        let policy = &session.policy;
        let folder = session.loaded.rank.dir.join("adapter");
        world.on_root(|| checkpoint::save(&folder, &policy.adapters, &policy.shape)).map(drop)
    }
}

/// Where the session stands, and what it was made of.
fn state(session: &Session, held_out_before: Option<HeldOut>, round: serde_json::Value) -> State {
    let optimizer_steps = session.policy.optimizer.steps();
    State {
        updates: optimizer_steps.into(),
        adapter_version: session.policy.adapters.stamp().version,
        optimizer_steps,
        cursor: session.data.cursor.clone(),
        config_digest: session.config().digest(),
        config: session.config().resumable(),
        inputs: session.input_digests.clone(),
        held_out: serde_json::json!(held_out_before),
        round,
    }
}
