//! When a run is saved, and where it goes on.
//!
//! An update takes its groups from the cursor when it begins, and the cursor is saved when an update has ended. So a prompt
//! that was captured and not trained on when the run was interrupted runs again, once.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::progress::Progress;
use super::rate::learning_rate;
use super::reuse::EarlierAdapters;
use super::round_state;
use super::run_folder::{Begin, RunFolder};
use super::session::Session;
use super::stop_policy::StopPolicy;
use crate::checkpoint::{self, State, Store, Tensors};
use crate::config::{RunConfig, Schedule};
use crate::data::GroupOrder;
use crate::report::Reporter;
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::units::from_index;
use crate::world::World;

/// The checkpoints of a run.
#[derive(Debug)]
pub(super) struct Checkpoints {
    store: Store,
    choice: Choice,
    /// Updates after which the run's present state was saved, if it was.
    saved: Option<u64>,
    /// When that was; before the first save, when the run began.
    last_save: Instant,
    /// Whether the last save has failed: another attempt would, too.
    failed: bool,
    /// Whether older checkpoints are removed.
    trims: bool,
}

/// Where a run begins.
#[derive(Debug, Default)]
pub(super) struct Start {
    /// Updates that an earlier run has made.
    pub(super) updates: u64,
    /// Whether the run goes on from a checkpoint, which may have no update.
    pub(super) resumed: bool,
    /// What the earlier run's evaluations have shown up to the checkpoint.
    pub(super) evaluated: Progress,
    /// What a user should know of the start.
    pub(super) notes: Vec<String>,
}

/// Where data and round stood when the last update was completed.
pub(super) struct CompletedUpdate {
    pub(super) cursor: GroupOrder,
    /// The round as a checkpoint holds it, gathered while all ranks were well.
    pub(super) round: Value,
    /// The adapters of a capture that the round's next update reuses.
    earlier: Option<Rc<EarlierAdapters>>,
}

impl CompletedUpdate {
    /// Of a session between two updates, with its `round` as a checkpoint holds it.
    pub(super) fn of(session: &Session, round: Value) -> CompletedUpdate {
        CompletedUpdate { cursor: session.data.cursor.clone(), round, earlier: earlier(session) }
    }
}

fn earlier(session: &Session) -> Option<Rc<EarlierAdapters>> {
    session.data.round.as_ref().and_then(|round| round.earlier.clone())
}

/// Rank 0's choice of a checkpoint.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
struct Choice {
    /// Updates of the newest checkpoint that is whole.
    updates: Option<u64>,
    /// Updates of newer ones that are damaged, each with the reason.
    passed_over: Vec<(u64, String)>,
    /// What `latest` names, where that is another checkpoint.
    latest: Option<String>,
}

impl Checkpoints {
    /// Opens the checkpoints of a run directory, and chooses the one to go on from, before anything is loaded. A new run is
    /// refused where an earlier one has left checkpoints.
    pub(super) fn open(
        folder: &RunFolder,
        config: &RunConfig,
        begin: Begin,
        world: &World,
    ) -> Result<Checkpoints, Failure> {
        let store = Store::of(&folder.dir);
        let choice = world.from_root(|| Ok(choose(&store, config, begin)?))?;
        Ok(Checkpoints { store, choice, saved: None, last_save: Instant::now(), failed: false, trims: true })
    }

    /// Brings the session to where the chosen checkpoint stands; every rank reads and compares. Damaged checkpoints are
    /// renamed once nothing can refuse the run any more.
    pub(super) fn resume(&mut self, session: &mut Session, world: &World) -> Result<Start, Failure> {
        let Choice { updates, passed_over, latest } = self.choice.clone();
        let Some(updates) = updates else {
            let words = format!("no checkpoint in {} to go on from: starting anew", self.store.folder().display());
            return Ok(Start { notes: vec![words], ..Start::default() });
        };
        let mut notes = world.agree(self.check(updates, session, world).map_err(Failure::from))?;
        let read = self.store.read(updates, &session.policy.adapters);
        let saved = world.agree(read.map_err(Failure::from))?;
        world.require_equal("the checkpoint to go on from (digest)", &saved.digest)?;
        let State { adapter_version, cursor, held_out, best, round, .. } = saved.state;
        session.policy.adapters.restore(&saved.masters, adapter_version);
        session.policy.optimizer.restore(saved.moments);
        session.data.cursor = cursor;
        world.require_equal("the adapters (digest)", &session.policy.digest(world))?;
        let restored = round_state::restore(round, &saved.captured, session, world);
        session.data.round = world.agree(restored.map_err(Failure::from))?;
        self.saved = Some(updates);
        notes.extend(world.from_root(|| Ok(self.keep_aside(&passed_over)?))?);
        let place = self.store.place(updates);
        let named = latest.filter(|_| passed_over.is_empty()).filter(|named| !place.ends_with(named));
        notes.extend(named.map(|named| {
            format!("latest names {named}, which is not there as it was: the newest whole checkpoint is taken")
        }));
        notes.push(format!("going on from {}: update {} is next", place.display(), updates + 1));
        Ok(Start { updates, resumed: true, evaluated: Progress::restore(&held_out, best), notes })
    }

