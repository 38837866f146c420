//! Texts from files and folders, cut into chunks at the ends of paragraphs.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::Error;
use crate::data::{self, Hidden, Tokenizer, list_files};
use crate::runtime::failure::Failure;
use crate::runtime::units::{Tokens, from_index};

/// Shorter chunks are dropped: there is nothing to ask about.
pub(super) const CHUNK_CHARS_MIN: usize = 200;
const FILES_MAX: usize = 100_000;
/// All texts are in memory at once.
const TEXT_BYTES_MAX: u64 = 1 << 30;
const BLANK_LINE: &str = "\n\n";

/// Greatest length of a chunk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub enum ChunkSize {
    Chars(u64),
    /// Tokens of `Options::tokenizer`.
    Tokens(Tokens),
}

/// A piece of a text, for one request.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Chunk {
    /// File and number of the piece.
    pub(super) name: String,
    pub(super) text: String,
}

#[derive(Debug)]
pub(super) struct Texts {
    /// In the order of the given paths; files of a folder in order of name.
    pub(super) chunks: Vec<Chunk>,
    /// Files with at least one chunk.
    pub(super) files: u64,
    /// Files in folders that are not text, or too short.
    pub(super) passed_over: u64,
}

/// Measures texts in characters or tokens, the unit of the chunk size.
pub(super) struct Measure<'a> {
    size: ChunkSize,
    tokenizer: Option<&'a Tokenizer>,
}

