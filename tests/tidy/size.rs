//! How long a file and a function may be.

use regex::Regex;

use crate::source::Source;

const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;

/// Files of `src` with more than 500 lines before their unit tests.
pub(crate) fn long_files(sources: &[Source]) -> Vec<String> {
    let mut faults = Vec::new();
    for source in sources.iter().filter(|source| source.is_shipped()) {
        let lines = source.body().lines().count();
        if lines > FILE_LINES_MAX {
            faults.push(format!(
                "{}:{lines}: {lines} lines before the tests, {FILE_LINES_MAX} at most: cut it along what it holds",
                source.path
            ));
        }
    }
    faults
}

/// Functions of more than 70 lines, signature and closing brace counted.
pub(crate) fn long_functions(sources: &[Source]) -> Vec<String> {
    let name = Regex::new(r"\bfn\s+([A-Za-z_][A-Za-z0-9_]*)").expect("a pattern");
    let mut faults = Vec::new();
    for source in sources {
        for hit in name.captures_iter(&source.code) {
            let (start, name) = (hit.get(0).expect("the match").start(), &hit[1]);
            let Some(end) = function_end(&source.code, start) else { continue };
            let lines = source.line(end) - source.line(start) + 1;
            if lines > FUNCTION_LINES_MAX {
                faults.push(source.fault(start, &format!("`{name}` is {lines} lines, {FUNCTION_LINES_MAX} at most")));
            }
        }
    }
    faults
}

/// The closing brace of the function whose `fn` stands at `start`; none for a declaration without a body.
fn function_end(code: &str, start: usize) -> Option<usize> {
    let (mut round, mut curly) = (0_u32, 0_u32);
    for (offset, byte) in code.bytes().enumerate().skip(start) {
        match byte {
            b'(' | b'[' => round += 1,
            b')' | b']' => round = round.saturating_sub(1),
            b';' if round == 0 && curly == 0 => return None,
            b'{' => curly += 1,
            b'}' if curly <= 1 => return (curly == 1 && round == 0).then_some(offset),
            b'}' => curly -= 1,
            _ => {}
        }
    }
    None
}
