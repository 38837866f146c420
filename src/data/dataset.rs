//! A dataset file, read and checked as a whole.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;

use sha2::{Digest as _, Sha256};

use super::data_digest::DataDigest;
use super::error::Error;
use super::group::{Group, Limits};
use super::kept::{self, TokenFile};
use super::records;
use super::tokenizer::Tokenizer;
use crate::runtime::digest::hex;
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
    /// Of several data sets, one after another, each with the index of its first prompt.
    Several(Vec<(usize, Prompts)>),
}

impl Prompts {
    fn ids(&self, index: usize) -> Result<Cow<'_, [i64]>, Error> {
        match self {
            Prompts::Memory(prompts) => Ok(Cow::Borrowed(&prompts[index])),
            Prompts::File(tokens) => tokens.prompt(index).map(Cow::Owned),
            Prompts::Several(sets) => {
                let (first, prompts) = &sets[sets.partition_point(|(first, _)| *first <= index) - 1];
                prompts.ids(index - first)
            }
        }
    }
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

    /// Several data sets one after another. The name of each stands before the names of its records.
    #[must_use]
    pub fn joined(sets: Vec<(String, Dataset)>) -> Dataset {
        let mut groups = Vec::new();
        let mut prompts = Vec::new();
        let mut digest = Sha256::new();
        for (name, set) in sets {
            digest.update(format!("{name} {}\n", set.digest));
            prompts.push((groups.len(), set.prompts));
            let named = |group: Group| Group { name: format!("{name}/{}", group.name), ..group };
            groups.extend(set.groups.into_iter().map(named));
        }
        Dataset { groups, prompts: Prompts::Several(prompts), digest: hex(digest) }
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
        self.prompts.ids(index)
    }

    /// The file of kept tokens and its length, where the prompts are in one file alone.
    #[must_use]
    pub fn kept_in(&self) -> Option<(&Path, Bytes)> {
        match &self.prompts {
            Prompts::Memory(_) | Prompts::Several(_) => None,
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

#[cfg(test)]
mod tests {
    use super::super::group::{ReplyMarks, ToolMarks};
    use super::*;

    fn set(prompts: &[&[i64]]) -> Dataset {
        let group = |(index, ids): (usize, &&[i64])| {
            let (name, prompt_tokens) = (format!("line {}", index + 1), Tokens(ids.len().try_into().unwrap()));
            let reward_data = serde_json::Map::new();
            let (answers, tool_marks, reply_marks) = (Vec::new(), ToolMarks::default(), ReplyMarks::default());
            let group = Group { name, prompt_tokens, answers, reward_data, tool_marks, reply_marks, cut: None };
            (group, ids.to_vec())
        };
        Dataset::from_groups(prompts.iter().enumerate().map(group).collect())
    }

    #[test]
    fn joined_sets_keep_their_prompts_and_their_names_and_have_one_digest_of_all() {
        let sets = || vec![("a".to_owned(), set(&[&[1, 2], &[3]])), ("b".to_owned(), set(&[&[4, 5, 6]]))];
        let joined = Dataset::joined(sets());
        let prompts: Vec<Vec<i64>> = (0..3).map(|index| joined.prompt_ids(index).unwrap().into_owned()).collect();
        assert_eq!(prompts, [vec![1, 2], vec![3], vec![4, 5, 6]]);
        let names: Vec<&str> = (0..3).map(|index| joined.group(index).name.as_str()).collect();
        assert_eq!(names, ["a/line 1", "a/line 2", "b/line 1"]);
        assert_eq!((joined.len(), joined.prompt_len_max()), (3, Tokens(3)));
        assert_eq!(joined.digest(), Dataset::joined(sets()).digest());
        let (mut renamed, mut turned, mut changed) = (sets(), sets(), sets());
        renamed[1].0 = "c".to_owned();
        turned.reverse();
        changed[1].1 = set(&[&[4, 5, 7]]);
        for other in [renamed, turned, changed] {
            assert_ne!(Dataset::joined(other).digest(), joined.digest());
        }
    }
}
