//! What can be wrong with the files of a checkpoint.

use std::io;
use std::path::PathBuf;

use crate::model::problems::Problems;
use crate::model::spec::HEAD;
use crate::runtime::failure::{Classified, Exit};

/// The file of a checkpoint in one piece.
pub const SINGLE: &str = "model.safetensors";
/// The index of a checkpoint in several pieces.
pub const INDEX: &str = "model.safetensors.index.json";

/// One thing that is wrong with a checkpoint.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each is")]
pub enum Problem {
    #[error("{name} {shape:?} is missing")]
    Missing { name: String, shape: Vec<u64> },
    #[error("{file}: {name} {shape:?} is not part of this model")]
    Extra { file: String, name: String, shape: Vec<u64> },
    #[error("{file}: {name} is {found:?}, the config asks for {wanted:?}")]
    Shape { file: String, name: String, found: Vec<u64>, wanted: Vec<u64> },
    #[error(
        "{file}: {name} is {dtype}; longstraw reads F32, F16, BF16 and F64, and matrices of F8_E4M3 with factors of F32, BF16 or F16 \
         (convert other quantised weights first)"
    )]
    Dtype { file: String, name: String, dtype: String },
    #[error("{name} stands both in {first} and in {second}")]
    Twice { name: String, first: String, second: String },
    #[error("{file} is not there, but the index places {tensors} tensors in it ({first} and so on)")]
    AbsentShard { file: String, tensors: usize, first: String },
    #[error("{file} lacks {name}, which the index places there")]
    Misplaced { file: String, name: String },
    #[error("the index places {name} in {place}; it must be the name of a file beside the index")]
    Place { name: String, place: String },
    #[error(
        "{file}: holds {found} layers and the config asks for {layers} ({first} would not be read); set \
         `num_hidden_layers` to {found}, or save a checkpoint of {layers} layers"
    )]
    MoreLayers { file: String, layers: usize, found: usize, first: String },
    #[error(
        "{HEAD} {shape:?} is missing, and the config does not say that the head is the embedding; add the tensor, or set \
         `tie_word_embeddings` to true"
    )]
    NoHead { shape: Vec<u64> },
    #[error(
        "layer {layer} chooses its keys, but {names} are missing; take the checkpoint that belongs to the config, or say in \
         the config's `indexer_types` that the layer is \"shared\" (absent, `index_topk_pattern` or `index_topk_freq` say \
         which layers choose)"
    )]
    NoIndex { layer: usize, names: String },
    #[error(
        "{file}: {weight} is fp8, but its factors {scales} {shape:?} are missing; longstraw reads fp8 in blocks of 128 by 128 \
         with a float32 factor each (convert other forms first)"
    )]
    NoScales { file: String, weight: String, scales: String, shape: Vec<u64> },
    #[error("{fp8} is fp8 and {other} is not; the experts of a layer must be stored alike")]
    MixedExperts { fp8: String, other: String },
    #[error(
        "the experts of a layer stand twice: joined in {joined}, and one by one ({single} and so on); remove the one"
    )]
    ExpertsTwice { joined: String, single: String },
}

/// What is wrong inside one safetensors file.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each is")]
pub enum Damage {
    #[error("the file has {found} bytes; a safetensors file begins with 8 bytes that say how long its header is")]
    NoHeader { found: u64 },
    #[error("the header should take {wanted} bytes, but the file has {found}; it is truncated or no safetensors file")]
    HeaderBeyondEnd { wanted: u64, found: u64 },
    #[error(
        "the header describes {wanted} bytes, but the file has {found}; it is truncated or damaged, fetch it again"
    )]
    Length { wanted: u64, found: u64 },
    #[error("the header is damaged: {0}; fetch the file again")]
    Header(safetensors::SafeTensorError),
}

/// Why the files of a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each is")]
pub enum Error {
    #[error("{}: there is neither {SINGLE} nor {INDEX}; weights are read from safetensors only{hint}", folder.display())]
    NoWeights { folder: PathBuf, hint: &'static str },
    #[error(
        "{}: both {SINGLE} and the shards of {INDEX} hold weights ({shards} files, the first is {first}); move the one \
         that is not meant out of the folder",
        folder.display()
    )]
    TwoCheckpoints { folder: PathBuf, shards: usize, first: String },
    #[error("{}: {source}", file.display())]
    Unreadable { file: PathBuf, source: io::Error },
    #[error("{}: no index of weights: {reason}", file.display())]
    Index { file: PathBuf, reason: String },
    #[error("{}: {damage}", file.display())]
    Damaged { file: PathBuf, damage: Damage },
    #[error("{}: {problems}", folder.display())]
    Refused { folder: PathBuf, problems: Problems<Problem> },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        Exit::Data
    }
}
