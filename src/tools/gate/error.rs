//! Why a gate does not run, or has not passed.

use std::io;
use std::path::PathBuf;

use crate::runtime::failure::{Classified, Exit};

/// What ends a gate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The gate below has not passed for the same thing.
    #[error(
        "{gate} runs after {below}, and {}: {}; two ways on: `make gates` submits all of them in order to Slurm (`make gate1`, \
         `make gate2` … run them here), LONGSTRAW_FORCE=1 or --force runs this one all the same",
        file.display(),
        reasons.join(", ")
    )]
    Order {
        /// The gate that was asked for.
        gate: &'static str,
        /// The one below it.
        below: &'static str,
        /// Its receipt.
        file: PathBuf,
        /// Everything that stands against it.
        reasons: Vec<String>,
    },
    /// A check did not hold.
    #[error("{gate} has not passed, see {}: {}", file.display(), failed.join("; "))]
    NotPassed {
        /// The gate.
        gate: &'static str,
        /// Its receipt.
        file: PathBuf,
        /// Each check that did not hold, with what that means.
        failed: Vec<String>,
    },
    /// The gate asks for the endpoint and not for ranks.
    #[error("{gate} asks the endpoint: it has no part for ranks")]
    NoRanks {
        /// The gate.
        gate: &'static str,
    },
    /// A file of the gate's folder cannot be read, moved or removed.
    #[error("{}: {source}; choose another place with --run-dir", file.display())]
    File {
        /// Which.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Not even one layer of the model can be compared.
    #[error(
        "parity with plain autograd needs {needed} bytes for one layer and {available} are there: choose a shorter \
         context.prompt_len, or start fewer ranks on this machine"
    )]
    NoLayerFits {
        /// What one layer takes.
        needed: u64,
        /// What there is.
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
