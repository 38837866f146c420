//! What can be wrong with a GGUF file or its destination.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::runtime::failure::{Classified, Exit};

/// Why a GGUF file was not converted. Nothing of the destination was changed.
#[derive(Debug, Error)]
pub enum Error {
    /// The operating system refused.
    #[error("{file}: cannot {action}: {source}")]
    Io {
        /// The file or folder.
        file: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The first four bytes are not `GGUF`.
    #[error(
        "{file}: not a GGUF file: it starts with bytes {found:02x?}, not with \"GGUF\"; give the .gguf file itself"
    )]
    Magic {
        /// The file.
        file: PathBuf,
        /// Its first four bytes.
        found: [u8; 4],
    },
    /// Neither version 2 nor 3.
    #[error("{file}: GGUF version {version} cannot be read, only 2 and 3; convert it anew with a current llama.cpp")]
    Version {
        /// The file.
        file: PathBuf,
        /// The version it states.
        version: u32,
    },
    /// The file ends inside something.
    #[error(
        "{file}: truncated: {what} at byte {offset} needs {needed} bytes, but the file ends after {bytes}; \
         fetch it again"
    )]
    Truncated {
        /// The file.
        file: PathBuf,
        /// What was being read.
        what: String,
        /// Where it starts.
        offset: u64,
        /// How many bytes it needs.
        needed: u64,
        /// Length of the file.
        bytes: u64,
    },
    /// A tensor's bytes do not lie within the file.
    #[error(
        "{file}: tensor {tensor} lies outside the file: bytes {start} to {end} of {bytes}; the file is truncated or \
         damaged, fetch it again"
    )]
    Outside {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its first byte.
        start: u64,
        /// One past its last byte.
        end: u64,
        /// Length of the file.
        bytes: u64,
    },
    /// A text in the header is not UTF-8.
    #[error("{file}: {what} at byte {offset} is not UTF-8; the file is damaged, fetch it again")]
    Text {
        /// The file.
        file: PathBuf,
        /// What was being read.
        what: String,
        /// Where it starts.
        offset: u64,
    },
    /// A header field has a value that the format does not allow.
    #[error("{file}: {what} is {found}, which GGUF does not allow ({allowed}); the file is damaged, fetch it again")]
    Header {
        /// The file.
        file: PathBuf,
        /// The field.
        what: String,
        /// Its value.
        found: u64,
        /// What it may be.
        allowed: &'static str,
    },
    /// A key or tensor name stands twice.
    #[error("{file}: {name} stands twice in the header; the file is damaged, fetch it again")]
    Twice {
        /// The file.
        file: PathBuf,
        /// The key or tensor name.
        name: String,
    },
    /// A key that the conversion needs is absent.
    #[error("{file}: key {key} is missing; the file was written by an incomplete converter")]
    KeyMissing {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
    },
    /// A key has a value that the conversion cannot use.
    #[error("{file}: key {key} is {found}, wanted {wanted}")]
    Key {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What can be converted.
        wanted: String,
    },
    /// A quantisation without a formula here.
    #[error(
        "{file}: tensor {tensor} is stored as {found}; convertible are {known}; quantise it anew, for example to Q8_0"
    )]
    Quantisation {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Name or number of the stored type.
        found: String,
        /// The types that can be read.
        known: String,
    },
    /// A row is not a whole number of blocks.
    #[error("{file}: tensor {tensor} has rows of {row} values, no multiple of the {block} values of a {kind} block")]
    Blocks {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Values in a row.
        row: u64,
        /// Values in a block.
        block: u64,
        /// The quantisation.
        kind: &'static str,
    },
    /// A tensor of the architecture is absent.
    #[error("{file}: tensor {tensor} is missing: {layers} layers of llama need it")]
    TensorMissing {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Layers that the header states.
        layers: u64,
    },
    /// A tensor that llama does not have.
    #[error("{file}: tensor {tensor} has no place in a llama model of {layers} layers; it would be lost")]
    TensorUnknown {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Layers that the header states.
        layers: u64,
    },
    /// A tensor has another shape than the header's numbers imply.
    #[error("{file}: tensor {tensor} has shape {found:?}, the header's numbers imply {wanted:?} (innermost first)")]
    Shape {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dimensions, innermost first.
        found: Vec<u64>,
        /// The implied dimensions, innermost first.
        wanted: Vec<u64>,
    },
    /// A weight is NaN or infinite.
    #[error("{file}: tensor {tensor} holds {value} at element {index}; the file is damaged, fetch it again")]
    NotFinite {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The element, row-major as stored.
        index: u64,
        /// NaN or an infinity.
        value: f32,
    },
    /// Long-context factors that are not the known llama3 rule.
    #[error(
        "{file}: tensor rope_freqs.weight is not the llama3 rule: entry {index} is {found}, factor {factor} implies \
         {wanted}"
    )]
    RopeFactors {
        /// The file.
        file: PathBuf,
        /// The first entry that differs.
        index: usize,
        /// Its value.
        found: f32,
        /// The value of the rule.
        wanted: f32,
        /// The largest entry, taken as the rule's factor.
        factor: f32,
    },
    /// A merge rule is not two pieces, or names a piece that the vocabulary lacks.
    #[error("{file}: tokenizer.ggml.merges[{index}] is {merge:?}, not two tokens whose union is a token")]
    Merge {
        /// The file.
        file: PathBuf,
        /// Which rule.
        index: usize,
        /// Its text.
        merge: String,
    },
    /// The written tokenizer does not load.
    #[error("{file}: its tokenizer cannot be used: {reason}")]
    Tokenizer {
        /// The GGUF file.
        file: PathBuf,
        /// The tokenizer library's reason.
        reason: String,
    },
    /// The destination holds something that is not ours to replace.
    #[error(
        "{destination} exists and is not an earlier conversion; name another folder, or replace it with --force \
         (everything in it will be lost)"
    )]
    Exists {
        /// The destination.
        destination: PathBuf,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Exists { .. } => Exit::Config,
            _ => Exit::Data,
        }
    }
}
