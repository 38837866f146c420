//! Texts out of files and folders, cut into chunks at the ends of paragraphs.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::Error;
use crate::data::{self, Tokenizer};
use crate::runtime::failure::Failure;
use crate::runtime::units::{Tokens, as_index, from_index};

/// Text that gives fewer characters than this has nothing to ask about.
pub(super) const CHUNK_CHARS_MIN: usize = 200;
/// Most files that are listed.
const FILES_MAX: usize = 100_000;
/// Deepest folder.
const DEPTH_MAX: usize = 16;
/// The most text that is held at once.
const TEXT_BYTES_MAX: u64 = 1 << 30;
/// Between two paragraphs.
const BLANK_LINE: &str = "\n\n";

/// How long a chunk is, at most.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ChunkSize {
    /// Characters.
    Chars(u64),
    /// Tokens of the given tokenizer.
    Tokens(Tokens),
}

/// A piece of a text that one request asks about.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Chunk {
    /// The file and the number of the piece in it.
    pub(super) name: String,
    /// Its paragraphs.
    pub(super) text: String,
}

/// All chunks, and what was passed over.
#[derive(Debug)]
pub(super) struct Texts {
    /// In the order in which the files were named, each folder's files by their names.
    pub(super) chunks: Vec<Chunk>,
    /// Files that gave at least one.
    pub(super) files: u64,
    /// Files in folders that are no text or too short.
    pub(super) passed_over: u64,
}

/// How long a text is, in the unit of the chunks.
pub(super) struct Measure<'a> {
    size: ChunkSize,
    tokenizer: Option<&'a Tokenizer>,
}

impl<'a> Measure<'a> {
    /// In the unit of `size`; tokens are counted by `tokenizer`.
    pub(super) fn new(size: ChunkSize, tokenizer: Option<&'a Tokenizer>) -> Measure<'a> {
        Measure { size, tokenizer }
    }

    fn of(&self, text: &str) -> Result<u64, data::Error> {
        match (self.size, self.tokenizer) {
            (ChunkSize::Tokens(_), Some(tokenizer)) => Ok(from_index(tokenizer.encode(text)?.len())),
            _ => Ok(from_index(text.chars().count())),
        }
    }

    fn most(&self) -> u64 {
        match self.size {
            ChunkSize::Chars(most) | ChunkSize::Tokens(Tokens(most)) => most,
        }
    }
}

/// Reads everything that `places` names. A file that is named must be text; in folders what is no text is passed over,
/// and so is what is hidden or a link.
pub(super) fn read(places: &[PathBuf], measure: &Measure<'_>) -> Result<Texts, Failure> {
    let mut texts = Texts { chunks: Vec::new(), files: 0, passed_over: 0 };
    let mut bytes = 0;
    for place in places {
        let about = fs::metadata(place).map_err(|source| io(place, "look at it", source))?;
        let mut files = Vec::new();
        if about.is_dir() {
            list(place, DEPTH_MAX, &mut files)?;
            files.sort();
        } else {
            files.push(place.clone());
        }
        for file in files {
            let length = fs::metadata(&file).map_err(|source| io(&file, "ask its length", source))?.len();
            bytes += length;
            if bytes > TEXT_BYTES_MAX {
                return Err(Error::TooMuch { bytes_max: TEXT_BYTES_MAX }.into());
            }
            match text_of(&file)? {
                None if !about.is_dir() => return Err(Error::NotText { file }.into()),
                None => texts.passed_over += 1,
                Some(text) => texts.take(&file, &text, measure)?,
            }
        }
    }
    if texts.chunks.is_empty() {
        let places: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
        return Err(Error::NoText { places: places.join(", "), chars_min: CHUNK_CHARS_MIN }.into());
    }
    Ok(texts)
}

impl Texts {
    fn take(&mut self, file: &Path, text: &str, measure: &Measure<'_>) -> Result<(), data::Error> {
        let pieces = pieces(text, measure)?;
        if pieces.is_empty() {
            self.passed_over += 1;
        } else {
            self.files += 1;
        }
        for (number, text) in (1..).zip(pieces) {
            self.chunks.push(Chunk { name: format!("{}, part {number}", file.display()), text });
        }
        Ok(())
    }
}

fn io(file: &Path, action: &'static str, source: std::io::Error) -> Error {
    Error::Io { file: file.to_owned(), action, source }
}

/// All plain files under `folder`; links are not followed, so that no text comes twice.
fn list(folder: &Path, depth: usize, files: &mut Vec<PathBuf>) -> Result<(), Error> {
    for entry in fs::read_dir(folder).map_err(|source| io(folder, "list it", source))? {
        let entry = entry.map_err(|source| io(folder, "list it", source))?;
        let kind = entry.file_type().map_err(|source| io(folder, "list it", source))?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if files.len() >= FILES_MAX {
            break;
        }
        if kind.is_file() && !hidden {
            files.push(entry.path());
        } else if kind.is_dir() && !hidden && depth > 0 {
            list(&entry.path(), depth - 1, files)?;
        }
    }
    Ok(())
}

/// The file's text, if it is text.
fn text_of(file: &Path) -> Result<Option<String>, Error> {
    let bytes = fs::read(file).map_err(|source| io(file, "read it", source))?;
    let text = String::from_utf8(bytes).ok().map(|text| text.trim_start_matches('\u{feff}').replace("\r\n", "\n"));
    Ok(text.filter(|text| text.chars().all(|sign| !sign.is_control() || matches!(sign, '\n' | '\t' | '\u{c}'))))
}

/// The text as pieces that are no longer than the measure's bound; those that are too short to ask about are left out.
fn pieces(text: &str, measure: &Measure<'_>) -> Result<Vec<String>, data::Error> {
    let most = measure.most();
    let between = measure.of(BLANK_LINE)?;
    let (mut pieces, mut current, mut long) = (Vec::new(), String::new(), 0);
    for paragraph in text.split(BLANK_LINE).map(str::trim_end).filter(|paragraph| !paragraph.trim().is_empty()) {
        let mut parts = Vec::new();
        cut(paragraph.trim_start_matches('\n'), measure, &mut parts)?;
        for (part, length) in parts {
            if !current.is_empty() && long + between + length > most {
                pieces.push(std::mem::take(&mut current));
                long = 0;
            }
            if !current.is_empty() {
                current.push_str(BLANK_LINE);
                long += between;
            }
            current.push_str(part);
            long += length;
        }
    }
    pieces.push(current);
    pieces.retain(|piece| piece.chars().count() >= CHUNK_CHARS_MIN);
    Ok(pieces)
}

/// Halves `text` until each part is short enough, at the end of a line, of a sentence, or of a word near the middle.
fn cut<'a>(text: &'a str, measure: &Measure<'_>, parts: &mut Vec<(&'a str, u64)>) -> Result<(), data::Error> {
    let length = measure.of(text)?;
    if length <= measure.most() || text.chars().nth(1).is_none() {
        if !text.is_empty() {
            parts.push((text, length));
        }
        return Ok(());
    }
    let (left, right) = text.split_at(middle(text));
    cut(left.trim_end(), measure, parts)?;
    cut(right.trim_start(), measure, parts)
}

