//! The score in a judge's reply.
//!
//! A judge should reply with one JSON object and now and then puts words around it, or leaves it out. An object is read
//! whatever stands around it. Without one a reply is read where all of it is a score, as `7`, `**Score:** 7/10`, or where it
//! begins an object whose first key is the score. In free words a number may mean anything: the end of the scale, a count, a
//! date. A reply is refused where it holds no score, half a score or two different ones: a missing reward costs an answer, a
//! wrong one is learnt.
//!
//! A judge's own thinking is no part of its reply: what stands before the last `</think>` is left out, and so is what an open
//! `<think>` begins. Such a mark within a JSON object is quoted there, and ends nothing.

use std::fmt;
use std::ops::Range;

use regex::{Captures, Match, Regex};
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use thiserror::Error;

use crate::endpoint::json::{self, Found};

/// A number as people and programs write it, and what stands for none.
const NUMBER: &str = r"[-+\x{2212}]?(?:\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|(?i:nan|inf(?:inity)?)\b)";
/// What stands between a score and the best score.
const OUT_OF: &str = r"\s*(?:/|\bout of\b|\bof\b)\s*";

/// What may stand before a reply that is a score.
const DECORATION: &str = r#"[\s"'`*_#>]*"#;
/// Blanks and marks of emphasis.
const MARKS: &str = r#"[\s"'`*_]*"#;
/// Words before "score is".
const SUBJECT: &str = "(?i:(?:the |my )?(?:final |overall )?)";
/// What begins a judge's thinking, and what ends it.
const THINKING: [&str; 2] = ["<think>", "</think>"];

/// Why a reply holds no score.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum ReplyFault {
    /// It holds no text.
    #[error("is empty")]
    Empty,
    /// It ends before the score is whole.
    #[error("is cut off before its score is whole (reward.judge_tokens is the most that it may have)")]
    Cut,
    /// No score can be recognised.
    #[error("has no score that can be recognised")]
    Unclear,
    /// Two scores differ.
    #[error("has scores that differ")]
    Several,
    /// The score is outside the scale.
    #[error("has a score outside of {low} to {high} (reward.judge_scale)")]
    OutOfScale {
        /// Lowest score of the scale.
        low: f64,
        /// Highest score of the scale.
        high: f64,
    },
    /// The score is no finite number.
    #[error("has a score that is not finite")]
    NotFinite,
}

impl ReplyFault {
    pub(super) fn kind(self) -> &'static str {
        match self {
            ReplyFault::Empty => "reply_empty",
            ReplyFault::Cut => "reply_cut",
            ReplyFault::Unclear => "reply_unclear",
            ReplyFault::Several => "reply_several",
            ReplyFault::OutOfScale { .. } => "reply_outside_scale",
            ReplyFault::NotFinite => "reply_not_finite",
        }
    }
}

/// Reads replies on one scale.
pub(super) struct Reader {
    low: f64,
    high: f64,
    /// A number after the word "score".
    labelled: Regex,
    /// A number out of another.
    share: Regex,
    number: Regex,
    /// A reply that is a score and nothing else.
    score_alone: Regex,
    /// The beginning of an object that is no JSON and whose first key is the score.
    keyed: Regex,
}

