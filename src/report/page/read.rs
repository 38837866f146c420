//! Reads a run directory. A run that goes on, or that was killed, has a page too, so torn lines are notes and no errors.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::answers::Answers;
use super::error::Error;
use super::facts::Facts;
use super::life::Signs;
use super::log::{self, Logged};
use crate::report::evaluation::Evaluation;
use crate::report::jsonl::Metrics;
use crate::report::step::Step;

/// One run directory.
#[derive(Debug, Default)]
pub(super) struct Run {
    pub(super) folder: PathBuf,
    pub(super) steps: Vec<Step>,
    /// In the order of their updates.
    pub(super) evaluations: Vec<Evaluation>,
    pub(super) receipt: Option<Facts>,
    /// Receipts of its gates, in the order in which gates run.
    pub(super) gates: Vec<Facts>,
    pub(super) config: toml::Table,
    pub(super) answers: Answers,
    /// Failures in the logs of its last start, the earliest first.
    pub(super) failures: Vec<Logged>,
    /// When that start began, UTC, RFC 3339; empty where nothing tells.
    pub(super) began: String,
    pub(super) signs: Signs,
    /// The newest checkpoint, as the file `latest` names it.
    pub(super) newest: Option<String>,
    /// What could not be read.
    pub(super) notes: Vec<String>,
}

impl Run {
    /// Reads the files that exist; a torn line becomes a note.
    ///
    /// # Errors
    /// When the folder is no run directory, or a file cannot be read.
    pub(super) fn read(folder: &Path) -> Result<Run, Error> {
        let mut run = Run { folder: folder.to_owned(), ..Run::default() };
        run.read_gates()?;
        let known = ["metrics.jsonl", "receipt.json", "config.resolved.toml", "logs"];
        if run.gates.is_empty() && !known.iter().any(|name| folder.join(name).exists()) {
            return Err(Error::NoRun { folder: folder.to_owned() });
        }
        run.read_steps()?;
        run.answers = Answers::read(&folder.join("answers.jsonl"), &mut run.notes)?;
        let logs = folder.join("logs");
        let last_start = log::last_start(folder).map_err(|source| Error::Read { file: logs, source })?;
        (run.failures, run.began) = (last_start.failures, last_start.began);
        run.signs = Signs::read(folder);
        run.newest =
            text_of(&folder.join("latest"))?.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
        run.receipt = run.read_receipt(&folder.join("receipt.json"))?;
        // A gate's own folder is a run with a table of one gate.
        run.gates.extend(run.receipt.clone().filter(|receipt| receipt.gate.is_some()));
        if let Some(text) = text_of(&folder.join("config.resolved.toml"))? {
            match text.parse() {
                Ok(config) => run.config = config,
                Err(_) => run.notes.push("config.resolved.toml is no TOML and is left out".to_owned()),
            }
        }
        Ok(run)
    }

    /// The last part of its path.
    pub(super) fn name(&self) -> String {
        let absolute = fs::canonicalize(&self.folder).unwrap_or_else(|_| self.folder.clone());
        absolute.file_name().unwrap_or(absolute.as_os_str()).to_string_lossy().into_owned()
    }

    fn read_steps(&mut self) -> Result<(), Error> {
        let Some(text) = text_of(&self.folder.join("metrics.jsonl"))? else { return Ok(()) };
        let lines: Vec<&str> = text.split('\n').collect();
        let mut torn = Vec::new();
        // Only a torn last line has no line end.
        for (index, line) in lines.iter().enumerate().filter(|(_, line)| !line.is_empty()) {
            match Metrics::read(line.as_bytes()) {
                Some(Metrics::Step(step)) => self.steps.push(*step),
                Some(Metrics::Evaluation(evaluation)) => self.evaluations.push(evaluation),
                None => torn.push(index + 1),
            }
        }
        match torn[..] {
            [] => {}
            [line] => self.notes.push(format!("metrics.jsonl, line {line}: torn, or no update, and left out")),
            [first, ..] => {
                let count = torn.len();
                let note =
                    format!("metrics.jsonl, line {first} and {} more: torn, or no update, and left out", count - 1);
                self.notes.push(note);
            }
        }
        Ok(())
    }

