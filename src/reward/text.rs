//! The text of an answer, compared with what its record expects.
//!
//! Texts are compared without blanks around them, and every run of blanks within counts as one space. Letters are
//! compared as they are.

use std::slice;

use regex::Regex;
use serde_json::{Map, Value};

use super::error::Error;
use crate::config::RewardName;
use crate::runtime::units::float;

/// The part of an answer that is scored: what follows the last `after`; all of it where there is none to look for.
pub(super) fn scored<'a>(text: &'a str, after: Option<&str>) -> &'a str {
    after.map_or(text, |after| text.rsplit_once(after).map_or("", |(_, rest)| rest))
}

/// What a record expects: any of these.
pub(super) fn expected<'a>(
    record: &str,
    reward: RewardName,
    data: &'a Map<String, Value>,
) -> Result<&'a [Value], Error> {
    let wrong = |found| Error::Expected { record: record.to_owned(), reward, found };
    let all = match data.get("expected").ok_or_else(|| wrong("is not there"))? {
        Value::Array(all) => all,
        one => slice::from_ref(one),
    };
    if all.is_empty() {
        return Err(wrong("is an empty list"));
    }
    all.iter().try_for_each(|value| match value {
        Value::String(text) if text.trim().is_empty() => Err(wrong("is blank")),
        Value::String(_) | Value::Number(_) | Value::Bool(_) => Ok(()),
        Value::Null => Err(wrong("is null")),
        Value::Array(_) | Value::Object(_) => Err(wrong("holds an object, or a list within a list")),
    })?;
    Ok(all)
}

/// The configuration's pattern.
pub(super) fn common_pattern(text: &str) -> Result<Regex, Error> {
    Regex::new(text).map_err(|error| Error::Pattern { pattern: text.to_owned(), reason: reason(&error) })
}

/// The pattern for a record: its own, else the configuration's.
pub(super) fn pattern(record: &str, data: &Map<String, Value>, common: Option<&Regex>) -> Result<Regex, Error> {
    let wrong = |pattern: String, reason| Error::RecordPattern { record: record.to_owned(), pattern, reason };
    match data.get("pattern") {
        None | Some(Value::Null) => common.cloned().ok_or_else(|| Error::NoPattern { record: record.to_owned() }),
        Some(Value::String(text)) => Regex::new(text).map_err(|error| wrong(format!("{text:?}"), reason(&error))),
        Some(other) => Err(wrong(other.to_string(), "it is no text".to_owned())),
    }
}

/// A pattern's fault on one line, without the drawing above it.
fn reason(error: &regex::Error) -> String {
    let words = error.to_string();
    let last = words.lines().last().unwrap_or_default();
    last.trim_start_matches("error: ").to_owned()
}

/// Whether `holds` of the answer and one of `expected`, both with even blanks.
pub(super) fn any(text: &str, expected: &[Value], holds: impl Fn(&str, &str) -> bool) -> bool {
    let text = even(text);
    expected.iter().any(|value| holds(&text, &even(&plain(value))))
}

/// Whether the field at the dotted `path` of the answer, one JSON object, is one of `expected`. A code fence around the
/// object does no harm, words around it do.
pub(super) fn has_field(text: &str, path: &str, expected: &[Value]) -> bool {
    let Ok(Value::Object(object)) = serde_json::from_str(unfenced(text)) else { return false };
    let object = Value::Object(object);
    let found = path.split('.').try_fold(&object, |value, name| match value {
        Value::Object(fields) => fields.get(name),
        Value::Array(items) => items.get(name.parse::<usize>().ok()?),
        _ => None,
    });
    found.is_some_and(|found| expected.iter().any(|value| equal(found, value)))
}

/// 1 up to `least` tokens, 0 from `most` on and for an answer that was cut off, and a line between them.
pub(super) fn brevity(tokens: u64, least: u64, most: u64, truncated: bool) -> f64 {
    if truncated {
        0.0
    } else if tokens <= least {
        1.0
    } else if tokens >= most {
        0.0
    } else {
        float(most - tokens) / float(most - least)
    }
}

