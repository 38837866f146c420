//! The folder of an evaluation without training: `results.jsonl`, a line for each prompt that is finished, and
//! `evaluation.json`, of what it is and what came out.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::Error;
use super::evaluation::{EvalLine, HeldOut};
use super::jsonl;

const ABOUT: &str = "evaluation.json";
const RESULTS: &str = "results.jsonl";

/// What an evaluation is of, and what came out.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct EvalSummary {
    /// Folder of the adapters, as it was named; absent for the base model alone.
    pub adapters: Option<PathBuf>,
    /// Commit that the binary was built from.
    pub commit: String,
    /// Time of the last end, UTC, RFC 3339; absent before the first.
    pub finished: Option<String>,
    /// What each set had shown then, by its name.
    pub sets: BTreeMap<String, HeldOut>,
    /// What the numbers follow from: digests and settings. An evaluation goes on only where all are the same.
    pub of: Value,
}

/// The results of an evaluation, open for more. Rank 0 has them.
#[derive(Debug)]
pub struct Results {
    folder: PathBuf,
    lines: File,
}

impl Results {
    /// What the evaluation in `folder` is of; `None` where there is none.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn about(folder: &Path) -> Result<Option<EvalSummary>, Error> {
        let file = folder.join(ABOUT);
        match fs::read(&file) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            read => {
                let text = read.map_err(|source| Error::Read { file: file.clone(), source })?;
                // It is written whole or not at all, so it is of another program where it cannot be understood.
                let summary = serde_json::from_slice(&text).map_err(std::io::Error::from);
                summary.map(Some).map_err(|source| Error::Read { file, source })
            }
        }
    }

    /// Opens the results in `folder`, which are of `about` or of nothing yet, and returns the newest line of each prompt: one that
    /// nobody could score has a line for each time. A torn line and what follows it moves to a file beside.
    ///
    /// # Errors
    /// When something cannot be read or written.
    pub fn open(folder: &Path, about: &EvalSummary) -> Result<(Results, Vec<EvalLine>), Error> {
        let file = folder.join(RESULTS);
        let write = |source| Error::Write { file: file.clone(), source };
        let is_known = Results::about(folder)?.is_some();
        let opened = OpenOptions::new().create(true).read(true).write(true).truncate(false).open(&file);
        let mut lines = opened.map_err(write)?;
        let all = jsonl::cut_lines(&mut lines, &folder.join("results.dropped.jsonl"), |_: &EvalLine| is_known);
        let newest: BTreeMap<(String, usize), EvalLine> =
            all.map_err(write)?.into_iter().map(|line| ((line.set.clone(), line.index), line)).collect();
        let finished = newest.into_values().collect();
        let results = Results { folder: folder.to_owned(), lines };
        // What an earlier end has written stays until there is a new one.
        if !is_known {
            results.write(about)?;
        }
        Ok((results, finished))
    }

    /// Appends finished prompts.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn append(&mut self, lines: &[EvalLine]) -> Result<(), Error> {
        let written = jsonl::append(&mut self.lines, lines);
        written.map_err(|source| Error::Write { file: self.folder.join(RESULTS), source })
    }

    /// Replaces `evaluation.json` by a rename, so that no reader sees half of it.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, summary: &EvalSummary) -> Result<(), Error> {
        let file = self.folder.join(ABOUT);
        let new = self.folder.join(format!(".{ABOUT}.partial"));
        let text = serde_json::to_string_pretty(summary).map_err(std::io::Error::from);
        let written = text.and_then(|text| {
            fs::write(&new, text + "\n")?;
            fs::rename(&new, &file)
        });
        written.map_err(|source| Error::Write { file, source })
    }
}

impl EvalSummary {
    /// The measurements of all sets, a column for each set.
    #[must_use]
    pub fn table(&self) -> String {
        let names: Vec<&String> = self.sets.keys().collect();
        let mut rows: Vec<(String, Vec<String>)> =
            vec![(String::new(), names.iter().map(ToString::to_string).collect())];
        rows.push(("prompts".to_owned(), self.sets.values().map(|set| set.prompts.to_string()).collect()));
        for (at, (name, _)) in HeldOut::default().numbers().into_iter().enumerate() {
            let values: Vec<Option<f64>> = self.sets.values().map(|set| set.numbers()[at].1).collect();
            if values.iter().any(Option::is_some) {
                let cell = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.4}"));
                rows.push((name.replace('/', " "), values.into_iter().map(cell).collect()));
            }
        }
        let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let column = rows.iter().flat_map(|(_, cells)| cells).map(String::len).max().unwrap_or(0);
        let line = |(name, cells): &(String, Vec<String>)| {
            let cells: Vec<String> = cells.iter().map(|cell| format!("{cell:>column$}")).collect();
            format!("{name:<width$}  {}", cells.join("  "))
        };
        rows.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn finished_prompts_come_back_once_and_a_torn_line_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let about = EvalSummary { of: json!({"seed": 1}), ..EvalSummary::default() };
        let line = |index| EvalLine { set: "codes".into(), index, margin: Some(0.1 + 0.2), ..EvalLine::default() };
        assert!(Results::about(folder.path()).unwrap().is_none());
        let (mut results, finished) = Results::open(folder.path(), &about).unwrap();
        assert!(finished.is_empty());
        results.append(&[line(0), line(1)]).unwrap();
        let file = folder.path().join(RESULTS);
        fs::write(&file, fs::read_to_string(&file).unwrap() + "{\"set\":\"codes\",\"ind").unwrap();
        let (mut results, finished) = Results::open(folder.path(), &about).unwrap();
        assert_eq!(finished, [line(0), line(1)]);
        let again = EvalLine { margin: Some(0.7), ..line(1) };
        results.append(&[line(2), again.clone(), line(3)]).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap().lines().count(), 5);
        let (_, finished) = Results::open(folder.path(), &about).unwrap();
        assert_eq!(finished, [line(0), again, line(2), line(3)], "a prompt that was done again, and those after it");
        assert_eq!(Results::about(folder.path()).unwrap(), Some(about.clone()));
        // A start that draws prompts again takes nothing away before it has something new.
        let ended = EvalSummary { finished: Some("then".to_owned()), ..about.clone() };
        results.write(&ended).unwrap();
        Results::open(folder.path(), &about).unwrap();
        assert_eq!(Results::about(folder.path()).unwrap(), Some(ended));
        // Lines without word of what they are of are nobody's.
        fs::remove_file(folder.path().join(ABOUT)).unwrap();
        assert!(Results::open(folder.path(), &about).unwrap().1.is_empty());
    }

    #[test]
    fn a_table_has_a_column_for_each_set_and_no_row_without_a_number() {
        let set = |margin, greedy| HeldOut { margin, greedy, prompts: 3, ..HeldOut::default() };
        let sets = [("a".to_owned(), set(Some(1.5), None)), ("books".to_owned(), set(None, Some(0.25)))];
        let summary = EvalSummary { sets: sets.into(), ..EvalSummary::default() };
        let table = summary.table();
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let rows: Vec<Vec<String>> = table.lines().map(words).collect();
        assert_eq!(rows[0], ["a", "books"]);
        assert_eq!(rows[2], ["margin", "1.5000", "-"]);
        assert_eq!(rows[3], ["greedy", "reward", "-", "0.2500"]);
        assert_eq!(rows.last().unwrap(), &["missing", "-", "0.0000"]);
    }
}
