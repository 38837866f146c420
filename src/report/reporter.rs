//! Writes a run directory and the terminal while a run goes on.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::answers::AnswerLine;
use super::error::Error;
use super::evaluation::{Evaluation, EvaluationLine};
use super::events::Events;
use super::jsonl::{self, EarlierMetrics};
use super::progress::Progress;
use super::receipt::{Receipt, write_receipt};
use super::step::Step;
use super::summary;
use crate::runtime::liveness::Recorder;
use crate::runtime::terminal::say;

/// Reports a run. Rank 0 writes; on other ranks every call does nothing, but each rank's log has the lines.
pub struct Reporter {
    folder: PathBuf,
    /// Whether this rank prints.
    first: bool,
    /// On rank 0 of a run.
    files: Option<Files>,
    progress: Progress,
}

/// The open files of a run directory.
struct Files {
    metrics: File,
    /// Present once an answer was sampled.
    answers: Option<File>,
    events: Events,
}

impl Files {
    /// Opens the files, cut to the first `made` updates or emptied, and returns the metrics of those.
    fn open(folder: &Path, config_toml: &str, made: Option<u64>) -> Result<(Files, EarlierMetrics), Error> {
        let write = |file: PathBuf| move |source| Error::Write { file, source };
        fs::create_dir_all(folder).map_err(write(folder.into()))?;
        let file = folder.join("metrics.jsonl");
        let opened = OpenOptions::new().create(true).read(true).write(true).truncate(false).open(&file);
        let mut metrics = opened.map_err(write(file.clone()))?;
        let dropped = folder.join("metrics.dropped.jsonl");
        let earlier = jsonl::cut_metrics(&mut metrics, made, &dropped).map_err(write(file))?;
        let file = folder.join("answers.jsonl");
        let answers = reopen_answers(&file, made).map_err(write(file))?;
        let events = Events::open(folder, made)?;
        let file = folder.join("config.resolved.toml");
        fs::write(&file, config_toml).map_err(write(file))?;
        keep_receipt(folder).map_err(write(folder.join("receipt.json")))?;
        Ok((Files { metrics, answers, events }, earlier))
    }
}

/// Renames the receipt of an earlier start to `receipt.step_N.json`, after its updates, or to `receipt.earlier.json` where it
/// does not say so many. A number is appended where that name is taken.
fn keep_receipt(folder: &Path) -> io::Result<()> {
    let file = folder.join("receipt.json");
    let text = match fs::read(&file) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        read => read.unwrap_or_default(),
    };
    let receipt = serde_json::from_slice::<Value>(&text).unwrap_or_default();
    let which = receipt["steps"].as_u64().map_or("earlier".to_owned(), |steps| format!("step_{steps}"));
    let mut kept = folder.join(format!("receipt.{which}.json"));
    let mut number = 1_u64;
    while kept.exists() {
        number += 1;
        kept = folder.join(format!("receipt.{which}_{number}.json"));
    }
    fs::rename(&file, kept)
}