/// A value as an answer would write it.
pub(super) fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Runs of blanks as one space, none around.
fn even(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Compares numbers by value, and everything else exactly.
fn equal(found: &Value, expected: &Value) -> bool {
    match (found, expected) {
        (Value::Number(a), Value::Number(b)) => a == b || a.as_f64() == b.as_f64(),
        _ => found == expected,
    }
}

/// The content of a code fence, where the whole text is one.
fn unfenced(text: &str) -> &str {
    let text = text.trim();
    let inside = text.strip_prefix("```").and_then(|rest| rest.strip_suffix("```"));
    inside.and_then(|inside| inside.split_once('\n')).map_or(text, |(_, body)| body.trim())
}

/// Whether `text` contains `part`; a number only as a whole number, not as a part of another one.
pub(super) fn stands_in(text: &str, part: &str) -> bool {
    let (first, last) = (part.starts_with(is_digit), part.ends_with(is_digit));
    if !(is_number(part) && last) {
        return text.contains(part);
    }
    text.match_indices(part).any(|(start, _)| {
        let (before, after) = (&text[..start], &text[start + part.len()..]);
        !(first && goes_on_before(before, part) || goes_on_after(after))
    })
}

fn is_digit(character: char) -> bool {
    character.is_ascii_digit()
}

/// Digits, with a sign before and one point within at most.
fn is_number(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, "0"));
    [whole, fraction].iter().all(|part| !part.is_empty() && part.chars().all(is_digit))
}

/// Whether a number that begins with `part` has begun in `before`: with a digit, a digit and a point, a digit and the comma
/// of thousands, or a sign that is none between words.
fn goes_on_before(before: &str, part: &str) -> bool {
    let mut back = before.chars().rev();
    let (last, earlier) = (back.next(), back.next());
    let thousands = part.chars().take_while(|c| is_digit(*c)).count() == 3;
    match last {
        Some('.') => earlier.is_some_and(is_digit),
        Some(',') => thousands && earlier.is_some_and(is_digit),
        Some('-' | '\u{2212}') => !earlier.is_some_and(char::is_alphanumeric),
        last => last.is_some_and(is_digit),
    }
}

