//! Calls in answers, answered by a program of the user's.
//!
//! An answer's text may hold a call between two marks. The program gets one JSON object a line for each call that waits at the
//! same time and writes one reply a line. The reply stands in the answer between the texts that the model's chat template has
//! around a tool's turn. docs/tools.md tells users.

mod error;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Number, Value};

pub use error::Error;
use error::Fault;

use crate::config::{RunConfig, ToolsConfig};
use crate::data::{Dataset, Group, ReplyMarks, Tokenizer};
use crate::program::{End, Limits, Program, Ran, last_lines, never_starts, short};
use crate::runtime::failure::Failure;
use crate::runtime::units::{Tokens, as_index, from_index};
use crate::step::rollout::{Call, Caller, Replied, Reply};

/// The most that a program may write.
const STDOUT_BYTES_MAX: usize = 8 << 20;

/// Texts around a call, and around its reply.
#[derive(Clone, Debug)]
struct Marks {
    call_start: String,
    call_end: String,
    reply_start: String,
    reply_end: String,
}

/// What answers calls, and how calls and replies look.
#[derive(Debug)]
pub struct Tools {
    program: Program,
    /// Seconds of a run.
    seconds: u64,
    marks: Marks,
    /// Whether the configuration leaves it to the chat template what stands around a reply.
    by_template: bool,
    /// Rows of the model's embedding: ids of replies are below.
    vocabulary: u64,
    /// The most tokens of an answer.
    longest: Tokens,
    /// The most tokens of a reply's text.
    tokens_max: Tokens,
    /// The most calls of an answer.
    turns: u64,
}

impl Tools {
    /// What `tools` of the configuration says; `None` where it names no program. Nothing is started. `vocabulary`: rows of the
    /// model's embedding.
    ///
    /// # Errors
    /// Where the program is not there, there is no `tokenizer`, nothing says what stands around a reply, or that has no room
    /// in an answer or no row in the embedding.
    pub fn open(config: &RunConfig, tokenizer: Option<&Tokenizer>, vocabulary: u64) -> Result<Option<Tools>, Failure> {
        let ToolsConfig { command, call_start, call_end, reply_start, reply_end, turns, tokens, reply_sec, .. } =
            config.tools.clone();
        let Some(command) = command else { return Ok(None) };
        let folder = config.model_path()?.to_owned();
        let tokenizer = tokenizer.ok_or(Error::NoTokenizer { folder })?;
        let opened = Program::open(&command, config.endpoint.secret_variables());
        let program = opened
            .map_err(|source| Error::Program { program: command.first().cloned().unwrap_or_default(), source })?;
        let (by_template, (reply_start, reply_end)) = match (reply_start, reply_end) {
            (Some(start), Some(end)) => (false, (start, end)),
            _ => (true, tokenizer.reply_marks().map_err(|source| Error::Template { source })?),
        };
        let tools = Tools {
            program,
            seconds: reply_sec,
            marks: Marks { call_start, call_end, reply_start, reply_end },
            by_template,
            vocabulary,
            longest: config.sampled_len(),
            tokens_max: tokens,
            turns,
        };
        tools.check_marks(tokenizer, &tools.marks, None)?;
        Ok(Some(tools))
    }

    /// Checks what stands around replies in answers to the records of a data set, which `key` names.
    ///
    /// # Errors
    /// The first record whose marks have no room in an answer, no row in the embedding, or cannot be taken from the chat
    /// template.
    pub fn check_records(&self, tokenizer: &Tokenizer, key: &str, data: &Dataset) -> Result<(), Failure> {
        // Most records have the marks of the one before.
        let mut checked = (self.marks.reply_start.clone(), self.marks.reply_end.clone());
        for group in (0..data.len()).map(|index| data.group(index)) {
            let record = format!("{key}, record {}", group.name);
            let own = &group.tool_marks;
            if let ReplyMarks::Refused { reason } = &group.reply_marks
                && self.by_template
                && (own.reply_start.is_none() || own.reply_end.is_none())
            {
                return Err(Error::RecordTemplate { record, reason: reason.clone() }.into());
            }
            let marks = self.marks_of(group);
            let around = (marks.reply_start.clone(), marks.reply_end.clone());
            if around != checked {
                self.check_marks(tokenizer, &marks, Some(record))?;
                checked = around;
            }
        }
        Ok(())
    }

    /// Refuses marks around a reply that leave no room for it, or that the model cannot read; `record` has given them, else
    /// the configuration has.
    fn check_marks(&self, tokenizer: &Tokenizer, marks: &Marks, record: Option<String>) -> Result<(), Failure> {
        let ids = tokenizer.encode(&format!("{}{}", marks.reply_start, marks.reply_end))?;
        let (around, longest) = (from_index(ids.len()), self.longest.0);
        // A call, its reply and what follows have a token each.
        if around + 3 > longest {
            return Err(match record {
                Some(record) => Error::RecordNoRoom { record, around, longest },
                None => Error::NoRoom { around, longest },
            }
            .into());
        }
        match self.outside(&ids) {
            Some(id) => Err(self.unread(id, record).into()),
            None => Ok(()),
        }
    }

