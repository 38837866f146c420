//! One block over one span's rows: forward, and backward with everything recomputed from the block's input.
//!
//! ```text
//!   forward    x ──A──▶ q k v ──mixer (ranks meet)──▶ mixed ──B──▶ y
//!   backward   recompute A without a graph, run the mixer; then B with a graph, pull dy through it; the mixer's backward
//!              by hand; then A with a graph, pull dq dk dv through it. One segment of one micro-block is the largest
//!              graph that is ever alive.
//! ```

use tch::Tensor;

use super::decoder::{Decoder, Projected};
use super::lora::Adapters;
use super::mixer::{Backward, Mixed, Past, PastGradient, Seat};
use crate::layout::{Piece, Span, positions};
use crate::tensor;
use crate::tensor::boundary::backward as pull;
use crate::units::{LayerIndex, Tokens};

/// What a pass over blocks needs besides rows.
#[derive(Clone, Copy)]
pub struct Pass<'a> {
    /// The model.
    pub decoder: &'a dyn Decoder,
    /// The policy.
    pub adapters: &'a Adapters,
    /// This rank among those that share the prompt.
    pub seat: Seat<'a>,
    /// Most rows of a segment at one time; equal on all ranks and in all phases.
    pub micro_block: Tokens,
}

/// Rows of one rank cut into micro-blocks: positions, and where the rows lie in the rank's tensor. A rank without rows
/// gets one empty block, so that it still knows the shapes it takes part with.
#[must_use]
pub fn micro_blocks(span: &Span, seat: &Seat, most: Tokens) -> Vec<(Piece, i64)> {
    let mut blocks = Vec::new();
    let mut first = 0;
    for piece in span.of(seat.axis.rank()) {
        let mut start = piece.start;
        while start < piece.stop {
            let stop = start.plus(most).min(piece.stop);
            let block = Piece { rank: piece.rank, start, stop };
            blocks.push((block, first));
            first += block.rows().dim();
            start = stop;
        }
    }
    if blocks.is_empty() {
        let nowhere = crate::units::Position(0);
        blocks.push((Piece { rank: seat.axis.rank(), start: nowhere, stop: nowhere }, 0));
    }
    blocks
}

