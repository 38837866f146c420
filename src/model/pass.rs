//! One block over one span's rows: forward, and backward with everything recomputed from the block's input.
//!
//! ```text
//!   forward    x ──A──▶ q k v ──mixer (ranks meet)──▶ mixed ──B──▶ y
//!   backward   recompute A without a graph, run the mixer; then B with a graph, pull dy through it; the mixer's backward
//!              by hand; then A with a graph, pull dq dk dv through it. One segment of one micro-block is the largest
//!              graph that is ever alive.
//! ```

use tch::{Device, Tensor};

use super::decoder::{Decoder, Projected};
use super::lora::Adapters;
use super::mixer::{Backward, CpGroup, Mixed, Past, PastGradient, Swept};
use crate::prompt::handoff::MixedPool;
use crate::prompt::layout::{Piece, PromptLayout, Span, positions};
use crate::prompt::pages::Staged;
use crate::runtime::units::{LayerIndex, Tokens};
use crate::tensor;
use crate::tensor::boundary::backward as pull;

/// What a pass over blocks needs besides rows.
#[derive(Clone, Copy)]
pub struct Pass<'a> {
    /// The model.
    pub decoder: &'a dyn Decoder,
    /// The policy.
    pub adapters: &'a Adapters,
    /// This rank among those that share the prompt.
    pub cp_group: CpGroup<'a>,
    /// Most rows of a segment at one time; equal on all ranks and in all phases.
    pub micro_block: Tokens,
}

/// Rows of one rank cut into micro-blocks: positions, and where the rows lie in the rank's tensor. A rank without rows
/// gets one empty block, so that it still knows the shapes it takes part with.
#[must_use]
pub fn micro_blocks(span: &Span, cp_group: &CpGroup, most: Tokens) -> Vec<(Piece, i64)> {
    let mut blocks = Vec::new();
    let mut first = 0;
    for piece in span.of(cp_group.axis.rank()) {
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
        let nowhere = crate::runtime::units::Position(0);
        blocks.push((Piece { rank: cp_group.axis.rank(), start: nowhere, stop: nowhere }, 0));
    }
    blocks
}

/// Rows that the mixer takes at one time on a GPU: its kernels want long stretches, the segments' scratch wants short
/// ones.
pub const MIXED_ROWS: u64 = 32_768;

/// A rank's rows as the mixer takes them, each a stretch of whole micro-blocks.
#[derive(Debug)]
pub struct Stretch {
    /// The rows.
    pub piece: Piece,
    /// Its micro-blocks, and where their rows lie in the rank's tensor.
    pub blocks: Vec<(Piece, i64)>,
}

impl Stretch {
    /// Rows of a micro-block in a tensor that holds the stretch's rows.
    pub fn rows(&self, x: &Tensor, block: &Piece) -> Tensor {
        x.narrow(0, block.start.since(self.piece.start).dim(), block.rows().dim())
    }

    /// One tensor a plane of all rows, from one for each micro-block.
    #[must_use]
    pub fn join(mut parts: Vec<Vec<Tensor>>) -> Vec<Tensor> {
        if parts.len() == 1 {
            return parts.pop().unwrap_or_default();
        }
        let planes = parts.first().map_or(0, Vec::len);
        let plane = |at: usize| Tensor::cat(&parts.iter().map(|part| &part[at]).collect::<Vec<_>>(), 0);
        (0..planes).map(plane).collect()
    }
}

/// A stretch and what its rows ask the mixer with.
type Asking = (Piece, Vec<Tensor>);

