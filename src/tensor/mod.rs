//! The libtorch boundary: what `tch` binds is used directly, the rest goes through a few C++ files.
//!
//! `unsafe` is permitted here and in `world` only.

#![expect(unsafe_code, reason = "calls into libtorch, CUDA and NCCL")]

pub mod attention;
pub mod boundary;
pub mod bytes;
pub mod decode;
pub mod delta;
mod ffi;
pub mod fused;
pub mod gpu;
pub mod kernels;
pub mod link;
pub mod selection;
pub mod selection_kernel;
pub mod stored;
pub mod views;

use tch::Kind;

use crate::runtime::failure::{Classified, Exit, out_of_memory};

/// Errors of the libtorch boundary.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// libtorch or CUDA refused an operation.
    #[error("libtorch refused {operation}: {message}")]
    Torch {
        /// The operation, as a noun phrase.
        operation: &'static str,
        /// The first line of its message.
        message: String,
    },
    /// Bytes and tensor differ in size.
    #[error("{bytes} bytes cannot fill a tensor of {wanted} bytes")]
    Size {
        /// Number of bytes given.
        bytes: u64,
        /// Number of bytes of the tensor.
        wanted: u64,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Torch { message, .. } if out_of_memory(message) => Exit::DoesNotFit,
            _ => Exit::Bug,
        }
    }
}

/// The dtype of sums over values of dtype `kind`: max(float32, `kind`).
#[must_use]
pub fn accumulation(kind: Kind) -> Kind {
    match kind {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}

/// Bytes of one element.
///
/// # Panics
/// For dtypes that no tensor of longstraw has.
#[must_use]
pub fn element_bytes(kind: Kind) -> u64 {
    match kind {
        Kind::Double | Kind::Int64 => 8,
        Kind::Float | Kind::Int => 4,
        Kind::BFloat16 | Kind::Half => 2,
        Kind::Bool | Kind::Uint8 | Kind::Int8 => 1,
        other => unreachable!("longstraw makes no tensor of {other:?}"),
    }
}
