//! What can be wrong with data.

use std::fmt;
use std::io;
use std::path::PathBuf;

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
pub enum Error {
    /// The operating system refused.
    #[error("{file}: cannot {action}: {source}")]
    Io {
        /// The file or folder.
        file: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// A line is not a record.
    #[error("{file}, line {line}: not a record: {source}")]
    Record {
        /// The dataset file.
        file: PathBuf,
        /// Its line, from 1.
        line: u64,
        /// What the parser met, with its column.
        source: serde_json::Error,
    },
    /// The file holds no record.
    #[error("{file}: holds no record; write at least one line {{\"prompt\": …, \"answers\": [ … ]}}")]
    Empty {
        /// The dataset file.
        file: PathBuf,
    },
    /// None of several fields stands, or more than one.
    #[error("{place}: give one of {names}; {found}")]
    OneOf {
        /// Where.
        place: Place,
        /// The fields.
        names: &'static str,
        /// How many stand there.
        found: &'static str,
    },
    /// A value of the wrong kind.
    #[error("{place}: is {found}; it must be {wanted}")]
    Field {
        /// Where.
        place: Place,
        /// The value.
        found: String,
        /// What it may be.
        wanted: &'static str,
    },
    /// Flags that are not as many as the ids they belong to.
    #[error(
        "{place}: {flags} flags for {tokens} ids; write one for each id, 1 where it is trained and 0 where it is not"
    )]
    MaskLength {
        /// Where.
        place: Place,
        /// How many flags.
        flags: Tokens,
        /// How many ids.
        tokens: Tokens,
    },
    /// An answer of which nothing is trained.
    #[error("{place}: no token of the answer is trained; train at least one, or leave the answer out")]
    NothingTrained {
        /// Where.
        place: Place,
    },
    /// A chat template that refuses a conversation, or is faulty.
    #[error("{place}: the chat template of {file} says: {reason}")]
    Chat {
        /// Where the conversation stands.
        place: Place,
        /// Where the template stands.
        file: PathBuf,
        /// Its own words, with its line.
        reason: String,
    },
    /// A chat template that is absent or faulty.
    #[error("{file}: the chat template cannot be used: {reason}")]
    Template {
        /// The file the template was looked for in.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A file of a model folder that is no JSON.
    #[error("{file}: is no JSON: {source}")]
    Json {
        /// The file.
        file: PathBuf,
        /// What the parser met, with its place.
        source: serde_json::Error,
    },
    /// A value in a file of a model folder that cannot be used.
    #[error("{file}: {key} is {found}; it must be {wanted}")]
    Key {
        /// The file.
        file: PathBuf,
        /// The key.
        key: &'static str,
        /// Its value.
        found: String,
        /// What it may be.
        wanted: &'static str,
    },
    /// Text without a tokenizer.
    #[error("{place}: is text, but no tokenizer was given; set a model folder with tokenizer.json, or write ids")]
    NoTokenizer {
        /// Where.
        place: Place,
    },
    /// Nothing to predict, or nothing to predict from.
    #[error("{place}: is empty; it needs at least one token")]
    NoTokens {
        /// Where.
        place: Place,
    },
    /// More tokens than the plan has positions.
    #[error("{place}: {tokens} tokens, the plan's {limit} is {max}; shorten it or raise {limit}{further}")]
    TooLong {
        /// Where.
        place: Place,
        /// Its length.
        tokens: Tokens,
        /// The configuration key.
        limit: &'static str,
        /// Its value.
        max: Tokens,
        /// What else helps, or nothing.
        further: &'static str,
    },
    /// An id without an embedding row.
    #[error("{place}: token {index} has id {id}, outside the vocabulary of {vocab_size}")]
    OutsideVocabulary {
        /// Where.
        place: Place,
        /// Which token.
        index: usize,
        /// Its id.
        id: i64,
        /// Rows of the embedding.
        vocab_size: u64,
    },
    /// A reward that is NaN or infinite.
    #[error("{place}: reward is {reward}; write a finite number, or null where none is known")]
    Reward {
        /// Where.
        place: Place,
        /// The value.
        reward: f64,
    },
    /// No answers where the policy does not answer for itself.
    #[error(
        "{place}: none is given, but grpo.group_size is {group_size}; write as many, or set rollout.sample = true and the \
         policy answers for itself"
    )]
    NoAnswers {
        /// Where.
        place: Place,
        /// How many the configuration says.
        group_size: usize,
    },
    /// Another number of answers than the group has.
    #[error("{place}: {found} answers, but grpo.group_size is {group_size}")]
    GroupSize {
        /// Where.
        place: Place,
        /// How many stand there.
        found: usize,
        /// How many the configuration says.
        group_size: usize,
    },
    /// A tokenizer file that does not load, or text it cannot handle.
    #[error("{file}: {action}: {reason}")]
    Tokenizer {
        /// The tokenizer's file.
        file: PathBuf,
        /// What failed.
        action: &'static str,
        /// The tokenizer library's reason.
        reason: String,
    },
    /// A cursor that belongs to another dataset.
    #[error("the saved order is over {saved} groups, the dataset now holds {found}; restore the file or start anew")]
    OtherDataset {
        /// Groups when the cursor was made.
        saved: usize,
        /// Groups now.
        found: usize,
    },
    /// An option of `data keychain` that cannot be met.
    #[error("data keychain: {option} is {found}, it must be {wanted}")]
    Option {
        /// The option.
        option: &'static str,
        /// Its value.
        found: String,
        /// What it may be.
        wanted: String,
    },
    /// Padding that never came out even.
    #[error(
        "data keychain: a prompt of exactly {wanted} tokens could not be made with this tokenizer; the nearest of \
         {tries} tries has {nearest}: ask for so many, or take another --seed"
    )]
    NotExact {
        /// Tokens of the prompt that was to be made.
        wanted: Tokens,
        /// The nearest below it.
        nearest: Tokens,
        /// Prompts that were measured.
        tries: usize,
    },
    /// Not enough text for one passage.
    #[error(
        "data keychain: the {split} prompts need {needed} tokens of text, but only {found} were \
         found in {folders}; name further folders of text, or lower the prompt's tokens"
    )]
    TooLittleText {
        /// `train`, `held-out`, or both: they share no text.
        split: &'static str,
        /// Tokens of a passage for each.
        needed: Tokens,
        /// Tokens there are.
        found: Tokens,
        /// Where text was looked for.
        folders: String,
    },
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
