//! Prepares text of the service for messages and logs: short, on one line, and without the key.

use serde_json::Value;

use crate::config::Secret;

/// Maximum number of characters of the service's text that are repeated.
const CHARS_MAX: usize = 200;

/// Removes the key from text of others.
pub(super) struct Redactor {
    key: Secret,
}

impl Redactor {
    pub(super) fn new(key: &Secret) -> Redactor {
        Redactor { key: key.clone() }
    }

    /// The text on one line, shortened, with the key replaced.
    pub(super) fn plain(&self, text: &str) -> String {
        let redacted = text.replace(self.key.expose(), "[secret]");
        let words: Vec<&str> = redacted.split_whitespace().collect();
        let line = words.join(" ");
        let shown: String = line.chars().filter(|c| !c.is_control()).take(CHARS_MAX).collect();
        if line.chars().count() > CHARS_MAX { format!("{shown}…") } else { shown }
    }

    /// A colon and the error message in an answer: that of a JSON error, else the beginning of the text.
    pub(super) fn said(&self, bytes: &[u8]) -> String {
        let value: Option<Value> = serde_json::from_slice(bytes).ok();
        let message = value.as_ref().and_then(|value| {
            let error = value.get("error").unwrap_or(value);
            error.as_str().or_else(|| error.get("message")?.as_str())
        });
        // The whole text is searched for the key: a cut could leave half of the key.
        let text = message.map_or_else(|| String::from_utf8_lossy(bytes).into_owned(), str::to_owned);
        match self.plain(&text) {
            words if words.is_empty() => String::new(),
            words => format!(": {words}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Environment, RunConfig};

    fn redactor() -> Redactor {
        let environment = Environment::of([("TAOTOKEN_API_KEY", "sk-sentinel-1")]);
        Redactor::new(&environment.api_key(&RunConfig::laptop().endpoint).expect("it is set"))
    }

    #[test]
    fn the_key_is_removed_from_what_a_service_repeats() {
        let said = redactor().said(br#"{"type": "error", "error": {"message": "invalid key\nsk-sentinel-1, look"}}"#);
        assert_eq!(said, ": invalid key [secret], look");
        assert_eq!(redactor().said(br#"{"error": "no sk-sentinel-1"}"#), ": no [secret]");
        assert_eq!(redactor().said(br#"{"message": "down"}"#), ": down");
        assert_eq!(redactor().said(b""), "");
    }

    #[test]
    fn text_is_short_and_no_half_of_the_key_remains() {
        let text = format!("{}sk-sentinel-1 and more\u{1b}[31m", "x".repeat(CHARS_MAX - 4));
        let plain = redactor().plain(&text);
        assert!(plain.ends_with("x[sec…") && !plain.contains("sk-"), "{plain}");
        assert_eq!(redactor().plain("a \u{1b}[31mred\u{7}"), "a [31mred");
    }
}
