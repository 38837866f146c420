//! Two mixers that are not built, in outline: the proof that the traits carry state other than keys and values.
//!
//! | | latent attention with an index (`glm_moe_dsa`) | gated delta rule (`qwen3_5`) |
//! |---|---|---|
//! | queries of a row | absorbed queries, the index's queries and weights | raw convolution input, decay and beta inputs |
//! | state | a row a position: latent, rotated key, index key | a row a *border*: recurrent state, last raw inputs |
//! | past of an answer | page runs up to P | one run of one row: the state at P |
//! | past of the tail | page runs up to P − N | one run of one row: the state at P − N |
//! | saved for backward | log-sum-exp, chosen positions | the state at each chunk's start |
//! | handed to segment B | nothing | z, the output gate's input |
//!
//! What the second one still needs outside the traits: the page pool stores border rows beside page rows, where `own` in
//! capture then points, and [`AnswerState`] replaces its one row instead of adding one.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::answers::AnswerState;
use super::mixer::{
    Backward, BlockBackward, BlockQueries, CaptureGradient, CpGroup, Mixed, MixedRow, Mixer, MixerInput,
};
use super::past::{ChunkState, Past, PastGradient, PastRun};
use super::planes::Planes;
use crate::prompt::layout::{PromptLayout, Span};
use crate::prompt::pages::PlaneRow;
use crate::runtime::units::{Position, from_dim};

/// Attention over one latent a position, absorbed form, over the keys that an index chooses. (c latent width, r rotated
/// width, j index heads, i index width, n chosen keys.)
struct LatentAttention {
    heads: i64,
    latent: i64,
    rotated: i64,
    index_heads: i64,
    index_dim: i64,
    chosen: i64,
    kind: Kind,
}

struct LatentQueries {
    q_thc: Tensor,
    q_rope_thr: Tensor,
    index_q_tji: Tensor,
    index_weight_tj: Tensor,
}

struct LatentState {
    latent_tc: Tensor,
    k_rope_tr: Tensor,
    index_k_ti: Tensor,
}

struct LatentSaved {
    lse_th: Tensor,
    chosen_tn: Tensor,
}

/// The gated delta rule after a short causal convolution. (u channels, n value heads, k key width, v value width, s raw
/// inputs before a row that the convolution reads.)
struct GatedDelta {
    channels: i64,
    value_heads: i64,
    key_dim: i64,
    value_dim: i64,
    taps: i64,
    kind: Kind,
}

struct DeltaQueries {
    raw_tu: Tensor,
    decay_tn: Tensor,
    beta_tn: Tensor,
}

/// One row for each border.
struct DeltaState {
    /// float32
    recurrent_bnkv: Tensor,
    raw_bsu: Tensor,
}

/// Conversions between a mixer's struct and planes, in the order of the fields.
macro_rules! planes_of {
    ($($name:ident { $($field:ident),+ })+) => { $(
        impl From<$name> for Planes {
            fn from(rows: $name) -> Planes {
                vec![$(rows.$field),+].into()
            }
        }

        impl From<&Planes> for $name {
            fn from(planes: &Planes) -> $name {
                let [$($field),+] = planes.tensors() else { unreachable!("planes are those of the mixer") };
                $name { $($field: $field.shallow_clone()),+ }
            }
        }
    )+ };
}

planes_of! {
    LatentQueries { q_thc, q_rope_thr, index_q_tji, index_weight_tj }
    LatentState { latent_tc, k_rope_tr, index_k_ti }
    LatentSaved { lse_th, chosen_tn }
    DeltaQueries { raw_tu, decay_tn, beta_tn }
    DeltaState { recurrent_bnkv, raw_bsu }
}

/// The methods that an outline leaves out; their signatures are the claim.
macro_rules! outline {
    () => {
        fn capture(&self, _: &CpGroup, _: &PromptLayout, _: &[BlockQueries], _: ChunkState) -> Vec<Mixed> {
            unimplemented!()
        }
        fn capture_no_rows(&self, _: &[BlockQueries]) -> Vec<Mixed> {
            unimplemented!()
        }
        fn capture_backward(
            &self,
            _: &CpGroup,
            _: &PromptLayout,
            _: Vec<BlockBackward>,
            _: ChunkState,
            _: ChunkState,
        ) -> CaptureGradient {
            unimplemented!()
        }
        fn forward(&self, _: &CpGroup, _: &Span, _: &MixerInput, _: &Past) -> Mixed {
            unimplemented!()
        }
        fn decode(&self, _: &CpGroup, _: &Planes, _: &Past, _: &AnswerState) -> Tensor {
            unimplemented!()
        }
        fn backward(&self, _: &CpGroup, _: Backward, _: &mut PastGradient) -> MixerInput {
            unimplemented!()
        }
    };
}

