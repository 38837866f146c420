//! Real text from folders, as paragraphs without repeats.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::error::Error;
use super::files::{Hidden, list_files};
use super::random::Random;
use super::tokenizer::Tokenizer;
use crate::runtime::reading;
use crate::runtime::units::{Tokens, from_index};

/// Folders of English text on any Debian machine; absent ones are skipped.
pub(super) const DEFAULT_FOLDERS: [&str; 3] = ["/usr/share/common-licenses", "/usr/share/doc", "/usr/share/perl"];

const FILES_MAX: usize = 200_000;
/// Longer files are skipped.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Longer paragraphs are cut at the end of a line.
const PARAGRAPH_BYTES_MAX: usize = 2_000;

/// Consecutive lines without a blank one.
#[derive(Debug)]
pub(super) struct Paragraph {
    pub(super) text: String,
    /// Tokens of the text and a blank line after it.
    pub(super) tokens: Tokens,
}

/// Paragraphs in the order of their files, which is shuffled by the seed.
#[derive(Debug)]
pub(super) struct Corpus {
    /// No two are equal but for white space.
    pub(super) paragraphs: Vec<Paragraph>,
    /// Number of files with at least one of these paragraphs.
    pub(super) files: usize,
}

/// Collects at least `tokens_wanted` tokens of text, or all there is.
pub(super) fn collect(
    folders: &[PathBuf],
    tokenizer: &Tokenizer,
    seed: u64,
    tokens_wanted: Tokens,
) -> Result<Corpus, Error> {
    let mut files = Vec::new();
    for folder in folders {
        list_files(folder, Hidden::Include, FILES_MAX, &mut files)?;
    }
    files.sort();
    files.dedup();
    Random::new(seed, 0x66_696c_6573).shuffle(&mut files);
    let added = tokenizer.added();
    let mut known = BTreeSet::new();
    let mut corpus = Corpus { paragraphs: Vec::new(), files: 0 };
    let mut tokens = Tokens(0);
    for file in files {
        if tokens >= tokens_wanted {
            break;
        }
        let Some(text) = text_of(&file)? else { continue };
        let before = corpus.paragraphs.len();
        for text in paragraphs(&text) {
            let words: Vec<&str> = text.split_whitespace().collect();
            let new = known.insert(<[u8; 32]>::from(Sha256::digest(words.join(" "))));
            if new && prose(&text) && !added.iter().any(|token| text.contains(token.as_str())) {
                let count = Tokens(from_index(tokenizer.encode(&format!("{text}\n\n"))?.len()));
                tokens += count;
                corpus.paragraphs.push(Paragraph { text, tokens: count });
            }
        }
        corpus.files += usize::from(corpus.paragraphs.len() > before);
    }
    Ok(corpus)
}

/// The file's text if it is text: UTF-8 without control characters, neither tiny nor huge.
fn text_of(file: &Path) -> Result<Option<String>, Error> {
    let bytes = fs::metadata(file).map_err(Error::io(file, "read its length"))?.len();
    if !(200..=FILE_BYTES_MAX).contains(&bytes) {
        return Ok(None);
    }
    let bytes = fs::read(file).map_err(Error::io(file, "read it"))?;
    let text = std::str::from_utf8(reading::without_mark(&bytes)).map(|text| text.replace("\r\n", "\n"));
    let plain =
        |text: &String| text.chars().all(|character| !character.is_control() || matches!(character, '\n' | '\t'));
    Ok(text.ok().filter(plain))
}

/// Whether at least three in five characters are letters: excludes tables and addresses.
fn prose(text: &str) -> bool {
    let characters = || text.chars().filter(|character| !character.is_whitespace());
    5 * characters().filter(|character| character.is_alphabetic()).count() >= 3 * characters().count()
}

/// Runs of lines between blank ones, none longer than the bound unless it is a single line.
fn paragraphs(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut current = String::new();
    for line in text.lines() {
        if line.trim().is_empty() || current.len() + line.len() > PARAGRAPH_BYTES_MAX {
            found.push(std::mem::take(&mut current));
        }
        if !line.trim().is_empty() {
            if !current.is_empty() {
                current.push('\n');
            }
            current.push_str(line.trim_end());
        }
    }
    found.push(current);
    found.retain(|paragraph| !paragraph.is_empty());
    found
}

#[cfg(test)]
mod tests {
    use super::super::test_tokenizer;
    use super::*;

    #[test]
    fn only_text_is_collected_and_every_paragraph_once() {
        let folder = tempfile::tempdir().unwrap();
        let body = "A first paragraph,\nin two lines.\n\n\nThe second one is unique to this file. ".to_owned()
            + &"x".repeat(200);
        fs::write(folder.path().join("a"), &body).unwrap();
        fs::create_dir(folder.path().join("deep")).unwrap();
        fs::write(folder.path().join("deep/b"), body.replace("unique", "new").replace('\n', "\r\n")).unwrap();
        fs::write(folder.path().join("binary"), [0_u8; 400]).unwrap();
        fs::write(folder.path().join("latin1"), [0xe9_u8; 400]).unwrap();
        fs::write(folder.path().join("table"), "0E45 ; [.3248.0020.0003] # THAI\n".repeat(10)).unwrap();
        fs::write(folder.path().join("special"), "Says <|im_end|> in it. ".repeat(20)).unwrap();
        std::os::unix::fs::symlink(folder.path().join("a"), folder.path().join("link")).unwrap();
        let model = test_tokenizer::folder();
        let tokenizer = Tokenizer::open(model.path()).unwrap();
        let corpus = collect(&[folder.path().to_owned()], &tokenizer, 1, Tokens(u64::MAX)).unwrap();
        assert_eq!(corpus.files, 2);
        let mut texts: Vec<&str> = corpus.paragraphs.iter().map(|paragraph| &paragraph.text[..20]).collect();
        texts.sort_unstable();
        assert_eq!(texts, ["A first paragraph,\ni", "The second one is ne", "The second one is un"]);
        let first = corpus.paragraphs.iter().find(|paragraph| paragraph.text.starts_with('A')).unwrap();
        assert_eq!(first.tokens, Tokens(34));
    }
}