impl<'a> Measure<'a> {
    pub(super) fn new(size: ChunkSize, tokenizer: Option<&'a Tokenizer>) -> Measure<'a> {
        Measure { size, tokenizer }
    }

    fn length(&self, text: &str) -> Result<u64, data::Error> {
        match (self.size, self.tokenizer) {
            (ChunkSize::Tokens(_), Some(tokenizer)) => Ok(from_index(tokenizer.encode(text)?.len())),
            _ => Ok(from_index(text.chars().count())),
        }
    }

    fn length_max(&self) -> u64 {
        match self.size {
            ChunkSize::Chars(length) | ChunkSize::Tokens(Tokens(length)) => length,
        }
    }
}

/// Reads all files and folders of `paths`. A named file must be text. In folders, hidden files, links and files that are
/// not text are skipped.
pub(super) fn read(paths: &[PathBuf], measure: &Measure<'_>) -> Result<Texts, Failure> {
    let mut texts = Texts { chunks: Vec::new(), files: 0, passed_over: 0 };
    let mut bytes = 0;
    for path in paths {
        let in_folder = fs::metadata(path).map_err(Error::io(path, "read its metadata"))?.is_dir();
        let mut files = Vec::new();
        if in_folder {
            list_files(path, Hidden::Skip, FILES_MAX, &mut files)?;
            files.sort();
        } else {
            files.push(path.clone());
        }
        for file in files {
            bytes += fs::metadata(&file).map_err(Error::io(&file, "read its length"))?.len();
            if bytes > TEXT_BYTES_MAX {
                return Err(Error::TooMuch { bytes_max: TEXT_BYTES_MAX }.into());
            }
            match text_of(&file)? {
                None if !in_folder => return Err(Error::NotText { file }.into()),
                None => texts.passed_over += 1,
                Some(text) => texts.add(&file, &text, measure)?,
            }
        }
    }
    if texts.chunks.is_empty() {
        let places: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
        return Err(Error::NoText { places: places.join(", "), chars_min: CHUNK_CHARS_MIN }.into());
    }
    Ok(texts)
}

impl Texts {
    fn add(&mut self, file: &Path, text: &str, measure: &Measure<'_>) -> Result<(), data::Error> {
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

/// `None` if the file is not text.
fn text_of(file: &Path) -> Result<Option<String>, Error> {
    let bytes = fs::read(file).map_err(Error::io(file, "read it"))?;
    let text = String::from_utf8(bytes).ok().map(|text| text.trim_start_matches('\u{feff}').replace("\r\n", "\n"));
    Ok(text.filter(|text| {
        text.chars().all(|character| !character.is_control() || matches!(character, '\n' | '\t' | '\u{c}'))
    }))
}

/// The text as pieces within the length bound; leaves out pieces that are too short.
fn pieces(text: &str, measure: &Measure<'_>) -> Result<Vec<String>, data::Error> {
    let length_max = measure.length_max();
    let between = measure.length(BLANK_LINE)?;
    let (mut pieces, mut current, mut current_length) = (Vec::new(), String::new(), 0);
    for paragraph in text.split(BLANK_LINE).map(str::trim_end).filter(|paragraph| !paragraph.trim().is_empty()) {
        let mut parts = Vec::new();
        cut(paragraph.trim_start_matches('\n'), measure, &mut parts)?;
        for (part, length) in parts {
            if !current.is_empty() && current_length + between + length > length_max {
                pieces.push(std::mem::take(&mut current));
                current_length = 0;
            }
            if !current.is_empty() {
                current.push_str(BLANK_LINE);
                current_length += between;
            }
            current.push_str(part);
            current_length += length;
        }
    }
    pieces.push(current);
    pieces.retain(|piece| piece.chars().count() >= CHUNK_CHARS_MIN);
    Ok(pieces)
}

/// Halves `text` until each part is short enough; cuts at the end of a line, a sentence or a word near the middle.
fn cut<'a>(text: &'a str, measure: &Measure<'_>, parts: &mut Vec<(&'a str, u64)>) -> Result<(), data::Error> {
    let length = measure.length(text)?;
    if length <= measure.length_max() || text.chars().nth(1).is_none() {
        if !text.is_empty() {
            parts.push((text, length));
        }
        return Ok(());
    }
    let (left, right) = text.split_at(middle(text));
    cut(left.trim_end(), measure, parts)?;
    cut(right.trim_start(), measure, parts)
}

/// The byte offset of the cut: the end of a line, a sentence or a word in the middle half of the text, else its middle.
fn middle(text: &str) -> usize {
    let char_boundary = |mut at: usize| {
        while !text.is_char_boundary(at) {
            at += 1;
        }
        at
    };
    let (start, half, end) =
        (char_boundary(text.len() / 4), char_boundary(text.len() / 2), char_boundary(text.len() / 4 * 3));
    let nearest = |separator: &str| {
        let ends = text[start..end].match_indices(separator).map(|(at, found)| start + at + found.len());
        ends.min_by_key(|at| at.abs_diff(half))
    };
    let first = text.chars().next().map_or(0, char::len_utf8);
    ["\n", ". ", " "].into_iter().find_map(nearest).unwrap_or(if half < text.len() { half.max(first) } else { first })
}

/// Estimated tokens of a text: about four characters of English are one token.
pub(super) fn tokens_about(text: &str) -> u64 {
    from_index(text.chars().count()).div_ceil(4)
}

/// Refuses chunk sizes that make no sense.
pub(super) fn check(size: ChunkSize) -> Result<(), Error> {
    let (option, found, least) = match size {
        ChunkSize::Chars(found) => ("--chunk-chars", found, from_index(CHUNK_CHARS_MIN)),
        ChunkSize::Tokens(Tokens(found)) => ("--chunk-tokens", found, from_index(CHUNK_CHARS_MIN) / 4),
    };
    if (least..=TEXT_BYTES_MAX).contains(&found) {
        return Ok(());
    }
    Err(Error::Option { option, found, wanted: format!("from {least} to {TEXT_BYTES_MAX}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces_of(text: &str, chars_max: u64) -> Vec<String> {
        pieces(text, &Measure::new(ChunkSize::Chars(chars_max), None)).unwrap()
    }

    #[test]
    fn chunks_end_with_paragraphs_and_keep_to_their_length() {
        let paragraph = |letter: char| letter.to_string().repeat(150);
        let text = ['a', 'b', 'c', 'd', 'e'].map(paragraph).join("\n\n\n");
        let found = pieces_of(&text, 320);
        assert_eq!(
            found,
            [format!("{}\n\n{}", paragraph('a'), paragraph('b')), format!("{}\n\n{}", paragraph('c'), paragraph('d'))]
        );
        assert_eq!(pieces_of(&text, 10_000).len(), 1, "a short text is one chunk");
        assert!(pieces_of("too short to ask about", 320).is_empty());
    }

    #[test]
    fn a_long_paragraph_is_cut_at_words_and_loses_none() {
        let words: Vec<String> = (0..2_000).map(|word| format!("w{word}é")).collect();
        let found = pieces_of(&words.join(" "), 700);
        assert!(found.iter().all(|piece| piece.chars().count() <= 700), "{found:?}");
        let kept: Vec<&str> = found.iter().flat_map(|piece| piece.split_whitespace()).collect();
        assert_eq!(kept, words);
        let solid = "é".repeat(5_000);
        assert_eq!(pieces_of(&solid, 700).concat().replace("\n\n", ""), solid);
    }

    #[test]
    fn files_of_a_folder_come_in_order_and_a_named_file_must_be_text() {
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
        assert!(refused("absent").contains("absent: cannot read its metadata"), "{}", refused("absent"));
        write("short", b"short");
        assert!(refused("short").contains("no text of at least 200 characters"), "{}", refused("short"));
    }
}
