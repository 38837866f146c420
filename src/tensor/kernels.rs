//! Selects the attention kernel of a rectangle, and calls the fused kernels of the GPU.
//!
//! cuDNN's kernel is the fastest at every measured head width (docs/benchmarks.md), then flash attention. Both support
//! only half precision and not every width, so the first one that runs in a trial is used. Matrix products compute
//! everything else: float32 and float64 on a GPU, odd head widths, old GPUs.

use std::ffi::{c_char, c_int};
use std::ptr::null_mut;

use serde::Serialize;
use tch::{Device, Kind, Tensor};

use super::Error;
use super::ffi::{call, raw, torch_tensor};
use crate::runtime::failure::out_of_memory;

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
    /// The fastest kernel that runs on `device`. cuDNN's kernel requires that flash attention runs too, for single
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

    /// Whether forward and backward of a small rectangle run.
    ///
    /// # Panics
    /// When memory for the trial runs out: the result would differ between ranks.
    #[must_use]
    pub fn runs(self, device: Device, heads: &Heads) -> bool {
        if !matches!(heads.kind, Kind::BFloat16 | Kind::Half) || heads.dim % 8 != 0 {
            return false;
        }
        let ones = |count: i64| Tensor::ones([1, count, 128, heads.dim], (heads.kind, device));
        let (q, k) = (ones(heads.query), ones(heads.kv));
        let tried = self.forward(&q, &k, &k, true, 1.0).and_then(|(out, lse)| {
            let saved = Saved { q: &q, out: &out, lse: &lse, dout: &out };
            self.backward(&saved, &k, &k, true, 1.0)
        });
        match tried {
            Ok(_) => true,
            Err(error) if out_of_memory(&error.to_string()) => panic!("{error}"),
            Err(error) => {
                tracing::info!("{self:?} attention does not support {heads:?}: {error}");
                false
            }
        }
    }

    /// The kernel for a rectangle of `rows` queries: cuDNN's does not support a single row.
    #[must_use]
    pub(super) fn for_rows(self, rows: i64) -> Kernel {
        if self == Kernel::Cudnn && rows < 2 { Kernel::Flash } else { self }
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