/// The answers of an earlier run, if there are some; a run that samples none has no such file.
fn reopen_answers(file: &Path, made: Option<u64>) -> io::Result<Option<File>> {
    let mut answers = match OpenOptions::new().read(true).write(true).open(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    jsonl::cut_answers(&mut answers, made.unwrap_or(0), &file.with_file_name("answers.dropped.jsonl"))?;
    Ok(Some(answers))
}

impl Reporter {
    /// Opens `folder` on rank 0 (`first`), whose [`RunLock`](super::RunLock) this run holds. The receipt of an earlier start is
    /// renamed to `receipt.step_N.json`, since it must not pass for this one's. Metrics and answers are cut to the
    /// first `made` updates (absent for a new run) with their evaluations, and the metrics of those are returned; later lines move to
    /// files beside.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn open(
        folder: &Path,
        first: bool,
        config_toml: &str,
        made: Option<u64>,
    ) -> Result<(Reporter, EarlierMetrics), Error> {
        let opened = if first { Some(Files::open(folder, config_toml, made)?) } else { None };
        let (files, earlier) = opened.unzip();
        let progress = Progress::begin(first);
        Ok((Reporter { folder: folder.into(), first, files, progress }, earlier.unwrap_or_default()))
    }

    /// A reporter of work in `folder` that is no run: it prints on rank 0 (`first`) and writes no file but the log.
    #[must_use]
    pub fn of_lines(folder: &Path, first: bool) -> Reporter {
        Reporter { folder: folder.into(), first, files: None, progress: Progress::begin(first) }
    }

    /// Prints a line; every rank's log has it too.
    pub fn line(&self, text: &str) {
        tracing::info!("{}", text.trim_start());
        self.show(text);
    }

    fn show(&self, text: &str) {
        if self.first {
            self.progress.suspend(|| say(text));
        }
    }

    /// Says what is happening now, beside the bar; nothing where there is no bar.
    pub fn now(&mut self, text: &str) {
        self.progress.now(text);
    }

    /// Sets the updates to come: `left` of them, up to update `steps`. `ahead` has the prompt lengths of the next updates
    /// in tokens, one entry an update; with the seconds of past updates they give the time that is left.
    pub fn expect(&mut self, ahead: &[Vec<u64>], left: u64, steps: u64) {
        self.progress.expect(ahead, left, steps);
    }

    /// Receives the phases of this rank for the bar, if there is a bar.
    #[must_use]
    pub fn phases(&self) -> Option<Box<dyn Recorder>> {
        self.progress.phases()
    }

    /// Reports an update that is done.
    ///
    /// # Errors
    /// When metrics.jsonl or the event file cannot be written.
    pub fn step(&mut self, step: &Step, steps: u64) -> Result<(), Error> {
        tracing::info!("step {}/{steps}: loss {}, grad norm {}", step.step, step.loss, step.grad_norm);
        let Some(files) = &mut self.files else { return Ok(()) };
        let written = jsonl::append(&mut files.metrics, std::slice::from_ref(step));
        written.map_err(|source| Error::Write { file: self.folder.join("metrics.jsonl"), source })?;
        files.events.step(step)?;
        let left = self.progress.done(step.step, step.seconds.total).map_or(String::new(), |left| format!("  {left}"));
        self.show(&(summary::step(step, steps) + &left));
        for note in summary::step_notes(step) {
            self.line(&note);
        }
        Ok(())
    }

    /// Reports an evaluation: a line for each set. The event file comes first, so that a run that is killed in between writes
    /// the same point there again and loses none.
    ///
    /// # Errors
    /// When metrics.jsonl or the event file cannot be written.
    pub fn evaluation(&mut self, evaluation: &Evaluation) -> Result<(), Error> {
        for (set, held_out) in &evaluation.sets {
            self.line(&format!("  evaluation after update {}, {set}: {}", evaluation.step, held_out.text()));
        }
        let Some(files) = &mut self.files else { return Ok(()) };
        files.events.evaluation(evaluation)?;
        let line = EvaluationLine { evaluation: evaluation.clone() };
        let written = jsonl::append(&mut files.metrics, std::slice::from_ref(&line));
        written.map_err(|source| Error::Write { file: self.folder.join("metrics.jsonl"), source })
    }

    /// Appends sampled answers to answers.jsonl, before [`Reporter::step`] of their update.
    ///
    /// # Errors
    /// When answers.jsonl cannot be written.
    pub fn answers(&mut self, lines: &[AnswerLine]) -> Result<(), Error> {
        let Some(files) = self.files.as_mut().filter(|_| !lines.is_empty()) else { return Ok(()) };
        let file = self.folder.join("answers.jsonl");
        let written = match &mut files.answers {
            Some(opened) => jsonl::append(opened, lines),
            absent => File::create(&file).and_then(|opened| jsonl::append(absent.insert(opened), lines)),
        };
        written.map_err(|source| Error::Write { file, source })
    }

    /// Brings metrics and answers to the disk: a checkpoint must not know updates that they lack.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn settle(&self) -> Result<(), Error> {
        let Some(files) = &self.files else { return Ok(()) };
        for (name, opened) in [("metrics.jsonl", Some(&files.metrics)), ("answers.jsonl", files.answers.as_ref())] {
            let Some(opened) = opened else { continue };
            if opened.metadata().is_ok_and(|about| about.is_file()) {
                opened.sync_data().map_err(|source| Error::Write { file: self.folder.join(name), source })?;
            }
        }
        Ok(())
    }

    /// Writes receipt.json on rank 0.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn receipt(&self, receipt: &Receipt) -> Result<(), Error> {
        if self.files.is_some() { write_receipt(&self.folder, receipt) } else { Ok(()) }
    }

    /// Prints the table at the end of a run.
    pub fn table(&mut self, receipt: &Receipt) {
        self.progress.end();
        self.show(&summary::table(receipt, &self.folder));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_receipt_of_an_earlier_start_is_renamed_and_none_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path();
        keep_receipt(run).unwrap();
        let kept = [
            ("receipt.step_7.json", r#"{"steps": 7, "passed": true}"#),
            ("receipt.step_7_2.json", r#"{"steps": 7}"#),
            ("receipt.earlier.json", "torn"),
            ("receipt.earlier_2.json", ""),
        ];
        for (_, text) in kept {
            fs::write(run.join("receipt.json"), text).unwrap();
            keep_receipt(run).unwrap();
            assert!(!run.join("receipt.json").exists());
        }
        for (name, text) in kept {
            assert_eq!(fs::read_to_string(run.join(name)).unwrap(), text, "{name}");
        }
    }
}