impl Reader {
    pub(super) fn new([low, high]: [f64; 2]) -> Reader {
        let label = r#"(?i:\bscore\b)["'`*_]*\s*(?:[:=]|\bis\b)\s*["'`*_]*\s*"#;
        let pattern = |text: String| Regex::new(&text).expect("it has no part that comes from outside");
        Reader {
            low,
            high,
            labelled: pattern(format!("{label}({NUMBER})(?:{OUT_OF}({NUMBER}))?")),
            share: pattern(format!("({NUMBER}){OUT_OF}({NUMBER})")),
            number: pattern(NUMBER.to_owned()),
            score_alone: pattern(format!(
                "^{DECORATION}(?:{SUBJECT}{label})?({NUMBER}){MARKS}(?:{OUT_OF}({NUMBER}))?{MARKS}\\.?{MARKS}$"
            )),
            keyed: pattern(format!(r#"\{{\s*["'`]?{label}({NUMBER})(?:{OUT_OF}({NUMBER}))?["'`]?\s*[,}}]"#)),
        }
    }

    /// The score in `text`, from 0 at the scale's low end to 1 at its high end; `ended` says whether the judge came to the
    /// end of what it had to say.
    pub(super) fn read(&self, text: &str, ended: bool) -> Result<f64, ReplyFault> {
        let (before, text, thinking_ended) = without_thinking(text);
        let ended = ended && thinking_ended;
        // A judge that thinks into an open mark of its template, or one that quotes an answer's mark behind its score?
        let is_opened = before.contains(THINKING[0]);
        if !is_opened && !take_objects(before).0.is_empty() && take_objects(text).0.is_empty() {
            return Err(ReplyFault::Several);
        }
        if text.trim().is_empty() {
            return Err(if ended { ReplyFault::Empty } else { ReplyFault::Cut });
        }
        let (objects, rest) = take_objects(text);
        let mut scores: Vec<f64> = Vec::new();
        for value in &objects {
            scores.push(self.of_value(value)?);
        }
        // Of a reply that was cut off, an object behind words may be a thought: some services open the thinking in the prompt.
        if objects.is_empty() && is_open(&rest) || !ended && (objects.is_empty() || !begins_with_object(text)) {
            return Err(ReplyFault::Cut);
        }
        if objects.is_empty() {
            scores.push(self.without_object(&rest)?);
        }
        // Words around an object may not speak of another score.
        for found in self.labelled.captures_iter(&rest).chain(self.share.captures_iter(&rest)) {
            scores.extend(self.of_words(&rest, &found)?);
        }
        let score = scores[0];
        if scores.iter().any(|other| other.to_bits() != score.to_bits()) {
            return Err(ReplyFault::Several);
        }
        Ok((score - self.low) / (self.high - self.low))
    }

    /// What an object gives as its score: a number, or a text that is one.
    fn of_value(&self, value: &Value) -> Result<f64, ReplyFault> {
        match value {
            Value::Number(number) => self.on_scale(number.as_f64().ok_or(ReplyFault::NotFinite)?),
            Value::String(text) => {
                let text = text.trim();
                let is_all = |found: &Match<'_>| found.len() == text.len();
                let share = self.share.captures(text).filter(|found| found.get(0).as_ref().is_some_and(is_all));
                match share {
                    Some(found) => self.of_words(text, &found)?.ok_or(ReplyFault::Unclear),
                    None if self.number.find(text).as_ref().is_some_and(is_all) => self.on_scale(parsed(text)),
                    None => Err(ReplyFault::Unclear),
                }
            }
            _ => Err(ReplyFault::Unclear),
        }
    }

    /// The score of a match: a number, and the number that it is out of, where there is one. A share of another number than
    /// the scale's end is no score (it may be a date); with the word "score" it is unclear.
    fn of_words(&self, text: &str, found: &Captures<'_>) -> Result<Option<f64>, ReplyFault> {
        let matched = found.get(0).map_or("", |found| found.as_str());
        let is_labelled = !matched.starts_with(|c: char| c.is_ascii_digit() || "-+\u{2212}".contains(c));
        let Some(score) = found.get(1) else { return Ok(None) };
        let last = found.get(2).unwrap_or(score);
        let stands_alone = begins(text, score) && ends(text, last);
        let is_of_scale = found.get(2).is_none_or(|most| parsed(most.as_str()).to_bits() == self.high.to_bits());
        match (is_labelled, stands_alone && is_of_scale) {
            (_, true) => self.on_scale(parsed(score.as_str())).map(Some),
            (true, false) => Err(ReplyFault::Unclear),
            (false, false) => Ok(None),
        }
    }

    /// The score of a text without a JSON object: all of it is a score, or it has one object that JSON does not read.
    fn without_object(&self, text: &str) -> Result<f64, ReplyFault> {
        let mut keyed = self.keyed.captures_iter(text);
        let found = match (keyed.next(), keyed.next()) {
            (Some(found), None) => found,
            (None, _) => self.score_alone.captures(text).ok_or(ReplyFault::Unclear)?,
            (Some(_), Some(_)) => return Err(ReplyFault::Several),
        };
        let (Some(score), most) = (found.get(1), found.get(2)) else { return Err(ReplyFault::Unclear) };
        if most.is_some_and(|most| parsed(most.as_str()).to_bits() != self.high.to_bits()) {
            return Err(ReplyFault::Unclear);
        }
        self.on_scale(parsed(score.as_str()))
    }

    fn on_scale(&self, score: f64) -> Result<f64, ReplyFault> {
        let (low, high) = (self.low, self.high);
        match score {
            // A zero has no sign here, so that equal scores have equal bits.
            score if (low..=high).contains(&score) => Ok(score + 0.0),
            score if score.is_finite() => Err(ReplyFault::OutOfScale { low, high }),
            _ => Err(ReplyFault::NotFinite),
        }
    }
}

/// What a judge thinks and what it says besides, and whether the thinking has come to its end.
fn without_thinking(text: &str) -> (&str, &str, bool) {
    if !THINKING.iter().any(|mark| text.contains(mark)) {
        return ("", text, true);
    }
    let objects: Vec<Range<usize>> = json::values::<IgnoredAny>(text, &['{']).map(|found| found.place).collect();
    let is_quoted = |at: usize| objects.iter().any(|object| object.contains(&at));
    let [open, close] = THINKING;
    let end = text.rmatch_indices(close).map(|(at, _)| at).find(|&at| !is_quoted(at)).map(|at| at + close.len());
    let said = end.unwrap_or(0);
    match text[said..].match_indices(open).map(|(at, _)| said + at).find(|&at| !is_quoted(at)) {
        Some(at) => (&text[..said], &text[said..at], false),
        None => (&text[..said], &text[said..], true),
    }
}

/// The scores of whole JSON objects in `text`, and the text without these objects.
fn take_objects(text: &str) -> (Vec<Value>, String) {
    let mut scores = Vec::new();
    let mut rest = String::new();
    let mut end = 0;
    for Found { value: Scores(found), place } in json::values(text, &['{']) {
        // An object within one that has a score is part of it; one within an object without a score may have its own.
        if place.start >= end && !found.is_empty() {
            scores.extend(found);
            rest.push_str(&text[end..place.start]);
            rest.push(' ');
            end = place.end;
        }
    }
    rest.push_str(&text[end..]);
    (scores, rest)
}

/// Whether nothing but the fence of a code block stands before the first object.
fn begins_with_object(text: &str) -> bool {
    let before = text.find('{').map_or(text, |open| &text[..open]);
    matches!(before.trim(), "" | "```" | "```json")
}

/// Whether an object begins and does not end.
fn is_open(text: &str) -> bool {
    text.rfind('{').is_some_and(|open| !text[open..].contains('}'))
}

/// Every value that an object has under "score": of two, one would be lost in a map.
struct Scores(Vec<Value>);

impl<'de> Deserialize<'de> for Scores {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ScoresVisitor;
        impl<'de> Visitor<'de> for ScoresVisitor {
            type Value = Scores;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Scores, A::Error> {
                let mut scores = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name.eq_ignore_ascii_case("score") {
                        scores.push(map.next_value()?);
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(Scores(scores))
            }
        }
        deserializer.deserialize_map(ScoresVisitor)
    }
}

/// A number's value; what is written as no finite number has none.
fn parsed(text: &str) -> f64 {
    text.replace('\u{2212}', "-").parse().unwrap_or(f64::NAN)
}

/// Whether a number begins here: no word, no longer number goes before it.
fn begins(text: &str, number: Match<'_>) -> bool {
    let mut back = text[..number.start()].chars().rev();
    !match back.next() {
        Some('.' | ',') => back.next().is_some_and(is_part),
        Some(c) => is_part(c),
        None => false,
    }
}

/// Whether a number ends here: it is no beginning of a word, a longer number, a date or a percentage.
fn ends(text: &str, number: Match<'_>) -> bool {
    let mut on = text[number.end()..].chars();
    !match on.next() {
        Some('.' | ',' | '/') => on.next().is_some_and(is_part),
        Some(c) => is_part(c) || c == '%',
        None => false,
    }
}

fn is_part(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUT_OF_SCALE: ReplyFault = ReplyFault::OutOfScale { low: 0.0, high: 10.0 };

    fn read(text: &str) -> Result<f64, ReplyFault> {
        Reader::new([0.0, 10.0]).read(text, true)
    }

    #[test]
    fn a_reply_with_one_score_is_read_however_it_is_wrapped() {
        for text in [
            r#"{"score": 7, "reason": "two of three"}"#,
            r#"{"reason": "a score: 3 would be harsh", "score": 7.0}"#,
            r#"{"Score": "7"}"#,
            r#"{"score": "7/10"}"#,
            r#"{"result": {"score": 7}}"#,
            "```json\n{\"score\": 7, \"reason\": \"x\"}\n```",
            "Here is my verdict:\n{\"score\": 7, \"reason\": \"{braces} and \\\" quotes\"}\nI hope it helps, all 3 of you.",
            "{not json} {\"score\": 7}",
            "{\"score\": 7} and again {\"score\": 7.0}",
            "score: 7",
            "Score = 7/10",
            "**Score:** 7",
            "The score is **7** out of 10.",
            "{'score': 7}",
            "{score: 7, reason: fine}",
            "{\"score\": 7, \"reason\": \"he says \"no\" here\"}",
            "{\"score\": 7/10}",
            "7/10",
            "7 out of 10",
            "Final score: 7.",
            "> **7**",
            "7",
            "7e0",
        ] {
            assert_eq!(read(text), Ok(0.7), "{text}");
        }
        assert_eq!((read("0"), read("10"), read("-0.0")), (Ok(0.0), Ok(1.0), Ok(0.0)));
    }

    #[test]
    fn a_scale_becomes_0_to_1() {
        assert_eq!(Reader::new([-1.0, 1.0]).read("{\"score\": -1}", true), Ok(0.0));
        assert_eq!(Reader::new([-1.0, 1.0]).read("score: \u{2212}0.5", true), Ok(0.25));
        assert_eq!(Reader::new([1.0, 5.0]).read("4/5", true), Ok(0.75));
        assert_eq!(
            Reader::new([1.0, 5.0]).read("{\"score\": 0}", true),
            Err(ReplyFault::OutOfScale { low: 1.0, high: 5.0 })
        );
    }

    #[test]
    fn half_a_score_is_no_score() {
        for text in ["{\"score\":", "{\"score\": 7", "{\"score\": 7, \"reason\": \"it", "{", "so: {\"sco"] {
            assert_eq!(read(text), Err(ReplyFault::Cut), "{text}");
        }
        let reader = Reader::new([0.0, 10.0]);
        for text in ["", "score: 7", "7", "It has 7 out of 10"] {
            assert_eq!(reader.read(text, false), Err(ReplyFault::Cut), "it may have gone on: {text}");
        }
        assert_eq!(reader.read("{\"score\": 7} and furthermore", false), Ok(0.7), "the score itself is whole");
    }

    #[test]
    fn two_scores_are_no_score() {
        for text in [
            "{\"score\": 3, \"score\": 9}",
            "The answer says {\"score\": 10}. {\"score\": 0}",
            "{\"score\": 7}, though the score: 3 would do",
            "{score: 7} {score: 8}",
        ] {
            assert_eq!(read(text), Err(ReplyFault::Several), "{text}");
        }
    }

    #[test]
    fn other_numbers_are_not_taken_for_scores() {
        for text in [
            "I cannot judge this.",
            "The maximum score is 10. This answer gets 4.",
            "The maximum score is 10.",
            "I give it a 7.",
            "7 out of 10, with 2 facts missing",
            "2 of 3 facts are there",
            "score: 7 ... score: 8",
            "7/10 or 8/10",
            "The score is 7, since 3 of 4 steps are right.",
            "{\"score\": null}",
            "{\"score\": true}",
            "{\"score\": \"high\"}",
            "{\"score\": [7]}",
            "{\"verdict\": \"good\", \"points\": [7, 8]}",
            "on a scale of 1-10 it is fine",
            "7 or 8",
            "v2",
            "7,5",
            "70%",
            "score: 7,5",
            "score: 3/5",
            "score: 7%",
            "3/5",
            "7/10/2024",
            "2024/7/10",
            "{\"points\": 7}",
            "<html>",
        ] {
            assert_eq!(read(text), Err(ReplyFault::Unclear), "{text}");
        }
        assert_eq!(read(" \n"), Err(ReplyFault::Empty));
    }

    #[test]
    fn a_score_outside_the_scale_or_without_a_value_is_none() {
        for text in
            ["{\"score\": 11}", "11 of 10", "score: 11/10", "{\"score\": -1}", "-3", "{\"score\": \"11\"}", "**70**"]
        {
            assert_eq!(read(text), Err(OUT_OF_SCALE), "{text}");
        }
        for text in [
            "{\"score\": NaN}",
            "{\"score\": -Infinity}",
            "{\"score\": 1e999}",
            "{\"score\": \"nan\"}",
            "score: inf",
            "NaN",
        ] {
            assert_eq!(read(text), Err(ReplyFault::NotFinite), "{text}");
        }
    }

    /// The score of `<think>3 of 4 facts, so 7</think>9` was one of the numbers of the thinking.
    #[test]
    fn a_judges_own_thinking_is_no_part_of_its_reply() {
        for text in [
            "<think>2</think>7",
            "<think>\nThe maximum is 10. score: 3? {\"score\": 2} 4/10.\n</think>\n\n{\"score\": 7}",
            "score: 3, no.</think>Score: 7",
            "<think>{\"score\": 1}</think><think>{\"score\": 2}</think>{\"score\": 7}",
            "{\"score\": 7, \"reason\": \"it ends with </think> and begins with <think>\"}",
            "<think>3</think>{\"reason\": \"no </think> in it\", \"score\": 7}",
            "{\"score\": 7} <think>or {\"score\": 8}?",
        ] {
            assert_eq!(read(text), Ok(0.7), "{text}");
        }
        for text in ["<think>7", "<think>{\"score\": 7}", "<think>3</think><think>{\"score\": 7}", "7 <think>or 8"] {
            assert_eq!(read(text), Err(ReplyFault::Cut), "{text}");
            assert_eq!(Reader::new([0.0, 10.0]).read(text, false), Err(ReplyFault::Cut), "{text}");
        }
        // A judge may quote an answer that ends in such a mark.
        for text in [
            "{\"score\": 1} The answer ends with </think>7",
            "{\"score\": 1}\n</think>\n7/10",
            "{\"score\": 1}</think>",
        ] {
            assert_eq!(read(text), Err(ReplyFault::Several), "{text}");
        }
        assert_eq!(read("<think>{\"score\": 7}</think>"), Err(ReplyFault::Empty));
        let cut = |text: &str| Reader::new([0.0, 10.0]).read(text, false);
        assert_eq!(
            cut("The form would be {\"score\": 3, \"reason\": \"x\"} but let me think about"),
            Err(ReplyFault::Cut)
        );
        for text in ["{\"score\": 7} because the", "```json\n{\"score\": 7}\n``` It says"] {
            assert_eq!(cut(text), Ok(0.7), "{text}");
        }
        assert_eq!(read("<think>7</think>It is fine."), Err(ReplyFault::Unclear));
    }

    #[test]
    fn a_reply_of_braces_alone_ends() {
        assert_eq!(read(&"{\"a\":".repeat(2_000)), Err(ReplyFault::Cut));
        assert_eq!(read(&"{}".repeat(2_000)), Err(ReplyFault::Unclear));
    }
}
