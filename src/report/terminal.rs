//! Standard output and standard error.

use std::io::Write as _;

/// Prints a result on standard output: what a verb was called for, or its JSON object.
pub fn print_result(text: &str) {
    let mut out = std::io::stdout().lock();
    // A reader that has closed the pipe wants no more lines.
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// Prints a line on standard error.
pub fn say(text: &str) {
    let mut err = std::io::stderr().lock();
    let _ = writeln!(err, "{text}").and_then(|()| err.flush());
}
