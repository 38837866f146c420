//! Token ids of a data set in a file: made once on a machine, read by all its ranks, one prompt at a time.
//!
//! ```text
//!   magic (8 bytes) · ids (u32 each: prompt and answers of one group after another) · about (JSON)
//!   · length of `about` (8 bytes) · number of ids (8 bytes) · BLAKE3 of `about` (32 bytes) · magic (8 bytes)
//! ```
//!
//! All numbers are little-endian. The file's name holds its key: a digest of everything that decides the ids, which are the
//! data file, the tokenizer, the chat template and the plan's limits. A file with the right key is used again. It is written
//! under another name and renamed, so it is whole or not there. Readers use positioned reads: nothing is mapped, and the
//! system's cache of the file is shared by all ranks.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read as _, Write};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::data_digest::DataDigest;
use super::error::Error;
use super::group::{Answers, Group, Limits};
use super::records;
use super::tokenizer::Tokenizer;
use crate::runtime::digest::sha256_hex;
use crate::runtime::saved::partial_in;
use crate::runtime::units::{Bytes, Tokens, as_index, from_index};

/// A data file of fewer bytes is read by every rank for itself: its ids take little memory.
pub const KEPT_TEXT_BYTES_MIN: u64 = 4 << 20;

const MAGIC: &[u8; 8] = b"LSTOKEN3";
const ID_BYTES: u64 = 4;
/// Bytes after `about`.
const END_BYTES: usize = 56;
/// Ids that are read at once.
const READ_IDS: usize = 1 << 20;
/// Bytes of a data file that are digested at once.
const DIGEST_BYTES: usize = 16 << 20;

/// Everything of the data set but the ids.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct About {
    key: String,
    pub(super) data_digest: String,
    /// Without token ids.
    pub(super) groups: Vec<Group>,
    /// Number of ids of each answer, group by group.
    answer_tokens: Vec<Vec<u64>>,
    /// BLAKE3 of the ids of each prompt.
    prompt_digests: Vec<String>,
}

/// A file of kept tokens.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct KeptTokens {
    /// The absolute path.
    pub file: PathBuf,
    /// Whether the file was made now, and not found.
    pub is_new: bool,
}

/// The open file of kept tokens, and where each prompt stands in it.
#[derive(Debug)]
pub(super) struct TokenFile {
    path: PathBuf,
    file: File,
    bytes: Bytes,
    /// Of each prompt: number of ids before it in the file, its own number, and the BLAKE3 of its ids.
    prompts: Vec<(u64, u64, String)>,
}

impl TokenFile {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Reads the ids of one prompt, and checks that they are those that were written.
    pub(super) fn prompt(&self, index: usize) -> Result<Vec<i64>, Error> {
        let (before, count, digest) = &self.prompts[index];
        let (ids, found) = self.ids(*before, *count)?;
        if found == *digest {
            return Ok(ids);
        }
        Err(Error::Kept {
            file: self.path.clone(),
            reason: format!("the ids of prompt {index} are not those that were written"),
        })
    }

    /// Reads `count` ids after the first `before`; also returns the BLAKE3 of their bytes.
    fn ids(&self, before: u64, count: u64) -> Result<(Vec<i64>, String), Error> {
        let mut ids = Vec::with_capacity(as_index(count));
        let mut hash = blake3::Hasher::new();
        let mut buffer = vec![0; READ_IDS.min(as_index(count)) * as_index(ID_BYTES)];
        while from_index(ids.len()) < count {
            let left = as_index(count) - ids.len();
            let part = &mut buffer[..READ_IDS.min(left) * as_index(ID_BYTES)];
            let offset = from_index(MAGIC.len()) + (before + from_index(ids.len())) * ID_BYTES;
            self.file.read_exact_at(part, offset).map_err(Error::io(&self.path, "read it"))?;
            hash.update(part);
            let (whole, _) = part.as_chunks::<4>();
            ids.extend(whole.iter().map(|id| i64::from(u32::from_le_bytes(*id))));
        }
        Ok((ids, hash.finalize().to_hex().to_string()))
    }
}

