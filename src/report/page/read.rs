//! Reads a run directory. A run that goes on, or that was killed, has a page too, so torn lines are notes and no errors.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::error::Error;
use crate::report::answers::AnswerLine;
use crate::report::evaluation::{Best, Evaluation, HeldOut};
use crate::report::jsonl::Metrics;
use crate::report::receipt::Seconds;
use crate::report::step::Step;

/// Most characters of a check's value on the page.
const VALUE_CHARS_MAX: usize = 200;

/// What the page needs of a receipt; a receipt of an earlier version lacks some of it.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of the receipt")]
pub(super) struct Facts {
    pub(super) gate: Option<String>,
    pub(super) passed: bool,
    pub(super) stopped: bool,
    pub(super) stopped_by_alarm: bool,
    pub(super) forced: bool,
    pub(super) checks: Vec<CheckFacts>,
    pub(super) not_checked: Vec<String>,
    pub(super) finished: String,
    pub(super) commit: String,
    pub(super) config_digest: String,
    pub(super) model_digest: String,
    pub(super) gradient: String,
    pub(super) dtype: String,
    pub(super) device: String,
    pub(super) attention_kernel: String,
    pub(super) delta_rule: Option<String>,
    pub(super) ranks: usize,
    pub(super) cp_size: usize,
    pub(super) positions: u64,
    pub(super) prompt_len: u64,
    pub(super) answer_len: u64,
    pub(super) group_size: u64,
    pub(super) steps: u64,
    pub(super) seconds: Seconds,
    pub(super) capture_share: f64,
    pub(super) peak_device_bytes: Vec<u64>,
    pub(super) peak_host_bytes: Vec<u64>,
    pub(super) plan_device_bytes: u64,
    pub(super) plan_host_bytes: u64,
    pub(super) memory: Vec<PhaseFacts>,
    pub(super) loss_first: f64,
    pub(super) loss: f64,
    pub(super) grad_norm: f64,
    pub(super) held_out: [Option<HeldOut>; 2],
    pub(super) held_out_sets: BTreeMap<String, [Option<HeldOut>; 2]>,
    pub(super) best: Option<Best>,
}

impl Facts {
    /// Largest peak of all ranks' devices, in bytes.
    pub(super) fn device_peak(&self) -> Option<u64> {
        self.peak_device_bytes.iter().copied().max().filter(|&bytes| bytes > 0)
    }
}

/// A phase's peaks by rank, in bytes.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct PhaseFacts {
    pub(super) phase: String,
    pub(super) device_peak: Vec<u64>,
    pub(super) host_peak: Vec<u64>,
}

/// One check of a gate.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct CheckFacts {
    pub(super) name: String,
    #[serde(deserialize_with = "text_of_value")]
    pub(super) value: String,
    pub(super) limit: String,
    pub(super) passed: bool,
    pub(super) means: String,
}

fn text_of_value<'de, D: Deserializer<'de>>(value: D) -> Result<String, D::Error> {
    Ok(Value::deserialize(value)?.to_string().chars().take(VALUE_CHARS_MAX).collect())
}

/// The answers of one update with the highest and the lowest reward. `worst` is absent where all rewards are equal; an
/// answer without a reward is `best` only where no answer has one.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Extremes {
    pub(super) best: AnswerLine,
    pub(super) worst: Option<AnswerLine>,
}

impl Extremes {
    fn widen(&mut self, line: AnswerLine) {
        let Some(reward) = line.reward else { return };
        let Some(best) = self.best.reward else {
            self.best = line;
            return;
        };
        let worst = self.worst.as_ref().and_then(|worst| worst.reward).unwrap_or(best);
        if reward > best {
            let before = std::mem::replace(&mut self.best, line);
            self.worst.get_or_insert(before);
        } else if reward < worst {
            self.worst = Some(line);
        }
    }
}

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
    /// Answers of the first and of the last update that has some.
    pub(super) answers: Vec<Extremes>,
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
        run.read_answers()?;
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
        // Only a torn last line has no line end.
        for (index, line) in lines.iter().enumerate().filter(|(_, line)| !line.is_empty()) {
            match Metrics::read(line.as_bytes()) {
                Some(Metrics::Step(step)) => self.steps.push(*step),
                Some(Metrics::Evaluation(evaluation)) => self.evaluations.push(evaluation),
                None => self.notes.push(format!("metrics.jsonl, line {}: torn, or no update, and left out", index + 1)),
            }
        }
        Ok(())
    }

    fn read_answers(&mut self) -> Result<(), Error> {
        let file = self.folder.join("answers.jsonl");
        let read = |source| Error::Read { file: file.clone(), source };
        let opened = match File::open(&file) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            opened => opened.map_err(read)?,
        };
        // The file may be long: only what is shown is kept.
        let (mut lines, mut line, mut torn) = (BufReader::new(opened), Vec::new(), 0_u64);
        while lines.read_until(b'\n', &mut line).map_err(read)? > 0 {
            match serde_json::from_slice::<AnswerLine>(&line) {
                Err(_) => torn += 1,
                Ok(answer) => match self.answers.last_mut() {
                    Some(last) if last.best.step == answer.step => last.widen(answer),
                    _ => {
                        self.answers.truncate(1);
                        self.answers.push(Extremes { best: answer, worst: None });
                    }
                },
            }
            line.clear();
        }
        if torn > 0 {
            self.notes.push(format!("answers.jsonl: {torn} lines are torn and left out"));
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

    fn answer(step: u64, reward: Option<f64>) -> AnswerLine {
        AnswerLine { step, reward, text: format!("{reward:?}"), ..AnswerLine::default() }
    }

    #[test]
    fn the_first_and_the_last_updates_best_and_worst_answers_are_kept() {
        let room = tempfile::tempdir().unwrap();
        let rewards =
            [(1, Some(0.5)), (1, Some(0.1)), (1, Some(0.9)), (2, Some(7.0)), (3, None), (3, Some(1.0)), (3, Some(1.0))];
        let lines: Vec<String> =
            rewards.iter().map(|&(step, reward)| serde_json::to_string(&answer(step, reward)).unwrap()).collect();
        fs::write(room.path().join("answers.jsonl"), lines.join("\n") + "\n{\"torn").unwrap();
        fs::write(room.path().join("metrics.jsonl"), "{\"step\":1}\n{}\n{\"step\":2").unwrap();
        let run = Run::read(room.path()).unwrap();
        let rewards = |one: &Extremes| (one.best.reward, one.worst.as_ref().and_then(|worst| worst.reward));
        assert_eq!(run.answers.iter().map(|one| one.best.step).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(run.answers.iter().map(rewards).collect::<Vec<_>>(), [(Some(0.9), Some(0.1)), (Some(1.0), None)]);
        assert_eq!(run.steps.len(), 1);
        let notes = run.notes.join("; ");
        for words in ["metrics.jsonl, line 2", "metrics.jsonl, line 3", "answers.jsonl: 1 lines"] {
            assert!(notes.contains(words), "{notes}");
        }
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
