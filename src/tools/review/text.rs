//! Texts that are sent to the service, and texts that come back.

use crate::runtime::units::from_index;

/// The text, without its middle if it is too long to send.
pub(super) fn shortened(text: &str, chars_max: usize) -> String {
    let chars = text.chars().count();
    if chars <= chars_max {
        return text.to_owned();
    }
    let tail = chars_max / 4;
    let head: String = text.chars().take(chars_max - tail).collect();
    let rest: String = text.chars().skip(chars - tail).collect();
    format!("{head}\n[… {} characters left out …]\n{rest}", from_index(chars - chars_max))
}

/// The text without control characters, which could move a terminal's cursor.
pub(super) fn printable(text: &str) -> String {
    let kept: String =
        text.chars().filter(|character| !character.is_control() || matches!(character, '\n' | '\t')).collect();
    kept.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_keeps_its_beginning_and_its_end() {
        assert_eq!(shortened("short", 8), "short");
        assert_eq!(shortened(&format!("{}{}", "é".repeat(20), "ab"), 8), "éééééé\n[… 14 characters left out …]\nab");
    }

    #[test]
    fn a_reply_cannot_move_the_cursor() {
        assert_eq!(printable(" a\u{1b}[2Jb\n\tc\u{7} \n"), "a[2Jb\n\tc");
    }
}
