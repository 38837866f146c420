//! Answers on the page: some updates over the whole run, and of each the best, the worst and some between, with what was
//! expected. answers.jsonl may be long, so it is read line by line, and texts are cut.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead as _, BufReader, ErrorKind};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::Error;
use super::numbers::{count, short};
use crate::report::answers::AnswerLine;
use crate::report::averages::ends;
use crate::runtime::units::from_index;

/// Most updates whose answers are on the page.
const UPDATES_MAX: usize = 12;
/// Most answers of an update there.
const ANSWERS_MAX: usize = 4;
/// Characters of an answer that are seen at once, and those that are there when it is opened.
const SEEN_CHARS: usize = 600;
const CHARS_MAX: usize = 4000;
/// Most characters of a question or an expected text, and most of several texts.
const EXPECTED_CHARS_MAX: usize = 500;
const EXPECTED_MAX: usize = 6;

/// The answers of a run on its page.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Answers {
    pub(super) updates: Vec<OfUpdate>,
    /// Updates that have answers.
    pub(super) updates_all: usize,
    /// Least and largest reward of all answers.
    pub(super) reward_range: Option<[f64; 2]>,
}

/// Answers of one update, the best first.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct OfUpdate {
    pub(super) step: u64,
    /// Number of its answers, and their rewards in words.
    all: String,
    rewards: String,
    pub(super) shown: Vec<Shown>,
}

/// An answer that is shown, and its place among the others.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Shown {
    /// Its place among those of the update, by reward.
    pub(super) place: &'static str,
    pub(super) question: Option<String>,
    /// What its record expects; empty where the record has no reference answer.
    pub(super) expected: Vec<String>,
    /// The beginning of its text; what follows there; and the number of characters that are left out.
    pub(super) text: String,
    pub(super) rest: String,
    pub(super) left_out: usize,
    line: AnswerLine,
}

#[derive(Deserialize)]
struct Place {
    step: u64,
    #[serde(default)]
    reward: Option<f64>,
}

impl Answers {
    /// Reads the file where there is one; torn lines become a note.
    pub(super) fn read(file: &Path, notes: &mut Vec<String>) -> Result<Answers, Error> {
        let mut steps = BTreeSet::new();
        let mut range: Option<[f64; 2]> = None;
        let mut torn = 0_u64;
        each_line(file, |line| match serde_json::from_slice::<Place>(line) {
            Err(_) => torn += 1,
            Ok(Place { step, reward }) => {
                steps.insert(step);
                let wider =
                    |reward: f64| range.map_or([reward; 2], |[least, most]| [least.min(reward), most.max(reward)]);
                range = reward.map(wider).or(range);
            }
        })?;
        if torn > 0 {
            notes.push(format!("answers.jsonl: {torn} lines are torn and left out"));
        }
        let steps: Vec<u64> = steps.into_iter().collect();
        let chosen: BTreeSet<u64> = spread(steps.len(), UPDATES_MAX).into_iter().map(|at| steps[at]).collect();
        let mut updates: Vec<(u64, Vec<AnswerLine>)> = chosen.iter().map(|&step| (step, Vec::new())).collect();
        each_line(file, |line| {
            // Most lines belong to none of the chosen updates: their texts are not kept.
            let place = serde_json::from_slice::<Place>(line).ok();
            let at = place.and_then(|place| updates.binary_search_by_key(&place.step, |update| update.0).ok());
            if let Some((at, line)) = at.zip(serde_json::from_slice::<AnswerLine>(line).ok()) {
                updates[at].1.push(line);
            }
        })?;
        let updates = updates.into_iter().map(|(step, lines)| OfUpdate::of(step, lines)).collect();
        Ok(Answers { updates, updates_all: steps.len(), reward_range: range })
    }
}

impl OfUpdate {
    fn of(step: u64, mut lines: Vec<AnswerLine>) -> OfUpdate {
        // An answer without a reward comes last.
        let rank = |line: &AnswerLine| line.reward.unwrap_or(f64::NEG_INFINITY);
        lines.sort_by(|one, other| rank(other).total_cmp(&rank(one)));
        let known: Vec<f64> = lines.iter().filter_map(|line| line.reward).collect();
        let rewards = match ends(&known) {
            None => "no reward".to_owned(),
            Some([least, most]) if least < most => format!("rewards {} … {}", short(least), short(most)),
            Some([least, _]) => format!("every reward {}", short(least)),
        };
        let place = |line: &AnswerLine| match (line.reward, ends(&known)) {
            (None, _) | (_, None) => "no reward",
            (Some(reward), Some([least, most])) if least < most => {
                if reward >= most {
                    "highest reward"
                } else if reward <= least {
                    "lowest reward"
                } else {
                    "between"
                }
            }
            _ => "equal rewards",
        };
        let mut shown: Vec<Shown> = Vec::new();
        let mut texts = BTreeSet::new();
        for line in spread(lines.len(), ANSWERS_MAX).into_iter().map(|at| &lines[at]) {
            // The same text once more says nothing.
            if texts.insert((line.prompt.as_str(), line.text.as_str())) {
                shown.push(Shown::of(place(line), line));
            }
        }
        OfUpdate { step, all: count(from_index(lines.len())), rewards, shown }
    }
}

