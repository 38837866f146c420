//! What can be wrong with tools: before the first answer, which ends a run, and with one call, whose reply then says so.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::data;
use crate::program::stderr_words;
use crate::runtime::failure::{Classified, Exit};

/// Why calls cannot be answered as the configuration says.
#[expect(missing_docs, reason = "the fields are parts of the message, which says what they are")]
#[derive(Debug, Error)]
pub enum Error {
    /// The program cannot be started.
    #[error("tools.command: cannot start {program}: {source}; name a program that this machine has and may run")]
    Program { program: String, source: io::Error },
    /// Calls are found in text, and nothing makes text of tokens.
    #[error(
        "{}: there is no tokenizer.json, and tools.command answers calls in the text of answers; take a model folder with its \
         tokenizer, or leave tools.command out",
        folder.display()
    )]
    NoTokenizer {
        /// The model's folder.
        folder: PathBuf,
    },
    /// The chat template does not say what stands around a reply.
    #[error(
        "what stands around a tool's reply cannot be taken from the chat template: {source}; set tools.reply_start and \
         tools.reply_end"
    )]
    Template { source: data::Error },
    /// What stands around a reply leaves no room for it.
    #[error(
        "what stands around a tool's reply has {around} tokens, and an answer has at most {longest} (rollout.max_tokens, else \
         context.answer_len): allow longer answers, or set shorter tools.reply_start and tools.reply_end"
    )]
    NoRoom { around: u64, longest: u64 },
    /// The same of a record's own marks, or of those that the template has for it.
    #[error(
        "{record}: what stands around a tool's reply has {around} tokens, and an answer has at most {longest} \
         (rollout.max_tokens, else context.answer_len): allow longer answers, or shorten the record's \"tool_marks\""
    )]
    RecordNoRoom { record: String, around: u64, longest: u64 },
    /// The chat template does not say what stands around a reply in this record's conversation.
    #[error(
        "{record}: what stands around a tool's reply cannot be taken from the chat template with the record's \"tools\" and \
         \"chat_template_kwargs\": {reason}; set tools.reply_start and tools.reply_end, or the record's \"tool_marks\""
    )]
    RecordTemplate { record: String, reason: String },
    /// What stands around a reply has a token that the model does not know.
    #[error(
        "{of}what stands around a tool's reply has the token id {id}, and the model's embedding has {vocabulary} rows: the \
         tokenizer knows more tokens than the model; set other tools.reply_start and tools.reply_end"
    )]
    Vocabulary { of: String, id: i64, vocabulary: u64 },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Program { .. } | Error::NoRoom { .. } => Exit::Config,
            Error::NoTokenizer { .. }
            | Error::Template { .. }
            | Error::RecordNoRoom { .. }
            | Error::RecordTemplate { .. }
            | Error::Vocabulary { .. } => Exit::Data,
        }
    }
}

/// Why a call has got no reply of the program.
#[derive(Clone, Debug, Error, PartialEq)]
pub(super) enum Fault {
    /// The system could not start it this time.
    #[error("the program could not be run ({reason})")]
    Run { reason: String },
    /// It took too long, and was ended with everything that it had started.
    #[error("the program was ended after {seconds} s (tools.reply_sec){}", stderr_words(.stderr))]
    TimeOut { seconds: u64, stderr: String },
    /// It ended with a failure.
    #[error("the program failed ({status}){}", stderr_words(.stderr))]
    Exit { status: String, stderr: String },
    /// It wrote too much, and was ended.
    #[error("the program wrote more than {bytes_max} bytes")]
    TooLong { bytes_max: u64 },
    /// It wrote another number of lines than there were calls.
    #[error("the program wrote {lines} lines for {calls} calls{}", stderr_words(.stderr))]
    Lines { lines: usize, calls: usize, stderr: String },
    /// A line that is no reply.
    #[error("the program's line {line:?} is no text or number of JSON, {{\"reply\": …}} or {{\"error\": …}}")]
    Line { line: String },
    /// A reply that the model cannot read.
    #[error("the reply has the token id {id}, and the model's embedding has {vocabulary} rows")]
    Vocabulary { id: i64, vocabulary: u64 },
}

impl Fault {
    /// What the policy reads in the place of a reply: nothing of the program's own words, which are for the user.
    pub(super) fn said(&self) -> &'static str {
        match self {
            Fault::TimeOut { .. } => "error: the tool did not answer in time",
            Fault::TooLong { .. } => "error: the tool's answer was too long",
            _ => "error: the tool failed",
        }
    }
}
