//! Prompts with their candidate answers: dataset files, the tokenizer, and the order in which groups are taken.
//!
//! A dataset is JSON lines, one group a line; `docs/data.md` says what a line may hold. Text is tokenised as it stands:
//! nothing is added around it, and special tokens written in it are recognised. Conversations go through the model's own
//! chat template first. Everything is checked when the file is opened, so that no run fails at its thousandth group.

mod chat;
mod corpus;
mod cursor;
mod ends;
mod error;
pub mod keychain;
mod order;
mod python;
mod records;
#[cfg(test)]
pub(crate) mod sample;
mod tokenizer;

use std::fmt;
use std::path::Path;

use serde_json::{Map, Value as Json};
use sha2::{Digest, Sha256};

pub use cursor::Cursor;
pub use ends::end_ids;
pub use error::{Error, Place};
pub use order::Random;
pub use tokenizer::Tokenizer;

use crate::config::TooLong;
use crate::runtime::digest::hex;
use crate::runtime::units::{Tokens, from_index};

/// One candidate answer of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Token ids, at least one.
    pub ids: Vec<i64>,
    /// Its reward, finite; `None` where the file gives none.
    pub reward: Option<f64>,
    /// For each id whether it takes part in the loss, at least one of them; `None`: every one does. What a tool said
    /// within an answer is read and not trained.
    pub mask: Option<Vec<bool>>,
}

/// A prompt with its answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// The record's name, or `line N`.
    pub name: String,
    /// Token ids of the prompt, at least one.
    pub prompt_ids: Vec<i64>,
    /// The answers: as many as the limits say.
    pub answers: Vec<Answer>,
    /// What a reward may be judged by. `expected` is a text, a number, a boolean or a list of texts, `pattern` and
    /// `question` are texts; other keys are free.
    pub reward_data: Map<String, Json>,
    /// Tokens that were left out of a prompt that is longer than the plan's.
    pub cut: Option<Tokens>,
}

/// How many answers a record brings.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Answers {
    /// As many as a group has.
    Given(usize),
    /// Any number, also none: the policy answers for itself.
    Sampled,
}

/// What every record must keep to.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Longest prompt of the plan.
    pub prompt_len_max: Tokens,
    /// Longest answer of the plan.
    pub answer_len_max: Tokens,
    /// Ids are below this: rows of the model's embedding.
    pub vocab_size: u64,
    /// How many answers a record brings.
    pub answers: Answers,
    /// What to do with a longer prompt.
    pub too_long: TooLong,
}

/// What was left out of prompts that are longer than the plan's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Cuts {
    /// How many prompts were cut.
    pub prompts: usize,
    /// How many prompts there are.
    pub of: usize,
    /// Most tokens left out of one prompt.
    pub tokens_max: Tokens,
    /// Tokens left out in all.
    pub tokens: Tokens,
}

impl fmt::Display for Cuts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cuts { prompts, of, tokens_max, tokens } = self;
        let (are, were) = if *prompts == 1 { ("is", "was") } else { ("are", "were") };
        write!(
            f,
            "{prompts} of {of} prompts {are} longer than context.prompt_len and {were} cut as data.too_long says: {tokens} \
             tokens left out, of one {tokens_max} at most"
        )
    }
}

/// A dataset file, read and checked as a whole.
#[derive(Clone, Debug)]
pub struct Dataset {
    groups: Vec<Group>,
}

impl Dataset {
    /// Reads the JSON lines of `path`; `tokenizer` may be absent when every record carries ids.
    ///
    /// # Errors
    /// Names file, line, field and numbers of the first record that breaks a limit (exit 3).
    pub fn open(path: &Path, tokenizer: Option<&Tokenizer>, limits: &Limits) -> Result<Dataset, Error> {
        records::read(path, tokenizer, limits).map(|groups| Dataset { groups })
    }

    /// Groups that were made rather than read.
    #[must_use]
    pub fn of(groups: Vec<Group>) -> Dataset {
        Dataset { groups }
    }

    /// How many groups.
    #[must_use]
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// Whether there is no group; never true of an opened file.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// The group at `index`.
    ///
    /// # Panics
    /// When `index` is not below [`Dataset::len`].
    #[must_use]
    pub fn group(&self, index: usize) -> &Group {
        &self.groups[index]
    }

    /// What was cut; `None` where every prompt is whole.
    #[must_use]
    pub fn cuts(&self) -> Option<Cuts> {
        let cut: Vec<Tokens> = self.groups.iter().filter_map(|group| group.cut).collect();
        let tokens_max = cut.iter().copied().max()?;
        Some(Cuts { prompts: cut.len(), of: self.len(), tokens_max, tokens: cut.into_iter().sum() })
    }

    /// SHA-256 in hexadecimal over all that a group has; equal exactly where the groups are.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update(from_index(bytes.len()).to_le_bytes());
            hash.update(bytes);
        };
        let bytes = |ids: &[i64]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
        for group in &self.groups {
            part(group.name.as_bytes());
            part(&bytes(&group.prompt_ids));
            part(&group.cut.map(|cut| cut.0.to_le_bytes().to_vec()).unwrap_or_default());
            part(sorted(&Json::Object(group.reward_data.clone())).to_string().as_bytes());
            part(&from_index(group.answers.len()).to_le_bytes());
            for answer in &group.answers {
                part(&bytes(&answer.ids));
                part(&answer.reward.map(f64::to_le_bytes).map(Vec::from).unwrap_or_default());
                part(&answer.mask.iter().flatten().map(|&trained| u8::from(trained)).collect::<Vec<u8>>());
            }
        }
        hex(hash)
    }

    /// The longest prompt in the file.
    #[must_use]
    pub fn prompt_len_max(&self) -> Tokens {
        Tokens(self.groups.iter().map(|group| from_index(group.prompt_ids.len())).max().unwrap_or(0))
    }
}

/// The same value with the keys of every object in order: the order in which they were written says nothing.
fn sorted(value: &Json) -> Json {
    match value {
        Json::Array(items) => items.iter().map(sorted).collect(),
        Json::Object(entries) => {
            let mut entries: Vec<(String, Json)> =
                entries.iter().map(|(key, value)| (key.clone(), sorted(value))).collect();
            entries.sort_by(|(one, _), (other, _)| one.cmp(other));
            Json::Object(entries.into_iter().collect())
        }
        other => other.clone(),
    }
}
