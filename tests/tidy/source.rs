//! Files of the project, and Rust text with its comments and strings blanked out.

use std::fs;
use std::path::{Path, PathBuf};

/// One file: its path from the project's root, its text, and for Rust the text with comments and literals blanked.
pub(crate) struct Source {
    pub(crate) path: String,
    pub(crate) text: String,
    /// As long as `text`, line breaks in the same places.
    pub(crate) code: String,
}

impl Source {
    pub(crate) fn new(path: &str, text: &str) -> Source {
        let code = if is_rust(path) { blanked(text) } else { text.to_owned() };
        Source { path: path.to_owned(), text: text.to_owned(), code }
    }

    /// The code before the unit tests: up to `#[cfg(test)]` on an unindented line before a module.
    pub(crate) fn body(&self) -> &str {
        let mut start = 0;
        while let Some(found) = self.code[start..].find("#[cfg(test)]") {
            let at = start + found;
            let unindented = at == 0 || self.code.as_bytes()[at - 1] == b'\n';
            let rest = self.code[at + "#[cfg(test)]".len()..].trim_start();
            if unindented && (rest.starts_with("mod ") || rest.starts_with("#[")) {
                return &self.code[..at];
            }
            start = at + 1;
        }
        &self.code
    }

    /// The line number, from 1, of a byte offset.
    pub(crate) fn line(&self, offset: usize) -> usize {
        self.code[..offset].matches('\n').count() + 1
    }

    /// `file:line: message`.
    pub(crate) fn fault(&self, offset: usize, message: &str) -> String {
        format!("{}:{}: {message}", self.path, self.line(offset))
    }

    /// The module path of a source file (`src/model/rope.rs` → `model`, `rope`); none outside `src`.
    pub(crate) fn module_path(&self) -> Option<Vec<&str>> {
        let inside = self.path.strip_prefix("src/")?.strip_suffix(".rs")?;
        Some(inside.strip_suffix("/mod").unwrap_or(inside).split('/').collect())
    }

    /// True for `src/<module>.rs` and everything under `src/<module>/`, for any of the modules.
    pub(crate) fn belongs_to(&self, modules: &[&str]) -> bool {
        self.module_path().is_some_and(|path| modules.contains(&path[0]))
    }

    /// True under `src/`.
    pub(crate) fn is_shipped(&self) -> bool {
        self.path.starts_with("src/")
    }
}

/// The project's folder.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The text of a file of the project.
pub(crate) fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// True when the project has this file or folder.
pub(crate) fn exists(path: &Path) -> bool {
    root().join(path).exists()
}

/// True when the file's name ends in one of these extensions.
pub(crate) fn has_extension(path: &str, extensions: &[&str]) -> bool {
    Path::new(path).extension().and_then(|it| it.to_str()).is_some_and(|it| extensions.contains(&it))
}

fn is_rust(path: &str) -> bool {
    has_extension(path, &["rs"])
}

/// Every Rust file of the project.
pub(crate) fn rust_sources() -> Vec<Source> {
    let sources = sources(&["src", "tests", "build.rs"], &["rs"]);
    assert!(sources.iter().any(|source| source.path == "src/lib.rs"), "the walk has not seen src/lib.rs");
    sources
}

/// Every file that people write: code of all languages, scripts, configurations, documents.
pub(crate) fn text_sources() -> Vec<Source> {
    let mut all = sources(
        &[
            "src",
            "tests",
            "scripts",
            "slurm",
            "configs",
            "docs",
            "build.rs",
            "Cargo.toml",
            "README.md",
            "README.zh-CN.md",
            "CHANGELOG.md",
        ],
        &["rs", "cpp", "h", "sh", "py", "sbatch", "toml", "md"],
    );
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

/// The same text with every comment, string and character literal turned into spaces.
fn blanked(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = literal_end(bytes, at);
        for byte in &mut out[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end.max(at + 1);
    }
    String::from_utf8(out).expect("whole literals are blanked, so whole characters are")
}

/// Where the comment or literal that begins at `at` ends; `at` itself when none begins there.
fn literal_end(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    let after_word = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    if rest.starts_with(b"//") {
        return at + rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
    }
    if rest.starts_with(b"/*") {
        return block_comment_end(bytes, at);
    }
    match rest[0] {
        b'r' | b'b' | b'c' if !after_word => raw_string_end(bytes, at).unwrap_or(at),
        b'"' => quoted_end(bytes, at, b'"'),
        b'\'' if is_character(rest) => quoted_end(bytes, at, b'\''),
        _ => at,
    }
}

fn block_comment_end(bytes: &[u8], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0_u32);
    while at < bytes.len() {
        match &bytes[at..bytes.len().min(at + 2)] {
            b"/*" => (at, depth) = (at + 2, depth + 1),
            b"*/" if depth == 1 => return at + 2,
            b"*/" => (at, depth) = (at + 2, depth - 1),
            _ => at += 1,
        }
    }
    bytes.len()
}

/// The end of `r"…"`, `r#"…"#`, `br"…"` and so on; none when this is an ordinary word.
fn raw_string_end(bytes: &[u8], start: usize) -> Option<usize> {
    let prefix = bytes[start..].iter().take_while(|byte| matches!(byte, b'r' | b'b' | b'c')).count();
    if !bytes[start..start + prefix].contains(&b'r') {
        return None;
    }
    let hashes = bytes[start + prefix..].iter().take_while(|byte| **byte == b'#').count();
    let open = start + prefix + hashes;
    if bytes.get(open) != Some(&b'"') {
        return None;
    }
    let close = [b"\"".as_slice(), &vec![b'#'; hashes]].concat();
    let length = bytes[open + 1..].windows(close.len()).position(|window| window == close);
    Some(length.map_or(bytes.len(), |length| open + 1 + length + close.len()))
}

fn quoted_end(bytes: &[u8], start: usize, quote: u8) -> usize {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// A quote opens a character (`'x'`, `'\n'`) and not a lifetime (`'a`).
fn is_character(rest: &[u8]) -> bool {
    match rest.get(1) {
        Some(b'\\') => true,
        Some(first) => {
            let width = match first {
                0..0x80 => 1,
                0x80..0xe0 => 2,
                0xe0..0xf0 => 3,
                _ => 4,
            };
            rest.get(1 + width) == Some(&b'\'')
        }
        None => false,
    }
}

#[test]
fn comments_and_literals_are_blanked_and_nothing_else() {
    let text =
        "a /* b /* c */ d */ e \"f\\\"g\" h r#\"i\"j\"# k 'l' m 'n: &'o str, '\\'' p // q\nr br\"s\" bar\"t\" 'é' u";
    let kept: String = blanked(text).split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(kept, "a e h k m 'n: &'o str, p r bar u");
    assert_eq!(blanked(text).len(), text.len());
}
