//! No file of `src` imports, through whatever other files, what imports it.

use std::collections::{BTreeMap, BTreeSet};

use crate::paths::named_paths;
use crate::source::Source;

/// Circles that are allowed, each as the list of its files. None.
const ALLOWED: [&[&str]; 0] = [];

/// Circles, and entries of `ALLOWED` that no longer are one.
pub(crate) fn faults(sources: &[Source]) -> Vec<String> {
    let circles = circles(sources);
    let allowed = |circle: &BTreeSet<&str>| ALLOWED.iter().any(|files| circle.iter().all(|file| files.contains(file)));
    let there = |files: &[&str]| circles.iter().any(|circle| circle.iter().all(|file| files.contains(file)));
    let new = circles.iter().filter(|circle| !allowed(circle)).map(|circle| {
        let files: Vec<&str> = circle.iter().copied().collect();
        format!("src/{}.rs:1: imports itself through {}: move what they share below", files[0], files[1..].join(", "))
    });
    let is_tree = sources.len() > 100;
    let stale = ALLOWED.iter().filter(|files| is_tree && !there(files));
    let stale =
        stale.map(|files| format!("tests/tidy/circles.rs:1: no circle any more, remove it: {}", files.join(", ")));
    new.chain(stale).collect()
}

/// Sets of files that reach each other by imports. A `pub use` in a `mod.rs` is no import: it only renames what its
/// children define. `main.rs` and `lib.rs` only name modules.
fn circles(sources: &[Source]) -> Vec<BTreeSet<&str>> {
    let files: BTreeMap<String, &str> = sources.iter().filter_map(module_and_file).collect();
    let mut edges: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for source in sources {
        let (Some(own), Some(file)) = (source.module_path(), name(source)) else { continue };
        if ["lib", "main"].contains(&file) {
            continue;
        }
        for path in named_paths(source, &own) {
            if path.reexported && file.ends_with("/mod") {
                continue;
            }
            let mut lengths = (1..=path.segments.len()).rev();
            let target = lengths.find_map(|length| files.get(&path.segments[..length].join("::")));
            edges.entry(file).or_default().extend(target.filter(|target| **target != file));
        }
    }
    let reach: BTreeMap<&str, BTreeSet<&str>> = edges.keys().map(|file| (*file, reached(&edges, file))).collect();
    let mut circles = BTreeSet::new();
    for (file, targets) in &reach {
        if targets.contains(file) {
            let back = |target: &&&str| reach.get(**target).is_some_and(|targets| targets.contains(file));
            circles.insert(targets.iter().filter(back).copied().collect::<BTreeSet<&str>>());
        }
    }
    circles.into_iter().collect()
}

fn module_and_file(source: &Source) -> Option<(String, &str)> {
    Some((source.module_path()?.join("::"), name(source)?))
}

/// `src/model/mod.rs` → `model/mod`.
fn name(source: &Source) -> Option<&str> {
    source.path.strip_prefix("src/")?.strip_suffix(".rs")
}

fn reached<'a>(edges: &BTreeMap<&'a str, BTreeSet<&'a str>>, start: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut next: Vec<&str> = edges.get(start).into_iter().flatten().copied().collect();
    while let Some(file) = next.pop() {
        if found.insert(file) {
            next.extend(edges.get(file).into_iter().flatten().copied());
        }
    }
    found
}
