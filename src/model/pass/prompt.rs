//! A layer over the rows of a long prompt, in capture and in the sweep of its tail, whatever the route of its mixer.

use tch::Tensor;

use super::{Pass, SpanRows};
use crate::model::latent::{IndexSet, LentIndex};
use crate::model::lora::Adapters;
use crate::model::mixer::{Mixed, Route};
use crate::model::past::{Past, PastGradient};
use crate::prompt::handoff::MixedPool;
use crate::prompt::layout::{Piece, PromptLayout, Span};
use crate::prompt::pages::{Slab, SpanChoices, Staged};
use crate::runtime::memory::{Held, Ledger, MemorySpace, Purpose};
use crate::runtime::units::LayerIndex;
use crate::tensor;
use crate::tensor::boundary::storage_bytes;

/// This rank's prompt rows in one layer.
#[derive(Clone, Copy)]
pub struct PromptRows<'a> {
    /// Which rank has which position.
    pub layout: &'a PromptLayout,
    /// Input of the block, [p, w].
    pub x_pw: &'a Tensor,
    /// This rank's pages of the layer, which are filled here.
    pub slabs: &'a [Slab],
    /// State at both borders of the prompt, [2, …] each, in layers that have it; filled here.
    pub borders: &'a [Tensor],
    /// Counts the bytes of the output.
    pub ledger: &'a Ledger,
    /// Called before attention: what the layer before has sent to host memory has left by then, and its memory is free for
    /// the scratch of this one.
    pub settle: &'a dyn Fn() -> Result<(), tensor::Error>,
}

impl PromptRows<'_> {
    /// Writes state of the rows of `piece` to the pages, from plane `first` on.
    pub(super) fn store(&self, piece: &Piece, first: usize, planes: &[Tensor]) {
        if piece.rows().0 == 0 {
            return;
        }
        let holds = |slab: &&Slab| slab.run.start <= piece.start && piece.stop <= slab.run.stop;
        let slab = self.slabs.iter().find(holds).expect("a rank's rows lie in its own chunks");
        for (plane, rows) in slab.planes[first..].iter().zip(planes) {
            plane.narrow(0, piece.start.since(slab.run.start).dim(), piece.rows().dim()).copy_(rows);
        }
    }

    /// Counts hidden states of prompt rows on the device.
    #[must_use]
    pub fn hold(&self, x_pw: &Tensor) -> Held {
        self.ledger.hold(Purpose::Hidden, MemorySpace::Device, storage_bytes(x_pw))
    }
}

/// What one block makes of prompt rows.
pub struct PromptOutput {
    /// Output rows, [p, w].
    pub y_pw: Tensor,
    /// Its bytes in the ledger.
    pub held: Held,
    /// Keys of the rows, in a layer that chooses them.
    pub index: Option<IndexSet>,
    /// Experts of the rows, [p, k] int64, in a layer that has them.
    pub experts: Option<Tensor>,
}

/// A tail in one layer, for the routes on which its rows stay.
#[derive(Clone, Copy)]
pub struct Tail<'a> {
    /// Rows of all ranks.
    pub span: &'a Span,
    /// Which rank owns which position.
    pub layout: &'a PromptLayout,
    /// This rank's pages of the layer.
    pub staged: &'a Staged,
    /// The mixer's output for its mixer blocks, if that was kept.
    pub kept: Option<&'a MixedPool>,
    /// What was chosen for the rows.
    pub choices: SpanChoices<'a>,
}

