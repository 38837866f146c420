//! Attention of one rectangle of queries and keys: (out, log-sum-exp) forward, (dq, dk, dv) backward.
//!
//! The caller merges rectangles, so a query's out and log-sum-exp here cover only the keys of the rectangle. The
//! library's fused kernels compute rectangles that are entirely visible, and causal squares. A rectangle that a window
//! cuts is computed by matrix products with a mask.
//!
//! Shapes: t queries, s keys, h query heads, g key/value heads (h a multiple of g), d head width.

use tch::{Kind, Tensor};

use super::accumulation;
use super::kernels::{Kernel, Saved};

/// Which keys of a rectangle a query sees.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Visible {
    /// Every query sees every key.
    All,
    /// Queries and keys are at the same positions; a query sees itself and the keys before it.
    Causal,
    /// Query i sees key j iff 0 <= i + offset - j < window; both are counted from the start of the rectangle.
    Band {
        /// First query's position minus first key's position.
        offset: i64,
        /// Number of positions that a query sees, itself included.
        window: i64,
    },
}

/// Partial attention of one rectangle.
#[derive(Debug)]
pub struct Partial {
    /// Output over these keys, in the queries' dtype, [t, h, d].
    pub out_thd: Tensor,
    /// Log-sum-exp over these keys, in the accumulation dtype, [t, h]; −∞ where no key is visible.
    pub lse_th: Tensor,
}

/// Gradients of one rectangle.
#[derive(Debug)]
pub struct Gradients {
    /// [t, h, d]
    pub dq_thd: Tensor,
    /// [s, g, d]
    pub dk_sgd: Tensor,
    /// [s, g, d]
    pub dv_sgd: Tensor,
}

/// [n, heads, d] as the kernels' [1, heads, n, d]; no copy.
fn heads_first(x_nhd: &Tensor) -> Tensor {
    x_nhd.transpose(0, 1).unsqueeze(0)
}

fn rows_first(x_1hnd: &Tensor) -> Tensor {
    x_1hnd.squeeze_dim(0).transpose(0, 1)
}

impl Visible {
    /// Offset and window of the band with the same visible pairs.
    fn band(self, rows: i64, keys: i64) -> (i64, i64) {
        match self {
            Visible::All => (keys, rows + keys),
            Visible::Causal => (0, rows.max(1)),
            Visible::Band { offset, window } => (offset, window),
        }
    }
}

/// Attention of one rectangle, without a graph.
///
/// # Panics
/// When memory runs out. A fused kernel that refuses the rectangle is replaced, down to matrix products.
#[must_use]
pub fn forward(
    kernel: Kernel,
    q_thd: &Tensor,
    k_sgd: &Tensor,
    v_sgd: &Tensor,
    visible: Visible,
    scale: f64,
) -> Partial {
    let rows = q_thd.size()[0];
    match (visible, kernel.for_rows(rows)) {
        (Visible::All | Visible::Causal, Kernel::Cpu) => {
            let (out, lse) = Tensor::internal_scaled_dot_product_flash_attention_for_cpu(
                &heads_first(q_thd),
                &heads_first(k_sgd),
                &heads_first(v_sgd),
                0.0,
                visible == Visible::Causal,
                None::<&Tensor>,
                scale,
            );
            Partial { out_thd: rows_first(&out), lse_th: lse.squeeze_dim(0).transpose(0, 1) }
        }
        (Visible::All | Visible::Causal, kernel @ (Kernel::Cudnn | Kernel::Flash)) => {
            let (q, k, v) = (heads_first(q_thd), heads_first(k_sgd), heads_first(v_sgd));
            match kernel.fused(|kernel| kernel.forward(&q, &k, &v, visible == Visible::Causal, scale)) {
                Some((out, lse)) => Partial { out_thd: rows_first(&out), lse_th: lse.squeeze_dim(0).transpose(0, 1) },
                None => plain_forward(q_thd, k_sgd, v_sgd, visible, scale),
            }
        }
        _ => plain_forward(q_thd, k_sgd, v_sgd, visible, scale),
    }
}

