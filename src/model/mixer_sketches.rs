//! Two mixers that are not built, in outline: the proof that the traits carry state other than keys and values.
//!
//! | | latent attention with an index (`glm_moe_dsa`) | gated delta rule (`qwen3_5`) |
//! |---|---|---|
//! | queries of a row | absorbed queries, the index's queries and weights | inputs of convolution, decay and beta |
//! | state of a row | latent, rotated key, index key | the same inputs: `plain` starts from position 0 |
//! | what pages keep | the state rows | a row a *border*: recurrent state, last inputs of the convolution |
//! | past of an answer | page runs up to P | one run of one row: the state at P |
//! | past of the tail | page runs up to P − N | one run of one row: the state at P − N |
//! | saved for backward | log-sum-exp, chosen positions | the state at each chunk's start |
//! | handed to segment B | nothing | z, the output gate's input |
//!
//! What the second one still needs outside the traits: the page pool holds border rows beside page rows, `own` in capture
//! is a view of them that capture fills, and [`AnswerState`] replaces its one row instead of adding one.

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

struct DeltaInputs {
    raw_tu: Tensor,
    decay_tn: Tensor,
    beta_tn: Tensor,
}

/// One row for each border.
struct DeltaState {
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
    DeltaInputs { raw_tu, decay_tn, beta_tn }
    DeltaState { recurrent_bnkv, raw_bsu }
}

/// The methods that an outline leaves out; their signatures are the claim.
macro_rules! outline {
    () => {
        fn capture(&self, _: &CpGroup, _: &PromptLayout, _: &[BlockQueries], _: ChunkState) -> Vec<Mixed> {
            unreachable!("outlined only")
        }
        fn capture_no_rows(&self, _: &[BlockQueries]) -> Vec<Mixed> {
            unreachable!("outlined only")
        }
        fn capture_backward(
            &self,
            _: &CpGroup,
            _: &PromptLayout,
            _: Vec<BlockBackward>,
            _: ChunkState,
            _: ChunkState,
        ) -> CaptureGradient {
            unreachable!("outlined only")
        }
        fn forward(&self, _: &CpGroup, _: &Span, _: &MixerInput, _: &Past) -> Mixed {
            unreachable!("outlined only")
        }
        fn plain(&self, _: Range<i64>, _: &Planes, _: &Planes, _: bool) -> Tensor {
            unreachable!("outlined only")
        }
        fn decode(&self, _: &CpGroup, _: &Planes, _: &Past, _: &AnswerState) -> Tensor {
            unreachable!("outlined only")
        }
        fn backward(&self, _: &CpGroup, _: Backward, _: &mut PastGradient) -> MixerInput {
            unreachable!("outlined only")
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
    fn past(position: Position, state: DeltaState) -> Past {
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

    outline!();
}

fn rand(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Float, Device::Cpu))
}

fn row_shapes(planes: &Planes) -> Vec<Vec<i64>> {
    planes.tensors().iter().map(|plane| plane.size()[1..].to_vec()).collect()
}

fn shapes(rows: Vec<PlaneRow>) -> Vec<Vec<i64>> {
    rows.into_iter().map(|row| row.shape).collect()
}

#[test]
fn latents_and_index_keys_are_state_rows_of_positions() {
    let (heads, latent, rotated, index_heads, index_dim, chosen) = (3, 8, 4, 2, 6, 2);
    let mixer: &dyn Mixer = &LatentAttention { heads, latent, rotated, index_dim, chosen, kind: Kind::Float };
    let queries = LatentQueries {
        q_thc: rand(&[5, heads, latent]),
        q_rope_thr: rand(&[5, heads, rotated]),
        index_q_tji: rand(&[5, index_heads, index_dim]),
        index_weight_tj: rand(&[5, index_heads]),
    };
    let state = LatentState {
        latent_tc: rand(&[5, latent]),
        k_rope_tr: rand(&[5, rotated]),
        index_k_ti: rand(&[5, index_dim]),
    };
    let input = MixerInput { queries: queries.into(), state: state.into() };
    assert_eq!(row_shapes(&input.state), shapes(mixer.planes()));
    assert_eq!(LatentQueries::from(&input.queries.narrow(1, 2)).index_q_tji.size(), [2, index_heads, index_dim]);
    let saved = LatentSaved { lse_th: rand(&[5, heads]), chosen_tn: rand(&[5, chosen]) };
    let mixed = Mixed { out: rand(&[5, heads, latent]), saved: saved.into() };
    assert_eq!(mixer.mixed_row(), MixedRow { out: 24, saved: 5 });
    assert_eq!(LatentSaved::from(&mixed.saved).chosen_tn.size(), [5, chosen]);
}

#[test]
fn a_recurrent_state_is_a_past_of_one_row_with_a_gradient_of_its_own() {
    let (value_heads, key_dim, value_dim, taps) = (2, 3, 4, 4);
    let channels = value_heads * (2 * key_dim + value_dim);
    let mixer = GatedDelta { channels, value_heads, key_dim, value_dim, taps, kind: Kind::Float };
    assert!(mixer.planes().is_empty(), "a position leaves no row in the pages");
    let state = DeltaState {
        recurrent_bnkv: rand(&[1, value_heads, key_dim, value_dim]),
        raw_bsu: rand(&[1, taps - 1, channels]),
    };
    let past = GatedDelta::past(Position(7), state);
    assert_eq!(row_shapes(&past.runs[0].state), shapes(mixer.border_planes()));
    let later = PastGradient::zeros(&past).into_tail().map(|planes| DeltaState::from(&planes).recurrent_bnkv.size());
    assert_eq!(later, Some(vec![1, value_heads, key_dim, value_dim]));
    let inputs = || DeltaInputs { raw_tu: rand(&[5, channels]), decay_tn: rand(&[5, 2]), beta_tn: rand(&[5, 2]) };
    let input = MixerInput { queries: inputs().into(), state: inputs().into() };
    let DeltaInputs { raw_tu, .. } = DeltaInputs::from(&Planes::join(vec![input.queries.narrow(0, 2), input.state]));
    assert_eq!(raw_tu.size(), [7, channels]);
}
