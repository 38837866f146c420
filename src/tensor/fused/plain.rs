//! Elementwise work of a block by operators of libtorch: any device, any dtype.

use tch::{Device, Tensor};

use super::{Activation, Scale};
use crate::tensor::accumulation;

/// Rows at least this wide are normalised by the library's fused kernel on a GPU, which takes one block of threads a row:
/// too many for the narrow rows of a head.
const FUSED_NORM_WIDTH: i64 = 512;
/// Elements up to which that does not matter, and fewer launches do: rows of one token.
const FUSED_NORM_FEW: usize = 1 << 18;

/// x / √(mean(x²) + eps) in the dtype of `x`, computed in the accumulation dtype.
fn normalised(x: &Tensor, eps: f64) -> Tensor {
    let acc = accumulation(x.kind());
    let width = x.size().last().copied().unwrap_or(0);
    let wide_or_few = width >= FUSED_NORM_WIDTH || x.numel() <= FUSED_NORM_FEW;
    if x.device() != Device::Cpu && wide_or_few && x.numel() > 0 {
        return x.internal_fused_rms_norm([width], None::<&Tensor>, eps).0;
    }
    let wide = x.to_kind(acc);
    let mean = (&wide * &wide).mean_dim(-1i64, true, acc);
    (wide * (mean + eps).rsqrt()).to_kind(x.kind())
}

/// x / √(mean(x²) + eps), normalised in the accumulation dtype, times the weight in the dtype of `x`; or times 1 + the weight
/// in the accumulation dtype.
pub fn normed(x: &Tensor, scale: &Scale) -> Tensor {
    let Scale { weight, eps, one_plus } = *scale;
    if !one_plus {
        return normalised(x, eps) * weight;
    }
    let acc = accumulation(x.kind());
    (normalised(&x.to_kind(acc), eps) * (weight.to_kind(acc) + 1.0)).to_kind(x.kind())
}

/// activation(gate) · up.
pub fn gated(gate_tf: &Tensor, up_tf: &Tensor, activation: Activation) -> Tensor {
    let active_tf = match activation {
        Activation::Silu => gate_tf.silu(),
        Activation::GeluTanh => gate_tf.gelu("tanh"),
    };
    active_tf * up_tf
}

/// silu(z) · x in the accumulation dtype, rounded once to the dtype of `z`.
pub fn silu_gated(z: &Tensor, x: &Tensor) -> Tensor {
    let acc = accumulation(z.kind());
    (x.to_kind(acc) * z.to_kind(acc).silu()).to_kind(z.kind())
}

/// Rotates pairs (j, j + n) of the first 2n dimensions of each head; the rest pass unchanged.
///
/// `x_thd` is [t, heads, d], `cos_tn` and `sin_tn` are [t, n] in the same dtype, with 2n ≤ d. The result has x's shape.
///
/// # Panics
/// When `x_thd` has not three dimensions.
pub fn rotate_half_split(x_thd: &Tensor, cos_tn: &Tensor, sin_tn: &Tensor) -> Tensor {
    let (_, _, head_dim) = x_thd.size3().expect("heads are laid out as [t, heads, d]");
    let pairs = *cos_tn.size().last().expect("tables are laid out as [t, n]");
    let (cos, sin) = (cos_tn.unsqueeze(1), sin_tn.unsqueeze(1));
    let (first, second) = (x_thd.narrow(2, 0, pairs), x_thd.narrow(2, pairs, pairs));
    let mut parts = vec![&first * &cos - &second * &sin, &second * &cos + &first * &sin];
    if head_dim > 2 * pairs {
        parts.push(x_thd.narrow(2, 2 * pairs, head_dim - 2 * pairs));
    }
    Tensor::cat(&parts, 2)
}

/// Queries and keys by head, normed where `scales` are given, then rotated.
pub fn turned(heads: [&Tensor; 2], scales: Option<[Scale; 2]>, cos_tn: &Tensor, sin_tn: &Tensor) -> (Tensor, Tensor) {
    let turn = |x_thd: &Tensor| rotate_half_split(x_thd, cos_tn, sin_tn);
    let [q_thd, k_tgd] = heads;
    match scales {
        Some([of_queries, of_keys]) => (turn(&normed(q_thd, &of_queries)), turn(&normed(k_tgd, &of_keys))),
        None => (turn(q_thd), turn(k_tgd)),
    }
}

/// Merges partial attention over further keys into `out_thd` and `lse_th` by log-sum-exp, in place.
pub fn merge_into(out_thd: &mut Tensor, lse_th: &mut Tensor, new_out_thd: &Tensor, new_lse_th: &Tensor) {
    let lse = lse_th.logaddexp(new_lse_th);
    // Only −∞ − −∞ means that no key was visible; any other NaN stays visible.
    let is_empty = lse.isneginf();
    let weight = |part: &Tensor| (part - &lse).exp().masked_fill(&is_empty, 0.0).unsqueeze(-1);
    let old_weight = weight(lse_th);
    let new_weight = weight(new_lse_th);
    // In place, with the new part in its own dtype: no third tensor of this size.
    let _ = out_thd.g_mul_(&old_weight);
    let _ = out_thd.addcmul_(new_out_thd, &new_weight);
    lse_th.copy_(&lse);
}
