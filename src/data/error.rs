//! What can be wrong with data.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::chat::Refusal;
use crate::runtime::failure::{Classified, Exit};
use crate::runtime::units::Tokens;

/// A field of a record.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Place {
    /// The dataset file.
    pub file: PathBuf,
    /// Its line, from 1.
    pub line: u64,
    /// The field, as `answers[1].reward`.
    pub field: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, line {}, {}", self.file.display(), self.line, self.field)
    }
}

/// Why data cannot be used.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say what each variant and field means")]
pub enum Error {
    #[error("{file}: cannot {action}: {source}")]
    Io { file: PathBuf, action: &'static str, source: io::Error },
    #[error("cannot write {file}: {source}")]
    Write { file: PathBuf, source: io::Error },
    #[error("{file}: the kept tokens are damaged: {reason}; remove the file, and start again with --resume")]
    Kept { file: PathBuf, reason: String },
    #[error("{file}, line {line}: not a record: {reason}")]
    Record { file: PathBuf, line: u64, reason: String },
    #[error("{file}: holds no record; write at least one line {{\"prompt\": …, \"answers\": [ … ]}}")]
    Empty { file: PathBuf },
    #[error("{place}: give one of {names}; {found}")]
    OneOf { place: Place, names: &'static str, found: &'static str },
    #[error("{place}: is {found}; it must be {wanted}")]
    Field { place: Place, found: String, wanted: &'static str },
    #[error("{place}: {flags} flags for {tokens} ids; write one for each id, 1 if it is trained and 0 if it is not")]
    MaskLength { place: Place, flags: Tokens, tokens: Tokens },
    #[error(
        "{place}: {numbers} log-probabilities for the {tokens} tokens that this tokenizer makes of the answer; write one or null for \
         each, and \"ids\" where the text was drawn as other tokens"
    )]
    LogprobCount { place: Place, numbers: Tokens, tokens: Tokens },
    #[error("{place}: no token of the answer is trained; train at least one, or leave the answer out")]
    NothingTrained { place: Place },
    #[error("{place}: the chat template of {file} says: {reason}")]
    Chat { place: Place, file: PathBuf, reason: String },
    #[error("{file}: the chat template cannot be used: {reason}")]
    Template { file: PathBuf, reason: String },
    #[error("{file}: is no JSON: {source}")]
    Json { file: PathBuf, source: serde_json::Error },
    #[error("{file}: {key} is {found}; it must be {wanted}")]
    Key { file: PathBuf, key: &'static str, found: String, wanted: &'static str },
    #[error("{place}: is text, but no tokenizer was given; set a model folder with tokenizer.json, or write ids")]
    NoTokenizer { place: Place },
    #[error("{place}: is empty; it needs at least one token")]
    NoTokens { place: Place },
    #[error("{place}: {tokens} tokens, the plan's {limit} is {max}; shorten it or raise {limit}{further}")]
    TooLong { place: Place, tokens: Tokens, limit: &'static str, max: Tokens, further: &'static str },
    #[error("{place}: token {index} has id {id}, outside the vocabulary of {vocab_size}")]
    OutsideVocabulary { place: Place, index: usize, id: i64, vocab_size: u64 },
    #[error("{place}: reward is {reward}; write a finite number, or null if none is known")]
    Reward { place: Place, reward: f64 },
    #[error(
        "{place}: none is given, but grpo.group_size is {group_size}; write as many, or set rollout.sample = true to let \
         the policy answer"
    )]
    NoAnswers { place: Place, group_size: usize },
    #[error("{place}: {found} answers, but grpo.group_size is {group_size}")]
    GroupSize { place: Place, found: usize, group_size: usize },
    #[error("{file}: {action}: {reason}")]
    Tokenizer { file: PathBuf, action: &'static str, reason: String },
    #[error("the saved order is over {saved} groups, the dataset now holds {found}; restore the file or start anew")]
    OtherDataset { saved: usize, found: usize },
    #[error("data keychain: {option} is {found}, it must be {wanted}")]
    Option { option: &'static str, found: String, wanted: String },
    #[error(
        "data keychain: no prompt of exactly {wanted} tokens could be made with this tokenizer; the nearest of {tries} \
         tries has {nearest}: use that number, or another --seed"
    )]
    NotExact { wanted: Tokens, nearest: Tokens, tries: usize },
    #[error(
        "data keychain: the {split} prompts need {needed} tokens of text, but only {found} were \
         found in {folders}; name more folders of text, or lower the prompt's tokens"
    )]
    TooLittleText { split: &'static str, needed: Tokens, found: Tokens, folders: String },
}

impl Error {
    /// Adds file and action to an I/O error.
    pub(super) fn io(file: &Path, action: &'static str) -> impl Fn(io::Error) -> Error {
        move |source| Error::Io { file: file.to_owned(), action, source }
    }
}

impl From<Refusal> for Error {
    fn from(Refusal { file, reason }: Refusal) -> Error {
        Error::Template { file, reason }
    }
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Option { .. } => Exit::Config,
            _ => Exit::Data,
        }
    }
}
