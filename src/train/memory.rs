//! The most memory of each phase: what the allocator says, and what the ledger knows of it.

use std::collections::BTreeMap;

use crate::plan::{Group, Place, Plan};
use crate::report::{KindBytes, PhaseMemory};
use crate::runtime::failure::Phase;
use crate::runtime::liveness::{Border, Recorder};
use crate::runtime::memory::{Ledger, MemorySpace, Purpose};
use crate::runtime::units::Bytes;
use crate::tensor::boundary::{counted, forget_peaks};
use crate::tensor::gpu;
use crate::world::World;

/// Peaks of one phase.
#[derive(Clone, Copy, Debug, Default)]
struct Peaks {
    entered: bool,
    allocated: [Bytes; MemorySpace::ALL.len()],
    kinds: [[Bytes; MemorySpace::ALL.len()]; Purpose::ALL.len()],
    scratch: Bytes,
}

impl Peaks {
    /// Since peaks were last forgotten.
    fn now(ledger: &Ledger) -> Peaks {
        let allocated = MemorySpace::ALL.map(|space| counted(space).peak);
        let [device, _] = allocated;
        Peaks {
            entered: true,
            allocated,
            kinds: Purpose::ALL.map(|purpose| MemorySpace::ALL.map(|space| ledger.peak_in(purpose, space))),
            scratch: Bytes(device.0.saturating_sub(ledger.peak_of_all(MemorySpace::Device).0)),
        }
    }

    fn at_least(&mut self, other: &Peaks) {
        self.entered |= other.entered;
        let kinds = self.kinds.iter_mut().flatten().zip(other.kinds.iter().flatten());
        for (most, &bytes) in self.allocated.iter_mut().zip(&other.allocated).chain(kinds) {
            *most = bytes.max(*most);
        }
        self.scratch = self.scratch.max(other.scratch);
    }
}

/// Follows a rank from phase to phase.
#[derive(Debug)]
pub(super) struct Memory {
    ledger: Ledger,
    phase: Phase,
    phases: [Peaks; Phase::ALL.len()],
    /// What the allocator says of those that the current update has gone through.
    step: [Option<[Bytes; MemorySpace::ALL.len()]>; Phase::ALL.len()],
    reserved: Bytes,
}

impl Memory {
    /// All that came before belongs to [`Phase::Start`].
    pub(super) fn of(ledger: Ledger) -> Memory {
        let (phases, step) = (Default::default(), Default::default());
        Memory { ledger, phase: Phase::Start, phases, step, reserved: Bytes(0) }
    }

    /// An update begins.
    pub(super) fn step(&mut self) {
        self.step = Default::default();
    }

    /// The peaks of each phase of the update, on the device and in host memory.
    pub(super) fn of_step(&self) -> BTreeMap<String, [u64; 2]> {
        let peaks = |phase: Phase| Some((phase.name().to_owned(), self.step[phase.index()]?.map(|bytes| bytes.0)));
        Phase::ALL.into_iter().filter_map(peaks).collect()
    }

    /// The phase up to here is measured, and peaks start anew.
    fn measure(&mut self) {
        let peaks = Peaks::now(&self.ledger);
        self.phases[self.phase.index()].at_least(&peaks);
        if let Some(most) = &mut self.step[self.phase.index()] {
            *most = [0, 1].map(|space| most[space].max(peaks.allocated[space]));
        }
        let reserved = gpu::reserved().map_or(Bytes(0), |(_, peak)| peak);
        self.reserved = self.reserved.max(reserved);
        self.ledger.forget_peaks();
        forget_peaks();
    }

    /// By phase and rank; every rank takes part.
    pub(super) fn by_phase(&mut self, world: &World) -> Vec<PhaseMemory> {
        self.measure();
        let gather = |bytes: Bytes| world.all.gather_numbers(bytes.0).into_iter().map(Bytes).collect::<Vec<Bytes>>();
        let mut phases = Vec::new();
        for phase in Phase::ALL {
            let peaks = &self.phases[phase.index()];
            let entered = world.all.gather_numbers(u64::from(peaks.entered));
            if !entered.contains(&1) {
                continue;
            }
            let mut kinds = BTreeMap::new();
            for (purpose, &[device, host]) in Purpose::ALL.into_iter().zip(&peaks.kinds) {
                kinds.insert(purpose.name(), KindBytes { device: gather(device), host: gather(host) });
            }
            let [device, host] = peaks.allocated;
            phases.push(PhaseMemory {
                phase: phase.name(),
                device_peak: gather(device),
                host_peak: gather(host),
                kinds,
                scratch: gather(peaks.scratch),
            });
        }
        phases
    }

    /// The most that libtorch's allocator had taken from this rank's GPU.
    pub(super) fn reserved(&self) -> Bytes {
        self.reserved
    }

    /// This rank's plan against what was measured, one line for each group of addends and one for each sum. What the
    /// ledger has no entry for was measured as scratch, so those addends stand in one line.
    pub(super) fn against(&self, plan: &Plan) -> Vec<String> {
        let most = |of: &dyn Fn(&Peaks) -> Bytes| self.phases.iter().map(of).max().unwrap_or_default();
        let line = |place: Place, names: &str, plan: Bytes, measured: Bytes| {
            format!("{} memory, {names}: plan {plan}, measured {measured}", MemorySpace::from(place).name())
        };
        let mut lines = Vec::new();
        for place in [Place::Device, Place::Host] {
            let space = MemorySpace::from(place);
            for Group { names, counted, bytes, .. } in plan.groups().iter().filter(|group| group.place == place) {
                let of = |peaks: &Peaks| match counted {
                    [] => peaks.scratch,
                    kinds => kinds.iter().map(|&kind| peaks.kinds[kind as usize][space as usize]).sum(),
                };
                lines.push(line(place, &names.join(" + "), *bytes, most(&of)));
            }
            lines.push(line(place, "all", plan.sum(place), most(&|peaks| peaks.allocated[space as usize])));
        }
        lines
    }
}

impl Recorder for Memory {
    fn pass(&mut self, border: Border) {
        match border {
            Border::Layer(_) => {}
            Border::StepEnd => self.measure(),
            Border::Phase(phase) => {
                self.measure();
                self.phase = phase;
                self.step[phase.index()].get_or_insert_default();
            }
        }
    }
}
