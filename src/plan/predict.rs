//! The prediction of a step on one group, by published rates or by what was measured on the machine.

use super::measured::{self, MeasuredRates};
use super::offload_choice::OffloadChoice;
use super::operations::Work;
use super::seconds::{PhaseSeconds, Rates, Seconds, phase_seconds};
use super::work::{Repeats, StepWork};
use crate::config::RunConfig;
use crate::model::shape::Shape;
use crate::runtime::failure::Phase;
use crate::runtime::units::float;

/// What a prediction follows.
#[derive(Clone, Debug)]
pub enum Pace {
    /// Published rates, or others from the command line, of which a phase reaches a share.
    Published(Rates),
    /// What was measured on the machine itself.
    Measured(Box<MeasuredRates>),
}

impl Pace {
    /// Rates one by one.
    #[must_use]
    pub fn rates(&self) -> &Rates {
        match self {
            Pace::Published(rates) => rates,
            Pace::Measured(measured) => &measured.rates,
        }
    }
}

/// Predicts a step on one group in a world of `ranks`; `None` for the conventional schedule, which has no model of time.
pub(super) fn predict(
    config: &RunConfig,
    ranks: u64,
    shape: &Shape,
    choice: OffloadChoice,
    pace: &Pace,
) -> Option<Seconds> {
    if !config.memory.prompt_no_grad {
        return None;
    }
    let step = StepWork::new(config, ranks, shape, choice);
    let rates = *pace.rates();
    let timed = |(phase, work): (Phase, Work), repeats: Repeats| {
        let at_rates = phase_seconds(phase, &work, &rates);
        match pace {
            Pace::Published(_) => at_rates,
            Pace::Measured(measured) => measured::phase_seconds(measured, &step, phase, at_rates, repeats),
        }
    };
    let phases: Vec<PhaseSeconds> = step.phases().into_iter().map(|phase| timed(phase, step.repeats())).collect();
    let total = phases.iter().map(|phase| phase.seconds).sum();
    let further = step.further().into_iter().map(|phase| timed(phase, Repeats::FURTHER).seconds).sum::<f64>();
    let updates = config.grpo.updates_per_group;
    let round = total + float(updates.saturating_sub(1)) * further;
    let (measured, published, outside) = match pace {
        Pace::Published(_) => (None, Vec::new(), Vec::new()),
        Pace::Measured(measured) => {
            (Some(measured.source.clone()), measured.published(config, ranks, shape), measured.outside(config))
        }
    };
    Some(Seconds { rates, measured, published, outside, phases, total, updates, round })
}
