//! Files with one JSON object a line: metrics.jsonl and answers.jsonl. A run appends to them; a resumed run first cuts off
//! what belongs to updates that it will make again.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Seek as _, SeekFrom, Write as _};

use serde::{Deserialize, Serialize};

use super::step::Step;
use crate::runtime::units::from_index;

/// Appends one line for each object.
pub(super) fn append<T: Serialize>(file: &mut File, objects: &[T]) -> io::Result<()> {
    let mut text = String::new();
    for object in objects {
        text += &serde_json::to_string(object)?;
        text.push('\n');
    }
    file.write_all(text.as_bytes())?;
    file.flush()
}

/// Cuts metrics to the first `made` updates and returns them. Fewer stay where a line is not the next update's.
pub(super) fn cut_metrics(file: &mut File, made: u64) -> io::Result<Vec<Step>> {
    let mut kept: Vec<Step> = Vec::new();
    cut(file, |line| {
        let next = from_index(kept.len()) + 1;
        let step = serde_json::from_slice(line).ok().filter(|step: &Step| step.step == next && next <= made);
        let keep = step.is_some();
        kept.extend(step);
        keep
    })?;
    Ok(kept)
}

/// Cuts answers to those of the first `made` updates.
pub(super) fn cut_answers(file: &mut File, made: u64) -> io::Result<()> {
    #[derive(Deserialize)]
    struct Update {
        step: u64,
    }
    cut(file, |line| serde_json::from_slice(line).is_ok_and(|Update { step }| step <= made))
}

/// Keeps the leading lines that `keep` accepts. Whatever follows is cut off, and so is a line without its end: it was
/// still being written.
fn cut(file: &mut File, mut keep: impl FnMut(&[u8]) -> bool) -> io::Result<()> {
    // A device or a pipe has no length.
    if !file.metadata()?.is_file() {
        return Ok(());
    }
    let mut end = 0;
    let mut line = Vec::new();
    let mut lines = BufReader::new(&mut *file);
    loop {
        line.clear();
        let bytes = lines.read_until(b'\n', &mut line)?;
        if !line.ends_with(b"\n") || !keep(&line) {
            break;
        }
        end += from_index(bytes);
    }
    file.set_len(end)?;
    file.seek(SeekFrom::Start(end))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::AnswerLine;
    use std::io::Read as _;

    /// What a file with this text holds once `change` has run and "next" is written.
    fn after(text: &str, change: impl FnOnce(&mut File)) -> String {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.rewind().unwrap();
        change(&mut file);
        file.write_all(b"next").unwrap();
        file.rewind().unwrap();
        let mut left = String::new();
        file.read_to_string(&mut left).unwrap();
        left
    }

    fn line(step: u64) -> String {
        let numbers = Step { step, loss: 0.1, ratio: Some([1.0, 1.0]), prompts: vec!["a".into()], ..Step::default() };
        serde_json::to_string(&numbers).unwrap() + "\n"
    }

    #[track_caller]
    fn assert_metrics(text: &str, made: u64, kept: usize) {
        let expected: String = (1..=kept).map(|step| line(from_index(step))).collect();
        let left = after(text, |file| assert_eq!(cut_metrics(file, made).unwrap().len(), kept));
        assert_eq!(left, expected + "next");
    }

    #[test]
    fn metrics_of_updates_that_are_made_again_are_cut_off() {
        let text: String = (1..=5).map(line).collect();
        assert_metrics(&text, 3, 3);
        assert_metrics(&text, 0, 0);
    }

    #[test]
    fn a_torn_line_and_what_follows_it_are_cut_off() {
        assert_metrics(&format!("{}{}", line(1), line(2).trim_end()), 2, 1);
        assert_metrics(&format!("{}{}{}", line(1), line(1), line(2)), 2, 1);
    }

    #[test]
    fn answers_of_updates_that_are_made_again_are_cut_off_and_so_is_a_torn_line() {
        let answer = |step, answer| AnswerLine { step, answer, text: "one\n\"two\"".into(), ..AnswerLine::default() };
        let mut file = tempfile::tempfile().unwrap();
        append(&mut file, &[answer(1, 0), answer(1, 1), answer(2, 0), answer(3, 0)]).unwrap();
        file.write_all(b"{\"step\":3,\"te").unwrap();
        file.rewind().unwrap();
        cut_answers(&mut file, 2).unwrap();
        append(&mut file, &[answer(3, 7)]).unwrap();
        file.rewind().unwrap();
        let lines: Vec<AnswerLine> =
            BufReader::new(file).lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
        assert_eq!(lines, [answer(1, 0), answer(1, 1), answer(2, 0), answer(3, 7)]);
        let cut = |made| after("{\"step\":1}\n{\"step\":1", |file| cut_answers(file, made).unwrap());
        assert_eq!([cut(2), cut(0)], ["{\"step\":1}\nnext", "next"]);
    }
}
