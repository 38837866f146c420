//! What a configuration leaves open: where pages and tail inputs wait, and what is computed again.

use crate::config::{RunConfig, When};
use crate::prompt::handoff::Keeping;
use crate::prompt::pages::Residency;

/// One choice among those that a configuration leaves open.
#[derive(Clone, Copy, Debug)]
pub(super) struct OffloadChoice {
    pub(super) keeping: Keeping,
    /// Whether pages of all layers are on the device during rollout; otherwise they are staged layer by layer.
    pub(super) all_pages: bool,
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
            index_sets: false,
        };
        OffloadChoice { keeping, all_pages: config.rollout.pages_on_device == When::Always }
    }

    /// Whether the prompt's pages of all layers are on the device during rollout, for whatever reason.
    pub(super) fn pages_stay(&self) -> bool {
        self.all_pages || self.keeping.pages == Residency::Device
    }
}
