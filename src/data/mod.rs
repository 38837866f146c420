//! Prompts with their candidate answers: dataset files, the tokenizer, and the order in which groups are taken.
//!
//! A dataset is JSON lines, one group a line; `docs/data.md` says what a line may hold. Text is tokenised as it is:
//! nothing is added around it, and special tokens written in it are recognised. Conversations go through the model's own
//! chat template first. Every record is checked when the file is opened, so that no run fails at its thousandth group.

mod chat;
mod corpus;
mod data_digest;
mod dataset;
mod ends;
mod error;
mod files;
mod group;
mod kept;
pub mod keychain;
mod order;
mod python;
mod random;
mod records;
#[cfg(test)]
pub(crate) mod test_tokenizer;
mod tokenizer;

pub use dataset::{Cuts, Dataset};
pub use ends::end_ids;
pub use error::{Error, Place};
pub use files::{Hidden, list_files};
pub use group::{Answer, Answers, Group, Limits, ReplyMarks, ToolMarks};
pub use kept::{KEPT_TEXT_BYTES_MIN, KeptTokens, find_or_make, size_note};
pub use order::GroupOrder;
pub use random::Random;
pub use tokenizer::Tokenizer;
