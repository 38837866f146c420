//! Who may write to the terminal: one module, which shows control characters instead of sending them.

use regex::Regex;

use crate::source::Source;

const WRITER: &str = "src/runtime/terminal.rs";

/// Files of `src` besides the one writer that open standard output or standard error, or let a library print.
pub(crate) fn other_writers(sources: &[Source]) -> Vec<String> {
    let opens = Regex::new(r"(^|[^\w])(stdout|stderr)\(\)|\.print\(\)").expect("a pattern");
    let mut faults = Vec::new();
    for source in sources.iter().filter(|source| source.path.starts_with("src/") && source.path != WRITER) {
        let lines = source.text.lines().take(source.lines_before_tests());
        for (number, _) in (1..).zip(lines).filter(|(_, line)| opens.is_match(line)) {
            faults.push(source.fault_at(number, "use `runtime::terminal`, which shows control characters"));
        }
    }
    faults
}
