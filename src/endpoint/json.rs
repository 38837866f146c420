//! JSON within a model's reply. A model that is told to reply with JSON alone still adds a code fence, an introduction or a
//! closing remark now and then.

use std::ops::Range;

use serde::de::DeserializeOwned;

/// Openings of a reply that are tried, at most: a reply of braces alone would take time by the square of its length.
const OPENINGS_MAX: usize = 256;

/// One JSON value of a reply.
#[derive(Clone, Debug, PartialEq)]
pub struct Found<T> {
    /// The value itself.
    pub value: T,
    /// Its place in the reply, in bytes.
    pub place: Range<usize>,
}

/// Every value of `reply` that begins with one of `openings` and reads as a `T`, in the order in which they begin. A value within another one
/// follows it, so a caller that wants outermost values alone leaves out those that begin before the last one's end.
pub fn values<'a, T: DeserializeOwned + 'a>(
    reply: &'a str,
    openings: &'static [char],
) -> impl Iterator<Item = Found<T>> + 'a {
    let openings = reply.match_indices(openings).map(|(start, _)| start).take(OPENINGS_MAX);
    openings.filter_map(|start| {
        let mut values = serde_json::Deserializer::from_str(&reply[start..]).into_iter();
        let value = values.next()?.ok()?;
        Some(Found { value, place: start..start + values.byte_offset() })
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn found(reply: &str) -> Vec<Value> {
        values(reply, &['{', '[']).map(|found| found.value).collect()
    }

    #[test]
    fn json_is_found_in_a_fence_among_words_and_within_other_json() {
        assert_eq!(found("{\"a\": [1]}"), [json!({"a": [1]}), json!([1])]);
        assert_eq!(found("Sure! Here {it} is [as told]:\n```json\n[7]\n```\nMore {of it}?"), [json!([7])]);
        assert_eq!(found("{\"a\": 1, \"b\": \"cut"), Vec::<Value>::new());
        assert_eq!(found("no JSON, 7"), Vec::<Value>::new());
    }

    #[test]
    fn the_place_of_a_value_is_told_in_bytes() {
        let reply = "für {\"ä\": 1} alle";
        let places: Vec<&str> = values::<Value>(reply, &['{', '[']).map(|found| &reply[found.place]).collect();
        assert_eq!(places, ["{\"ä\": 1}"]);
    }

    #[test]
    fn a_reply_of_openings_alone_ends() {
        assert_eq!(found(&"[{".repeat(100_000)), Vec::<Value>::new());
        assert_eq!(found(&"{}".repeat(2_000)).len(), OPENINGS_MAX);
    }
}
