//! `run.trace = true`: when each phase and layer began and ended.
//!
//! At a border only a mark is left. On a GPU the mark is a point in the computation's stream, so a span is the device's own
//! time and nothing waits for it inside a phase; spans are formed where a step has ended.

use std::path::Path;

use serde_json::json;
use tch::Device;

use crate::report::{Row, TraceFile};
use crate::runtime::failure::Failure;
use crate::runtime::liveness::{Border, Recorder};
use crate::runtime::units::{LayerIndex, Rank};
use crate::tensor;
use crate::tensor::gpu::Mark;

/// A phase or layer that has begun and not ended.
#[derive(Debug)]
struct OpenSpan {
    name: String,
    layer: Option<LayerIndex>,
    /// Seconds since the trace began.
    start_s: f64,
}

/// One rank's trace.
#[derive(Debug)]
pub(super) struct Trace {
    file: TraceFile,
    device: Device,
    /// The update that marks belong to; 0 before the first one.
    step: u64,
    /// The last mark whose time is known.
    last_mark: Mark,
    /// Seconds from the begin of the trace to that mark.
    last_mark_s: f64,
    marks: Vec<(Border, Mark)>,
    /// Why a mark could not be left; reported at the end of the step.
    failed: Option<tensor::Error>,
    phase: Option<OpenSpan>,
    layer: Option<OpenSpan>,
}

impl Trace {
    pub(super) fn open(folder: &Path, rank: Rank, device: Device) -> Result<Trace, Failure> {
        Ok(Trace {
            file: TraceFile::open(folder, rank)?,
            device,
            step: 0,
            last_mark: Mark::now(device)?,
            last_mark_s: 0.0,
            marks: Vec::new(),
            failed: None,
            phase: None,
            layer: None,
        })
    }

    /// What follows belongs to update 1, 2, ….
    pub(super) fn begin_update(&mut self, step: u64) -> Result<(), Failure> {
        self.flush()?;
        self.step = step;
        Ok(())
    }

    /// Writes the spans that have ended. Waits for the device.
    pub(super) fn flush(&mut self) -> Result<(), Failure> {
        if let Some(error) = self.failed.take() {
            return Err(error.into());
        }
        for (border, mark) in std::mem::take(&mut self.marks) {
            let now_s = self.last_mark_s + self.last_mark.seconds_to(&mark)?;
            self.last_mark = mark;
            self.last_mark_s = now_s;
            self.end_span(Row::Layers, now_s)?;
            match border {
                Border::Layer(layer) => {
                    let name = format!("layer {layer}");
                    self.layer = Some(OpenSpan { name, layer: Some(layer), start_s: now_s });
                }
                Border::Phase(phase) => {
                    self.end_span(Row::Phases, now_s)?;
                    self.phase = Some(OpenSpan { name: phase.to_string(), layer: None, start_s: now_s });
                }
                Border::StepEnd => self.end_span(Row::Phases, now_s)?,
            }
        }
        Ok(self.file.flush()?)
    }

    fn end_span(&mut self, row: Row, end_s: f64) -> Result<(), Failure> {
        let open = match row {
            Row::Phases => self.phase.take(),
            Row::Layers => self.layer.take(),
        };
        let Some(OpenSpan { name, layer, start_s }) = open else { return Ok(()) };
        let mut arguments = json!({"step": self.step});
        if let Some(layer) = layer {
            arguments["layer"] = json!(layer.0);
        }
        Ok(self.file.event(row, &name, [start_s, end_s], &arguments)?)
    }

    pub(super) fn close(mut self) -> Result<(), Failure> {
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