/// Whether a number goes on in `after`: with a digit, a point and a digit, or a comma and exactly three digits.
fn goes_on_after(after: &str) -> bool {
    let digits = |text: &str| text.chars().take_while(|c| is_digit(*c)).count();
    match after.chars().next() {
        Some('.') => digits(&after[1..]) > 0,
        Some(',') => digits(&after[1..]) == 3,
        first => first.is_some_and(is_digit),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn is_exactly(text: &str, expected: &[Value]) -> bool {
        any(text, expected, |answer, value| answer == value)
    }

    fn values(expected: &Value) -> Vec<Value> {
        let data = json!({ "expected": expected });
        super::expected("r", RewardName::Contains, data.as_object().unwrap()).unwrap().to_vec()
    }

    #[test]
    fn only_the_text_after_the_last_mark_is_scored() {
        assert_eq!(scored("a </think> b </think> 7", Some("</think>")), " 7");
        assert_eq!(scored("no mark 7", Some("</think>")), "");
        assert_eq!(scored("all of it", None), "all of it");
        assert!(!is_exactly(scored("7", Some("</think>")), &values(&json!("7"))));
    }

    #[test]
    fn an_exact_match_ignores_blanks_and_nothing_else() {
        let exactly = |text: &str, expected: Value| is_exactly(text, &values(&expected));
        assert!(exactly("  New\n  York ", json!("New York")) && exactly("New York", json!(" New   York")));
        assert!(!exactly("new york", json!("New York")) && !exactly("New York.", json!("New York")));
        assert!(exactly("42", json!(42)) && exactly("0.5", json!(0.5)) && exactly("true", json!(true)));
        assert!(!exactly("42.0", json!(42)) && !exactly("True", json!(true)));
        assert!(exactly("b", json!(["a", "b", 3])) && exactly("3", json!(["a", 3])) && !exactly("c", json!(["a", 3])));
        assert!(exactly("\u{a0}x\u{2003}y", json!("x y")), "blanks of any kind are blanks");
    }

    #[test]
    fn a_text_is_contained_anywhere_and_a_number_only_whole() {
        let holds = |text: &str, expected: Value| any(text, &values(&expected), stands_in);
        assert!(holds("it is New \n York.", json!("New York")) && !holds("it is Newark", json!("New York")));
        assert!(holds("category", json!("cat")), "a text may be part of a word");
        for text in ["42", "is 42.", "(42)", "x=42,", "a-42", "41,42,43", "42.\n", "42km", "v42", "42-7", "42, 7"] {
            assert!(holds(text, json!("42")), "{text}");
        }
        for text in ["142", "421", "42.5", "3.42", "1042", "42,000", "-42", "is \u{2212}42", "(-42)"] {
            assert!(!holds(text, json!(42)), "{text}");
        }
        assert!(!holds("1,500", json!(500)) && holds("142 and then 42", json!(42)));
        assert!(holds("it is -5", json!(-5)) && !holds("it is -51", json!(-5)) && !holds("10.55", json!(0.5)));
        assert!(holds("so 0.5", json!(0.5)) && !holds("10.5", json!(0.5)) && holds("no 7 here", json!(["x", "7"])));
    }

    #[test]
    fn a_field_of_json_is_compared_by_value() {
        let has = |text: &str, expected: Value| has_field(text, "result.value", &values(&expected));
        assert!(has(r#"{"result": {"value": 7}}"#, json!(7.0)) && has(r#"{"result": {"value": 7.0}}"#, json!(7)));
        assert!(has("```json\n{\"result\": {\"value\": \"a\"}}\n```", json!("a")));
        assert!(has("\n```\n{\"result\": {\"value\": true}}```\n", json!([false, true])));
        for text in [
            "",
            "7",
            "[]",
            r#"{"result": 7}"#,
            r#"{"result": {"value": "7"}}"#,
            r#"{"result": {"value": 7}"#,
            r#"so {"result": {"value": 7}}"#,
            "```json {\"result\": {\"value\": 7}} ```",
        ] {
            assert!(!has(text, json!(7)), "{text}");
        }
        assert!(has_field(r#"{"a": [{"b": 1}, {"b": 2}]}"#, "a.1.b", &[json!(2)]));
    }

    #[test]
    fn a_short_answer_has_1_a_long_one_less_and_a_cut_one_nothing() {
        let of = |tokens| brevity(tokens, 100, 200, false).to_bits();
        assert_eq!([of(0), of(100), of(125), of(200), of(201)], [1.0, 1.0, 0.75, 0.0, 0.0].map(f64::to_bits));
        assert_eq!(brevity(10, 100, 200, true).to_bits(), 0.0_f64.to_bits());
        assert_eq!(brevity(50, 64, 32, false).to_bits(), 1.0_f64.to_bits(), "a limit below the free length");
        assert_eq!(brevity(65, 64, 64, false).to_bits(), 0.0_f64.to_bits());
    }

    #[test]
    fn what_a_record_lacks_is_reported_with_its_name() {
        for (data, words) in [
            (json!({}), "is not there"),
            (json!({ "expected": " " }), "is blank"),
            (json!({ "expected": null }), "is null"),
            (json!({ "expected": [] }), "is an empty list"),
            (json!({ "expected": ["a", ["b"]] }), "a list within a list"),
        ] {
            let error = super::expected("seven", RewardName::ExactMatch, data.as_object().unwrap()).unwrap_err();
            let message = error.to_string();
            assert!(
                message.starts_with("record seven: its reward_data.expected ") && message.contains(words),
                "{message}"
            );
            assert!(message.contains("the reward exact_match compares with it"), "{message}");
        }
    }

    #[test]
    fn a_records_own_pattern_overrides_the_common_one() {
        let common = Regex::new("^a$").unwrap();
        let own = json!({ "pattern": "^b$" });
        let matches =
            |data: &Value, text: &str| pattern("r", data.as_object().unwrap(), Some(&common)).unwrap().is_match(text);
        assert!(matches(&own, "b") && !matches(&own, "a") && matches(&json!({}), "a"));
        let message = |data: Value| pattern("seven", data.as_object().unwrap(), None).unwrap_err().to_string();
        assert!(message(json!({})).contains("record seven: has no reward_data.pattern, and reward.pattern is not set"));
        let broken = message(json!({ "pattern": "(a" }));
        assert!(
            broken.contains(r#"record seven: its reward_data.pattern "(a" is no pattern: unclosed group"#),
            "{broken}"
        );
        assert!(message(json!({ "pattern": 7 })).contains("its reward_data.pattern 7 is no pattern: it is no text"));
    }
}
