//! Where each rank is, for failures and panics to name and for records to follow; heartbeats, deadlines, and who lags
//! when a job stands still.

mod deadline;
mod heartbeat;
mod peers;

use std::cell::RefCell;
use std::fmt::Debug;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

pub use deadline::{Pace, Patience};
pub use heartbeat::{Beat, Heard, Hearts};
pub use peers::{Peers, Sight, Verdict};

use crate::runtime::failure::{Failure, Phase, Site};
use crate::runtime::units::{LayerIndex, Rank};

/// Where a rank is. Clones share one entry, also across threads, so a panic hook reads what the trainer writes.
#[derive(Clone, Debug, Default)]
pub struct Place(Arc<Entries>);

#[derive(Debug)]
struct Entries {
    rank: AtomicUsize,
    phase: AtomicUsize,
    layer: AtomicI64,
    /// The model's last layer; negative while no model is known.
    top: AtomicI64,
    /// Borders passed so far.
    borders: AtomicU64,
    /// Calls in which this rank waits for others, one inside another.
    waits: AtomicUsize,
    /// Messages go from this rank's GPU to others'.
    linked: AtomicBool,
}

impl Default for Entries {
    fn default() -> Self {
        Entries {
            rank: AtomicUsize::new(0),
            phase: AtomicUsize::new(0),
            layer: AtomicI64::new(-1),
            top: AtomicI64::new(-1),
            borders: AtomicU64::new(0),
            waits: AtomicUsize::new(0),
            linked: AtomicBool::new(false),
        }
    }
}

/// A rank's place at one moment, as its watchdog looks at it from another thread.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Moment {
    /// Where it is.
    pub site: Site,
    /// Borders passed so far: while they are the same, it has not moved.
    pub borders: u64,
    /// Whether it waits for other ranks.
    pub waits: bool,
    /// Whether it may wait for other ranks inside its GPU, where no call of the host tells of it.
    pub linked: bool,
}

/// A rank waits for others for as long as this lives.
#[derive(Debug)]
pub struct Waiting(Place);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.0.waits.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Place {
    /// Where the rank is now.
    #[must_use]
    pub fn site(&self) -> Site {
        let phase = self.0.phase.load(Ordering::Relaxed);
        Site {
            rank: Rank(self.0.rank.load(Ordering::Relaxed)),
            phase: Phase::ALL.get(phase).copied().unwrap_or(Phase::Start),
            layer: usize::try_from(self.0.layer.load(Ordering::Relaxed)).ok().map(LayerIndex),
        }
    }

    /// The place at this moment. Its parts are read one after another; whoever needs more asks again a moment later.
    #[must_use]
    pub fn moment(&self) -> Moment {
        let borders = self.0.borders.load(Ordering::Acquire);
        let waits = self.0.waits.load(Ordering::Relaxed) > 0;
        Moment { site: self.site(), borders, waits, linked: self.0.linked.load(Ordering::Relaxed) }
    }

    /// From here on messages go from this rank's GPU to others': any call that waits for its GPU may wait for them.
    pub fn link(&self) {
        self.0.linked.store(true, Ordering::Relaxed);
    }

    /// The rank goes into a call that ends only when other ranks come too.
    #[must_use]
    pub fn waits(&self) -> Waiting {
        self.0.waits.fetch_add(1, Ordering::Relaxed);
        Waiting(self.clone())
    }

    /// Whether it is in the last layer, behind which the head runs.
    #[must_use]
    pub fn in_top_layer(&self) -> bool {
        let layer = self.0.layer.load(Ordering::Relaxed);
        layer >= 0 && layer == self.0.top.load(Ordering::Relaxed)
    }
}

/// A border that a rank passes on its way through a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Border {
    /// A phase begins; the one before has ended.
    Phase(Phase),
    /// A layer of the current phase begins; the one before has ended.
    Layer(LayerIndex),
    /// Phase and layer have ended, and none follows at once.
    StepEnd,
}

/// What follows a rank through its steps: a trace, peaks by phase. Told of a border before anything runs behind it.
pub trait Recorder: Debug {
    /// The rank passes a border.
    fn pass(&mut self, border: Border);
}

impl<R: Recorder> Recorder for Rc<RefCell<R>> {
    fn pass(&mut self, border: Border) {
        self.borrow_mut().pass(border);
    }
}

/// What a rank asks before each layer: whether to go on.
pub type LayerCheck = Rc<dyn Fn() -> Result<(), Failure>>;

/// Where this rank writes where it is; clones share all of it.
#[derive(Clone, Default)]
pub struct Tracker {
    place: Place,
    recorders: Rc<RefCell<Vec<Box<dyn Recorder>>>>,
    layer_check: Rc<RefCell<Option<LayerCheck>>>,
}

