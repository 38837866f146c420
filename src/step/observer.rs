//! The observer of a transaction: it enters phases, waits for the device at their ends, and adds up their seconds.

use std::ops::Index;
use std::time::Instant;

use tch::Device;

use crate::model::pass::Pass;
use crate::prompt::handoff::{Captured, PlacedGroup};
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::liveness::Tracker;
use crate::runtime::units::{Bytes, Pages};
use crate::tensor::gpu;

/// Seconds by phase on one rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct PhaseSeconds {
    by_phase: [f64; Phase::ALL.len()],
    /// Pinning of host memory, which happens in the capture phase and counts apart from it.
    pub pinning: f64,
}

impl Index<Phase> for PhaseSeconds {
    type Output = f64;

    fn index(&self, phase: Phase) -> &f64 {
        &self.by_phase[phase.index()]
    }
}

/// Pages that a rank held after its last capture, and their bytes.
#[derive(Clone, Copy, Debug, Default)]
#[expect(missing_docs, reason = "the names and types say everything")]
pub struct OwnPages {
    pub pages: Pages,
    pub bytes: Bytes,
}

/// Follows one rank through the phases of its groups.
#[derive(Debug)]
pub struct Observer {
    tracker: Tracker,
    device: Device,
    /// The phase that covers everything observed; `None`: each phase is entered by itself.
    within: Option<Phase>,
    seconds: PhaseSeconds,
    own_pages: OwnPages,
    capture_s: f64,
}

impl Observer {
    /// An observer that enters each phase on `tracker`. The model computes on `device`.
    #[must_use]
    pub fn new(tracker: &Tracker, device: Device) -> Observer {
        Observer {
            tracker: tracker.clone(),
            device,
            within: None,
            seconds: PhaseSeconds::default(),
            own_pages: OwnPages::default(),
            capture_s: 0.0,
        }
    }

    /// An observer of work that belongs to `phase` as a whole, such as an evaluation. The caller enters that phase.
    #[must_use]
    pub fn within(phase: Phase, tracker: &Tracker, device: Device) -> Observer {
        Observer { within: Some(phase), ..Observer::new(tracker, device) }
    }

    /// Enters a phase. Sites, heartbeats and records name it from here on.
    pub fn enter(&self, phase: Phase) {
        if self.within.is_none() {
            self.tracker.enter(phase);
        }
    }

    /// Where phases report each layer.
    #[must_use]
    pub fn tracker(&self) -> &Tracker {
        &self.tracker
    }

    /// Runs a phase on the device. Its seconds last until the device has done the work, not until the work is queued.
    ///
    /// # Errors
    /// When the work fails, or something queued on the device had failed.
    pub fn device_phase<T>(
        &mut self,
        phase: Phase,
        work: impl FnOnce(&Tracker) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.enter(phase);
        let start = Instant::now();
        let done = work(&self.tracker)?;
        gpu::synchronize(self.device)?;
        self.add(phase, start.elapsed().as_secs_f64());
        Ok(done)
    }

    /// Runs a phase whose result is in host memory when it returns, so that the device need not be waited for.
    pub fn host_phase<T>(&mut self, phase: Phase, work: impl FnOnce() -> T) -> T {
        self.enter(phase);
        let start = Instant::now();
        let done = work();
        self.add(phase, start.elapsed().as_secs_f64());
        done
    }

    /// Adds seconds that a phase has measured by itself.
    pub fn add(&mut self, phase: Phase, seconds: f64) {
        self.seconds.by_phase[phase.index()] += seconds;
    }

    /// Pins host memory with `work`, as a part of the capture phase that counts apart.
    pub(super) fn pinning<T>(&mut self, work: impl FnOnce() -> T) -> T {
        self.enter(Phase::Capture);
        let start = Instant::now();
        let done = work();
        self.seconds.pinning += start.elapsed().as_secs_f64();
        done
    }

    /// Notes the pages of a capture, whose storage must be exactly pages × page bytes, and its seconds: what the phase has gained
    /// since it had `before`.
    pub(super) fn captured(
        &mut self,
        pass: &Pass,
        group: &PlacedGroup,
        captured: &Captured,
        before: f64,
    ) -> Result<(), Failure> {
        self.capture_s = self.seconds[Phase::Capture] - before;
        let bytes = captured.pages.audit(|layer| pass.decoder.mixer(layer).state_rows())?;
        self.own_pages = OwnPages { pages: group.layout.pages_of(pass.cp_group.axis.rank()), bytes };
        Ok(())
    }

    /// Seconds so far.
    #[must_use]
    pub fn seconds(&self) -> &PhaseSeconds {
        &self.seconds
    }

    /// Seconds since the last call, or since the start.
    pub fn take_seconds(&mut self) -> PhaseSeconds {
        std::mem::take(&mut self.seconds)
    }

    /// Seconds of the last capture.
    #[must_use]
    pub fn capture_s(&self) -> f64 {
        self.capture_s
    }

    /// Pages of the last capture.
    #[must_use]
    pub fn own_pages(&self) -> OwnPages {
        self.own_pages
    }
}
