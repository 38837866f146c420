//! The training loop: one step from top to bottom, one call a phase.

mod evaluate;
mod inputs;
mod memory;
mod patience;
mod rate;
mod records;
mod rewards;
mod round;
mod saves;
mod setup;
mod step;
mod tally;
mod trace;
mod whole;

pub use setup::Session;

use crate::config::Loaded;
use crate::report::{HeldOut, Receipt, Reporter, Step};
use crate::runtime::failure::{Failure, Phase};
use crate::step::observer::Observer;
use crate::world::World;
use patience::Patience;
use records::Records;
use saves::Saves;
use step::Desk;
use tally::Tally;

/// Trains as the configuration says, from the start, or with `resume` from the newest checkpoint, to the last step or to
/// where it is asked to stop. Leaves receipt and adapters behind, or receipt and checkpoint.
///
/// # Errors
/// When something cannot be loaded or saved, does not fit, or is not finite.
pub fn run(loaded: &Loaded, resume: bool, world: &mut World) -> Result<Receipt, Failure> {
    let mut finished = Run::open(loaded, Course { resume, stop_after: None }, world)?.train(loaded, world)?;
    finished.write(world)?;
    Ok(finished.receipt)
}

/// Where a run begins and ends.
#[derive(Clone, Copy, Debug, Default)]
pub struct Course {
    /// It goes on from the newest checkpoint.
    pub resume: bool,
    /// It stops after this update, as if it were asked to.
    pub stop_after: Option<u64>,
}

/// A run that is ready, before its first step.
pub struct Run {
    /// What it has opened.
    pub session: Session,
    saves: Saves,
    course: Course,
}

/// A run that has ended well and whose receipt is still to be written: a gate judges it first.
pub struct Finished {
    /// What came out.
    pub receipt: Receipt,
    /// What it had opened.
    pub session: Session,
    reporter: Reporter,
}

impl Finished {
    /// Writes the receipt as it is now, and says what stands in it; all ranks agree that it is written.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&mut self, world: &World) -> Result<(), Failure> {
        world.agree(self.reporter.receipt(&self.receipt).map_err(Failure::from))?;
        self.reporter.table(&self.receipt);
        Ok(())
    }
}

impl Run {
    /// Opens everything that the run needs.
    ///
    /// # Errors
    /// When something cannot be loaded, or does not fit.
    pub fn open(loaded: &Loaded, course: Course, world: &mut World) -> Result<Run, Failure> {
        let saves = Saves::open(loaded, course.resume, world)?;
        Ok(Run { session: Session::open(loaded, world)?, saves, course })
    }

    /// Trains to the last step or to where the run is asked to stop, and saves what came out; all ranks agree on it.
    ///
    /// # Errors
    /// When something cannot be saved, does not fit, or is not finite.
    pub fn train(self, loaded: &Loaded, world: &mut World) -> Result<Finished, Failure> {
        let Run { mut session, mut saves, course } = self;
        let start = saves.start(&mut session, loaded, world)?;
        let dir = &loaded.rank.dir;
        let opened = Reporter::open(dir, world.all.rank().0 == 0, &loaded.run.to_toml(), start.updates);
        let (reporter, earlier) = world.agree(opened.map_err(Failure::from))?;
        session.notes(loaded).iter().chain(&start.notes).for_each(|note| reporter.line(note));
        let records = Records::begin(&session, loaded, world, reporter.phases())?;
        let tally = Tally::after(start.updates, earlier);
        let patience = Patience::begin(loaded, world);
        let observer = Observer::new(world.tracker(), session.decoder.device());
        let mut way = Way { loaded, session, saves, reporter, records, tally, observer, patience, stopped: false };
        let before = if start.resumed { start.held_out } else { way.held_out(world)? };
        // A first evaluation that was dropped leaves nothing to go on from.
        let begun = !way.stopped;
        if begun {
            way.updates(world, course, start.updates, before)?;
        }
        let after = if way.stopped { None } else { way.held_out(world)? };
        way.end(world, [before, after], begun, start.updates)
    }
}

/// A run between its first step and its end.
struct Way<'a> {
    loaded: &'a Loaded,
    session: Session,
    saves: Saves,
    reporter: Reporter,
    records: Records,
    tally: Tally,
    observer: Observer,
    patience: Patience,
    /// Whether it ends before its end.
    stopped: bool,
}

