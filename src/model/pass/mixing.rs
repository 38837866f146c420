//! The mixer over the sequences of a span: all at once where it tells them apart itself, else one after another.

use tch::Tensor;

use super::Pass;
use crate::model::latent::LentIndex;
use crate::model::mixer::{Backward, Mixed, MixerInput};
use crate::model::past::{Past, PastGradient};
use crate::model::planes::{Planes, join_rows};
use crate::prompt::handoff::PlacedGroup;
use crate::prompt::layout::{Piece, Span};
use crate::prompt::pack::Pack;
use crate::runtime::units::{LayerIndex, Tokens};
use crate::tensor;

/// What the mixer's backward reads, as [`Backward`], with what [`Pass::mix`] returned.
pub(super) struct MixedRows<'a> {
    pub(super) span: &'a Span,
    pub(super) input: &'a MixerInput,
    pub(super) past: &'a Past,
    pub(super) mixed: &'a [Mixed],
    pub(super) dout: &'a Tensor,
    pub(super) later: Option<Planes>,
    pub(super) index: Option<LentIndex<'a>>,
}

/// The mixer's output for all rows, sequence after sequence.
pub(super) fn out_of(mixed: &[Mixed]) -> Tensor {
    join_rows(mixed.iter().map(|mixed| mixed.out.shallow_clone()).collect())
}

impl Pass<'_> {
    /// The answers of a group in packs of at most a micro-block of rows on all ranks together; in layers that choose keys each
    /// answer by itself. Equal on all ranks and in all phases.
    #[must_use]
    pub fn packs(&self, group: &PlacedGroup) -> Vec<Pack> {
        let mut layers = (0..self.decoder.layers()).map(LayerIndex);
        let together = layers.all(|layer| self.decoder.index_owner(layer).is_none());
        group.packs(self.cp_group.axis.rank(), if together { self.micro_block } else { Tokens(0) })
    }

    /// What the mixer makes of this rank's rows of a span, no graph: one output of all rows, or one for each sequence.
    pub(super) fn mix(
        &self,
        layer: LayerIndex,
        span: &Span,
        input: &MixerInput,
        past: &Past,
        index: Option<LentIndex>,
    ) -> Vec<Mixed> {
        let mixer = self.decoder.mixer(layer);
        if !span.is_packed() || mixer.takes_packed() {
            return vec![mixer.forward(&self.cp_group, span, input, past, index)];
        }
        let alone = |(sequence, first, rows): (Span, i64, i64)| {
            mixer.forward(&self.cp_group, &sequence, &input.narrow(first, rows), past, None)
        };
        self.sequences(span).map(alone).collect()
    }

    /// Backward of [`Pass::mix`]: adds to `past_gradient` and returns the gradient of the input.
    pub(super) fn backward_mix(
        &self,
        layer: LayerIndex,
        of: MixedRows,
        past_gradient: &mut PastGradient,
    ) -> Result<MixerInput, tensor::Error> {
        let MixedRows { span, input, past, mixed, dout, later, index } = of;
        let mixer = self.decoder.mixer(layer);
        if let [mixed] = mixed {
            let backward = Backward { span, input, past, mixed, dout, later, index };
            return mixer.backward(&self.cp_group, backward, past_gradient);
        }
        let mut parts = Vec::with_capacity(mixed.len());
        for ((span, first, rows), mixed) in self.sequences(span).zip(mixed) {
            let (input, dout) = (input.narrow(first, rows), dout.narrow(0, first, rows));
            let (span, input, dout) = (&span, &input, &dout);
            let backward = Backward { span, input, past, mixed, dout, later: None, index: None };
            parts.push(mixer.backward(&self.cp_group, backward, past_gradient)?);
        }
        Ok(MixerInput::join(parts))
    }

    /// Each sequence of a span, with the first and the number of its rows among this rank's.
    fn sequences(&self, span: &Span) -> impl Iterator<Item = (Span, i64, i64)> {
        let rank = self.cp_group.axis.rank();
        span.sequences().scan(0, move |next, sequence| {
            let rows: i64 = sequence.of(rank).map(|piece: &Piece| piece.rows().dim()).sum();
            let first = *next;
            *next += rows;
            Some((sequence, first, rows))
        })
    }
}
