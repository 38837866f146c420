//! Bytes of a file as tensor values: memory maps, and filling a tensor from borrowed bytes without a second copy.

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;
use tch::{Device, Kind, TchError, Tensor};

use crate::runtime::failure::{Classified, Exit};
use crate::runtime::units::{as_dim, as_index, from_dim, from_index};

/// Elements that pass through an aligned buffer at once when a map is unaligned: 8 MiB of float64 at most.
const UNALIGNED_ELEMENTS_MAX: usize = 1 << 20;

/// Errors of filling a tensor from bytes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The bytes are fewer or more than the tensor's elements take.
    #[error("{found} bytes for a tensor of {elements} {kind:?} elements, which take {wanted}")]
    Length {
        /// Elements of the target.
        elements: u64,
        /// Dtype of the bytes.
        kind: Kind,
        /// Bytes that the elements take.
        wanted: u64,
        /// Number of bytes given.
        found: u64,
    },
    /// libtorch refused the copy.
    #[error("libtorch could not copy the values: {0}")]
    Torch(#[from] TchError),
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Length { .. } => Exit::Data,
            Error::Torch(_) => Exit::DoesNotFit,
        }
    }
}

/// A read-only memory map of the whole file.
///
/// The file must stay as it is while it is mapped: another process that shortens it ends this one by a bus error.
/// Weights are read once at the start, and the map is dropped as soon as its tensors are filled.
///
/// # Errors
/// When the file cannot be opened or mapped.
pub fn map_file(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: the map is read-only and private to the reader; that no one rewrites a checkpoint while it is being read
    // is the documented condition of this function, the same as for every reader of memory-mapped weights.
    unsafe { Mmap::map(&file) }
}

/// Fills `target` (contiguous, any shape, dtype and device, no gradient) with `bytes`: little-endian values of dtype
/// `kind` in row-major order, converted to the target's dtype on the way.
///
/// The bytes are read where they lie, so no second copy of the tensor exists in host memory; a map whose tensors are
/// not aligned to their element size goes through a bounded buffer.
///
/// # Errors
/// When the number of bytes does not fit the target, or libtorch refuses (no memory on the target's device).
///
/// # Panics
/// When `target` is not contiguous.
pub fn fill_from_bytes(target: &mut Tensor, bytes: &[u8], kind: Kind) -> Result<(), Error> {
    assert!(target.is_contiguous(), "a tensor is filled where its elements lie in row-major order");
    let elements = target.numel();
    let element_bytes = kind.elt_size_in_bytes();
    let wanted = elements * element_bytes;
    if bytes.len() != wanted {
        return Err(Error::Length {
            elements: from_index(elements),
            kind,
            wanted: from_index(wanted),
            found: from_index(bytes.len()),
        });
    }
    if elements == 0 {
        return Ok(());
    }
    let mut flat = target.f_view([-1])?;
    if bytes.as_ptr().addr().is_multiple_of(element_bytes) {
        let length = as_dim(from_index(elements));
        // SAFETY: the pointer is aligned to the element, the blob's `elements` elements are exactly the borrowed bytes,
        // and the tensor over them is only read, inside this call, while the borrow lasts.
        let source = unsafe { Tensor::f_from_blob(bytes.as_ptr(), &[length], &[1], kind, Device::Cpu)? };
        flat.f_copy_(&source)?;
        return Ok(());
    }
    let mut start = 0;
    for chunk in bytes.chunks(UNALIGNED_ELEMENTS_MAX * element_bytes) {
        let length = as_dim(from_index(chunk.len() / element_bytes));
        let source = Tensor::f_from_data_size(chunk, &[length], kind)?;
        flat.f_narrow(0, start, length)?.f_copy_(&source)?;
        start += length;
    }
    Ok(())
}

/// The values of `tensor` as little-endian bytes in row-major order, in its own dtype, from whichever device.
///
/// # Errors
/// When libtorch cannot make the contiguous copy in host memory.
pub fn bytes_of(tensor: &Tensor) -> Result<Vec<u8>, Error> {
    let host = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
    let elements = host.numel();
    let mut bytes = vec![0; as_index(from_index(elements) * from_index(host.kind().elt_size_in_bytes()))];
    debug_assert_eq!(from_dim(host.size().iter().product()), from_index(elements));
    host.f_copy_data_u8(&mut bytes, elements)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn aligned_and_unaligned_bytes_give_the_same_values() {
        let count = UNALIGNED_ELEMENTS_MAX + 3;
        let values: Vec<f32> = (0..1_048_579_u32).map(|i| f32::from_bits(0x3f00_0000 + i)).collect();
        assert_eq!(values.len(), count);
        let plain = bytes(&values);
        for offset in 0..4 {
            let mut shifted = vec![0; offset];
            shifted.extend_from_slice(&plain);
            let mut target = Tensor::empty([as_dim(from_index(count))], (Kind::Float, Device::Cpu));
            fill_from_bytes(&mut target, &shifted[offset..], Kind::Float).unwrap();
            assert_eq!(bytes_of(&target).unwrap(), plain, "offset {offset}");
        }
    }

    #[test]
    fn values_are_converted_to_the_target_dtype() {
        let mut target = Tensor::empty([2, 2], (Kind::Double, Device::Cpu));
        fill_from_bytes(&mut target, &bytes(&[1.0, -2.5, 0.0, 3.25]), Kind::Float).unwrap();
        assert_eq!(Vec::<Vec<f64>>::try_from(&target).unwrap(), [[1.0, -2.5], [0.0, 3.25]]);
    }

    #[test]
    fn a_wrong_number_of_bytes_is_refused_with_both_numbers() {
        let mut target = Tensor::empty([3], (Kind::Float, Device::Cpu));
        let error = fill_from_bytes(&mut target, &[0; 8], Kind::Float).unwrap_err();
        assert_eq!(error.to_string(), "8 bytes for a tensor of 3 Float elements, which take 12");
        assert_eq!(error.exit(), Exit::Data);
    }

    #[test]
    fn an_empty_tensor_takes_no_bytes() {
        let mut target = Tensor::empty([0, 4], (Kind::Float, Device::Cpu));
        fill_from_bytes(&mut target, &[], Kind::Float).unwrap();
        assert!(bytes_of(&target).unwrap().is_empty());
    }
}
