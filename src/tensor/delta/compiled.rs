//! The gated delta rule and its convolution by CUDA kernels, compiled at run time for the GPU at hand.
//!
//! Heads of 128 by 128 in bfloat16. Operands of products are bfloat16, sums and states float32. The `.cu` files of this
//! folder have the formulas; docs/decisions/0040-delta-kernel.md says how the work is split.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr::{from_mut, null_mut};

use tch::{Device, Kind, Tensor};

use super::{DeltaGradient, DeltaHeads, DeltaRows, Transition, plain};
use crate::tensor::Error;
use crate::tensor::ffi::call;
use crate::tensor::selection_kernel::Instructions;

const RULE: &str = concat!(
    include_str!("tiles.cu"),
    include_str!("prepare.cu"),
    include_str!("products.cu"),
    include_str!("run.cu"),
    include_str!("gradient.cu")
);
const CONVOLUTION: &str = concat!(include_str!("tiles.cu"), include_str!("convolution.cu"));

/// Width of a head's keys and values.
const DIM: i64 = 128;
/// Rows of a chunk.
const CHUNK: i64 = 64;
/// Scalars of a row that `prepare` writes.
const SCALARS: i64 = 5;
/// Most taps of a convolution.
const TAPS_MAX: i64 = 8;
/// Columns of a state that one block carries from chunk to chunk.
const SLICE: i64 = 64;
/// Relative error up to which a trial passes: several times what bfloat16 operands leave.
const TRIAL_ERROR: f64 = 0.02;

