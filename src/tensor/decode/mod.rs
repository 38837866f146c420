//! One decode step on a GPU: kernels that compute one new row of each answer of a group, compiled at run time.
//!
//! ```text
//!   product (q k v) ─▶ heads ─▶ attend ─▶ merge ─▶ product (o) ─▶ residual ─▶ product (gate up) ─▶ activate ─▶ product (down) ─▶ residual
//! ```
//!
//! A product reads every weight once for all answers and leaves float32 sums; the kernel after it adds bias and adapter,
//! rounds to the model's dtype and goes on. The `.cu` files of this folder have the formulas; decision 0043 says why so.

mod arguments;
mod graph;
mod launches;
mod shapes;

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::null_mut;

use tch::{Kind, Tensor};

use self::arguments::Pointer;
pub use self::graph::Graph;
use self::graph::{Launcher, Shape};
pub use self::launches::{Activate, Attend, Choice, Drawing, Heads, Product, Residual, next_column};
pub use self::shapes::{AttendSizes, Processors, Shares, shares, splits};
use super::Error;
use super::ffi::call;

const SOURCE: &str = concat!(
    include_str!("arguments.cu"),
    include_str!("numbers.cu"),
    include_str!("product.cu"),
    include_str!("rows.cu"),
    include_str!("attend.cu"),
    include_str!("merge.cu"),
    include_str!("sample.cu")
);

/// Most answers that are computed together.
pub const ANSWERS_MAX: i64 = 64;
/// Head widths that there are kernels for.
const HEAD_DIMS: [i64; 5] = [64, 80, 96, 128, 256];
/// Bytes of shared memory that a block may need.
const SHARED_MIN: i64 = 232_448;
/// Widest row that is normed.
const WIDTH_MAX: i64 = 8_192;
/// Highest rank of an adapter.
pub const RANK_MAX: i64 = 256;
/// Columns of raw sums begin at multiples of this.
const COLUMN: i64 = 16;
/// Entries of the vocabulary that one block looks at.
const CHUNK_ENTRIES: i64 = 2_048;
/// Numbers that are known of a chunk.
const CHUNK_PARTS: i64 = 5;
/// Numbers of a drawn token: its id, log-probability, entropy.
pub const DRAWN_NUMBERS: i64 = 3;

// SAFETY: these are the functions of decode.cpp, compiled by build.rs, with the same parameter types.
unsafe extern "C" {
    fn longstraw_decode_load(
        source: *const c_char,
        dtype: c_int,
        head: c_int,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_decode_device(
        processors: *mut c_int,
        clusters: *mut c_int,
        shared: *mut c_int,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
}

/// Raw sums of a product, [splits, answers, width] float32: a value is the sum over splits.
#[derive(Debug)]
pub struct Raw(Tensor);

/// An adapter's up projection, with where its down projection's products stand in raw sums.
#[derive(Clone, Copy, Debug)]
pub struct Up<'a> {
    /// [outputs, rank], with the adapter's scale in it.
    pub b_or: &'a Tensor,
    /// First column of the down projection's products.
    pub column: i64,
}

/// A norm's weight, [w], and formula.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the names say everything")]
pub struct Norm<'a> {
    pub weight_w: &'a Tensor,
    pub eps: f64,
    /// Whether the factor is 1 + weight.
    pub one_plus: bool,
}

/// Where the answers' own rows lie: two planes, [answers, room, g, d], of which row j stands on rank j mod `ranks`.
#[derive(Debug)]
#[expect(missing_docs, reason = "the names say everything")]
pub struct OwnRows {
    pub k_arg: Tensor,
    pub v_arg: Tensor,
    pub rank: i64,
    pub ranks: i64,
    /// Position of row 0.
    pub prompt_end: i64,
}

/// Rows of the prompt at consecutive positions, [s, g, d].
#[derive(Debug)]
#[expect(missing_docs, reason = "the names say everything")]
pub struct PromptRun {
    pub start: i64,
    pub k_sgd: Tensor,
    pub v_sgd: Tensor,
}

/// Partial attention: out [parts, answers, heads, d] and log-sum-exp [parts, answers, heads], float32.
#[derive(Debug)]
#[expect(missing_docs, reason = "the type's comment explains both")]
pub struct Parts {
    pub out_pahd: Tensor,
    pub lse_pah: Tensor,
}

/// The kernels for one model.
#[derive(Debug)]
pub struct Kernels {
    launcher: Launcher,
    kind: Kind,
    processors: Processors,
    /// Whether blocks form clusters.
    clusters: bool,
}

fn dtype_number(kind: Kind) -> Option<c_int> {
    match kind {
        Kind::Float => Some(0),
        Kind::BFloat16 => Some(1),
        Kind::Half => Some(2),
        _ => None,
    }
}

/// Sizes of a model.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the names say everything")]
pub struct Sizes {
    pub head_dim: i64,
    /// Query heads that share a key head.
    pub heads_each: i64,
    pub width: i64,
    pub ffn_width: i64,
}

