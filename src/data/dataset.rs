//! A dataset file, read and checked as a whole.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;

use super::data_digest::DataDigest;
use super::error::Error;
use super::group::{Group, Limits};
use super::kept::{self, TokenFile};
use super::records;
use super::tokenizer::Tokenizer;
use crate::runtime::units::{Bytes, Tokens};

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

/// A dataset file, read and checked as a whole. Everything but the prompts' token ids is in memory.
#[derive(Debug)]
pub struct Dataset {
    groups: Vec<Group>,
    prompts: Prompts,
    digest: String,
}

/// Where the prompts' token ids are.
#[derive(Debug)]
enum Prompts {
    Memory(Vec<Vec<i64>>),
    /// In a file that all ranks of a machine read, one prompt at a time.
    File(TokenFile),
}

impl Dataset {
    /// Reads the JSON lines of `path` into memory; `tokenizer` may be absent when every record carries ids.
    ///
    /// # Errors
    /// The first record that breaks a limit, with file, line, field and numbers (exit 3).
    pub fn open(path: &Path, tokenizer: Option<&Tokenizer>, limits: &Limits) -> Result<Dataset, Error> {
        let mut groups = Vec::new();
        records::read(path, tokenizer, limits, |group, prompt_ids| {
            groups.push((group, prompt_ids));
            Ok(())
        })?;
        Ok(Dataset::from_groups(groups))
    }

    /// A data set of groups with their prompts' token ids, which were not read from a file.
    #[must_use]
    pub fn from_groups(groups: Vec<(Group, Vec<i64>)>) -> Dataset {
        let mut digest = DataDigest::default();
        for (group, prompt_ids) in &groups {
            digest.add(group, prompt_ids);
        }
        let (groups, prompts) = groups.into_iter().unzip();
        Dataset { groups, prompts: Prompts::Memory(prompts), digest: digest.finish() }
    }

    /// Opens a file of kept tokens ([`super::kept::find_or_make`]).
    ///
    /// # Errors
    /// When the file cannot be read, or is not whole (exit 3).
    pub fn open_kept(file: &Path) -> Result<Dataset, Error> {
        let (about, tokens) = kept::open(file)?;
        Ok(Dataset { groups: about.groups, prompts: Prompts::File(tokens), digest: about.data_digest })
    }

    /// Token ids of the prompt at `index`.
    ///
    /// # Errors
    /// When they are in a file that cannot be read, or is damaged (exit 3).
    ///
    /// # Panics
    /// When `index` is not below [`Dataset::len`].
    pub fn prompt_ids(&self, index: usize) -> Result<Cow<'_, [i64]>, Error> {
        match &self.prompts {
            Prompts::Memory(prompts) => Ok(Cow::Borrowed(&prompts[index])),
            Prompts::File(tokens) => tokens.prompt(index).map(Cow::Owned),
        }
    }

    /// The file of kept tokens and its length, where the prompts are in one.
    #[must_use]
    pub fn kept_in(&self) -> Option<(&Path, Bytes)> {
        match &self.prompts {
            Prompts::Memory(_) => None,
            Prompts::File(tokens) => Some((tokens.path(), tokens.bytes())),
        }
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
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The longest prompt in the file.
    #[must_use]
    pub fn prompt_len_max(&self) -> Tokens {
        self.groups.iter().map(|group| group.prompt_tokens).max().unwrap_or_default()
    }
}
