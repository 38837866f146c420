//! Linear layers of one input with their adapters, as one operation.

use std::ffi::{c_char, c_int};
use std::ptr::null_mut;

use tch::{Kind, Tensor};

use super::{done, takes};
use crate::tensor::ffi::{call, raw, torch_tensor};

// SAFETY: this is the function of adapted.cpp, compiled by build.rs, with the same parameter types.
unsafe extern "C" {
    fn longstraw_fused_adapted(
        x: *mut torch_tensor,
        layers: usize,
        weights: *const *mut torch_tensor,
        biases: *const *mut torch_tensor,
        down: *const *mut torch_tensor,
        up: *const *mut torch_tensor,
        valued: *const u8,
        scale: f64,
        outputs: *mut *mut torch_tensor,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
}

/// Most layers of one call.
const LAYERS_MAX: usize = 16;

/// One linear layer. Weight and bias are constants.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// W, [outputs, inputs].
    pub weight_oi: &'a Tensor,
    /// Bias of the layer, [outputs].
    pub bias_o: Option<&'a Tensor>,
    /// A [rank, inputs] and B [outputs, rank] of its adapter.
    pub pair: Option<[&'a Tensor; 2]>,
    /// Whether its output is read. Where a gradient alone goes through it, [`adapted`] leaves NaN there.
    pub valued: bool,
}

/// x Wᵀ + bias + scale · (x Aᵀ) Bᵀ of every layer for rows `x_tw`, in their dtype: x meets all A in one product, and the parts
/// of its gradient add up inside products. A and B are float32, or of the dtype of x with scale 1. `None` where x is not on a
/// GPU in a dtype that has kernels, or no layer has an adapter: the caller then computes layer by layer.
///
/// # Panics
/// When memory runs out, or the GPU refuses.
#[must_use]
pub fn adapted(x_tw: &Tensor, layers: &[Layer], scale: f64) -> Option<Vec<Tensor>> {
    let kind = x_tw.kind();
    let pairs = || layers.iter().filter_map(|layer| layer.pair).flatten();
    let trained = pairs().all(|x| x.kind() == Kind::Float);
    let applied = (scale - 1.0).abs() <= 0.0 && pairs().all(|x| x.kind() == kind && !x.requires_grad());
    let constant = |x: &Tensor| x.kind() == kind && !x.requires_grad();
    let constants = layers.iter().all(|layer| constant(layer.weight_oi) && layer.bias_o.is_none_or(constant));
    let fits = x_tw.dim() == 2 && layers.len() <= LAYERS_MAX && pairs().next().is_some();
    if !(takes(x_tw) && fits && constants && (trained || applied)) {
        return None;
    }
    let pointer = |x: Option<&Tensor>| x.map_or(null_mut(), raw);
    let weights: Vec<_> = layers.iter().map(|layer| raw(layer.weight_oi)).collect();
    let biases: Vec<_> = layers.iter().map(|layer| pointer(layer.bias_o)).collect();
    let down: Vec<_> = layers.iter().map(|layer| pointer(layer.pair.map(|[a_ri, _]| a_ri))).collect();
    let up: Vec<_> = layers.iter().map(|layer| pointer(layer.pair.map(|[_, b_or]| b_or))).collect();
    let valued: Vec<u8> = layers.iter().map(|layer| u8::from(layer.valued)).collect();
    let mut outputs = vec![null_mut(); layers.len()];
    // SAFETY: live tensors, null pointers where the callee expects them, and a place for each output.
    done(call("linear layers with adapters", |message, capacity| unsafe {
        longstraw_fused_adapted(
            raw(x_tw),
            layers.len(),
            weights.as_ptr(),
            biases.as_ptr(),
            down.as_ptr(),
            up.as_ptr(),
            valued.as_ptr(),
            scale,
            outputs.as_mut_ptr(),
            message,
            capacity,
        )
    }));
    // SAFETY: the callee has made these tensors and hands them over.
    Some(outputs.into_iter().map(|out| unsafe { Tensor::from_ptr(out.cast()) }).collect())
}
