//! `data keychain`: long-context tasks with a checkable answer, made of real text.
//!
//! A passage of real text carries short notes on lines of their own, each with the access code of another place. The
//! question at the end asks for one of them. One answer is right (reward 1); the wrong ones (reward 0) are codes that the
//! notes give for other places, so that they can only be told apart by reading. Answers are whole sentences that begin as
//! the note does: a small model then already copies codes from the text and has only to learn which. Train and held-out
//! prompts share neither passages nor codes. Same text, tokenizer, options and seed: same files.

use std::fs::{self, Permissions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use tempfile::NamedTempFile;

use super::corpus::{self, Corpus, Paragraph};
use super::error::Error;
use super::order::Random;
use super::tokenizer::Tokenizer;
use crate::units::{Tokens, as_index, from_index};

const DIRECTIONS: [&str; 16] = [
    "north", "south", "east", "west", "upper", "lower", "inner", "outer", "old", "new", "red", "blue", "green",
    "white", "first", "second",
];
const PLACES: [&str; 16] = [
    "archive", "bridge", "cellar", "depot", "garden", "gate", "harbour", "kitchen", "library", "market", "mill",
    "office", "station", "tower", "vault", "workshop",
];
/// Names in all; a prompt takes at most a quarter of them.
const NAMES: usize = DIRECTIONS.len() * PLACES.len();
const KEYS_MAX: usize = NAMES / 4;
/// Codes have four digits; every fifth of them is kept for held-out prompts.
const CODES: std::ops::Range<u32> = 1_000..10_000;
const HELD_OUT_CODES: usize = 1_800;
/// A prompt this close below its bound is not improved further.
const SLACK: Tokens = Tokens(2);
/// Most measurements of one prompt.
const ROUNDS_MAX: usize = 40;

/// What to make.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folders of text; empty: those that stand on any Debian machine.
    pub folders: Vec<PathBuf>,
    /// Tokens of a prompt, chat turns included: never more, and at most a few words less.
    pub prompt_tokens: Tokens,
    /// Prompts of `train.jsonl`, at least one.
    pub train: usize,
    /// Prompts of `held_out.jsonl`.
    pub held_out: usize,
    /// Notes in a prompt, at least `group_size`.
    pub keys: usize,
    /// Answers of a prompt, one of them right.
    pub group_size: usize,
    /// Of everything random.
    pub seed: u64,
}

impl Default for Options {
    /// The laptop run's data.
    fn default() -> Self {
        let prompt_tokens = Tokens(2_000);
        Options { folders: Vec::new(), prompt_tokens, train: 40, held_out: 8, keys: 8, group_size: 4, seed: 0 }
    }
}

/// What was made.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Summary {
    /// The training prompts.
    pub train_file: PathBuf,
    /// The held-out prompts.
    pub held_out_file: PathBuf,
    /// Prompts in the two files.
    pub prompts: usize,
    /// Shortest prompt.
    pub tokens_min: Tokens,
    /// Longest prompt.
    pub tokens_max: Tokens,
    /// Files the text comes from.
    pub text_files: usize,
    /// Tokens of text there were; passages repeat where the train prompts together are longer.
    pub text_tokens: Tokens,
}

/// Writes `train.jsonl` and `held_out.jsonl` into the folder `out`, each whole or not at all.
///
/// # Errors
/// When an option cannot be met (exit 2), there is too little text, the folder's chat template is not ChatML, or the disk
/// refuses (exit 3).
pub fn write(options: &Options, tokenizer: &Tokenizer, out: &Path) -> Result<Summary, Error> {
    check(options)?;
    let folders = folders(options)?;
    let maker = Maker { options, tokenizer, folders: &folders };
    let prompts = from_index(options.train + options.held_out);
    // A tenth more than the prompts take, and never less than a few passages.
    let wanted = options.prompt_tokens.0.saturating_mul(prompts.max(4)).saturating_mul(11) / 10;
    let corpus = corpus::collect(&folders, tokenizer, options.seed, Tokens(wanted))?;
    let (held_out_text, train_text) = maker.divide(&corpus)?;
    let mut codes: Vec<u32> = CODES.collect();
    Random::new(options.seed, 0x636f_6465).shuffle(&mut codes);
    let (held_out_codes, train_codes) = codes.split_at(HELD_OUT_CODES);

    fs::create_dir_all(out).map_err(|source| Error::Io { file: out.to_owned(), action: "make the folder", source })?;
    let mut lengths = Vec::new();
    let train = Split { name: "train", stream: 1, prompts: options.train, text: train_text, codes: train_codes };
    let held_out =
        Split { name: "held-out", stream: 2, prompts: options.held_out, text: held_out_text, codes: held_out_codes };
    let train_made = maker.file(&train, out, &mut lengths)?;
    let held_out_made = maker.file(&held_out, out, &mut lengths)?;
    let (train_file, held_out_file) = (out.join("train.jsonl"), out.join("held_out.jsonl"));
    for (made, file) in [(train_made, &train_file), (held_out_made, &held_out_file)] {
        made.persist(file).map_err(|cause| Error::Io {
            file: file.clone(),
            action: "put it in place",
            source: cause.error,
        })?;
    }
    Ok(Summary {
        train_file,
        held_out_file,
        prompts: lengths.len(),
        tokens_min: lengths.iter().copied().min().unwrap_or_default(),
        tokens_max: lengths.iter().copied().max().unwrap_or_default(),
        text_files: corpus.files,
        text_tokens: corpus.paragraphs.iter().map(|paragraph| paragraph.tokens).sum(),
    })
}

