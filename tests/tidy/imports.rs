//! Who may import whom: the rows of the README's map.

use regex::Regex;

use crate::source::Source;

/// A module imports only from entries above its own. Rows 0, 3, 8 and 10 are cut into several entries: pages are pages of
/// a layout, a run is refused by the plan, `doctor` asks the plan, parity is judged by `conventional` where a case is
/// silent, and the command's verbs are the main file's own.
const TABLE: [(u8, &[&str]); 17] = [
    (0, &["units"]),
    (0, &["failure"]),
    (0, &["watch"]),
    (1, &["config"]),
    (2, &["tensor", "world", "endpoint"]),
    (3, &["layout"]),
    (3, &["pages", "data", "devices"]),
    (4, &["exchange", "objective", "handoff"]),
    (5, &["model"]),
    (6, &["capture", "score", "replay", "finalize", "optimizer", "rollout", "reward", "checkpoint"]),
    (7, &["report"]),
    (8, &["plan", "conventional", "convert", "generate", "review"]),
    (8, &["parity", "doctor"]),
    (8, &["trainer"]),
    (9, &["gate", "bench", "study"]),
    (10, &["verbs"]),
    (10, &["main"]),
];
const PHASES_ROW: u8 = 6;

/// The entry a module stands in, and its row.
fn place(module: &str) -> Option<(usize, u8)> {
    let entry = TABLE.iter().position(|(_, modules)| modules.contains(&module))?;
    Some((entry, TABLE[entry].0))
}

/// Imports from the same row or below, and modules that stand in no row. Unit tests may import what they like.
pub(crate) fn faults(sources: &[Source]) -> Vec<String> {
    let mut faults = Vec::new();
    for source in sources {
        let Some((module, depth)) = source.module().filter(|(module, _)| *module != "lib") else { continue };
        let Some((entry, row)) = place(module) else {
            faults.push(source.fault(0, &format!("`{module}` stands in no row of the table in tests/tidy/imports.rs")));
            continue;
        };
        for (offset, import) in imports(source.body(), depth) {
            let message = match place(&import) {
                _ if import == module => continue,
                Some((other, _)) if other < entry => continue,
                Some((_, PHASES_ROW)) if row == PHASES_ROW => {
                    format!(
                        "`{module}` imports `{import}`: phases never import each other, `handoff` carries what they share"
                    )
                }
                Some((_, other)) => {
                    format!("`{module}` (row {row}) imports `{import}` (row {other}): only rows above it")
                }
                None => format!("`{module}` imports `{import}`, and `{import}` stands in no row of the table"),
            };
            faults.push(source.fault(offset, &message));
        }
    }
    faults
}

/// Top-level modules that the code names, with the place of each: `crate::x`, `longstraw::x`, and `super::` chains that
/// reach the root from a module `depth` levels below it.
fn imports(code: &str, depth: usize) -> Vec<(usize, String)> {
    let path =
        Regex::new(r"\b(crate|longstraw|(?:super\s*::\s*)*super)\s*::\s*(\{|[a-z_][a-z0-9_]*)").expect("a pattern");
    let mut found = Vec::new();
    for hit in path.captures_iter(code) {
        let supers = hit[1].matches("super").count();
        if supers > 0 && supers < depth {
            continue;
        }
        let head = hit.get(2).expect("the second group");
        if head.as_str() == "{" {
            found.extend(group_heads(code, head.start()));
        } else {
            found.push((head.start(), head.as_str().to_owned()));
        }
    }
    found
}

/// The first word of each member of the brace group that opens at `open`.
fn group_heads(code: &str, open: usize) -> Vec<(usize, String)> {
    let word = Regex::new(r"^\s*([A-Za-z_][A-Za-z0-9_]*)").expect("a pattern");
    let (mut heads, mut depth) = (Vec::new(), 0_u32);
    for (offset, byte) in code.bytes().enumerate().skip(open) {
        let opens_member = match byte {
            b'{' => {
                depth += 1;
                depth == 1
            }
            b'}' if depth == 1 => break,
            b'}' => {
                depth -= 1;
                false
            }
            b',' => depth == 1,
            _ => false,
        };
        if let Some(head) = word.captures(&code[offset + 1..]).and_then(|hit| hit.get(1)).filter(|_| opens_member) {
            heads.push((offset + 1 + head.start(), head.as_str().to_owned()));
        }
    }
    heads.retain(|(_, head)| head != "self");
    heads
}
