//! What can be wrong with the values of a checkpoint.

use std::path::PathBuf;

use tch::{Device, Kind};

use crate::model::shards;
use crate::model::spec::{EMBEDDING, Expected, HEAD};
use crate::runtime::failure::{Classified, Exit};
use crate::tensor::bytes;

/// Tensors that one message lists; further ones are counted.
const LISTED_MAX: usize = 8;

/// A tensor that holds NaN or infinite values.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "the names say everything")]
pub struct NotFinite {
    pub name: String,
    pub file: String,
    pub nan: u64,
    pub infinite: u64,
    pub elements: u64,
    pub first: Vec<u64>,
}

/// A tensor that holds nothing but zeros.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "the names say everything")]
pub struct AllZero {
    pub name: String,
    pub file: String,
    pub shape: Vec<u64>,
}

/// Why weights could not be had.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each is")]
pub enum Error {
    #[error(transparent)]
    Checkpoint(#[from] shards::Error),
    #[error("{}: {}; the checkpoint is damaged, or its values exceed dtype {kind:?}", folder.display(), list(tensors, describe))]
    NotFinite { folder: PathBuf, kind: Kind, tensors: Vec<NotFinite> },
    #[error(
        "{}: {}; the checkpoint is damaged or was never filled; fetch it again, or set model.allow_zero_weights = true for \
         a model that means it",
        folder.display(),
        list(tensors, describe_zero)
    )]
    AllZero { folder: PathBuf, tensors: Vec<AllZero> },
    #[error("{}: {source}", file.display())]
    Unreadable { file: PathBuf, source: std::io::Error },
    #[error(
        "{}: {HEAD} differs from {EMBEDDING}, but the config says `tie_word_embeddings` true; correct the one or the other",
        folder.display()
    )]
    HeadNotTied { folder: PathBuf },
    #[error(
        "{}: model.weights = \"fp8\" asks for weights as an fp8 checkpoint holds them, and this one holds none; take the \
         model's fp8 checkpoint, or set model.weights = \"checkpoint\"",
        folder.display()
    )]
    NoFp8 { folder: PathBuf },
    #[error("{name} {shape:?} as {kind:?} on {device:?}: {source}")]
    Tensor { name: String, shape: Vec<u64>, kind: Kind, device: Device, source: Box<bytes::Error> },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Checkpoint(inner) => inner.exit(),
            Error::NoFp8 { .. } => Exit::Config,
            Error::NotFinite { .. } | Error::AllZero { .. } | Error::HeadNotTied { .. } | Error::Unreadable { .. } => {
                Exit::Data
            }
            Error::Tensor { source, .. } => source.exit(),
        }
    }
}

/// The error of a tensor that libtorch could not create or fill.
pub(super) fn failed(expected: &Expected, kind: Kind, device: Device, source: bytes::Error) -> Error {
    let (name, shape) = (expected.name.clone(), expected.shape.clone());
    Error::Tensor { name, shape, kind, device, source: Box::new(source) }
}

fn list<T>(tensors: &[T], describe: impl Fn(&T) -> String) -> String {
    let mut parts: Vec<String> = tensors.iter().take(LISTED_MAX).map(describe).collect();
    if tensors.len() > LISTED_MAX {
        parts.push(format!("and {} more tensors", tensors.len() - LISTED_MAX));
    }
    parts.join("; ")
}

fn describe(one: &NotFinite) -> String {
    format!(
        "{}: {} has {} NaN and {} infinite of {} values, the first at {:?}",
        one.file, one.name, one.nan, one.infinite, one.elements, one.first
    )
}

fn describe_zero(one: &AllZero) -> String {
    format!("{}: {} {:?} is all zero", one.file, one.name, one.shape)
}
