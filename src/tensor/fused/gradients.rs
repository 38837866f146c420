//! Sums of gradients: parts are in the model's dtype, what they add up in is in the accumulation dtype.

use std::ffi::{c_char, c_int};
use std::ptr::null_mut;

use tch::{Kind, Tensor};

use super::{done, takes};
use crate::tensor::accumulation;
use crate::tensor::ffi::{call, raw, torch_tensor};

// SAFETY: this is the function of compiled.cpp, compiled by build.rs, with the same parameter types.
unsafe extern "C" {
    fn longstraw_fused_add(
        sum: *mut torch_tensor,
        first: *mut torch_tensor,
        part: *mut torch_tensor,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
}

/// Adds a part in the model's dtype to `sum`, which is in the accumulation dtype.
///
/// # Panics
/// When memory runs out, or the GPU refuses.
pub fn add_into(sum: &mut Tensor, part: &Tensor) {
    if takes_sum(sum, &[part]) {
        add(sum, None, part);
    } else {
        let _ = sum.g_add_(part);
    }
}

/// The sum of two parts in the accumulation dtype of theirs, of one shape.
///
/// # Panics
/// As [`add_into`].
pub fn sum_of(first: &Tensor, part: &Tensor) -> Tensor {
    let mut sum = Tensor::empty(part.size(), (accumulation(part.kind()), part.device()));
    if takes_sum(&sum, &[first, part]) {
        add(&sum, Some(first), part);
    } else {
        sum.copy_(first);
        let _ = sum.g_add_(part);
    }
    sum
}

/// Whether the kernels add `parts` up in `sum`.
fn takes_sum(sum: &Tensor, parts: &[&Tensor]) -> bool {
    let dense = |x: &Tensor| x.is_contiguous() && x.data_ptr().addr().is_multiple_of(16) && x.size() == sum.size();
    let fits = |x: &&Tensor| x.kind() == parts[0].kind() && dense(x);
    sum.kind() == Kind::Float
        && dense(sum)
        && sum.numel().is_multiple_of(4)
        && parts.iter().all(fits)
        && takes(parts[0])
}

fn add(sum: &Tensor, first: Option<&Tensor>, part: &Tensor) {
    // SAFETY: live tensors of the shapes and dtypes that `takes_sum` has checked.
    done(call("a sum of gradients", |message, capacity| unsafe {
        longstraw_fused_add(raw(sum), first.map_or(null_mut(), raw), raw(part), message, capacity)
    }));
}
