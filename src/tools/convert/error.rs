//! What can be wrong with a GGUF file or its destination.

use std::path::PathBuf;

use thiserror::Error;

use crate::runtime::failure::{Classified, Exit};
use crate::runtime::file_error::FileError;

/// Why a GGUF file was not converted. The destination is unchanged.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say what each variant and field means")]
pub enum Error {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "{file}: not a GGUF file: it starts with bytes {found:02x?}, not with \"GGUF\"; give the .gguf file itself"
    )]
    Magic { file: PathBuf, found: [u8; 4] },
    #[error("{file}: GGUF version {version} cannot be read, only 2 and 3; convert it anew with a current llama.cpp")]
    Version { file: PathBuf, version: u32 },
    #[error(
        "{file}: truncated: {what} at byte {offset} needs {needed} bytes, but the file ends after {bytes}; \
         fetch it again"
    )]
    Truncated { file: PathBuf, what: String, offset: u64, needed: u64, bytes: u64 },
    #[error(
        "{file}: tensor {tensor} lies outside the file: bytes {start} to {end} of {bytes}; the file is truncated or \
         damaged, fetch it again"
    )]
    Outside { file: PathBuf, tensor: String, start: u64, end: u64, bytes: u64 },
    #[error("{file}: {what} at byte {offset} is not UTF-8; the file is damaged, fetch it again")]
    Text { file: PathBuf, what: String, offset: u64 },
    #[error("{file}: {what} is {found}, GGUF allows {allowed}; the file is damaged, fetch it again")]
    Header { file: PathBuf, what: String, found: u64, allowed: &'static str },
    #[error("{file}: {name} appears twice in the header; the file is damaged, fetch it again")]
    Twice { file: PathBuf, name: String },
    #[error("{file}: key {key} is missing; the file was written by an incomplete converter")]
    KeyMissing { file: PathBuf, key: String },
    #[error("{file}: key {key} is {found}, wanted {wanted}")]
    Key { file: PathBuf, key: String, found: String, wanted: String },
    #[error(
        "{file}: tensor {tensor} is stored as {found}; convertible are {known}; quantise it anew, for example to Q8_0"
    )]
    Quantisation { file: PathBuf, tensor: String, found: String, known: String },
    #[error("{file}: tensor {tensor} has rows of {row} values, no multiple of the {block} values of a {kind} block")]
    Blocks { file: PathBuf, tensor: String, row: u64, block: u64, kind: &'static str },
    #[error("{file}: tensor {tensor} is missing: {layers} layers of llama need it")]
    TensorMissing { file: PathBuf, tensor: String, layers: u64 },
    #[error("{file}: tensor {tensor} has no place in a llama model of {layers} layers; it would be lost")]
    TensorUnknown { file: PathBuf, tensor: String, layers: u64 },
    #[error("{file}: tensor {tensor} has shape {found:?}, the header's numbers imply {wanted:?} (innermost first)")]
    Shape { file: PathBuf, tensor: String, found: Vec<u64>, wanted: Vec<u64> },
    #[error("{file}: tensor {tensor} has {value} at element {index}; the file is damaged, fetch it again")]
    NotFinite { file: PathBuf, tensor: String, index: u64, value: f32 },
    #[error(
        "{file}: tensor rope_freqs.weight is not the llama3 rule: entry {index} is {found}, factor {factor} implies \
         {wanted}"
    )]
    RopeFactors { file: PathBuf, index: usize, found: f32, wanted: f32, factor: f32 },
    #[error("{file}: tokenizer.ggml.merges[{index}] is {merge:?}, not two tokens whose union is a token")]
    Merge { file: PathBuf, index: usize, merge: String },
    #[error("{file}: its tokenizer cannot be used: {reason}")]
    Tokenizer { file: PathBuf, reason: String },
    #[error(
        "{destination} exists and is not an earlier conversion; name another folder, or replace it with --force \
         (everything in it will be lost)"
    )]
    Exists { destination: PathBuf },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Exists { .. } => Exit::Config,
            _ => Exit::Data,
        }
    }
}
