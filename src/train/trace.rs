//! `run.trace = true`: when each phase and layer began and ended.
//!
//! At a border only a mark is left. On a GPU it is a point in the computation's stream, so a span is the device's own
//! time and nothing waits for it inside a phase; spans are formed where a step has ended.

use std::path::Path;

use serde_json::json;
use tch::Device;

use crate::report::{Row, TraceFile};
use crate::runtime::failure::Failure;
use crate::runtime::liveness::{Border, Recorder};
use crate::runtime::units::Rank;
use crate::tensor;
use crate::tensor::gpu::Mark;

/// Something that has begun and not ended.
#[derive(Debug)]
struct Open {
    name: String,
    layer: Option<usize>,
    start_s: f64,
}

/// One rank's trace.
#[derive(Debug)]
pub(super) struct Trace {
    file: TraceFile,
    device: Device,
    /// The update that marks are of; 0 before the first one.
    step: u64,
    /// The last moment that has been placed, and its seconds since the trace began.
    placed: (Mark, f64),
    marks: Vec<(Border, Mark)>,
    /// Why a mark could not be left; told at the end of the step.
    failed: Option<tensor::Error>,
    phase: Option<Open>,
    layer: Option<Open>,
}

impl Trace {
    pub(super) fn open(folder: &Path, rank: Rank, device: Device) -> Result<Trace, Failure> {
        Ok(Trace {
            file: TraceFile::open(folder, rank)?,
            device,
            step: 0,
            placed: (Mark::now(device)?, 0.0),
            marks: Vec::new(),
            failed: None,
            phase: None,
            layer: None,
        })
    }

    /// What follows is of update 1, 2, ….
    pub(super) fn step(&mut self, step: u64) -> Result<(), Failure> {
        self.flush()?;
        self.step = step;
        Ok(())
    }

    /// Writes what has ended. Waits for the device.
    pub(super) fn flush(&mut self) -> Result<(), Failure> {
        if let Some(error) = self.failed.take() {
            return Err(error.into());
        }
        for (border, mark) in std::mem::take(&mut self.marks) {
            let now_s = self.placed.1 + self.placed.0.seconds_to(&mark)?;
            self.placed = (mark, now_s);
            self.close(Row::Layers, now_s)?;
            match border {
                Border::Layer(layer) => {
                    let name = format!("layer {layer}");
                    self.layer = Some(Open { name, layer: Some(layer.0), start_s: now_s });
                }
                Border::Phase(phase) => {
                    self.close(Row::Phases, now_s)?;
                    self.phase = Some(Open { name: phase.to_string(), layer: None, start_s: now_s });
                }
                Border::StepEnd => self.close(Row::Phases, now_s)?,
            }
        }
        Ok(self.file.flush()?)
    }

    fn close(&mut self, row: Row, end_s: f64) -> Result<(), Failure> {
        let open = match row {
            Row::Phases => &mut self.phase,
            Row::Layers => &mut self.layer,
        };
        let Some(Open { name, layer, start_s }) = open.take() else { return Ok(()) };
        let mut arguments = json!({"step": self.step});
        if let Some(layer) = layer {
            arguments["layer"] = json!(layer);
        }
        Ok(self.file.event(row, &name, [start_s, end_s], &arguments)?)
    }

    /// The run has ended.
    pub(super) fn end(mut self) -> Result<(), Failure> {
        self.flush()?;
        Ok(self.file.close()?)
    }
}

impl Recorder for Trace {
    fn pass(&mut self, border: Border) {
        match Mark::now(self.device) {
            Ok(mark) => self.marks.push((border, mark)),
            Err(error) => self.failed = self.failed.take().or(Some(error)),
        }
    }
}