impl Shown {
    fn of(place: &'static str, line: &AnswerLine) -> Shown {
        let letters = line.text.chars().count();
        // A few characters more are seen rather than folded away.
        let seen = if letters <= SEEN_CHARS + SEEN_CHARS / 4 { letters } else { SEEN_CHARS };
        Shown {
            place,
            question: line.reward_data.get("question").and_then(words),
            expected: line.reward_data.get("expected").map(expected).unwrap_or_default(),
            text: line.text.chars().take(seen).collect(),
            rest: line.text.chars().skip(seen).take(CHARS_MAX - seen).collect(),
            left_out: letters.saturating_sub(CHARS_MAX.max(seen)),
            line: AnswerLine { text: String::new(), ids: Vec::new(), reward_data: Map::new(), ..line.clone() },
        }
    }
}

/// A value of a record as text, cut; absent for none.
fn words(value: &Value) -> Option<String> {
    let text = match value {
        Value::Null => return None,
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let cut: String = text.chars().take(EXPECTED_CHARS_MAX).collect();
    Some(if cut.len() < text.len() { cut + "…" } else { cut })
}

/// The texts of which any is right.
fn expected(value: &Value) -> Vec<String> {
    let Value::Array(all) = value else { return words(value).into_iter().collect() };
    let mut texts: Vec<String> = all.iter().filter_map(words).take(EXPECTED_MAX).collect();
    if all.len() > EXPECTED_MAX {
        texts.push(format!("… and {} more", all.len() - EXPECTED_MAX));
    }
    texts
}

/// Indices of at most `most` of `count` things, evenly from the first to the last.
fn spread(count: usize, most: usize) -> Vec<usize> {
    if count <= most {
        return (0..count).collect();
    }
    (0..most).map(|at| at * (count - 1) / (most - 1)).collect()
}

/// Calls `take` with each line; a file that is not there has none.
fn each_line(file: &Path, mut take: impl FnMut(&[u8])) -> Result<(), Error> {
    let read = |source| Error::Read { file: file.to_owned(), source };
    let opened = match File::open(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        opened => opened.map_err(read)?,
    };
    let (mut lines, mut line) = (BufReader::new(opened), Vec::new());
    while lines.read_until(b'\n', &mut line).map_err(read)? > 0 {
        take(&line);
        line.clear();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    fn read(lines: &[String], rest: &str) -> (Answers, Vec<String>) {
        let room = tempfile::tempdir().unwrap();
        let file = room.path().join("answers.jsonl");
        fs::write(&file, lines.join("\n") + "\n" + rest).unwrap();
        let mut notes = Vec::new();
        let answers = Answers::read(&file, &mut notes).unwrap();
        (answers, notes)
    }

    fn line(step: u64, reward: Option<f64>) -> String {
        serde_json::to_string(&AnswerLine { step, reward, text: format!("{reward:?}"), ..AnswerLine::default() })
            .unwrap()
    }

    #[test]
    fn updates_over_the_whole_run_have_their_best_and_worst_answers_and_some_between() {
        let lines: Vec<String> = (1..=100)
            .flat_map(|step| {
                [Some(0.5), None, Some(0.0), Some(1.0), Some(0.75), Some(0.25)].map(|reward| line(step, reward))
            })
            .collect();
        let (answers, notes) = read(&lines, "{\"torn");
        assert_eq!(notes, ["answers.jsonl: 1 lines are torn and left out"]);
        assert_eq!((answers.updates.len(), answers.updates_all), (12, 100));
        assert_eq!((answers.updates[0].step, answers.updates[11].step), (1, 100));
        assert_eq!(answers.reward_range, Some([0.0, 1.0]));
        let OfUpdate { all, rewards, shown, .. } = &answers.updates[3];
        assert_eq!((all.as_str(), rewards.as_str()), ("6", "rewards 0 … 1"));
        assert_eq!(
            shown.iter().map(|one| one.place).collect::<Vec<_>>(),
            ["highest reward", "between", "between", "no reward"]
        );
        let (equal, _) = read(&[line(3, Some(1.0)), line(3, Some(1.0)), line(4, None)], "");
        assert_eq!(equal.updates[0].shown.iter().map(|one| one.place).collect::<Vec<_>>(), ["equal rewards"]);
        assert_eq!(equal.updates[1].rewards, "no reward");
    }

    #[test]
    fn a_long_answer_is_folded_and_cut_and_says_how_much_is_left_out() {
        let of = |letters: usize| Shown::of("", &AnswerLine { text: "é".repeat(letters), ..AnswerLine::default() });
        let parts = |letters| {
            let Shown { text, rest, left_out, .. } = of(letters);
            (text.chars().count(), rest.chars().count(), left_out)
        };
        assert_eq!(
            [0, 700, 1000, 4000, 9000].map(parts),
            [(0, 0, 0), (700, 0, 0), (600, 400, 0), (600, 3400, 0), (600, 3400, 5000)]
        );
    }

    #[test]
    fn what_a_record_expects_is_text_however_it_is_given() {
        assert_eq!(expected(&json!("Rome")), ["Rome"]);
        assert_eq!(expected(&json!(["Rome", 7])), ["Rome", "7"]);
        assert_eq!(expected(&json!(8.5)), ["8.5"]);
        assert!(expected(&json!(null)).is_empty());
        let many = expected(&json!(["a", "b", "c", "d", "e", "f", "g", "h"]));
        assert_eq!((many.len(), many[6].as_str()), (7, "… and 2 more"));
        assert_eq!(words(&json!("x".repeat(9000))).unwrap().chars().count(), EXPECTED_CHARS_MAX + 1);
    }
}
