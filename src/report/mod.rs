//! What a run tells: lines on the terminal, metrics, the receipt. Only writer to the terminal besides the command itself.
//!
//! Rank 0 writes; on a terminal the run is a bar that is rewritten, in a file each step is one plain line.

mod answers;
mod events;
mod forecast;
mod log;
mod metrics;
pub mod page;
mod progress;
mod receipt;
mod step;
mod trace;

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use answers::AnswerLine;
pub use log::open_log;
pub use receipt::{AdapterForm, Check, KindBytes, PhaseMemory, Receipt, Seconds};
pub use step::Step;
pub use trace::{Row, TraceFile};

use crate::runtime::failure::{Classified, Exit};
use crate::runtime::liveness::Recorder;
use crate::runtime::units::Bytes;
use events::Events;
use progress::Progress;

/// Why a run cannot be reported.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another run writes there.
    #[error("another run is writing to {}; choose another place with --run-dir", folder.display())]
    Busy {
        /// The run directory.
        folder: PathBuf,
    },
    /// A file or folder of the run directory.
    #[error("cannot write {}: {source}; choose another place with --run-dir", file.display())]
    Write {
        /// Which.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// What the logs should hold is neither a level nor a filter.
    #[error(
        "the logs' filter \"{filter}\" is none: {reason}; set LONGSTRAW_LOG to error, warn, info, debug or trace, or to \
         module=level,…"
    )]
    Filter {
        /// The filter.
        filter: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Write { .. } => Exit::Data,
            Error::Busy { .. } | Error::Filter { .. } => Exit::Config,
        }
    }
}

/// What is measured on held-out prompts.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct HeldOut {
    /// Mean over prompts of the best-rewarded answers' log-probability minus that of the others, in nats; absent where no
    /// prompt has better and worse answers.
    pub margin: Option<f64>,
    /// Share of those prompts whose best-rewarded answer is the most probable.
    pub accuracy: Option<f64>,
    /// Mean reward of the answers that the policy draws; absent where answers come with the data.
    pub reward: Option<f64>,
    /// Drawn answers that have no reward.
    #[serde(default)]
    pub missing: u64,
    /// How many prompts.
    pub prompts: usize,
}

/// Writes a run directory and the terminal.
pub struct Reporter {
    folder: PathBuf,
    metrics: Option<File>,
    answers: Option<File>,
    events: Option<Events>,
    progress: Progress,
    first: bool,
}

