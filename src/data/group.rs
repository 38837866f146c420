//! A prompt with its answers, and the limits that both must keep to.

use serde_json::{Map, Value as Json};

use crate::config::TooLong;
use crate::runtime::units::Tokens;

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
