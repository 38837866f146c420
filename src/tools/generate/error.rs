//! Why questions cannot be made.

use std::io;
use std::path::PathBuf;

use super::questions::Unusable;
use crate::endpoint;
use crate::runtime::failure::{Classified, Exit};

/// What ends `data generate` before its end, or says at the end that it was for nothing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody has allowed that texts are sent.
    #[error(
        "data generate sends the given texts to the endpoint, and that is off: turn it on with --set \
         endpoint.usage.data_generation=true, or as data_generation under usage in settings.json (--dry-run counts \
         requests and tokens without it)"
    )]
    Off,
    /// Several processes would each ask the service.
    #[error(
        "data generate is for one process: {variable} says that {tasks} were started, and each would ask the service; \
         start it without mpirun, or with `srun --ntasks=1`"
    )]
    Several {
        /// The launcher's variable.
        variable: &'static str,
        /// How many processes it names.
        tasks: u64,
    },
    /// An option that cannot be met.
    #[error("data generate: {option} is {found}, it must be {wanted}")]
    Option {
        /// The option.
        option: &'static str,
        /// Its value.
        found: u64,
        /// What it may be.
        wanted: String,
    },
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}", file.display())]
    Io {
        /// The file or folder.
        file: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// A file that was named is no text.
    #[error("{}: is no text (UTF-8 without control characters); convert it, or leave it out", file.display())]
    NotText {
        /// The file.
        file: PathBuf,
    },
    /// No chunk comes out of what was named.
    #[error("{places}: no text of at least {chars_min} characters stands there; name other files or folders")]
    NoText {
        /// What was named.
        places: String,
        /// Characters of a chunk, at least.
        chars_min: usize,
    },
    /// More than is held in memory at once.
    #[error("the texts are longer than {bytes_max} bytes together; name fewer files, in several runs")]
    TooMuch {
        /// The most that is read.
        bytes_max: u64,
    },
    /// What stands there was begun with other options.
    #[error(
        "{} was begun with other options ({differences}): give the same ones to go on, or another --out to begin anew",
        state.display()
    )]
    OtherOptions {
        /// The state file.
        state: PathBuf,
        /// Each with both values.
        differences: String,
    },
    /// A result that no state belongs to would be overwritten.
    #[error("{} is there, and {} is not: name another --out, or move it away", out.display(), state.display())]
    NoState {
        /// The result.
        out: PathBuf,
        /// Its state file.
        state: PathBuf,
    },
    /// A state file that this version has not written.
    #[error("{}, line {line}: is no state of data generate; name another --out", state.display())]
    NotState {
        /// The state file.
        state: PathBuf,
        /// Its line, from 1.
        line: usize,
    },
    /// Another process writes there.
    #[error("another process is writing to {}; wait for it, or name another --out", state.display())]
    Busy {
        /// The state file.
        state: PathBuf,
    },
    /// The service fails, and goes on failing.
    #[error("the service failed {faults} times in a row, and no further request is sent: {last}")]
    GivenUp {
        /// Requests that failed since the last one that was answered.
        faults: u64,
        /// The last one's failure.
        last: endpoint::Error,
    },
    /// More chunks failed than did not.
    #[error("{failed} of {asked} chunks gave no question, most often ({count} times) because {why}; {}", advice(*unusable))]
    MostFailed {
        /// Chunks that gave none.
        failed: u64,
        /// Chunks that were asked about in this run.
        asked: u64,
        /// What was wrong most often.
        why: String,
        /// How often.
        count: u64,
        /// What it is, where it is the reply and not the service.
        unusable: Option<Unusable>,
    },
    /// A signal asked for a stop.
    #[error("asked to stop: {finished} of {chunks} chunks are finished; the same command goes on with the rest")]
    Stopped {
        /// Chunks that are finished.
        finished: u64,
        /// Chunks of the texts.
        chunks: u64,
    },
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
