//! A run's records, short enough to send: how it ended, its numbers by step, its receipt, its warnings.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::error::Error;
use super::text::shortened;
use crate::config::RunConfig;
use crate::runtime::file_error::FileError;
use crate::runtime::units::{float, from_index};

/// Most steps in the table.
const ROWS_MAX: usize = 60;
const COLUMNS_MAX: usize = 64;
const LOG_LINES_MAX: usize = 100;
const LOG_BYTES_MAX: usize = 8 << 10;
/// Bytes at the end of the log that are read.
const LOG_READ_MAX: u64 = 1 << 18;
/// Characters of a log line, and of a failure's message.
const LINE_CHARS_MAX: usize = 500;
const FAILURE_CHARS_MAX: usize = 2_000;
/// A shorter name of a prompt is part of too many words to be replaced.
const NAME_CHARS_MIN: usize = 3;
/// Entries of a list in the receipt.
const LIST_MAX: usize = 16;
/// The parts of a receipt that are sent: numbers, and texts that longstraw writes.
const RECEIPT_KEYS: &str = "passed stopped commit gradient dtype device attention_kernel delta_rule direct ranks cp_size positions \
    prompt_len answer_len group_size steps adapter seconds capture_share pinning_seconds \
    peak_device_bytes plan_device_bytes peak_host_bytes plan_host_bytes loss_first loss rewards \
    ratio_first grad_norm held_out held_out_sets best";

/// How a run ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Ended<'a> {
    /// At its last step.
    Finished,
    /// Before it, by request; a checkpoint holds its state.
    Stopped,
    /// With this message.
    Failed(&'a str),
}

/// All records as one text, without names of prompts and without texts of prompts or answers.
///
/// # Errors
/// When a file exists and cannot be read.
pub(super) fn records(dir: &Path, config: &RunConfig, ended: Ended<'_>) -> Result<String, Error> {
    let metrics = dir.join("metrics.jsonl");
    let steps = Steps::read(&metrics).map_err(FileError::at(&metrics, "read it"))?;
    let log = dir.join("logs").join("rank_0.log");
    let warnings = warnings(&log).map_err(FileError::at(&log, "read it"))?;
    let how = match ended {
        Ended::Finished => "It came to its end.".to_owned(),
        Ended::Stopped => "It was asked to stop before its end, and saved a checkpoint.".to_owned(),
        Ended::Failed(words) => format!("It failed: {}", steps.without_names(&shortened(words, FAILURE_CHARS_MAX))),
    };
    let mut parts = vec![format!("How the run ended\n{how}"), format!("Settings\n{}", settings(config))];
    if let Some(receipt) = receipt(&dir.join("receipt.json")) {
        parts.push(format!("Receipt\n{receipt}"));
    }
    parts.push(steps.text());
    let warnings = if warnings.is_empty() { "none".to_owned() } else { steps.without_names(&warnings) };
    parts.push(format!("Warnings and errors in the log\n{warnings}"));
    Ok(parts.join("\n\n"))
}

/// The few settings that explain numbers.
fn settings(config: &RunConfig) -> Value {
    let RunConfig { context, optimizer, grpo, lora, run, .. } = config;
    json!({
        "steps": run.steps, "group_size": grpo.group_size, "grad_accum": optimizer.grad_accum, "lr": optimizer.lr,
        "loss": grpo.loss, "clip_low": grpo.clip_low, "clip_high": grpo.clip_high, "clip_dual": grpo.clip_dual,
        "kl_coef": grpo.kl_coef, "kl_estimator": grpo.kl_estimator, "mask_truncated": grpo.mask_truncated,
        "scale_rewards": grpo.scale_rewards, "std_min": grpo.std_min, "temperature": grpo.temperature, "reward_fn": grpo.reward_fn,
        "gradient": grpo.gradient.to_string(), "lora_rank": lora.rank, "lora_alpha": lora.alpha,
        "prompt_len": context.prompt_len, "answer_len": context.answer_len, "samples": config.rollout.sample,
    })
}

/// The receipt's main numbers; `None` if there is no receipt, as after a failure.
fn receipt(file: &Path) -> Option<Value> {
    let whole: Map<String, Value> = serde_json::from_slice(&std::fs::read(file).ok()?).ok()?;
    let picked = RECEIPT_KEYS.split_whitespace().filter_map(|key| Some((key.to_owned(), whole.get(key)?.clone())));
    let short = picked.map(|(key, mut value)| {
        if let Some(list) = value.as_array_mut() {
            list.truncate(LIST_MAX);
        }
        (key, value)
    });
    Some(Value::Object(short.collect()))
}

