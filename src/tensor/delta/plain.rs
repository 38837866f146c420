//! The gated delta rule over consecutive rows, in chunks, by operations of libtorch: the form that judges every other.
//!
//! For each value head a state S, [k, v], goes from row to row, with decay α = exp(g) and strength β of the row:
//!
//! ```text
//!   S ← α S        S ← S + β k ⊗ (v − Sᵀk)        o = Sᵀq
//! ```
//!
//! Within a chunk of rows, with `G_i = Σ_{j≤i} g_j` and `Γ_ij = exp(G_i − G_j)` for i ≥ j, else 0 (Yang et al., arXiv
//! 2412.06464):
//!
//! ```text
//!   A = strictly lower part of (βK Kᵀ)∘Γ      U = (I + A)⁻¹ βV      W = (I + A)⁻¹ (exp(G)∘βK)
//!   V' = U − W S        O = (exp(G)∘Q) S + ((Q Kᵀ)∘Γ) V'        S ← exp(G_last) S + (exp(G_last − G)∘K)ᵀ V'
//! ```
//!
//! So rows are an affine map of the state before them: `S_out = T S + B` and O = C S + O₀. Everything is computed in the
//! accumulation dtype, and a state is never of another dtype.
//!
//! Names of tensors end in one letter for each dimension: t rows, u channels (queries, keys and values of all heads), h value
//! heads, n chunks, r and s rows of a chunk, k width of a key, v width of a value.

use tch::{Kind, Tensor};

use super::{DeltaGradient, DeltaHeads, DeltaRows, Transition};
use crate::runtime::units::{float, from_dim};
use crate::tensor::boundary::backward as backward_graph;
use crate::tensor::{self, accumulation};

/// Rows of a chunk.
pub const CHUNK: i64 = 64;

/// Added to a sum of squares before queries and keys are divided by its root.
const NORM_EPS: f64 = 1e-6;

/// What a chunk needs besides the state, [h, n, …] in the accumulation dtype.
struct Chunks {
    /// W, [h, n, r, k].
    w_hnrk: Tensor,
    /// U, [h, n, r, v].
    u_hnrv: Tensor,
    /// exp(G)∘Q, [h, n, r, k].
    query_hnrk: Tensor,
    /// (Q Kᵀ)∘Γ, [h, n, r, s].
    score_hnrs: Tensor,
    /// `exp(G_last − G)`∘K, [h, n, r, k].
    key_hnrk: Tensor,
    /// `exp(G_last)`, [h, n, 1, 1].
    decay_hn11: Tensor,
    /// How many rows there are; the last chunk is padded.
    rows: i64,
}