// SAFETY: these are the functions of compiled.cpp, compiled by build.rs, with the same parameter types.
unsafe extern "C" {
    fn longstraw_delta_load(
        rule: *const c_char,
        convolution: *const c_char,
        taps: c_int,
        portable: c_int,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_delta_loaded(taps: c_int) -> c_int;
    fn longstraw_delta_launch(
        taps: c_int,
        which: c_int,
        x: c_uint,
        y: c_uint,
        argument: *mut c_void,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
}

/// Kernels of the rule, in the order of compiled.cpp.
#[derive(Clone, Copy)]
enum Kernel {
    Prepare,
    Forward,
    States,
    Map,
    StateGradients,
    Pull,
    Gradient,
}

/// `Rows` of prepare.cu, field by field.
#[repr(C)]
struct RuleArgument {
    y: *mut c_void,
    decay: *mut c_void,
    strength: *mut c_void,
    inverse: *mut c_void,
    score: *mut c_void,
    scalars: *mut c_void,
    query_scale: *mut c_void,
    key_scale: *mut c_void,
    state: *mut c_void,
    next: *mut c_void,
    factor: *mut c_void,
    out: *mut c_void,
    states: *mut c_void,
    corrected: *mut c_void,
    dstates: *mut c_void,
    dx: *mut c_void,
    dout: *mut c_void,
    dy: *mut c_void,
    ddecay: *mut c_void,
    dstrength: *mut c_void,
    step: i64,
    channels: i64,
    rows: c_int,
    chunks: c_int,
    key_heads: c_int,
    value_heads: c_int,
}

/// `Convolution` of convolution.cu, field by field.
#[repr(C)]
struct ConvolutionArgument {
    u: *mut c_void,
    weight: *mut c_void,
    y: *mut c_void,
    dy: *mut c_void,
    du: *mut c_void,
    channels: i64,
    u_step: i64,
    dy_step: i64,
    rows: c_int,
}

/// Whether there are kernels for these heads, taps and dtype.
#[must_use]
pub fn covers(heads: &DeltaHeads, taps: i64, kind: Kind) -> bool {
    kind == Kind::BFloat16
        && heads.key_dim == DIM
        && heads.value_dim == DIM
        && heads.key_heads > 0
        && heads.value_heads % heads.key_heads == 0
        && (1..=TAPS_MAX).contains(&taps)
}

/// Compiles and loads the kernels, in the place of those loaded before, which takes seconds. Call outside a recorded graph.
///
/// # Errors
/// When NVRTC or the driver is not found or refuses.
pub fn load(taps: i64, instructions: Instructions) -> Result<(), Error> {
    let rule = CString::new(RULE).unwrap_or_default();
    let convolution = CString::new(CONVOLUTION).unwrap_or_default();
    let portable = c_int::from(instructions == Instructions::Portable);
    // SAFETY: terminated strings that outlive the call, and plain numbers.
    call("compiling the gated delta rule", |message, capacity| unsafe {
        longstraw_delta_load(rule.as_ptr(), convolution.as_ptr(), count(taps), portable, message, capacity)
    })
}

/// Whether [`load`] has loaded the kernels of the rule and those of a convolution of so many taps.
#[must_use]
pub fn loaded(taps: i64) -> bool {
    // SAFETY: a plain number; no exception comes out.
    unsafe { longstraw_delta_loaded(count(taps)) != 0 }
}

/// Whether the kernels take these rows; matrix products take all others.
#[must_use]
pub fn takes(heads: &DeltaHeads, rows: &DeltaRows) -> bool {
    rows.y_tu.device().is_cuda() && covers(heads, 1, rows.y_tu.kind()) && rows.y_tu.size()[0] > 0 && rule_loaded()
}

/// Whether the kernels take this convolution.
#[must_use]
pub fn convolves(u_eu: &Tensor, weight_uj: &Tensor) -> bool {
    let taps = weight_uj.size()[1];
    let rows = u_eu.size()[0] - taps + 1;
    let pairs = u_eu.size()[1] % 2 == 0;
    u_eu.device().is_cuda() && u_eu.kind() == Kind::BFloat16 && pairs && rows > 0 && loaded(taps)
}

fn rule_loaded() -> bool {
    loaded(0)
}

/// Whether the kernels give what matrix products give, for a few rows and all gradients. No random numbers are drawn, so the
/// draws of a run stay the same.
///
/// # Errors
/// When the driver refuses.
pub fn agrees(device: Device, heads: &DeltaHeads, taps: i64) -> Result<bool, Error> {
    let waves = |shape: &[i64], factor: f64| {
        let at = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, device));
        (at * factor).sin().view(shape).to_kind(Kind::Float)
    };
    let t = 2 * CHUNK + 3;
    let u_eu = waves(&[taps - 1 + t, heads.channels()], 1.7).to_kind(Kind::BFloat16);
    let weight_uj = waves(&[heads.channels(), taps], 0.9).to_kind(Kind::BFloat16);
    let rows = DeltaRows {
        y_tu: plain::convolve(&u_eu, &weight_uj),
        decay_th: waves(&[t, heads.value_heads], 2.3) * 0.3 - 0.35,
        strength_th: waves(&[t, heads.value_heads], 3.1) * 0.4 + 0.5,
    };
    let state = waves(&heads.state(), 0.7);
    let dout = waves(&[t, heads.value_heads, heads.value_dim], 1.3).to_kind(Kind::BFloat16);
    let (out, next) = forward(heads, &rows, &state)?;
    let (plain_out, plain_next) = plain::forward(heads, &rows, &state);
    let gradient = backward(heads, &rows, &state, &dout, &next)?;
    let wanted = plain::backward(heads, &rows, &state, &dout, &next)?;
    let map = transition(heads, &rows)?;
    let composed = map.factor_hkk.matmul(&state) + map.increment_hkv;
    let pairs = [
        (convolve(&u_eu, &weight_uj)?, rows.y_tu.shallow_clone()),
        (convolve_backward(&u_eu, &weight_uj, &rows.y_tu)?, plain::convolve_backward(&u_eu, &weight_uj, &rows.y_tu)?),
        (out, plain_out),
        (composed, plain_next.shallow_clone()),
        (next.shallow_clone(), plain_next),
        (pull(heads, &rows, &dout, &next)?, wanted.dstate_hkv.shallow_clone()),
        (gradient.dstate_hkv, wanted.dstate_hkv),
        (gradient.rows.y_tu, wanted.rows.y_tu),
        (gradient.rows.decay_th, wanted.rows.decay_th),
        (gradient.rows.strength_th, wanted.rows.strength_th),
    ];
    // A value that is not a number fails the comparison.
    Ok(pairs.iter().all(|(found, wanted)| relative_error(found, wanted) <= TRIAL_ERROR))
}