impl Reporter {
    /// Opens `folder` on rank 0 (`first`); other ranks say nothing and write nothing here. The receipt of an earlier run
    /// is removed: it must not pass for this one's. Metrics and answers are cut to the first `made` updates, whose
    /// metrics are returned: none for a run that starts anew.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn open(folder: &Path, first: bool, config_toml: &str, made: u64) -> Result<(Reporter, Vec<Step>), Error> {
        let (mut metrics, mut answers, mut events, mut earlier) = (None, None, None, Vec::new());
        if first {
            let write = |file: PathBuf, source| Error::Write { file, source };
            fs::create_dir_all(folder).map_err(|source| write(folder.into(), source))?;
            // The lock goes with the file when the process ends, however it ends.
            let file = folder.join("metrics.jsonl");
            let opened = OpenOptions::new().create(true).read(true).write(true).truncate(false).open(&file);
            let mut opened = opened.map_err(|source| write(file.clone(), source))?;
            match opened.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(Error::Busy { folder: folder.into() }),
                Err(TryLockError::Error(source)) => return Err(write(file, source)),
            }
            // Cut only once it is this run's; a device or a pipe in its place has no length.
            if opened.metadata().is_ok_and(|about| about.is_file()) {
                earlier = metrics::cut(&mut opened, made).map_err(|source| write(file, source))?;
            }
            metrics = Some(opened);
            let sampled = folder.join("answers.jsonl");
            answers = answers::reopen(&sampled, made).map_err(|source| write(sampled, source))?;
            events = Some(Events::open(folder, made)?);
            let resolved = folder.join("config.resolved.toml");
            fs::write(&resolved, config_toml).map_err(|source| write(resolved, source))?;
            let receipt = folder.join("receipt.json");
            match fs::remove_file(&receipt) {
                Err(source) if source.kind() != std::io::ErrorKind::NotFound => return Err(write(receipt, source)),
                _ => {}
            }
        }
        let progress = Progress::begin(first);
        Ok((Reporter { folder: folder.into(), metrics, answers, events, progress, first }, earlier))
    }

    /// A line of its own; every rank's log holds it too.
    pub fn line(&self, text: &str) {
        tracing::info!("{}", text.trim_start());
        self.show(text);
    }

    fn show(&self, text: &str) {
        if self.first {
            self.progress.beside(|| say(text));
        }
    }

    /// What is happening now: beside the bar on a terminal, nothing in a file.
    pub fn now(&mut self, text: &str) {
        self.progress.now(text);
    }

    /// Updates are to come, `left` of them up to update `steps`; `ahead` has the prompt lengths of the next ones, one
    /// entry an update. From them and the seconds of those done follows how long the rest takes.
    pub fn expect(&mut self, ahead: &[Vec<u64>], left: u64, steps: u64) {
        self.progress.expect(ahead, left, steps);
    }

    /// What follows the phases of this rank for the bar, if there is one.
    #[must_use]
    pub fn phases(&self) -> Option<Box<dyn Recorder>> {
        self.progress.phases()
    }

    /// An update is done.
    ///
    /// # Errors
    /// When metrics.jsonl or the event file cannot be written.
    pub fn step(&mut self, step: &Step, steps: u64) -> Result<(), Error> {
        tracing::info!("step {}/{steps}: loss {}, grad norm {}", step.step, step.loss, step.grad_norm);
        let Some(metrics) = &mut self.metrics else { return Ok(()) };
        let written = serde_json::to_string(step).map_err(std::io::Error::from).and_then(|text| {
            writeln!(metrics, "{text}")?;
            metrics.flush()
        });
        let file = self.folder.join("metrics.jsonl");
        written.map_err(|source| Error::Write { file, source })?;
        self.events.as_mut().map_or(Ok(()), |events| events.step(step))?;
        let left = self.progress.done(step.step, step.seconds.total).map_or(String::new(), |left| format!("  {left}"));
        let reward = step.reward_mean.map_or_else(|| "none".into(), |mean| format!("{mean:.3}"));
        let ratio = step.ratio.map_or_else(|| "none".into(), |[least, most]| format!("{least:.6}..{most:.6}"));
        self.show(&format!(
            "step {:>3}/{steps}  loss {:>10.6}  reward {reward}  grad norm {:>9.3e}  ratio {ratio}  {:.1} s{left}",
            step.step,
            step.loss + 0.0,
            step.grad_norm,
            step.seconds.total
        ));
        if step.reward_missing > 0 {
            let failures: Vec<String> =
                step.reward_failures.iter().map(|(kind, count)| format!("{kind}: {count}")).collect();
            let why = if failures.is_empty() { String::new() } else { format!(" ({})", failures.join(", ")) };
            self.line(&format!(
                "  answers without a reward, which take no part in the update: {}{why}",
                step.reward_missing
            ));
        }
        if step.frac_groups_zero_std >= 1.0 && step.grad_norm == 0.0 && step.reward_mean.is_some() {
            self.line("  every group's rewards are equal, so this update has no gradient from rewards");
        }
        Ok(())
    }

    /// Sampled answers with what they were given, one object a line in answers.jsonl; before [`Reporter::step`] of their
    /// update.
    ///
    /// # Errors
    /// When answers.jsonl cannot be written.
    pub fn answers(&mut self, lines: &[AnswerLine]) -> Result<(), Error> {
        if !self.first || lines.is_empty() {
            return Ok(());
        }
        let file = self.folder.join("answers.jsonl");
        let written = match &mut self.answers {
            Some(opened) => answers::append(opened, lines),
            // A run that draws none has no such file.
            absent => File::create(&file).and_then(|opened| answers::append(absent.insert(opened), lines)),
        };
        written.map_err(|source| Error::Write { file, source })
    }

    /// Brings metrics and answers to the disk: a checkpoint must not know of updates that they lack.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn settle(&self) -> Result<(), Error> {
        for (name, opened) in [("metrics.jsonl", &self.metrics), ("answers.jsonl", &self.answers)] {
            let Some(opened) = opened else { continue };
            if opened.metadata().is_ok_and(|about| about.is_file()) {
                opened.sync_data().map_err(|source| Error::Write { file: self.folder.join(name), source })?;
            }
        }
        Ok(())
    }

    /// Writes receipt.json, beside and renamed.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn receipt(&self, receipt: &Receipt) -> Result<(), Error> {
        if !self.first {
            return Ok(());
        }
        write_receipt(&self.folder, receipt)
    }

    /// The table at the end of a run.
    pub fn table(&mut self, receipt: &Receipt) {
        self.progress.end();
        if self.first {
            say(&table(receipt, &self.folder));
        }
    }
}

