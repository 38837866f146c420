//! Files with one JSON object a line: metrics.jsonl and answers.jsonl. A run appends to them; a resumed run first moves what
//! belongs to updates that it will make again to a file beside.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::evaluation::{Evaluation, EvaluationLine};
use super::step::Step;
use crate::runtime::units::from_index;

/// What a line of metrics.jsonl is about.
#[derive(Debug)]
pub(super) enum Metrics {
    Step(Box<Step>),
    Evaluation(Evaluation),
}

impl Metrics {
    /// Reads a line; `None` where it is torn, or about neither.
    pub(super) fn read(line: &[u8]) -> Option<Metrics> {
        if let Ok(EvaluationLine { evaluation }) = serde_json::from_slice(line) {
            return Some(Metrics::Evaluation(evaluation));
        }
        let step = serde_json::from_slice(line).ok().filter(|step: &Step| step.step > 0)?;
        Some(Metrics::Step(Box::new(step)))
    }

    /// Place in the file: an update, then the evaluation after it.
    fn place(&self) -> (u64, bool) {
        match self {
            Metrics::Step(step) => (step.step, false),
            Metrics::Evaluation(evaluation) => (evaluation.step, true),
        }
    }
}

/// The metrics that an earlier start has left.
#[derive(Clone, Debug, Default)]
#[expect(missing_docs, reason = "the names say everything")]
pub struct EarlierMetrics {
    pub steps: Vec<Step>,
    pub evaluations: Vec<Evaluation>,
}

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

/// Cuts metrics to the first `made` updates and their evaluations, and returns them; all goes where `made` is absent. Fewer stay where a line is not of a later
/// update than the line before, or of its evaluation. What is cut off goes to `dropped`.
pub(super) fn cut_metrics(file: &mut File, made: Option<u64>, dropped: &Path) -> io::Result<EarlierMetrics> {
    let mut kept = EarlierMetrics::default();
    let mut last = (0, false);
    cut(file, dropped, |line| {
        let Some(metrics) = Metrics::read(line) else { return false };
        let place = metrics.place();
        if place <= last || made.is_none_or(|made| place.0 > made) {
            return false;
        }
        last = place;
        match metrics {
            Metrics::Step(step) => kept.steps.push(*step),
            Metrics::Evaluation(evaluation) => kept.evaluations.push(evaluation),
        }
        true
    })?;
    Ok(kept)
}

/// Keeps the leading lines that are whole and that `keep` accepts, and returns them. What is cut off goes to `dropped`.
pub(super) fn cut_lines<T: DeserializeOwned>(
    file: &mut File,
    dropped: &Path,
    mut keep: impl FnMut(&T) -> bool,
) -> io::Result<Vec<T>> {
    let mut kept = Vec::new();
    cut(file, dropped, |line| {
        let read = serde_json::from_slice(line).ok().filter(|read: &T| keep(read));
        let is_kept = read.is_some();
        kept.extend(read);
        is_kept
    })?;
    Ok(kept)
}

/// Cuts answers to those of the first `made` updates. What is cut off goes to `dropped`.
pub(super) fn cut_answers(file: &mut File, made: u64, dropped: &Path) -> io::Result<()> {
    #[derive(Deserialize)]
    struct Update {
        step: u64,
    }
    cut(file, dropped, |line| serde_json::from_slice(line).is_ok_and(|Update { step }| step <= made))
}

