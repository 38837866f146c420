//! Files of the project, and the tokens of Rust files.

use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

/// One file: its path from the project's root, and its text.
pub(crate) struct Source {
    pub(crate) path: String,
    pub(crate) text: String,
}

impl Source {
    pub(crate) fn new(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    /// The tokens of a Rust file without its unit tests.
    pub(crate) fn tokens(&self) -> Vec<TokenTree> {
        let tokens: TokenStream = self.text.parse().unwrap_or_else(|error| panic!("{}: {error}", self.path));
        let mut kept = Vec::new();
        for token in tokens {
            kept.push(token);
            if ends_unit_tests(&kept) {
                // `#`, `[cfg(test)]`, `mod`, the name and the body.
                kept.truncate(kept.len() - 5);
            }
        }
        kept
    }

    /// The number of lines before the unit tests.
    pub(crate) fn lines_before_tests(&self) -> usize {
        let end = self.text.find("\n#[cfg(test)]\nmod ").map_or(self.text.len(), |start| start + 1);
        self.text[..end].lines().count()
    }

    /// `file:line: message`, with the line of a byte offset.
    pub(crate) fn fault(&self, offset: usize, message: &str) -> String {
        self.fault_at(self.text[..offset].matches('\n').count() + 1, message)
    }

    pub(crate) fn fault_at(&self, line: usize, message: &str) -> String {
        format!("{}:{line}: {message}", self.path)
    }

    /// The module path of a source file (`src/model/rope.rs` → `model`, `rope`); none outside `src`.
    pub(crate) fn module_path(&self) -> Option<Vec<&str>> {
        let inside = self.path.strip_prefix("src/")?.strip_suffix(".rs")?;
        Some(inside.strip_suffix("/mod").unwrap_or(inside).split('/').collect())
    }
}

/// Whether the last tokens are a module under `#[cfg(test)]`.
fn ends_unit_tests(tokens: &[TokenTree]) -> bool {
    let [.., _, TokenTree::Group(cfg), TokenTree::Ident(word), _, TokenTree::Group(body)] = tokens else {
        return false;
    };
    word == "mod" && body.delimiter() == Delimiter::Brace && cfg.stream().to_string().replace(' ', "") == "cfg(test)"
}

/// Calls `visit` with the tokens of `tokens` and of every group in them, level by level.
pub(crate) fn each_level(tokens: &[TokenTree], visit: &mut impl FnMut(&[TokenTree])) {
    visit(tokens);
    for token in tokens {
        if let TokenTree::Group(group) = token {
            each_level(&members(group), visit);
        }
    }
}

/// The tokens inside a group.
pub(crate) fn members(group: &Group) -> Vec<TokenTree> {
    group.stream().into_iter().collect()
}

/// The project's folder.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The text of a file of the project.
pub(crate) fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Whether the project has this file or folder.
pub(crate) fn exists(path: &Path) -> bool {
    root().join(path).exists()
}

/// Whether the file's name ends in one of these extensions.
pub(crate) fn has_extension(path: &str, extensions: &[&str]) -> bool {
    Path::new(path).extension().and_then(|it| it.to_str()).is_some_and(|it| extensions.contains(&it))
}

/// Every Rust file of the project.
pub(crate) fn rust_sources() -> Vec<Source> {
    let sources = sources(&["src", "tests", "build.rs"], &["rs"]);
    assert!(sources.iter().any(|source| source.path == "src/lib.rs"), "the walk has not seen src/lib.rs");
    sources
}

/// Every file that people write: code of all languages, scripts, configurations, documents.
pub(crate) fn text_sources() -> Vec<Source> {
    let folders = ["src", "tests", "scripts", "slurm", "configs", "docs"];
    let files = ["build.rs", "Cargo.toml", "README.md", "README.zh-CN.md", "CHANGELOG.md", "CONTRIBUTING.md"];
    let roots = [&folders[..], &files[..]].concat();
    let mut all = sources(&roots, &["rs", "cpp", "h", "sh", "py", "sbatch", "toml", "md"]);
    all.push(Source::new("Makefile", &read("Makefile")));
    all
}

/// Files with one of the extensions under the given files and folders (those that exist), sorted by path.
pub(crate) fn sources(roots: &[&str], extensions: &[&str]) -> Vec<Source> {
    let mut paths = Vec::new();
    for start in roots {
        walk(&root().join(start), &mut paths);
    }
    let mut names: Vec<String> = paths
        .iter()
        .map(|path| path.strip_prefix(root()).unwrap_or(path).to_string_lossy().into_owned())
        .filter(|name| has_extension(name, extensions))
        .collect();
    names.sort();
    names.iter().map(|name| Source::new(name, &read(name))).collect()
}

fn walk(path: &Path, found: &mut Vec<PathBuf>) {
    if path.is_file() {
        found.push(path.to_owned());
    } else if path.is_dir() {
        for entry in fs::read_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())) {
            walk(&entry.expect("a folder entry").path(), found);
        }
    }
}
