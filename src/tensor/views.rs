//! Tensors as bytes, for messages between ranks.

use tch::{Device, Tensor};

use super::{Error, element_bytes};
use crate::runtime::units::from_index;

/// The bytes of a contiguous CPU tensor, in its own memory.
///
/// # Panics
/// When the tensor is on another device or not contiguous.
#[must_use]
pub fn view(tensor: &Tensor) -> &[u8] {
    assert!(tensor.device() == Device::Cpu && tensor.is_contiguous(), "bytes of a contiguous CPU tensor");
    let length = tensor.numel() * usize::try_from(element_bytes(tensor.kind())).unwrap_or(0);
    if length == 0 {
        return &[];
    }
    // SAFETY: a contiguous tensor has `numel` elements from its data pointer on, and it is borrowed for as long as the
    // slice lives.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), length) }
}

/// The bytes of a contiguous CPU tensor, to be written.
///
/// # Panics
/// As [`view`].
#[must_use]
pub fn view_mut(tensor: &mut Tensor) -> &mut [u8] {
    assert!(tensor.device() == Device::Cpu && tensor.is_contiguous(), "bytes of a contiguous CPU tensor");
    let length = tensor.numel() * usize::try_from(element_bytes(tensor.kind())).unwrap_or(0);
    if length == 0 {
        return &mut [];
    }
    // SAFETY: as in `view`; the tensor is borrowed mutably, so no other slice of it is alive.
    unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<u8>(), length) }
}

/// Copies `bytes` over a contiguous CPU tensor of the same size.
///
/// # Errors
/// When the sizes differ.
pub fn fill(tensor: &mut Tensor, bytes: &[u8]) -> Result<(), Error> {
    let target = view_mut(tensor);
    if target.len() != bytes.len() {
        return Err(Error::Size { bytes: from_index(bytes.len()), wanted: from_index(target.len()) });
    }
    target.copy_from_slice(bytes);
    Ok(())
}
