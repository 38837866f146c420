//! A program of the user's that is started, given lines and read: what scores answers, and what answers their calls.

mod process;

use std::io::{self, ErrorKind};
use std::path::Path;
use std::process::Command;

use rustix::io::Errno;

pub use process::{End, GONE_WITHIN, Limits, Ran};

/// Characters of a line, or of a program's reason, that are repeated.
const CHARS_MAX: usize = 120;
/// Last lines of standard error that are repeated.
const STDERR_LINES_MAX: usize = 3;

/// A program with its arguments.
#[derive(Debug)]
pub struct Program {
    file: String,
    arguments: Vec<String>,
    /// Variables that are removed from the program's environment.
    secrets: Vec<String>,
}

impl Program {
    /// Looks whether the program is there, where it is named by its path; nothing is started. `secrets`: variables that the
    /// program does not get.
    ///
    /// # Errors
    /// When there is no such file.
    pub fn open(command: &[String], secrets: Vec<String>) -> io::Result<Program> {
        let (file, arguments) = command.split_first().map_or((String::new(), &[][..]), |(p, a)| (p.clone(), a));
        if file.contains('/') {
            let found = Path::new(&file).metadata()?;
            if !found.is_file() {
                return Err(io::Error::new(ErrorKind::PermissionDenied, "it is no file"));
            }
        }
        Ok(Program { file, arguments: arguments.to_vec(), secrets })
    }

    /// The program's file, as the configuration names it.
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Runs it on `input`; `alive` is called whenever it has written something.
    ///
    /// # Errors
    /// When it cannot be started, or the system cannot wait for its pipes.
    pub fn run(&self, input: &str, limits: Limits, alive: &mut dyn FnMut()) -> io::Result<Ran> {
        let mut command = Command::new(&self.file);
        command.args(&self.arguments);
        for name in &self.secrets {
            command.env_remove(name);
        }
        let ran = process::run(&mut command, input.as_bytes(), limits, alive)?;
        tracing::debug!("{}: {:?}, standard error: {}", self.file, ran.end, last_lines(&ran.stderr));
        Ok(ran)
    }
}

/// Whether no further start would come to anything else: the file is not there, may not be run, or is no program.
#[must_use]
pub fn never_starts(error: &io::Error) -> bool {
    let is_no_program = error.raw_os_error() == Some(Errno::NOEXEC.raw_os_error());
    is_no_program || matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied)
}

/// The beginning of a text on one line.
#[must_use]
pub fn short(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let shown: String = line.chars().filter(|c| !c.is_control()).take(CHARS_MAX).collect();
    if line.chars().count() > CHARS_MAX { format!("{shown}…") } else { shown }
}

/// The last lines of a text, on one.
#[must_use]
pub fn last_lines(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<String> = text.lines().map(short).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(STDERR_LINES_MAX)..].join(" / ")
}

/// What a program wrote on standard error, to follow its fault in a message.
#[must_use]
pub fn stderr_words(stderr: &str) -> String {
    if stderr.is_empty() { String::new() } else { format!("; it said: {stderr}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_standard_error_is_repeated_on_one_line() {
        assert_eq!(last_lines(b"one\ntwo\n\n  three\tx\nfour\n"), "two / three x / four");
        assert_eq!(last_lines(b" \n"), "");
        assert!(last_lines("y".repeat(500).as_bytes()).ends_with("y…"));
    }
}
