//! The terminal: the only writer to standard output and standard error.
//!
//! Names, answers and words of programs and services may hold control characters that move a terminal's cursor, change its
//! title or turn the direction of a line. Everything that is printed passes [`visible`], which shows them as escapes. The
//! escapes are those of JSON, so a printed JSON object still holds the exact text.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, ErrorKind, IsTerminal as _, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a character would act on a terminal, or hide what a line says, instead of being seen: control characters but for
/// line feed and tab, and marks that change the direction of text or end a line.
fn acts(character: char) -> bool {
    match character {
        '\n' | '\t' => false,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => true,
        other => other.is_control(),
    }
}

fn escaped(text: &str, acts: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&acts) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        match character {
            '\n' if acts(character) => shown.push_str("\\n"),
            '\t' if acts(character) => shown.push_str("\\t"),
            _ if acts(character) => {
                // Writing to a text never fails.
                let _ = write!(shown, "\\u{:04x}", u32::from(character));
            }
            _ => shown.push(character),
        }
    }
    Cow::Owned(shown)
}

/// The text with every character that would act on a terminal shown as `\u001b` and the like. Lines stay lines.
#[must_use]
pub fn visible(text: &str) -> Cow<'_, str> {
    escaped(text, acts)
}

/// As [`visible`], with line feeds and tabs escaped too: for a name in the middle of a line.
#[must_use]
pub fn on_one_line(text: &str) -> Cow<'_, str> {
    escaped(text, |character| acts(character) || matches!(character, '\n' | '\t'))
}

/// Prints a result on standard output: what a verb was called for, or its JSON object. Where the output cannot be written,
/// a line on standard error says so.
pub fn print_result(text: &str) {
    let mut out = io::stdout().lock();
    match writeln!(out, "{}", visible(text)).and_then(|()| out.flush()) {
        // A reader that has closed the pipe wants no more lines.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            say(&format!("longstraw: cannot write standard output: {error}"));
        }
        _ => {}
    }
}

/// Prints a line on standard error and flushes it, so that the line is out before an abort.
pub fn say(text: &str) {
    let mut err = io::stderr().lock();
    // If standard error is closed, only the exit code is left to tell.
    let _ = writeln!(err, "{}", visible(text)).and_then(|()| err.flush());
}

/// Writes a text of the program's own to standard error from a signal handler: without a lock, which the interrupted code may
/// hold, and without memory of its own.
pub fn say_in_handler(text: &'static str) {
    // If standard error is closed, nobody reads.
    let _ = rustix::io::write(rustix::stdio::stderr(), text.as_bytes());
}

/// Whether standard error is a terminal.
#[must_use]
pub fn is_terminal() -> bool {
    io::stderr().is_terminal()
}

/// A log whose lines may be shown on a terminal: what is written passes [`visible`]. If the log cannot be written, that is
/// said once, and the run goes on without it.
#[derive(Debug)]
pub struct VisibleLog<W> {
    name: String,
    log: W,
    failed: AtomicBool,
}

impl<W> VisibleLog<W> {
    /// A log that messages call `name`.
    pub fn new(name: String, log: W) -> VisibleLog<W> {
        VisibleLog { name, log, failed: AtomicBool::new(false) }
    }
}

impl<W> Write for &VisibleLog<W>
where
    for<'a> &'a W: Write,
{
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        if let Err(error) = (&self.log).write_all(visible(&text).as_bytes())
            && !self.failed.swap(true, Ordering::Relaxed)
        {
            say(&format!("longstraw: cannot write {}: {error}; the run goes on without this log", self.name));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        (&self.log).flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_act_on_a_terminal_is_shown_and_other_text_stays() {
        let plain = "naïve 文字 👩‍🚀 \"x\" \\\n\tnext";
        assert!(matches!(visible(plain), Cow::Borrowed(same) if same == plain));
        for (text, shown) in [
            ("\u{1b}[31mred\u{7}", "\\u001b[31mred\\u0007"),
            ("a\rb\u{8}\u{7f}", "a\\u000db\\u0008\\u007f"),
            ("\u{9b}2J", "\\u009b2J"),
            ("ab\u{202e}dc\u{202c}\u{2066}e\u{2069}\u{200f}", "ab\\u202edc\\u202c\\u2066e\\u2069\\u200f"),
            ("one\u{2028}two\u{85}", "one\\u2028two\\u0085"),
        ] {
            assert_eq!(visible(text), shown);
        }
        assert_eq!(on_one_line("name\nlongstraw: \tdone"), "name\\nlongstraw: \\tdone");
    }

    #[test]
    fn json_that_is_printed_holds_the_exact_text() {
        let text = "a\u{1b}[0m\u{9b}\u{202e}\u{7f}\n\u{feff}";
        let printed = visible(&serde_json::to_string(text).unwrap()).into_owned();
        assert!(printed.chars().all(|character| !acts(character)), "{printed:?}");
        assert_eq!(serde_json::from_str::<String>(&printed).unwrap(), text);
    }

    #[test]
    fn a_log_line_is_made_visible() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let log = VisibleLog::new("log".to_owned(), file.reopen().unwrap());
        (&log).write_all("INFO a\u{1b}]0;title\u{7}\n".as_bytes()).unwrap();
        assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "INFO a\\u001b]0;title\\u0007\n");
    }
}