/// A sentence about the bytes that the token ids of the data file `path` take, for a plan; `None` where there is no file.
/// `key` is the configuration's name for the file.
#[must_use]
pub fn size_note(key: &str, path: &Path, prompt_len: Tokens) -> Option<String> {
    let text = fs::metadata(path).ok()?.len();
    let (text_bytes, at) = (Bytes(text), |bytes: u64| Bytes(text.saturating_mul(bytes)));
    Some(if text < KEPT_TEXT_BYTES_MIN {
        format!("{key}: {text_bytes} of text; every rank holds the token ids in memory, about {} at most", at(8))
    } else {
        format!(
            "{key}: {text_bytes} of text; the token ids are kept in a file beside it, about {} at most, made once on a \
             machine; a rank holds one prompt of them, {} at most, and the answers'",
            at(ID_BYTES),
            Bytes(prompt_len.0.saturating_mul(8))
        )
    })
}

/// Finds the kept tokens of the data file `path`, or makes them, in the first of `folders` that can be written. `alive` is
/// called between records.
///
/// # Errors
/// The first record that breaks a limit; or when a file cannot be read, or none of the folders can be written (exit 3).
pub fn find_or_make(
    path: &Path,
    tokenizer: Option<&Tokenizer>,
    limits: &Limits,
    folders: &[PathBuf],
    alive: &dyn Fn(),
) -> Result<KeptTokens, Error> {
    let key = key(path, tokenizer, limits, alive)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = format!(".{}.{}.tokens", name.trim_start_matches('.'), &key[..16]);
    let places: Vec<PathBuf> = folders
        .iter()
        .map(|folder| std::path::absolute(folder.join(&name)).unwrap_or_else(|_| folder.join(&name)))
        .collect();
    for place in places.iter().filter(|place| place.exists()) {
        match open(place) {
            Ok((about, _)) if about.key == key => return Ok(KeptTokens { file: place.clone(), is_new: false }),
            Ok(_) => tracing::warn!("{} is of other data and is made again", place.display()),
            Err(error) => tracing::warn!("{error}; it is made again"),
        }
    }
    let mut failure = None;
    for place in places {
        let folder = place.parent().unwrap_or(Path::new("."));
        match fs::create_dir_all(folder).and_then(|()| partial_in(folder, &place)) {
            Ok(partial) => {
                let mut writer = Writer::new(partial.as_file(), &place)?;
                records::read(path, tokenizer, limits, |group, prompt_ids| {
                    alive();
                    writer.add(group, &prompt_ids)
                })?;
                writer.finish(key)?;
                partial.persist(&place).map_err(|failed| Error::Write { file: place.clone(), source: failed.error })?;
                return Ok(KeptTokens { file: place, is_new: true });
            }
            Err(source) => failure = Some(Error::Write { file: place, source }),
        }
    }
    Err(failure.unwrap_or_else(|| Error::Empty { file: path.to_owned() }))
}

/// A digest of everything that decides the ids: 64 hexadecimal digits.
fn key(path: &Path, tokenizer: Option<&Tokenizer>, limits: &Limits, alive: &dyn Fn()) -> Result<String, Error> {
    let failed = Error::io(path, "read it");
    let mut file = File::open(path).map_err(Error::io(path, "open it"))?;
    let mut data = blake3::Hasher::new();
    let mut buffer = vec![0; DIGEST_BYTES];
    loop {
        let read = file.read(&mut buffer).map_err(&failed)?;
        if read == 0 {
            break;
        }
        data.update_rayon(&buffer[..read]);
        alive();
    }
    let Limits { prompt_len_max, answer_len_max, vocab_size, answers, too_long } = limits;
    let answers = match answers {
        Answers::Given(count) => Some(count),
        Answers::Sampled => None,
    };
    let limits = format!("{prompt_len_max} {answer_len_max} {vocab_size} {answers:?} {too_long:?}");
    let tokenizer = tokenizer.map(Tokenizer::identity);
    Ok(sha256_hex(serde_json::json!([data.finalize().to_hex().to_string(), tokenizer, limits]).to_string()))
}

/// Writes the file while records are read.
struct Writer<'a> {
    out: BufWriter<&'a File>,
    place: &'a Path,
    ids: u64,
    digest: DataDigest,
    about: About,
}

