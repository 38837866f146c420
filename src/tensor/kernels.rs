//! Selects the attention kernel of a rectangle, and calls the fused kernels of the GPU.
//!
//! cuDNN's kernel is the fastest at every measured head width (docs/benchmarks.md), then flash attention. Both support
//! only half precision and not every width, so the first one that runs in a trial is used. Matrix products compute
//! everything else: float32 and float64 on a GPU, odd head widths, old GPUs.

use std::ffi::{c_char, c_int};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use tch::{Device, Kind, Tensor};

use super::Error;
use super::ffi::{call, raw, torch_tensor};
use crate::runtime::failure::out_of_memory;
use crate::runtime::terminal::say;

// SAFETY: these are the functions of gpu.cpp, compiled by build.rs, with the same parameter types.
unsafe extern "C" {
    fn longstraw_attention_forward(
        kernel: c_int,
        q: *mut torch_tensor,
        k: *mut torch_tensor,
        v: *mut torch_tensor,
        causal: c_int,
        scale: f64,
        out: *mut *mut torch_tensor,
        lse: *mut *mut torch_tensor,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_attention_backward(
        kernel: c_int,
        dout: *mut torch_tensor,
        q: *mut torch_tensor,
        k: *mut torch_tensor,
        v: *mut torch_tensor,
        out: *mut torch_tensor,
        lse: *mut torch_tensor,
        causal: c_int,
        scale: f64,
        dq: *mut *mut torch_tensor,
        dk: *mut *mut torch_tensor,
        dv: *mut *mut torch_tensor,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
}

/// Computes a rectangle of attention that no window cuts.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kernel {
    /// The library's fused CPU kernel.
    Cpu,
    /// cuDNN's, on a GPU, half precision.
    Cudnn,
    /// Flash attention, on a GPU, half precision.
    Flash,
    /// Matrix products, anywhere.
    Plain,
}

/// Whether this process has said that cuDNN's kernel, or flash attention, has refused a rectangle: it would say so in every layer.
static REFUSED: [AtomicBool; 2] = [AtomicBool::new(false), AtomicBool::new(false)];

/// Queries and keys of a rectangle on which a kernel is tried.
#[derive(Debug)]
struct Trial {
    queries: i64,
    keys: i64,
    causal: bool,
}

/// Fewest queries of a rectangle that cuDNN's kernel gets. It makes a plan for every pair of sizes, and answers have other lengths
/// in every update: below, the plan takes longer than the rectangle. It does not support a single query in any case.
const CUDNN_ROWS_MIN: i64 = 512;

/// What a run meets: a causal square, also of an odd size and of one row; more keys than queries, fewer, and a single one.
const TRIALS: [Trial; 11] = [
    Trial { queries: 512, keys: 512, causal: true },
    Trial { queries: 643, keys: 643, causal: true },
    Trial { queries: 515, keys: 1029, causal: false },
    Trial { queries: 577, keys: 1, causal: false },
    Trial { queries: 128, keys: 128, causal: true },
    Trial { queries: 3, keys: 3, causal: true },
    Trial { queries: 1, keys: 1, causal: true },
    Trial { queries: 129, keys: 257, causal: false },
    Trial { queries: 131, keys: 5, causal: false },
    Trial { queries: 2, keys: 1, causal: false },
    Trial { queries: 1, keys: 129, causal: false },
];

/// Heads and dtype that a kernel must support.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Number of query heads.
    pub query: i64,
    /// Number of key and value heads.
    pub kv: i64,
    /// Width of a head.
    pub dim: i64,
    /// The model's dtype.
    pub kind: Kind,
}

impl Kernel {
    /// The fastest kernel that runs on `device`. cuDNN's kernel requires that flash attention runs too, for few
    /// rows. With `repeatable`, flash attention is preferred.
    #[must_use]
    pub fn choose(device: Device, heads: &Heads, repeatable: bool) -> Kernel {
        if device == Device::Cpu {
            return Kernel::Cpu;
        }
        if !Kernel::Flash.runs(device, heads) {
            return Kernel::Plain;
        }
        if !repeatable && Kernel::Cudnn.runs(device, heads) { Kernel::Cudnn } else { Kernel::Flash }
    }

    /// Whether forward and backward run for one rectangle of each kind that a run has ([`TRIALS`]).
    ///
    /// # Panics
    /// When memory for the trial runs out: the result would differ between ranks.
    #[must_use]
    pub fn runs(self, device: Device, heads: &Heads) -> bool {
        if !matches!(heads.kind, Kind::BFloat16 | Kind::Half) || heads.dim % 8 != 0 {
            return false;
        }
        TRIALS
            .iter()
            .filter(|trial| self.for_rows(trial.queries) == self)
            .all(|trial| self.runs_one(device, heads, trial))
    }

    fn runs_one(self, device: Device, heads: &Heads, trial: &Trial) -> bool {
        let ones = |count: i64, rows: i64| Tensor::ones([1, count, rows, heads.dim], (heads.kind, device));
        let (q, k) = (ones(heads.query, trial.queries), ones(heads.kv, trial.keys));
        let tried = self.forward(&q, &k, &k, trial.causal, 1.0).and_then(|(out, lse)| {
            let saved = Saved { q: &q, out: &out, lse: &lse, dout: &out };
            self.backward(&saved, &k, &k, trial.causal, 1.0)
        });
        match tried {
            Ok(_) => true,
            Err(error) if out_of_memory(&error.to_string()) => panic!("{error}"),
            Err(error) => {
                tracing::info!("{self:?} attention does not support {heads:?} with {trial:?}: {error}");
                false
            }
        }
    }