/// ‖found − wanted‖ / ‖wanted‖.
fn relative_error(found: &Tensor, wanted: &Tensor) -> f64 {
    let wanted = wanted.to_kind(Kind::Double);
    ((found.to_kind(Kind::Double) - &wanted).norm() / wanted.norm()).double_value(&[])
}

/// A count that fits, for rows, heads and taps are far below 2³¹.
fn count(number: i64) -> c_int {
    c_int::try_from(number).unwrap_or_else(|_| unreachable!("{number} rows or heads in one call"))
}

fn blocks(number: i64) -> c_uint {
    c_uint::try_from(number).unwrap_or_else(|_| unreachable!("{number} blocks in one call"))
}

/// `x` with neighbouring columns, and rows that begin at multiples of 16 bytes.
fn laid(x: &Tensor) -> Tensor {
    let stride = x.stride();
    let rows_apart = stride[..stride.len() - 1].iter().all(|step| step % 8 == 0);
    let aligned = |x: &Tensor| (x.data_ptr().addr()).is_multiple_of(16);
    if x.dim() == 2 && stride[1] == 1 && rows_apart && aligned(x) {
        return x.shallow_clone();
    }
    let whole = x.contiguous();
    if aligned(&whole) { whole } else { whole.copy() }
}

/// One call's rows on the GPU, with what `prepare` makes of them.
struct Prepared {
    argument: RuleArgument,
    heads: DeltaHeads,
    chunks: i64,
    device: Device,
    /// Tensors that the argument points to.
    held: Vec<Tensor>,
}

impl Prepared {
    fn new(heads: &DeltaHeads, rows: &DeltaRows) -> Result<Prepared, Error> {
        let t = rows.y_tu.size()[0];
        let (y_tu, chunks) = (laid(&rows.y_tu), (t + CHUNK - 1) / CHUNK);
        let (device, none) = (y_tu.device(), null_mut());
        let float = |x: &Tensor| x.to_kind(Kind::Float).contiguous();
        let (decay_th, strength_th) = (float(&rows.decay_th), float(&rows.strength_th));
        let square = || Tensor::empty([heads.value_heads, chunks, CHUNK, CHUNK], (Kind::BFloat16, device));
        let line = |heads: i64| Tensor::empty([heads, chunks * CHUNK], (Kind::Float, device));
        let scalars = Tensor::empty([heads.value_heads, chunks, SCALARS, CHUNK], (Kind::Float, device));
        let (inverse, score) = (square(), square());
        let (query_scale, key_scale) = (line(heads.key_heads), line(heads.key_heads));
        let argument = RuleArgument {
            y: y_tu.data_ptr(),
            decay: decay_th.data_ptr(),
            strength: strength_th.data_ptr(),
            inverse: inverse.data_ptr(),
            score: score.data_ptr(),
            scalars: scalars.data_ptr(),
            query_scale: query_scale.data_ptr(),
            key_scale: key_scale.data_ptr(),
            state: none,
            next: none,
            factor: none,
            out: none,
            states: none,
            corrected: none,
            dstates: none,
            dx: none,
            dout: none,
            dy: none,
            ddecay: none,
            dstrength: none,
            step: y_tu.stride()[0],
            channels: heads.channels(),
            rows: count(t),
            chunks: count(chunks),
            key_heads: count(heads.key_heads),
            value_heads: count(heads.value_heads),
        };
        let held = vec![y_tu, decay_th, strength_th, inverse, score, scalars, query_scale, key_scale];
        let mut prepared = Prepared { argument, heads: *heads, chunks, device, held };
        prepared.launch(Kernel::Prepare, chunks, heads.key_heads)?;
        Ok(prepared)
    }

    /// Starts a kernel on so many blocks.
    fn launch(&mut self, kernel: Kernel, x: i64, y: i64) -> Result<(), Error> {
        let argument = from_mut(&mut self.argument).cast();
        // SAFETY: the argument points to live tensors of the shapes and dtypes that the kernel states.
        call("the gated delta rule", |message, capacity| unsafe {
            longstraw_delta_launch(0, kernel as c_int, blocks(x), blocks(y), argument, message, capacity)
        })
    }

