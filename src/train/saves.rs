//! When a run is saved, where it goes on from, and when it is asked to stop.
//!
//! Data are taken from the cursor when an update begins and the cursor is saved when one has ended, so a prompt that was
//! captured and not trained on when the run was interrupted runs again, once.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::Session;
use crate::checkpoint::{self, Newest, State, Store};
use crate::config::Loaded;
use crate::report::{HeldOut, Reporter};
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::units::Rank;
use crate::world::{World, stop_requested};

/// The checkpoints of a run.
#[derive(Debug)]
pub(super) struct Saves {
    store: Store,
    /// Updates between two of them; 0 for none.
    every: u64,
    /// How many stay.
    keep: u64,
    resume: bool,
    /// The file that asks for a stop.
    stop: PathBuf,
    /// The file that tells a batch system that the run was asked to stop and is not at its end.
    requeue: PathBuf,
    /// The file that the start before has left, if it was stopped before its first update.
    without_progress: PathBuf,
    /// Updates of the checkpoint that holds what the run holds now, or held.
    saved: Option<u64>,
}

/// Where a run begins.
#[derive(Debug, Default)]
pub(super) struct Start {
    /// Updates that an earlier run has made.
    pub(super) updates: u64,
    /// Whether there is such a run, though it may have made none.
    pub(super) resumed: bool,
    /// What it measured on held-out prompts before its first update.
    pub(super) held_out: Option<HeldOut>,
    /// What a user should know of it.
    pub(super) notes: Vec<String>,
}

impl Saves {
    /// Refuses to start anew among the checkpoints of an earlier run: they would be mixed, and lost.
    pub(super) fn open(loaded: &Loaded, resume: bool, world: &World) -> Result<Saves, Failure> {
        let (dir, settings) = (&loaded.rank.dir, &loaded.run.checkpoint);
        let store = Store::of(dir);
        let earlier = match world.all.rank() {
            Rank(0) if !resume => store.all().and_then(|all| {
                if all.is_empty() { Ok(()) } else { Err(checkpoint::Error::Earlier { folder: store.folder() }) }
            }),
            _ => Ok(()),
        };
        world.agree(earlier.map_err(Failure::from))?;
        let (every, keep, stop, requeue) = (settings.every, settings.keep, dir.join("stop"), dir.join("requeue"));
        let without_progress = dir.join("without_progress");
        let saves = Saves { store, every, keep, resume, stop, requeue, without_progress, saved: None };
        remove(&saves.requeue, world)?;
        Ok(saves)
    }

    /// Brings the session to where the newest whole checkpoint stands, if the run is to go on. Rank 0 chooses, and every
    /// rank reads and compares.
    pub(super) fn start(&mut self, session: &mut Session, loaded: &Loaded, world: &World) -> Result<Start, Failure> {
        if !self.resume {
            return Ok(Start::default());
        }
        let found = match world.all.rank() {
            Rank(0) => self.store.newest(),
            _ => Ok(Newest::default()),
        };
        let newest = world.agree(found.map_err(Failure::from))?;
        let told = newest.updates.map_or(String::new(), |updates| updates.to_string());
        let chosen = world.all.gather_texts(&told).first().and_then(|updates| updates.parse::<u64>().ok());
        let passed_over = newest.passed_over.iter();
        let mut notes: Vec<String> =
            passed_over.map(|(place, error)| format!("{} is passed over: {error}", place.display())).collect();
        let Some(updates) = chosen else {
            notes.push(format!("no checkpoint in {} to go on from: starting anew", self.store.folder().display()));
            return Ok(Start { notes, ..Start::default() });
        };
        world.agree(self.fits(updates, session, loaded).map_err(Failure::from))?;
        let read = self.store.read(updates, &session.adapters);
        let saved = world.agree(read.map_err(Failure::from))?;
        world.require_equal("the checkpoint to go on from (digest)", &saved.digest)?;
        let State { adapter_version, cursor, held_out, round, .. } = saved.state;
        session.adapters.restore(&saved.masters, adapter_version);
        session.optimizer.restore(saved.moments);
        session.cursor = cursor;
        world.require_equal("the adapters (digest)", &session.adapters.digest())?;
        session.restore_round(round, world)?;
        self.saved = Some(updates);
        notes.push(format!("going on from {}: update {} is next", self.store.place(updates).display(), updates + 1));
        let held_out = serde_json::from_value(held_out).unwrap_or_default();
        Ok(Start { updates, resumed: true, held_out, notes })
    }

