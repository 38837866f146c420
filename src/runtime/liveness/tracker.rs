//! How a rank records its way through a step.

use std::cell::RefCell;
use std::fmt::Debug;
use std::rc::Rc;

use super::site::SharedSite;
use crate::runtime::failure::{Failure, Phase, Site};
use crate::runtime::units::{LayerIndex, Rank};

/// A border that a rank passes in a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Border {
    /// A phase begins; the one before has ended.
    Phase(Phase),
    /// A layer of the current phase begins; the one before has ended.
    Layer(LayerIndex),
    /// Phase and layer have ended, and no other follows at once.
    StepEnd,
}

/// Follows a rank through its steps: a trace, or peaks by phase.
pub trait Recorder: Debug {
    /// The rank passes a border; called before the work after the border starts.
    fn pass(&mut self, border: Border);
}

impl<R: Recorder> Recorder for Rc<RefCell<R>> {
    fn pass(&mut self, border: Border) {
        self.borrow_mut().pass(border);
    }
}

/// Called before each layer; an error ends the phase there.
pub type LayerCheck = Rc<dyn Fn() -> Result<(), Failure>>;

/// Records where this rank is; clones share all of it.
#[derive(Clone, Default)]
pub struct Tracker {
    site: SharedSite,
    recorders: Rc<RefCell<Vec<Box<dyn Recorder>>>>,
    layer_check: Rc<RefCell<Option<LayerCheck>>>,
}

impl Debug for Tracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tracker").field("site", &self.site).finish_non_exhaustive()
    }
}

impl Tracker {
    /// Sets the rank; done once, when the world is known.
    pub fn set_rank(&self, rank: Rank) {
        self.site.set_rank(rank);
    }

    /// Sets the number of layers of the model.
    pub fn set_layers(&self, layers: usize) {
        self.site.set_layers(layers);
    }

    /// Replaces the recorders, which are called at every border.
    pub fn set_recorders(&self, recorders: Vec<Box<dyn Recorder>>) {
        self.recorders.replace(recorders);
    }

    fn notify(&self, border: Border) {
        self.recorders.borrow_mut().iter_mut().for_each(|recorder| recorder.pass(border));
    }

    /// Enters a phase; no layer is current any more.
    pub fn enter(&self, phase: Phase) {
        self.notify(Border::Phase(phase));
        self.site.enter_phase(phase);
        tracing::debug!("{phase}");
    }

    /// Replaces the check before each layer. The check may be a collective: all ranks that share a prompt pass the same
    /// layers in the same order.
    pub fn set_layer_check(&self, check: Option<LayerCheck>) {
        self.layer_check.replace(check);
    }

    /// Enters a layer of the current phase.
    ///
    /// # Errors
    /// When the layer check fails.
    pub fn layer(&self, layer: LayerIndex) -> Result<(), Failure> {
        let check = self.layer_check.borrow().clone();
        check.map_or(Ok(()), |check| check())?;
        self.notify(Border::Layer(layer));
        self.site.enter_layer(layer);
        tracing::debug!("{}, layer {layer}", self.site().phase);
        Ok(())
    }

    /// Restarts the deadline at the same site: the rank waits for something that has its own bound.
    pub fn report_alive(&self) {
        self.site.count_border();
    }

    /// Ends a step. Failures still name the last phase.
    pub fn end_step(&self) {
        self.notify(Border::StepEnd);
        self.site.count_border();
    }

    /// Where this rank is now.
    #[must_use]
    pub fn site(&self) -> Site {
        self.site.site()
    }

    /// The shared value, for other threads to read.
    #[must_use]
    pub fn shared_site(&self) -> &SharedSite {
        &self.site
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
        tracker.layer(LayerIndex(17)).expect("no check is set");
        assert_eq!(tracker.site().to_string(), "rank 5, replay, layer 17");
        tracker.enter(Phase::Finalize);
        assert_eq!(tracker.site().to_string(), "rank 5, finalize");
    }

    #[test]
    fn every_border_moves_a_rank_and_waits_may_be_nested() {
        let tracker = Tracker::default();
        let borders = || tracker.shared_site().snapshot().borders;
        assert_eq!(borders(), 0);
        tracker.enter(Phase::Capture);
        tracker.layer(LayerIndex(0)).expect("no check is set");
        tracker.end_step();
        assert_eq!(borders(), 3);
        let outer = tracker.shared_site().begin_wait();
        drop(tracker.shared_site().begin_wait());
        assert!(tracker.shared_site().snapshot().waits);
        drop(outer);
        assert!(!tracker.shared_site().snapshot().waits);
    }

    #[test]
    fn a_linked_gpu_stays_linked_and_is_no_wait_by_itself() {
        let tracker = Tracker::default();
        assert!(!tracker.shared_site().snapshot().linked);
        tracker.shared_site().set_gpu_linked();
        tracker.enter(Phase::Capture);
        assert_eq!((tracker.shared_site().snapshot().linked, tracker.shared_site().snapshot().waits), (true, false));
    }

    #[derive(Debug, Default)]
    struct Borders(Vec<Border>);

    impl Recorder for Borders {
        fn pass(&mut self, border: Border) {
            self.0.push(border);
        }
    }

    #[test]
    fn recorders_see_every_border_until_others_replace_them() {
        let (tracker, seen) = (Tracker::default(), Rc::new(RefCell::new(Borders::default())));
        tracker.enter(Phase::Start);
        tracker.set_recorders(vec![Box::new(seen.clone())]);
        tracker.enter(Phase::Score);
        tracker.layer(LayerIndex(1)).expect("no check is set");
        tracker.end_step();
        tracker.set_recorders(Vec::new());
        tracker.enter(Phase::Save);
        let borders = [Border::Phase(Phase::Score), Border::Layer(LayerIndex(1)), Border::StepEnd];
        assert_eq!(seen.borrow().0, borders);
    }

    #[test]
    fn the_top_layer_is_the_last_of_the_model() {
        let tracker = Tracker::default();
        assert!(!tracker.shared_site().in_top_layer(), "no layer is current");
        tracker.set_layers(3);
        tracker.layer(LayerIndex(1)).expect("no check is set");
        assert!(!tracker.shared_site().in_top_layer());
        tracker.layer(LayerIndex(2)).expect("no check is set");
        assert!(tracker.shared_site().in_top_layer());
    }
}
