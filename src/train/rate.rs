//! The learning rate of each update.

use crate::config::{RunConfig, Schedule};
use crate::runtime::units::float;

/// The rate of update 1, 2, …: a linear warm-up, then constant, or down to 0 after the last update of the schedule along a
/// line or a cosine.
pub(super) fn learning_rate(config: &RunConfig, step: u64) -> f64 {
    let optimizer = &config.optimizer;
    let peak = optimizer.lr;
    let warmup = optimizer.warmup_steps;
    if step <= warmup {
        return peak * float(step) / float(warmup);
    }
    let decay = config.schedule_steps().saturating_sub(warmup).max(1);
    let through = (float(step - warmup - 1) / float(decay)).min(1.0);
    match optimizer.schedule {
        Schedule::Constant => peak,
        Schedule::Linear => peak * (1.0 - through),
        Schedule::Cosine => peak * 0.5 * (1.0 + (std::f64::consts::PI * through).cos()),
    }
}
