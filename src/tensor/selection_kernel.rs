//! The CUDA kernels of index scoring (`selection_score.cu`, `selection_choice.cu`): compiled at run time for the GPU at
//! hand, then launched on the stream of the computation.
//!
//! For each row there is a buffer of candidates. Keys go in segments: a segment appends the keys that beat the row's
//! worst chosen key, then full buffers are reduced to the best `n`.

use std::ffi::{CString, c_char, c_int};

use tch::{Kind, Tensor};

use super::Error;
use super::ffi::{call, raw, torch_tensor};

const SOURCE: &str = concat!(include_str!("selection_score.cu"), include_str!("selection_choice.cu"));

/// Keys of a segment: a row's buffer has room for as many candidates beyond two times `n`.
pub const SEGMENT_KEYS: i64 = 8192;
/// The largest `n`: a row's buffer must fit into the shared memory of a multiprocessor.
pub const CHOSEN_MAX: i64 = 4096;
/// Rows whose buffers exist at a time.
pub const ROWS_MAX: i64 = 4096;

// SAFETY: these are the functions of selection.cpp, compiled by build.rs, with the same parameter types.
unsafe extern "C" {
    fn longstraw_index_load(
        source: *const c_char,
        heads: c_int,
        width: c_int,
        portable: c_int,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_index_loaded(heads: i64, width: i64) -> c_int;
    fn longstraw_index_score(
        query: *mut torch_tensor,
        weight: *mut torch_tensor,
        position: *mut torch_tensor,
        key: *mut torch_tensor,
        first: i64,
        step: i64,
        begin: i64,
        end: i64,
        fresh: c_int,
        candidates: *mut torch_tensor,
        counts: *mut torch_tensor,
        thresholds: *mut torch_tensor,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_index_compact(
        heads: i64,
        width: i64,
        candidates: *mut torch_tensor,
        counts: *mut torch_tensor,
        thresholds: *mut torch_tensor,
        n: c_int,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_index_finish(
        heads: i64,
        width: i64,
        candidates: *mut torch_tensor,
        counts: *mut torch_tensor,
        thresholds: *mut torch_tensor,
        n: c_int,
        scores: *mut torch_tensor,
        positions: *mut torch_tensor,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
}

/// Which instructions the kernels are compiled to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Instructions {
    /// The fastest that the GPU has: on Hopper its asynchronous matrix products and its copy engine.
    Native,
    /// Those of every GPU since compute capability 8.0.
    Portable,
}

/// Whether there are kernels for `heads` index heads of `width`, bfloat16 queries and keys, and `n` chosen keys.
#[must_use]
pub fn covers(heads: i64, width: i64, kind: Kind, n: i64) -> bool {
    kind == Kind::BFloat16
        && [16, 32, 64].contains(&heads)
        && [64, 128].contains(&width)
        && (1..=CHOSEN_MAX).contains(&n)
}

/// Compiles and loads the kernels for `heads` index heads of `width`, in the place of those loaded for the same shape.
/// Takes about a second. Call outside a recorded graph.
///
/// # Errors
/// When NVRTC or the driver is not found or refuses.
pub fn load(heads: i64, width: i64, instructions: Instructions) -> Result<(), Error> {
    let source = CString::new(SOURCE).unwrap_or_default();
    let number = |count: i64| c_int::try_from(count).unwrap_or(0);
    let portable = c_int::from(instructions == Instructions::Portable);
    // SAFETY: a terminated string that outlives the call, and plain numbers.
    call("compiling index kernels", |message, capacity| unsafe {
        longstraw_index_load(source.as_ptr(), number(heads), number(width), portable, message, capacity)
    })
}

/// Whether [`load`] has loaded kernels for this shape.
#[must_use]
pub fn loaded(heads: i64, width: i64) -> bool {
    // SAFETY: plain numbers; no exception comes out.
    unsafe { longstraw_index_loaded(heads, width) != 0 }
}

/// The running choice for some rows.
#[derive(Debug)]
pub struct Chooser {
    q_tji: Tensor,
    weight_tj: Tensor,
    position_t: Tensor,
    /// [t, c] int64.
    candidates_tc: Tensor,
    /// [t] int32: candidates of a row.
    count_t: Tensor,
    /// [t] int64: only candidates above it are appended.
    threshold_t: Tensor,
    n: i64,
    /// No key has been offered yet.
    fresh: bool,
}

impl Chooser {
    /// For the rows of `q_tji` [t, j, i] bfloat16, with `weight_tj` [t, j] float32 and `position_t` [t] int64, on the GPU.
    #[must_use]
    pub fn new(q_tji: &Tensor, weight_tj: &Tensor, position_t: &Tensor, n: i64) -> Chooser {
        let (rows, device) = (q_tji.size()[0], q_tji.device());
        Chooser {
            q_tji: q_tji.contiguous(),
            weight_tj: weight_tj.contiguous(),
            position_t: position_t.contiguous(),
            candidates_tc: Tensor::empty([rows, 2 * n + SEGMENT_KEYS], (Kind::Int64, device)),
            count_t: Tensor::zeros([rows], (Kind::Int, device)),
            threshold_t: Tensor::zeros([rows], (Kind::Int64, device)),
            n,
            fresh: true,
        }
    }

    /// Chooses also from `key_si` [s, i] bfloat16, at positions `first`, `first` + `step`, ….
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn offer(&mut self, key_si: &Tensor, first: i64, step: i64) -> Result<(), Error> {
        let key_si = key_si.contiguous();
        let aligned = (key_si.data_ptr() as usize).is_multiple_of(16);
        let key_si = if aligned { key_si } else { key_si.copy() };
        let count = key_si.size()[0];
        let mut begin = 0;
        while begin < count {
            let end = (begin + SEGMENT_KEYS).min(count);
            // SAFETY: live tensors of the shapes and dtypes that `new` and this function state.
            call("index scores", |message, capacity| unsafe {
                longstraw_index_score(
                    raw(&self.q_tji),
                    raw(&self.weight_tj),
                    raw(&self.position_t),
                    raw(&key_si),
                    first,
                    step,
                    begin,
                    end,
                    c_int::from(self.fresh),
                    raw(&self.candidates_tc),
                    raw(&self.count_t),
                    raw(&self.threshold_t),
                    message,
                    capacity,
                )
            })?;
            self.fresh = false;
            self.compact()?;
            begin = end;
        }
        Ok(())
    }

    fn compact(&self) -> Result<(), Error> {
        let (heads, width) = (self.q_tji.size()[1], self.q_tji.size()[2]);
        // SAFETY: live tensors that `new` has made.
        call("the choice of index keys", |message, capacity| unsafe {
            longstraw_index_compact(
                heads,
                width,
                raw(&self.candidates_tc),
                raw(&self.count_t),
                raw(&self.threshold_t),
                c_int::try_from(self.n).unwrap_or(0),
                message,
                capacity,
            )
        })
    }

    /// Scores [t, n] float32 and positions [t, n] int32 of the chosen keys in ascending order of position; what is left
    /// over has score −∞ and position −1.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn finish(self) -> Result<(Tensor, Tensor), Error> {
        let (rows, device) = (self.q_tji.size()[0], self.q_tji.device());
        let score_tn = Tensor::empty([rows, self.n], (Kind::Float, device));
        let position_tn = Tensor::empty([rows, self.n], (Kind::Int, device));
        // SAFETY: live tensors that `new` and this function have made.
        call("the choice of index keys", |message, capacity| unsafe {
            longstraw_index_finish(
                self.q_tji.size()[1],
                self.q_tji.size()[2],
                raw(&self.candidates_tc),
                raw(&self.count_t),
                raw(&self.threshold_t),
                c_int::try_from(self.n).unwrap_or(0),
                raw(&score_tn),
                raw(&position_tn),
                message,
                capacity,
            )
        })?;
        Ok((score_tn, position_tn))
    }
}