    /// The first id that has no row in the embedding.
    fn outside(&self, ids: &[i64]) -> Option<i64> {
        ids.iter().copied().find(|&id| u64::try_from(id).is_ok_and(|id| id >= self.vocabulary))
    }

    fn unread(&self, id: i64, record: Option<String>) -> Error {
        let of = record.map_or_else(String::new, |record| format!("{record}: "));
        Error::Vocabulary { of, id, vocabulary: self.vocabulary }
    }

    /// What stands around calls and replies in answers to a record: its own marks, else the configuration's, else those of the
    /// chat template with the record's tools and variables.
    fn marks_of(&self, group: &Group) -> Marks {
        let own = group.tool_marks.clone();
        let Marks { call_start, call_end, mut reply_start, mut reply_end } = self.marks.clone();
        if let ReplyMarks::Own { start, end } = &group.reply_marks
            && self.by_template
        {
            (reply_start, reply_end) = (start.clone(), end.clone());
        }
        Marks {
            call_start: own.call_start.unwrap_or(call_start),
            call_end: own.call_end.unwrap_or(call_end),
            reply_start: own.reply_start.unwrap_or(reply_start),
            reply_end: own.reply_end.unwrap_or(reply_end),
        }
    }

    /// The most calls of an answer.
    #[must_use]
    pub fn turns(&self) -> u64 {
        self.turns
    }

    /// Who answers the calls in answers to a record.
    #[must_use]
    pub fn of<'a>(&'a self, tokenizer: &'a Tokenizer, group: &'a Group) -> RecordCaller<'a> {
        RecordCaller { tools: self, tokenizer, group, marks: self.marks_of(group) }
    }

    /// What stands around a call, and around its reply, for a user.
    #[must_use]
    pub fn note(&self) -> String {
        let Marks { call_start, call_end, reply_start, reply_end } = &self.marks;
        format!(
            "{} answers what stands between {call_start:?} and {call_end:?}; a reply stands between {reply_start:?} and \
             {reply_end:?}{}",
            self.program.file(),
            if self.by_template { ", or as the chat template says with a record's tools and variables" } else { "" }
        )
    }

    /// What the program says to each call.
    fn said(&self, lines: &str, calls: usize, alive: &mut dyn FnMut()) -> Result<Vec<Result<Said, Fault>>, Error> {
        let time = Duration::from_secs(self.seconds);
        // A reply that a stop has cut off could be trained on: calls are short, and a stop waits for them.
        let limits = Limits { time, stdout_bytes_max: STDOUT_BYTES_MAX, ends_at_stop: false };
        let ran = match self.program.run(lines, limits, alive) {
            Ok(ran) => self.lines(&ran, calls),
            Err(source) if never_starts(&source) => {
                return Err(Error::Program { program: self.program.file().to_owned(), source });
            }
            Err(error) => Err(Fault::Run { reason: error.to_string() }),
        };
        Ok(ran.unwrap_or_else(|fault| vec![Err(fault); calls]))
    }

    /// The line for each call of a run that has come to its end.
    fn lines(&self, ran: &Ran, calls: usize) -> Result<Vec<Result<Said, Fault>>, Fault> {
        let stderr = last_lines(&ran.stderr);
        match ran.end {
            End::TimeOut => return Err(Fault::TimeOut { seconds: self.seconds, stderr }),
            End::TooLong => return Err(Fault::TooLong { bytes_max: from_index(STDOUT_BYTES_MAX) }),
            End::Exit(status) if !status.success() => {
                return Err(Fault::Exit { status: status.to_string(), stderr });
            }
            End::Exit(_) => {}
        }
        let text = String::from_utf8_lossy(&ran.stdout);
        let lines: Vec<&str> = text.lines().collect();
        if lines.len() != calls {
            return Err(Fault::Lines { lines: lines.len(), calls, stderr });
        }
        Ok(lines.into_iter().map(said).collect())
    }
}

/// Answers the calls in answers to one record.
#[derive(Debug)]
pub struct RecordCaller<'a> {
    tools: &'a Tools,
    tokenizer: &'a Tokenizer,
    group: &'a Group,
    /// The record's, and what it does not say of the configuration.
    marks: Marks,
}

/// What the program reads of a call.
#[derive(Serialize)]
struct Line<'a> {
    prompt: &'a str,
    answer: usize,
    turn: u64,
    call: &'a str,
    text: &'a str,
    reward_data: &'a Map<String, Value>,
}

