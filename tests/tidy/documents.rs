//! Configuration files, and documents that must keep up with the code.

use std::collections::BTreeSet;
use std::path::Path;

use regex::Regex;

use crate::source::{Source, exists, has_extension, sources};

/// Where the reason for each dependency stands.
pub(crate) const REASONS: &str = "docs/decisions/0001-dependencies.md";

/// Every file of `configs`.
pub(crate) fn configuration_sources() -> Vec<Source> {
    let found = sources(&["configs"], &["toml", "json"]);
    assert!(!found.is_empty(), "configs/ holds no file");
    found
}

/// Files that are no TOML or no JSON.
pub(crate) fn configurations(sources: &[Source]) -> Vec<String> {
    let mut faults = Vec::new();
    for source in sources {
        if has_extension(&source.path, &["json"]) {
            if let Err(error) = serde_json::from_str::<serde_json::Value>(&source.text) {
                faults.push(format!("{}:{}: {error}", source.path, error.line()));
            }
        } else if let Err(error) = source.text.parse::<toml::Table>() {
            let offset = error.span().map_or(0, |span| span.start);
            faults.push(source.fault(offset, error.message()));
        }
    }
    faults
}

/// Relative links in Markdown files that lead nowhere.
pub(crate) fn dead_links(sources: &[Source]) -> Vec<String> {
    let link = Regex::new(r"\]\(([^)\s#]+)(?:#[^)]*)?\)").expect("a pattern");
    let mut faults = Vec::new();
    for source in sources.iter().filter(|source| has_extension(&source.path, &["md"])) {
        let folder = Path::new(&source.path).parent().unwrap_or(Path::new(""));
        for hit in link.captures_iter(&source.text).filter(|hit| !hit[1].contains("://")) {
            if !exists(&folder.join(&hit[1])) {
                let offset = hit.get(0).expect("the match").start();
                faults.push(source.fault(offset, &format!("no file `{}`", &hit[1])));
            }
        }
    }
    faults
}

/// Where the errors of the users' guide stand, each with the tests that provoke it.
pub(crate) const ERRORS: &str = "docs/troubleshooting.md";

/// What a paragraph `Tests: …` of the section on the six errors names and is not there: a test by its name, a claim of
/// the MPI tests by its name, or a file whose documentation has an example that must not compile. A part of the section
/// without such a paragraph is a fault too.
pub(crate) fn absent_tests(document: &Source, code: &[Source]) -> Vec<String> {
    let name = Regex::new(r"`([^`]+)`").expect("a pattern");
    let start = document.text.find("\n## The six errors of the users' guide\n");
    let Some(start) = start else { return vec![format!("{}:1: no section on the six errors", document.path)] };
    let section = &document.text[start + 4..];
    let section = &section[..section.find("\n## ").unwrap_or(section.len())];
    let mut faults = Vec::new();
    for part in section.split("\n### ").skip(1) {
        let at = document.text.find(part).unwrap_or(start);
        let tests = part.split("\n\n").find_map(|paragraph| paragraph.trim().strip_prefix("Tests: "));
        let named: Vec<&str> = tests
            .iter()
            .flat_map(|text| name.captures_iter(text))
            .filter_map(|hit| Some(hit.get(1)?.as_str()))
            .collect();
        if named.is_empty() {
            faults.push(document.fault(at, "no paragraph `Tests: …` with a name"));
        }
        let absent = named.into_iter().filter(|named| !code.iter().any(|source| provokes(source, named)));
        faults.extend(absent.map(|named| document.fault(at, &format!("there is no test `{named}`"))));
    }
    faults
}

/// Whether `named` is a test of this file, or this file with an example that must not compile.
fn provokes(source: &Source, named: &str) -> bool {
    if has_extension(named, &["rs"]) {
        return source.path == named && source.text.contains("```compile_fail");
    }
    let claim = source.path == "tests/ranks.rs" && source.text.contains(&format!("(\"{named}\", "));
    claim
        || source.text.contains(&format!("#[test]\nfn {named}()"))
        || source.text.contains(&format!("#[test]\n    fn {named}()"))
}

/// Dependencies of the manifest without a table row (`` | `name` | ``) in the reasons, and rows without a dependency.
pub(crate) fn dependencies_without_reason(manifest: &str, reasons: &str) -> Vec<String> {
    let manifest: toml::Table = manifest.parse().expect("Cargo.toml is TOML");
    let wanted: BTreeSet<&str> = ["dependencies", "build-dependencies", "dev-dependencies"]
        .iter()
        .filter_map(|table| manifest.get(*table)?.as_table())
        .flat_map(|table| table.keys().map(String::as_str))
        .collect();
    let row = Regex::new(r"(?m)^\| `([^`]+)`").expect("a pattern");
    let given: BTreeSet<&str> =
        row.captures_iter(reasons).filter_map(|hit| hit.get(1)).map(|hit| hit.as_str()).collect();
    let missing = wanted.difference(&given).map(|name| format!("{REASONS}:1: no line of reason for `{name}`"));
    let stale = given.difference(&wanted).map(|name| format!("{REASONS}:1: `{name}` is no dependency in Cargo.toml"));
    missing.chain(stale).collect()
}

/// What two languages of one document must have in common: levels of headings, code, places that links lead to, rows of
/// tables; each in order.
fn bones(text: &str) -> [Vec<String>; 4] {
    let link = Regex::new(r"\]\(([^)\s]+)\)").expect("a pattern");
    let [mut headings, mut code, mut links, mut rows] = [const { Vec::new() }; 4];
    let mut inside = false;
    for line in text.lines() {
        if line.starts_with("```") {
            inside = !inside;
        }
        if inside || line.starts_with("```") {
            code.push(line.to_owned());
            continue;
        }
        if line.starts_with('#') {
            headings.push(line.chars().take_while(|&sign| sign == '#').collect());
        }
        if line.starts_with('|') {
            rows.push(line.matches(" |").count().to_string());
        }
        links.extend(link.captures_iter(line).map(|hit| hit[1].split('#').next().unwrap_or_default().to_owned()));
    }
    // Word order differs between languages.
    links.retain(|target| !target.is_empty() && !target.starts_with("README"));
    links.sort();
    [headings, code, links, rows]
}

/// What a translation no longer has in common with its original.
pub(crate) fn out_of_step(original: &Source, translation: &Source) -> Vec<String> {
    let names = ["headings", "code blocks", "links", "tables"];
    let pairs = bones(&original.text).into_iter().zip(bones(&translation.text));
    let differing = names.into_iter().zip(pairs).filter(|(_, (one, other))| one != other);
    let fault = |(name, (one, other)): (&str, (Vec<String>, Vec<String>))| {
        let at = one.iter().zip(&other).take_while(|(one, other)| one == other).count();
        let [here, there] = [&one, &other].map(|list| list.get(at).map_or("nothing", String::as_str));
        format!("{}: its {name} are not those of {}: {there:?} where {here:?} stands", translation.path, original.path)
    };
    differing.map(fault).collect()
}
