//! Sampled answers with what they were given, `answers.jsonl` in the run directory: one object a line.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, ErrorKind, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One sampled answer.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct AnswerLine {
    /// The update that it was drawn for: updates made, that one included.
    pub step: u64,
    /// The prompt's name.
    pub prompt: String,
    /// Which of the group's answers, from 0.
    pub answer: u64,
    /// What it says, without special tokens.
    pub text: String,
    /// Its length.
    pub tokens: u64,
    /// The tokens themselves, where they were drawn: a text may be cut into others.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ids: Vec<i64>,
    /// Sum of its tokens' log-probabilities as they were drawn, at the run's temperature; absent where it stands in the data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprob: Option<f64>,
    /// What it was given; `None` where no reward could be had.
    pub reward: Option<f64>,
    /// The reward's parts by name, those that are known.
    pub parts: BTreeMap<String, f64>,
    /// Its advantage in its group.
    pub advantage: Option<f64>,
    /// Whether it was cut off at the longest that an answer may be.
    pub truncated: bool,
    /// What the data set says for rewards.
    pub reward_data: Map<String, Value>,
    /// Why there is no reward.
    pub failure: Option<String>,
}

/// Opens the answers of an earlier run, if there are any, and cuts off those of updates behind the first `made`, and what
/// follows a line that is torn.
pub(super) fn reopen(file: &Path, made: u64) -> io::Result<Option<File>> {
    let mut opened = match OpenOptions::new().read(true).write(true).open(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    // A device or a pipe in its place has no length.
    if opened.metadata().is_ok_and(|about| about.is_file()) {
        cut(&mut opened, made)?;
    }
    Ok(Some(opened))
}

/// Writes the lines behind what is there.
pub(super) fn append(file: &mut File, lines: &[AnswerLine]) -> io::Result<()> {
    let mut text = String::new();
    for line in lines {
        text += &serde_json::to_string(line)?;
        text.push('\n');
    }
    file.write_all(text.as_bytes())?;
    file.flush()
}

fn cut(file: &mut File, made: u64) -> io::Result<()> {
    /// Nothing else is asked of a line here.
    #[derive(Deserialize)]
    struct Of {
        step: u64,
    }
    let (mut end, mut line) = (0, Vec::new());
    let mut lines = BufReader::new(&mut *file);
    loop {
        line.clear();
        let bytes = lines.read_until(b'\n', &mut line)?;
        let whole = line.ends_with(b"\n");
        if !(whole && serde_json::from_slice(&line).is_ok_and(|Of { step }| step <= made)) {
            break;
        }
        end += crate::runtime::units::from_index(bytes);
    }
    drop(lines);
    file.set_len(end)?;
    file.seek(SeekFrom::Start(end))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(step: u64, answer: u64) -> AnswerLine {
        AnswerLine { step, answer, text: "line one\nline \"two\"".into(), ..AnswerLine::default() }
    }

    #[test]
    fn answers_of_updates_that_come_again_go_and_so_does_a_torn_line() {
        let room = tempfile::tempdir().unwrap();
        let file = room.path().join("answers.jsonl");
        assert!(reopen(&file, 3).unwrap().is_none(), "none are made up");
        let mut opened = File::create(&file).unwrap();
        append(&mut opened, &[of(1, 0), of(1, 1), of(2, 0), of(3, 0)]).unwrap();
        opened.write_all(b"{\"step\":3,\"te").unwrap();
        let mut opened = reopen(&file, 2).unwrap().unwrap();
        append(&mut opened, &[of(3, 7)]).unwrap();
        let read = || -> Vec<AnswerLine> {
            let text = std::fs::read_to_string(&file).unwrap();
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        };
        assert_eq!(read(), [of(1, 0), of(1, 1), of(2, 0), of(3, 7)]);
        std::fs::write(&file, "{\"step\":1}\n{\"step\":1").unwrap();
        reopen(&file, 2).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "{\"step\":1}\n");
        reopen(&file, 0).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "");
    }
}
