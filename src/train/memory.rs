//! Peaks of memory by phase: what the allocator says, and what the ledger knows of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::plan::{Group, Place, Plan};
use crate::report::{KindBytes, PhaseMemory};
use crate::runtime::failure::Phase;
use crate::runtime::liveness::{Border, Recorder};
use crate::runtime::memory::{Ledger, MemorySpace, Purpose};
use crate::runtime::units::Bytes;
use crate::tensor::boundary::{counted, forget_peaks};
use crate::tensor::gpu;

/// Bytes in each memory space.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(super) struct SpaceBytes {
    device: Bytes,
    host: Bytes,
}

impl SpaceBytes {
    fn of(bytes: impl Fn(MemorySpace) -> Bytes) -> SpaceBytes {
        SpaceBytes { device: bytes(MemorySpace::Device), host: bytes(MemorySpace::Host) }
    }

    fn get(self, space: MemorySpace) -> Bytes {
        match space {
            MemorySpace::Device => self.device,
            MemorySpace::Host => self.host,
        }
    }

    fn raise(&mut self, other: SpaceBytes) {
        self.device = self.device.max(other.device);
        self.host = self.host.max(other.host);
    }
}

/// Peaks of one phase on one rank.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
struct Peaks {
    entered: bool,
    allocated: SpaceBytes,
    /// In the order of [`Purpose::ALL`].
    by_purpose: [SpaceBytes; Purpose::ALL.len()],
    /// Device bytes that the ledger has no entry for.
    scratch: Bytes,
}

impl Peaks {
    /// Since peaks were last forgotten.
    fn now(ledger: &Ledger) -> Peaks {
        let allocated = SpaceBytes::of(|space| counted(space).peak);
        let in_ledger = ledger.peak_of_all(MemorySpace::Device);
        Peaks {
            entered: true,
            allocated,
            by_purpose: Purpose::ALL.map(|purpose| SpaceBytes::of(|space| ledger.peak_in(purpose, space))),
            scratch: Bytes(allocated.device.0.saturating_sub(in_ledger.0)),
        }
    }

    fn raise(&mut self, other: &Peaks) {
        self.entered |= other.entered;
        self.allocated.raise(other.allocated);
        for (peak, &other) in self.by_purpose.iter_mut().zip(&other.by_purpose) {
            peak.raise(other);
        }
        self.scratch = self.scratch.max(other.scratch);
    }
}

/// Peaks of a whole run on one rank.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct RankMemory {
    /// In the order of [`Phase::ALL`].
    phases: [Peaks; Phase::ALL.len()],
    /// The most that libtorch's allocator had taken from the GPU.
    reserved: Bytes,
}

/// Peaks of a whole run on all ranks.
#[derive(Debug)]
pub(super) struct RunMemory {
    /// Phases that any rank has entered.
    pub(super) phases: Vec<PhaseMemory>,
    /// The most that libtorch's allocator had taken from each rank's GPU.
    pub(super) reserved: Vec<Bytes>,
}

impl RunMemory {
    pub(super) fn of(ranks: &[RankMemory]) -> RunMemory {
        let phases = Phase::ALL.into_iter().filter_map(|phase| phase_memory(phase, ranks)).collect();
        RunMemory { phases, reserved: ranks.iter().map(|rank| rank.reserved).collect() }
    }

    /// The largest peak of all phases, by rank.
    pub(super) fn largest(&self, peaks: impl Fn(&PhaseMemory) -> &Vec<Bytes>) -> Vec<Bytes> {
        let largest = |rank: usize| self.phases.iter().map(|phase| peaks(phase)[rank]).max().unwrap_or_default();
        (0..self.reserved.len()).map(largest).collect()
    }
}

