//! model.safetensors: the tensors of the GGUF file under their HF names.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::error::Error;
use super::gguf::Gguf;
use super::llama::MappedTensor;
use super::options::Weights;
use crate::runtime::file_error::FileError;
use crate::runtime::units::{Bytes, as_index, from_index};

/// Most values of a band; 16 MiB as float32.
const BAND_VALUES: u64 = 1 << 22;

/// Writes model.safetensors with one band of values in memory at a time; returns its length.
pub(super) fn write_weights(
    gguf: &Gguf,
    tensors: &[MappedTensor],
    weights: Weights,
    path: &Path,
) -> Result<Bytes, Error> {
    let io = FileError::at(path, "write the weights");
    let (dtype, value_bytes) = match weights {
        Weights::Float32 => (Dtype::F32, 4),
        Weights::Bfloat16 => (Dtype::BF16, 2),
    };
    let mut end = 0;
    let mut table = Vec::new();
    for tensor in tensors {
        let start = end;
        end += as_index(tensor.shape.iter().product::<u64>()) * value_bytes;
        let shape = tensor.shape.iter().copied().map(as_index).collect();
        table.push((tensor.name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) }));
    }
    let about = std::iter::once(("format".to_owned(), "pt".to_owned())).collect();
    let header = Metadata::new(Some(about), table).map_err(|cause| io(std::io::Error::other(cause)))?;
    let mut header = serde_json::to_vec(&header).map_err(|cause| io(cause.into()))?;
    header.resize(header.len().next_multiple_of(8), b' ');

    let mut out = BufWriter::new(File::create(path).map_err(&io)?);
    out.write_all(&from_index(header.len()).to_le_bytes()).map_err(&io)?;
    out.write_all(&header).map_err(&io)?;
    for tensor in tensors {
        for_each_band(gguf, tensor, weights, |bytes| Ok(out.write_all(bytes).map_err(&io)?))?;
    }
    let file = out.into_inner().map_err(|cause| io(cause.into_error()))?;
    file.sync_all().map_err(&io)?;
    Ok(Bytes(from_index(8 + header.len() + end)))
}

/// Passes the bytes of one tensor to `write`, a band of whole rows (or whole heads) at a time.
fn for_each_band(
    gguf: &Gguf,
    tensor: &MappedTensor,
    weights: Weights,
    mut write: impl FnMut(&[u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    let stored = tensor.stored;
    // A bias is one stored row; each of its values counts as a row here, because q and k reorder them.
    let bias = tensor.shape.len() == 1;
    let (rows, width) = if bias { (stored.width(), 1) } else { (stored.rows(), stored.width()) };
    let unit = tensor.interleaved.unwrap_or(1);
    let band = if bias { rows } else { (BAND_VALUES / width / unit).max(1) * unit };
    let mut bytes = Vec::new();
    for first in (0..rows).step_by(as_index(band)) {
        let count = band.min(rows - first);
        let values = if bias { gguf.rows(stored, 0, 1)? } else { gguf.rows(stored, first, count)? };
        bytes.clear();
        for row in 0..count {
            let row = tensor.interleaved.map_or(row, |head_dim| stored_row(row, head_dim));
            for value in &values[as_index(row * width)..][..as_index(width)] {
                match weights {
                    Weights::Float32 => bytes.extend_from_slice(&value.to_le_bytes()),
                    Weights::Bfloat16 => bytes.extend_from_slice(&bf16::from_f32(*value).to_le_bytes()),
                }
            }
        }
        write(&bytes)?;
    }
    Ok(())
}

/// The row in the file of row `row` of HF's q or k.
///
/// HF rotates dimension i with i + `head_dim`/2, llama.cpp rotates neighbours: the file interleaves the two halves of each
/// of HF's heads.
fn stored_row(row: u64, head_dim: u64) -> u64 {
    let (head, within) = (row / head_dim, row % head_dim);
    let (half, pair) = (within / (head_dim / 2), within % (head_dim / 2));
    head * head_dim + 2 * pair + half
}