impl Mixer for LatentAttention {
    fn planes(&self) -> Vec<PlaneRow> {
        let row = |width| PlaneRow { shape: vec![width], kind: self.kind };
        vec![row(self.latent), row(self.rotated), row(self.index_dim)]
    }

    fn mixed_row(&self) -> MixedRow {
        MixedRow { out: from_dim(self.heads * self.latent), saved: from_dim(self.heads + self.chosen) }
    }

    /// The output stays a latent; segment B holds the value half of the absorbed projection.
    fn plain(&self, positions: Range<i64>, queries: &Planes, state: &Planes, _fused: bool) -> Tensor {
        let LatentQueries { q_thc, q_rope_thr, index_q_tji, index_weight_tj } = queries.into();
        let LatentState { latent_tc, k_rope_tr, index_k_ti } = state.into();
        // 1. Which keys a row sees: the best of those that are not ahead of it.
        let index_tj = index_q_tji.matmul(&index_k_ti.tr()).relu();
        let index_tp = (index_tj * index_weight_tj.unsqueeze(-1)).sum_dim_intlist(1i64, false, None::<Kind>);
        let row = Tensor::arange_start(positions.start, positions.end, (Kind::Int64, Device::Cpu)).unsqueeze(1);
        let ahead = Tensor::arange(positions.end, (Kind::Int64, Device::Cpu)).unsqueeze(0).gt_tensor(&row);
        let index_tp = index_tp.masked_fill(&ahead, f64::NEG_INFINITY);
        let (_, chosen_tn) = index_tp.topk(self.chosen.min(positions.end), -1, true, true);
        let unseen = Tensor::ones_like(&ahead).scatter_value(1, &chosen_tn, 0).logical_or(&ahead);
        // 2. Attention over latents, which are keys and values at once.
        let scores_thp = q_thc.matmul(&latent_tc.tr()) + q_rope_thr.matmul(&k_rope_tr.tr());
        let weights_thp = scores_thp.masked_fill(&unseen.unsqueeze(1), f64::NEG_INFINITY).softmax(-1, None::<Kind>);
        weights_thp.matmul(&latent_tc)
    }

    outline!();
}

impl GatedDelta {
    /// Planes of a border: what [`Mixer::planes`] is for positions.
    fn border_planes(&self) -> Vec<PlaneRow> {
        let recurrent = vec![self.value_heads, self.key_dim, self.value_dim];
        let raw = vec![self.taps - 1, self.channels];
        vec![PlaneRow { shape: recurrent, kind: Kind::Float }, PlaneRow { shape: raw, kind: self.kind }]
    }

    /// The state before `position`, as an answer or the tail gets it.
    fn past(&self, position: Position, state: DeltaState) -> Past {
        Past { runs: vec![PastRun { start: position, state: state.into(), carries_gradient: true }] }
    }
}

impl Mixer for GatedDelta {
    fn planes(&self) -> Vec<PlaneRow> {
        Vec::new()
    }

    fn mixed_row(&self) -> MixedRow {
        MixedRow { out: from_dim(self.value_heads * self.value_dim), saved: 0 }
    }

