//! Why a gate does not run, or has not passed.

use std::io;
use std::path::PathBuf;

use crate::runtime::failure::{Classified, Exit};

/// What ends a gate.
#[expect(missing_docs, reason = "a gate, a file and the system's reason need no further words")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The gate before has not passed for the same thing.
    #[error(
        "{gate} runs after {before}, and {}: {}; two ways on: `make gates` submits all of them in order to Slurm (`make gate1`, \
         `make gate2` … run them here), LONGSTRAW_FORCE=1 or --force runs this one all the same",
        file.display(),
        reasons.join(", ")
    )]
    Order {
        gate: &'static str,
        /// The gate that must have passed before it.
        before: &'static str,
        /// The receipt of that gate.
        file: PathBuf,
        /// Everything that is wrong with that receipt.
        reasons: Vec<String>,
    },
    /// A check did not hold.
    #[error("{gate} has not passed, see {}: {}", file.display(), failed.join("; "))]
    NotPassed {
        gate: &'static str,
        file: PathBuf,
        /// Each failed check, with what that means.
        failed: Vec<String>,
    },
    /// The gate asks the endpoint and has no part for ranks.
    #[error("{gate} sends a request to the endpoint: start it without ranks")]
    NoRanks { gate: &'static str },
    /// A file of the gate's folder cannot be read, moved or removed.
    #[error("{}: {source}; choose another place with --run-dir", file.display())]
    File { file: PathBuf, source: io::Error },
    /// Not even one layer of the model can be compared.
    #[error(
        "parity with plain autograd needs {needed} bytes for one layer and {available} are there: choose a shorter \
         context.prompt_len, or start fewer ranks on this machine"
    )]
    NoLayerFits {
        /// Bytes of one layer.
        needed: u64,
        /// Bytes of free memory.
        available: u64,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Order { .. } | Error::NotPassed { .. } => Exit::Gate,
            Error::NoRanks { .. } => Exit::Config,
            Error::File { .. } => Exit::Data,
            Error::NoLayerFits { .. } => Exit::DoesNotFit,
        }
    }
}
