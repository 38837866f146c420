//! The part of a prompt that a judge gets: all of a short one, the beginning and the end of a longer one, or what lies around
//! the passages that its record names. Lengths are in characters (Unicode scalar values), so none is ever split.

use std::fmt::Write as _;
use std::ops::Range;

use serde_json::{Map, Value};

use super::error::Error;

/// Key of the record's passages.
pub(super) const EVIDENCE: &str = "evidence";
/// Passages that are looked at.
const PASSAGES_MAX: usize = 64;

/// Checks that the record's passages, where it names some, are texts or pairs of places.
pub(super) fn check(record: &str, data: &Map<String, Value>) -> Result<(), Error> {
    let fits = |passage: &Value| passage.as_str().is_some_and(|text| !text.is_empty()) || places(passage).is_some();
    match data.get(EVIDENCE) {
        None | Some(Value::Null) => Ok(()),
        Some(Value::Array(passages)) if passages.iter().all(fits) => Ok(()),
        Some(found) => {
            let found = found.to_string().chars().take(80).collect();
            Err(Error::Evidence { record: record.to_owned(), found })
        }
    }
}

/// `[start, end]`, in characters, the end excluded.
fn places(passage: &Value) -> Option<Range<usize>> {
    let [start, end] = passage.as_array()?.as_slice() else { return None };
    let place = |value: &Value| usize::try_from(value.as_u64()?).ok();
    Some(place(start)?..place(end)?).filter(|range| !range.is_empty())
}

/// At most `chars_max` characters of `prompt`, and a line for each part that is left out.
pub(super) fn excerpt(prompt: &str, chars_max: usize, data: &Map<String, Value>) -> String {
    let total = prompt.chars().count();
    if total <= chars_max {
        return prompt.to_owned();
    }
    let passages = passages(prompt, total, data);
    let windows = if passages.is_empty() {
        vec![0..chars_max.div_ceil(2), total - chars_max / 2..total]
    } else {
        around(&passages, total, chars_max)
    };
    cut(prompt, total, &merged(windows))
}

/// The passages that lie within the prompt, in its order, none touching another.
fn passages(prompt: &str, total: usize, data: &Map<String, Value>) -> Vec<Range<usize>> {
    let named = data.get(EVIDENCE).and_then(Value::as_array).into_iter().flatten().take(PASSAGES_MAX);
    let found = named.filter_map(|passage| match passage.as_str() {
        Some(text) => {
            let before = prompt.find(text).filter(|_| !text.is_empty())?;
            let start = prompt[..before].chars().count();
            Some(start..start + text.chars().count())
        }
        None => places(passage).map(|range| range.start..range.end.min(total)),
    });
    merged(found.filter(|range| !range.is_empty()).collect())
}

/// As many characters for each passage: itself in the middle, or its beginning where it is longer than that.
fn around(passages: &[Range<usize>], total: usize, chars_max: usize) -> Vec<Range<usize>> {
    // Each has a character at least.
    let passages = &passages[..passages.len().min(chars_max)];
    let each = chars_max / passages.len().max(1);
    let window = |passage: &Range<usize>| {
        let before = each.saturating_sub(passage.len()) / 2;
        let start = passage.start.saturating_sub(before).min(total - each);
        start..start + each
    };
    passages.iter().map(window).filter(|window| !window.is_empty()).collect()
}