/// Keeps the leading lines that `keep` accepts. Whatever follows is appended to `dropped` and then cut off, and so is a line
/// without its end: it was still being written.
fn cut(file: &mut File, dropped: &Path, mut keep: impl FnMut(&[u8]) -> bool) -> io::Result<()> {
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
    file.seek(SeekFrom::Start(end))?;
    let mut rest = Vec::new();
    file.read_to_end(&mut rest)?;
    if rest.is_empty() {
        return Ok(());
    }
    if !rest.ends_with(b"\n") {
        rest.push(b'\n');
    }
    let mut beside = OpenOptions::new().create(true).append(true).open(dropped)?;
    beside.write_all(&rest)?;
    beside.sync_all()?;
    file.set_len(end)?;
    file.seek(SeekFrom::Start(end))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::AnswerLine;

    /// What a file with this text holds once `change` has run and "next" is written. Not a byte of the text is lost: what is
    /// not left is in the file of what was dropped.
    fn after(text: &str, change: impl FnOnce(&mut File, &Path)) -> String {
        let folder = tempfile::tempdir().unwrap();
        let dropped = folder.path().join("dropped");
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.rewind().unwrap();
        change(&mut file, &dropped);
        file.write_all(b"next").unwrap();
        file.rewind().unwrap();
        let mut left = String::new();
        file.read_to_string(&mut left).unwrap();
        let beside = std::fs::read_to_string(dropped).unwrap_or_default();
        assert_eq!((left.trim_end_matches("next").to_owned() + &beside).trim_end(), text.trim_end());
        left
    }

    fn line(step: u64) -> String {
        let numbers = Step { step, loss: 0.1, ratio: Some([1.0, 1.0]), prompts: vec!["a".into()], ..Step::default() };
        serde_json::to_string(&numbers).unwrap() + "\n"
    }

    #[track_caller]
    fn assert_metrics(text: &str, made: u64, kept: usize) {
        let expected: String = (1..=kept).map(|step| line(from_index(step))).collect();
        let left =
            after(text, |file, dropped| assert_eq!(cut_metrics(file, Some(made), dropped).unwrap().steps.len(), kept));
        assert_eq!(left, expected + "next");
    }

    #[test]
    fn metrics_of_updates_that_are_made_again_are_cut_off() {
        let text: String = (1..=5).map(line).collect();
        assert_metrics(&text, 3, 3);
        assert_metrics(&text, 0, 0);
    }

    #[test]
    fn an_update_whose_line_was_never_written_takes_no_later_one_with_it() {
        assert_metrics_of(&[1, 2, 4, 5], 4, &[1, 2, 4]);
    }

    #[track_caller]
    fn assert_metrics_of(steps: &[u64], made: u64, kept: &[u64]) {
        let text = |steps: &[u64]| steps.iter().map(|&step| line(step)).collect::<String>();
        let left = after(&text(steps), |file, dropped| drop(cut_metrics(file, Some(made), dropped).unwrap()));
        assert_eq!(left, text(kept) + "next");
    }

    #[test]
    fn an_evaluation_stays_with_its_update_and_is_read_once() {
        let evaluation = |step| {
            let evaluation = Evaluation { step, ..Evaluation::default() };
            serde_json::to_string(&EvaluationLine { evaluation }).unwrap() + "\n"
        };
        let text = [evaluation(0), line(1), line(2), evaluation(2), evaluation(2), line(3), evaluation(3)];
        for (made, kept) in [(0, 1), (1, 2), (2, 4), (3, 4)] {
            let left = after(&text.concat(), |file, dropped| {
                let earlier = cut_metrics(file, Some(made), dropped).unwrap();
                assert_eq!(earlier.steps.len() + earlier.evaluations.len(), kept);
            });
            assert_eq!(left, text[..kept].concat() + "next", "after {made} updates");
        }
        let torn = line(1) + evaluation(1).trim_end();
        assert_eq!(after(&torn, |file, dropped| drop(cut_metrics(file, Some(1), dropped).unwrap())), line(1) + "next");
        let new = |text: &str| after(text, |file, dropped| drop(cut_metrics(file, None, dropped).unwrap()));
        assert_eq!(new(&evaluation(0)), "next", "an earlier run's is not this run's");
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
        let folder = tempfile::tempdir().unwrap();
        cut_answers(&mut file, 2, &folder.path().join("dropped")).unwrap();
        append(&mut file, &[answer(3, 7)]).unwrap();
        file.rewind().unwrap();
        let lines: Vec<AnswerLine> =
            BufReader::new(file).lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
        assert_eq!(lines, [answer(1, 0), answer(1, 1), answer(2, 0), answer(3, 7)]);
        let cut = |made| after("{\"step\":1}\n{\"step\":1", |file, dropped| cut_answers(file, made, dropped).unwrap());
        assert_eq!([cut(2), cut(0)], ["{\"step\":1}\nnext", "next"]);
    }
}
