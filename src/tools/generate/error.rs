//! Why a reply cannot be used, and why `data generate` cannot go on.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::endpoint;
use crate::runtime::failure::{Classified, Exit};

/// Why a reply cannot be used.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the messages say what each variant means")]
pub enum Unusable {
    #[error("the reply was cut off at its longest")]
    Cut,
    #[error("there was no JSON in the reply")]
    NoJson,
    #[error("the reply's JSON had no list \"questions\" of objects with \"question\", \"answer\" and \"wrong\"")]
    OtherForm,
    #[error("a question or an answer was empty, or too long")]
    Length,
    #[error("an answer did not stand in the text")]
    NotInText,
    #[error("a question held its own answer")]
    GivenAway,
    #[error("there were too few wrong answers that differ from the right one and from each other")]
    TooFewWrong,
    #[error("the service rejected the request")]
    Refused,
}

/// What ends `data generate` early, or makes its result a failure.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each variant and field means")]
pub enum Error {
    #[error(
        "data generate sends the given texts to the endpoint, and that is off: turn it on with --set \
         endpoint.usage.data_generation=true, or as data_generation under usage in settings.json (--dry-run counts \
         requests and tokens without it)"
    )]
    Off,
    #[error(
        "data generate is for one process: {variable} says that {tasks} were started, and each would send every request; \
         start it without mpirun, or with `srun --ntasks=1`"
    )]
    Several { variable: &'static str, tasks: u64 },
    #[error("data generate: {option} is {found}, it must be {wanted}")]
    Option { option: &'static str, found: u64, wanted: String },
    #[error("{}: cannot {action}: {source}", file.display())]
    Io { file: PathBuf, action: &'static str, source: io::Error },
    #[error("{}: is no text (UTF-8 without control characters); convert it, or leave it out", file.display())]
    NotText { file: PathBuf },
    #[error("{places}: no text of at least {chars_min} characters there; name other files or folders")]
    NoText { places: String, chars_min: usize },
    #[error("the texts are longer than {bytes_max} bytes together; name fewer files, in several runs")]
    TooMuch { bytes_max: u64 },
    #[error(
        "{} was begun with other options ({differences}): use the same ones to continue, or another --out to start again",
        state.display()
    )]
    OtherOptions { state: PathBuf, differences: String },
    #[error("{} exists, but {} does not: name another --out, or move it away", out.display(), state.display())]
    NoState { out: PathBuf, state: PathBuf },
    #[error("{}, line {line}: is not a state of data generate; name another --out", state.display())]
    NotState { state: PathBuf, line: usize },
    #[error("another process is writing to {}; wait for it, or name another --out", state.display())]
    Busy { state: PathBuf },
    #[error("the service failed {faults} times in a row, and no further request is sent: {last}")]
    GivenUp { faults: u64, last: endpoint::Error },
    #[error("{failed} of {chunks} chunks gave no question, most often ({count} times) because {why}; {}", advice(*unusable))]
    MostFailed { failed: u64, chunks: u64, why: String, count: u64, unusable: Option<Unusable> },
    #[error("asked to stop: {finished} of {chunks} chunks are finished; the same command continues with the rest")]
    Stopped { finished: u64, chunks: u64 },
}

impl Error {
    /// Adds file and action to an I/O error.
    pub(super) fn io(file: &Path, action: &'static str) -> impl Fn(io::Error) -> Error {
        move |source| Error::Io { file: file.to_owned(), action, source }
    }
}

/// What may help against the most frequent fault.
fn advice(unusable: Option<Unusable>) -> &'static str {
    match unusable {
        None => "check the service, then run the same command again: it sends these chunks again",
        Some(Unusable::Cut) => "request fewer --questions or --answers at once",
        Some(Unusable::Refused) => "read the message of the service, and check the size of a chunk",
        Some(_) => "try another --model, or smaller chunks",
    }
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Off
            | Error::Several { .. }
            | Error::Option { .. }
            | Error::OtherOptions { .. }
            | Error::NoState { .. }
            | Error::Busy { .. } => Exit::Config,
            Error::Io { .. }
            | Error::NotText { .. }
            | Error::NoText { .. }
            | Error::TooMuch { .. }
            | Error::NotState { .. } => Exit::Data,
            Error::GivenUp { .. } | Error::MostFailed { .. } => Exit::Endpoint,
            Error::Stopped { .. } => Exit::Requeue,
        }
    }
}
