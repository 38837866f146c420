//! What can be wrong with the files of a checkpoint.

use std::io;
use std::path::PathBuf;

use super::{INDEX, SINGLE};
use crate::model::problems::Problems;
use crate::runtime::failure::{Classified, Exit};

/// One thing that is wrong with a checkpoint.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Problem {
    /// A tensor of the model is nowhere.
    #[error("{name} {shape:?} is missing")]
    Missing {
        /// The tensor.
        name: String,
        /// The shape it must have.
        shape: Vec<u64>,
    },
    /// A tensor that the model does not have.
    #[error("{file}: {name} {shape:?} is not part of this model")]
    Extra {
        /// The shard.
        file: String,
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A tensor of another shape.
    #[error("{file}: {name} is {found:?}, the config asks for {wanted:?}")]
    Shape {
        /// The shard.
        file: String,
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<u64>,
        /// The shape it must have.
        wanted: Vec<u64>,
    },
    /// A dtype that is not read.
    #[error("{file}: {name} is {dtype}; longstraw reads F32, F16, BF16 and F64 (convert quantised weights first)")]
    Dtype {
        /// The shard.
        file: String,
        /// The tensor.
        name: String,
        /// The dtype, as the file names it.
        dtype: String,
    },
    /// Two shards hold the same tensor.
    #[error("{name} stands both in {first} and in {second}")]
    Twice {
        /// The tensor.
        name: String,
        /// A shard that holds it.
        first: String,
        /// Another one.
        second: String,
    },
    /// The index names a shard that is not there.
    #[error("{file} is not there, but the index places {tensors} tensors in it ({first} and so on)")]
    AbsentShard {
        /// The shard.
        file: String,
        /// How many tensors the index places there.
        tensors: usize,
        /// The first of them.
        first: String,
    },
    /// The index places a tensor in a shard that lacks it.
    #[error("{file} lacks {name}, which the index places there")]
    Misplaced {
        /// The shard.
        file: String,
        /// The tensor.
        name: String,
    },
    /// A shard name that is no plain file name, or a place that is no word.
    #[error("the index places {name} in {place}; it must be the name of a file beside the index")]
    Place {
        /// The tensor.
        name: String,
        /// What the index says, as JSON.
        place: String,
    },
}

/// What is wrong inside one safetensors file.
#[derive(Debug, thiserror::Error)]
pub enum Damage {
    /// Too short to hold even the length of a header.
    #[error("the file has {found} bytes; a safetensors file begins with 8 bytes that say how long its header is")]
    NoHeader {
        /// Bytes of the file.
        found: u64,
    },
    /// The header ends beyond the file.
    #[error("the header should take {wanted} bytes, but the file has {found}; it is truncated or no safetensors file")]
    HeaderBeyondEnd {
        /// Bytes up to the header's end.
        wanted: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// The file does not end where its last tensor ends.
    #[error(
        "the header describes {wanted} bytes, but the file has {found}; it is truncated or damaged, fetch it again"
    )]
    Length {
        /// Bytes up to the last tensor's end.
        wanted: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// Anything else that is wrong in the header.
    #[error("the header is damaged: {0}; fetch the file again")]
    Header(safetensors::SafeTensorError),
}

/// Why the files of a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Neither weights nor an index.
    #[error("{}: there is neither {SINGLE} nor {INDEX}; weights are read from safetensors only{hint}", folder.display())]
    NoWeights {
        /// The folder.
        folder: PathBuf,
        /// What stands there instead, and what to do.
        hint: &'static str,
    },
    /// A file cannot be read or mapped.
    #[error("{}: {source}", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The index is no JSON object with a `weight_map`.
    #[error("{}: no index of weights: {reason}", file.display())]
    Index {
        /// The file.
        file: PathBuf,
        /// Where and why.
        reason: String,
    },
    /// A shard is damaged.
    #[error("{}: {damage}", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        damage: Damage,
    },
    /// Tensors are missing, surplus, of the wrong shape or in the wrong place.
    #[error("{}: {problems}", folder.display())]
    Refused {
        /// The folder.
        folder: PathBuf,
        /// Everything that is wrong.
        problems: Problems<Problem>,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        Exit::Data
    }
}