/// The last warnings and errors of this run on rank 0.
fn warnings(file: &Path) -> io::Result<String> {
    let mut opened = match File::open(file) {
        Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        opened => opened?,
    };
    let length = opened.metadata()?.len();
    opened.seek(SeekFrom::Start(length.saturating_sub(LOG_READ_MAX)))?;
    let mut bytes = Vec::new();
    opened.take(LOG_READ_MAX).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    // A later run appends to the log of an earlier one; its first line names the program and the rank.
    let start = lines.iter().rposition(|line| line.contains(" longstraw ") && line.contains(", rank 0 of "));
    let mut kept: Vec<String> = Vec::new();
    let mut size = 0;
    for line in lines[start.unwrap_or(0)..].iter().rev() {
        if !matches!(line.split_whitespace().nth(1), Some("WARN" | "ERROR")) {
            continue;
        }
        let line = shortened(line, LINE_CHARS_MAX).replace('\n', " ");
        size += line.len() + 1;
        if kept.len() >= LOG_LINES_MAX || size > LOG_BYTES_MAX {
            break;
        }
        kept.push(line);
    }
    kept.reverse();
    Ok(kept.join("\n"))
}

/// The numbers of every step.
#[derive(Debug, Default)]
struct Steps {
    /// In the order of first appearance.
    columns: Vec<String>,
    rows: Vec<BTreeMap<String, f64>>,
    /// Names of prompts; never sent.
    names: BTreeSet<String>,
}

impl Steps {
    /// Reads one step a line; drops everything that is not a number.
    fn read(file: &Path) -> io::Result<Steps> {
        let mut steps = Steps::default();
        let opened = match File::open(file) {
            Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(steps),
            opened => opened?,
        };
        let (mut lines, mut line) = (BufReader::new(opened), Vec::new());
        while lines.read_until(b'\n', &mut line)? > 0 {
            // A line about an evaluation is no update; the receipt has the first and the last one.
            if let Ok(Value::Object(step)) = serde_json::from_slice(&line)
                && !step.contains_key("evaluation")
            {
                steps.add(&step);
            }
            line.clear();
        }
        Ok(steps)
    }

    fn add(&mut self, step: &Map<String, Value>) {
        let mut row = BTreeMap::new();
        for (key, value) in step {
            match value {
                Value::Array(list) if list.iter().any(Value::is_string) => {
                    self.names.extend(list.iter().filter_map(Value::as_str).map(str::to_owned));
                    self.set(&mut row, key.clone(), Some(float(from_index(list.len()))));
                }
                Value::Array(list) => {
                    for (index, value) in list.iter().enumerate().take(2) {
                        self.set(&mut row, format!("{key}.{index}"), value.as_f64());
                    }
                }
                Value::Object(fields) => {
                    for (field, value) in fields {
                        self.set(&mut row, format!("{key}.{field}"), value.as_f64());
                    }
                }
                value => self.set(&mut row, key.clone(), value.as_f64()),
            }
        }
        self.rows.push(row);
    }

    fn set(&mut self, row: &mut BTreeMap<String, f64>, column: String, value: Option<f64>) {
        let Some(value) = value else { return };
        if !self.columns.contains(&column) {
            if self.columns.len() >= COLUMNS_MAX {
                return;
            }
            self.columns.push(column.clone());
        }
        row.insert(column, value);
    }

    fn without_names(&self, text: &str) -> String {
        let mut names: Vec<&String> =
            self.names.iter().filter(|name| name.chars().count() >= NAME_CHARS_MIN && text.contains(*name)).collect();
        names.sort_by_key(|name| std::cmp::Reverse(name.len()));
        names.into_iter().fold(text.to_owned(), |text, name| text.replace(name, "[a prompt]"))
    }

    /// First, last and extreme values of each number, and a table of evenly spaced steps.
    fn text(&self) -> String {
        let count = self.rows.len();
        let (Some(first), Some(last)) = (self.rows.first(), self.rows.last()) else {
            return "Steps\nno update was made".to_owned();
        };
        let shown: BTreeSet<usize> = if count <= ROWS_MAX {
            (0..count).collect()
        } else {
            (0..ROWS_MAX).map(|row| row * (count - 1) / (ROWS_MAX - 1)).collect()
        };
        let mut lines = vec![format!("Steps: {count}; different prompts: {}", self.names.len())];
        lines.push("number: first, last, least (at step), most (at step)".to_owned());
        for column in self.columns.iter().filter(|column| *column != "step") {
            let known = || self.rows.iter().filter_map(|row| Some((*row.get(column)?, cell(row, "step"))));
            let least = known().min_by(|a, b| a.0.total_cmp(&b.0));
            let most = known().max_by(|a, b| a.0.total_cmp(&b.0));
            let at = |found: Option<(f64, String)>| {
                found.map_or_else(|| "-".into(), |(value, step)| format!("{} ({step})", short(value)))
            };
            lines.push(format!(
                "{column}: {}, {}, {}, {}",
                cell(first, column),
                cell(last, column),
                at(least),
                at(most)
            ));
        }
        lines.push(format!("\nTable of {} steps\n{}", shown.len(), self.columns.join(",")));
        lines.extend(shown.into_iter().map(|index| {
            let cells: Vec<String> = self.columns.iter().map(|column| cell(&self.rows[index], column)).collect();
            cells.join(",")
        }));
        lines.join("\n")
    }
}

