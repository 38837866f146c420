//! A dataset file, read and checked as a whole.

use std::fmt;
use std::path::Path;

use serde_json::Value as Json;
use sha2::{Digest, Sha256};

use super::error::Error;
use super::group::{Group, Limits};
use super::records;
use super::tokenizer::Tokenizer;
use crate::runtime::digest::hex;
use crate::runtime::units::{Tokens, from_index};

/// How much was left out of prompts longer than the plan's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Cuts {
    /// Prompts that were cut.
    pub prompts_cut: usize,
    /// Prompts in all.
    pub prompts: usize,
    /// Most tokens left out of one prompt.
    pub tokens_max: Tokens,
    /// Tokens left out in all.
    pub tokens: Tokens,
}

impl fmt::Display for Cuts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cuts { prompts_cut, prompts, tokens_max, tokens } = self;
        let (are, were) = if *prompts_cut == 1 { ("is", "was") } else { ("are", "were") };
        write!(
            f,
            "{prompts_cut} of {prompts} prompts {are} longer than context.prompt_len and {were} cut as data.too_long says: {tokens} \
             tokens left out, at most {tokens_max} of one prompt"
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
    /// The first record that breaks a limit, with file, line, field and numbers (exit 3).
    pub fn open(path: &Path, tokenizer: Option<&Tokenizer>, limits: &Limits) -> Result<Dataset, Error> {
        records::read(path, tokenizer, limits).map(|groups| Dataset { groups })
    }

    /// A dataset of groups that were not read from a file.
    #[must_use]
    pub fn from_groups(groups: Vec<Group>) -> Dataset {
        Dataset { groups }
    }

    /// Number of groups.
    #[must_use]
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// Whether there is no group; never true for an opened file.
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

    /// `None` if every prompt is whole.
    #[must_use]
    pub fn cuts(&self) -> Option<Cuts> {
        let cut: Vec<Tokens> = self.groups.iter().filter_map(|group| group.cut).collect();
        let tokens_max = cut.iter().copied().max()?;
        Some(Cuts { prompts_cut: cut.len(), prompts: self.len(), tokens_max, tokens: cut.into_iter().sum() })
    }

    /// SHA-256 in hexadecimal over every field of every group.
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
                if let Some(logprobs) = &answer.logprobs {
                    // A missing one has no number that a given one could have.
                    part(&logprobs.iter().flat_map(|one| one.unwrap_or(f64::NAN).to_le_bytes()).collect::<Vec<u8>>());
                }
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

/// The same value with the keys of every object sorted, so that their order in the file does not count.
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