impl Chunks {
    fn new(heads: &DeltaHeads, rows: &DeltaRows) -> Chunks {
        let acc = accumulation(rows.y_tu.kind());
        let t = rows.y_tu.size()[0];
        let chunks = (t + CHUNK - 1) / CHUNK;
        let padding = chunks * CHUNK - t;
        let padded = |x: &Tensor| x.constant_pad_nd([0, 0, 0, padding]);
        let y_tu = padded(&rows.y_tu.to_kind(acc));
        let (keys, values) = (heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim);
        let by_head = |first: i64, width: i64, count: i64| {
            let x = y_tu.narrow(1, first, width).view([chunks, CHUNK, count, width / count]).permute([2, 0, 1, 3]);
            x.repeat_interleave_self_int(heads.value_heads / count, 0, None)
        };
        // A row of zeros stays zero: padding takes no part.
        let normed = |x: Tensor| &x * ((&x * &x).sum_dim_intlist(-1i64, true, acc) + NORM_EPS).rsqrt();
        let q_hnrk = normed(by_head(0, keys, heads.key_heads)) * float(from_dim(heads.key_dim)).powf(-0.5);
        let k_hnrk = normed(by_head(keys, keys, heads.key_heads));
        let v_hnrv = by_head(2 * keys, values, heads.value_heads);
        let by_row = |x_th: &Tensor| padded(x_th).view([chunks, CHUNK, heads.value_heads]).permute([2, 0, 1]);
        let strength_hnr1 = by_row(&rows.strength_th).unsqueeze(-1);
        // In float64: differences of large sums are as exact as the decays themselves.
        let sum_hnr = by_row(&rows.decay_th).cumsum(-1, Kind::Double);
        let decayed = |sum: Tensor| sum.to_kind(acc).exp();
        let above = Tensor::ones([CHUNK, CHUNK], (Kind::Bool, y_tu.device())).triu(1);
        // Masked before exp: differences above the diagonal are positive.
        let apart_hnrs = sum_hnr.unsqueeze(-1) - sum_hnr.unsqueeze(-2);
        let gamma_hnrs = decayed(apart_hnrs.masked_fill(&above, f64::NEG_INFINITY));
        let strong_hnrk = &k_hnrk * &strength_hnr1;
        let own_hnrs = (strong_hnrk.matmul(&k_hnrk.transpose(-1, -2)) * &gamma_hnrs).tril(-1);
        let grown_hnr1 = decayed(sum_hnr.shallow_clone()).unsqueeze(-1);
        let right = Tensor::cat(&[v_hnrv * &strength_hnr1, &strong_hnrk * &grown_hnr1], -1);
        let solved = own_hnrs.linalg_solve_triangular(&right, false, true, true);
        let last_hn1 = sum_hnr.narrow(-1, CHUNK - 1, 1);
        Chunks {
            u_hnrv: solved.narrow(-1, 0, heads.value_dim),
            w_hnrk: solved.narrow(-1, heads.value_dim, heads.key_dim),
            query_hnrk: &q_hnrk * grown_hnr1,
            score_hnrs: q_hnrk.matmul(&k_hnrk.transpose(-1, -2)) * gamma_hnrs,
            key_hnrk: k_hnrk * decayed(&last_hn1 - &sum_hnr).unsqueeze(-1),
            decay_hn11: decayed(last_hn1).unsqueeze(-1),
            rows: t,
        }
    }

    fn count(&self) -> i64 {
        self.u_hnrv.size()[1]
    }

    /// V' of a chunk, and the state after it.
    fn next(&self, chunk: i64, u_hrx: &Tensor, state_hkx: &Tensor) -> (Tensor, Tensor) {
        let corrected = u_hrx - self.w_hnrk.select(1, chunk).matmul(state_hkx);
        let added = self.key_hnrk.select(1, chunk).transpose(-1, -2).matmul(&corrected);
        let next = self.decay_hn11.select(1, chunk) * state_hkx + added;
        (corrected, next)
    }

    /// Output of all rows, [t, h, v] in the accumulation dtype, and the state after them. Differentiable.
    fn run(&self, state_hkv: &Tensor) -> (Tensor, Tensor) {
        let mut state = state_hkv.shallow_clone();
        let mut parts = Vec::new();
        for chunk in 0..self.count() {
            let (corrected, next) = self.next(chunk, &self.u_hnrv.select(1, chunk), &state);
            let past = self.query_hnrk.select(1, chunk).matmul(&state);
            parts.push(past + self.score_hnrs.select(1, chunk).matmul(&corrected));
            state = next;
        }
        let out_htv = Tensor::cat(&parts, 1).narrow(1, 0, self.rows);
        (out_htv.transpose(0, 1), state)
    }
}

/// Output of rows, [t, h, v] in the model's dtype, and the state after them, in the accumulation dtype. Differentiable.
pub fn forward(heads: &DeltaHeads, rows: &DeltaRows, state_hkv: &Tensor) -> (Tensor, Tensor) {
    if rows.y_tu.size()[0] == 0 {
        let out = Tensor::zeros([0, heads.value_heads, heads.value_dim], (rows.y_tu.kind(), rows.y_tu.device()));
        return (out, state_hkv.shallow_clone());
    }
    let (out_thv, state) = Chunks::new(heads, rows).run(state_hkv);
    (out_thv.to_kind(rows.y_tu.kind()).contiguous(), state)
}

