//! Arguments of the kernels of a decode step, field by field as in arguments.cu and sample.cu.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

pub(super) type Pointer = *mut c_void;

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Raw {
    pub(super) sums: Pointer,
    pub(super) splits: c_int,
    pub(super) width: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Adapter {
    pub(super) b_or: Pointer,
    pub(super) rank: c_int,
    pub(super) column: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Rows {
    pub(super) weight: Pointer,
    pub(super) outputs: c_int,
    pub(super) column: c_int,
}

impl Rows {
    pub(super) const NONE: Rows = Rows { weight: null_mut(), outputs: 0, column: 0 };
}

#[repr(C)]
pub(super) struct Product {
    pub(super) x_ai: Pointer,
    pub(super) raw: Raw,
    pub(super) answers: c_int,
    pub(super) inputs: c_int,
    pub(super) parts: c_int,
    pub(super) rows: [Rows; 8],
}

#[repr(C)]
pub(super) struct Embed {
    pub(super) tokens_a: Pointer,
    pub(super) embedding_vw: Pointer,
    pub(super) x_aw: Pointer,
    pub(super) scale: f32,
    pub(super) answers: c_int,
    pub(super) width: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Norm {
    pub(super) weight_w: Pointer,
    pub(super) eps: f32,
    pub(super) one_plus: c_int,
}

#[repr(C)]
pub(super) struct Residual {
    pub(super) raw: Raw,
    pub(super) adapter: Adapter,
    pub(super) bias_w: Pointer,
    pub(super) x_aw: Pointer,
    pub(super) h_aw: Pointer,
    pub(super) norm_out: Norm,
    pub(super) norm: Norm,
    pub(super) answers: c_int,
    pub(super) width: c_int,
}

#[repr(C)]
pub(super) struct Heads {
    pub(super) raw: Raw,
    pub(super) columns: [c_int; 3],
    pub(super) adapters: [Adapter; 3],
    pub(super) biases: [Pointer; 3],
    pub(super) norms: [Norm; 2],
    pub(super) frequencies: Pointer,
    pub(super) gain: f32,
    pub(super) rotary: c_int,
    pub(super) q_ahd: Pointer,
    pub(super) own_k: Pointer,
    pub(super) own_v: Pointer,
    pub(super) room: i64,
    pub(super) first: i64,
    pub(super) step: i64,
    pub(super) prompt_end: i64,
    pub(super) at: Pointer,
    pub(super) answers: c_int,
    pub(super) queries: c_int,
    pub(super) groups: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Run {
    pub(super) k_sgd: Pointer,
    pub(super) v_sgd: Pointer,
    pub(super) start: i64,
    pub(super) rows: i64,
}

impl Run {
    pub(super) const NONE: Run = Run { k_sgd: null_mut(), v_sgd: null_mut(), start: 0, rows: 0 };
}

#[repr(C)]
pub(super) struct Attend {
    pub(super) q_ahd: Pointer,
    pub(super) runs: [Run; 2],
    pub(super) prompt_parts: i64,
    pub(super) own_parts: i64,
    pub(super) own_k: Pointer,
    pub(super) own_v: Pointer,
    pub(super) room: i64,
    pub(super) first: i64,
    pub(super) step: i64,
    pub(super) prompt_end: i64,
    pub(super) window: i64,
    pub(super) at: Pointer,
    pub(super) scale: f32,
    pub(super) answers: c_int,
    pub(super) heads: c_int,
    pub(super) groups: c_int,
    pub(super) out_pahd: Pointer,
    pub(super) lse_pah: Pointer,
}

#[repr(C)]
pub(super) struct Merge {
    pub(super) out_pahd: Pointer,
    pub(super) lse_pah: Pointer,
    pub(super) parts: i64,
    pub(super) whole_an: Pointer,
    pub(super) out_ahd: Pointer,
    pub(super) lse_ah: Pointer,
    pub(super) answers: c_int,
    pub(super) heads: c_int,
}

#[repr(C)]
pub(super) struct Activate {
    pub(super) raw: Raw,
    pub(super) columns: [c_int; 2],
    pub(super) adapters: [Adapter; 2],
    pub(super) h_af: Pointer,
    pub(super) gelu: c_int,
    pub(super) answers: c_int,
    pub(super) width: c_int,
}

#[repr(C)]
pub(super) struct Sample {
    pub(super) raw: Raw,
    pub(super) cap: f32,
    pub(super) temperature: f32,
    pub(super) top_p: f64,
    pub(super) top_k: i64,
    pub(super) roots: Pointer,
    pub(super) greedy_a: Pointer,
    pub(super) logits_av: Pointer,
    pub(super) parts: Pointer,
    pub(super) best: Pointer,
    pub(super) tokens_a: Pointer,
    pub(super) drawn: Pointer,
    pub(super) at: Pointer,
    pub(super) answers: c_int,
    pub(super) vocabulary: c_int,
    pub(super) chunks: c_int,
}
