//! What follows a run beside its numbers: memory by phase, waits for copies, and the trace.

use std::cell::RefCell;
use std::rc::Rc;

use super::Session;
use super::memory::Memory;
use super::trace::Trace;
use crate::config::Loaded;
use crate::failure::Failure;
use crate::report::PhaseMemory;
use crate::tensor::gpu;
use crate::units::Bytes;
use crate::watch::Recorder;
use crate::world::World;

/// The records of one run on one rank.
#[derive(Debug)]
pub(super) struct Records {
    memory: Rc<RefCell<Memory>>,
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
}

impl Recorded {
    /// The most of all phases, by rank.
    pub(super) fn most(&self, of: impl Fn(&PhaseMemory) -> &Vec<Bytes>) -> Vec<Bytes> {
        let ranks = 0..self.reserved.len();
        ranks.map(|rank| self.phases.iter().map(|phase| of(phase)[rank]).max().unwrap_or_default()).collect()
    }
}

impl Records {
    /// Records follow the board from here on; all ranks open their traces, or fail together.
    pub(super) fn begin(session: &Session, loaded: &Loaded, world: &World) -> Result<Records, Failure> {
        let memory = Rc::new(RefCell::new(Memory::of(world.ledger().clone())));
        let rank = world.all.rank();
        let opened = loaded.run.run.trace.then(|| Trace::open(&loaded.rank.dir, rank, session.decoder.device()));
        let trace = world.agree(opened.transpose())?.map(|trace| Rc::new(RefCell::new(trace)));
        let mut recorders: Vec<Box<dyn Recorder>> = vec![Box::new(memory.clone())];
        if let Some(trace) = &trace {
            recorders.push(Box::new(trace.clone()));
        }
        world.board().followed_by(recorders);
        Ok(Records { memory, trace, stage_wait_s: 0.0, waited_before_s: 0.0 })
    }

    /// Update 1, 2, … begins; what came before it is no part of it.
    pub(super) fn step(&mut self, world: &World, step: u64) -> Result<(), Failure> {
        world.board().rest();
        self.waited_before_s = gpu::stage_wait_seconds();
        self.trace.as_ref().map_or(Ok(()), |trace| trace.borrow_mut().step(step))
    }

    /// It has ended.
    pub(super) fn stepped(&mut self, world: &World) -> Result<(), Failure> {
        world.board().rest();
        self.stage_wait_s += gpu::stage_wait_seconds() - self.waited_before_s;
        self.trace.as_ref().map_or(Ok(()), |trace| trace.borrow_mut().flush())
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
        }
    }

    /// The run has ended; nothing is recorded any more.
    pub(super) fn end(self, world: &World) -> Result<(), Failure> {
        world.board().rest();
        world.board().followed_by(Vec::new());
        let trace = self.trace.and_then(Rc::into_inner).map(RefCell::into_inner);
        world.agree(trace.map_or(Ok(()), Trace::end))
    }
}