/// Options that no text can mend.
fn check(options: &Options) -> Result<(), Error> {
    let refuse = |option, found: usize, wanted: String| Err(Error::Option { option, found: found.to_string(), wanted });
    if options.train == 0 {
        return refuse("train", 0, "at least 1".to_owned());
    }
    if options.group_size < 2 {
        return refuse("group_size", options.group_size, "at least 2: one right answer and a wrong one".to_owned());
    }
    if !(options.group_size..=KEYS_MAX).contains(&options.keys) {
        return refuse("keys", options.keys, format!("from group_size {} to {KEYS_MAX}", options.group_size));
    }
    Ok(())
}

/// The folders to search.
fn folders(options: &Options) -> Result<Vec<PathBuf>, Error> {
    if !options.folders.is_empty() {
        return Ok(options.folders.clone());
    }
    let found: Vec<PathBuf> =
        corpus::DEFAULT_FOLDERS.iter().map(PathBuf::from).filter(|folder| folder.is_dir()).collect();
    if found.is_empty() {
        let wanted = "folders of text: none of the usual ones stands on this machine".to_owned();
        return Err(Error::Option { option: "folders", found: "empty".to_owned(), wanted });
    }
    Ok(found)
}

/// One of the two files.
struct Split<'a> {
    name: &'static str,
    stream: u64,
    prompts: usize,
    text: &'a [Paragraph],
    codes: &'a [u32],
}

/// A note and where it goes.
struct Key {
    name: String,
    code: u32,
    /// Place among the passage's lines, in 2^32nds of them.
    place: u64,
}

impl Key {
    fn note(&self) -> String {
        format!("Note: the access code of the {} is {}.", self.name, self.code)
    }
}

/// What all prompts share.
struct Maker<'a> {
    options: &'a Options,
    tokenizer: &'a Tokenizer,
    folders: &'a [PathBuf],
}