impl<'a> Writer<'a> {
    fn new(file: &'a File, place: &'a Path) -> Result<Writer<'a>, Error> {
        let about = About {
            key: String::new(),
            data_digest: String::new(),
            groups: Vec::new(),
            answer_tokens: Vec::new(),
            prompt_digests: Vec::new(),
        };
        let mut writer = Writer { out: BufWriter::new(file), place, ids: 0, digest: DataDigest::default(), about };
        writer.write(MAGIC)?;
        Ok(writer)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.out.write_all(bytes).map_err(|source| Error::Write { file: self.place.to_owned(), source })
    }

    /// Writes ids and returns the BLAKE3 of their bytes.
    fn ids(&mut self, ids: &[i64]) -> Result<String, Error> {
        let mut hash = blake3::Hasher::new();
        for part in ids.chunks(READ_IDS) {
            let id = |id: &i64| u32::try_from(*id).expect("ids were checked against the vocabulary").to_le_bytes();
            let bytes: Vec<u8> = part.iter().flat_map(id).collect();
            hash.update(&bytes);
            self.write(&bytes)?;
        }
        self.ids += from_index(ids.len());
        Ok(hash.finalize().to_hex().to_string())
    }

    fn add(&mut self, mut group: Group, prompt_ids: &[i64]) -> Result<(), Error> {
        self.digest.add(&group, prompt_ids);
        let digest = self.ids(prompt_ids)?;
        let mut counts = Vec::with_capacity(group.answers.len());
        for answer in &mut group.answers {
            let ids = std::mem::take(&mut answer.ids);
            counts.push(from_index(ids.len()));
            self.ids(&ids)?;
        }
        self.about.prompt_digests.push(digest);
        self.about.answer_tokens.push(counts);
        self.about.groups.push(group);
        Ok(())
    }

    /// Writes what follows the ids, and brings the file to the disk.
    fn finish(mut self, key: String) -> Result<(), Error> {
        self.about.key = key;
        self.about.data_digest = std::mem::take(&mut self.digest).finish();
        let failed = |source: io::Error| Error::Write { file: self.place.to_owned(), source };
        let about = serde_json::to_vec(&self.about).map_err(|error| failed(error.into()))?;
        let mut end = Vec::with_capacity(END_BYTES);
        end.extend_from_slice(&from_index(about.len()).to_le_bytes());
        end.extend_from_slice(&self.ids.to_le_bytes());
        end.extend_from_slice(blake3::hash(&about).as_bytes());
        end.extend_from_slice(MAGIC);
        self.write(&about)?;
        self.write(&end)?;
        let failed = |source: io::Error| Error::Write { file: self.place.to_owned(), source };
        self.out.flush().map_err(failed)?;
        self.out.get_ref().sync_all().map_err(failed)
    }
}

