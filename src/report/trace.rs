//! A trace in Chrome's event format, `trace/rank_N.json` in the run directory: one process for each rank, with one row for
//! phases and one for layers. A run that ends early leaves an array without its end, which viewers accept.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::error::Error;
use crate::runtime::units::Rank;

/// A row of a rank's events.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Row {
    /// Phases, one after another.
    Phases = 0,
    /// Layers within phases.
    Layers = 1,
}

/// The trace of one rank.
#[derive(Debug)]
pub struct TraceFile {
    file: PathBuf,
    out: BufWriter<File>,
    rank: Rank,
    events: u64,
}

impl TraceFile {
    /// Creates the trace of a rank and replaces that of an earlier run.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn open(folder: &Path, rank: Rank) -> Result<TraceFile, Error> {
        let folder = folder.join("trace");
        let file = folder.join(format!("rank_{rank}.json"));
        let opened = fs::create_dir_all(&folder).and_then(|()| File::create(&file));
        let out = BufWriter::new(opened.map_err(|source| Error::Write { file: file.clone(), source })?);
        let mut trace = TraceFile { file, out, rank, events: 0 };
        trace.names("process_name", Row::Phases, &format!("rank {rank}"))?;
        trace.names("thread_name", Row::Phases, "phases")?;
        trace.names("thread_name", Row::Layers, "layers")?;
        Ok(trace)
    }

    fn names(&mut self, what: &str, row: Row, name: &str) -> Result<(), Error> {
        self.write(&json!({"name": what, "ph": "M", "pid": self.rank.0, "tid": row as u8, "args": {"name": name}}))
    }

    /// Writes an event from `span_s[0]` to `span_s[1]`, in seconds since the trace began.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn event(&mut self, row: Row, name: &str, span_s: [f64; 2], arguments: &Value) -> Result<(), Error> {
        let [start, end] = span_s.map(|seconds| seconds * 1e6);
        self.write(&json!({
            "name": name, "ph": "X", "pid": self.rank.0, "tid": row as u8, "ts": start, "dur": end - start,
            "args": arguments
        }))
    }

    fn write(&mut self, event: &Value) -> Result<(), Error> {
        let before = if self.events == 0 { "[\n" } else { ",\n" };
        self.events += 1;
        let written = write!(self.out, "{before}{event}");
        written.map_err(|source| Error::Write { file: self.file.clone(), source })
    }

    /// Writes buffered events to the file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.out.flush().map_err(|source| Error::Write { file: self.file.clone(), source })
    }

    /// Ends the array and the file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn close(mut self) -> Result<(), Error> {
        let ended = writeln!(self.out, "\n]");
        ended.map_err(|source| Error::Write { file: self.file.clone(), source })?;
        self.flush()
    }
}
