//! Tensors as safetensors files store them.

use std::borrow::Cow;

use safetensors::{Dtype, View};
use tch::{Kind, Tensor};

use super::bytes::{Error, bytes_of};
use crate::runtime::units::{as_index, from_dim};

/// A tensor's values in host memory, in row-major order.
#[derive(Debug)]
pub struct StoredTensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl StoredTensor {
    /// The values of `tensor` in the dtype of masters: float64 if it has that, else float32.
    ///
    /// # Errors
    /// When libtorch cannot make the copy in host memory.
    pub fn master(tensor: &Tensor) -> Result<StoredTensor, Error> {
        match tensor.kind() {
            Kind::Double => Self::new(tensor, Dtype::F64),
            _ => Self::float32(tensor),
        }
    }

    /// The values of `tensor` as float32.
    ///
    /// # Errors
    /// As [`StoredTensor::master`].
    pub fn float32(tensor: &Tensor) -> Result<StoredTensor, Error> {
        Self::new(&tensor.f_detach()?.f_to_kind(Kind::Float)?, Dtype::F32)
    }

    fn new(tensor: &Tensor, dtype: Dtype) -> Result<StoredTensor, Error> {
        let shape = tensor.size().into_iter().map(|size| as_index(from_dim(size))).collect();
        Ok(StoredTensor { dtype, shape, bytes: bytes_of(tensor)? })
    }
}

impl View for StoredTensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        (&self.bytes).into()
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// The dtype of a stored tensor as libtorch names it, for those that are read.
#[must_use]
pub fn kind_of(dtype: Dtype) -> Option<Kind> {
    match dtype {
        Dtype::F64 => Some(Kind::Double),
        Dtype::F32 => Some(Kind::Float),
        Dtype::BF16 => Some(Kind::BFloat16),
        Dtype::F16 => Some(Kind::Half),
        _ => None,
    }
}