/// Opens a file of kept tokens, checks its length and what it says of itself, and reads the answers' ids.
pub(super) fn open(path: &Path) -> Result<(About, TokenFile), Error> {
    let failed = Error::io(path, "read it");
    let damaged = |reason: &str| Error::Kept { file: path.to_owned(), reason: reason.to_owned() };
    let file = File::open(path).map_err(Error::io(path, "open it"))?;
    let bytes = file.metadata().map_err(&failed)?.len();
    let end_at = bytes.checked_sub(from_index(END_BYTES)).ok_or_else(|| damaged("it is too short"))?;
    let mut end = [0; END_BYTES];
    file.read_exact_at(&mut end, end_at).map_err(&failed)?;
    let number = |at: usize| end[at..at + 8].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
    let (about_bytes, ids) = (number(0), number(8));
    let wanted =
        ids.checked_mul(ID_BYTES).and_then(|ids| ids.checked_add(about_bytes)).and_then(|sum| sum.checked_add(8 + 56));
    if end[48..] != MAGIC[..] || wanted != Some(bytes) {
        return Err(damaged("its end is not that of such a file, or its length is another"));
    }
    let mut about = vec![0; as_index(about_bytes)];
    file.read_exact_at(&mut about, end_at - about_bytes).map_err(&failed)?;
    if blake3::hash(&about).as_bytes()[..] != end[16..48] {
        return Err(damaged("what it says of the data has another digest"));
    }
    let mut about: About = serde_json::from_slice(&about).map_err(|error| damaged(&error.to_string()))?;
    if about.groups.len() != about.answer_tokens.len() || about.groups.len() != about.prompt_digests.len() {
        return Err(damaged("its lists have other lengths"));
    }
    let mut tokens = TokenFile { path: path.to_owned(), file, bytes: Bytes(bytes), prompts: Vec::new() };
    let mut before = 0;
    for ((group, counts), digest) in about.groups.iter_mut().zip(&about.answer_tokens).zip(&about.prompt_digests) {
        let count = group.prompt_tokens.0;
        tokens.prompts.push((before, count, digest.clone()));
        before += count;
        for (answer, count) in group.answers.iter_mut().zip(counts) {
            answer.ids = tokens.ids(before, *count)?.0;
            before += count;
        }
    }
    if before == ids { Ok((about, tokens)) } else { Err(damaged("its ids are more or fewer than its groups'")) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::dataset::Dataset;
    use super::super::test_tokenizer;
    use super::*;
    use crate::config::TooLong;

    const LIMITS: Limits = Limits {
        prompt_len_max: Tokens(4000),
        answer_len_max: Tokens(9),
        vocab_size: 300,
        answers: Answers::Given(2),
        too_long: TooLong::Refuse,
    };

    /// A folder with a model and a data file of three records of uneven lengths.
    struct Place {
        folder: tempfile::TempDir,
        model: tempfile::TempDir,
    }

    impl Place {
        fn new() -> Place {
            let place = Place { folder: tempfile::tempdir().unwrap(), model: test_tokenizer::folder() };
            let record = |prompt: &str, answer: serde_json::Value| {
                let answers =
                    [answer, json!({"ids": [1, 2], "mask": [0, 1], "reward": null, "logprobs": [null, -0.1]})];
                json!({"prompt": prompt, "answers": answers, "reward_data": {"expected": "b"}}).to_string()
            };
            let records = [
                record("a", json!({"text": "one", "reward": 0.1})),
                record(&"long ".repeat(700), json!({"ids": [299], "reward": 1})),
                record("the last", json!({"text": "three"})),
            ];
            fs::write(place.data(), records.join("\n")).unwrap();
            place
        }

        fn data(&self) -> PathBuf {
            self.folder.path().join("train.jsonl")
        }

        fn tokenizer(&self) -> Tokenizer {
            Tokenizer::open(self.model.path()).unwrap()
        }

        fn make(&self, limits: &Limits) -> KeptTokens {
            let folders = [self.folder.path().to_owned()];
            find_or_make(&self.data(), Some(&self.tokenizer()), limits, &folders, &|| ()).unwrap()
        }
    }

    #[test]
    fn kept_tokens_are_those_of_the_data_and_are_used_again() {
        let place = Place::new();
        let kept = place.make(&LIMITS);
        assert!(kept.is_new && kept.file.starts_with(place.folder.path()));
        let (kept_data, read) = (
            Dataset::open_kept(&kept.file).unwrap(),
            Dataset::open(&place.data(), Some(&place.tokenizer()), &LIMITS).unwrap(),
        );
        assert_eq!((kept_data.len(), kept_data.digest()), (read.len(), read.digest()));
        for index in 0..read.len() {
            assert_eq!(kept_data.group(index), read.group(index));
            assert_eq!(kept_data.prompt_ids(index).unwrap(), read.prompt_ids(index).unwrap());
        }
        assert_eq!(kept_data.group(1).answers[0].ids, [299]);
        let bytes = fs::metadata(&kept.file).unwrap().len();
        assert_eq!(kept_data.kept_in(), Some((kept.file.as_path(), Bytes(bytes))));
        assert!(read.kept_in().is_none());
        let again = place.make(&LIMITS);
        assert_eq!((again.is_new, &again.file), (false, &kept.file));
        let files = fs::read_dir(place.folder.path()).unwrap().count();
        assert_eq!(files, 2, "the data and its tokens, and nothing half-written");
    }

    #[test]
    fn whatever_decides_the_ids_makes_another_file() {
        let place = Place::new();
        let mut files = vec![place.make(&LIMITS).file];
        files.push(place.make(&Limits { prompt_len_max: Tokens(3600), ..LIMITS }).file);
        files.push(place.make(&Limits { too_long: TooLong::CutLeft, ..LIMITS }).file);
        files.push(place.make(&Limits { answers: Answers::Sampled, ..LIMITS }).file);
        fs::write(place.model.path().join("chat_template.jinja"), "{{ messages }}").unwrap();
        files.push(place.make(&LIMITS).file);
        let tokenizer = place.model.path().join("tokenizer.json");
        fs::write(&tokenizer, fs::read_to_string(&tokenizer).unwrap() + "\n").unwrap();
        files.push(place.make(&LIMITS).file);
        let text = fs::read_to_string(place.data()).unwrap();
        fs::write(place.data(), text.replace("long", "lung")).unwrap();
        files.push(place.make(&LIMITS).file);
        let count = files.len();
        files.sort();
        files.dedup();
        assert_eq!(files.len(), count);
    }

    #[test]
    fn a_damaged_file_is_made_again_and_never_read() {
        let place = Place::new();
        let file = place.make(&LIMITS).file;
        let whole = fs::read(&file).unwrap();
        let damaged = |bytes: &[u8], words: &str| {
            fs::write(&file, bytes).unwrap();
            let message = Dataset::open_kept(&file).unwrap_err().to_string();
            assert!(message.contains(words) && message.contains("start again with --resume"), "{message}");
            assert!(place.make(&LIMITS).is_new, "{words}");
            assert_eq!(fs::read(&file).unwrap(), whole);
        };
        damaged(&[], "it is too short");
        damaged(&whole[..whole.len() - 4], "its end is not that of such a file");
        let mut other = whole.clone();
        other[whole.len() - END_BYTES - 9] ^= 1;
        damaged(&other, "another digest");
        // An id of a prompt: the file opens, and the prompt is not read.
        other.clone_from(&whole);
        other[8 + 4 * 100] ^= 1;
        fs::write(&file, &other).unwrap();
        let data = Dataset::open_kept(&file).unwrap();
        data.prompt_ids(0).unwrap();
        let message = data.prompt_ids(1).unwrap_err().to_string();
        assert!(message.contains("the ids of prompt 1 are not those that were written"), "{message}");
    }

    #[test]
    fn a_folder_that_cannot_be_written_leaves_it_to_the_next_one() {
        let place = Place::new();
        // Below a file there is no folder, not even for root.
        let (blocked, open) = (place.data().join("in"), place.folder.path().join("run/cache"));
        let find =
            |folders: &[PathBuf]| find_or_make(&place.data(), Some(&place.tokenizer()), &LIMITS, folders, &|| ());
        let kept = find(&[blocked.clone(), open.clone()]).unwrap();
        assert!(kept.is_new && kept.file.starts_with(&open), "{kept:?}");
        assert!(!find(&[blocked.clone(), open]).unwrap().is_new);
        let message = find(&[blocked]).unwrap_err().to_string();
        assert!(message.starts_with("cannot write ") && message.contains(".tokens: "), "{message}");
    }

    #[test]
    fn a_plan_says_where_the_ids_are_and_how_many_bytes_they_take() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("train.jsonl");
        assert_eq!(size_note("data.path", &file, Tokens(1)), None);
        fs::write(&file, "x".repeat(1000)).unwrap();
        let note = size_note("data.path", &file, Tokens(1)).unwrap();
        assert!(note.contains("every rank holds the token ids in memory"), "{note}");
        fs::write(&file, "x".repeat(5 << 20)).unwrap();
        let note = size_note("data.path", &file, Tokens(2 << 20)).unwrap();
        let words = "5.00 MiB of text; the token ids are kept in a file beside it, about 20.00 MiB at most, made once on a \
                     machine; a rank holds one prompt of them, 16.00 MiB at most";
        assert!(note.contains(words), "{note}");
    }

    #[test]
    fn a_bad_record_leaves_no_file_and_reading_shows_that_it_is_alive() {
        let place = Place::new();
        let calls = std::cell::Cell::new(0);
        let folders = [place.folder.path().to_owned()];
        let find = || {
            let alive = || calls.set(calls.get() + 1);
            find_or_make(&place.data(), Some(&place.tokenizer()), &LIMITS, &folders, &alive)
        };
        find().unwrap();
        assert_eq!(calls.get(), 4, "once for the digest of the file, and once a record");
        let text = fs::read_to_string(place.data()).unwrap();
        fs::write(place.data(), text + "\n{").unwrap();
        assert!(find().unwrap_err().to_string().contains("line 4: not a record"));
        assert_eq!(fs::read_dir(place.folder.path()).unwrap().count(), 2, "the data, and the tokens of before");
    }
}