/// What a line of the program says.
#[derive(Clone, Debug, PartialEq)]
enum Said {
    Reply(String),
    Error(String),
}

impl RecordCaller<'_> {
    /// The reply with this text, or in its place an error where the model has no row for one of its tokens.
    fn reply(&self, text: &str, outcome: Replied) -> Result<Result<Reply, Fault>, Failure> {
        let reply = self.whole_reply(text, outcome)?;
        Ok(match self.tools.outside(&reply.ids) {
            Some(id) => Err(Fault::Vocabulary { id, vocabulary: self.tools.vocabulary }),
            None => Ok(reply),
        })
    }

    /// What stands in the place of a reply that there is not.
    fn failed(&self, fault: &Fault, call: &Call<'_>) -> Result<Reply, Failure> {
        let Call { answer, turn, .. } = call;
        tracing::warn!("record {}, answer {answer}, call {turn}: {fault}", self.group.name);
        let reply = self.whole_reply(fault.said(), Replied::Failed(fault.to_string()))?;
        let outside = self.tools.outside(&reply.ids);
        outside.map_or(Ok(reply), |id| Err(self.tools.unread(id, Some(self.group.name.clone())).into()))
    }

    /// The tokens that a reply with this text is in the answer.
    fn whole_reply(&self, text: &str, outcome: Replied) -> Result<Reply, Failure> {
        let Marks { reply_start, reply_end, .. } = &self.marks;
        let ids = self.tokenizer.encode(text)?;
        let most = as_index(self.tools.tokens_max.0);
        let (text, outcome) = if ids.len() > most {
            let begun = self.tokenizer.decode(&ids[..most])?;
            let begun = begun.trim_end_matches('\u{fffd}');
            (format!("{begun}… (cut off)"), if outcome == Replied::Whole { Replied::Cut } else { outcome })
        } else {
            (text.to_owned(), outcome)
        };
        Ok(Reply { ids: self.tokenizer.encode(&format!("{reply_start}{text}{reply_end}"))?, outcome })
    }
}

impl Caller for RecordCaller<'_> {
    fn closed(&self, ids: &[i64], last: i64) -> Result<Option<String>, Failure> {
        let Marks { call_start, call_end, .. } = &self.marks;
        // Most tokens hold nothing of the mark's end, so the whole text is seldom made. Bytes of a character that is not whole
        // show themselves as a replacement, and a blank may be lost at an edge.
        let end = call_end.chars().next_back().unwrap_or_default();
        let shown = self.tokenizer.answer_text(&[last], &[])?;
        if !end.is_whitespace() && !shown.contains([end, '\u{fffd}']) {
            return Ok(None);
        }
        let text = self.tokenizer.answer_text(&[ids, &[last]].concat(), &[])?;
        let call = text.split_once(call_start.as_str()).and_then(|(_, call)| call.split_once(call_end.as_str()));
        Ok(call.map(|(call, _)| call.trim().to_owned()))
    }

    fn replies(&self, calls: &[Call<'_>], alive: &mut dyn FnMut()) -> Result<Vec<Reply>, Failure> {
        let mut lines = String::new();
        for Call { answer, turn, text: call, ids } in calls {
            let text = self.tokenizer.answer_text(ids, &[])?;
            let Group { name, reward_data, .. } = self.group;
            let line = Line { prompt: name, answer: *answer, turn: *turn, call, text: &text, reward_data };
            lines += &serde_json::to_string(&line).expect("names are texts, so there is a JSON form");
            lines.push('\n');
        }
        let mut replies = Vec::new();
        for (call, said) in calls.iter().zip(self.tools.said(&lines, calls.len(), alive)?) {
            let reply = match said {
                Ok(Said::Reply(text)) => self.reply(&text, Replied::Whole)?,
                Ok(Said::Error(text)) => self.reply(&text, Replied::Refused)?,
                Err(fault) => Err(fault),
            };
            replies.push(reply.or_else(|fault| self.failed(&fault, call))?);
        }
        Ok(replies)
    }
}

/// A line that is an object.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Object {
    reply: Option<String>,
    error: Option<String>,
}

/// A text, a number, or an object with a reply or an error.
fn said(line: &str) -> Result<Said, Fault> {
    let text = line.trim();
    let fault = || Fault::Line { line: short(line) };
    if let Ok(reply) = serde_json::from_str::<String>(text) {
        return Ok(Said::Reply(reply));
    }
    if let Ok(number) = serde_json::from_str::<Number>(text) {
        return Ok(Said::Reply(number.to_string()));
    }
    match serde_json::from_str(text) {
        Ok(Object { reply: Some(reply), error: None }) => Ok(Said::Reply(reply)),
        Ok(Object { reply: None, error: Some(error) }) => Ok(Said::Error(error)),
        _ => Err(fault()),
    }
}

#[cfg(test)]
mod tests;
