//! `convert`: a GGUF file with its tokenizer → an HF folder.
//!
//! The file is read once, a band of rows at a time; weights become float32 (or bfloat16) under their HF names, with the
//! q and k rows back in HF's order. All files are written into a temporary folder beside the destination, which is
//! renamed at the end, so that nothing half-written remains under the destination's name.

mod blocks;
mod error;
mod folder;
mod gguf;
mod llama;
mod vocabulary;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Value as Json, json};

pub use error::Error;
use folder::Folder;
use gguf::Gguf;
use llama::{Move, Shape};
use vocabulary::Files;

use crate::data::Tokenizer;
use crate::runtime::units::{Bytes, as_index, from_index};

/// Most values of a band; 16 MiB as float32.
const BAND_VALUES: u64 = 1 << 22;

/// The dtype of the written weights.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Weights {
    /// float32: every stored value exactly.
    #[default]
    Float32,
    /// bfloat16, rounded to nearest even: half the size.
    Bfloat16,
}

impl Weights {
    /// The name in config.json.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Weights::Float32 => "float32",
            Weights::Bfloat16 => "bfloat16",
        }
    }
}

/// Which text-cutting rule is written where transformers' loading of a GGUF departs from the model's own tokenizer.
///
/// It does for two families: `smollm` (the model was trained with every digit cut apart first, so spaces before a number
/// stay together) and `llama-bpe` (whole words of the vocabulary win over merges).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Splits {
    /// The same ids as transformers gives for the GGUF file.
    #[default]
    AsTransformers,
    /// The same ids as the model saw in training.
    AsTrained,
}

/// How to convert.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The dtype of the written weights.
    pub weights: Weights,
    /// Which text-cutting rule is written.
    pub splits: Splits,
    /// Replace a destination that is no earlier conversion.
    pub force: bool,
}

/// What was written.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Summary {
    /// The HF folder.
    pub destination: PathBuf,
    /// Decoder layers.
    pub layers: u64,
    /// Weight tensors.
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
/// When the file is not a readable llama GGUF (exit 3), when `destination` exists and may not be replaced (exit 2), or
/// when the disk refuses; the destination is then as it was.
pub fn convert(source: &Path, destination: &Path, options: &Options) -> Result<Summary, Error> {
    let folder = Folder::beside(destination, options.force)?;
    let gguf = Gguf::open(source)?;
    let shape = Shape::read(&gguf)?;
    let moves = shape.moves(&gguf)?;
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
    let bytes = write_weights(&gguf, &moves, options.weights, &folder.path().join("model.safetensors"))?;
    let summary = Summary {
        destination: destination.to_owned(),
        layers: shape.layers(),
        tensors: from_index(moves.len()),
        parameters: moves.iter().map(|entry| entry.shape.iter().product::<u64>()).sum(),
        bytes,
        vocabulary: tokenizer.vocabulary(),
    };
    folder.put()?;
    Ok(summary)
}

/// What marks a folder as a conversion that a later one may replace.
fn mark(gguf: &Gguf, weights: Weights) -> Json {
    let name = gguf.path.file_name().map(|name| name.to_string_lossy().into_owned());
    json!({ "source": name, "source_bytes": gguf.bytes, "weights": weights.name(), "by": env!("CARGO_PKG_NAME") })
}

/// Writes model.safetensors; at most one band of values is held.
fn write_weights(gguf: &Gguf, moves: &[Move], weights: Weights, path: &Path) -> Result<Bytes, Error> {
    let io = |source| Error::Io { file: path.to_owned(), action: "write the weights", source };
    let (dtype, value_bytes) = match weights {
        Weights::Float32 => (Dtype::F32, 4),
        Weights::Bfloat16 => (Dtype::BF16, 2),
    };
    let mut end = 0;
    let mut table = Vec::new();
    for entry in moves {
        let start = end;
        end += as_index(entry.shape.iter().product::<u64>()) * value_bytes;
        let shape = entry.shape.iter().copied().map(as_index).collect();
        table.push((entry.name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) }));
    }
    let about = std::iter::once(("format".to_owned(), "pt".to_owned())).collect();
    let header = Metadata::new(Some(about), table).map_err(|cause| io(std::io::Error::other(cause)))?;
    let mut header = serde_json::to_vec(&header).map_err(|cause| io(cause.into()))?;
    header.resize(header.len().next_multiple_of(8), b' ');

    let mut out = BufWriter::new(File::create(path).map_err(io)?);
    out.write_all(&from_index(header.len()).to_le_bytes()).map_err(io)?;
    out.write_all(&header).map_err(io)?;
    for entry in moves {
        write_tensor(gguf, entry, weights, &mut out).map_err(|cause| cause.unwrap_or_else(io))?;
    }
    let file = out.into_inner().map_err(|cause| io(cause.into_error()))?;
    file.sync_all().map_err(io)?;
    Ok(Bytes(from_index(8 + header.len() + end)))
}

/// Why a tensor was not moved: the source or the target.
enum Stop {
    Read(Error),
    Write(std::io::Error),
}

impl Stop {
    fn unwrap_or_else(self, write: impl FnOnce(std::io::Error) -> Error) -> Error {
        match self {
            Stop::Read(cause) => cause,
            Stop::Write(cause) => write(cause),
        }
    }
}

/// Writes one tensor, a band of whole rows (or whole heads) at a time.
fn write_tensor(gguf: &Gguf, entry: &Move, weights: Weights, out: &mut impl Write) -> Result<(), Stop> {
    // A bias is one stored row whose values play the part of rows.
    let bias = entry.shape.len() == 1;
    let (rows, width) = if bias { (entry.info.width(), 1) } else { (entry.info.rows(), entry.info.width()) };
    let unit = entry.interleaved.unwrap_or(1);
    let band = if bias { rows } else { (BAND_VALUES / width / unit).max(1) * unit };
    let mut bytes = Vec::new();
    for first in (0..rows).step_by(as_index(band)) {
        let count = band.min(rows - first);
        let (from, take) = if bias { (0, 1) } else { (first, count) };
        let values = gguf.rows(entry.info, from, take).map_err(Stop::Read)?;
        bytes.clear();
        for row in 0..count {
            let row = entry.interleaved.map_or(row, |head_dim| stored_row(row, head_dim));
            for value in &values[as_index(row * width)..][..as_index(width)] {
                match weights {
                    Weights::Float32 => bytes.extend_from_slice(&value.to_le_bytes()),
                    Weights::Bfloat16 => bytes.extend_from_slice(&bf16::from_f32(*value).to_le_bytes()),
                }
            }
        }
        out.write_all(&bytes).map_err(Stop::Write)?;
    }
    Ok(())
}

/// Where row `row` of HF's q or k stands in the file.
///
/// HF rotates dimension i with i + `head_dim`/2, llama.cpp rotates neighbours: within a head, the file interleaves HF's two
/// halves.
fn stored_row(row: u64, head_dim: u64) -> u64 {
    let (head, within) = (row / head_dim, row % head_dim);
    let (half, pair) = (within / (head_dim / 2), within % (head_dim / 2));
    head * head_dim + 2 * pair + half
}
