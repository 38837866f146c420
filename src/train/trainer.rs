//! The loop: evaluate; for each update take its groups, step, log, save; evaluate; close.

use serde_json::Value;

use super::alarms::{Alarms, Expected, Findings};
use super::checkpoints::{Checkpoints, CompletedUpdate, Start};
use super::outcome::Outcome;
use super::progress::{self, Progress};
use super::records::Records;
use super::reuse;
use super::round::Round;
use super::round_state;
use super::run::{Finished, Run, RunOptions};
use super::run_folder::RunFolder;
use super::session::Session;
use super::stop_files::{Ended, StopFiles};
use super::stop_policy::StopPolicy;
use super::totals::{RunEnd, RunTotals};
use super::update::{self, Update, UpdateContext};
use crate::config::{Loaded, RewardName};
use crate::plan::Place;
use crate::report::{Reporter, Step, set_aside};
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::units::{Rank, from_index};
use crate::step::observer::Observer;
use crate::world::World;

impl Run {
    /// Trains to the last update or until a stop is requested, and saves what came out; all ranks agree on it.
    ///
    /// # Errors
    /// When something cannot be saved, does not fit, or is not finite.
    pub fn train(self, world: &World) -> Result<Finished, Failure> {
        let mut trainer = Trainer::open(self, world)?;
        let ending = trainer.or_save(world, |trainer| trainer.train(world))?;
        trainer.close(ending, world)
    }
}

/// How the loop has ended.
#[derive(Clone, Copy)]
enum Ending {
    /// The first evaluation was dropped: there is nothing to go on from.
    NotBegun,
    /// A stop was requested before the last update.
    Stopped,
    /// An alarm has ended the run.
    Alarmed,
    /// All updates were made, and the evaluation after the last one.
    Finished,
}

/// A run between its first update and its end.
pub(super) struct Trainer {
    pub(super) session: Session,
    pub(super) folder: RunFolder,
    pub(super) checkpoints: Checkpoints,
    stop_files: StopFiles,
    pub(super) options: RunOptions,
    start: Start,
    pub(super) reporter: Reporter,
    records: Records,
    observer: Observer,
    pub(super) stop: StopPolicy,
    alarms: Alarms,
    pub(super) totals: RunTotals,
    pub(super) evaluated: Progress,
    pub(super) completed: CompletedUpdate,
}

impl Trainer {
    fn open(run: Run, world: &World) -> Result<Trainer, Failure> {
        let Run { session, folder, checkpoints, stop_files, options, start } = run;
        let Loaded { run: config, rank, .. } = &session.loaded;
        let anew = options.keeps_progress && !start.resumed;
        let aside = world.on_root(|| if anew { Ok(set_aside(&rank.dir)?) } else { Ok(None) })?.flatten();
        let is_root = world.all.rank() == Rank(0);
        let opened = Reporter::open(&rank.dir, is_root, &config.to_toml(), start.resumed.then_some(start.updates));
        let (reporter, earlier) = world.agree(opened.map_err(Failure::from))?;
        session.notes().iter().chain(&start.notes).for_each(|note| reporter.line(note));
        if let Some(place) = aside {
            reporter.line(&format!("what an earlier run left in {} is now in {}", rank.dir.display(), place.display()));
        }
        let mut trainer = Trainer {
            records: Records::open(&session, world, reporter.phases())?,
            observer: Observer::new(world.tracker(), session.model.decoder.device()),
            stop: StopPolicy::open(&session.loaded, world),
            alarms: Alarms::new(&session.config().alarm, &earlier.steps),
            totals: RunTotals::resume(start.updates, is_root.then_some(earlier.steps), &earlier.evaluations),
            evaluated: start.evaluated.clone(),
            completed: CompletedUpdate::of(&session, Value::Null),
            session,
            folder,
            checkpoints,
            stop_files,
            options,
            start,
            reporter,
        };
        trainer.resume_evaluations(&earlier.evaluations, world)?;
        Ok(trainer)
    }

    fn train(&mut self, world: &World) -> Result<Ending, Failure> {
        let steps = self.session.config().run.steps;
        let made = self.start.updates;
        if !self.start.resumed {
            let Outcome::Done(()) = self.evaluate(0, world)? else { return Ok(Ending::NotBegun) };
        } else if made < steps && progress::is_due(&self.session, made) {
            // An earlier start may have ended in the middle of it.
            let Outcome::Done(()) = self.evaluate(made, world)? else { return Ok(Ending::Stopped) };
        }
        let left = steps.saturating_sub(made);
        self.reporter.expect(&self.session.prompt_tokens_ahead(world, left), left, steps);
        for step in made + 1..=steps {
            if self.options.stop_after.is_some_and(|last| step > last) || self.stop_files.stop_requested(world) {
                return Ok(Ending::Stopped);
            }
            let groups = self.session.groups_per_update(world);
            self.records.begin_update(world, step)?;
            let mut round = self.session.data.take_round(groups);
            match self.update(&mut round, step, world) {
                Ok(Outcome::Done(update)) => {
                    if let Some(why) = self.log(update, round, world)? {
                        self.reporter.line(&format!("update {step} ends this run, as asked for by {why}"));
                        return Ok(Ending::Alarmed);
                    }
                }
                Ok(Outcome::Dropped { why }) => {
                    self.reporter.line(&format!("update {step} is {why}"));
                    self.totals.note_group(round.mine.last());
                    self.session.data.give_back(round);
                    return Ok(Ending::Stopped);
                }
                Ok(Outcome::NoRewards { failure }) | Err(failure) => return Err(failure),
            }
            let evaluates = step < steps && progress::is_due(&self.session, step);
            let best = evaluates && self.session.config().checkpoint.keep_best.is_some();
            let is_due = self.options.keeps_progress && self.checkpoints.is_due(self.session.config(), step, world);
            if is_due || (best && self.options.keeps_progress) {
                self.save(world)?;
            }
            if evaluates {
                let Outcome::Done(()) = self.evaluate(step, world)? else { return Ok(Ending::Stopped) };
            }
        }
        if self.options.keeps_progress {
            // Before the evaluation, which may take long or fail.
            self.save(world)?;
        }
        let Outcome::Done(()) = self.evaluate(steps, world)? else { return Ok(Ending::Stopped) };
        Ok(Ending::Finished)
    }

