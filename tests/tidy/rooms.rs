//! Things that have a room of their own, and things that have none.

use std::path::Path;

use regex::Regex;

use crate::source::Source;

/// Files whose unordered collections never decide an order, each with its reason. None so far.
const UNORDERED_ALLOWED: [(&str, &str); 0] = [];

/// Every match of `pattern` in the code before the unit tests of `src`, outside the given modules.
fn outside(sources: &[Source], modules: &[&str], pattern: &str, message: impl Fn(&str) -> String) -> Vec<String> {
    let pattern = Regex::new(pattern).expect("a pattern");
    let mut faults = Vec::new();
    for source in sources.iter().filter(|source| source.is_shipped() && !source.belongs_to(modules)) {
        faults.extend(pattern.find_iter(source.body()).map(|hit| source.fault(hit.start(), &message(hit.as_str()))));
    }
    faults
}

/// `unsafe` outside `tensor` and `world`, and `unsafe` there without a `SAFETY:` comment or a `# Safety` section.
pub(crate) fn unsafe_code(sources: &[Source]) -> Vec<String> {
    let word = Regex::new(r"\bunsafe\b").expect("a pattern");
    let mut faults = Vec::new();
    for source in sources.iter().filter(|source| source.is_shipped()) {
        for hit in word.find_iter(&source.code) {
            if !source.belongs_to(&["tensor", "world"]) {
                faults.push(
                    source.fault(hit.start(), "`unsafe` outside `tensor` and `world`: put a safe function there"),
                );
            } else if !gives_reason(source, source.line(hit.start())) {
                faults.push(source.fault(hit.start(), "`unsafe` without a `// SAFETY:` comment right above it"));
            }
        }
    }
    faults
}

/// The statement at `line` has a reason on that line or in the comment right above it.
fn gives_reason(source: &Source, line: usize) -> bool {
    let text: Vec<&str> = source.text.lines().collect();
    let code: Vec<&str> = source.code.lines().collect();
    let reason = |line: &str| line.contains("SAFETY:") || line.contains("# Safety");
    let ends_statement = |line: &str| line.trim_end().ends_with([';', '{', '}']);
    reason(text[line - 1])
        || (0..line - 1).rev().take_while(|above| !ends_statement(code[*above])).any(|above| reason(text[above]))
}

/// Marks of unfinished work, in any file that people write.
pub(crate) fn leftovers(sources: &[Source]) -> Vec<String> {
    // In pieces, so that this file does not find itself.
    let words = [["FIX", "ME"], ["TO", "DO"], ["X", "XX"]].map(|pieces| pieces.concat());
    let macros = [["to", "do!"], ["unimple", "mented!"], ["db", "g!"]].map(|pieces| pieces.concat());
    let pattern = format!(r"\b(?:(?:{})\b|(?:{}))", words.join("|"), macros.join("|"));
    let pattern = Regex::new(&pattern).expect("a pattern");
    let mut faults = Vec::new();
    for source in sources {
        for (index, line) in source.text.lines().enumerate() {
            if let Some(hit) = pattern.find(line) {
                faults.push(format!("{}:{}: leftover `{}`: do it or file it", source.path, index + 1, hit.as_str()));
            }
        }
    }
    faults
}

/// Modules whose name says nothing about what they hold.
pub(crate) fn empty_names(sources: &[Source]) -> Vec<String> {
    const NAMES: [&str; 8] = ["util", "utils", "common", "helper", "helpers", "misc", "shared", "stuff"];
    let inline = Regex::new(r"\bmod\s+([a-z_0-9]+)\s*\{").expect("a pattern");
    let message = |name: &str| format!("a module named `{name}` says nothing: name it after what it holds");
    let mut faults = Vec::new();
    for source in sources {
        for part in Path::new(&source.path).with_extension("").iter().filter_map(|part| part.to_str()) {
            if NAMES.contains(&part) {
                faults.push(source.fault(0, &message(part)));
            }
        }
        for hit in inline.captures_iter(&source.code).filter(|hit| NAMES.contains(&&hit[1])) {
            faults.push(source.fault(hit.get(0).expect("the match").start(), &message(&hit[1])));
        }
    }
    faults
}

/// Writes to the terminal outside `report` and `main`.
pub(crate) fn prints(sources: &[Source]) -> Vec<String> {
    outside(sources, &["report", "main"], r"\be?print(?:ln)?!", |hit| {
        format!("`{hit}` outside `report` and `main`: hand it to `report` or use tracing")
    })
}

/// Reads of the process's environment outside `config`, and of its arguments outside `main`.
pub(crate) fn environment_reads(sources: &[Source]) -> Vec<String> {
    let named = |names: &str| format!(r"\benv\s*::\s*(?:(?:{names})\b|\{{[^}}]*\b(?:{names})\b)");
    let mut faults = outside(sources, &["config"], &named("vars?|vars?_os|set_var|remove_var"), |_| {
        "reads the environment outside `config`: ask `config` for it".to_owned()
    });
    faults.extend(outside(sources, &["main"], &named("args|args_os"), |_| {
        "reads the command line outside `main`: take it as an argument".to_owned()
    }));
    faults
}

/// Collections whose order differs from process to process.
pub(crate) fn unordered_collections(sources: &[Source]) -> Vec<String> {
    let mut faults = outside(sources, &[], r"\bHash(?:Map|Set)\b", |hit| {
        format!(
            "`{hit}`: its order differs from rank to rank; use BTreeMap, BTreeSet or IndexMap, or allow the file here"
        )
    });
    faults.retain(|fault| !UNORDERED_ALLOWED.iter().any(|(path, _)| fault.starts_with(&format!("{path}:"))));
    faults
}
