//! The merge of partial attention over different keys, by log-sum-exp.

use std::ffi::{c_char, c_int};
use std::ptr::null_mut;

use tch::{Kind, Tensor};

use super::{done, plain, takes, usable};
use crate::tensor::accumulation;
use crate::tensor::ffi::{call, raw, torch_tensor};

// SAFETY: this is the function of compiled.cpp, compiled by build.rs, with the same parameter types.
unsafe extern "C" {
    fn longstraw_fused_merge(
        out: *mut torch_tensor,
        lse: *mut torch_tensor,
        first: *mut torch_tensor,
        first_lse: *mut torch_tensor,
        part: *mut torch_tensor,
        part_lse: *mut torch_tensor,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
}

/// Merges partial attention over further keys into `out_thd` and `lse_th` by log-sum-exp, in place, in their dtype, without
/// a graph. Empty merged with empty stays empty: out 0, log-sum-exp −∞, no NaN.
///
/// # Panics
/// When memory runs out, or the GPU refuses.
pub fn merge_into(out_thd: &mut Tensor, lse_th: &mut Tensor, new_out_thd: &Tensor, new_lse_th: &Tensor) {
    let known = if new_out_thd.kind() == Kind::Float { usable(0) } else { takes(new_out_thd) };
    if known && fits([out_thd, lse_th], [new_out_thd, new_lse_th]) {
        merge([out_thd, lse_th], None, [new_out_thd, new_lse_th]);
    } else {
        plain::merge_into(out_thd, lse_th, new_out_thd, new_lse_th);
    }
}

/// Output and log-sum-exp, in the accumulation dtype, over the keys of two parts, an output [t, h, d] and a log-sum-exp [t, h]
/// each. As [`merge_into`] with a copy of the first one.
///
/// # Panics
/// As [`merge_into`].
pub fn merge_of(first: [&Tensor; 2], part: [&Tensor; 2]) -> (Tensor, Tensor) {
    let [first_out_thd, first_lse_th] = first;
    let empty = |x: &Tensor| Tensor::empty(x.size(), (accumulation(x.kind()), x.device()));
    let (mut out_thd, mut lse_th) = (empty(first_out_thd), empty(first_lse_th));
    let alike = first_out_thd.kind() == part[0].kind() && first_lse_th.kind() == Kind::Float;
    if alike && takes(first_out_thd) && fits([&out_thd, &lse_th], part) {
        merge([&out_thd, &lse_th], Some(first), part);
    } else {
        out_thd.copy_(first_out_thd);
        lse_th.copy_(first_lse_th);
        merge_into(&mut out_thd, &mut lse_th, part[0], part[1]);
    }
    (out_thd, lse_th)
}

/// Whether a kernel writes to `out_thd` and `lse_th` what a part of their shapes adds.
fn fits([out_thd, lse_th]: [&Tensor; 2], [new_out_thd, new_lse_th]: [&Tensor; 2]) -> bool {
    let float = [out_thd, lse_th, new_lse_th].iter().all(|x| x.kind() == Kind::Float);
    let dense = out_thd.is_contiguous() && lse_th.is_contiguous() && out_thd.data_ptr().addr().is_multiple_of(16);
    let shaped = new_out_thd.size() == out_thd.size() && new_lse_th.size() == lse_th.size();
    let even = out_thd.size3().is_ok_and(|(_, _, dim)| dim % 8 == 0);
    out_thd.device().is_cuda() && float && dense && shaped && even
}

fn merge([out, lse]: [&Tensor; 2], first: Option<[&Tensor; 2]>, [part, part_lse]: [&Tensor; 2]) {
    let [first, first_lse] = first.map_or([null_mut(); 2], |first| first.map(raw));
    // SAFETY: live tensors of the shapes and dtypes that were checked, or null pointers for both of `first`.
    done(call("a merge of partial attention", |message, capacity| unsafe {
        longstraw_fused_merge(raw(out), raw(lse), first, first_lse, raw(part), raw(part_lse), message, capacity)
    }));
}
