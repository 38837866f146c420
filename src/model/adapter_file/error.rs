//! What can be wrong with adapters on disk.

use std::io;
use std::path::PathBuf;

use safetensors::SafeTensorError;

use crate::model::problems::Problems;
use crate::runtime::failure::{Classified, Exit};
use crate::tensor::bytes;

/// The file of the adapters' values.
pub const VALUES: &str = "adapter_model.safetensors";
/// The file that says what they are.
pub const CONFIG: &str = "adapter_config.json";

/// One thing that is wrong with adapters on disk.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each is")]
pub enum Problem {
    #[error("{CONFIG}: `{key}` is {found}; it must be {wanted}")]
    Key { key: String, found: String, wanted: String },
    #[error("{VALUES}: {name} {shape:?} is missing")]
    Missing { name: String, shape: [u64; 2] },
    #[error("{VALUES}: {name} {shape:?} belongs to none of the targets in this model")]
    Extra { name: String, shape: Vec<u64> },
    #[error("{VALUES}: {name} is {found:?}, the model and the rank ask for {wanted:?}")]
    Shape { name: String, found: Vec<u64>, wanted: [u64; 2] },
    #[error("{VALUES}: {name} is {dtype}; adapters are F32, F16, BF16 or F64")]
    Dtype { name: String, dtype: String },
    #[error("{VALUES}: `rope_scaling` in its metadata is {found}; it must be a JSON object")]
    Scaling { found: String },
    #[error("{VALUES}: {name} has {count} values of {elements} that are NaN or infinite")]
    NotFinite { name: String, count: u64, elements: u64 },
}

/// Why adapters could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each is")]
pub enum Error {
    #[error("{}: {source}", file.display())]
    File { file: PathBuf, source: io::Error },
    #[error("cannot write {}: {source}", file.display())]
    Write { file: PathBuf, source: io::Error },
    #[error("cannot write {}: {source}", file.display())]
    WriteValues { file: PathBuf, source: SafeTensorError },
    #[error("{}: not a JSON object: {source}", file.display())]
    NotJson { file: PathBuf, source: serde_json::Error },
    #[error("{}: {source}", file.display())]
    Values { file: PathBuf, source: SafeTensorError },
    #[error("{}: {problems}", folder.display())]
    Refused { folder: PathBuf, problems: Problems<Problem> },
    #[error("adapter {name}: {source}")]
    Tensor { name: String, source: bytes::Error },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Tensor { source, .. } => source.exit(),
            _ => Exit::Data,
        }
    }
}
