//! Reads files of text that users write: passes over a byte-order mark, and says where a byte is no text.

use std::fmt;
use std::fs;
use std::io::{self, BufRead, ErrorKind};
use std::path::Path;

/// The byte-order mark that some editors write before UTF-8.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// A byte that is not UTF-8.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BadByte {
    /// The byte itself.
    pub byte: u8,
    /// Its line, from 1.
    pub line: u64,
    /// Its place within the line in bytes, from 1.
    pub column: usize,
    /// Bytes of the file before it.
    pub offset: u64,
}

impl fmt::Display for BadByte {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BadByte { byte, line, column, offset } = self;
        let hint = if *offset == 0 && matches!(byte, 0xfe | 0xff) { ", it looks like UTF-16" } else { "" };
        write!(
            f,
            "line {line}, byte {column} of the line (offset {offset} of the file): 0x{byte:02x} is no UTF-8{hint}; save the \
             file as UTF-8"
        )
    }
}

impl std::error::Error for BadByte {}

/// The bytes without a byte-order mark before them.
#[must_use]
pub fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes)
}

/// The text of a file, without a byte-order mark.
///
/// # Errors
/// When the file cannot be read, or a byte is no UTF-8: the words say where.
pub fn text(file: &Path) -> io::Result<String> {
    let bytes = fs::read(file)?;
    let from = bytes.len() - without_mark(&bytes).len();
    let text = checked(&bytes, Start::default())?;
    Ok(text[from..].to_owned())
}

/// Where a piece of a file begins.
#[derive(Clone, Copy, Debug)]
struct Start {
    line: u64,
    offset: u64,
}

impl Default for Start {
    fn default() -> Start {
        Start { line: 1, offset: 0 }
    }
}

fn checked(bytes: &[u8], start: Start) -> io::Result<&str> {
    let failed = |error: std::str::Utf8Error| {
        let at = error.valid_up_to();
        let before = &bytes[..at];
        let line_start = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
        let lines = before.split(|byte| *byte == b'\n').count() - 1;
        let bad = BadByte {
            byte: bytes[at],
            line: start.line + lines as u64,
            column: at - line_start + 1,
            offset: start.offset + at as u64,
        };
        io::Error::new(ErrorKind::InvalidData, bad)
    };
    std::str::from_utf8(bytes).map_err(failed)
}

/// The lines of a file, one at a time, without their ends.
#[derive(Debug)]
pub struct Lines<R> {
    reader: R,
    buffer: Vec<u8>,
    next: Start,
}

impl<R: BufRead> Lines<R> {
    /// Lines from the start of `reader`.
    pub fn new(reader: R) -> Lines<R> {
        Lines { reader, buffer: Vec::new(), next: Start::default() }
    }

    /// The next line and its number, from 1; `None` at the end.
    ///
    /// # Errors
    /// When the file cannot be read, or a byte is no UTF-8: the words say where.
    pub fn next_line(&mut self) -> io::Result<Option<(u64, &str)>> {
        self.buffer.clear();
        let read = self.reader.read_until(b'\n', &mut self.buffer)?;
        if read == 0 {
            return Ok(None);
        }
        let start = self.next;
        self.next = Start { line: start.line + 1, offset: start.offset + read as u64 };
        let line = checked(&self.buffer, start)?;
        let line = if start.offset == 0 { line.strip_prefix('\u{feff}').unwrap_or(line) } else { line };
        let line = line.strip_suffix('\n').unwrap_or(line);
        Ok(Some((start.line, line.strip_suffix('\r').unwrap_or(line))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_order_mark_is_passed_over_and_only_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.txt");
        fs::write(&file, "\u{feff}one\n\u{feff}two").unwrap();
        assert_eq!(text(&file).unwrap(), "one\n\u{feff}two");
        let mut lines = Lines::new("\u{feff}one\r\n\n\u{feff}two".as_bytes());
        assert_eq!(lines.next_line().unwrap(), Some((1, "one")));
        assert_eq!(lines.next_line().unwrap(), Some((2, "")));
        assert_eq!(lines.next_line().unwrap(), Some((3, "\u{feff}two")));
        assert_eq!(lines.next_line().unwrap(), None);
        fs::write(&file, "").unwrap();
        assert_eq!(text(&file).unwrap(), "");
    }

    #[test]
    fn a_byte_that_is_no_text_is_told_with_line_column_and_offset() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.txt");
        let bytes = b"\xef\xbb\xbfone\ntw\xe9o\n";
        fs::write(&file, bytes).unwrap();
        let words = "line 2, byte 3 of the line (offset 9 of the file): 0xe9 is no UTF-8; save the file as UTF-8";
        assert_eq!(text(&file).unwrap_err().to_string(), words);
        let mut lines = Lines::new(&bytes[..]);
        lines.next_line().unwrap();
        assert_eq!(lines.next_line().unwrap_err().to_string(), words);
        fs::write(&file, b"\xff\xfea\0").unwrap();
        assert!(text(&file).unwrap_err().to_string().contains("it looks like UTF-16"));
    }
}
