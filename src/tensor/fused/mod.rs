//! Elementwise work of a block in one pass each on a GPU: norms, norm with rotation by head, the gate of a feed-forward, the
//! merge of partial attention, the step of the optimizer. Linear layers of one input with their adapters are here too.
//!
//! For models in bfloat16 and float16, by CUDA kernels that are compiled at run time. Where the kernels do not take a
//! function's tensors, operators of libtorch compute it: [`plain`] has the formulas. Results are differentiable; weights of
//! norms and angles carry no gradient.

mod adapted;
mod gradients;
mod merge;
pub mod plain;
mod trial;

use std::ffi::{CString, c_char, c_int};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use tch::{Device, Kind, Tensor};

use super::Error;
use super::ffi::{call, raw, torch_tensor};
use crate::runtime::failure::out_of_memory;
use crate::runtime::terminal::say;

pub use adapted::{Layer, adapted};
pub use gradients::{add_into, sum_of};
pub use merge::{merge_into, merge_of};

const SOURCE: &str =
    concat!(include_str!("numbers.cu"), include_str!("rows.cu"), include_str!("sums.cu"), include_str!("products.cu"));

/// Widest head that one group of threads takes.
const HEAD_MAX: i64 = 512;
/// Widest row that one block of threads takes.
const WIDTH_MAX: i64 = 32_768;