/// A phase's peaks by rank; `None` where no rank has entered the phase.
fn phase_memory(phase: Phase, ranks: &[RankMemory]) -> Option<PhaseMemory> {
    let peaks = || ranks.iter().map(|rank| &rank.phases[phase.index()]);
    if !peaks().any(|peaks| peaks.entered) {
        return None;
    }
    let kind = |purpose: Purpose| {
        let bytes = || peaks().map(move |peaks| peaks.by_purpose[purpose as usize]);
        KindBytes {
            device: bytes().map(|bytes| bytes.device).collect(),
            host: bytes().map(|bytes| bytes.host).collect(),
        }
    };
    Some(PhaseMemory {
        phase: phase.name(),
        device_peak: peaks().map(|peaks| peaks.allocated.device).collect(),
        host_peak: peaks().map(|peaks| peaks.allocated.host).collect(),
        kinds: Purpose::ALL.into_iter().map(|purpose| (purpose.name(), kind(purpose))).collect(),
        scratch: peaks().map(|peaks| peaks.scratch).collect(),
    })
}

/// Follows one rank from phase to phase.
#[derive(Debug)]
pub(super) struct MemoryRecorder {
    ledger: Ledger,
    phase: Phase,
    run: RankMemory,
    /// Allocated bytes of the phases of the current update; `None` where a phase was not entered.
    update: [Option<SpaceBytes>; Phase::ALL.len()],
}

impl MemoryRecorder {
    /// Everything before this call belongs to [`Phase::Start`].
    pub(super) fn new(ledger: Ledger) -> MemoryRecorder {
        let run = RankMemory { phases: Default::default(), reserved: Bytes(0) };
        MemoryRecorder { ledger, phase: Phase::Start, run, update: Default::default() }
    }

    pub(super) fn begin_update(&mut self) {
        self.update = Default::default();
    }

    /// Allocated bytes of each phase of the update: on the device, and in host memory.
    pub(super) fn update_peaks(&self) -> BTreeMap<String, [u64; 2]> {
        let peaks = |phase: Phase| {
            let SpaceBytes { device, host } = self.update[phase.index()]?;
            Some((phase.name().to_owned(), [device.0, host.0]))
        };
        Phase::ALL.into_iter().filter_map(peaks).collect()
    }

    /// Peaks of the run up to here.
    pub(super) fn run_peaks(&mut self) -> &RankMemory {
        self.measure();
        &self.run
    }

    /// Adds the peaks of the current phase, and forgets them in ledger and allocator.
    fn measure(&mut self) {
        let peaks = Peaks::now(&self.ledger);
        self.run.phases[self.phase.index()].raise(&peaks);
        if let Some(phase) = &mut self.update[self.phase.index()] {
            phase.raise(peaks.allocated);
        }
        let reserved = gpu::reserved().map_or(Bytes(0), |(_, peak)| peak);
        self.run.reserved = self.run.reserved.max(reserved);
        self.ledger.forget_peaks();
        forget_peaks();
    }

    /// The plan against what was measured: a line for each group of addends and for each sum. What the ledger has no entry
    /// for was measured as scratch, so those addends stand in one line.
    pub(super) fn compare(&self, plan: &Plan) -> Vec<String> {
        let largest = |bytes: &dyn Fn(&Peaks) -> Bytes| self.run.phases.iter().map(bytes).max().unwrap_or_default();
        let line = |space: MemorySpace, names: &str, plan: Bytes, measured: Bytes| {
            format!("{} memory, {names}: plan {plan}, measured {measured}", space.name())
        };
        let mut lines = Vec::new();
        for place in [Place::Device, Place::Host] {
            let space = MemorySpace::from(place);
            for Group { names, counted, bytes, .. } in plan.groups().iter().filter(|group| group.place == place) {
                let measured = |peaks: &Peaks| match counted {
                    [] => peaks.scratch,
                    purposes => purposes.iter().map(|&one| peaks.by_purpose[one as usize].get(space)).sum(),
                };
                lines.push(line(space, &names.join(" + "), *bytes, largest(&measured)));
            }
            lines.push(line(space, "all", plan.sum(place), largest(&|peaks| peaks.allocated.get(space))));
        }
        lines
    }
}

impl Recorder for MemoryRecorder {
    fn pass(&mut self, border: Border) {
        match border {
            Border::Layer(_) => {}
            Border::StepEnd => self.measure(),
            Border::Phase(phase) => {
                self.measure();
                self.phase = phase;
                self.update[phase.index()].get_or_insert_default();
            }
        }
    }
}
