//! A prompt with its answers, and the limits that both must keep to.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use crate::config::TooLong;
use crate::runtime::units::Tokens;

/// One candidate answer of a prompt.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Answer {
    /// Token ids, at least one. A file of kept tokens holds them beside its other fields.
    #[serde(skip)]
    pub ids: Vec<i64>,
    /// Finite; `None` if the file gives none.
    pub reward: Option<f64>,
    /// For each id whether it takes part in the loss, at least one of them; `None`: all do. A tool's output inside an
    /// answer, for instance, is read but not trained.
    pub mask: Option<Vec<bool>>,
    /// For each id its log-probability under the policy that drew it, nats, where the file gives one; `None`: it gives none.
    pub logprobs: Option<Vec<Option<f64>>>,
}

/// A prompt with its answers. The prompt's token ids are the data set's to give: [`super::Dataset::prompt_ids`].
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Group {
    /// The record's name, or `line N`.
    pub name: String,
    /// Tokens of the prompt, at least one.
    pub prompt_tokens: Tokens,
    /// As many as the limits say.
    pub answers: Vec<Answer>,
    /// What reward functions read. `expected` is a text, a number, a boolean or a list of texts; `pattern` and `question`
    /// are texts; other keys are free.
    pub reward_data: Map<String, Json>,
    /// How calls of tools in answers look; the configuration says what the record does not.
    #[serde(default, skip_serializing_if = "ToolMarks::is_empty")]
    pub tool_marks: ToolMarks,
    /// What the chat template has around the reply to a call.
    #[serde(default, skip_serializing_if = "ReplyMarks::is_plain")]
    pub reply_marks: ReplyMarks,
    /// Tokens left out, if the prompt was longer than the plan's.
    pub cut: Option<Tokens>,
}

/// What the chat template has around a tool's reply in a record's conversation.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub enum ReplyMarks {
    /// The same as without the record's tools and variables, of which it has none.
    #[default]
    Plain,
    /// The two texts that follow from the record's tools and variables.
    Own {
        /// Between the assistant's text and the reply.
        start: String,
        /// Between the reply and the assistant's next text.
        end: String,
    },
    /// The template shows no turn of a tool with the record's tools and variables.
    Refused {
        /// The template's own message, or what is wrong with it.
        reason: String,
    },
}

impl ReplyMarks {
    fn is_plain(&self) -> bool {
        *self == ReplyMarks::Plain
    }
}

/// Texts around a call in an answer, and around its reply, that a record gives; none is empty.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default, expecting = "marks such as {\"call_start\": \"<calc>\"}")]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct ToolMarks {
    pub call_start: Option<String>,
    pub call_end: Option<String>,
    pub reply_start: Option<String>,
    pub reply_end: Option<String>,
}

impl ToolMarks {
    /// The keys and values.
    pub(super) fn entries(&self) -> [(&'static str, &Option<String>); 4] {
        let ToolMarks { call_start, call_end, reply_start, reply_end } = self;
        [("call_start", call_start), ("call_end", call_end), ("reply_start", reply_start), ("reply_end", reply_end)]
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries().iter().all(|(_, mark)| mark.is_none())
    }
}

/// How many answers each record must have.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Answers {
    /// Exactly the group size.
    Given(usize),
    /// Any number, also none: the policy samples the answers.
    Sampled,
}

/// Limits that every record must keep to.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Longest prompt of the plan.
    pub prompt_len_max: Tokens,
    /// Longest answer of the plan.
    pub answer_len_max: Tokens,
    /// Ids are below this: rows of the model's embedding.
    pub vocab_size: u64,
    /// How many answers each record must have.
    pub answers: Answers,
    /// What to do with a prompt longer than `prompt_len_max`.
    pub too_long: TooLong,
}
