//! Why adapters were not merged.

use std::path::PathBuf;

use thiserror::Error;

use crate::checkpoint;
use crate::model::{adapter_file, shards, spec};
use crate::runtime::failure::{Classified, Exit};
use crate::runtime::file_error::FileError;
use crate::tensor::bytes;

/// Why adapters were not merged. There is no destination then.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say what each variant and field means")]
pub enum Error {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{destination} exists: name a folder that does not")]
    Exists { destination: PathBuf },
    #[error("{file} names the base model {named:?}, which is no folder of a model here: give it with --model")]
    NoBase { file: PathBuf, named: String },
    #[error(
        "{adapter} is of an earlier end of this run, which has gone on to {newest} and has not ended: name the one that is meant"
    )]
    NotNewest { adapter: PathBuf, newest: PathBuf },
    #[error(
        "{run} has no folder adapter, which a run writes when it has made its last update: take a checkpoint, {run}/latest for the \
         newest or {run}/best for that of checkpoint.keep_best"
    )]
    NotEnded { run: PathBuf },
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error("the model has no tensor {name} in a dtype that adapters can be added to")]
    NoWeight { name: String },
    #[error(
        "{name} is in fp8, in which most of what an adapter adds would be rounded away: take a checkpoint in bfloat16"
    )]
    Fp8 { name: String },
    #[error("{name} is not finite in {dtype} once the adapter is added: look at the adapter's values")]
    NotFinite { name: String, dtype: String },
    #[error(
        "the rotary scaling that the adapters were trained with, {scaling}, cannot be written in the spelling of {file}: write it \
         into a copy of the model's folder by hand, and give that with --model"
    )]
    Scaling { file: PathBuf, scaling: String },
    #[error("{name}: {source}")]
    Tensor { name: String, source: bytes::Error },
    #[error("{file} has written what the adapters were trained with, and cannot be read: {problem}")]
    Stored { file: PathBuf, problem: String },
    #[error(transparent)]
    Spec(#[from] spec::Error),
    #[error(transparent)]
    Adapters(#[from] adapter_file::Error),
    #[error(transparent)]
    Weights(#[from] shards::Error),
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Exists { .. } | Error::NoBase { .. } | Error::NotNewest { .. } | Error::NotEnded { .. } => {
                Exit::Config
            }
            Error::Checkpoint(error) => error.exit(),
            Error::Spec(error) => error.exit(),
            Error::Adapters(error) => error.exit(),
            Error::Weights(error) => error.exit(),
            _ => Exit::Data,
        }
    }
}