impl Debug for Tracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tracker").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Tracker {
    /// Names the rank; done once, when the world is known.
    pub fn set_rank(&self, rank: Rank) {
        self.place.0.rank.store(rank.0, Ordering::Relaxed);
    }

    /// Says how many layers the model has.
    pub fn set_layers(&self, layers: usize) {
        self.place.0.top.store(i64::try_from(layers).unwrap_or(0) - 1, Ordering::Relaxed);
    }

    /// Who is told of every border from here on, in the place of those before.
    pub fn set_recorders(&self, recorders: Vec<Box<dyn Recorder>>) {
        self.recorders.replace(recorders);
    }

    fn notify(&self, border: Border) {
        self.recorders.borrow_mut().iter_mut().for_each(|recorder| recorder.pass(border));
    }

    /// Enters a phase; no layer is current any more.
    pub fn enter(&self, phase: Phase) {
        self.notify(Border::Phase(phase));
        self.place.0.layer.store(-1, Ordering::Relaxed);
        self.place.0.phase.store(phase.index(), Ordering::Relaxed);
        self.pass();
        tracing::debug!("{phase}");
    }

    /// What is asked before each layer from here on. All ranks that share a prompt go through the same layers in the same
    /// order, so it may be a layer_check to all of them.
    pub fn set_layer_check(&self, layer_check: Option<LayerCheck>) {
        self.layer_check.replace(layer_check);
    }

    /// Enters a layer of the current phase.
    ///
    /// # Errors
    /// When the answer to what is asked before a layer is not to go on.
    pub fn layer(&self, layer: LayerIndex) -> Result<(), Failure> {
        let layer_check = self.layer_check.borrow().clone();
        layer_check.map_or(Ok(()), |layer_check| layer_check())?;
        self.notify(Border::Layer(layer));
        self.place.0.layer.store(i64::try_from(layer.0).unwrap_or(-1), Ordering::Relaxed);
        self.pass();
        tracing::debug!("{}, layer {layer}", self.site().phase);
        Ok(())
    }

    /// The rank is where it was, and goes on: it waits for something that has an end of its own.
    pub fn report_alive(&self) {
        self.pass();
    }

    /// A step has ended, and what comes next is no part of one. Failures still name the last phase.
    pub fn end_step(&self) {
        self.notify(Border::StepEnd);
        self.pass();
    }

    /// Counted after the place is written, so that who sees the new count sees the new place.
    fn pass(&self) {
        self.place.0.borders.fetch_add(1, Ordering::Release);
    }

    /// Where this rank is now.
    #[must_use]
    pub fn site(&self) -> Site {
        self.place.site()
    }

    /// The entry behind it, for another thread to read.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }
}

/// Seconds spent, by name, in the order of first use.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    spent: Vec<(&'static str, f64)>,
}

impl Clock {
    /// Adds the time that `work` takes to `name`.
    pub fn time<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.add(name, start.elapsed().as_secs_f64());
        result
    }

    /// Adds seconds to `name`.
    pub fn add(&mut self, name: &'static str, seconds: f64) {
        match self.spent.iter_mut().find(|(known, _)| *known == name) {
            Some((_, total)) => *total += seconds,
            None => self.spent.push((name, seconds)),
        }
    }

    /// Seconds by name.
    #[must_use]
    pub fn seconds(&self) -> &[(&'static str, f64)] {
        &self.spent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_names_rank_phase_and_layer() {
        let tracker = Tracker::default();
        tracker.set_rank(Rank(5));
        tracker.enter(Phase::Replay);
        tracker.layer(LayerIndex(17)).expect("nothing is asked");
        assert_eq!(tracker.site().to_string(), "rank 5, replay, layer 17");
        tracker.enter(Phase::Finalize);
        assert_eq!(tracker.site().to_string(), "rank 5, finalize");
    }

    #[test]
    fn every_border_moves_a_rank_and_waits_may_lie_in_one_another() {
        let tracker = Tracker::default();
        let borders = || tracker.place().moment().borders;
        assert_eq!(borders(), 0);
        tracker.enter(Phase::Capture);
        tracker.layer(LayerIndex(0)).expect("nothing is asked");
        tracker.end_step();
        assert_eq!(borders(), 3);
        let outer = tracker.place().waits();
        drop(tracker.place().waits());
        assert!(tracker.place().moment().waits);
        drop(outer);
        assert!(!tracker.place().moment().waits);
    }

    #[test]
    fn a_rank_whose_gpu_is_linked_stays_so_and_waits_no_more_than_before() {
        let tracker = Tracker::default();
        assert!(!tracker.place().moment().linked);
        tracker.place().link();
        tracker.enter(Phase::Capture);
        assert_eq!((tracker.place().moment().linked, tracker.place().moment().waits), (true, false));
    }

    #[derive(Debug, Default)]
    struct Ears(Vec<Border>);

    impl Recorder for Ears {
        fn pass(&mut self, border: Border) {
            self.0.push(border);
        }
    }

    #[test]
    fn recorders_hear_every_border_until_others_take_their_place() {
        let (tracker, heard) = (Tracker::default(), Rc::new(RefCell::new(Ears::default())));
        tracker.enter(Phase::Start);
        tracker.set_recorders(vec![Box::new(heard.clone())]);
        tracker.enter(Phase::Score);
        tracker.layer(LayerIndex(1)).expect("nothing is asked");
        tracker.end_step();
        tracker.set_recorders(Vec::new());
        tracker.enter(Phase::Save);
        let borders = [Border::Phase(Phase::Score), Border::Layer(LayerIndex(1)), Border::StepEnd];
        assert_eq!(heard.borrow().0, borders);
    }

    #[test]
    fn the_top_layer_is_the_last_of_the_model() {
        let tracker = Tracker::default();
        assert!(!tracker.place().in_top_layer(), "no layer is current");
        tracker.set_layers(3);
        tracker.layer(LayerIndex(1)).expect("nothing is asked");
        assert!(!tracker.place().in_top_layer());
        tracker.layer(LayerIndex(2)).expect("nothing is asked");
        assert!(tracker.place().in_top_layer());
    }
}
