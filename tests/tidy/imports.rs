//! Who may import whom: the rows of the README's map.

use crate::paths::named_paths;
use crate::source::Source;

/// A module imports only from entries above its own. A room is one entry, or several entries if its modules have an order:
/// failures name units, pages are pages of a layout, `doctor` uses `plan`.
const TABLE: [(u8, &[&str]); 31] = [
    (
        0,
        &[
            "runtime::units",
            "runtime::digest",
            "runtime::file_error",
            "runtime::file_lock",
            "runtime::file_state",
            "runtime::names",
            "runtime::random",
            "runtime::reading",
            "runtime::saved",
            "runtime::terminal",
        ],
    ),
    (0, &["runtime::failure"]),
    (0, &["runtime::liveness"]),
    (0, &["runtime::memory"]),
    (1, &["config"]),
    (2, &["tensor", "endpoint"]),
    (2, &["world"]),
    (2, &["world::exchange", "world::devices", "program"]),
    (3, &["prompt::layout"]),
    (3, &["prompt::pages", "prompt::ring"]),
    (3, &["prompt::handoff", "data"]),
    (3, &["prompt::pack"]),
    (4, &["model"]),
    (5, &["step::extremes"]),
    (5, &["step::objective"]),
    (5, &["step::answers", "step::targets"]),
    (5, &["step::capture", "step::score", "step::replay", "step::finalize", "step::optimizer", "step::rollout"]),
    (5, &["step::conventional"]),
    (5, &["step"]),
    (6, &["reward", "calls", "checkpoint"]),
    (6, &["report"]),
    (6, &["plan"]),
    (7, &["train"]),
    (8, &["tools::convert", "tools::generate", "tools::merge", "tools::review"]),
    (8, &["tools::parity", "tools::doctor"]),
    (8, &["tools::gate", "tools::bench", "tools::study"]),
    (8, &["tools"]),
    (9, &["cli"]),
    (9, &["main"]),
    (9, &["prompt"]),
    (9, &["runtime"]),
];
/// The entry of the phases.
const PHASES: usize = 16;

/// Rooms that may use `anyhow`: below them errors stay typed.
const ANYHOW: [&str; 2] = ["cli", "main"];

struct Place {
    entry: usize,
    row: u8,
}

/// The place of a module path in the table: that of its first two segments, else that of the first.
fn place(path: &[&str]) -> Option<Place> {
    let entry = |name: &str| TABLE.iter().position(|(_, modules)| modules.contains(&name));
    let two = path.get(..2).and_then(|two| entry(&two.join("::")));
    let entry = two.or_else(|| entry(path.first()?))?;
    Some(Place { entry, row: TABLE[entry].0 })
}

/// The name of the entry's module in a message.
fn name(path: &[&str]) -> String {
    let two = path.iter().take(2).copied().collect::<Vec<_>>().join("::");
    if TABLE.iter().any(|(_, modules)| modules.contains(&two.as_str())) { two } else { path[0].to_owned() }
}

/// Imports from the same entry's other modules or from entries below, modules that are in no entry, and `anyhow` in the
/// library. Unit tests may import everything.
pub(crate) fn faults(sources: &[Source]) -> Vec<String> {
    let mut faults = Vec::new();
    for source in sources {
        let Some(own) = source.module_path().filter(|path| path[0] != "lib") else { continue };
        let Some(here) = place(&own) else {
            faults
                .push(source.fault_at(1, &format!("`{}` is in no row of the table in tests/tidy/imports.rs", own[0])));
            continue;
        };
        if !ANYHOW.contains(&own[0]) && source.text.contains("anyhow::") {
            faults.push(source.fault_at(1, "`anyhow` in the library: use the module's own error type"));
        }
        let module = name(&own);
        for path in named_paths(source, &own) {
            let import: Vec<&str> = path.segments.iter().map(String::as_str).collect();
            if import.is_empty() || import.starts_with(&own) || name(&import) == module {
                continue;
            }
            let other = name(&import);
            let message = match place(&import) {
                Some(there) if there.entry < here.entry => continue,
                Some(there) if there.entry == PHASES && here.entry == PHASES => format!(
                    "`{module}` imports `{other}`: phases never import each other, `prompt::handoff` carries what they share"
                ),
                Some(there) => {
                    format!("`{module}` (row {}) imports `{other}` (row {}): only rows above it", here.row, there.row)
                }
                None => format!("`{module}` imports `{other}`, and `{other}` is in no row of the table"),
            };
            faults.push(source.fault_at(path.line, &message));
        }
    }
    // `room::{self, Item}` names the room twice.
    faults.dedup();
    faults
}
