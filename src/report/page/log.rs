//! What the logs of a run say of its last start: failures, with the exit code that they led to.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use crate::runtime::units::Rank;

/// Bytes at the end of a log that are read.
const READ_MAX: u64 = 1 << 18;
/// Most logs that are read; those of further ranks say the same.
const LOGS_MAX: usize = 64;

/// A failure that a rank has logged.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Logged {
    /// Time of the line, UTC, RFC 3339.
    pub(super) time: String,
    /// The rank whose log has it.
    pub(super) rank: Rank,
    /// Absent in a log of an earlier version.
    pub(super) exit: Option<i32>,
    pub(super) message: String,
}

/// What the logs say of the last start.
#[derive(Debug, Default, PartialEq)]
pub(super) struct LastStart {
    /// When it began, UTC, RFC 3339; empty where nothing tells.
    pub(super) began: String,
    /// The earliest first.
    pub(super) failures: Vec<Logged>,
}

/// The last start in the logs of `run_dir`.
pub(super) fn last_start(run_dir: &Path) -> io::Result<LastStart> {
    let mut ranks: Vec<(Rank, std::path::PathBuf)> = Vec::new();
    let entries = match fs::read_dir(run_dir.join("logs")) {
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            return Ok(LastStart::default());
        }
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let number = name.strip_prefix("rank_").and_then(|rest| rest.strip_suffix(".log"));
        ranks.extend(number.and_then(|number| number.parse().ok()).map(|rank| (Rank(rank), entry.path())));
    }
    ranks.sort();
    let mut found = Vec::new();
    let mut start = String::new();
    for (rank, file) in ranks.into_iter().take(LOGS_MAX) {
        let text = end_of(&file)?;
        let records = records(&text);
        let last_start = records.iter().rposition(|record| is_start(record.text));
        let own = last_start.map_or("", |at| records[at].time);
        // The log of a rank that a later start did not have is of an earlier one. Rank 0 is in every start.
        if rank == Rank(0) {
            // A log of warnings alone has no line of its start, and the end of a long one may lack it.
            start = if own.is_empty() { start_of_file(run_dir) } else { own.to_owned() };
        }
        let of_last = records[last_start.unwrap_or(0)..].iter().filter(|record| record.time >= start.as_str());
        found.extend(of_last.filter(|record| record.level == "ERROR").map(|record| logged(rank, record)));
    }
    found.sort();
    Ok(LastStart { began: start, failures: found })
}

/// When the last start wrote its configuration, as the log writes times; empty where it is not there.
fn start_of_file(run_dir: &Path) -> String {
    let written = fs::metadata(run_dir.join("config.resolved.toml")).and_then(|file| file.modified());
    written.map_or_else(
        |_| String::new(),
        |time| chrono::DateTime::<chrono::Utc>::from(time).to_rfc3339_opts(chrono::SecondsFormat::Micros, true),
    )
}

/// The text at the end of a file, from a whole line on.
fn end_of(file: &Path) -> io::Result<String> {
    let mut opened = File::open(file)?;
    let skipped = opened.metadata()?.len().saturating_sub(READ_MAX);
    opened.seek(SeekFrom::Start(skipped))?;
    let mut bytes = Vec::new();
    opened.take(READ_MAX).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    Ok(if skipped > 0 { text.split_once('\n').map_or(String::new(), |(_, rest)| rest.to_owned()) } else { text })
}

/// A line of a log with the lines that belong to it.
#[derive(Clone, Copy)]
struct Record<'a> {
    time: &'a str,
    level: &'a str,
    text: &'a str,
}

fn record(text: &str) -> Option<Record<'_>> {
    let (time, rest) = text.split_once(' ')?;
    let is_time = time.len() >= 20 && time.ends_with('Z') && time.as_bytes().get(10) == Some(&b'T');
    let (level, text) = rest.trim_start().split_once(' ')?;
    let is_level = ["ERROR", "WARN", "INFO", "DEBUG", "TRACE"].contains(&level);
    (is_time && is_level).then_some(Record { time, level, text })
}

fn records(text: &str) -> Vec<Record<'_>> {
    let mut starts = Vec::new();
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if record(line).is_some() {
            starts.push(at);
        }
        at += line.len();
    }
    let ends = starts.iter().copied().skip(1).chain([text.len()]);
    starts.iter().zip(ends).filter_map(|(&start, end)| record(text[start..end].trim_end())).collect()
}

/// Whether it is the first line of a start.
fn is_start(text: &str) -> bool {
    text.starts_with("longstraw ") && text.contains(", rank ") && text.contains(", process ")
}

fn logged(rank: Rank, record: &Record<'_>) -> Logged {
    let known = record.text.rsplit_once(" exit=").and_then(|(message, code)| Some((message, code.parse().ok()?)));
    let (message, exit) = known.map_or((record.text, None), |(message, code)| (message, Some(code)));
    Logged { time: record.time.to_owned(), rank, exit, message: message.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(room: &Path, rank: usize, text: &str) {
        fs::create_dir_all(room.join("logs")).unwrap();
        fs::write(room.join(format!("logs/rank_{rank}.log")), text).unwrap();
    }

    #[test]
    fn failures_are_those_of_the_last_start_with_their_exit_code_and_further_lines() {
        let room = tempfile::tempdir().unwrap();
        let at = |second: u32, text: &str| format!("2026-01-01T00:00:{second:02}.000000Z {text}\n");
        let earlier = at(1, " INFO longstraw 0.1.0, rank 0 of 2, process 7") + &at(2, "ERROR before exit=3");
        let later = at(3, " INFO longstraw 0.1.0, rank 0 of 2, process 8") + &at(5, " INFO step 1/3: loss 0");
        write(room.path(), 0, &(earlier + &later));
        assert_eq!(last_start(room.path()).unwrap().failures, []);
        let rank_1 = at(3, " INFO longstraw 0.1.0, rank 1 of 2, process 9")
            + &at(7, "ERROR rank 1, capture, layer 2: out of device memory\n  a line more exit=5");
        write(room.path(), 1, &rank_1);
        write(room.path(), 2, &(at(1, " INFO longstraw 0.1.0, rank 2 of 3, process 4") + &at(2, "ERROR gone")));
        let found = last_start(room.path()).unwrap().failures;
        assert_eq!(found.len(), 1, "rank 2 was not in the last start: {found:?}");
        assert_eq!((found[0].rank, found[0].exit), (Rank(1), Some(5)));
        assert_eq!(found[0].message, "rank 1, capture, layer 2: out of device memory\n  a line more");
    }

    #[test]
    fn without_logs_nothing_has_failed_and_without_a_code_a_failure_has_none() {
        let room = tempfile::tempdir().unwrap();
        assert_eq!(last_start(room.path()).unwrap().failures, []);
        write(room.path(), 0, "no record\n2026-01-01T00:00:04Z ERROR rank 0, score: gone\n");
        let found = last_start(room.path()).unwrap().failures;
        assert_eq!((found[0].exit, found[0].message.as_str()), (None, "rank 0, score: gone"));
    }
}