/// Writes `receipt.json` into `folder`, beside and renamed; makes the folder if it is not there.
///
/// # Errors
/// When it cannot be written.
pub fn write_receipt(folder: &Path, receipt: &Receipt) -> Result<(), Error> {
    let (file, beside) = (folder.join("receipt.json"), folder.join("receipt.json.new"));
    let text = serde_json::to_string_pretty(receipt).map_err(std::io::Error::from);
    let written = text.and_then(|text| {
        fs::create_dir_all(folder)?;
        fs::write(&beside, text + "\n")?;
        fs::rename(&beside, &file)
    });
    written.map_err(|source| Error::Write { file, source })
}

/// A gate's checks, one a line, and what could not be checked.
#[must_use]
pub fn checks(receipt: &Receipt) -> String {
    let mut lines = Vec::new();
    for Check { name, value, limit, passed, means } in &receipt.checks {
        let verdict = if *passed { "ok    " } else { "FAILED" };
        let value = value.to_string();
        // A list with an entry for each layer would hide the other lines; the receipt has all of it.
        let short: String = if value.chars().count() > VALUE_CHARS_MAX {
            value.chars().take(VALUE_CHARS_MAX).chain("…".chars()).collect()
        } else {
            value
        };
        lines.push(format!("  {verdict}  {name}: {short} ({limit})"));
        if !passed {
            lines.push(format!("          {means}"));
        }
    }
    lines.extend(receipt.not_checked.iter().map(|what| format!("  not checked: {what}")));
    lines.join("\n")
}

/// A result on standard output: what `--json` or a verb that prints a result was asked for.
pub fn print_result(text: &str) {
    let mut out = std::io::stdout().lock();
    // A reader that has gone away wants no more lines.
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// A line on standard error.
pub fn say(text: &str) {
    let mut err = std::io::stderr().lock();
    let _ = writeln!(err, "{text}").and_then(|()| err.flush());
}

/// Most characters of a check's value on the terminal.
const VALUE_CHARS_MAX: usize = 120;

fn table(receipt: &Receipt, folder: &Path) -> String {
    let mut rows: Vec<(String, String)> = Vec::new();
    let mut row = |name: &str, value: String| rows.push((name.into(), value));
    row("gradient", receipt.gradient.clone());
    row("ranks", format!("{} ({} a prompt)", receipt.ranks, receipt.cp_size));
    row("loss, first and last update", format!("{:.6}, {:.6}", receipt.loss_first, receipt.loss));
    if let [Some(before), Some(after)] = receipt.held_out {
        let prompts = after.prompts;
        if let (Some(first), Some(last)) = (before.reward, after.reward) {
            row("held-out mean reward", format!("{first:.3} -> {last:.3} on {prompts} prompts"));
        }
        if let (Some(first), Some(last)) = (before.margin, after.margin) {
            row("held-out margin, right over wrong (nats)", format!("{first:.3} -> {last:.3} on {prompts} prompts"));
        }
        if let (Some(first), Some(last)) = (before.accuracy, after.accuracy) {
            row("held-out accuracy", format!("{first:.2} -> {last:.2}"));
        }
    }
    // A phase that does not occur in this run says nothing.
    for (name, seconds) in receipt.seconds.by_phase().into_iter().filter(|(_, seconds)| *seconds > 0.0) {
        row(&format!("seconds, {name}"), format!("{seconds:.1}"));
    }
    for (rank, bytes) in receipt.page_bytes_per_rank.iter().enumerate() {
        row(
            &format!("page bytes, rank {rank}"),
            format!("{} ({bytes} of {} pages)", Bytes(bytes.0), receipt.pages_per_rank[rank]),
        );
    }
    for (rank, digest) in receipt.adapter_digest.iter().enumerate() {
        row(&format!("adapter digest, rank {rank}"), digest.chars().take(16).collect());
    }
    rows.push(("adapter, receipt, metrics, logs in".into(), folder.display().to_string()));
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let line = "-".repeat(width + 42);
    let body: Vec<String> = rows.iter().map(|(name, value)| format!("{name:<width$}  {value}")).collect();
    format!("{line}\n{}\n{line}", body.join("\n"))
}