impl Maker<'_> {
    /// Held-out text and train text: in proportion to the prompts, but a passage each at least.
    fn divide<'text>(&self, corpus: &'text Corpus) -> Result<(&'text [Paragraph], &'text [Paragraph]), Error> {
        let (train, held_out) = (from_index(self.options.train), from_index(self.options.held_out));
        let found: Tokens = corpus.paragraphs.iter().map(|paragraph| paragraph.tokens).sum();
        let passage = self.options.prompt_tokens;
        let needed = Tokens(passage.0.saturating_mul(if held_out == 0 { 1 } else { 2 }));
        if found < needed {
            return Err(self.too_little_text("train and held-out", needed, found));
        }
        let share = u128::from(found.0) * u128::from(held_out) / u128::from(train + held_out);
        let share = if held_out == 0 { 0 } else { share.clamp(passage.0.into(), (found.0 - passage.0).into()) };
        let mut sum = 0;
        let end = corpus.paragraphs.iter().take_while(|paragraph| {
            let take = sum < share;
            sum += u128::from(paragraph.tokens.0);
            take
        });
        Ok(corpus.paragraphs.split_at(end.count()))
    }

    fn too_little_text(&self, split: &'static str, needed: Tokens, found: Tokens) -> Error {
        let folders: Vec<_> = self.folders.iter().map(|folder| folder.display().to_string()).collect();
        Error::TooLittleText { split, needed, found, folders: folders.join(", ") }
    }

    /// Writes one file under a temporary name in `out`.
    fn file(&self, split: &Split, out: &Path, lengths: &mut Vec<Tokens>) -> Result<NamedTempFile, Error> {
        let io = |action| move |source| Error::Io { file: out.to_owned(), action, source };
        let readable = Permissions::from_mode(0o666);
        let mut builder = tempfile::Builder::new();
        let made = builder.prefix(".keychain-").permissions(readable).tempfile_in(out);
        let made = made.map_err(io("make a temporary file in it"))?;
        let mut writer = BufWriter::new(made.as_file());
        let mut next = 0;
        for index in 0..split.prompts {
            let mut random = Random::new(self.options.seed, (split.stream << 32) + from_index(index));
            let (line, tokens) = self.prompt(split, index, &mut next, &mut random)?;
            writeln!(writer, "{line}").map_err(io("write a temporary file in it"))?;
            lengths.push(tokens);
        }
        writer.flush().map_err(io("write a temporary file in it"))?;
        drop(writer);
        made.as_file().sync_all().map_err(io("write a temporary file in it"))?;
        Ok(made)
    }

    /// One record, and the tokens of its prompt. `next` is the paragraph that the passage starts with.
    fn prompt(
        &self,
        split: &Split,
        index: usize,
        next: &mut usize,
        random: &mut Random,
    ) -> Result<(String, Tokens), Error> {
        let passage = self.passage(split, next)?;
        let keys = self.keys(split, &passage, random);
        let asked = random.below(keys.len());
        let (prompt, tokens) = self.fit(&passage, &keys, &keys[asked].name)?;
        let mut others: Vec<usize> = (0..keys.len()).filter(|key| *key != asked).collect();
        random.shuffle(&mut others);
        let mut chosen = vec![asked];
        chosen.extend(others.into_iter().take(self.options.group_size - 1));
        random.shuffle(&mut chosen);
        let end = self.tokenizer.turn_end_text()?;
        let answer = |key: &usize| {
            let reward = if *key == asked { 1.0 } else { 0.0 };
            let code = keys[*key].code;
            json!({ "text": format!("The access code of the {} is {code}.{end}", keys[asked].name), "reward": reward })
        };
        let answers: Vec<_> = chosen.iter().map(answer).collect();
        let name = format!("keychain {} {index}", split.name);
        Ok((json!({ "name": name, "prompt": prompt, "answers": answers }).to_string(), tokens))
    }

    /// Consecutive paragraphs, at least as long as the whole prompt; after the last comes the first again.
    fn passage(&self, split: &Split, next: &mut usize) -> Result<String, Error> {
        let needed = self.options.prompt_tokens;
        let found: Tokens = split.text.iter().map(|paragraph| paragraph.tokens).sum();
        if found < needed {
            return Err(self.too_little_text(split.name, needed, found));
        }
        let (mut passage, mut tokens) = (String::new(), Tokens(0));
        while tokens < needed {
            let paragraph = &split.text[*next % split.text.len()];
            passage.push_str(&paragraph.text);
            passage.push_str("\n\n");
            tokens += paragraph.tokens;
            *next += 1;
        }
        Ok(passage)
    }

    /// Distinct places with distinct codes that the passage does not hold by accident, in the order of their lines.
    fn keys(&self, split: &Split, passage: &str, random: &mut Random) -> Vec<Key> {
        let mut names: Vec<usize> = (0..NAMES).collect();
        random.shuffle(&mut names);
        let mut codes: Vec<u32> = split.codes.to_vec();
        random.shuffle(&mut codes);
        // Where a huge passage happens to hold nearly all codes, those that it holds come last.
        let (fresh, held): (Vec<u32>, Vec<u32>) = if passage.len() > 1 << 22 {
            (codes, Vec::new())
        } else {
            let wanted = 4 * self.options.keys;
            let (some, rest) = codes.split_at(wanted.min(codes.len()));
            let (held, fresh): (Vec<u32>, Vec<u32>) = some.iter().partition(|code| passage.contains(&code.to_string()));
            (fresh.into_iter().chain(rest.iter().copied()).collect(), held)
        };
        let codes = fresh.into_iter().chain(held);
        let mut keys: Vec<Key> = names
            .into_iter()
            .zip(codes)
            .take(self.options.keys)
            .map(|(name, code)| Key {
                name: format!("{} {}", DIRECTIONS[name % DIRECTIONS.len()], PLACES[name / DIRECTIONS.len()]),
                code,
                place: random.next() >> 32,
            })
            .collect();
        keys.sort_by_key(|key| key.place);
        keys
    }

    /// The prompt with as much of the passage as the bound lets in, cut between words, and its tokens.
    ///
    /// The number of tokens grows with the cut but for a token or so at the seams, so the cut is searched between one that
    /// fits and one that does not, by interpolation.
    fn fit(&self, passage: &str, keys: &[Key], asked: &str) -> Result<(String, Tokens), Error> {
        let cuts: Vec<usize> = passage.match_indices([' ', '\n']).map(|(at, _)| at).collect();
        let bound = self.options.prompt_tokens;
        let measured = |cut: usize| -> Result<(String, Tokens), Error> {
            let end = if cut == 0 { 0 } else { cuts[cut - 1] };
            let text = self.tokenizer.chat_text(None, &user_turn(&passage[..end], keys, asked))?;
            let tokens = Tokens(from_index(self.tokenizer.encode(&text)?.len()));
            Ok((text, tokens))
        };
        let mut best = measured(0)?;
        if best.1 > bound {
            let wanted = format!("at least {}, what {} notes and the question take", best.1, keys.len());
            return Err(Error::Option { option: "prompt_tokens", found: bound.to_string(), wanted });
        }
        let (mut fits, mut exceeds) = (0, cuts.len() + 1);
        let mut exceeding = Tokens(best.1.0 + bound.0);
        for round in 0..ROUNDS_MAX {
            if exceeds - fits <= 1 || best.1.0 + SLACK.0 >= bound.0 {
                break;
            }
            let gap = from_index(exceeds - fits);
            let step =
                if round % 4 == 3 { gap / 2 } else { gap * (bound.0 - best.1.0) / (exceeding.0 - best.1.0).max(1) };
            let cut = fits + as_index(step.clamp(1, gap - 1));
            let (text, tokens) = measured(cut)?;
            if tokens <= bound {
                (fits, best) = (cut, (text, tokens));
            } else {
                (exceeds, exceeding) = (cut, tokens);
            }
        }
        Ok(best)
    }
}

