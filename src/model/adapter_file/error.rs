//! What can be wrong with adapters on disk.

use std::io;
use std::path::PathBuf;

use safetensors::SafeTensorError;

use super::{CONFIG, VALUES};
use crate::model::problems::Problems;
use crate::runtime::failure::{Classified, Exit};
use crate::tensor::bytes;

/// One thing that is wrong with adapters on disk.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Problem {
    /// A key of the config has a value that is not used here.
    #[error("{CONFIG}: `{key}` is {found}; it must be {wanted}")]
    Key {
        /// The key.
        key: String,
        /// The value, as JSON, or `absent`.
        found: String,
        /// What is accepted.
        wanted: String,
    },
    /// A tensor that the targets ask for is not there.
    #[error("{VALUES}: {name} {shape:?} is missing")]
    Missing {
        /// The tensor.
        name: String,
        /// The shape it must have.
        shape: [u64; 2],
    },
    /// A tensor that the targets do not ask for.
    #[error("{VALUES}: {name} {shape:?} belongs to none of the targets in this model")]
    Extra {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A tensor of another shape.
    #[error("{VALUES}: {name} is {found:?}, the model and the rank ask for {wanted:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<u64>,
        /// The shape it must have.
        wanted: [u64; 2],
    },
    /// A dtype that is not read.
    #[error("{VALUES}: {name} is {dtype}; adapters are F32, F16, BF16 or F64")]
    Dtype {
        /// The tensor.
        name: String,
        /// The dtype, as the file names it.
        dtype: String,
    },
    /// Values that are NaN or infinite.
    #[error("{VALUES}: {name} has {count} values of {elements} that are NaN or infinite")]
    NotFinite {
        /// The tensor.
        name: String,
        /// How many.
        count: u64,
        /// Of how many.
        elements: u64,
    },
}

/// Why adapters could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refuses a file.
    #[error("{}: {source}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The config is no JSON object.
    #[error("{}: not a JSON object: {source}", file.display())]
    NotJson {
        /// The file.
        file: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// The values are no sound safetensors file, or could not be written.
    #[error("{}: {source}", file.display())]
    Values {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        source: SafeTensorError,
    },
    /// The adapters do not match the model or what the run asks for.
    #[error("{}: {problems}", folder.display())]
    Refused {
        /// The folder.
        folder: PathBuf,
        /// Everything that is wrong.
        problems: Problems<Problem>,
    },
    /// A value could not be copied to or from a tensor.
    #[error("adapter {name}: {source}")]
    Tensor {
        /// The tensor.
        name: String,
        /// What libtorch says.
        source: bytes::Error,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Tensor { source, .. } => source.exit(),
            _ => Exit::Data,
        }
    }
}
