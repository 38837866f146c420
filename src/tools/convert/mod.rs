//! `convert`: a GGUF file with its tokenizer → an HF folder.
//!
//! The file is read once, a band of rows at a time. Weights become float32 or bfloat16 under their HF names, with the rows
//! of q and k in HF's order. All files go into a temporary folder next to the destination, which is renamed at the end:
//! the destination is never half-written.

mod blocks;
mod error;
mod folder;
mod gguf;
mod llama;
mod options;
mod vocabulary;
mod weights;

use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

pub use error::Error;
use folder::Folder;
use gguf::Gguf;
use llama::Shape;
pub use options::{Options, Splits, Weights};
use vocabulary::Files;
use weights::write_weights;

use crate::data::Tokenizer;
use crate::runtime::units::{Bytes, from_index};

/// Counts of a conversion.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Summary {
    /// The HF folder.
    pub destination: PathBuf,
    pub layers: u64,
    pub tensors: u64,
    /// Weights in all.
    pub parameters: u64,
    /// Size of model.safetensors.
    pub bytes: Bytes,
    /// Tokens of the vocabulary.
    pub vocabulary: u64,
}

/// Converts the GGUF file `source` into the HF folder `destination`.
///
/// # Errors
/// When the file is not a readable llama GGUF, or a file cannot be written (exit 3); when `destination` exists and may not
/// be replaced (exit 2). The destination is then unchanged.
pub fn convert(source: &Path, destination: &Path, options: &Options) -> Result<Summary, Error> {
    let folder = Folder::beside(destination, options.force)?;
    let gguf = Gguf::open(source)?;
    let shape = Shape::read(&gguf)?;
    let tensors = shape.tensors(&gguf)?;
    let config = shape.config(&gguf, options.weights)?;
    let files = Files::read(&gguf, options.splits)?;
    for (name, json) in [
        ("config.json", &config),
        ("tokenizer.json", &files.tokenizer),
        ("tokenizer_config.json", &files.tokenizer_config),
        ("special_tokens_map.json", &files.special_tokens),
        ("generation_config.json", &files.generation),
        (folder::MARK, &mark(&gguf, options.weights)),
    ] {
        folder.write(name, json)?;
    }
    let tokenizer = Tokenizer::open(&folder.path())
        .map_err(|cause| Error::Tokenizer { file: source.to_owned(), reason: cause.to_string() })?;
    let bytes = write_weights(&gguf, &tensors, options.weights, &folder.path().join("model.safetensors"))?;
    let summary = Summary {
        destination: destination.to_owned(),
        layers: shape.layers,
        tensors: from_index(tensors.len()),
        parameters: tensors.iter().map(|tensor| tensor.shape.iter().product::<u64>()).sum(),
        bytes,
        vocabulary: tokenizer.vocabulary(),
    };
    folder.publish()?;
    Ok(summary)
}

/// The content of the file that lets a later conversion replace the folder.
fn mark(gguf: &Gguf, weights: Weights) -> Json {
    let name = gguf.path.file_name().map(|name| name.to_string_lossy().into_owned());
    json!({ "source": name, "source_bytes": gguf.bytes, "weights": weights.name(), "by": env!("CARGO_PKG_NAME") })
}

#[cfg(test)]
mod tests;