    fn update(&mut self, round: &mut Round, step: u64, world: &World) -> Result<Outcome<Update>, Failure> {
        let Trainer { session, reporter, observer, stop, totals, .. } = self;
        let mut context = UpdateContext { reporter, observer, stop };
        let update =
            stop.droppable(totals.last_update_s(), || update::update(session, world, &mut context, round, step));
        self.records.end_update(world);
        Outcome::of(update)
    }

    /// Writes and prints what an update came to. Returns why the run ends with it, if an alarm says so.
    fn log(&mut self, update: Update, round: Round, world: &World) -> Result<Option<String>, Failure> {
        let steps = self.session.config().run.steps;
        let updates_per_group = self.session.config().grpo.updates_per_group;
        let judge = self.session.take_spent();
        let reuses = reuse::leaves_pages(self.session.config(), round.made);
        let step = Step { memory: self.records.update_memory(), judge, ..update.step };
        let Findings { raised, lines, stop } = self.judge(&step, &round, world)?;
        let step = Step { alarms: raised, ..step };
        self.totals.add_update(step.clone(), update.pinning_s, round.mine.last());
        self.session.data.update_made(round, updates_per_group, reuses);
        self.completed = CompletedUpdate::of(&self.session, round_state::save(&self.session, world));
        world.on_root(|| Ok(self.reporter.step(&step, steps)?))?;
        if world.all.rank() != Rank(0) {
            self.reporter.step(&step, steps)?;
        }
        for line in &lines {
            self.reporter.line(line);
        }
        self.records.flush()?;
        Ok(stop)
    }

    /// What rank 0 finds in an update, on every rank.
    fn judge(&mut self, step: &Step, round: &Round, world: &World) -> Result<Findings, Failure> {
        let expected = Expected {
            gap_warn: self.session.gap_warn(),
            device_bytes: self.session.plan.plan.sum(Place::Device),
            answers: from_index(round.rewards().len()),
            rewards_differ: !self.session.config().grpo.has_only(RewardName::One),
        };
        world.from_root(|| Ok(self.alarms.judge(step, &expected)))
    }

    fn save(&mut self, world: &World) -> Result<(), Failure> {
        self.checkpoints.save(&self.session, world, &self.reporter, &self.stop, &self.evaluated)
    }

    /// Saves what came out, and makes the receipt.
    fn close(mut self, ending: Ending, world: &World) -> Result<Finished, Failure> {
        // The last save is no part of the updates, so the records end before it.
        let records = self.records.gather(&self.session, world);
        world.tracker().enter(Phase::Save);
        if matches!(ending, Ending::Alarmed) {
            self.checkpoints.keep_all();
        }
        match ending {
            Ending::Stopped | Ending::Alarmed if self.options.keeps_progress => self.save(world)?,
            Ending::NotBegun | Ending::Stopped | Ending::Alarmed => {}
            Ending::Finished => Checkpoints::export_adapters(&self.session, world)?,
        }
        // What an update or an evaluation was sent that did not come to its end.
        self.totals.add_spent(self.session.take_spent().as_ref());
        if let Some(spent) = self.totals.spent() {
            self.reporter.line(&format!("judges: {}", spent.text()));
        }
        let stopped = !matches!(ending, Ending::Finished);
        let by_alarm = matches!(ending, Ending::Alarmed);
        self.stop.close(world);
        let updates = self.totals.updates;
        let after = self.evaluated.last.as_ref().filter(|last| !stopped && last.step == updates);
        let held_out = self.evaluated.ends(after);
        let best = self.evaluated.best.take();
        let end = RunEnd { held_out, best, stopped, by_alarm, records, pages: self.observer.own_pages() };
        let receipt = self.totals.receipt(&self.session, world, end);
        self.records.close(world)?;
        let ended = Ended { stopped, progress: updates > self.start.updates };
        if let Some(note) = self.stop_files.close(world, ended)? {
            self.reporter.line(note);
        }
        if stopped && !by_alarm {
            let steps = self.session.config().run.steps;
            self.reporter.line(&format!(
                "stopped after update {updates} of {steps}, as requested; go on with `longstraw train --resume` in the same way"
            ));
        }
        Ok(Finished { receipt, session: self.session, reporter: self.reporter, folder: self.folder })
    }
}
