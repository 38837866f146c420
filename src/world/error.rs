//! Errors of the world itself.

use std::path::PathBuf;

use crate::runtime::failure::{Classified, Exit};
use crate::runtime::units::Rank;

/// Why ranks cannot work together, or no longer do.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages and the fields' names say everything")]
pub enum Error {
    #[error("MPI is already running or could not be started in this process")]
    Start,
    #[error("cannot install the handlers of the signals that request a stop: {source}")]
    Signals { source: std::io::Error },
    #[error(
        "this process is rank 0 of 1, but {variable} says that {tasks} were started: each of them believes it is \
         alone; start with `srun --mpi=pmix` or `mpirun` of the MPI that longstraw was built with"
    )]
    Alone { variable: &'static str, tasks: u64 },
    #[error("{ranks} ranks cannot be cut into context-parallel groups of {cp_size}: start a multiple of {cp_size}")]
    Uneven { ranks: u64, cp_size: u64 },
    #[error(
        "{cp_size} ranks that share a prompt cannot be cut into expert-parallel groups of {ep_size}: give a divisor of {cp_size}"
    )]
    UnevenExperts { cp_size: u64, ep_size: u64 },
    #[error(
        "ranks disagree about {what}: rank {first} has {first_value}, rank {other} has {other_value}; give all ranks the \
         same files, flags and LONGSTRAW_ variables"
    )]
    Disagree { what: &'static str, first: Rank, first_value: String, other: Rank, other_value: String },
    #[error("cannot keep a heartbeat in {}: {source}; choose another place with --run-dir", folder.display())]
    Watch { folder: PathBuf, source: std::io::Error },
    /// The reason is printed already.
    #[error("what is printed above has ended this rank")]
    Panicked { exit: Exit },
    /// The other rank prints the reason.
    #[error("rank {rank} failed")]
    Elsewhere { rank: Rank, exit: Exit },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Uneven { .. } | Error::UnevenExperts { .. } => Exit::Config,
            Error::Watch { .. } => Exit::Data,
            Error::Panicked { exit } | Error::Elsewhere { exit, .. } => *exit,
            _ => Exit::Disagree,
        }
    }
}