/// [`forward`] by matrix products.
fn plain_forward(q_thd: &Tensor, k_sgd: &Tensor, v_sgd: &Tensor, visible: Visible, scale: f64) -> Partial {
    let (offset, window) = visible.band(q_thd.size()[0], k_sgd.size()[0]);
    let scores = banded_scores(q_thd, k_sgd, offset, window, scale);
    let lse_gmt = scores.logsumexp([-1i64], false);
    let p = weights(&scores, &lse_gmt);
    let v_g1sd = v_sgd.to_kind(p.kind()).transpose(0, 1).unsqueeze(1);
    let out_gmtd = p.matmul(&v_g1sd);
    Partial { out_thd: ungroup(&out_gmtd).to_kind(q_thd.kind()), lse_th: lse_gmt.flatten(0, 1).transpose(0, 1) }
}

/// Attention of one query for each of several answers over keys that all of them see, without a graph. `q_ahd` is [a,
/// h, d]; `k` and `v` are [s, g, d] if all answers share them, else [a, s, g, d]. Query heads of one key head become
/// rows of one rectangle, so keys are read once for all answers. Many keys are cut into parts that are computed in
/// parallel and merged by log-sum-exp.
///
/// # Panics
/// As [`forward`].
#[must_use]
pub fn few(kernel: Kernel, q_ahd: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> Partial {
    let (answers, heads, dim) = (q_ahd.size()[0], q_ahd.size()[1], q_ahd.size()[2]);
    let shared = k.dim() == 3;
    let (keys, groups) = if shared { (k.size()[0], k.size()[1]) } else { (k.size()[1], k.size()[2]) };
    let q_agmd = q_ahd.view([answers, groups, heads / groups, dim]);
    if !shared {
        let (out, lse) = rectangles(kernel, &q_agmd, &k.transpose(1, 2), &v.transpose(1, 2), scale);
        return Partial { out_thd: out.flatten(1, 2), lse_th: lse.flatten(1, 2) };
    }
    let q_1grd = q_agmd.transpose(0, 1).reshape([1, groups, -1, dim]);
    let part = FEW_KEYS.min(keys.max(1));
    let whole = keys / part;
    let mut sums = Vec::new();
    for (first, count, rows) in [(0, whole, part), (whole * part, 1, keys - whole * part)] {
        if count * rows > 0 {
            let cut = |x: &Tensor| x.narrow(0, first, count * rows).view([count, rows, groups, dim]).transpose(1, 2);
            let q = q_1grd.expand([count, -1, -1, -1], false);
            sums.push(merged(rectangles(kernel, &q, &cut(k), &cut(v), scale)));
        }
    }
    let (out_grd, lse_gr) = if sums.len() == 1 {
        sums.swap_remove(0)
    } else {
        let stack = |of: fn(&(Tensor, Tensor)) -> &Tensor| Tensor::stack(&sums.iter().map(of).collect::<Vec<_>>(), 0);
        merged((stack(|sum| &sum.0), stack(|sum| &sum.1)))
    };
    let answers_first = |x: &Tensor| x.unflatten(1, [answers, -1]).transpose(0, 1).flatten(1, 2);
    Partial { out_thd: answers_first(&out_grd), lse_th: answers_first(&lse_gr) }
}

/// Number of keys of a part in [`few`]: a long prompt has enough parts to occupy a GPU.
const FEW_KEYS: i64 = 2_048;

/// Out [b, g, r, d] and log-sum-exp [b, g, r] in the accumulation dtype of queries [b, g, r, d] and keys [b, g, s, d].
fn rectangles(kernel: Kernel, q: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> (Tensor, Tensor) {
    let acc = accumulation(q.kind());
    let (out, lse) = match kernel {
        Kernel::Cpu => {
            Tensor::internal_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, false, None::<&Tensor>, scale)
        }
        // cuDNN's kernel makes a plan for every number of keys, and each sampled token adds a key.
        Kernel::Cudnn | Kernel::Flash => Kernel::Flash
            .fused(|kernel| kernel.forward(q, k, v, false, scale))
            .unwrap_or_else(|| plain_rectangles(q, k, v, scale)),
        Kernel::Plain => plain_rectangles(q, k, v, scale),
    };
    (out.to_kind(acc), lse.to_kind(acc))
}

/// [`rectangles`] by matrix products.
fn plain_rectangles(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> (Tensor, Tensor) {
    let acc = accumulation(q.kind());
    let scores = q.to_kind(acc).matmul(&k.to_kind(acc).transpose(-1, -2)) * scale;
    let lse = scores.logsumexp([-1i64], false);
    ((scores - lse.unsqueeze(-1)).exp().matmul(&v.to_kind(acc)), lse)
}

/// Merges parts [b, …] over different keys.
fn merged((out, lse): (Tensor, Tensor)) -> (Tensor, Tensor) {
    if lse.size()[0] == 1 {
        return (out.squeeze_dim(0), lse.squeeze_dim(0));
    }
    let all = lse.logsumexp([0i64], false);
    ((out * (lse - &all).exp().unsqueeze(-1)).sum_dim_intlist(0i64, false, all.kind()), all)
}

/// Input of a rectangle's backward, merged over *all* rectangles of the queries.
#[derive(Debug)]
pub struct Merged<'a> {
    /// Queries, [t, h, d].
    pub q_thd: &'a Tensor,
    /// Merged output, in the queries' dtype, [t, h, d].
    pub out_thd: &'a Tensor,
    /// Merged log-sum-exp, in the accumulation dtype, [t, h].
    pub lse_th: &'a Tensor,
    /// Gradient of the merged output, [t, h, d].
    pub dout_thd: &'a Tensor,
}

/// Backward of one rectangle; exact, because out and log-sum-exp are the merged ones.
///
/// # Panics
/// As [`forward`].
#[must_use]
pub fn backward(
    kernel: Kernel,
    merged: &Merged,
    k_sgd: &Tensor,
    v_sgd: &Tensor,
    visible: Visible,
    scale: f64,
) -> Gradients {
    let rows = merged.q_thd.size()[0];
    let lse_1ht = || merged.lse_th.transpose(0, 1).unsqueeze(0).contiguous();
    match (visible, kernel.for_rows(rows)) {
        (Visible::All | Visible::Causal, Kernel::Cpu) => {
            let (dq, dk, dv) = Tensor::internal_scaled_dot_product_flash_attention_for_cpu_backward(
                &heads_first(merged.dout_thd),
                &heads_first(merged.q_thd),
                &heads_first(k_sgd),
                &heads_first(v_sgd),
                &heads_first(merged.out_thd),
                &lse_1ht(),
                0.0,
                visible == Visible::Causal,
                None::<&Tensor>,
                scale,
            );
            Gradients { dq_thd: rows_first(&dq), dk_sgd: rows_first(&dk), dv_sgd: rows_first(&dv) }
        }
        (Visible::All | Visible::Causal, kernel @ (Kernel::Cudnn | Kernel::Flash)) => {
            let (q, out, dout) = (heads_first(merged.q_thd), heads_first(merged.out_thd), heads_first(merged.dout_thd));
            let saved = Saved { q: &q, out: &out, lse: &lse_1ht(), dout: &dout };
            let (k, v) = (heads_first(k_sgd), heads_first(v_sgd));
            match kernel.fused(|kernel| kernel.backward(&saved, &k, &v, visible == Visible::Causal, scale)) {
                Some(gradients) => {
                    let [dq_thd, dk_sgd, dv_sgd] = gradients.map(|x| rows_first(&x));
                    Gradients { dq_thd, dk_sgd, dv_sgd }
                }
                None => plain_backward(merged, k_sgd, v_sgd, visible, scale),
            }
        }
        _ => plain_backward(merged, k_sgd, v_sgd, visible, scale),
    }
}

/// [`backward`] by matrix products.
fn plain_backward(merged: &Merged, k_sgd: &Tensor, v_sgd: &Tensor, visible: Visible, scale: f64) -> Gradients {
    let (offset, window) = visible.band(merged.q_thd.size()[0], k_sgd.size()[0]);
    let groups = k_sgd.size()[1];
    let acc = accumulation(k_sgd.kind());
    let scores = banded_scores(merged.q_thd, k_sgd, offset, window, scale);
    let lse_gmt = merged.lse_th.transpose(0, 1).unflatten(0, [groups, -1]);
    let p = weights(&scores, &lse_gmt);
    let q = group(merged.q_thd, groups).to_kind(acc);
    let dout = group(merged.dout_thd, groups).to_kind(acc);
    let delta = (group(merged.out_thd, groups).to_kind(acc) * &dout).sum_dim_intlist(-1i64, true, acc);
    let (k, v) = (k_sgd.to_kind(acc).transpose(0, 1), v_sgd.to_kind(acc).transpose(0, 1));
    let ds = &p * (dout.matmul(&v.unsqueeze(1).transpose(-1, -2)) - delta) * scale;
    let dq = ds.matmul(&k.unsqueeze(1));
    let dk = ds.transpose(-1, -2).matmul(&q).sum_dim_intlist(1i64, false, acc);
    let dv = p.transpose(-1, -2).matmul(&dout).sum_dim_intlist(1i64, false, acc);
    Gradients { dq_thd: ungroup(&dq), dk_sgd: dk.transpose(0, 1), dv_sgd: dv.transpose(0, 1) }
}

/// [t, h, d] as [g, h/g, t, d]: query head h belongs to key head h / (heads per group).
fn group(x_thd: &Tensor, groups: i64) -> Tensor {
    x_thd.transpose(0, 1).unflatten(0, [groups, -1])
}

fn ungroup(x_gmtd: &Tensor) -> Tensor {
    x_gmtd.flatten(0, 1).transpose(0, 1)
}

/// Scores [g, m, t, s] in the accumulation dtype, −∞ outside the band.
fn banded_scores(q_thd: &Tensor, k_sgd: &Tensor, offset: i64, window: i64, scale: f64) -> Tensor {
    let acc = accumulation(q_thd.kind());
    let (t, s, device) = (q_thd.size()[0], k_sgd.size()[0], q_thd.device());
    let q = group(q_thd, k_sgd.size()[1]).to_kind(acc);
    let k = k_sgd.to_kind(acc).transpose(0, 1).unsqueeze(1);
    let ahead = Tensor::arange(t, (Kind::Int64, device)).unsqueeze(1) + offset
        - Tensor::arange(s, (Kind::Int64, device)).unsqueeze(0);
    let hidden = ahead.lt(0).logical_or(&ahead.ge(window));
    (q.matmul(&k.transpose(-1, -2)) * scale).masked_fill(&hidden, f64::NEG_INFINITY)
}

/// Softmax weights from scores [g, m, t, s] and log-sum-exp [g, m, t]; 0 for a query that sees no key. Any other NaN
/// stays.
fn weights(scores: &Tensor, lse_gmt: &Tensor) -> Tensor {
    let lse = lse_gmt.unsqueeze(-1);
    (scores - &lse).exp().masked_fill(&lse.isneginf(), 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    #[test]
    fn a_few_queries_over_shared_or_own_keys_are_plain_softmax() {
        let randn = |shape: &[i64]| Tensor::randn(shape, (Kind::Double, Device::Cpu));
        for keys in [1, 5, FEW_KEYS, 2 * FEW_KEYS + 3] {
            let (q, k, v) = (randn(&[3, 4, 8]), randn(&[keys, 2, 8]), randn(&[keys, 2, 8]));
            let weights = |q: &Tensor, k: &Tensor| q.view([3, 2, 2, 8]).matmul(&k.transpose(-1, -2)) * 0.3;
            let (k_gsd, v_gsd) = (k.transpose(0, 1), v.transpose(0, 1));
            let scores = weights(&q, &k_gsd);
            let expected = scores.softmax(-1, Kind::Double).matmul(&v_gsd).flatten(1, 2);
            for kernel in [Kernel::Cpu, Kernel::Plain] {
                let shared = few(kernel, &q, &k, &v, 0.3);
                assert!((&shared.out_thd - &expected).abs().max().double_value(&[]) < 1e-13);
                let lse = scores.logsumexp([-1i64], false).flatten(1, 2);
                assert!((shared.lse_th - lse).abs().max().double_value(&[]) < 1e-13);
                let each = |x: &Tensor| x.unsqueeze(0).expand([3, -1, -1, -1], false);
                let own = few(kernel, &q, &each(&k), &each(&v), 0.3);
                assert!((own.out_thd - &expected).abs().max().double_value(&[]) < 1e-13);
            }
        }
    }

    #[test]
    fn a_nan_key_is_visible_in_a_band_and_a_query_without_keys_is_zero() {
        let randn = |rows: i64| Tensor::randn([rows, 2, 4], (Kind::Double, Device::Cpu));
        let (q, k, v) = (randn(3), randn(6), randn(6));
        let band = Visible::Band { offset: 3, window: 2 };
        assert!(forward(Kernel::Cpu, &q, &k, &v, band, 0.5).out_thd.isfinite().all().int64_value(&[]) == 1);
        let _ = k.get(4).fill_(f64::NAN);
        let seen = forward(Kernel::Cpu, &q, &k, &v, band, 0.5).out_thd.isnan().any().int64_value(&[]);
        assert_eq!(seen, 1, "the NaN stays");
        let none = forward(Kernel::Cpu, &q, &randn(6), &v, Visible::Band { offset: 100, window: 2 }, 0.5);
        assert!(none.out_thd.any().int64_value(&[]) == 0 && none.lse_th.isneginf().all().int64_value(&[]) == 1);
    }
}