/// In order, with those that touch as one.
fn merged(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<usize>> = Vec::new();
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// These parts of the prompt, with a line in the place of what is left out.
fn cut(prompt: &str, total: usize, windows: &[Range<usize>]) -> String {
    let mut bytes = prompt.char_indices().map(|(byte, _)| byte).chain([prompt.len()]).enumerate();
    let mut byte_at = |place: usize| bytes.find(|(at, _)| *at == place).map_or(prompt.len(), |(_, byte)| byte);
    let mut text = String::new();
    let mut last = 0;
    let mark = |text: &mut String, left_out: usize| {
        if left_out > 0 {
            let line = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
            let _ = writeln!(text, "{line}[… {left_out} characters are left out here …]");
        }
    };
    for window in windows {
        mark(&mut text, window.start - last);
        let start = byte_at(window.start);
        text += &prompt[start..byte_at(window.end)];
        last = window.end;
    }
    mark(&mut text, total - last);
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(prompt: &str, chars_max: usize, evidence: impl Into<Value>) -> String {
        let evidence: Value = evidence.into();
        excerpt(prompt, chars_max, json!({ "evidence": evidence }).as_object().unwrap())
    }

    fn left_out(chars: usize) -> String {
        format!("[… {chars} characters are left out here …]")
    }

    #[test]
    fn a_short_prompt_is_whole_and_a_longer_one_loses_its_middle() {
        assert_eq!(of("abcdefghij", 10, Value::Null), "abcdefghij");
        assert_eq!(of("", 3, Value::Null), "");
        assert_eq!(of("abcdefghij", 5, Value::Null), format!("abc\n{}\nij", left_out(5)));
        assert_eq!(of("abcdefghij", 1, Value::Null), format!("a\n{}\n", left_out(9)));
        assert_eq!(of("ab\ndefghij", 6, Value::Null), format!("ab\n{}\nhij", left_out(4)));
    }

    #[test]
    fn no_character_is_split() {
        let prompt = "é漢🦀".repeat(7);
        for chars_max in 1..=21 {
            for evidence in [Value::Null, json!([[3, 5]]), json!(["🦀é"]), json!([[0, 1], [20, 21]])] {
                let text = of(&prompt, chars_max, evidence);
                let kept = text.chars().filter(|c| "é漢🦀".contains(*c)).count();
                assert!(kept <= chars_max && (kept + 2 >= chars_max || chars_max < 3), "{kept} of {chars_max}: {text}");
            }
        }
    }

    #[test]
    fn what_lies_around_the_passages_is_kept() {
        let prompt: String = ('a'..='z').collect();
        assert_eq!(of(&prompt, 6, json!([[10, 12]])), format!("{}\nijklmn\n{}\n", left_out(8), left_out(12)));
        assert_eq!(of(&prompt, 6, json!(["kl"])), of(&prompt, 6, json!([[10, 12]])));
        // At an end of the prompt the window stays within it, and one that is longer than its share keeps its beginning.
        assert_eq!(of(&prompt, 6, json!([[0, 1]])), format!("abcdef\n{}\n", left_out(20)));
        assert_eq!(of(&prompt, 6, json!([[25, 99]])), format!("{}\nuvwxyz", left_out(20)));
        assert_eq!(of(&prompt, 4, json!([[5, 20]])), format!("{}\nfghi\n{}\n", left_out(5), left_out(17)));
        // Two share the room, and windows that touch are one.
        let two = of(&prompt, 8, json!([[20, 22], [2, 4]]));
        assert_eq!(two, format!("{}\nbcde\n{}\ntuvw\n{}\n", left_out(1), left_out(14), left_out(3)));
        assert_eq!(of(&prompt, 8, json!([[4, 6], [8, 10]])), format!("{}\ndefghijk\n{}\n", left_out(3), left_out(15)));
        assert_eq!(of(&prompt, 8, json!([[4, 6], [6, 8]])), format!("{}\ncdefghij\n{}\n", left_out(2), left_out(16)));
    }

    #[test]
    fn passages_outside_the_prompt_leave_its_beginning_and_its_end() {
        let plain = of("abcdefghij", 4, Value::Null);
        for evidence in [json!([]), json!([[10, 12]]), json!(["none"]), json!([[99, 100], "none"])] {
            assert_eq!(of("abcdefghij", 4, evidence), plain);
        }
    }

    #[test]
    fn passages_are_texts_or_places_with_the_smaller_one_first() {
        let check = |evidence: Value| check("one", json!({ "evidence": evidence }).as_object().unwrap());
        for good in [Value::Null, json!([]), json!(["a"]), json!([[0, 1], "b"])] {
            assert!(check(good).is_ok());
        }
        for bad in
            [json!("a"), json!([1, 2]), json!([[2, 2]]), json!([[3, 2]]), json!([[-1, 2]]), json!([""]), json!({})]
        {
            let words = check(bad).unwrap_err().to_string();
            assert!(words.starts_with("record one: its reward_data.evidence is "), "{words}");
        }
    }
}