// SAFETY: these are the functions of compiled.cpp, compiled by build.rs, with the same parameter types.
unsafe extern "C" {
    fn longstraw_fused_load(source: *const c_char, dtype: c_int, message: *mut c_char, capacity: usize) -> c_int;
    fn longstraw_fused_allow(usable: c_int);
    fn longstraw_fused_usable(dtype: c_int) -> c_int;
    fn longstraw_fused_gate(
        gate: *mut torch_tensor,
        up: *mut torch_tensor,
        gelu: c_int,
        out: *mut *mut torch_tensor,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_fused_norm(
        x: *mut torch_tensor,
        weight: *mut torch_tensor,
        eps: f64,
        one_plus: c_int,
        out: *mut *mut torch_tensor,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_fused_sum_norm(
        x: *mut torch_tensor,
        other: *mut torch_tensor,
        weight: *mut torch_tensor,
        eps: f64,
        one_plus: c_int,
        sum: *mut *mut torch_tensor,
        out: *mut *mut torch_tensor,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_fused_heads(
        q: *mut torch_tensor,
        k: *mut torch_tensor,
        query_weight: *mut torch_tensor,
        key_weight: *mut torch_tensor,
        cosine: *mut torch_tensor,
        sine: *mut torch_tensor,
        eps: f64,
        one_plus: c_int,
        q_out: *mut *mut torch_tensor,
        k_out: *mut *mut torch_tensor,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_fused_adam(
        weights: *const *mut torch_tensor,
        gradients: *const *mut torch_tensor,
        means: *const *mut torch_tensor,
        squares: *const *mut torch_tensor,
        count: usize,
        numbers: *const f64,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
}

/// What a gated feed-forward applies to its gate.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Activation {
    /// z · sigmoid(z)
    Silu,
    /// GELU by its tanh formula.
    GeluTanh,
}

/// Weights of a norm and how they enter.
#[derive(Clone, Copy, Debug)]
pub struct Scale<'a> {
    /// In the dtype of the rows, one for each column; a constant.
    pub weight: &'a Tensor,
    /// Added to the mean of the squares.
    pub eps: f64,
    /// Whether rows are multiplied by 1 + the weight.
    pub one_plus: bool,
}

/// Compiles the kernels for the dtype of a model on a GPU and tries them, unless that has been done; takes about a second.
/// Kernels that cannot be compiled, or that do not give what operators give, are not used: one line says so. Call it outside
/// a recorded graph.
///
/// # Panics
/// When memory for the trial runs out: the result would differ between ranks.
pub fn prepare(device: Device, kind: Kind) {
    if !device.is_cuda() || dtype(kind).is_none_or(usable) || FORGONE.load(Ordering::Relaxed) {
        return;
    }
    let tried = load(kind).map_err(trial::Refusal::from).and_then(|()| {
        allow(true);
        trial::passes(device, kind)
    });
    match tried {
        Ok(()) => return,
        Err(trial::Refusal::Torch(error)) if out_of_memory(&error.to_string()) => panic!("{error}"),
        Err(refusal @ trial::Refusal::Torch(_)) => {
            tracing::warn!("libtorch's operators do elementwise work, since its kernels cannot be used: {refusal}");
        }
        Err(refusal @ trial::Refusal::Differs { .. }) => say(&format!(
            "warning: the compiled elementwise kernels are wrong on this GPU; libtorch's operators are used: {refusal}"
        )),
    }
    allow(false);
}

/// Whether operators are used whatever is prepared later.
static FORGONE: AtomicBool = AtomicBool::new(false);

/// Operators are used until this process ends, for another rank cannot use the kernels.
pub fn forgo() {
    FORGONE.store(true, Ordering::Relaxed);
    allow(false);
}

/// Whether the kernels for models in `kind` are used.
#[must_use]
pub fn is_used(kind: Kind) -> bool {
    dtype(kind).is_some_and(usable)
}

/// Compiles and loads the kernels of a dtype, in the place of those loaded before. They are used from [`allow`] on.
fn load(kind: Kind) -> Result<(), Error> {
    let source = CString::new(SOURCE).unwrap_or_default();
    let number = dtype(kind).unwrap_or_else(|| unreachable!("there are no elementwise kernels for {kind:?}"));
    // SAFETY: a terminated string that outlives the call, and a plain number.
    call("compiling elementwise kernels", |message, capacity| unsafe {
        longstraw_fused_load(source.as_ptr(), number, message, capacity)
    })
}

/// Whether the loaded kernels are used from now on.
fn allow(yes: bool) {
    // SAFETY: a plain number; no exception comes out.
    unsafe { longstraw_fused_allow(c_int::from(yes)) }
}

/// The number of a dtype in compiled.cpp.
fn dtype(kind: Kind) -> Option<c_int> {
    match kind {
        Kind::BFloat16 => Some(1),
        Kind::Half => Some(2),
        _ => None,
    }
}

/// Whether the kernels for this number of a dtype, or with 0 for either, are used.
fn usable(dtype: c_int) -> bool {
    // SAFETY: a plain number; no exception comes out.
    unsafe { longstraw_fused_usable(dtype) != 0 }
}

/// Whether `x` is on a GPU in a dtype whose kernels are used.
fn takes(x: &Tensor) -> bool {
    x.device().is_cuda() && is_used(x.kind())
}

/// Whether the kernels take a norm of rows with this weight.
fn takes_norm(x: &Tensor, scale: &Scale) -> bool {
    let width = x.size().last().copied().unwrap_or(0);
    let fits = if width <= HEAD_MAX { width % 16 == 0 } else { width % 8 == 0 && width <= WIDTH_MAX };
    let weight = scale.weight;
    width > 0 && fits && weight.kind() == x.kind() && weight.size() == [width] && !weight.requires_grad() && takes(x)
}

/// The result of `work`, which hands over one tensor.
fn made(operation: &'static str, work: impl FnOnce(*mut *mut torch_tensor, *mut c_char, usize) -> c_int) -> Tensor {
    let mut out = null_mut();
    done(call(operation, |message, capacity| work(&raw mut out, message, capacity)));
    // SAFETY: the callee has made a tensor and hands it over.
    unsafe { Tensor::from_ptr(out.cast()) }
}

/// As [`made`], for two tensors.
fn made_two(
    operation: &'static str,
    work: impl FnOnce(*mut *mut torch_tensor, *mut *mut torch_tensor, *mut c_char, usize) -> c_int,
) -> (Tensor, Tensor) {
    let mut second = null_mut();
    let first = made(operation, |first, message, capacity| work(first, &raw mut second, message, capacity));
    // SAFETY: as above.
    (first, unsafe { Tensor::from_ptr(second.cast()) })
}

/// Ends as operators of `tch` end: a refusal is a panic with libtorch's words.
fn done(result: Result<(), Error>) {
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// activation(gate) · up.
///
/// # Panics
/// When memory runs out, or the GPU refuses.
pub fn gated(gate_tf: &Tensor, up_tf: &Tensor, activation: Activation) -> Tensor {
    if takes_gate(gate_tf, up_tf) {
        by_gate(gate_tf, up_tf, activation)
    } else {
        plain::gated(gate_tf, up_tf, activation)
    }
}

/// silu(z) · x in the accumulation dtype, rounded once to the dtype of `z`; x may be in the accumulation dtype.
///
/// # Panics
/// When memory runs out, or the GPU refuses.
pub fn silu_gated(z: &Tensor, x: &Tensor) -> Tensor {
    if takes_gate(z, x) { by_gate(z, x, Activation::Silu) } else { plain::silu_gated(z, x) }
}

fn takes_gate(gate: &Tensor, up: &Tensor) -> bool {
    takes(gate) && up.kind() == gate.kind() && up.size() == gate.size()
}

fn by_gate(gate_tf: &Tensor, up_tf: &Tensor, activation: Activation) -> Tensor {
    let gelu = c_int::from(activation == Activation::GeluTanh);
    // SAFETY: live tensors of one shape and dtype.
    made("the gate of a feed-forward", |out, message, capacity| unsafe {
        longstraw_fused_gate(raw(gate_tf), raw(up_tf), gelu, out, message, capacity)
    })
}

/// The norm of rows in the last dimension of `x`, in the dtype of `x`.
///
/// # Panics
/// When memory runs out, or the GPU refuses.
pub fn normed(x: &Tensor, scale: &Scale) -> Tensor {
    if !takes_norm(x, scale) {
        return plain::normed(x, scale);
    }
    // SAFETY: live tensors of the shapes that `takes_norm` has checked.
    made("a norm", |out, message, capacity| unsafe {
        let one_plus = c_int::from(scale.one_plus);
        longstraw_fused_norm(raw(x), raw(scale.weight), scale.eps, one_plus, out, message, capacity)
    })
}

/// x + other, [t, w], and the norm of that sum.
///
/// # Panics
/// When memory runs out, or the GPU refuses.
pub fn sum_normed(x_tw: &Tensor, other_tw: Tensor, scale: &Scale) -> (Tensor, Tensor) {
    let alike = other_tw.kind() == x_tw.kind() && other_tw.size() == x_tw.size();
    if !alike || !takes_norm(x_tw, scale) {
        let sum_tw = x_tw + other_tw;
        let normed_tw = plain::normed(&sum_tw, scale);
        return (sum_tw, normed_tw);
    }
    // SAFETY: live tensors of the shapes that were checked.
    made_two("a sum and its norm", |sum, out, message, capacity| unsafe {
        let (one_plus, weight) = (c_int::from(scale.one_plus), raw(scale.weight));
        longstraw_fused_sum_norm(raw(x_tw), raw(&other_tw), weight, scale.eps, one_plus, sum, out, message, capacity)
    })
}

/// Queries [t, h, d] and keys [t, g, d] after their norm by head, where `scales` are given (of queries, of keys, with one
/// epsilon and form), and the rotation of pairs (j, j + n) of their first 2n dimensions; `cos_tn` and `sin_tn` are [t, n].
///
/// # Panics
/// When memory runs out, or the GPU refuses.
pub fn turned(
    [q_thd, k_tgd]: [&Tensor; 2],
    scales: Option<[Scale; 2]>,
    cos_tn: &Tensor,
    sin_tn: &Tensor,
) -> (Tensor, Tensor) {
    if !takes_heads([q_thd, k_tgd], scales.as_ref(), cos_tn, sin_tn) {
        return plain::turned([q_thd, k_tgd], scales, cos_tn, sin_tn);
    }
    let (eps, one_plus) = scales.map_or((0.0, false), |[of_queries, _]| (of_queries.eps, of_queries.one_plus));
    let [of_queries, of_keys] = scales.map_or([null_mut(); 2], |scales| scales.map(|scale| raw(scale.weight)));
    // SAFETY: live tensors of the shapes that were checked; a weight may be a null pointer.
    made_two("norm and rotation by head", |q_out, k_out, message, capacity| unsafe {
        longstraw_fused_heads(
            raw(q_thd),
            raw(k_tgd),
            of_queries,
            of_keys,
            raw(cos_tn),
            raw(sin_tn),
            eps,
            c_int::from(one_plus),
            q_out,
            k_out,
            message,
            capacity,
        )
    })
}

/// Whether the kernels take what [`turned`] is given.
fn takes_heads([q_thd, k_tgd]: [&Tensor; 2], scales: Option<&[Scale; 2]>, cos_tn: &Tensor, sin_tn: &Tensor) -> bool {
    let (Ok((rows, _, dim)), Ok((key_rows, _, key_dim))) = (q_thd.size3(), k_tgd.size3()) else { return false };
    let pairs = cos_tn.size().last().copied().unwrap_or(0);
    let kind = q_thd.kind();
    let of_kind = [k_tgd, cos_tn, sin_tn].iter().all(|x| x.kind() == kind);
    let shaped = key_rows == rows && key_dim == dim && cos_tn.size() == [rows, pairs] && sin_tn.size() == [rows, pairs];
    let fits = dim % 16 == 0 && (16..=HEAD_MAX).contains(&dim) && pairs % 8 == 0 && 2 * pairs <= dim;
    let scaled = scales.is_none_or(|[q, k]| takes_norm(q_thd, q) && takes_norm(k_tgd, k));
    of_kind && shaped && fits && scaled && takes(q_thd)
}

/// Tensors of one step of `AdamW`, in one order.
#[derive(Debug)]
pub struct AdamTensors<'a> {
    /// What is trained.
    pub weights: &'a [&'a Tensor],
    /// Gradient of each of them.
    pub gradients: &'a [Tensor],
    /// Running mean of the gradient.
    pub means: &'a [Tensor],
    /// Running mean of its square.
    pub squares: &'a [Tensor],
}

/// Numbers of one step of `AdamW`.
#[derive(Clone, Copy, Debug)]
pub struct AdamNumbers {
    /// Decay of the mean and of the mean square.
    pub betas: [f64; 2],
    /// 1 − βⁿ of both after n steps.
    pub corrections: [f64; 2],
    /// Added to the root of the mean square.
    pub eps: f64,
    /// What decay leaves of a weight.
    pub kept: f64,
    /// Factor of the step.
    pub learning_rate: f64,
}

/// One step of `AdamW` in place with a few launches for all tensors; whether the kernels take them, else nothing is done.
///
/// # Panics
/// When the GPU refuses.
#[must_use]
pub fn adam_step(tensors: &AdamTensors, numbers: &AdamNumbers) -> bool {
    let AdamTensors { weights, gradients, means, squares } = *tensors;
    let fits = |x: &Tensor| x.device().is_cuda() && x.kind() == Kind::Float && x.is_contiguous();
    let all = || weights.iter().copied().chain(gradients).chain(means).chain(squares);
    let paired = [gradients, means, squares].iter().all(|others| others.len() == weights.len());
    if !(usable(0) && paired && all().all(fits)) {
        return false;
    }
    let pointers = |tensors: &[Tensor]| tensors.iter().map(raw).collect::<Vec<_>>();
    let weights: Vec<_> = weights.iter().copied().map(raw).collect();
    let (gradients, means, squares) = (pointers(gradients), pointers(means), pointers(squares));
    let AdamNumbers { betas: [beta_1, beta_2], corrections: [first, second], eps, kept, learning_rate } = *numbers;
    let list = [beta_1, beta_2, 1.0 - beta_1, 1.0 - beta_2, first, second, eps, kept, learning_rate];
    // SAFETY: four arrays of as many live float32 tensors without gaps, pairwise of one size, and nine numbers.
    done(call("a step of AdamW", |message, capacity| unsafe {
        longstraw_fused_adam(
            weights.as_ptr(),
            gradients.as_ptr(),
            means.as_ptr(),
            squares.as_ptr(),
            weights.len(),
            list.as_ptr(),
            message,
            capacity,
        )
    }));
    true
}