/// Whether there are kernels for a model of this dtype.
#[must_use]
pub fn has_dtype(kind: Kind) -> bool {
    dtype_number(kind).is_some()
}

/// Whether there are kernels for a model of this dtype and these sizes.
#[must_use]
pub fn covers(kind: Kind, sizes: &Sizes) -> bool {
    let Sizes { head_dim, heads_each, width, ffn_width } = *sizes;
    has_dtype(kind)
        && HEAD_DIMS.contains(&head_dim)
        && heads_each <= shapes::rows_max(head_dim)
        && width <= WIDTH_MAX
        && [width, ffn_width].iter().all(|size| size % 8 == 0)
}

/// Multiprocessors of this process's GPU, whether its blocks form clusters, and bytes of shared memory that one may have.
fn device_sizes() -> Result<(Processors, bool, i64), Error> {
    let (mut processors, mut clusters, mut shared) = (0, 0, 0);
    // SAFETY: places for three numbers.
    call("asking for the multiprocessors", |message, capacity| unsafe {
        longstraw_decode_device(&raw mut processors, &raw mut clusters, &raw mut shared, message, capacity)
    })?;
    Ok((Processors(i64::from(processors)), clusters != 0, i64::from(shared)))
}

fn refused(message: String) -> Error {
    Error::Torch { operation: "compiling a decode step", message }
}

/// Whether this process's GPU has as much shared memory as the kernels for this dtype ask for.
#[must_use]
pub fn device_suffices(kind: Kind) -> bool {
    kind == Kind::Float || device_sizes().is_ok_and(|(.., shared)| shared >= SHARED_MIN)
}

fn pointer(x: &Tensor) -> Pointer {
    x.data_ptr()
}

fn pointer_or_null(x: Option<&Tensor>) -> Pointer {
    x.map_or(null_mut(), pointer)
}

/// A count that fits: widths, heads and entries of a vocabulary are far below 2³¹.
fn count(number: i64) -> c_int {
    c_int::try_from(number).unwrap_or_else(|_| unreachable!("a width or count of {number}"))
}

#[expect(clippy::cast_possible_truncation, reason = "kernels compute in float32")]
fn single(number: f64) -> f32 {
    number as f32
}

impl Kernels {
    /// Compiles the kernels, unless this process has, which takes seconds.
    ///
    /// # Errors
    /// When NVRTC or the driver is not found or refuses, or there are none for this dtype and width.
    pub fn load(kind: Kind, head_dim: i64) -> Result<Kernels, Error> {
        let Some(dtype) = dtype_number(kind).filter(|_| HEAD_DIMS.contains(&head_dim)) else {
            return Err(refused(format!("no kernels for {kind:?} and heads of {head_dim}")));
        };
        if !device_suffices(kind) {
            return Err(refused(format!(
                "they need {SHARED_MIN} bytes of shared memory a block, which this GPU has not"
            )));
        }
        let source = CString::new(SOURCE).unwrap_or_default();
        // SAFETY: a terminated string that outlives the call, and plain numbers.
        call("compiling a decode step", |message, capacity| unsafe {
            longstraw_decode_load(source.as_ptr(), dtype, count(head_dim), message, capacity)
        })?;
        let (processors, clusters, _) = device_sizes()?;
        let launcher = Launcher::new(dtype, count(head_dim));
        Ok(Kernels { launcher, kind, processors, clusters })
    }

    /// How many multiprocessors the device has.
    #[must_use]
    pub fn processors(&self) -> Processors {
        self.processors
    }

    /// Records what `work` launches instead of starting it. What is launched must use nothing but these kernels.
    ///
    /// # Errors
    /// When `work` fails or the driver refuses.
    pub fn record<E: From<Error>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        self.launcher.record(work)
    }

    fn start<T>(&self, name: &'static CStr, shape: &Shape, argument: &mut T, tensors: &[&Tensor]) -> Result<(), Error> {
        let mut seen = tensors.iter();
        assert!(seen.all(|x| x.is_contiguous()), "a kernel of a decode step reads whole tensors");
        // SAFETY: the callers below fill each argument from tensors that they pass, whose shapes they have checked.
        unsafe { self.launcher.launch(name, shape, argument, tensors) }
    }

    fn raw(raw: &Raw) -> arguments::Raw {
        let size = raw.0.size();
        arguments::Raw { sums: pointer(&raw.0), splits: count(size[0]), width: count(size[2]) }
    }

    fn up(up: Option<Up>) -> arguments::Adapter {
        let none = arguments::Adapter { b_or: null_mut(), rank: 0, column: 0 };
        up.map_or(none, |up| arguments::Adapter {
            b_or: pointer(up.b_or),
            rank: count(up.b_or.size()[1]),
            column: count(up.column),
        })
    }

    fn norm(norm: Option<Norm>) -> arguments::Norm {
        let none = arguments::Norm { weight_w: null_mut(), eps: 0.0, one_plus: 0 };
        norm.map_or(none, |norm| arguments::Norm {
            weight_w: pointer(norm.weight_w),
            eps: single(norm.eps),
            one_plus: c_int::from(norm.one_plus),
        })
    }
}
