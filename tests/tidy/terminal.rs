//! Who may write to the terminal: one module, which shows control characters instead of sending them.

use regex::Regex;

use crate::source::Source;

/// The writer, and the signal handler: it may take no lock, so it writes a constant text by itself.
const WRITERS: [&str; 2] = ["src/runtime/terminal.rs", "src/world/signals.rs"];

/// Files of `src` besides the one writer that open standard output or standard error, or let a library print.
pub(crate) fn other_writers(sources: &[Source]) -> Vec<String> {
    let opens = Regex::new(r"(^|[^\w])(stdout|stderr)\(\)|\.print\(\)").expect("a pattern");
    let mut faults = Vec::new();
    let is_bound = |path: &str| path.starts_with("src/") && !WRITERS.contains(&path);
    for source in sources.iter().filter(|source| is_bound(&source.path)) {
        let lines = source.text.lines().take(source.lines_before_tests());
        for (number, _) in (1..).zip(lines).filter(|(_, line)| opens.is_match(line)) {
            faults.push(source.fault_at(number, "use `runtime::terminal`, which shows control characters"));
        }
    }
    faults
}
