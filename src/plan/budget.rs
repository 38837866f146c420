//! The plan: the rank layout, the sum of a rank's memory, and whether both fit.

use serde::Serialize;

use super::addend::{Addend, Group, Place, total};
use super::error::Error;
use super::micro_block::MicroBlock;
use super::offload_choice::OffloadChoice;
use super::predict::{Pace, predict};
use super::rollout::Rollout;
use super::seconds::{self, Rates};
use crate::config::RunConfig;
use crate::model::shape::Shape;
use crate::prompt::handoff::Keeping;
use crate::runtime::failure::Phase;
use crate::runtime::units::{Bytes, Pages};

/// The rank layout, and the sum of a rank's memory where the model is known.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// Ranks in the world.
    pub ranks: u64,
    /// Ranks that share a node's host memory.
    pub ranks_per_node: u64,
    /// Ranks that share a prompt.
    pub cp_size: u64,
    /// Pages of the longest prompt.
    pub pages: Pages,
    /// Pages on the rank that holds most.
    pub pages_per_rank: Pages,
    /// Rows of a micro-block, where a model is known and somebody has chosen them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_block: Option<MicroBlock>,
    /// Where pages and tail inputs wait for the sweep, and what is kept.
    pub keeping: Keeping,
    /// Whether a swept prompt's index sets are kept; absent where no layer chooses keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index_sets: Option<bool>,
    /// How answers are sampled; absent where they come with the data, or where the model is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout: Option<Rollout>,
    /// The sum of a rank's memory; empty where the model is not known.
    pub addends: Vec<Addend>,
    /// Predicted seconds of a group, if they were requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<seconds::Seconds>,
}

impl Plan {
    /// Bytes of a rank in one place: what stays, and what the largest phase adds.
    #[must_use]
    pub fn sum(&self, place: Place) -> Bytes {
        total(self.alive(&[place]))
    }

    /// The addends in `places` that are alive at the peak.
    pub(super) fn alive(&self, places: &[Place]) -> Vec<&Addend> {
        let peak = self.peak_phase(places);
        let counts =
            |addend: &&Addend| places.contains(&addend.place) && addend.phase.is_none_or(|phase| Some(phase) == peak);
        self.addends.iter().filter(counts).collect()
    }

    /// The phase that needs most in `places`.
    #[must_use]
    pub fn peak_phase(&self, places: &[Place]) -> Option<Phase> {
        let phase_bytes = |phase: Phase| -> Bytes {
            let here = |addend: &&Addend| addend.phase == Some(phase) && places.contains(&addend.place);
            total(self.addends.iter().filter(here))
        };
        let phases = self.addends.iter().filter_map(|addend| addend.phase);
        phases.filter(|&phase| phase_bytes(phase) > Bytes(0)).max_by_key(|&phase| phase_bytes(phase))
    }

    /// What is alive at the peak, grouped as a run's ledger measures it.
    #[must_use]
    pub fn groups(&self) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        let alive = [Place::Device, Place::Host].into_iter().flat_map(|place| self.alive(&[place]));
        for &Addend { name, counted, place, bytes, .. } in alive {
            match groups.iter_mut().find(|group| group.place == place && group.counted == counted) {
                Some(group) => {
                    group.names.push(name);
                    group.bytes = Bytes(group.bytes.0.saturating_add(bytes.0));
                }
                None => groups.push(Group { names: vec![name], counted, place, bytes }),
            }
        }
        groups
    }

    /// Compares the memory of `ranks` ranks in `places` with `available`.
    ///
    /// # Errors
    /// When it does not fit: names the largest addends until the rest would fit, each with the setting that makes it
    /// smaller.
    pub fn fits(&self, ranks: u64, what: &'static str, places: &[Place], available: Bytes) -> Result<(), Error> {
        let mut addends = self.alive(places);
        addends.sort_by_key(|addend| std::cmp::Reverse(addend.bytes));
        let all = |bytes: Bytes| Bytes(bytes.0.saturating_mul(ranks));
        let needed = all(total(addends.iter().copied()));
        if needed <= available {
            return Ok(());
        }
        let mut rest = needed;
        let mut parts = Vec::new();
        for addend in addends {
            if rest <= available {
                break;
            }
            rest = Bytes(rest.0.saturating_sub(all(addend.bytes).0));
            let Addend { name, bytes, reason, knob, .. } = addend;
            parts.push(format!("{name}, {bytes} a rank ({reason}): {knob}"));
        }
        let who = if ranks == 1 { "one rank needs".into() } else { format!("{ranks} ranks on this machine need") };
        Err(Error::DoesNotFit { at: String::new(), who, what, needed, available, parts: parts.join("; ") })
    }
}

/// The memory of a machine, as far as it is known.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    /// Ranks on the machine; 0 stands for all.
    pub ranks_here: u64,
    /// Memory of one device.
    pub device: Option<Bytes>,
    /// Whether there is no device, so that everything is in host memory.
    pub host_only: bool,
    /// Memory of the host.
    pub host: Option<Bytes>,
}

impl Plan {
    /// Predicts the seconds of a group, phase by phase, and of a sampled token.
    pub fn time(&mut self, config: &RunConfig, shape: &Shape, pace: &Pace) {
        self.time_answers(config, shape, pace.rates());
        self.seconds = predict(config, self.ranks, shape, self.chosen(), pace);
    }

    /// Predicts the seconds of a sampled token.
    pub(super) fn time_answers(&mut self, config: &RunConfig, shape: &Shape, rates: &Rates) {
        let choice = self.chosen();
        if let Some(rollout) = &mut self.rollout {
            rollout.time(seconds::rollout(config, self.ranks, shape, choice, rates), rates.host);
        }
    }

    pub(super) fn chosen(&self) -> OffloadChoice {
        OffloadChoice { keeping: self.keeping, resident: self.rollout.map_or(0, |rollout| rollout.resident_layers) }
    }

    /// Refuses a plan that does not fit into `room`, or that samples answers too slowly.
    ///
    /// # Errors
    /// Names the largest addends, each with the setting that makes it smaller; or the seconds of a token, and why.
    pub fn refuse(&self, room: &Room) -> Result<(), Error> {
        let host: &[Place] = if room.host_only { &[Place::Device, Place::Host] } else { &[Place::Host] };
        room.device.map_or(Ok(()), |device| self.fits(1, "device", &[Place::Device], device))?;
        room.host.map_or(Ok(()), |memory| self.fits(room.ranks_here, "host", host, memory))?;
        self.rollout.map_or(Ok(()), Rollout::refuse)
    }
}