impl Pass<'_> {
    /// Positions of the blocks in which a layer's mixer takes this rank's rows of a span of `layout`'s prompt, as far as its
    /// output can be kept. Equal on all ranks and in all phases.
    #[must_use]
    pub fn kept_pieces(&self, layer: LayerIndex, span: &Span, layout: &PromptLayout) -> Vec<Piece> {
        match self.decoder.mixer(layer).route() {
            Route::Ring(_) => self.ring_blocks(span, layout).into_iter().map(|block| block.piece).collect(),
            Route::Gathered(_) => self.gathered_pieces(span),
            Route::Recurrent(_) => Vec::new(),
        }
    }

    /// Whether a layer's mixer output can be kept for its backward. Where a state goes from row to row, backward needs the
    /// rule's forward in any case.
    #[must_use]
    pub fn keeps_mixed(&self, layer: LayerIndex) -> bool {
        !matches!(self.decoder.mixer(layer).route(), Route::Recurrent(_))
    }

    /// The adapters of a layer, converted once for all its rows, for forwards without a graph. Linear layers have the bits with
    /// them that they have with the masters. `None` for attention over latents: its products by head take another form where
    /// a factor is tracked for gradient, as masters are.
    #[must_use]
    pub fn applied(&self, layer: LayerIndex) -> Option<Adapters> {
        match self.decoder.mixer(layer).route() {
            Route::Gathered(_) => None,
            Route::Ring(_) | Route::Recurrent(_) => self.adapters.applied_in(layer, self.decoder.kind()),
        }
    }

    /// Whether a tail is long enough that pages travel to its rows; a shorter one goes to the pages, as an answer does.
    #[must_use]
    pub fn travels(&self, tail: &Span) -> bool {
        tail.rows() > self.micro_block
    }

    /// One block over this rank's prompt rows, no graph: fills the pages. `lent` are the rows' keys where a layer below has
    /// chosen them. `keep` gets each mixer block's output. Every rank takes part, with or without rows.
    ///
    /// # Errors
    /// When `keep` fails.
    pub fn prompt(
        &self,
        layer: LayerIndex,
        rows: &PromptRows,
        lent: Option<LentIndex>,
        keep: &mut dyn FnMut(&Piece, &Mixed) -> Result<(), tensor::Error>,
    ) -> Result<PromptOutput, tensor::Error> {
        match self.decoder.mixer(layer).route() {
            Route::Ring(mixer) => self.ring_prompt(mixer, layer, rows, keep),
            Route::Gathered(latent) => self.gathered_prompt(latent, layer, rows, lent, keep),
            Route::Recurrent(rule) => Ok(self.recurrent_prompt(rule, layer, rows)),
        }
    }

    /// One block forward over a tail whose rows stay, no graph. Its choices must have been made.
    ///
    /// # Errors
    /// When kept mixer output or a choice cannot be brought back.
    pub fn forward_tail(&self, layer: LayerIndex, x_tw: &Tensor, tail: &Tail) -> Result<Tensor, tensor::Error> {
        tch::no_grad(|| match self.decoder.mixer(layer).route() {
            Route::Ring(mixer) => self.ring_forward_tail(mixer, layer, x_tw, tail),
            Route::Gathered(latent) => self.gathered_forward_tail(latent, layer, x_tw, tail),
            Route::Recurrent(_) => {
                self.forward(layer, tail.span, x_tw, &Past::of_tail(tail.staged, tail.layout), tail.choices)
            }
        })
    }

    /// One block backward over a tail whose rows stay: from the gradient of this rank's output rows, which may be overwritten, to
    /// that of its input rows. `later` is the gradient that the answers have left on the tail's state.
    ///
    /// # Errors
    /// When libtorch refuses.
    pub fn backward_tail(
        &self,
        layer: LayerIndex,
        rows: &SpanRows,
        tail: &Tail,
        later: PastGradient,
    ) -> Result<Tensor, tensor::Error> {
        match self.decoder.mixer(layer).route() {
            Route::Ring(mixer) => self.ring_backward_tail(mixer, layer, rows, tail, later),
            Route::Gathered(latent) => self.gathered_backward_tail(latent, layer, rows, tail, later),
            Route::Recurrent(_) => {
                let past = Past::of_tail(tail.staged, tail.layout);
                self.backward(layer, rows, &past, later.into_tail(), &mut PastGradient::zeros(&past, 0), None)
            }
        }
    }
}
