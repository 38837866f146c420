//! The training loop: one step from top to bottom, one call a phase.

mod evaluate;
mod groups;
mod memory;
mod patience;
mod records;
mod saves;
mod setup;
mod tally;
mod trace;
mod whole;

use std::time::Instant;

pub use setup::Session;

use crate::config::Loaded;
use crate::failure::{Failure, Phase};
use crate::handoff::{Captured, Scores, Work};
use crate::model::lora::Adapters;
use crate::objective;
use crate::replay::Goal;
use crate::report::{HeldOut, Receipt, Reporter, Seconds, Step};
use crate::tensor::gpu;
use crate::world::World;
use crate::{capture, finalize, replay, score};
use groups::Batch;
use patience::Patience;
use records::Records;
use saves::Saves;
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
        let mut way = Way { loaded, session, saves, reporter, records, tally, patience, stopped: false };
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
            self.stopped = course.stop_after.is_some_and(|last| step > last) || self.saves.asked_to_stop(world);
            if self.stopped {
                break;
            }
            self.records.step(world, step)?;
            let cursor = self.session.cursor.clone();
            self.patience.step(self.tally.last_step_s());
            let outcome = one_step(&mut self.session, world, &mut self.reporter, &mut self.tally, &self.patience, step);
            self.patience.rest();
            self.records.stepped(world)?;
            match patience::dropped(outcome)? {
                Ok(done) => {
                    let done = Step { memory: self.records.step_memory(), ..done };
                    self.reporter.step(&done, steps)?;
                    self.tally.stepped(done);
                }
                Err(why) => {
                    self.reporter.line(&format!("update {step} is {why}"));
                    (self.session.cursor, self.stopped) = (cursor, true);
                    break;
                }
            }
            if self.saves.due(step) {
                self.save(world, before)?;
            }
        }
        Ok(())
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
        world.board().enter(Phase::Save);
        if self.stopped && begun {
            self.save(world, held_out[0])?;
        } else if !self.stopped {
            self.session.save(self.loaded, world)?;
        }
        let Way { loaded, session, saves, reporter, records, tally, patience, stopped } = self;
        patience.end(world);
        let receipt = tally.receipt(&session, loaded, world, held_out, recorded, stopped);
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

/// One update over `dp_size × grad_accum` groups.
fn one_step(
    session: &mut Session,
    world: &World,
    reporter: &mut Reporter,
    tally: &mut Tally,
    patience: &Patience,
    step: u64,
) -> Result<Step, Failure> {
    let start = Instant::now();
    let batch = session.next_batch(world);
    let replayed = all_groups(session, world, &batch, reporter, tally, step);
    patience.agree(world, replayed)?;
    world.board().enter(Phase::Finalize);
    let local = finalize::take(&session.adapters);
    let summed =
        tally.clock.time("finalize", || finalize::run(&world.all, local, &session.adapters, session.max_grad_norm));
    let reduced = world.agree(summed)?;
    let numbers = tally.batch_numbers(world);
    if !numbers.loss.is_finite() {
        return world.agree(Err(finalize::Error::Number { what: "loss", value: numbers.loss }.into()));
    }
    world.board().enter(Phase::Update);
    let learning_rate = session.learning_rate(step);
    tally.clock.time("update", || session.optimizer.update(&mut session.adapters, &reduced, learning_rate));
    world.agree(finalize::check(&session.adapters, learning_rate))?;
    let seconds = Seconds { total: start.elapsed().as_secs_f64(), ..tally.step_seconds() };
    Ok(batch.told(Step {
        step,
        gradient: session.gradient.to_string(),
        grad_norm: reduced.norm(),
        learning_rate,
        prompts: batch.names.clone(),
        seconds,
        ..numbers.into_step(session.reference.is_some())
    }))
}

/// Captures, scores and replays this rank's groups, one after another.
fn all_groups(
    session: &Session,
    world: &World,
    batch: &Batch,
    reporter: &mut Reporter,
    tally: &mut Tally,
    step: u64,
) -> Result<(), Failure> {
    for (count, group) in batch.mine.iter().enumerate() {
        let (at, of, name) = (count + 1, batch.mine.len(), &group.name);
        reporter.now(&format!("step {step}: prompt {at} of {of} on this rank ({name})"));
        if session.paged {
            one_group(session, world, batch, group, tally)?;
        } else {
            whole::one_group(session, world, batch, group, tally)?;
        }
    }
    Ok(())
}

/// Captures, scores and replays one group; gradients add up in the adapters.
fn one_group(
    session: &Session,
    world: &World,
    batch: &Batch,
    group: &groups::Scored,
    tally: &mut Tally,
) -> Result<(), Failure> {
    let work = session.work(&group.prompt_ids, &group.answers, world);
    world.board().enter(Phase::Capture);
    let pass = session.pass(world, &session.adapters);
    tally.clock.time("pinning", || capture::make_room(&pass, &work, session.keeping))?;
    let weights: Vec<f64> = group.answers.iter().map(|answer| batch.weight(&session.terms, answer.len())).collect();
    let reference = match &session.reference {
        None => None,
        Some(reference) => {
            let work = session.work_without_tail(&group.prompt_ids, &group.answers, world);
            let captured = captured(session, world, &work, reference, tally)?;
            Some(scored(session, world, &work, &captured, reference, tally)?)
        }
    };
    let captured = captured(session, world, &work, &session.adapters, tally)?;
    let old = scored(session, world, &work, &captured, &session.adapters, tally)?;
    let goal = Goal {
        old: &old,
        reference: reference.as_ref(),
        advantages: &group.advantages,
        weights: &weights,
        terms: &session.terms,
    };
    world.board().enter(Phase::Replay);
    let done = replay::run(&pass, &session.head, &work, &captured, goal, world.board())?;
    session.count_gradients(world);
    tally.replayed(&done, &work, &captured, group, session)?;
    Ok(())
}

fn captured(
    session: &Session,
    world: &World,
    work: &Work,
    adapters: &Adapters,
    tally: &mut Tally,
) -> Result<Captured, Failure> {
    world.board().enter(Phase::Capture);
    let pass = session.pass(world, adapters);
    tally.clock.time("capture", || {
        let captured = capture::run(&pass, work, session.keeping, world.board())?;
        // A phase's seconds are those until it is done, not until it has been asked for.
        gpu::synchronize(session.decoder.device())?;
        Ok(captured)
    })
}

fn scored(
    session: &Session,
    world: &World,
    work: &Work,
    captured: &Captured,
    adapters: &Adapters,
    tally: &mut Tally,
) -> Result<Scores, Failure> {
    world.board().enter(Phase::Score);
    let pass = session.pass(world, adapters);
    tally.clock.time("score", || {
        let scores = score::run(&pass, &session.head, work, captured, world.board())?;
        gpu::synchronize(session.decoder.device())?;
        Ok(scores)
    })
}

/// Advantages of a group under the session's rule.
fn advantages(session: &Session, rewards: &[Option<f64>]) -> Vec<Option<f64>> {
    objective::advantages(rewards, session.normalize)
}