impl Pass<'_> {
    /// This rank's rows of a span in stretches of micro-blocks. Equal on all ranks and in all phases, as micro-blocks are.
    #[must_use]
    pub fn stretches(&self, span: &Span) -> Vec<Stretch> {
        let most = match self.decoder.device() {
            Device::Cpu => self.micro_block,
            _ => Tokens(self.micro_block.0 * (MIXED_ROWS / self.micro_block.0).max(1)),
        };
        let mut blocks = micro_blocks(span, &self.cp_group, self.micro_block).into_iter().peekable();
        let stretch = |(piece, _): (Piece, i64)| {
            let inside = |(block, _): &(Piece, i64)| piece.start <= block.start && block.stop <= piece.stop;
            Stretch { piece, blocks: std::iter::from_fn(|| blocks.next_if(inside)).collect() }
        };
        micro_blocks(span, &self.cp_group, most).into_iter().map(stretch).collect()
    }

    /// Segment A of one micro-block.
    #[must_use]
    pub fn project(&self, layer: LayerIndex, block: &Piece, x_tw: &Tensor) -> Projected {
        self.decoder.project(layer, x_tw, positions(block), self.adapters)
    }

    /// One block forward over a span, no graph: this rank's rows in, this rank's rows out.
    pub fn forward(&self, layer: LayerIndex, span: &Span, x_tw: &Tensor, past: &Past) -> Tensor {
        tch::no_grad(|| {
            let blocks = micro_blocks(span, &self.cp_group, self.micro_block);
            let (mix, keep) = self.project_all(layer, &blocks, x_tw);
            let mixed = self.decoder.mixer(layer).forward(&self.cp_group, span, &mix, past);
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
        let blocks = micro_blocks(span, &self.cp_group, self.micro_block);
        let mixer = self.decoder.mixer(layer);
        let (mix, keep, mixed) = tch::no_grad(|| {
            let (mix, keep) = self.project_all(layer, &blocks, x_tw);
            let mixed = mixer.forward(&self.cp_group, span, &mix, past);
            (mix, keep, mixed)
        });
        let dx_tw = x_tw.detach().zeros_like();
        let mut parts = Vec::with_capacity(blocks.len());
        for at in &blocks {
            let part = |x: &Tensor| x.narrow(0, at.1, at.0.rows().dim());
            let keep: Vec<Tensor> = keep.iter().map(part).collect();
            parts.push(self.pull_finish_block(layer, at, rows, &part(&mixed.out), &keep, &dx_tw)?);
        }
        let dmixed = Tensor::cat(&parts.iter().map(|(dmixed, _)| dmixed).collect::<Vec<_>>(), 0);
        let dmix = tch::no_grad(|| {
            let backward = Backward { span, mix: &mix, past, mixed: &mixed, dout: &dmixed, later };
            mixer.backward(&self.cp_group, backward, past_gradient)
        });
        drop((mix, mixed, dmixed));
        for (at, (_, dkeep)) in blocks.iter().zip(parts) {
            let part = |x: &Tensor| x.narrow(0, at.1, at.0.rows().dim());
            let gradients: Vec<Tensor> = dmix.iter().map(part).chain(dkeep).collect();
            self.pull_project_block(layer, at, x_tw, &gradients, &dx_tw)?;
        }
        Ok(dx_tw)
    }

    /// Whether a tail is long enough that pages travel to its rows; a shorter one goes to the pages, as an answer does.
    #[must_use]
    pub fn travels(&self, tail: &Span) -> bool {
        tail.rows() > self.micro_block
    }

    /// One block forward over a tail whose rows stay while state travels, no graph. `kept` is what the mixer made of its
    /// stretches before, if that was kept.
    ///
    /// # Errors
    /// When what was kept cannot be brought back.
    pub fn forward_tail(&self, layer: LayerIndex, x_tw: &Tensor, tail: &Tail) -> Result<Tensor, tensor::Error> {
        tch::no_grad(|| {
            let stretches = self.stretches(tail.span);
            let (_, keeps, mixed) = self.tail_mixed(layer, &stretches, x_tw, tail)?;
            let y_tw = x_tw.empty_like();
            for ((stretch, mixed), keeps) in stretches.iter().zip(&mixed).zip(&keeps) {
                for ((block, first), keep) in stretch.blocks.iter().zip(keeps) {
                    let rows = |x: &Tensor| x.narrow(0, *first, block.rows().dim());
                    let out = stretch.rows(&mixed.out, block);
                    rows(&y_tw).copy_(&self.decoder.finish(layer, &rows(x_tw), &out, keep, self.adapters));
                }
            }
            Ok(y_tw)
        })
    }

    /// Segment A of the tail's stretches and what the mixer makes of them, computed or as it was kept.
    fn tail_mixed(
        &self,
        layer: LayerIndex,
        stretches: &[Stretch],
        x_tw: &Tensor,
        tail: &Tail,
    ) -> Result<TailMixed, tensor::Error> {
        let mixer = self.decoder.mixer(layer);
        let (mut asks, mut keeps) = (Vec::new(), Vec::new());
        for stretch in stretches {
            let project = |(block, first): &(Piece, i64)| {
                let Projected { mix, keep } = self.project(layer, block, &x_tw.narrow(0, *first, block.rows().dim()));
                (mixer.split(mix).0, keep)
            };
            let (ask, keep): (Vec<_>, Vec<_>) = stretch.blocks.iter().map(project).unzip();
            asks.push((stretch.piece, Stretch::join(ask)));
            keeps.push(keep);
        }
        // Kept on all ranks or on none, so no rank waits in the ring for another that stays away; a rank without rows
        // has nothing to load.
        let mixed = match tail.kept {
            Some(pool) if tail.span.of(self.cp_group.axis.rank()).next().is_some() => {
                let load = |block| {
                    let (out, saved) = pool.get(layer, block)?.expect("what is kept was kept for every stretch");
                    Ok(Mixed { out, saved })
                };
                (0..stretches.len()).map(load).collect::<Result<_, tensor::Error>>()?
            }
            Some(_) => mixer.nothing(&asks),
            None => mixer.capture(&self.cp_group, tail.layout, &asks, tail.own()),
        };
        Ok((asks, keeps, mixed))
    }

    /// One block backward over the tail, where rows stay and state travels: from the gradient of this rank's output rows
    /// to that of its input rows. `gradient` is what the answers have left on the tail's state. No rank holds rows of
    /// another, so a rank's memory grows with its own share of the tail only.
    ///
    /// # Errors
    /// When libtorch refuses.
    ///
    /// # Panics
    /// Never: a stretch has a block.
    pub fn backward_tail(
        &self,
        layer: LayerIndex,
        rows: &SpanRows,
        tail: &Tail,
        gradient: PastGradient,
    ) -> Result<Tensor, tensor::Error> {
        let SpanRows { span, x_tw, .. } = *rows;
        let stretches = self.stretches(span);
        let mixer = self.decoder.mixer(layer);
        let (asks, keeps, mixed) = tch::no_grad(|| self.tail_mixed(layer, &stretches, x_tw, tail))?;
        let dx_tw = x_tw.detach().empty_like();
        let mut swept = Vec::with_capacity(stretches.len());
        let mut dkeeps = Vec::new();
        for (((stretch, (piece, ask)), keeps), mixed) in stretches.iter().zip(asks).zip(&keeps).zip(mixed) {
            let mut douts = Vec::with_capacity(stretch.blocks.len());
            for (at, keep) in stretch.blocks.iter().zip(keeps) {
                let out = stretch.rows(&mixed.out, &at.0);
                let (dout, dkeep) = self.pull_finish_block(layer, at, rows, &out, keep, &dx_tw)?;
                douts.push(vec![dout]);
                dkeeps.push(dkeep);
            }
            let dout = Stretch::join(douts).pop().expect("a stretch has a block");
            swept.push(Swept { piece, ask, mixed, dout });
        }
        drop(keeps);
        let mut state = gradient.into_chunks(&tail.staged.slabs, tail.layout);
        let dasks = tch::no_grad(|| mixer.sweep(&self.cp_group, tail.layout, swept, tail.own(), &mut state));
        let [one, two] = state;
        let dstate: Vec<Tensor> =
            one.iter().zip(&two).map(|(one, two)| Tensor::cat(&[one, two], 0).to_kind(self.decoder.kind())).collect();
        drop((one, two));
        let mut dkeeps = dkeeps.into_iter();
        for (stretch, dask) in stretches.iter().zip(dasks) {
            for (at, dkeep) in stretch.blocks.iter().zip(dkeeps.by_ref()) {
                let part = |x: &Tensor| x.narrow(0, at.1, at.0.rows().dim());
                let asked = dask.iter().map(|x| stretch.rows(x, &at.0));
                let gradients: Vec<Tensor> = asked.chain(dstate.iter().map(part)).chain(dkeep).collect();
                self.pull_project_block(layer, at, x_tw, &gradients, &dx_tw)?;
            }
        }
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

    /// Segment B of one micro-block with a graph. Writes the residual's share to `dx_tw`; returns the gradients of the
    /// mixer's output and of what A handed to B, for the block's rows.
    fn pull_finish_block(
        &self,
        layer: LayerIndex,
        (block, first): &(Piece, i64),
        rows: &SpanRows,
        out: &Tensor,
        keep: &[Tensor],
        dx_tw: &Tensor,
    ) -> Result<(Tensor, Vec<Tensor>), tensor::Error> {
        let part = |x: &Tensor| x.narrow(0, *first, block.rows().dim());
        let leaf = |x: &Tensor| x.detach().set_requires_grad(true);
        let (x, o) = (leaf(&part(rows.x_tw)), leaf(out));
        let k: Vec<Tensor> = keep.iter().map(leaf).collect();
        let y = self.decoder.finish(layer, &x, &o, &k, self.adapters);
        pull(&[(&y, &part(rows.dy_tw))])?;
        part(dx_tw).copy_(&x.grad());
        Ok((o.grad(), k.iter().map(Tensor::grad).collect()))
    }

    /// Segment A of one micro-block with a graph; `gradients` are those of everything A hands on, for the block's rows.
    fn pull_project_block(
        &self,
        layer: LayerIndex,
        (block, first): &(Piece, i64),
        x_tw: &Tensor,
        gradients: &[Tensor],
        dx_tw: &Tensor,
    ) -> Result<(), tensor::Error> {
        let part = |x: &Tensor| x.narrow(0, *first, block.rows().dim());
        let x = part(x_tw).detach().set_requires_grad(true);
        let Projected { mix, keep } = self.project(layer, block, &x);
        let pairs: Vec<(&Tensor, &Tensor)> = mix.iter().chain(&keep).zip(gradients).collect();
        pull(&pairs)?;
        let _ = part(dx_tw).g_add_(&x.grad());
        Ok(())
    }
}

/// What a tail's stretches ask with, what A hands to B for each of their micro-blocks, and what the mixer makes of them.
type TailMixed = (Vec<Asking>, Vec<Vec<Vec<Tensor>>>, Vec<Mixed>);

/// A tail whose rows stay while state travels, in one layer.
#[derive(Clone, Copy)]
pub struct Tail<'a> {
    /// Its rows.
    pub span: &'a Span,
    /// How the prompt lies.
    pub layout: &'a PromptLayout,
    /// This rank's pages of the layer.
    pub staged: &'a Staged,
    /// What the mixer made of its micro-blocks, if that was kept.
    pub kept: Option<&'a MixedPool>,
}

impl Tail<'_> {
    /// This rank's filled state rows of both its chunks.
    fn own(&self) -> [Vec<Tensor>; 2] {
        [self.staged.slabs[0].filled(), self.staged.slabs[1].filled()]
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
