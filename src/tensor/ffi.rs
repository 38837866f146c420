//! What every part of the C++ boundary needs: tensors as pointers, and error messages.

use std::ffi::{c_char, c_int};

use tch::Tensor;

use super::Error;

/// An `at::Tensor` of C++; `tch` keeps one behind every `Tensor`.
#[repr(C)]
#[allow(non_camel_case_types)]
pub(super) struct torch_tensor {
    _opaque: [u8; 0],
}

/// The C++ tensor of a `Tensor`, valid as long as the `Tensor` lives.
pub(super) fn raw(tensor: &Tensor) -> *mut torch_tensor {
    tensor.as_ptr().cast_mut().cast()
}

/// Calls `work` with a buffer for an error message. A status other than 0 becomes an error with the first line of the
/// message.
pub(super) fn call(operation: &'static str, work: impl FnOnce(*mut c_char, usize) -> c_int) -> Result<(), Error> {
    let mut message = vec![0u8; 2048];
    if work(message.as_mut_ptr().cast(), message.len()) == 0 {
        return Ok(());
    }
    let end = message.iter().position(|&byte| byte == 0).unwrap_or(message.len());
    let message = String::from_utf8_lossy(&message[..end]).lines().next().unwrap_or_default().to_owned();
    Err(Error::Torch { operation, message })
}
