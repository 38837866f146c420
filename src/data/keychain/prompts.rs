//! From text to records: passages, their notes, answers, and the two files.

use std::fs::Permissions;
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use tempfile::NamedTempFile;

use super::super::corpus::{Corpus, Paragraph};
use super::super::error::Error;
use super::super::random::Random;
use super::super::tokenizer::Tokenizer;
use super::fit;
use super::notes::{Task, code_depth, random_task};
use super::options::Options;
use crate::runtime::units::{Tokens, float, from_index};

/// Longer passages are not searched for codes that they contain by accident.
const SEARCHED_BYTES_MAX: usize = 1 << 22;

/// The content of one of the two files.
pub(super) struct Split<'a> {
    pub(super) name: &'static str,
    /// Separates its random numbers from those of the other file.
    pub(super) stream: u64,
    pub(super) prompts: usize,
    pub(super) text: &'a [Paragraph],
    pub(super) codes: &'a [u32],
}

impl Split<'_> {
    /// The file's name in the folder of the data set.
    pub(super) fn file_name(&self) -> &'static str {
        if self.name == "train" { "train.jsonl" } else { "held_out.jsonl" }
    }
}

/// What both files share.
pub(super) struct SplitWriter<'a> {
    pub(super) options: &'a Options,
    pub(super) tokenizer: &'a Tokenizer,
    /// Folders of the text, for messages.
    pub(super) folders: &'a [PathBuf],
    /// The token that ends an answer.
    pub(super) end: &'a str,
}

impl SplitWriter<'_> {
    /// Divides the text into held-out and train text, in proportion to the prompts, with at least one passage each.
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
    pub(super) fn write(&self, split: &Split, out: &Path) -> Result<NamedTempFile, Error> {
        let file = out.join(split.file_name());
        let failed = Error::io(&file, "write it");
        let readable = Permissions::from_mode(0o666);
        let mut builder = tempfile::Builder::new();
        let temporary = builder.prefix(".keychain-").permissions(readable).tempfile_in(out).map_err(&failed)?;
        let mut writer = BufWriter::new(temporary.as_file());
        let mut next = 0;
        for index in 0..split.prompts {
            let mut random = Random::new(self.options.seed, (split.stream << 32) + from_index(index));
            let line = self.record(split, index, &mut next, &mut random)?;
            writeln!(writer, "{line}").map_err(&failed)?;
        }
        writer.flush().map_err(&failed)?;
        drop(writer);
        temporary.as_file().sync_all().map_err(&failed)?;
        Ok(temporary)
    }

    /// One record. Its passage starts with paragraph `next`.
    fn record(&self, split: &Split, index: usize, next: &mut usize, random: &mut Random) -> Result<String, Error> {
        let passage = self.passage(split, next)?;
        let codes = codes(split, &passage, 4 * self.options.keys, random);
        let depth = code_depth(self.options.depth, index, split.prompts);
        let task = random_task(self.options, &codes, depth, random);
        let prompt = fit::prompt(self.options, self.tokenizer, &passage, &task)?;
        let mut record = json!({ "name": format!("keychain {} {index}", split.name), "prompt": prompt });
        if self.options.answers > 0 {
            record["answers"] = self.answers(&task, random);
        }
        record["reward_data"] = json!({
            "expected": task.code.to_string(),
            "question": fit::question(&task.place),
            "depth_percent": float(depth) / 1_000.0,
            "hops": self.options.hops,
        });
        Ok(record.to_string())
    }

    /// The right answer and wrong ones, shuffled.
    fn answers(&self, task: &Task, random: &mut Random) -> serde_json::Value {
        let Task { place, code: right, other_codes, .. } = task;
        let mut codes: Vec<u32> = other_codes.iter().copied().take(self.options.answers - 1).chain([*right]).collect();
        random.shuffle(&mut codes);
        let answer = |code: u32| {
            let text = if self.options.short {
                format!("{code}{}", self.end)
            } else {
                format!("The access code of the {place} is {code}.{}", self.end)
            };
            json!({ "text": text, "reward": if code == *right { 1.0 } else { 0.0 } })
        };
        codes.into_iter().map(answer).collect()
    }

    /// Consecutive paragraphs, at least as long as the whole prompt; the first follows the last.
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

/// The split's codes, shuffled. Of the first `wanted`, those that the passage contains by accident move to the end.
fn codes(split: &Split, passage: &str, wanted: usize, random: &mut Random) -> Vec<u32> {
    let mut codes: Vec<u32> = split.codes.to_vec();
    random.shuffle(&mut codes);
    // A huge passage contains nearly all codes anyway.
    if passage.len() > SEARCHED_BYTES_MAX {
        return codes;
    }
    let (some, rest) = codes.split_at(wanted.min(codes.len()));
    let (contained, fresh): (Vec<u32>, Vec<u32>) = some.iter().partition(|code| passage.contains(&code.to_string()));
    fresh.into_iter().chain(rest.iter().copied()).chain(contained).collect()
}