    fn read_receipt(&mut self, file: &Path) -> Result<Option<Facts>, Error> {
        let Some(text) = text_of(file)? else { return Ok(None) };
        let read = serde_json::from_str(&text);
        if let Err(error) = &read {
            self.notes.push(format!("{} is no receipt and is left out: {error}", file.display()));
        }
        Ok(read.ok())
    }

    /// Receipts of gates in `gates/`, or in the folder itself where it is a folder of gates.
    fn read_gates(&mut self) -> Result<(), Error> {
        let mut found = BTreeMap::new();
        for folder in [self.folder.join("gates"), self.folder.clone()] {
            let entries = match fs::read_dir(&folder) {
                Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => continue,
                entries => entries.map_err(|source| Error::Read { file: folder.clone(), source })?,
            };
            for entry in entries {
                let entry = entry.map_err(|source| Error::Read { file: folder.clone(), source })?;
                if let Some(receipt) = self.read_receipt(&entry.path().join("receipt.json"))? {
                    found.insert(entry.file_name(), receipt);
                }
            }
        }
        self.gates = found.into_values().filter(|receipt| receipt.gate.is_some()).collect();
        // By number, then by length: sorted by name, 1m would precede 256k.
        let number = |gate: &Facts| gate.gate.as_deref().and_then(|name| name.split('_').next()).map(str::to_owned);
        self.gates.sort_by_cached_key(|gate| (number(gate), gate.positions, gate.group_size));
        Ok(())
    }
}

/// The text of a file, or `None` where there is no file. Bytes that are no UTF-8 become replacement characters.
fn text_of(file: &Path) -> Result<Option<String>, Error> {
    let absent = |error: &io::Error| [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind());
    match fs::read(file) {
        Err(error) if absent(&error) => Ok(None),
        read => {
            let bytes = read.map_err(|source| Error::Read { file: file.to_owned(), source })?;
            Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_cannot_be_read_are_one_note() {
        let room = tempfile::tempdir().unwrap();
        let notes = |text: &str| {
            fs::write(room.path().join("metrics.jsonl"), text).unwrap();
            Run::read(room.path()).unwrap().notes
        };
        assert_eq!(notes("{\n"), ["metrics.jsonl, line 1: torn, or no update, and left out"]);
        let many = "{\n".repeat(1000);
        assert_eq!(notes(&many), ["metrics.jsonl, line 1 and 999 more: torn, or no update, and left out"]);
    }

    #[test]
    fn torn_lines_of_metrics_are_notes() {
        let room = tempfile::tempdir().unwrap();
        fs::write(room.path().join("metrics.jsonl"), "{\"step\":1,\"loss\":null}\n{}\n{\"step\":2").unwrap();
        let run = Run::read(room.path()).unwrap();
        assert_eq!(run.steps.len(), 1);
        assert!(run.steps[0].loss.is_nan(), "a number that was not finite is no torn line");
        let notes = run.notes.join("; ");
        assert!(notes.contains("metrics.jsonl, line 2 and 1 more"), "{notes}");
    }

    #[test]
    fn a_folder_that_is_no_run_is_refused_and_one_of_gates_is_read() {
        let room = tempfile::tempdir().unwrap();
        assert!(matches!(Run::read(room.path()), Err(Error::NoRun { .. })));
        assert!(matches!(Run::read(&room.path().join("absent")), Err(Error::NoRun { .. })));
        fs::create_dir_all(room.path().join("gate5_g2")).unwrap();
        let receipt = r#"{"gate": "gate5_g2", "passed": true, "peak_device_bytes": [3, 5], "positions": 64}"#;
        fs::write(room.path().join("gate5_g2/receipt.json"), receipt).unwrap();
        let run = Run::read(room.path()).unwrap();
        assert_eq!((run.gates.len(), run.gates[0].device_peak()), (1, Some(5)));
        let own = Run::read(&room.path().join("gate5_g2")).unwrap();
        assert_eq!((own.gates.len(), own.receipt.unwrap().positions), (1, 64));
    }
}
