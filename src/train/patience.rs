//! What becomes of a step in whose middle a signal asks for a stop: it is finished if its end can be foreseen to come in
//! time, else all ranks drop it at the same layer, and its prompts run again in the next run.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::config::Loaded;
use crate::runtime::failure::{Classified, Exit, Failure};
use crate::runtime::units::Rank;
use crate::world::{Axis, World, time_left};

/// A step was dropped.
#[derive(Debug, thiserror::Error)]
#[error(
    "dropped {spent_s:.1} s into it: {why}, and a signal that asks for a stop leaves {grace_s} s (run.grace_sec); its \
     prompts run again"
)]
struct Dropped {
    spent_s: f64,
    why: String,
    grace_s: u64,
}

impl Classified for Dropped {
    fn exit(&self) -> Exit {
        Exit::Requeue
    }
}

/// Tells a dropped attempt, with why, from a failed one.
pub(super) fn dropped<T>(attempt: Result<T, Failure>) -> Result<Result<T, Failure>, Failure> {
    match attempt {
        Err(failure) if failure.exit() != Exit::Requeue => Err(failure),
        attempt => Ok(attempt),
    }
}

/// How sure a step must be of its end: it may take this much longer than the one before.
const LONGER: f64 = 1.1;
/// Beyond this many times the step before, the end cannot be foreseen.
const FORESEEN: f64 = 1.5;
/// Seconds that a save may take, where none has been made yet.
const SAVE_S: f64 = 5.0;

/// The patience of a run, asked at every layer's border.
pub(super) struct Patience {
    watch: Rc<Watch>,
}

struct Watch {
    /// The ranks that share a prompt, on a communicator that nothing else uses.
    axis: Axis,
    grace: Duration,
    /// When the step began; `None` between steps.
    began: Cell<Option<Instant>>,
    /// Seconds of the step before, if there was one.
    expected_s: Cell<Option<f64>>,
    /// Seconds of the last save.
    save_s: Cell<f64>,
    /// Whether it has been said that this step is finished.
    finishing: Cell<bool>,
}

impl Patience {
    /// From here on every layer of every phase asks, until [`Patience::end`].
    pub(super) fn begin(loaded: &Loaded, world: &World) -> Patience {
        let watch = Rc::new(Watch {
            axis: world.cp.duplicate(),
            grace: Duration::from_secs(loaded.rank.grace_sec),
            began: Cell::new(None),
            expected_s: Cell::new(None),
            save_s: Cell::new(0.0),
            finishing: Cell::new(false),
        });
        let asked = watch.clone();
        world.tracker().set_layer_check(Some(Rc::new(move || asked.border())));
        Patience { watch }
    }

    /// A step begins, or another piece of work that can be dropped whole; the one before took so long.
    pub(super) fn step(&mut self, expected_s: Option<f64>) {
        self.watch.began.set(Some(Instant::now()));
        self.watch.expected_s.set(expected_s);
        self.watch.finishing.set(false);
    }

    /// It has ended, and what comes is not dropped in its middle.
    pub(super) fn rest(&mut self) {
        self.watch.began.set(None);
    }

    /// Saves, and remembers how long that takes.
    pub(super) fn save<T>(&mut self, save: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let saved = save();
        self.watch.save_s.set(start.elapsed().as_secs_f64());
        saved
    }

    /// Every rank of the world comes here when its part of a step is done: one prompt's ranks that drop it, drop it for
    /// all.
    ///
    /// # Errors
    /// When it is dropped, or has failed here: then the others are left waiting, and the error has to end the job.
    pub(super) fn agree<T>(&self, world: &World, attempt: Result<T, Failure>) -> Result<T, Failure> {
        let attempt = dropped(attempt)?;
        let by_any = world.any(attempt.is_err());
        let done = attempt?;
        if by_any { Err(self.watch.dropped("the ranks of another prompt have dropped it")) } else { Ok(done) }
    }

    /// The step is dropped on all ranks alike, without a question: something in it has given up because of a stop.
    pub(super) fn given_up(&self, why: &str) -> Failure {
        self.watch.dropped(why)
    }

    /// Nothing asks any more.
    pub(super) fn end(self, world: &World) {
        world.tracker().set_layer_check(None);
        // With it goes its communicator, which must not outlive MPI.
        drop(self.watch);
    }
}

impl Watch {
    /// One small message a layer, and two more once a signal has come. Rank 0 decides, and at every border anew: a step may
    /// take longer than was foreseen.
    fn border(&self) -> Result<(), Failure> {
        if self.began.get().is_none() {
            return Ok(());
        }
        let own = time_left(self.grace);
        let own_ms = own.map_or(0, |left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX - 1) + 1);
        let least_ms = self.axis.gather_numbers(own_ms).into_iter().filter(|&left| left > 0).min();
        let Some(least_ms) = least_ms else { return Ok(()) };
        let left_s = Duration::from_millis(least_ms - 1).as_secs_f64();
        let missing_s = self.missing_s();
        let finish = missing_s.is_some_and(|missing_s| missing_s <= left_s);
        if self.axis.gather_numbers(u64::from(finish)).first() == Some(&1) {
            if !self.finishing.replace(true) && self.axis.rank() == Rank(0) {
                tracing::info!("asked to stop: {left_s:.1} s are left, this step is finished");
            }
            return Ok(());
        }
        let why = missing_s.map_or("its end could not be foreseen".to_owned(), |missing_s| {
            format!("its end was {missing_s:.1} s away, with {left_s:.1} s left")
        });
        Err(self.dropped(&why))
    }

    fn dropped(&self, why: &str) -> Failure {
        Dropped { spent_s: self.spent_s(), why: why.to_owned(), grace_s: self.grace.as_secs() }.into()
    }

    fn spent_s(&self) -> f64 {
        self.began.get().map_or(0.0, |began| began.elapsed().as_secs_f64())
    }

    /// Seconds until the step has ended and is saved, if they can be foreseen.
    fn missing_s(&self) -> Option<f64> {
        let (spent_s, expected_s) = (self.spent_s(), self.expected_s.get()?);
        let step_s =
            (spent_s < expected_s * FORESEEN).then(|| (expected_s * LONGER - spent_s).max(expected_s * 0.1))?;
        Some(step_s + (2.0 * self.save_s.get()).max(SAVE_S))
    }
}
