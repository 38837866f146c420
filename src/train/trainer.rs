//! The loop: evaluate; for each update take its groups, step, log, save; evaluate; close.

use super::checkpoints::{Checkpoints, Start};
use super::evaluate;
use super::outcome::Outcome;
use super::records::Records;
use super::round::Round;
use super::run::{Finished, Run, RunOptions};
use super::session::Session;
use super::stop_files::{Ended, StopFiles};
use super::stop_policy::StopPolicy;
use super::totals::{RunEnd, RunTotals};
use super::update::{self, Update, UpdateContext};
use crate::config::Loaded;
use crate::report::{HeldOut, Reporter, Step};
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::units::Rank;
use crate::step::observer::Observer;
use crate::world::World;

impl Run {
    /// Trains to the last update or until a stop is requested, and saves what came out; all ranks agree on it.
    ///
    /// # Errors
    /// When something cannot be saved, does not fit, or is not finite.
    pub fn train(mut self, world: &World) -> Result<Finished, Failure> {
        let Run { session, checkpoints, options, .. } = &mut self;
        let start = if options.resume { checkpoints.resume(session, world)? } else { Start::default() };
        let mut trainer = Trainer::open(self, &start, world)?;
        let ending = trainer.train(&start, world)?;
        trainer.close(ending, &start, world)
    }
}

/// How the loop has ended.
#[derive(Clone, Copy)]
enum Ending {
    /// The first evaluation was dropped: there is nothing to go on from.
    NotBegun,
    /// A stop was requested before the last update.
    Stopped,
    /// All updates were made; with the evaluation after the last one.
    Finished(Option<HeldOut>),
}

/// A run between its first update and its end.
struct Trainer {
    session: Session,
    checkpoints: Checkpoints,
    stop_files: StopFiles,
    options: RunOptions,
    reporter: Reporter,
    records: Records,
    observer: Observer,
    stop: StopPolicy,
    totals: RunTotals,
    held_out_before: Option<HeldOut>,
}

impl Trainer {
    fn open(run: Run, start: &Start, world: &World) -> Result<Trainer, Failure> {
        let Run { session, checkpoints, stop_files, options } = run;
        let Loaded { run: config, rank, .. } = &session.loaded;
        let opened = Reporter::open(&rank.dir, world.all.rank() == Rank(0), &config.to_toml(), start.updates);
        let (reporter, earlier) = world.agree(opened.map_err(Failure::from))?;
        session.notes().iter().chain(&start.notes).for_each(|note| reporter.line(note));
        Ok(Trainer {
            records: Records::open(&session, world, reporter.phases())?,
            observer: Observer::new(world.tracker(), session.model.decoder.device()),
            stop: StopPolicy::open(&session.loaded, world),
            totals: RunTotals::resume(start.updates, earlier),
            held_out_before: start.held_out_before,
            session,
            checkpoints,
            stop_files,
            options,
            reporter,
        })
    }

    fn train(&mut self, start: &Start, world: &World) -> Result<Ending, Failure> {
        if !start.resumed {
            let Outcome::Done(measured) = self.evaluate(world)? else { return Ok(Ending::NotBegun) };
            self.held_out_before = measured;
        }
        let steps = self.session.config().run.steps;
        let left = steps.saturating_sub(start.updates);
        self.reporter.expect(&self.session.prompt_tokens_ahead(world, left), left, steps);
        for step in start.updates + 1..=steps {
            if self.options.stop_after.is_some_and(|last| step > last) || self.stop_files.stop_requested(world) {
                return Ok(Ending::Stopped);
            }
            let groups = self.session.groups_per_update(world);
            self.records.begin_update(world, step)?;
            let mut round = self.session.data.take_round(groups);
            match self.update(&mut round, step, world)? {
                Outcome::Done(update) => self.log(update, round)?,
                Outcome::Dropped { why } => {
                    self.reporter.line(&format!("update {step} is {why}"));
                    self.totals.note_group(round.mine.last());
                    self.session.data.give_back(round);
                    return Ok(Ending::Stopped);
                }
                Outcome::NoRewards { failure } => {
                    self.session.data.give_back(round);
                    return Err(self.save_before(step, failure, world));
                }
            }
            if self.session.is_checkpoint_due(step) {
                self.save(world)?;
            }
        }
        let Outcome::Done(held_out_after) = self.evaluate(world)? else { return Ok(Ending::Stopped) };
        Ok(Ending::Finished(held_out_after))
    }

