//! Where each rank is, for messages and records; heartbeats, deadlines, and which rank has stalled.

mod deadline;
mod heartbeat;
mod peers;
mod site;
mod stall;
mod tracker;

use std::time::Instant;

pub use deadline::{Progress, StallLimits};
pub use heartbeat::{Heartbeat, HeartbeatFiles, Reading};
pub use peers::{Peers, Visibility};
pub use site::{SharedSite, SiteSnapshot, Waiting};
pub use stall::Stall;
pub use tracker::{Border, LayerCheck, Recorder, Tracker};

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
