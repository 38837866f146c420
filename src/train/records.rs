//! What follows a run beside its numbers: memory by phase, waits for copies, and the trace.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use tch::Tensor;

use super::Session;
use super::memory::Memory;
use super::trace::Trace;
use crate::config::Loaded;
use crate::model::lora::Adapters;
use crate::report::PhaseMemory;
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::liveness::{Border, Recorder};
use crate::runtime::units::{Bytes, LayerIndex, from_index};
use crate::tensor::gpu;
use crate::world::World;

/// The records of one run on one rank.
#[derive(Debug)]
pub(super) struct Records {
    memory: Rc<RefCell<Memory>>,
    visits: Rc<RefCell<Visits>>,
    start: Start,
    trace: Option<Rc<RefCell<Trace>>>,
    stage_wait_s: f64,
    /// What the device said when the update began.
    waited_before_s: f64,
}

/// What the records say at the end, by rank.
#[derive(Debug)]
pub(super) struct Recorded {
    pub(super) phases: Vec<PhaseMemory>,
    pub(super) reserved: Vec<Bytes>,
    pub(super) stage_wait_seconds: Vec<f64>,
    /// Layers that each phase went through, on the rank with the fewest.
    pub(super) layers: BTreeMap<&'static str, u64>,
    /// Adapter tensors B that are what they were at the start.
    pub(super) unmoved: Vec<String>,
}

/// Which layers each phase went through.
#[derive(Debug, Default)]
struct Visits {
    phase: Option<Phase>,
    layers: BTreeMap<Phase, BTreeSet<LayerIndex>>,
}

impl Visits {
    /// Counts by phase, on the rank with the fewest; every rank takes part.
    fn by_phase(&self, world: &World) -> BTreeMap<&'static str, u64> {
        let of = |phase: &Phase| self.layers.get(phase).map_or(0, |layers| from_index(layers.len()));
        let fewest = |phase: &Phase| world.all.gather_numbers(of(phase)).into_iter().min().unwrap_or(0);
        let counts = Phase::ALL.iter().map(|phase| (phase.name(), fewest(phase)));
        counts.filter(|(_, count)| *count > 0).collect()
    }
}

impl Recorder for Visits {
    fn pass(&mut self, border: Border) {
        match (border, self.phase) {
            (Border::Phase(phase), _) => self.phase = Some(phase),
            (Border::Layer(layer), Some(phase)) => drop(self.layers.entry(phase).or_default().insert(layer)),
            (Border::Layer(_), None) | (Border::StepEnd, _) => {}
        }
    }
}

/// The adapters' B when the records began.
#[derive(Debug)]
struct Start(Vec<Tensor>);

impl Start {
    fn of(adapters: &Adapters) -> Start {
        Start(adapters.entries().iter().map(|adapter| adapter.b_or.detach().copy()).collect())
    }

    /// Names of those that have not changed in any value.
    fn unmoved(&self, adapters: &Adapters) -> Vec<String> {
        let pairs = adapters.entries().iter().zip(&self.0);
        let still = pairs.filter(|(adapter, start)| adapter.b_or.detach().equal(start));
        still.map(|(adapter, _)| format!("{}.lora_B", adapter.module)).collect()
    }
}

impl Recorded {
    /// The most of all phases, by rank.
    pub(super) fn most(&self, of: impl Fn(&PhaseMemory) -> &Vec<Bytes>) -> Vec<Bytes> {
        let ranks = 0..self.reserved.len();
        ranks.map(|rank| self.phases.iter().map(|phase| of(phase)[rank]).max().unwrap_or_default()).collect()
    }
}

impl Records {
    /// Records follow the tracker from here on, and `further` beside them; all ranks open their traces, or fail together.
    pub(super) fn begin(
        session: &Session,
        loaded: &Loaded,
        world: &World,
        further: Option<Box<dyn Recorder>>,
    ) -> Result<Records, Failure> {
        let memory = Rc::new(RefCell::new(Memory::of(world.ledger().clone())));
        let visits = Rc::new(RefCell::new(Visits::default()));
        let start = Start::of(&session.adapters);
        let rank = world.all.rank();
        let opened = loaded.run.run.trace.then(|| Trace::open(&loaded.rank.dir, rank, session.decoder.device()));
        let trace = world.agree(opened.transpose())?.map(|trace| Rc::new(RefCell::new(trace)));
        let mut recorders: Vec<Box<dyn Recorder>> = vec![Box::new(memory.clone()), Box::new(visits.clone())];
        if let Some(trace) = &trace {
            recorders.push(Box::new(trace.clone()));
        }
        recorders.extend(further);
        world.tracker().set_recorders(recorders);
        Ok(Records { memory, visits, start, trace, stage_wait_s: 0.0, waited_before_s: 0.0 })
    }

    /// Update 1, 2, … begins; what came before it is no part of it.
    pub(super) fn step(&mut self, world: &World, step: u64) -> Result<(), Failure> {
        world.tracker().end_step();
        self.memory.borrow_mut().step();
        self.waited_before_s = gpu::stage_wait_seconds();
        self.trace.as_ref().map_or(Ok(()), |trace| trace.borrow_mut().step(step))
    }

    /// It has ended.
    pub(super) fn stepped(&mut self, world: &World) -> Result<(), Failure> {
        world.tracker().end_step();
        self.stage_wait_s += gpu::stage_wait_seconds() - self.waited_before_s;
        self.trace.as_ref().map_or(Ok(()), |trace| trace.borrow_mut().flush())
    }

    /// The most memory of each phase of this rank in the update that has ended, on the device and in host memory.
    pub(super) fn step_memory(&self) -> BTreeMap<String, [u64; 2]> {
        self.memory.borrow().of_step()
    }

    /// What was recorded of memory and waits; every rank takes part.
    pub(super) fn gathered(&self, session: &Session, world: &World) -> Recorded {
        let mut memory = self.memory.borrow_mut();
        let phases = memory.by_phase(world);
        memory.against(&session.plan).iter().for_each(|line| tracing::info!("{line}"));
        Recorded {
            phases,
            reserved: world.all.gather_numbers(memory.reserved().0).into_iter().map(Bytes).collect(),
            stage_wait_seconds: world.all.gather_floats(self.stage_wait_s),
            layers: self.visits.borrow().by_phase(world),
            unmoved: self.start.unmoved(&session.adapters),
        }
    }

    /// The run has ended; nothing is recorded any more.
    pub(super) fn end(self, world: &World) -> Result<(), Failure> {
        world.tracker().end_step();
        world.tracker().set_recorders(Vec::new());
        let trace = self.trace.and_then(Rc::into_inner).map(RefCell::into_inner);
        world.agree(trace.map_or(Ok(()), Trace::end))
    }
}