/// Where to cut: within the middle half of the text where a line, a sentence or a word ends there.
fn middle(text: &str) -> usize {
    let border = |mut at: usize| {
        while !text.is_char_boundary(at) {
            at += 1;
        }
        at
    };
    let (start, half, end) = (border(text.len() / 4), border(text.len() / 2), border(text.len() / 4 * 3));
    let nearest = |sign: &str| {
        let ends = text[start..end].match_indices(sign).map(|(at, found)| start + at + found.len());
        ends.min_by_key(|at| at.abs_diff(half))
    };
    let first = text.chars().next().map_or(0, char::len_utf8);
    ["\n", ". ", " "].into_iter().find_map(nearest).unwrap_or(if half < text.len() { half.max(first) } else { first })
}

/// A rough count where no tokenizer counts: about four characters of English text are a token.
pub(super) fn tokens_about(chars: u64) -> u64 {
    chars.div_ceil(4)
}

/// Tokens of all these texts, roughly.
pub(super) fn text_tokens_about<'a>(texts: impl Iterator<Item = &'a str>) -> u64 {
    texts.map(|text| tokens_about(from_index(text.chars().count()))).sum()
}

/// The lengths that make sense for a chunk.
pub(super) fn check(size: ChunkSize) -> Result<(), Error> {
    let (option, found, least) = match size {
        ChunkSize::Chars(found) => ("--chunk-chars", found, from_index(CHUNK_CHARS_MIN)),
        ChunkSize::Tokens(Tokens(found)) => ("--chunk-tokens", found, from_index(CHUNK_CHARS_MIN) / 4),
    };
    let most = TEXT_BYTES_MAX;
    if (least..=most).contains(&found) {
        return Ok(());
    }
    Err(Error::Option { option, found, wanted: format!("from {least} to {}", as_index(most)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, most: u64) -> Vec<String> {
        pieces(text, &Measure::new(ChunkSize::Chars(most), None)).unwrap()
    }

    #[test]
    fn chunks_end_with_paragraphs_and_keep_to_their_length() {
        let paragraph = |sign: char| sign.to_string().repeat(150);
        let text = ['a', 'b', 'c', 'd', 'e'].map(paragraph).join("\n\n\n");
        let found = of(&text, 320);
        assert_eq!(
            found,
            [format!("{}\n\n{}", paragraph('a'), paragraph('b')), format!("{}\n\n{}", paragraph('c'), paragraph('d'))]
        );
        assert_eq!(of(&text, 10_000).len(), 1, "a short text is one chunk");
        assert!(of("too short to ask about", 320).is_empty());
    }

    #[test]
    fn a_paragraph_without_end_is_cut_at_words_and_loses_none() {
        let words: Vec<String> = (0..2_000).map(|word| format!("w{word}é")).collect();
        let found = of(&words.join(" "), 700);
        assert!(found.iter().all(|piece| piece.chars().count() <= 700), "{found:?}");
        let kept: Vec<&str> = found.iter().flat_map(|piece| piece.split_whitespace()).collect();
        assert_eq!(kept, words);
        let solid = "é".repeat(5_000);
        assert_eq!(of(&solid, 700).concat().replace("\n\n", ""), solid);
    }

    #[test]
    fn a_folder_gives_its_texts_in_order_and_a_named_file_must_be_text() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
        write("b.txt", "second. ".repeat(40).as_bytes());
        write("a.txt", "first. ".repeat(40).as_bytes());
        write("binary", &[0; 400]);
        write(".hidden", "hidden. ".repeat(40).as_bytes());
        let measure = Measure::new(ChunkSize::Chars(4_000), None);
        let texts = read(&[folder.path().to_owned()], &measure).unwrap();
        assert_eq!((texts.files, texts.passed_over, texts.chunks.len()), (2, 1, 2));
        assert!(texts.chunks[0].name.ends_with("a.txt, part 1") && texts.chunks[1].text.starts_with("second"));
        let refused = |name: &str| read(&[folder.path().join(name)], &measure).unwrap_err().to_string();
        assert!(refused("binary").contains("binary: is no text"), "{}", refused("binary"));
        assert!(refused("absent").contains("absent: cannot look at it"), "{}", refused("absent"));
        write("short", b"short");
        assert!(refused("short").contains("no text of at least 200 characters"), "{}", refused("short"));
    }
}
