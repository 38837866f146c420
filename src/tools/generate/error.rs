//! Why questions cannot be made.

use std::io;
use std::path::PathBuf;

use super::questions::Unusable;
use crate::endpoint;
use crate::runtime::failure::{Classified, Exit};

/// What ends `data generate` before its end, or says at the end that it was for nothing.
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
        "data generate is for one process: {variable} says that {tasks} were started, and each would ask the service; \
         start it without mpirun, or with `srun --ntasks=1`"
    )]
    Several { variable: &'static str, tasks: u64 },
    #[error("data generate: {option} is {found}, it must be {wanted}")]
    Option { option: &'static str, found: u64, wanted: String },
    #[error("{}: cannot {action}: {source}", file.display())]
    Io { file: PathBuf, action: &'static str, source: io::Error },
    #[error("{}: is no text (UTF-8 without control characters); convert it, or leave it out", file.display())]
    NotText { file: PathBuf },
    #[error("{places}: no text of at least {chars_min} characters stands there; name other files or folders")]
    NoText { places: String, chars_min: usize },
    #[error("the texts are longer than {bytes_max} bytes together; name fewer files, in several runs")]
    TooMuch { bytes_max: u64 },
    #[error(
        "{} was begun with other options ({differences}): give the same ones to go on, or another --out to begin anew",
        state.display()
    )]
    OtherOptions { state: PathBuf, differences: String },
    #[error("{} is there, and {} is not: name another --out, or move it away", out.display(), state.display())]
    NoState { out: PathBuf, state: PathBuf },
    #[error("{}, line {line}: is no state of data generate; name another --out", state.display())]
    NotState { state: PathBuf, line: usize },
    #[error("another process is writing to {}; wait for it, or name another --out", state.display())]
    Busy { state: PathBuf },
    #[error("the service failed {faults} times in a row, and no further request is sent: {last}")]
    GivenUp { faults: u64, last: endpoint::Error },
    #[error("{failed} of {asked} chunks gave no question, most often ({count} times) because {why}; {}", advice(*unusable))]
    MostFailed { failed: u64, asked: u64, why: String, count: u64, unusable: Option<Unusable> },
    #[error("asked to stop: {finished} of {chunks} chunks are finished; the same command goes on with the rest")]
    Stopped { finished: u64, chunks: u64 },
}

/// What may help against the fault that came most often.
fn advice(unusable: Option<Unusable>) -> &'static str {
    match unusable {
        None => "look at the service, then give the same command again: it asks about these chunks anew",
        Some(Unusable::Cut) => "ask for fewer --questions or --answers at once",
        Some(Unusable::Refused) => "look at the words of the service, and at the size of a chunk",
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