/// Rows as a map of the state before them.
#[must_use]
pub fn transition(heads: &DeltaHeads, rows: &DeltaRows) -> Transition {
    let options = (accumulation(rows.y_tu.kind()), rows.y_tu.device());
    let identity = Tensor::eye(heads.key_dim, options).expand([heads.value_heads, -1, -1], false);
    let mut state = Tensor::cat(&[Tensor::zeros(heads.state(), options), identity], -1);
    if rows.y_tu.size()[0] > 0 {
        let chunks = Chunks::new(heads, rows);
        for chunk in 0..chunks.count() {
            let u_hrx = chunks.u_hnrv.select(1, chunk).constant_pad_nd([0, heads.key_dim]);
            state = chunks.next(chunk, &u_hrx, &state).1;
        }
    }
    Transition {
        increment_hkv: state.narrow(-1, 0, heads.value_dim).contiguous(),
        factor_hkk: state.narrow(-1, heads.value_dim, heads.key_dim).contiguous(),
    }
}

/// Gradient of the state before rows from those of their output and of the state after them: Cᵀ dO + Tᵀ dS.
pub fn pull(heads: &DeltaHeads, rows: &DeltaRows, dout_thv: &Tensor, dstate_hkv: &Tensor) -> Tensor {
    let acc = accumulation(rows.y_tu.kind());
    let mut dstate = dstate_hkv.shallow_clone();
    if rows.y_tu.size()[0] == 0 {
        return dstate;
    }
    let chunks = Chunks::new(heads, rows);
    let padding = chunks.count() * CHUNK - chunks.rows;
    let dout_htv = dout_thv.to_kind(acc).transpose(0, 1).constant_pad_nd([0, 0, 0, padding]);
    for chunk in (0..chunks.count()).rev() {
        let dout_hrv = dout_htv.narrow(1, chunk * CHUNK, CHUNK);
        let through = |x: &Tensor, dy: &Tensor| x.select(1, chunk).transpose(-1, -2).matmul(dy);
        let dcorrected = through(&chunks.score_hnrs, &dout_hrv) + chunks.key_hnrk.select(1, chunk).matmul(&dstate);
        dstate = chunks.decay_hn11.select(1, chunk) * dstate + through(&chunks.query_hnrk, &dout_hrv)
            - through(&chunks.w_hnrk, &dcorrected);
    }
    dstate
}

/// Gradient of rows and of the state before them, from those of their output, [t, h, v], and of the state after them.
///
/// # Errors
/// When libtorch refuses.
pub fn backward(
    heads: &DeltaHeads,
    rows: &DeltaRows,
    state_hkv: &Tensor,
    dout_thv: &Tensor,
    dstate_hkv: &Tensor,
) -> Result<DeltaGradient, tensor::Error> {
    let leaf = |x: &Tensor| x.detach().set_requires_grad(true);
    let (y_tu, decay_th, strength_th) = (leaf(&rows.y_tu), leaf(&rows.decay_th), leaf(&rows.strength_th));
    if y_tu.size()[0] == 0 {
        let rows = DeltaRows {
            y_tu: y_tu.zeros_like(),
            decay_th: decay_th.zeros_like(),
            strength_th: strength_th.zeros_like(),
        };
        return Ok(DeltaGradient { rows, dstate_hkv: dstate_hkv.shallow_clone() });
    }
    let state = leaf(state_hkv);
    let leaves = DeltaRows { y_tu, decay_th, strength_th };
    let (out, next) = tch::with_grad(|| forward(heads, &leaves, &state));
    backward_graph(&[(&out, dout_thv), (&next, dstate_hkv)])?;
    let DeltaRows { y_tu, decay_th, strength_th } = leaves;
    let rows = DeltaRows { y_tu: y_tu.grad(), decay_th: decay_th.grad(), strength_th: strength_th.grad() };
    Ok(DeltaGradient { rows, dstate_hkv: state.grad() })
}