/// The user's turn: the passage with its notes between the lines, and the question.
fn user_turn(passage: &str, keys: &[Key], asked: &str) -> String {
    let lines: Vec<&str> = passage.lines().collect();
    let mut text = String::from("Read this text. Notes with access codes stand between its lines.\n\n");
    let mut keys = keys.iter().peekable();
    for (index, line) in lines.iter().enumerate() {
        let passed = |key: &&Key| (key.place * from_index(lines.len())) >> 32 <= from_index(index);
        while let Some(key) = keys.next_if(passed) {
            text.push_str(&key.note());
            text.push('\n');
        }
        text.push_str(line);
        text.push('\n');
    }
    for key in keys {
        text.push_str(&key.note());
        text.push('\n');
    }
    text.push_str("\nQuestion: what is the access code of the ");
    text.push_str(asked);
    text.push_str("? Answer in one sentence.");
    text
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::{Dataset, Limits, sample};
    use super::*;

    /// A folder with enough distinct text.
    fn library() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in 0..12 {
            let mut random = Random::new(file, 9);
            let mut text = String::new();
            for word in 0..600 {
                let letters: String = (0..3 + random.below(6)).map(|_| ALPHABET[random.below(26)]).collect();
                text.push_str(&letters);
                text.push_str(if word % 60 == 59 {
                    "\n\n"
                } else if word % 12 == 11 {
                    "\n"
                } else {
                    " "
                });
            }
            fs::write(folder.path().join(format!("{file}.txt")), text).unwrap();
        }
        folder
    }

    const ALPHABET: [char; 26] = [
        'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j', 'k', 'l', 'm', 'n', 'o', 'p', 'q', 'r', 's', 't', 'u', 'v',
        'w', 'x', 'y', 'z',
    ];

    fn options(library: &Path) -> Options {
        Options {
            folders: vec![library.to_owned()],
            prompt_tokens: Tokens(2_100),
            train: 9,
            held_out: 5,
            keys: 6,
            group_size: 3,
            seed: 4,
        }
    }

    fn records(file: &Path) -> Vec<serde_json::Value> {
        fs::read_to_string(file).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Codes of the notes, and the lines of the passage that are no notes.
    fn parts(file: &Path) -> (HashSet<String>, HashSet<String>) {
        let (mut codes, mut lines) = (HashSet::new(), HashSet::new());
        for record in records(file) {
            let prompt = record["prompt"].as_str().unwrap();
            for line in prompt.split("lines.\n\n").nth(1).unwrap().split("\nQuestion").next().unwrap().lines() {
                match line.strip_prefix("Note: the access code of the ") {
                    Some(note) => codes.insert(note.split(" is ").nth(1).unwrap().to_owned()),
                    None => line.len() > 30 && lines.insert(line.to_owned()),
                };
            }
        }
        (codes, lines)
    }

    #[test]
    fn prompts_are_full_answers_checkable_and_exactly_one_is_right() {
        let (library, model, out) = (library(), sample::folder(), tempfile::tempdir().unwrap());
        let tokenizer = Tokenizer::open(model.path()).unwrap();
        let summary = write(&options(library.path()), &tokenizer, out.path()).unwrap();
        assert_eq!(summary.prompts, 14);
        let limits =
            Limits { prompt_len_max: Tokens(2_100), answer_len_max: Tokens(64), vocab_size: 259, group_size: 3 };
        for (file, count) in [(&summary.train_file, 9), (&summary.held_out_file, 5)] {
            let data = Dataset::open(file, Some(&tokenizer), &limits).unwrap();
            assert_eq!(data.len(), count);
            for (index, record) in records(file).iter().enumerate() {
                let group = data.group(index);
                // Bytes are tokens here and words have at most eight letters, so a word more would not have fitted.
                assert!((2_090..=2_100).contains(&group.prompt_ids.len()), "{}", group.prompt_ids.len());
                let prompt = record["prompt"].as_str().unwrap();
                let asked = prompt.split("Question: what is the access code of the ").nth(1).unwrap();
                let asked = asked.split('?').next().unwrap();
                for (answer, text) in group.answers.iter().zip(record["answers"].as_array().unwrap()) {
                    let code = text["text"].as_str().unwrap().strip_suffix(".<|im_end|>").unwrap();
                    let code = code.strip_prefix(&format!("The access code of the {asked} is ")).unwrap();
                    let right = prompt.contains(&format!("Note: the access code of the {asked} is {code}.\n"));
                    assert_eq!(answer.reward, Some(if right { 1.0 } else { 0.0 }));
                    assert!(prompt.contains(&format!(" is {code}.\n")), "wrong codes stand in the text too");
                    assert_eq!(answer.ids.last(), Some(&sample::END));
                }
                assert_eq!(group.answers.iter().filter(|answer| answer.reward == Some(1.0)).count(), 1);
            }
        }
    }

    #[test]
    fn train_and_held_out_share_neither_passages_nor_codes() {
        let (library, model, out) = (library(), sample::folder(), tempfile::tempdir().unwrap());
        let tokenizer = Tokenizer::open(model.path()).unwrap();
        let summary = write(&options(library.path()), &tokenizer, out.path()).unwrap();
        let (train, held_out) = (parts(&summary.train_file), parts(&summary.held_out_file));
        assert!(train.0.len() > 40 && held_out.0.len() > 20 && train.1.len() > 100 && held_out.1.len() > 50);
        assert!(train.0.is_disjoint(&held_out.0), "codes");
        assert!(train.1.is_disjoint(&held_out.1), "lines of text");
    }

    #[test]
    fn a_seed_fixes_every_byte_and_another_seed_changes_them() {
        let (library, model) = (library(), sample::folder());
        let tokenizer = Tokenizer::open(model.path()).unwrap();
        let made = |seed| {
            let out = tempfile::tempdir().unwrap();
            write(&Options { seed, ..options(library.path()) }, &tokenizer, out.path()).unwrap();
            assert_eq!(fs::read_dir(out.path()).unwrap().count(), 2, "no temporary file stays");
            (fs::read(out.path().join("train.jsonl")).unwrap(), fs::read(out.path().join("held_out.jsonl")).unwrap())
        };
        assert_eq!(made(1), made(1));
        assert_ne!(made(1), made(2));
    }

    #[test]
    fn what_cannot_be_made_is_refused_with_numbers() {
        let (library, model, out) = (library(), sample::folder(), tempfile::tempdir().unwrap());
        let tokenizer = Tokenizer::open(model.path()).unwrap();
        let refused = |options: Options, words: &str| {
            let message = write(&options, &tokenizer, out.path()).unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
            assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0, "nothing half-written stays");
        };
        let base = options(library.path());
        refused(Options { keys: 2, ..base.clone() }, "keys is 2, it must be from group_size 3 to 64");
        refused(Options { group_size: 1, ..base.clone() }, "group_size is 1, it must be at least 2");
        refused(Options { train: 0, ..base.clone() }, "train is 0, it must be at least 1");
        refused(Options { prompt_tokens: Tokens(100), ..base.clone() }, "prompt_tokens is 100, it must be at least");
        refused(
            Options { prompt_tokens: Tokens(1_000_000), ..base.clone() },
            "the train and held-out prompts need 2000000 tokens of text, but only ",
        );
        refused(Options { folders: vec!["/absent".into()], ..base }, "/absent: cannot list it");
    }
}
