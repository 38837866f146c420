//! The learning rate.

use crate::config::{RunConfig, Schedule};
use crate::runtime::units::float;

/// The learning rate by step.
pub(super) struct LearningRate {
    peak: f64,
    schedule: Schedule,
    warmup: u64,
    steps: u64,
}

impl LearningRate {
    /// As the configuration says.
    pub(super) fn of(config: &RunConfig) -> LearningRate {
        let optimizer = &config.optimizer;
        LearningRate {
            peak: optimizer.lr,
            schedule: optimizer.schedule,
            warmup: optimizer.warmup_steps,
            steps: config.run.steps,
        }
    }

    /// Of step 1, 2, …: a linear warm-up, then constant, or down to 0 at the end along a line or a cosine.
    pub(super) fn at(&self, step: u64) -> f64 {
        if step <= self.warmup {
            return self.peak * float(step) / float(self.warmup);
        }
        let through = float(step - self.warmup - 1) / float((self.steps - self.warmup).max(1));
        match self.schedule {
            Schedule::Constant => self.peak,
            Schedule::Linear => self.peak * (1.0 - through),
            Schedule::Cosine => self.peak * 0.5 * (1.0 + (std::f64::consts::PI * through).cos()),
        }
    }
}
