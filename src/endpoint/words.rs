//! Words of the service, fit to be repeated: short, on one line, and without the key.

use serde_json::Value;

use crate::config::Secret;

/// Characters of the service's own words that are repeated.
const CHARS_MAX: usize = 200;

/// Knows the key, to cut it out of what others say.
pub(super) struct Veil {
    key: Secret,
}

impl Veil {
    pub(super) fn over(key: &Secret) -> Veil {
        Veil { key: key.clone() }
    }

    /// A text on one line, without the key, not too long.
    pub(super) fn plain(&self, text: &str) -> String {
        let veiled = text.replace(self.key.expose(), "[secret]");
        let words: Vec<&str> = veiled.split_whitespace().collect();
        let line = words.join(" ");
        let shown: String = line.chars().filter(|c| !c.is_control()).take(CHARS_MAX).collect();
        if line.chars().count() > CHARS_MAX { format!("{shown}…") } else { shown }
    }

    /// What an answer says for itself, behind a colon: the message of an error in JSON, else its beginning.
    pub(super) fn said(&self, bytes: &[u8]) -> String {
        let value: Option<Value> = serde_json::from_slice(bytes).ok();
        let message = value.as_ref().and_then(|value| {
            let error = value.get("error").unwrap_or(value);
            error.as_str().or_else(|| error.get("message")?.as_str())
        });
        // Cut before the key is looked for, an answer of megabytes could end within it.
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

    fn veil() -> Veil {
        let environment = Environment::of([("TAOTOKEN_API_KEY", "sk-sentinel-1")]);
        Veil::over(&environment.api_key(&RunConfig::laptop().endpoint).expect("it is set"))
    }

    #[test]
    fn the_key_is_cut_out_of_what_a_service_repeats() {
        let said = veil().said(br#"{"type": "error", "error": {"message": "invalid key\nsk-sentinel-1, look"}}"#);
        assert_eq!(said, ": invalid key [secret], look");
        assert_eq!(veil().said(br#"{"error": "no sk-sentinel-1"}"#), ": no [secret]");
        assert_eq!(veil().said(br#"{"message": "down"}"#), ": down");
        assert_eq!(veil().said(b""), "");
    }

    #[test]
    fn words_are_short_and_the_key_is_not_cut_in_two_to_pass() {
        let text = format!("{}sk-sentinel-1 and more\u{1b}[31m", "x".repeat(CHARS_MAX - 4));
        let plain = veil().plain(&text);
        assert!(plain.ends_with("x[sec…") && !plain.contains("sk-"), "{plain}");
        assert_eq!(veil().plain("a \u{1b}[31mred\u{7}"), "a [31mred");
    }
}
