//! What is recorded of a run besides its numbers: memory by phase, waits for copies, layers by phase, and the trace.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::memory::{MemoryRecorder, RankMemory, RunMemory};
use super::session::Session;
use super::trace::Trace;
use crate::model::lora::Adapters;
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::liveness::{Border, Recorder};
use crate::runtime::units::{LayerIndex, from_index};
use crate::tensor::gpu;
use crate::world::World;

/// The records of one run on one rank.
#[derive(Debug)]
pub(super) struct Records {
    memory: Rc<RefCell<MemoryRecorder>>,
    layers: Rc<RefCell<LayerRecorder>>,
    trace: Option<Rc<RefCell<Trace>>>,
    /// The adapters' B when the records began.
    start_b: Vec<String>,
    /// Seconds in which the updates so far waited for copies.
    stage_wait_s: f64,
    /// The same by the device's count, which includes what came before the current update.
    stage_wait_before_s: f64,
}

/// What one rank has recorded.
#[derive(Deserialize, Serialize)]
struct RankRecords {
    memory: RankMemory,
    stage_wait_s: f64,
    /// How many different layers each phase went through, in the order of [`Phase::ALL`].
    layers_by_phase: [u64; Phase::ALL.len()],
}

/// What all ranks have recorded.
#[derive(Debug)]
pub(super) struct RunRecords {
    pub(super) memory: RunMemory,
    pub(super) stage_wait_seconds: Vec<f64>,
    /// How many different layers each phase went through, on the rank with the fewest.
    pub(super) layers_by_phase: BTreeMap<&'static str, u64>,
    /// Adapter tensors B that are what they were at the start.
    pub(super) unmoved: Vec<String>,
}

/// Which layers each phase went through.
#[derive(Debug, Default)]
struct LayerRecorder {
    phase: Option<Phase>,
    layers: BTreeMap<Phase, BTreeSet<LayerIndex>>,
}

impl Recorder for LayerRecorder {
    fn pass(&mut self, border: Border) {
        match (border, self.phase) {
            (Border::Phase(phase), _) => self.phase = Some(phase),
            (Border::Layer(layer), Some(phase)) => drop(self.layers.entry(phase).or_default().insert(layer)),
            (Border::Layer(_), None) | (Border::StepEnd, _) => {}
        }
    }
}

impl Records {
    /// Records follow the tracker from here on, and so does `further`; all ranks open their traces, or fail together.
    pub(super) fn open(
        session: &Session,
        world: &World,
        further: Option<Box<dyn Recorder>>,
    ) -> Result<Records, Failure> {
        let memory = Rc::new(RefCell::new(MemoryRecorder::new(world.ledger().clone())));
        let layers = Rc::new(RefCell::new(LayerRecorder::default()));
        let open_trace = || Trace::open(&session.loaded.rank.dir, world.all.rank(), session.model.decoder.device());
        let trace = session.config().run.trace.then(open_trace).transpose();
        let trace = world.agree(trace)?.map(|trace| Rc::new(RefCell::new(trace)));
        let mut recorders: Vec<Box<dyn Recorder>> = vec![Box::new(memory.clone()), Box::new(layers.clone())];
        if let Some(trace) = &trace {
            recorders.push(Box::new(trace.clone()));
        }
        recorders.extend(further);
        world.tracker().set_recorders(recorders);
        let start_b = session.policy.adapters.b_digests();
        Ok(Records { memory, layers, trace, start_b, stage_wait_s: 0.0, stage_wait_before_s: 0.0 })
    }

    /// Update 1, 2, … begins; what came before is no part of it.
    pub(super) fn begin_update(&mut self, world: &World, step: u64) -> Result<(), Failure> {
        world.tracker().end_step();
        self.memory.borrow_mut().begin_update();
        self.stage_wait_before_s = gpu::stage_wait_seconds();
        self.trace.as_ref().map_or(Ok(()), |trace| trace.borrow_mut().begin_update(step))
    }

    /// The update has ended; its trace is written by [`Records::flush`].
    pub(super) fn end_update(&mut self, world: &World) {
        world.tracker().end_step();
        self.stage_wait_s += gpu::stage_wait_seconds() - self.stage_wait_before_s;
    }

    /// Writes this rank's trace so far, once the update counts: a trace that cannot be written costs no update.
    pub(super) fn flush(&mut self) -> Result<(), Failure> {
        self.trace.as_ref().map_or(Ok(()), |trace| trace.borrow_mut().flush())
    }

    /// Peaks of each phase of this rank in the update that has ended: on the device, and in host memory.
    pub(super) fn update_memory(&self) -> BTreeMap<String, [u64; 2]> {
        self.memory.borrow().update_peaks()
    }

    /// The records of all ranks; every rank takes part.
    pub(super) fn gather(&self, session: &Session, world: &World) -> RunRecords {
        let mut memory = self.memory.borrow_mut();
        let own = RankRecords {
            memory: memory.run_peaks().clone(),
            stage_wait_s: self.stage_wait_s,
            layers_by_phase: self.layers_by_phase(),
        };
        memory.compare(&session.plan.plan).iter().for_each(|line| tracing::info!("{line}"));
        let ranks = world.gather(&own);
        let fewest = |phase: Phase| ranks.iter().map(|rank| rank.layers_by_phase[phase.index()]).min().unwrap_or(0);
        let layers = Phase::ALL.into_iter().map(|phase| (phase.name(), fewest(phase)));
        let memory: Vec<RankMemory> = ranks.iter().map(|rank| rank.memory.clone()).collect();
        RunRecords {
            memory: RunMemory::of(&memory),
            stage_wait_seconds: ranks.iter().map(|rank| rank.stage_wait_s).collect(),
            layers_by_phase: layers.filter(|(_, count)| *count > 0).collect(),
            unmoved: self.unmoved_anywhere(&session.policy.adapters, world),
        }
    }

    fn layers_by_phase(&self) -> [u64; Phase::ALL.len()] {
        let recorder = self.layers.borrow();
        Phase::ALL.map(|phase| recorder.layers.get(&phase).map_or(0, |layers| from_index(layers.len())))
    }

    /// Names of the tensors B that have not changed in any value, those of experts on other ranks included.
    fn unmoved_anywhere(&self, adapters: &Adapters, world: &World) -> Vec<String> {
        let own = self.unmoved(adapters);
        if !adapters.is_spread() {
            return own;
        }
        let mut all: Vec<String> = world.gather(&own).concat();
        all.sort();
        all.dedup();
        all
    }

    /// Names of this rank's tensors B that have not changed in any value.
    fn unmoved(&self, adapters: &Adapters) -> Vec<String> {
        let digests = adapters.b_digests();
        let pairs = adapters.entries().iter().zip(self.start_b.iter().zip(&digests));
        let unmoved = pairs.filter(|(_, (start, now))| start == now);
        unmoved.map(|(adapter, _)| format!("{}.lora_B", adapter.module)).collect()
    }

    /// The run has ended; nothing is recorded any more.
    pub(super) fn close(self, world: &World) -> Result<(), Failure> {
        world.tracker().end_step();
        world.tracker().set_recorders(Vec::new());
        let trace = self.trace.and_then(Rc::into_inner).map(RefCell::into_inner);
        world.agree(trace.map_or(Ok(()), Trace::close))
    }
}