fn cell(row: &BTreeMap<String, f64>, column: &str) -> String {
    row.get(column).map_or_else(|| "-".to_owned(), |value| short(*value))
}

/// A number in few characters.
fn short(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() < 1e9 {
        format!("{value:.0}")
    } else if (1e-3..1e5).contains(&value.abs()) {
        format!("{value:.4}")
    } else {
        format!("{value:.3e}")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn dir_with(steps: u64) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let line = |step: u64| {
            json!({"step": step, "gradient": "exact", "loss": float(step) * 0.5, "reward_mean": if step == 3 { Value::Null } else { json!(0.25) },
                   "ratio": [0.5, 1.5], "prompts": ["secret plan", format!("file {step}")], "seconds": {"total": 1.25}})
        };
        let text: String = (1..=steps).flat_map(|step| [line(step).to_string(), "\n".to_owned()]).collect();
        fs::write(dir.path().join("metrics.jsonl"), text + "{\"step\": 9").unwrap();
        fs::create_dir(dir.path().join("logs")).unwrap();
        dir
    }

    fn sent(dir: &Path, ended: Ended<'_>) -> String {
        records(dir, &RunConfig::laptop(), ended).unwrap()
    }

    #[test]
    fn numbers_are_sent_and_names_are_counted() {
        let dir = dir_with(4);
        fs::write(dir.path().join("receipt.json"), r#"{"passed": true, "rewards": [1, 0], "adapter_digest": ["ab"]}"#)
            .unwrap();
        let text = sent(dir.path(), Ended::Finished);
        for words in [
            "It came to its end.",
            "Steps: 4; different prompts: 5",
            "loss: 0.5000, 2, 0.5000 (1), 2 (4)",
            "reward_mean: 0.2500, 0.2500,",
            "\nTable of 4 steps\nstep,loss,reward_mean,ratio.0,ratio.1,prompts,seconds.total\n1,0.5000,0.2500,0.5000,1.5000,2,1.2500\n",
            "\n3,1.5000,-,",
            r#"Receipt
{"passed":true,"rewards":[1,0]}"#,
            r#""group_size":"#,
            "Warnings and errors in the log\nnone",
        ] {
            assert!(text.contains(words), "no {words:?} in\n{text}");
        }
        assert!(!text.contains("secret plan") && !text.contains("file 2"), "{text}");
    }

    #[test]
    fn a_failure_and_the_log_are_sent_without_names_of_prompts() {
        let dir = dir_with(2);
        let log = "2026-01-01T00:00:00Z  WARN an earlier run's\n2026-01-01T00:00:01Z  INFO longstraw 0.1.0, rank 0 of 2, process 7\n\
                   2026-01-01T00:00:02Z  INFO step 1/2: loss 0\n2026-01-01T00:00:03Z  WARN secret plan is long\n\
                   2026-01-01T00:00:04Z ERROR rank 0, score: gone\n";
        fs::write(dir.path().join("logs/rank_0.log"), log).unwrap();
        let text = sent(dir.path(), Ended::Failed("rank 0, score: secret plan: not finite"));
        assert!(text.contains("It failed: rank 0, score: [a prompt]: not finite"), "{text}");
        assert!(text.contains("WARN [a prompt] is long\n") && text.contains("ERROR rank 0, score: gone"), "{text}");
        assert!(!text.contains("earlier run") && !text.contains("loss 0\n") && !text.contains("Receipt"), "{text}");
    }

    #[test]
    fn a_long_run_has_a_bounded_table_and_log() {
        let dir = dir_with(5_000);
        let line = |number: u64| [format!("2026-01-01T00:00:00Z  WARN {number} "), "x".repeat(900), "\n".to_owned()];
        let log: String = (0..5_000).flat_map(line).collect();
        fs::write(dir.path().join("logs/rank_0.log"), log).unwrap();
        let text = sent(dir.path(), Ended::Stopped);
        assert!(
            text.contains("Table of 60 steps") && text.contains("\n1,0.5000") && text.contains("\n5000,2500"),
            "{text}"
        );
        assert!(text.contains("WARN 4999 ") && !text.contains("WARN 4900 "), "{text}");
        assert!(text.len() < 24 << 10, "{} bytes", text.len());
    }

    #[test]
    fn a_run_without_files_has_made_no_update() {
        let dir = tempfile::tempdir().unwrap();
        assert!(sent(dir.path(), Ended::Failed("x")).contains("no update was made"));
    }
}
