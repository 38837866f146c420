//! Errors of checkpoints.

use std::io;
use std::path::PathBuf;

use safetensors::SafeTensorError;

use super::state::Difference;
use crate::model::adapter_file;
use crate::runtime::failure::{Classified, Exit};
use crate::tensor::bytes;

/// Why a checkpoint cannot be written, read or resumed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each variant is and hold every field")]
pub enum Error {
    #[error("cannot write {}: {source}; the checkpoints before it stand as they were", file.display())]
    Write { file: PathBuf, source: io::Error },
    #[error("cannot write {}: {source}; the checkpoints before it stand as they were", file.display())]
    WriteTensors { file: PathBuf, source: SafeTensorError },
    #[error(transparent)]
    Adapter(#[from] adapter_file::Error),
    #[error("cannot read {}: {source}", file.display())]
    Read { file: PathBuf, source: io::Error },
    #[error("{} is no checkpoint's state: {source}", file.display())]
    State { file: PathBuf, source: serde_json::Error },
    #[error("the checkpoint's answers and scores between two updates of a group cannot be read: {reason}")]
    Round { reason: String },
    #[error(
        "the checkpoint was written between two updates of {groups} groups (grpo.updates_per_group), which cannot be dealt to \
         {side_by_side} prompt groups of ranks: go on with a number of ranks and a parallel.cp_size that divide them"
    )]
    OtherRanks { groups: usize, side_by_side: usize },
    #[error("{} is damaged: its SHA-256 is {found}, and {wanted} was written", file.display())]
    Damaged { file: PathBuf, found: String, wanted: String },
    #[error("{} names no digest of {name}", file.display())]
    Unlisted { file: PathBuf, name: &'static str },
    #[error("{}: {source}", file.display())]
    Tensors { file: PathBuf, source: SafeTensorError },
    #[error("{}: {name} is {found}, this run has {wanted}", file.display())]
    Misfit { file: PathBuf, name: String, found: String, wanted: String },
    #[error("{name}: {source}")]
    Bytes { name: String, source: bytes::Error },
    #[error(
        "{} is of another run: {}; go on with what it was saved with, or start anew elsewhere with --run-dir",
        folder.display(),
        differences.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    )]
    OtherRun { folder: PathBuf, differences: Vec<Difference> },
    #[error("run.steps should be at least {updates}: {} has made so many (it is {steps})", folder.display())]
    Beyond { folder: PathBuf, updates: u64, steps: u64 },
    #[error(
        "{} holds checkpoints of an earlier run; go on from the newest with `longstraw train --resume`, choose another \
         place with --run-dir, or remove that folder",
        folder.display()
    )]
    Earlier { folder: PathBuf },
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