    /// Whether the checkpoint after `updates` updates is of this run, and not beyond its end.
    fn fits(&self, updates: u64, session: &Session, loaded: &Loaded) -> Result<(), checkpoint::Error> {
        let (folder, steps) = (self.store.place(updates), loaded.run.run.steps);
        let differences =
            self.store.state(updates)?.differences(&state(session, loaded, None, serde_json::Value::Null));
        if !differences.is_empty() {
            return Err(checkpoint::Error::OtherRun { folder, differences });
        }
        if updates > steps {
            return Err(checkpoint::Error::Beyond { folder, updates, steps });
        }
        Ok(())
    }

    /// Whether a checkpoint is written after update `step`.
    pub(super) fn due(&self, step: u64) -> bool {
        self.every > 0 && step.is_multiple_of(self.every)
    }

    /// Whether any rank was asked to stop, by a signal or by the file; the same on every rank.
    pub(super) fn stop_requested(&self, world: &World) -> bool {
        world.any(stop_requested() || self.stop.exists())
    }

    /// Writes a checkpoint of the session as it is now. Only when all ranks know that it is whole does `latest` name it,
    /// and only then are older ones removed.
    pub(super) fn save(
        &mut self,
        session: &Session,
        loaded: &Loaded,
        world: &World,
        reporter: &Reporter,
        before: Option<HeldOut>,
    ) -> Result<(), Failure> {
        world.tracker().enter(Phase::Save);
        // What rank 0 writes is every rank's.
        world.require_equal("the adapters (digest)", &session.adapters.digest())?;
        let round = session.round.as_ref().map(|round| round.save(session, world)).unwrap_or_default();
        let state = state(session, loaded, before, round);
        let updates = state.updates;
        let written = match world.all.rank() {
            Rank(0) if self.saved != Some(updates) => reporter.settle().map_err(Failure::from).and_then(|()| {
                Ok(self.store.write(state, &session.adapters, session.optimizer.moments(), &session.shape)?)
            }),
            _ => Ok(()),
        };
        world.agree(written)?;
        let pointed = match world.all.rank() {
            Rank(0) => self.store.point(updates),
            _ => Ok(()),
        };
        world.agree(pointed.map_err(Failure::from))?;
        self.saved = Some(updates);
        if world.all.rank() == Rank(0) {
            tracing::info!("saved {}", self.store.place(updates).display());
            if let Err(error) = self.store.trim(updates, self.keep) {
                reporter.line(&format!("an older checkpoint stays: {error}"));
            }
        }
        world.tracker().end_step();
        Ok(())
    }

    /// The run has ended: what asked it to stop does not ask the next one. One that a signal has stopped before its end
    /// wants to be started again, and leaves a file that says so; whoever put a file there wanted it to stop.
    /// Nor does a run want it that was stopped twice in a row before an update was done: it would go on like that.
    /// Returns what a user should know of that.
    pub(super) fn end(&self, world: &World, stopped: bool, progress: bool) -> Result<Option<&'static str>, Failure> {
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
                "this is the second start in a row that was stopped before an update was done, so it does not ask for \
                 another: an update takes longer than the time limit leaves",
            ));
        }
        write(&self.requeue, "stopped by a signal before its end; `longstraw train --resume` goes on\n", world)?;
        Ok(None)
    }
}

/// Rank 0 writes a file.
fn write(file: &Path, words: &str, world: &World) -> Result<(), Failure> {
    let written = if world.all.rank() == Rank(0) { fs::write(file, words) } else { Ok(()) };
    let written = written.map_err(|source| checkpoint::Error::Write { file: file.to_owned(), source });
    world.agree(written.map_err(Failure::from))
}

/// Rank 0 removes a file, if it is there.
fn remove(file: &Path, world: &World) -> Result<(), Failure> {
    let removed = match world.all.rank() {
        Rank(0) => fs::remove_file(file),
        _ => Ok(()),
    };
    let removed = match removed {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(checkpoint::Error::Write { file: file.to_owned(), source })
        }
        _ => Ok(()),
    };
    world.agree(removed.map_err(Failure::from))
}

/// Where the session stands, and what it was made of.
fn state(session: &Session, loaded: &Loaded, before: Option<HeldOut>, round: serde_json::Value) -> State {
    let optimizer_steps = session.optimizer.steps();
    State {
        updates: optimizer_steps.into(),
        adapter_version: session.adapters.stamp().version,
        optimizer_steps,
        cursor: session.cursor.clone(),
        config_digest: loaded.run.digest(),
        config: loaded.run.resumable(),
        inputs: session.inputs.clone(),
        held_out: serde_json::json!(before),
        round,
    }
}