impl Way<'_> {
    /// Measures on held-out prompts, if there are any and no signal stops the run there.
    fn held_out(&mut self, world: &World) -> Result<Option<HeldOut>, Failure> {
        let measured = evaluate::held_out(&self.session, world, &mut self.reporter, &mut self.patience);
        Ok(patience::dropped(measured)?.unwrap_or_else(|why| {
            self.reporter.line(&format!("the held-out evaluation is {why}"));
            self.stopped = true;
            None
        }))
    }

    /// The updates that are left, each with its line and its checkpoint.
    fn updates(&mut self, world: &World, course: Course, made: u64, before: Option<HeldOut>) -> Result<(), Failure> {
        let steps = self.loaded.run.run.steps;
        let left = steps.saturating_sub(made);
        self.reporter.expect(&self.session.lengths_ahead(world, left), left, steps);
        for step in made + 1..=steps {
            self.stopped = course.stop_after.is_some_and(|last| step > last) || self.saves.stop_requested(world);
            if self.stopped {
                break;
            }
            self.records.step(world, step)?;
            let cursor = self.session.cursor.clone();
            let mut round = match self.session.round.take() {
                Some(round) => round,
                None => self.session.next_round(world),
            };
            self.patience.step(self.tally.last_step_s());
            let mut unrewarded = false;
            let mut desk = Desk {
                reporter: &mut self.reporter,
                tally: &mut self.tally,
                observer: &mut self.observer,
                patience: &self.patience,
                unrewarded: &mut unrewarded,
            };
            let outcome = step::one_step(&mut self.session, world, &mut desk, &mut round, step);
            self.patience.rest();
            self.records.stepped(world)?;
            let outcome = match patience::dropped(outcome) {
                Err(failure) if unrewarded => {
                    self.session.cursor = cursor;
                    return Err(self.kept(world, before, step, failure));
                }
                outcome => outcome?,
            };
            match outcome {
                Ok(done) => {
                    round.made += 1;
                    self.session.round = Some(round).filter(|round| round.made < self.session.updates_per_group);
                    let done = Step { memory: self.records.step_memory(), ..done };
                    self.reporter.step(&done, steps)?;
                    self.tally.stepped(done);
                }
                Err(why) => {
                    self.reporter.line(&format!("update {step} is {why}"));
                    self.stopped = true;
                    // Groups that an update was made of stay as they are frozen; others run again from the start.
                    if round.made == 0 {
                        self.session.cursor = cursor;
                    } else {
                        self.session.round = Some(round);
                    }
                    break;
                }
            }
            if self.saves.due(step) {
                self.save(world, before)?;
            }
        }
        Ok(())
    }

    /// Saves what was learnt before update `step`, which has failed on all ranks alike, and gives the failure back.
    fn kept(&mut self, world: &World, before: Option<HeldOut>, step: u64, failure: Failure) -> Failure {
        if step == 1 {
            return failure;
        }
        if let Err(another) = self.save(world, before) {
            return another;
        }
        self.reporter.line(&format!(
            "saved after update {}; once rewards can be had again, go on with `longstraw train --resume` in the same way",
            step - 1
        ));
        failure
    }

    fn save(&mut self, world: &World, before: Option<HeldOut>) -> Result<(), Failure> {
        let Way { loaded, session, saves, reporter, patience, .. } = self;
        patience.save(|| saves.save(session, loaded, world, reporter, before))
    }

    /// Saves what came out, and what it was.
    fn end(
        mut self,
        world: &World,
        held_out: [Option<HeldOut>; 2],
        begun: bool,
        earlier: u64,
    ) -> Result<Finished, Failure> {
        let (made, steps) = (self.tally.steps(), self.loaded.run.run.steps);
        // What the last save takes is no part of the updates.
        let recorded = self.records.gathered(&self.session, world);
        world.tracker().enter(Phase::Save);
        if self.stopped && begun {
            self.save(world, held_out[0])?;
        } else if !self.stopped {
            self.session.save(self.loaded, world)?;
        }
        let Way { loaded, session, saves, reporter, records, tally, observer, patience, stopped } = self;
        patience.end(world);
        let receipt = tally.receipt(&session, loaded, world, held_out, recorded, observer.own_pages(), stopped);
        records.end(world)?;
        if let Some(note) = saves.end(world, stopped, made > earlier)? {
            reporter.line(note);
        }
        if stopped {
            reporter.line(&format!(
                "stopped after update {made} of {steps}, as asked; go on with `longstraw train --resume` in the same way"
            ));
        }
        Ok(Finished { receipt, session, reporter })
    }
}
