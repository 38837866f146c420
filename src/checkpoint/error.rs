//! Why a checkpoint cannot be written, read or gone on from.

use std::io;
use std::path::PathBuf;

use safetensors::SafeTensorError;

use super::state::Difference;
use crate::model::adapter_file;
use crate::runtime::failure::{Classified, Exit};
use crate::tensor::bytes;

/// Why a checkpoint cannot be written, read or gone on from.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder cannot be written.
    #[error("cannot write {}: {source}; the checkpoints before it stand as they were", file.display())]
    Write {
        /// Which.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The tensors cannot be written.
    #[error("cannot write {}: {source}; the checkpoints before it stand as they were", file.display())]
    WriteTensors {
        /// Which file.
        file: PathBuf,
        /// Why.
        source: SafeTensorError,
    },
    /// The adapters cannot be written in PEFT's format.
    #[error(transparent)]
    Adapter(#[from] adapter_file::Error),
    /// A file or folder cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    Read {
        /// Which.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file of counts is none.
    #[error("{} is no checkpoint's state: {source}", file.display())]
    State {
        /// Which file.
        file: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// What updates were being made of cannot be read.
    #[error("the checkpoint's answers and scores between two updates of a group cannot be read: {reason}")]
    Round {
        /// Where and why.
        reason: String,
    },
    /// The ranks do not divide the groups whose updates are not all made.
    #[error(
        "the checkpoint was written between two updates of {groups} groups (grpo.updates_per_group), which cannot be dealt to \
         {side_by_side} prompt groups of ranks: go on with a number of ranks and a parallel.cp_size that divide them"
    )]
    OtherRanks {
        /// Groups of the round.
        groups: usize,
        /// Prompt groups of ranks.
        side_by_side: usize,
    },
    /// A file is not what was written.
    #[error("{} is damaged: its SHA-256 is {found}, and {wanted} was written", file.display())]
    Damaged {
        /// Which.
        file: PathBuf,
        /// Its digest.
        found: String,
        /// The digest that was written down.
        wanted: String,
    },
    /// A file that belongs to every checkpoint has no digest.
    #[error("{} names no digest of {name}", file.display())]
    Unlisted {
        /// The file of counts.
        file: PathBuf,
        /// The file that it should name.
        name: &'static str,
    },
    /// The tensors are no sound safetensors file.
    #[error("{}: {source}", file.display())]
    Tensors {
        /// Which file.
        file: PathBuf,
        /// What is wrong.
        source: SafeTensorError,
    },
    /// A tensor is not of the shape or dtype that the run has.
    #[error("{}: {name} is {found}, this run has {wanted}", file.display())]
    Misfit {
        /// Which file.
        file: PathBuf,
        /// Which tensor.
        name: String,
        /// Its dtype and shape.
        found: String,
        /// The run's.
        wanted: String,
    },
    /// A tensor cannot be copied from or to its bytes.
    #[error("{name}: {source}")]
    Bytes {
        /// Which tensor.
        name: String,
        /// What libtorch says.
        source: bytes::Error,
    },
    /// The run that was saved is another one.
    #[error(
        "{} is of another run: {}; go on with what it was saved with, or start anew elsewhere with --run-dir",
        folder.display(),
        differences.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    )]
    OtherRun {
        /// The checkpoint.
        folder: PathBuf,
        /// What differs.
        differences: Vec<Difference>,
    },
    /// More updates were made than are asked for.
    #[error("run.steps should be at least {updates}: {} has made so many (it is {steps})", folder.display())]
    Beyond {
        /// The checkpoint.
        folder: PathBuf,
        /// Updates it has seen.
        updates: u64,
        /// Updates asked for.
        steps: u64,
    },
    /// A run would start anew among the checkpoints of an earlier one.
    #[error(
        "{} holds checkpoints of an earlier run; go on from the newest with `longstraw train --resume`, choose another \
         place with --run-dir, or remove that folder",
        folder.display()
    )]
    Earlier {
        /// The folder of checkpoints.
        folder: PathBuf,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::OtherRun { .. } | Error::Beyond { .. } | Error::Earlier { .. } => Exit::Config,
            Error::Bytes { source, .. } => source.exit(),
            Error::Adapter(source) => source.exit(),
            _ => Exit::Data,
        }
    }
}