    /// Address of `x`, which is kept.
    fn hold(&mut self, x: &Tensor) -> *mut c_void {
        self.held.push(x.shallow_clone());
        x.data_ptr()
    }

    fn state(&mut self) -> Tensor {
        let state = Tensor::empty(self.heads.state(), (Kind::Float, self.device));
        self.argument.next = state.data_ptr();
        state
    }

    fn read_state(&mut self, state_hkv: &Tensor) {
        let state_hkv = state_hkv.to_kind(Kind::Float).contiguous();
        self.argument.state = self.hold(&state_hkv);
    }

    fn read_gradient(&mut self, dout_thv: &Tensor) {
        let dout_thv = laid(&dout_thv.to_kind(Kind::BFloat16));
        self.argument.dout = self.hold(&dout_thv);
    }

    /// Scratch of the backward, [h, chunks, rows, 128] bfloat16.
    fn scratch(&mut self, rows: i64) -> *mut c_void {
        let shape = [self.heads.value_heads, self.chunks, rows, DIM];
        let made = Tensor::empty(shape, (Kind::BFloat16, self.device));
        self.hold(&made)
    }
}

/// As [`super::Form::forward`].
///
/// # Errors
/// When the driver refuses, or memory runs out.
pub fn forward(heads: &DeltaHeads, rows: &DeltaRows, state_hkv: &Tensor) -> Result<(Tensor, Tensor), Error> {
    let mut call = Prepared::new(heads, rows)?;
    let shape = [rows.y_tu.size()[0], heads.value_heads, DIM];
    let out_thv = Tensor::empty(shape, (Kind::BFloat16, call.device));
    let next = call.state();
    call.argument.out = out_thv.data_ptr();
    call.read_state(state_hkv);
    call.launch(Kernel::Forward, DIM / SLICE, heads.value_heads)?;
    Ok((out_thv, next))
}

/// As [`super::Form::transition`].
///
/// # Errors
/// When the driver refuses, or memory runs out.
pub fn transition(heads: &DeltaHeads, rows: &DeltaRows) -> Result<Transition, Error> {
    let mut call = Prepared::new(heads, rows)?;
    let increment_hkv = call.state();
    let factor_hkk = Tensor::empty(heads.state(), (Kind::Float, call.device));
    call.argument.factor = factor_hkk.data_ptr();
    call.launch(Kernel::Map, 2 * DIM / SLICE, heads.value_heads)?;
    Ok(Transition { factor_hkk, increment_hkv })
}

/// As [`super::Form::pull`].
///
/// # Errors
/// When the driver refuses, or memory runs out.
pub fn pull(heads: &DeltaHeads, rows: &DeltaRows, dout_thv: &Tensor, dstate_hkv: &Tensor) -> Result<Tensor, Error> {
    let mut call = Prepared::new(heads, rows)?;
    let dstate = call.state();
    call.read_gradient(dout_thv);
    call.read_state(dstate_hkv);
    call.launch(Kernel::Pull, DIM / SLICE, heads.value_heads)?;
    Ok(dstate)
}

