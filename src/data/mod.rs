//! Prompts with their candidate answers: dataset files, the tokenizer, and the order in which groups are taken.
//!
//! A dataset is JSON lines, one group a line:
//! `{"name"?: text, "prompt": text | "prompt_ids": [id…], "answers": [{"text": text | "ids": [id…], "reward"?: number|null}…]}`.
//! Text is tokenised as it stands: nothing is added around it, and special tokens written in it are recognised. Everything
//! is checked when the file is opened, so that no run fails at its thousandth group.

mod corpus;
mod cursor;
mod error;
pub mod keychain;
mod order;
mod records;
#[cfg(test)]
pub(crate) mod sample;
mod tokenizer;

use std::path::Path;

use sha2::{Digest, Sha256};

pub use cursor::Cursor;
pub use error::{Error, Place};
pub use order::Random;
pub use tokenizer::Tokenizer;

use crate::units::{Tokens, from_index};

/// One candidate answer of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Token ids, at least one.
    pub ids: Vec<i64>,
    /// Its reward, finite; `None` where the file gives none.
    pub reward: Option<f64>,
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
    /// Answers of a group.
    pub group_size: usize,
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

    /// SHA-256 in hexadecimal over names, ids and rewards; equal exactly where the groups are.
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
            part(&from_index(group.answers.len()).to_le_bytes());
            for answer in &group.answers {
                part(&bytes(&answer.ids));
                part(&answer.reward.map(f64::to_le_bytes).map(Vec::from).unwrap_or_default());
            }
        }
        format!("{:x}", hash.finalize())
    }

    /// The longest prompt in the file.
    #[must_use]
    pub fn prompt_len_max(&self) -> Tokens {
        Tokens(self.groups.iter().map(|group| from_index(group.prompt_ids.len())).max().unwrap_or(0))
    }
}
