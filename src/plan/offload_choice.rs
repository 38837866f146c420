//! What a configuration leaves open: where pages and tail inputs wait, and what is computed again.

use crate::config::{RunConfig, When};
use crate::prompt::handoff::Keeping;
use crate::prompt::pages::Residency;

/// One choice among those that a configuration leaves open.
#[derive(Clone, Copy, Debug)]
pub(super) struct OffloadChoice {
    pub(super) keeping: Keeping,
    /// How many layers, the first ones, have their pages on the device during rollout where pages wait in host memory; those
    /// of the others are staged layer by layer.
    pub(super) resident: usize,
}

impl OffloadChoice {
    /// The stated choice. Where the configuration leaves one, pages are in `pages` and the least is kept.
    pub(super) fn stated(config: &RunConfig, pages: Residency) -> OffloadChoice {
        let memory = &config.memory;
        let keeping = Keeping {
            pages: match memory.cpu_offload_pages {
                When::Always => Residency::Host,
                When::Never => Residency::Device,
                When::Auto => pages,
            },
            tail: if memory.cpu_offload_inputs == When::Never { Residency::Device } else { Residency::Host },
            every: usize::try_from(memory.inputs_every.max(1)).unwrap_or(usize::MAX),
            attention: memory.keep_attention == When::Always,
            answer_attention: memory.keep_attention == When::Always,
            index_sets: false,
        };
        OffloadChoice { keeping, resident: if config.rollout.pages_on_device == When::Always { usize::MAX } else { 0 } }
    }

    /// How many of `layers` layers have their pages on the device during rollout, for whatever reason.
    pub(super) fn resident_of(&self, layers: usize) -> usize {
        if self.keeping.pages == Residency::Device { layers } else { self.resident.min(layers) }
    }
}