/// As [`super::Form::backward`]. Of strengths below 1e-30 the gradient is 0.
///
/// # Errors
/// When the driver refuses, or memory runs out.
pub fn backward(
    heads: &DeltaHeads,
    rows: &DeltaRows,
    state_hkv: &Tensor,
    dout_thv: &Tensor,
    dstate_hkv: &Tensor,
) -> Result<DeltaGradient, Error> {
    let mut call = Prepared::new(heads, rows)?;
    let t = rows.y_tu.size()[0];
    let gate = || Tensor::empty([t, heads.value_heads], (Kind::Float, call.device));
    let (decay_th, strength_th) = (gate(), gate());
    let y_tu = Tensor::empty([t, heads.channels()], (Kind::BFloat16, call.device));
    call.argument.ddecay = decay_th.data_ptr();
    call.argument.dstrength = strength_th.data_ptr();
    call.argument.dy = y_tu.data_ptr();
    call.argument.states = call.scratch(DIM);
    call.argument.corrected = call.scratch(CHUNK);
    call.argument.dstates = call.scratch(DIM);
    call.argument.dx = call.scratch(CHUNK);
    call.read_gradient(dout_thv);
    // 1. States before all chunks.
    call.read_state(state_hkv);
    call.launch(Kernel::States, DIM / SLICE, heads.value_heads)?;
    // 2. Their gradients, from the last chunk to the first.
    let dstate = call.state();
    call.read_state(dstate_hkv);
    call.launch(Kernel::StateGradients, DIM / SLICE, heads.value_heads)?;
    // 3. Gradients of all rows.
    call.launch(Kernel::Gradient, call.chunks, heads.key_heads)?;
    Ok(DeltaGradient { rows: DeltaRows { y_tu, decay_th, strength_th }, dstate_hkv: dstate })
}

/// Rows that a block of the convolution takes, and channels.
const CONVOLUTION_ROWS: i64 = 32;
const CONVOLUTION_CHANNELS: i64 = 256;

fn launch_convolution(taps: i64, which: c_int, rows: i64, argument: &mut ConvolutionArgument) -> Result<(), Error> {
    let x = (rows + CONVOLUTION_ROWS - 1) / CONVOLUTION_ROWS;
    let y = (argument.channels + CONVOLUTION_CHANNELS - 1) / CONVOLUTION_CHANNELS;
    // SAFETY: the argument points to live tensors of the shapes and dtypes that the kernel states.
    call("the convolution", |message, capacity| unsafe {
        let argument = from_mut(argument).cast();
        longstraw_delta_launch(count(taps), which, blocks(x), blocks(y), argument, message, capacity)
    })
}

/// As [`super::Form::convolve`]. Sums are not rounded before z · sigmoid(z).
///
/// # Errors
/// When the driver refuses, or memory runs out.
pub fn convolve(u_eu: &Tensor, weight_uj: &Tensor) -> Result<Tensor, Error> {
    let (u_eu, weight_uj) = (laid(u_eu), weight_uj.to_kind(Kind::Float).contiguous());
    let (channels, taps) = (u_eu.size()[1], weight_uj.size()[1]);
    let rows = u_eu.size()[0] - taps + 1;
    let y_tu = Tensor::empty([rows, channels], (Kind::BFloat16, u_eu.device()));
    let mut argument = ConvolutionArgument {
        u: u_eu.data_ptr(),
        weight: weight_uj.data_ptr(),
        y: y_tu.data_ptr(),
        dy: null_mut(),
        du: null_mut(),
        channels,
        u_step: u_eu.stride()[0],
        dy_step: 0,
        rows: count(rows),
    };
    launch_convolution(taps, 0, rows, &mut argument)?;
    Ok(y_tu)
}

/// As [`super::Form::convolve_backward`].
///
/// # Errors
/// When the driver refuses, or memory runs out.
pub fn convolve_backward(u_eu: &Tensor, weight_uj: &Tensor, dy_tu: &Tensor) -> Result<Tensor, Error> {
    let (u_eu, weight_uj) = (laid(u_eu), weight_uj.to_kind(Kind::Float).contiguous());
    let (dy_tu, channels) = (laid(&dy_tu.to_kind(Kind::BFloat16)), u_eu.size()[1]);
    let (taps, rows) = (weight_uj.size()[1], dy_tu.size()[0]);
    let du_eu = Tensor::empty([rows + taps - 1, channels], (Kind::Float, u_eu.device()));
    let mut argument = ConvolutionArgument {
        u: u_eu.data_ptr(),
        weight: weight_uj.data_ptr(),
        y: null_mut(),
        dy: dy_tu.data_ptr(),
        du: du_eu.data_ptr(),
        channels,
        u_step: u_eu.stride()[0],
        dy_step: dy_tu.stride()[0],
        rows: count(rows),
    };
    launch_convolution(taps, 1, rows + taps - 1, &mut argument)?;
    Ok(du_eu)
}