    /// Renames the checkpoints that are passed over, so that no later save or removal meets them; one line for each.
    fn keep_aside(&self, passed_over: &[(u64, String)]) -> Result<Vec<String>, checkpoint::Error> {
        let renamed = passed_over.iter().map(|(step, why)| {
            let aside = self.store.keep_aside(*step)?;
            let kept = aside.map(|aside| format!("; it is kept as {}", aside.display())).unwrap_or_default();
            Ok(format!("{} is passed over: {why}{kept}", self.store.place(*step).display()))
        });
        renamed.collect()
    }

    /// Checks that the checkpoint after `updates` updates is of this run, and not beyond its end. Returns what a user should
    /// know of the learning rate.
    fn check(&self, updates: u64, session: &Session, world: &World) -> Result<Vec<String>, checkpoint::Error> {
        let folder = self.store.place(updates);
        let saved = self.store.state(updates)?;
        let differences = saved.differences(&state(session, world, &Progress::default(), Value::Null));
        if !differences.is_empty() {
            return Err(checkpoint::Error::OtherRun { folder, differences });
        }
        let steps = session.config().run.steps;
        if updates > steps {
            return Err(checkpoint::Error::Beyond { folder, updates, steps });
        }
        decay(folder, &saved, session.config())
    }

    /// Whether a checkpoint follows update `step`, by its number or by rank 0's clock; every rank gets the same answer.
    pub(super) fn is_due(&self, config: &RunConfig, step: u64, world: &World) -> bool {
        let every = config.checkpoint.every;
        let every_sec = config.checkpoint.every_sec;
        let by_number = every > 0 && step.is_multiple_of(every);
        let by_time = every_sec > 0 && world.root_says(self.last_save.elapsed() >= Duration::from_secs(every_sec));
        by_number || by_time
    }

    /// Writes a checkpoint of the session as it is now. `latest` names it once all ranks know that it is whole, and only then
    /// older ones are removed.
    pub(super) fn save(
        &mut self,
        session: &Session,
        world: &World,
        reporter: &Reporter,
        stop: &StopPolicy,
        evaluated: &Progress,
    ) -> Result<(), Failure> {
        self.failed = true;
        stop.time_save(|| {
            world.tracker().enter(Phase::Save);
            // What rank 0 writes is every rank's.
            let policy = &session.policy;
            world.require_equal("the adapters (digest)", &policy.digest(world))?;
            let gathered = policy.gathered(world);
            let own = (&policy.adapters, policy.optimizer.moments());
            let (adapters, moments) = gathered.as_ref().map_or(own, |all| (&all.adapters, &all.moments));
            let state = state(session, world, evaluated, round_state::save(session, world));
            let updates = state.updates;
            let earlier = earlier(session);
            let captured = earlier.as_ref().map_or(&[][..], |earlier| &earlier.values);
            world.on_root(|| {
                if self.saved == Some(updates) {
                    return Ok(());
                }
                reporter.settle()?;
                Ok(self.store.write(state, &Tensors { adapters, moments, captured }, &policy.shape)?)
            })?;
            world.on_root(|| {
                self.store.point(updates)?;
                tracing::info!("saved {}", self.store.place(updates).display());
                let best = evaluated.best.as_ref().map(|best| best.step);
                if let Some(keep) = self.trims.then_some(session.config().checkpoint.keep)
                    && let Err(error) = self.store.trim(updates, keep, best)
                {
                    reporter.line(&format!("an older checkpoint stays: {error}"));
                }
                Ok(())
            })?;
            self.saved = Some(updates);
            self.last_save = Instant::now();
            world.tracker().end_step();
            Ok::<(), Failure>(())
        })?;
        self.failed = false;
        Ok(())
    }

    /// No checkpoint is removed any more.
    pub(super) fn keep_all(&mut self) {
        self.trims = false;
    }

    /// Whether a save after a failure could keep what the checkpoints so far lack.
    pub(super) fn lack(&self, updates: u64) -> bool {
        updates > 0 && self.saved != Some(updates) && !self.failed
    }