/// One row of each of several sequences, `rows` [sequences, …]: output [a, h, v] in the model's dtype, and the states after
/// it. `state_ahkv` are those before it. Differentiable.
pub fn step(heads: &DeltaHeads, rows: &DeltaRows, state_ahkv: &Tensor) -> (Tensor, Tensor) {
    let kind = rows.y_tu.kind();
    let acc = accumulation(kind);
    let y_au = rows.y_tu.to_kind(acc);
    let (keys, values) = (heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim);
    let normed = |first: i64| {
        let x = y_au.narrow(1, first, keys).view([-1, heads.key_heads, heads.key_dim]);
        let x = &x * ((&x * &x).sum_dim_intlist(-1i64, true, acc) + NORM_EPS).rsqrt();
        x.repeat_interleave_self_int(heads.value_heads / heads.key_heads, 1, None)
    };
    let q_ah1k = (normed(0) * float(from_dim(heads.key_dim)).powf(-0.5)).unsqueeze(-2);
    let k_ah1k = normed(keys).unsqueeze(-2);
    let v_ah1v = y_au.narrow(1, 2 * keys, values).view([-1, heads.value_heads, 1, heads.value_dim]);
    let by_head = |x_ah: &Tensor| x_ah.unsqueeze(-1).unsqueeze(-1);
    let decayed = state_ahkv * by_head(&rows.decay_th).exp();
    let correction = (v_ah1v - k_ah1k.matmul(&decayed)) * by_head(&rows.strength_th);
    let state = decayed + k_ah1k.transpose(-1, -2).matmul(&correction);
    (q_ah1k.matmul(&state).squeeze_dim(-2).to_kind(kind), state)
}

/// The causal convolution of each channel, then z · sigmoid(z): [t, u] in the dtype of `u_eu`, [taps − 1 + t, u], which begins
/// with the rows before. `weight_uj` is [u, taps], its last column for the row itself. Differentiable.
pub fn convolve(u_eu: &Tensor, weight_uj: &Tensor) -> Tensor {
    let acc = accumulation(u_eu.kind());
    let taps = weight_uj.size()[1];
    let rows = u_eu.size()[0] - taps + 1;
    let weight_uj = weight_uj.to_kind(acc);
    let tap = |j: i64| u_eu.narrow(0, j, rows).to_kind(acc) * weight_uj.select(1, j);
    let sum = (1..taps).fold(tap(0), |sum, j| sum + tap(j));
    sum.to_kind(u_eu.kind()).silu()
}

/// Gradient of the input of [`convolve`] from that of its output: [taps − 1 + t, u] in the accumulation dtype.
///
/// # Errors
/// When libtorch refuses.
pub fn convolve_backward(u_eu: &Tensor, weight_uj: &Tensor, dy_tu: &Tensor) -> Result<Tensor, tensor::Error> {
    let leaf = u_eu.detach().set_requires_grad(true);
    let y_tu = tch::with_grad(|| convolve(&leaf, weight_uj));
    backward_graph(&[(&y_tu, dy_tu)])?;
    Ok(leaf.grad().to_kind(accumulation(u_eu.kind())))
}

/// [`convolve`] for the last row of each of several sequences: [a, u], of `u_aju` [a, taps, u].
pub fn convolve_last(u_aju: &Tensor, weight_uj: &Tensor) -> Tensor {
    let acc = accumulation(u_aju.kind());
    let weight_uj = weight_uj.to_kind(acc);
    let tap = |j: i64| u_aju.select(1, j).to_kind(acc) * weight_uj.select(1, j);
    let sum = (1..weight_uj.size()[1]).fold(tap(0), |sum, j| sum + tap(j));
    sum.to_kind(u_aju.kind()).silu()
}