    /// The kernel for a rectangle of `rows` queries.
    #[must_use]
    pub(super) fn for_rows(self, rows: i64) -> Kernel {
        if self == Kernel::Cudnn && rows < CUDNN_ROWS_MIN { Kernel::Flash } else { self }
    }

    /// What `attempt` returns with this fused kernel, or with flash attention if this one refuses; `None` if both refuse, and
    /// matrix products are left, which take more memory than planned. The first refusal of a kernel is said on the screen.
    ///
    /// # Panics
    /// When memory runs out: another kernel would not mend that.
    pub(super) fn fused<T>(self, attempt: impl Fn(Kernel) -> Result<T, Error>) -> Option<T> {
        let kernels = if self == Kernel::Cudnn { vec![Kernel::Cudnn, Kernel::Flash] } else { vec![self] };
        for kernel in kernels {
            match attempt(kernel) {
                Ok(done) => return Some(done),
                Err(error) if out_of_memory(&error.to_string()) => panic!("{error}"),
                Err(error) => {
                    let words = format!(
                        "warning: {} attention refuses a rectangle, another kernel computes it: {error}",
                        kernel.name()
                    );
                    if REFUSED[usize::from(kernel == Kernel::Flash)].swap(true, Ordering::Relaxed) {
                        tracing::debug!("{words}");
                    } else {
                        say(&words);
                    }
                }
            }
        }
        None
    }

    /// The name in receipts.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Cpu => "cpu",
            Kernel::Cudnn => "cudnn",
            Kernel::Flash => "flash",
            Kernel::Plain => "plain",
        }
    }

    fn number(self) -> c_int {
        c_int::from(self == Kernel::Cudnn) + 2 * c_int::from(self == Kernel::Flash)
    }

    /// Out [1, h, t, d] and log-sum-exp [1, h, t] in float32, of queries [1, h, t, d] and keys and values [1, g, s, d].
    pub(super) fn forward(
        self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        causal: bool,
        scale: f64,
    ) -> Result<(Tensor, Tensor), Error> {
        let (mut out, mut lse) = (null_mut(), null_mut());
        // SAFETY: live tensors, and places for two pointers.
        call("attention forward", |message, capacity| unsafe {
            let causal = c_int::from(causal);
            let number = self.number();
            longstraw_attention_forward(
                number,
                raw(q),
                raw(k),
                raw(v),
                causal,
                scale,
                &raw mut out,
                &raw mut lse,
                message,
                capacity,
            )
        })?;
        // SAFETY: the callee has made two tensors and hands them over.
        Ok(unsafe { (Tensor::from_ptr(out.cast()), Tensor::from_ptr(lse.cast())) })
    }

    /// Gradients of queries, keys and values, shaped like them.
    pub(super) fn backward(
        self,
        saved: &Saved,
        k: &Tensor,
        v: &Tensor,
        causal: bool,
        scale: f64,
    ) -> Result<[Tensor; 3], Error> {
        let (mut dq, mut dk, mut dv) = (null_mut(), null_mut(), null_mut());
        // SAFETY: live tensors, and places for three pointers.
        call("attention backward", |message, capacity| unsafe {
            longstraw_attention_backward(
                self.number(),
                raw(saved.dout),
                raw(saved.q),
                raw(k),
                raw(v),
                raw(saved.out),
                raw(saved.lse),
                c_int::from(causal),
                scale,
                &raw mut dq,
                &raw mut dk,
                &raw mut dv,
                message,
                capacity,
            )
        })?;
        // SAFETY: the callee has made three tensors and hands them over.
        Ok(unsafe { [dq, dk, dv].map(|made| Tensor::from_ptr(made.cast())) })
    }
}

/// Queries and their merged outputs, heads first.
pub(super) struct Saved<'a> {
    /// [1, h, t, d]
    pub(super) q: &'a Tensor,
    /// [1, h, t, d]
    pub(super) out: &'a Tensor,
    /// [1, h, t], contiguous.
    pub(super) lse: &'a Tensor,
    /// [1, h, t, d]
    pub(super) dout: &'a Tensor,
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    fn refusal(message: &str) -> Error {
        Error::Torch { operation: "attention", message: message.to_owned() }
    }

    #[test]
    fn a_refused_rectangle_goes_to_the_next_kernel_and_at_last_to_matrix_products() {
        let tried = RefCell::new(Vec::new());
        let attempt = |refusing: &'static [Kernel]| {
            let tried = &tried;
            move |kernel: Kernel| {
                tried.borrow_mut().push(kernel);
                if refusing.contains(&kernel) { Err(refusal("not supported")) } else { Ok(kernel) }
            }
        };
        assert_eq!(Kernel::Cudnn.fused(attempt(&[])), Some(Kernel::Cudnn));
        assert_eq!(Kernel::Cudnn.fused(attempt(&[Kernel::Cudnn])), Some(Kernel::Flash));
        assert_eq!(Kernel::Cudnn.fused(attempt(&[Kernel::Cudnn, Kernel::Flash])), None);
        assert_eq!(Kernel::Flash.fused(attempt(&[Kernel::Flash])), None);
        assert_eq!(tried.borrow().len(), 1 + 2 + 2 + 1);
    }

    #[test]
    #[should_panic(expected = "out of memory")]
    fn running_out_of_memory_is_no_refusal() {
        let _ = Kernel::Cudnn.fused(|_| Err::<(), _>(refusal("CUDA out of memory")));
    }

    #[test]
    fn few_rows_are_tried_with_flash_attention_only() {
        let tried_with =
            |kernel: Kernel| TRIALS.iter().filter(|trial| kernel.for_rows(trial.queries) == kernel).count();
        assert_eq!((tried_with(Kernel::Cudnn), tried_with(Kernel::Flash)), (4, TRIALS.len()));
    }
}