    /// The state of the rows before `positions` comes as one row.
    fn plain(&self, _positions: Range<i64>, queries: &Planes, state: &Planes, _fused: bool) -> Tensor {
        let DeltaQueries { raw_tu, decay_tn, beta_tn } = queries.into();
        let DeltaState { mut recurrent_bnkv, raw_bsu } = state.into();
        // 1. The convolution reads the last raw inputs before the first row.
        let raw = Tensor::cat(&[raw_bsu.squeeze_dim(0), raw_tu.shallow_clone()], 0);
        let rows = raw_tu.size()[0];
        let taps: Vec<Tensor> = (0..self.taps).map(|tap| raw.narrow(0, tap, rows)).collect();
        let mixed_tu = Tensor::stack(&taps, 0).mean_dim(0i64, false, None::<Kind>);
        // 2. The recurrence: decay, correction, read.
        let (keys, values) = (self.value_heads * self.key_dim, self.value_heads * self.value_dim);
        let mut out = Vec::new();
        for t in 0..rows {
            let u = mixed_tu.get(t);
            let q_nk = u.narrow(0, 0, keys).view([self.value_heads, self.key_dim]);
            let k_nk = u.narrow(0, keys, keys).view([self.value_heads, self.key_dim]);
            let v_nv = u.narrow(0, 2 * keys, values).view([self.value_heads, self.value_dim]);
            let decayed = recurrent_bnkv.squeeze_dim(0) * decay_tn.get(t).exp().view([-1, 1, 1]);
            let read_nv = k_nk.unsqueeze(1).matmul(&decayed).squeeze_dim(1);
            let write_nv = (v_nv - read_nv) * beta_tn.get(t).sigmoid().unsqueeze(-1);
            let updated = decayed + k_nk.unsqueeze(-1) * write_nv.unsqueeze(1);
            out.push(q_nk.unsqueeze(1).matmul(&updated).squeeze_dim(1));
            recurrent_bnkv = updated.unsqueeze(0);
        }
        Tensor::stack(&out, 0)
    }

    outline!();
}

fn rand(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Float, Device::Cpu))
}

#[test]
fn latents_and_index_keys_are_state_rows_of_positions() {
    let (heads, latent, rotated, index_heads, index_dim, chosen) = (3, 8, 4, 2, 6, 2);
    let sketch = LatentAttention { heads, latent, rotated, index_heads, index_dim, chosen, kind: Kind::Float };
    let queries = LatentQueries {
        q_thc: rand(&[5, heads, latent]),
        q_rope_thr: rand(&[5, heads, rotated]),
        index_q_tji: rand(&[5, sketch.index_heads, index_dim]),
        index_weight_tj: rand(&[5, sketch.index_heads]),
    };
    let state = LatentState {
        latent_tc: rand(&[5, latent]),
        k_rope_tr: rand(&[5, rotated]),
        index_k_ti: rand(&[5, index_dim]),
    };
    let state = Planes::from(state);
    let shapes: Vec<Vec<i64>> = state.tensors().iter().map(|plane| plane.size()[1..].to_vec()).collect();
    assert_eq!(shapes, sketch.planes().into_iter().map(|row| row.shape).collect::<Vec<_>>());
    let mixer: &dyn Mixer = &sketch;
    let out = mixer.plain(0..5, &queries.into(), &state, false);
    assert_eq!(out.size(), [5, heads, latent]);
    let saved = Planes::from(LatentSaved { lse_th: rand(&[5, heads]), chosen_tn: rand(&[5, chosen]) });
    assert_eq!(LatentSaved::from(&saved).chosen_tn.size(), [5, chosen]);
    assert_eq!(mixer.mixed_row(), MixedRow { out: 24, saved: 5 });
}

#[test]
fn a_recurrent_state_is_a_past_of_one_row_with_a_gradient_of_its_own() {
    let (value_heads, key_dim, value_dim, taps) = (2, 3, 4, 4);
    let channels = value_heads * (2 * key_dim + value_dim);
    let sketch = GatedDelta { channels, value_heads, key_dim, value_dim, taps, kind: Kind::Float };
    let state = DeltaState {
        recurrent_bnkv: rand(&[1, value_heads, key_dim, value_dim]),
        raw_bsu: rand(&[1, taps - 1, channels]),
    };
    let past = sketch.past(Position(7), state);
    let shapes: Vec<Vec<i64>> = past.runs[0].state.tensors().iter().map(|plane| plane.size()[1..].to_vec()).collect();
    assert_eq!(shapes, sketch.border_planes().into_iter().map(|row| row.shape).collect::<Vec<_>>());
    let mixer: &dyn Mixer = &sketch;
    assert!(mixer.planes().is_empty());
    let queries = DeltaQueries { raw_tu: rand(&[5, channels]), decay_tn: -rand(&[5, 2]).abs(), beta_tn: rand(&[5, 2]) };
    let out = mixer.plain(7..12, &queries.into(), &past.runs[0].state, false);
    assert_eq!(out.size(), [5, value_heads, value_dim]);
    let later = PastGradient::zeros(&past).into_tail().map(|planes| DeltaState::from(&planes).recurrent_bnkv.size());
    assert_eq!(later, Some(vec![1, value_heads, key_dim, value_dim]));
}