impl Pass<'_> {
    /// Segment A of one micro-block.
    #[must_use]
    pub fn project(&self, layer: LayerIndex, block: &Piece, x_tw: &Tensor) -> Projected {
        self.decoder.project(layer, x_tw, positions(block), self.adapters)
    }

    /// One block forward over a span, no graph: this rank's rows in, this rank's rows out.
    pub fn forward(&self, layer: LayerIndex, span: &Span, x_tw: &Tensor, past: &Past) -> Tensor {
        tch::no_grad(|| {
            let blocks = micro_blocks(span, &self.seat, self.micro_block);
            let (mix, keep) = self.project_all(layer, &blocks, x_tw);
            let mixed = self.decoder.mixer(layer).forward(&self.seat, span, &mix, past);
            let ys: Vec<Tensor> = blocks
                .iter()
                .map(|(block, first)| {
                    let rows = |x: &Tensor| x.narrow(0, *first, block.rows().dim());
                    let keep: Vec<Tensor> = keep.iter().map(rows).collect();
                    self.decoder.finish(layer, &rows(x_tw), &rows(&mixed.out), &keep, self.adapters)
                })
                .collect();
            Tensor::cat(&ys, 0)
        })
    }

    /// One block backward over a span: from the gradient of this rank's output rows to that of its input rows. Adapter
    /// gradients add up in the adapters' `.grad`, gradients of earlier positions' state in `past_gradient`.
    ///
    /// # Errors
    /// When libtorch refuses.
    pub fn backward(
        &self,
        layer: LayerIndex,
        rows: &SpanRows,
        past: &Past,
        later: Option<Vec<Tensor>>,
        past_gradient: &mut PastGradient,
    ) -> Result<Tensor, tensor::Error> {
        let SpanRows { span, x_tw, .. } = *rows;
        let blocks = micro_blocks(span, &self.seat, self.micro_block);
        let mixer = self.decoder.mixer(layer);
        let (mix, keep, mixed) = tch::no_grad(|| {
            let (mix, keep) = self.project_all(layer, &blocks, x_tw);
            let mixed = mixer.forward(&self.seat, span, &mix, past);
            (mix, keep, mixed)
        });
        let dx_tw = x_tw.detach().zeros_like();
        let (dmixed, dkeep) = self.pull_finish(layer, &blocks, rows, &mixed, &keep, &dx_tw)?;
        let dmix = tch::no_grad(|| {
            let backward = Backward { span, mix: &mix, past, mixed: &mixed, dout: &dmixed, later };
            mixer.backward(&self.seat, backward, past_gradient)
        });
        drop((mix, mixed, dmixed));
        let gradients: Vec<Tensor> = dmix.into_iter().chain(dkeep).collect();
        self.pull_project(layer, &blocks, x_tw, &gradients, &dx_tw)?;
        Ok(dx_tw)
    }

    fn project_all(&self, layer: LayerIndex, blocks: &[(Piece, i64)], x_tw: &Tensor) -> (Vec<Tensor>, Vec<Tensor>) {
        let parts: Vec<Projected> = blocks
            .iter()
            .map(|(block, first)| self.project(layer, block, &x_tw.narrow(0, *first, block.rows().dim())))
            .collect();
        let join = |of: fn(&Projected) -> &Vec<Tensor>| {
            (0..of(&parts[0]).len())
                .map(|plane| Tensor::cat(&parts.iter().map(|part| &of(part)[plane]).collect::<Vec<_>>(), 0))
                .collect()
        };
        (join(|part| &part.mix), join(|part| &part.keep))
    }

    /// Segment B with a graph, micro-block by micro-block. Adds the residual's share to `dx_tw`; returns the gradients of
    /// the mixer's output and of what A handed to B.
    fn pull_finish(
        &self,
        layer: LayerIndex,
        blocks: &[(Piece, i64)],
        rows: &SpanRows,
        mixed: &Mixed,
        keep: &[Tensor],
        dx_tw: &Tensor,
    ) -> Result<(Tensor, Vec<Tensor>), tensor::Error> {
        let dmixed = mixed.out.zeros_like();
        let dkeep: Vec<Tensor> = keep.iter().map(Tensor::zeros_like).collect();
        for (block, first) in blocks {
            let part = |x: &Tensor| x.narrow(0, *first, block.rows().dim());
            let leaf = |x: &Tensor| part(x).detach().set_requires_grad(true);
            let (x, o) = (leaf(rows.x_tw), leaf(&mixed.out));
            let k: Vec<Tensor> = keep.iter().map(leaf).collect();
            let y = self.decoder.finish(layer, &x, &o, &k, self.adapters);
            pull(&[(&y, &part(rows.dy_tw))])?;
            part(dx_tw).copy_(&x.grad());
            part(&dmixed).copy_(&o.grad());
            for (gradient, kept) in dkeep.iter().zip(&k) {
                part(gradient).copy_(&kept.grad());
            }
        }
        Ok((dmixed, dkeep))
    }

    /// Segment A with a graph, micro-block by micro-block; `gradients` are those of everything A hands on.
    fn pull_project(
        &self,
        layer: LayerIndex,
        blocks: &[(Piece, i64)],
        x_tw: &Tensor,
        gradients: &[Tensor],
        dx_tw: &Tensor,
    ) -> Result<(), tensor::Error> {
        for (block, first) in blocks {
            let part = |x: &Tensor| x.narrow(0, *first, block.rows().dim());
            let x = part(x_tw).detach().set_requires_grad(true);
            let Projected { mix, keep } = self.project(layer, block, &x);
            let parts: Vec<Tensor> = gradients.iter().map(part).collect();
            let pairs: Vec<(&Tensor, &Tensor)> = mix.iter().chain(&keep).zip(&parts).collect();
            pull(&pairs)?;
            let _ = part(dx_tw).g_add_(&x.grad());
        }
        Ok(())
    }
}

/// One span's rows on this rank, for a backward.
#[derive(Clone, Copy)]
pub struct SpanRows<'a> {
    /// Which rows.
    pub span: &'a Span,
    /// The block's input.
    pub x_tw: &'a Tensor,
    /// Gradient of the block's output.
    pub dy_tw: &'a Tensor,
}