    /// Writes a checkpoint of the last completed update into rank 0's `run_dir` on this rank alone, after a failure.
    pub(super) fn save_alone(
        run_dir: &Path,
        session: &Session,
        world: &World,
        reporter: &Reporter,
        evaluated: &Progress,
        completed: &CompletedUpdate,
    ) -> Result<(), Failure> {
        let policy = &session.policy;
        if policy.adapters.is_spread() {
            return Err(checkpoint::Error::Spread { ranks: world.ep.size() }.into());
        }
        let state =
            State { cursor: completed.cursor.clone(), ..state(session, world, evaluated, completed.round.clone()) };
        if let Err(error) = reporter.settle() {
            reporter.line(&format!("{error}; the checkpoint is written all the same"));
        }
        let writer = world.all.rank();
        let captured = completed.earlier.as_ref().map_or(&[][..], |earlier| &earlier.values);
        let tensors = Tensors { adapters: &policy.adapters, moments: policy.optimizer.moments(), captured };
        Ok(Store::of(run_dir).write_alone(writer, state, &tensors, &policy.shape)?)
    }

    /// Whether the checkpoint after `updates` updates is there.
    pub(super) fn has(&self, updates: u64) -> bool {
        self.store.place(updates).is_dir()
    }

    /// Makes the file `best` name the checkpoint after `updates` updates. Rank 0 alone calls it.
    pub(super) fn point_best(&self, updates: u64) -> Result<(), Failure> {
        Ok(self.store.point_best(updates)?)
    }

    /// Writes the adapters into the run directory, for other programs.
    pub(super) fn export_adapters(session: &Session, world: &World) -> Result<(), Failure> {
        let policy = &session.policy;
        let folder = session.loaded.rank.dir.join("adapter");
        let gathered = policy.gathered(world);
        let adapters = gathered.as_ref().map_or(&policy.adapters, |all| &all.adapters);
        world.on_root(|| checkpoint::save(&folder, adapters, &policy.shape)).map(drop)
    }
}

/// Rank 0's choice. Refuses a new run among the checkpoints of an earlier one, and a resumed run whose configuration is
/// another than that of its checkpoint.
fn choose(store: &Store, config: &RunConfig, begin: Begin) -> Result<Choice, checkpoint::Error> {
    match begin {
        Begin::New if store.has_progress()? => Err(checkpoint::Error::Earlier { folder: store.folder() }),
        Begin::New | Begin::Anew => Ok(Choice::default()),
        Begin::Resume => {
            let newest = store.newest()?;
            if let Some(updates) = newest.updates {
                let differences = store.state(updates)?.config_differences(&config.resumable());
                if !differences.is_empty() {
                    return Err(checkpoint::Error::OtherRun { folder: store.place(updates), differences });
                }
            }
            let passed_over = newest.passed_over.into_iter().map(|(step, error)| (step, error.to_string()));
            Ok(Choice { updates: newest.updates, passed_over: passed_over.collect(), latest: newest.latest })
        }
    }
}

/// A decay that would end after another update is refused, unless the configuration says so; then a line for the user does.
fn decay(folder: PathBuf, saved: &State, config: &RunConfig) -> Result<Vec<String>, checkpoint::Error> {
    let now = config.schedule_steps();
    let Some(before) = saved.schedule_steps.filter(|&before| before != now) else { return Ok(Vec::new()) };
    let schedule = match config.optimizer.schedule {
        Schedule::Constant => return Ok(Vec::new()),
        Schedule::Cosine => "cosine",
        Schedule::Linear => "linear",
    };
    let next = saved.updates + 1;
    let with = |steps| {
        let mut config = config.clone();
        config.optimizer.schedule_steps = Some(steps);
        learning_rate(&config, next)
    };
    let (rate_saved, rate_now) = (with(before), with(now));
    if config.optimizer.schedule_steps.is_some() {
        return Ok(vec![format!(
            "the decay of the learning rate now ends after update {now} (it was {before}): the rate of update {next} is \
             {rate_now:e} instead of {rate_saved:e}"
        )]);
    }
    Err(checkpoint::Error::Horizon { folder, schedule, saved: before, now, next, rate_saved, rate_now })
}

/// Where the session stands, and what it was made of.
fn state(session: &Session, world: &World, evaluated: &Progress, round: Value) -> State {
    let optimizer_steps = session.policy.optimizer.steps();
    let config = session.config();
    State {
        updates: optimizer_steps.into(),
        adapter_version: session.policy.adapters.stamp().version,
        optimizer_steps,
        cursor: session.data.cursor.clone(),
        config_digest: config.digest(),
        config: config.resumable(),
        groups_per_update: Some(from_index(session.groups_per_update(world))),
        cp_size: Some(from_index(world.cp.size())),
        schedule_steps: Some(config.schedule_steps()),
        inputs: session.input_digests.clone(),
        held_out: serde_json::json!(evaluated.before),
        best: serde_json::json!(evaluated.best),
        round,
    }
}
