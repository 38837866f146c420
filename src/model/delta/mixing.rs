//! The gated delta rule in the form that phases drive.

use std::ops::Range;

use tch::Tensor;

use super::order::Order;
use super::rule::{GatedDelta, Inputs, Walked};
use crate::model::answers::AnswerState;
use crate::model::latent::LentIndex;
use crate::model::mixer::{Backward, CpGroup, Mixed, MixedRow, Mixer, MixerInput, Route};
use crate::model::past::{Past, PastGradient};
use crate::model::planes::Planes;
use crate::prompt::layout::Span;
use crate::prompt::pages::PlaneRow;
use crate::runtime::units::from_dim;
use crate::tensor::delta::{DeltaRows, plain};
use crate::tensor::{self};

/// Rows up to which [`Mixer::plain`] goes row by row; longer sequences are taken in chunks.
const ROW_BY_ROW: i64 = 1_024;

impl Mixer for GatedDelta {
    /// None: no position leaves a row.
    fn planes(&self) -> Vec<PlaneRow> {
        Vec::new()
    }

    fn border_planes(&self) -> Vec<PlaneRow> {
        let state = PlaneRow { shape: self.heads.state().to_vec(), kind: self.acc() };
        vec![state, PlaneRow { shape: vec![self.short(), self.heads.channels()], kind: self.kind }]
    }

    fn mixed_row(&self) -> MixedRow {
        MixedRow { out: from_dim(self.heads.value_heads * self.heads.value_dim), saved: 0 }
    }

    fn gradient_planes(&self) -> usize {
        self.border_planes().len()
    }

    fn route(&self) -> Route<'_> {
        Route::Recurrent(self)
    }

    fn plain(
        &self,
        positions: Range<i64>,
        _queries: &Planes,
        state: &Planes,
        _index: Option<LentIndex>,
        _fused: bool,
    ) -> Tensor {
        let Inputs { u_tu, b_th, a_th } = Inputs::from(state);
        let zero = self.nothing_before();
        let rows = u_tu.size()[0];
        let (decay_th, strength_th) = self.gates(&b_th, &a_th);
        let y_tu = plain::convolve(&Tensor::cat(&[&zero.inputs_ju, &u_tu], 0), &self.conv_uj);
        let live = positions.end - positions.start;
        if rows > ROW_BY_ROW {
            let all = DeltaRows { y_tu, decay_th, strength_th };
            return plain::forward(&self.heads, &all, &zero.state_hkv).0.narrow(0, positions.start, live);
        }
        let mut state = zero.state_hkv.unsqueeze(0);
        let mut out =
            vec![Tensor::zeros([0, self.heads.value_heads, self.heads.value_dim], (self.kind, y_tu.device()))];
        for row in 0..rows {
            let part = |x: &Tensor| x.narrow(0, row, 1);
            let one = DeltaRows { y_tu: part(&y_tu), decay_th: part(&decay_th), strength_th: part(&strength_th) };
            let (out_1hv, next) = plain::step(&self.heads, &one, &state);
            out.push(out_1hv);
            state = next;
        }
        Tensor::cat(&out, 0).narrow(0, positions.start, live)
    }

    fn forward(
        &self,
        cp_group: &CpGroup,
        span: &Span,
        input: &MixerInput,
        past: &Past,
        _index: Option<LentIndex>,
    ) -> Mixed {
        let order = Order::new(span, cp_group.axis.rank());
        let Walked { out, starts, factors, .. } = self.run(cp_group, &order, input, &self.border_of(past));
        Mixed { out, saved: vec![starts, factors].into() }
    }

    /// Every rank goes on with the state of every answer, so nothing is exchanged.
    fn decode(
        &self,
        _cp_group: &CpGroup,
        rows: &MixerInput,
        prompt: &Past,
        own: &mut AnswerState,
        _index: Option<LentIndex>,
    ) -> Tensor {
        let Inputs { u_tu, b_th, a_th } = Inputs::from(&rows.state);
        let answers = u_tu.size()[0];
        if own.carried().is_empty() {
            let start = self.border_of(prompt);
            own.carry(
                start.tensors().map(|plane| plane.expand([[answers].as_slice(), &plane.size()].concat(), false).copy()),
            );
        }
        let [state_ahkv, inputs_aju] = own.carried() else { unreachable!("a border has two planes") };
        let extended_aju = Tensor::cat(&[inputs_aju, &u_tu.unsqueeze(1)], 1);
        let y_tu = plain::convolve_last(&extended_aju, &self.conv_uj);
        let (decay_th, strength_th) = self.gates(&b_th, &a_th);
        let (out_ahv, next) = plain::step(&self.heads, &DeltaRows { y_tu, decay_th, strength_th }, state_ahkv);
        own.carry([next, extended_aju.narrow(1, 1, self.short()).copy()]);
        out_ahv
    }

    fn backward(
        &self,
        cp_group: &CpGroup,
        backward: Backward,
        past_gradient: &mut PastGradient,
    ) -> Result<MixerInput, tensor::Error> {
        self.run_backward(cp_group, backward, past_gradient)
    }
}
