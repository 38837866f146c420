//! What becomes of work in whose middle a signal requests a stop.
//!
//! The work is finished where its end can be foreseen to come within the grace period. Otherwise all ranks drop the work at
//! the same layer, and its prompts run again in the next run. The policy decides; the loop acts on the [`Outcome`].
//!
//! [`Outcome`]: super::outcome::Outcome

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::outcome::Interruption;
use crate::config::Loaded;
use crate::runtime::failure::{Classified, Exit, Failure};
use crate::runtime::units::Rank;
use crate::world::{Axis, World, time_left};

/// A step may take this much longer than the step before.
const LONGER: f64 = 1.1;
/// Beyond this many times the step before, the end of a step cannot be foreseen.
const FORESEEN: f64 = 1.5;
/// Seconds allowed for a save before the first save was measured.
const SAVE_S: f64 = 5.0;

/// Carries a decision to drop the work from a layer's border out of the phase. [`StopPolicy::settle`] turns the error into
/// [`Interruption::Dropped`]; no other code sees it.
#[derive(Debug, thiserror::Error)]
#[error("the work is dropped")]
struct DropWork;

impl Classified for DropWork {
    fn exit(&self) -> Exit {
        Exit::Requeue
    }
}

/// Decides at every layer's border whether the work in progress is finished or dropped.
pub(super) struct StopPolicy {
    shared: Rc<Shared>,
}

struct Shared {
    /// The ranks of one prompt, on a communicator that nothing else uses.
    axis: Axis,
    /// Seconds between the signal and the end of the process (`run.grace_sec`).
    grace: Duration,
    /// When the work began; `None` between two works.
    began: Cell<Option<Instant>>,
    /// Seconds that the same work took the last time.
    expected_s: Cell<Option<f64>>,
    /// Seconds of the last save; 0 before the first.
    save_s: Cell<f64>,
    /// Whether the log already says that the work is finished in spite of the signal.
    finishing: Cell<bool>,
    /// Why this rank's prompt has dropped the work.
    dropped: RefCell<Option<String>>,
}

impl StopPolicy {
    /// Checks at every layer of every phase from here to [`StopPolicy::close`].
    pub(super) fn open(loaded: &Loaded, world: &World) -> StopPolicy {
        let shared = Rc::new(Shared {
            axis: world.cp.duplicate(),
            grace: Duration::from_secs(loaded.rank.grace_sec),
            began: Cell::new(None),
            expected_s: Cell::new(None),
            save_s: Cell::new(0.0),
            finishing: Cell::new(false),
            dropped: RefCell::new(None),
        });
        let at_border = shared.clone();
        world.tracker().set_layer_check(Some(Rc::new(move || at_border.check())));
        StopPolicy { shared }
    }

    /// Runs work that can be dropped as a whole. `expected_s`: seconds that the same work took the last time.
    pub(super) fn droppable<T>(&self, expected_s: Option<f64>, work: impl FnOnce() -> T) -> T {
        self.shared.began.set(Some(Instant::now()));
        self.shared.expected_s.set(expected_s);
        self.shared.finishing.set(false);
        let done = work();
        self.shared.began.set(None);
        done
    }

    /// Runs a save and remembers its seconds.
    pub(super) fn time_save<T>(&self, save: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let saved = save();
        self.shared.save_s.set(start.elapsed().as_secs_f64());
        saved
    }

    /// Agrees over the world on one part of the work: where the ranks of one prompt have dropped it, all ranks drop it. What
    /// was settled before passes through.
    pub(super) fn settle<T>(&self, world: &World, part: Result<T, impl Into<Interruption>>) -> Result<T, Interruption> {
        match (part.map_err(Into::into), self.shared.dropped.take()) {
            (Err(Interruption::Failed(_)), Some(why)) => {
                let _ = world.any(true);
                Err(Interruption::Dropped { why })
            }
            (Err(settled_or_failed), _) => Err(settled_or_failed),
            (Ok(_), _) if world.any(false) => Err(self.drop_everywhere("the ranks of another prompt have dropped it")),
            (Ok(done), _) => Ok(done),
        }
    }

    /// Drops the work on all ranks alike, where all of them know that it cannot go on because of a stop.
    pub(super) fn drop_everywhere(&self, why: &str) -> Interruption {
        Interruption::Dropped { why: self.shared.describe(why) }
    }

    /// Nothing checks at layers any more.
    pub(super) fn close(self, world: &World) {
        world.tracker().set_layer_check(None);
        // The policy's communicator must not outlive MPI.
        drop(self.shared);
    }
}

impl Shared {
    /// One small message a layer, and one more once a signal has come. Rank 0 decides, and at every border anew: a step may
    /// take longer than was foreseen.
    fn check(&self) -> Result<(), Failure> {
        if self.began.get().is_none() {
            return Ok(());
        }
        // 0 stands for no signal.
        let own_ms =
            time_left(self.grace).map_or(0, |left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX - 1) + 1);
        let least_ms = self.axis.gather_numbers(own_ms).into_iter().filter(|&left| left > 0).min();
        let Some(least_ms) = least_ms else { return Ok(()) };
        let left_s = Duration::from_millis(least_ms - 1).as_secs_f64();
        let missing_s = self.missing_s();
        let finish = missing_s.is_some_and(|missing_s| missing_s <= left_s);
        if self.axis.gather_numbers(u64::from(finish)).first() == Some(&1) {
            if !self.finishing.replace(true) && self.axis.rank() == Rank(0) {
                tracing::info!("a stop is requested: {left_s:.1} s are left, this step is finished");
            }
            return Ok(());
        }
        let why = missing_s.map_or("its end could not be foreseen".to_owned(), |missing_s| {
            format!("its end was {missing_s:.1} s away, with {left_s:.1} s left")
        });
        self.dropped.replace(Some(self.describe(&why)));
        Err(DropWork.into())
    }

    fn describe(&self, why: &str) -> String {
        format!(
            "dropped {:.1} s into it: {why}, and a signal that requests a stop leaves {} s (run.grace_sec); its prompts run \
             again",
            self.spent_s(),
            self.grace.as_secs()
        )
    }

    fn spent_s(&self) -> f64 {
        self.began.get().map_or(0.0, |began| began.elapsed().as_secs_f64())
    }

    /// Seconds until the work has ended and is saved, where they can be foreseen.
    fn missing_s(&self) -> Option<f64> {
        let spent_s = self.spent_s();
        let expected_s = self.expected_s.get()?;
        let foreseen = spent_s < expected_s * FORESEEN;
        let rest_s = foreseen.then(|| (expected_s * LONGER - spent_s).max(expected_s * 0.1))?;
        Some(rest_s + (2.0 * self.save_s.get()).max(SAVE_S))
    }
}
