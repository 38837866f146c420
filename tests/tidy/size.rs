//! How long a file may be, and how it may be called.

use std::path::Path;

use crate::source::Source;

const FILE_LINES_MAX: usize = 500;
const EMPTY_NAMES: [&str; 8] = ["util", "utils", "common", "helper", "helpers", "misc", "shared", "stuff"];

/// Files of `src` with more than 500 lines before their unit tests.
pub(crate) fn long_files(sources: &[Source]) -> Vec<String> {
    let lines = sources.iter().filter(|source| source.path.starts_with("src/"));
    let lines = lines.map(|source| (source, source.lines_before_tests()));
    let long = lines.filter(|(_, lines)| *lines > FILE_LINES_MAX);
    long.map(|(source, lines)| {
        source.fault_at(lines, &format!("{lines} lines before the tests, {FILE_LINES_MAX} at most: split the file"))
    })
    .collect()
}

/// Files and folders whose name says nothing about their content.
pub(crate) fn empty_names(sources: &[Source]) -> Vec<String> {
    let mut faults = Vec::new();
    for source in sources {
        for part in Path::new(&source.path).with_extension("").iter().filter_map(|part| part.to_str()) {
            if EMPTY_NAMES.contains(&part) {
                faults.push(source.fault_at(1, &format!("a module named `{part}` says nothing: name its content")));
            }
        }
    }
    faults
}
