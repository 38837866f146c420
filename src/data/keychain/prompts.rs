//! Passages, and the records that are made of them.

use std::fs::Permissions;
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use tempfile::NamedTempFile;

use super::super::corpus::{Corpus, Paragraph};
use super::super::error::Error;
use super::super::order::Random;
use super::super::tokenizer::Tokenizer;
use super::notes::{Task, depth_of, task};
use super::fit;
use super::options::Options;
use crate::runtime::units::{Tokens, float, from_index};

/// Longest passage that is searched for codes it holds by accident.
const SEARCHED_BYTES_MAX: usize = 1 << 22;

/// One of the two files.
pub(super) struct Split<'a> {
    /// As users call it.
    pub(super) name: &'static str,
    /// Tells its random numbers from the other's.
    pub(super) stream: u64,
    /// How many prompts.
    pub(super) prompts: usize,
    /// What its passages are made of.
    pub(super) text: &'a [Paragraph],
    /// Codes of its notes.
    pub(super) codes: &'a [u32],
}

/// What all prompts share.
pub(super) struct Maker<'a> {
    /// What to make.
    pub(super) options: &'a Options,
    /// The model's.
    pub(super) tokenizer: &'a Tokenizer,
    /// Where text was looked for.
    pub(super) folders: &'a [PathBuf],
    /// What ends an answer.
    pub(super) end: &'a str,
}

impl Maker<'_> {
    /// Held-out text and train text: in proportion to the prompts, but a passage each at least.
    pub(super) fn divide<'text>(
        &self,
        corpus: &'text Corpus,
    ) -> Result<(&'text [Paragraph], &'text [Paragraph]), Error> {
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
    pub(super) fn file(&self, split: &Split, out: &Path) -> Result<NamedTempFile, Error> {
        let io = |action| move |source| Error::Io { file: out.to_owned(), action, source };
        let readable = Permissions::from_mode(0o666);
        let mut builder = tempfile::Builder::new();
        let made = builder.prefix(".keychain-").permissions(readable).tempfile_in(out);
        let made = made.map_err(io("make a temporary file in it"))?;
        let mut writer = BufWriter::new(made.as_file());
        let mut next = 0;
        for index in 0..split.prompts {
            let mut random = Random::new(self.options.seed, (split.stream << 32) + from_index(index));
            let line = self.record(split, index, &mut next, &mut random)?;
            writeln!(writer, "{line}").map_err(io("write a temporary file in it"))?;
        }
        writer.flush().map_err(io("write a temporary file in it"))?;
        drop(writer);
        made.as_file().sync_all().map_err(io("write a temporary file in it"))?;
        Ok(made)
    }

    /// One record. `next` is the paragraph that the passage starts with.
    fn record(&self, split: &Split, index: usize, next: &mut usize, random: &mut Random) -> Result<String, Error> {
        let passage = self.passage(split, next)?;
        let codes = codes(split, &passage, 4 * self.options.keys, random);
        let depth = depth_of(self.options.depth, index, split.prompts);
        let task = task(self.options, &codes, depth, random);
        let prompt = fit::exactly(self.options, self.tokenizer, &passage, &task)?;
        let mut record = json!({ "name": format!("keychain {} {index}", split.name), "prompt": prompt });
        if self.options.answers > 0 {
            record["answers"] = self.answers(&task, random);
        }
        record["reward_data"] = json!({
            "expected": task.code.to_string(),
            "question": fit::question(&task.asked),
            "depth_percent": float(depth) / 1_000.0,
            "hops": self.options.hops,
        });
        Ok(record.to_string())
    }

    /// The right answer among wrong ones.
    fn answers(&self, task: &Task, random: &mut Random) -> serde_json::Value {
        let Task { asked, code, others, .. } = task;
        let mut codes: Vec<u32> = others.iter().copied().take(self.options.answers - 1).chain([*code]).collect();
        random.shuffle(&mut codes);
        let answer = |given: u32| {
            let text = if self.options.short {
                format!("{given}{}", self.end)
            } else {
                format!("The access code of the {asked} is {given}.{}", self.end)
            };
            json!({ "text": text, "reward": if given == *code { 1.0 } else { 0.0 } })
        };
        codes.into_iter().map(answer).collect()
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
}

/// The split's codes in no order. Of the first `wanted` those that the passage holds by accident come last.
fn codes(split: &Split, passage: &str, wanted: usize, random: &mut Random) -> Vec<u32> {
    let mut codes: Vec<u32> = split.codes.to_vec();
    random.shuffle(&mut codes);
    // A huge passage happens to hold nearly all codes.
    if passage.len() > SEARCHED_BYTES_MAX {
        return codes;
    }
    let (some, rest) = codes.split_at(wanted.min(codes.len()));
    let (held, fresh): (Vec<u32>, Vec<u32>) = some.iter().partition(|code| passage.contains(&code.to_string()));
    fresh.into_iter().chain(rest.iter().copied()).chain(held).collect()
}
