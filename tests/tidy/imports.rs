//! Who may import whom: the rows of the README's map.

use regex::Regex;

use crate::source::Source;

/// A module imports only from entries above its own. A room stands here whole, or cut into the modules that have an order
/// among themselves: failures name units, pages are pages of a layout, `doctor` asks what `plan` says.
const TABLE: [(u8, &[&str]); 29] = [
    (0, &["runtime::units"]),
    (0, &["runtime::failure"]),
    (0, &["runtime::liveness"]),
    (0, &["runtime::memory"]),
    (1, &["config"]),
    (2, &["tensor", "endpoint"]),
    (2, &["world"]),
    (2, &["world::exchange", "world::devices"]),
    (3, &["prompt::layout"]),
    (3, &["prompt::pages", "prompt::ring"]),
    (3, &["prompt::handoff", "data"]),
    (4, &["model"]),
    (5, &["step::extremes"]),
    (5, &["step::objective"]),
    (5, &["step::capture", "step::score", "step::replay", "step::finalize", "step::optimizer", "step::rollout"]),
    (5, &["step::conventional"]),
    (5, &["step"]),
    (6, &["reward", "checkpoint"]),
    (6, &["report"]),
    (6, &["plan"]),
    (7, &["train"]),
    (8, &["tools::convert", "tools::generate", "tools::review"]),
    (8, &["tools::parity", "tools::doctor"]),
    (8, &["tools::gate", "tools::bench", "tools::study"]),
    (8, &["tools"]),
    (9, &["cli"]),
    (9, &["main"]),
    (9, &["prompt"]),
    (9, &["runtime"]),
];
/// The entry of the phases.
const PHASES: usize = 14;

/// The entry that a module path stands in, and its row: that of its first two words, else that of the first.
fn place(path: &[&str]) -> Option<(usize, u8)> {
    let entry = |name: &str| TABLE.iter().position(|(_, modules)| modules.contains(&name));
    let two = path.get(..2).and_then(|two| entry(&two.join("::")));
    let entry = two.or_else(|| entry(path.first()?))?;
    Some((entry, TABLE[entry].0))
}

/// The name of the entry's module in a message.
fn name(path: &[&str]) -> String {
    let two = path.iter().take(2).copied().collect::<Vec<_>>().join("::");
    if TABLE.iter().any(|(_, modules)| modules.contains(&two.as_str())) { two } else { path[0].to_owned() }
}

/// Imports from the same entry's neighbours or from below, and modules that stand in no row. Unit tests may import what
/// they like.
pub(crate) fn faults(sources: &[Source]) -> Vec<String> {
    let mut faults = Vec::new();
    for source in sources {
        let Some(own) = source.module_path().filter(|path| path[0] != "lib") else { continue };
        let Some((entry, row)) = place(&own) else {
            faults
                .push(source.fault(0, &format!("`{}` stands in no row of the table in tests/tidy/imports.rs", own[0])));
            continue;
        };
        let module = name(&own);
        for (offset, import) in imports(source.body(), &own) {
            let import: Vec<&str> = import.iter().map(String::as_str).collect();
            let other_name = name(&import);
            let message = match place(&import) {
                _ if other_name == module => continue,
                Some((other, _)) if other < entry => continue,
                Some((PHASES, _)) if entry == PHASES => format!(
                    "`{module}` imports `{other_name}`: phases never import each other, `prompt::handoff` carries what they share"
                ),
                Some((_, other)) => {
                    format!("`{module}` (row {row}) imports `{other_name}` (row {other}): only rows above it")
                }
                None => format!("`{module}` imports `{other_name}`, and `{other_name}` stands in no row of the table"),
            };
            faults.push(source.fault(offset, &message));
        }
    }
    faults
}

/// Paths that the code names from the root of the library, their first words, with the place of each: `crate::x`,
/// `longstraw::x`, and `super::` chains that leave the room of the module at `own`.
fn imports(code: &str, own: &[&str]) -> Vec<(usize, Vec<String>)> {
    let path = Regex::new(
        r"\b(crate|longstraw|(?:super\s*::\s*)*super)\s*::\s*(\{|[a-z_][a-z0-9_]*(?:\s*::\s*(?:\{|[a-z_][a-z0-9_]*))?)",
    )
    .expect("a pattern");
    let mut found = Vec::new();
    for hit in path.captures_iter(code) {
        let supers = hit[1].matches("super").count();
        let base = &own[..own.len().saturating_sub(supers)];
        let base: &[&str] = if supers == 0 { &[] } else { base };
        // Within a room of one entry, and deeper than its modules, nothing can be wrong.
        if base.len() > 1 {
            continue;
        }
        let head = hit.get(2).expect("the second group");
        let (words, group) = match head.as_str().strip_suffix('{') {
            Some(words) => (words.trim().trim_end_matches("::").trim(), true),
            None => (head.as_str(), false),
        };
        let words = words.split("::").map(str::trim).filter(|word| !word.is_empty());
        let start: Vec<String> = base.iter().copied().chain(words).map(str::to_owned).collect();
        if !group {
            found.push((head.start(), start));
            continue;
        }
        for (offset, member) in group_heads(code, head.end() - 1) {
            found.push((offset, start.iter().cloned().chain(member).collect()));
        }
    }
    found
}

/// The first two words of each member of the brace group that opens at `open`.
fn group_heads(code: &str, open: usize) -> Vec<(usize, Vec<String>)> {
    let word = Regex::new(r"^\s*([A-Za-z_][A-Za-z0-9_]*)(?:\s*::\s*([A-Za-z_][A-Za-z0-9_]*))?").expect("a pattern");
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
        if let Some(hit) = word.captures(&code[offset + 1..]).filter(|_| opens_member) {
            let words: Vec<String> = hit.iter().skip(1).flatten().map(|word| word.as_str().to_owned()).collect();
            heads.push((offset + 1 + hit.get(1).map_or(0, |word| word.start()), words));
        }
    }
    heads.retain(|(_, words)| words[0] != "self");
    heads
}