    /// Measures on held-out prompts, where there are any. Without rewards there is no evaluation, so the run fails.
    fn evaluate(&mut self, world: &World) -> Result<Outcome<Option<HeldOut>>, Failure> {
        let measured = evaluate::evaluate(&self.session, world, &mut self.reporter, &self.stop);
        let outcome = Outcome::of(measured)?;
        if let Outcome::Dropped { why } = &outcome {
            self.reporter.line(&format!("the held-out evaluation is {why}"));
        }
        if let Outcome::NoRewards { failure } = outcome { Err(failure) } else { Ok(outcome) }
    }

    fn update(&mut self, round: &mut Round, step: u64, world: &World) -> Result<Outcome<Update>, Failure> {
        let Trainer { session, reporter, observer, stop, totals, .. } = self;
        let mut context = UpdateContext { reporter, observer, stop };
        let update =
            stop.droppable(totals.last_update_s(), || update::update(session, world, &mut context, round, step));
        self.records.end_update(world)?;
        Outcome::of(update)
    }

    fn log(&mut self, update: Update, round: Round) -> Result<(), Failure> {
        let config = self.session.config();
        let step = Step { memory: self.records.update_memory(), ..update.step };
        self.reporter.step(&step, config.run.steps)?;
        self.totals.add_update(step, update.pinning_s, round.mine.last());
        let updates_per_group = config.grpo.updates_per_group;
        self.session.data.update_made(round, updates_per_group);
        Ok(())
    }

    fn save(&mut self, world: &World) -> Result<(), Failure> {
        self.checkpoints.save(&self.session, world, &self.reporter, &self.stop, self.held_out_before)
    }

    /// Saves what was learnt before update `step`, which has failed on all ranks alike, and gives the failure back.
    fn save_before(&mut self, step: u64, failure: Failure, world: &World) -> Failure {
        if step == 1 {
            return failure;
        }
        if let Err(another) = self.save(world) {
            return another;
        }
        self.reporter.line(&format!(
            "saved after update {}; once rewards can be had again, go on with `longstraw train --resume` in the same way",
            step - 1
        ));
        failure
    }

    /// Saves what came out, and makes the receipt.
    fn close(mut self, ending: Ending, start: &Start, world: &World) -> Result<Finished, Failure> {
        // The last save is no part of the updates, so the records end before it.
        let records = self.records.gather(&self.session, world);
        world.tracker().enter(Phase::Save);
        let held_out_after = match ending {
            Ending::NotBegun => None,
            Ending::Stopped => {
                self.save(world)?;
                None
            }
            Ending::Finished(held_out_after) => {
                Checkpoints::export_adapters(&self.session, world)?;
                held_out_after
            }
        };
        let stopped = !matches!(ending, Ending::Finished(_));
        self.stop.close(world);
        let updates = self.totals.updates;
        let held_out_before = self.held_out_before;
        let end = RunEnd { held_out_before, held_out_after, stopped, records, pages: self.observer.own_pages() };
        let receipt = self.totals.receipt(&self.session, world, end);
        self.records.close(world)?;
        let ended = Ended { stopped, progress: updates > start.updates };
        if let Some(note) = self.stop_files.close(world, ended)? {
            self.reporter.line(note);
        }
        if stopped {
            let steps = self.session.config().run.steps;
            self.reporter.line(&format!(
                "stopped after update {updates} of {steps}, as requested; go on with `longstraw train --resume` in the same way"
            ));
        }
        Ok(Finished { receipt, session: self.session, reporter: self.reporter })
    }
}
