//! One block over one span's rows: forward, and backward with everything recomputed from the block's input.
//!
//! ```text
//!   forward    x ──A──▶ q k v ──mixer (ranks meet)──▶ mixed ──B──▶ y
//!   backward   1. recompute A without a graph, run the mixer
//!              2. B with a graph, backward from dy: d mixed
//!              3. the mixer's backward, by hand: dq dk dv
//!              4. A with a graph, backward from dq dk dv: dx
//!              The largest graph that is ever alive is one segment of one micro-block.
//! ```

use tch::{Device, Tensor};

use super::decoder::{Decoder, Projected};
use super::lora::Adapters;
use super::mixer::{Backward, BlockBackward, BlockQueries, CpGroup, Mixed, MixerInput};
use super::past::{ChunkState, Past, PastGradient};
use super::planes::{Planes, join_rows};
use crate::prompt::handoff::MixedPool;
use crate::prompt::layout::{Piece, PromptLayout, Span, positions};
use crate::prompt::pages::Staged;
use crate::runtime::units::{LayerIndex, Position, Tokens};
use crate::tensor;
use crate::tensor::boundary::backward as backward_graph;

/// What a pass over blocks needs besides rows.
#[derive(Clone, Copy)]
pub struct Pass<'a> {
    /// Frozen weights and the maths of blocks.
    pub decoder: &'a dyn Decoder,
    /// The policy's trained part.
    pub adapters: &'a Adapters,
    /// This rank among those that share the prompt.
    pub cp_group: CpGroup<'a>,
    /// Most rows of a segment at one time; equal on all ranks and in all phases.
    pub micro_block: Tokens,
}

/// Rows that a segment computes at one time.
#[derive(Clone, Copy, Debug)]
pub struct MicroBlock {
    /// Positions of the rows.
    pub piece: Piece,
    /// First row in a tensor of this rank's rows.
    pub first: i64,
}

impl MicroBlock {
    /// The block's rows in a tensor of this rank's rows; a view.
    pub fn rows_of(&self, x: &Tensor) -> Tensor {
        x.narrow(0, self.first, self.piece.rows().dim())
    }

    fn planes_of(&self, planes: &Planes) -> Planes {
        planes.narrow(self.first, self.piece.rows().dim())
    }
}

/// This rank's rows of a span in blocks of at most `rows_max`. A rank without rows gets one empty block, so that it still
/// knows the shapes with which it takes part.
#[must_use]
pub fn micro_blocks(span: &Span, cp_group: &CpGroup, rows_max: Tokens) -> Vec<MicroBlock> {
    let rank = cp_group.axis.rank();
    let mut blocks = Vec::new();
    let mut first = 0;
    for piece in span.of(rank) {
        let mut start = piece.start;
        while start < piece.stop {
            let stop = start.plus(rows_max).min(piece.stop);
            let piece = Piece { rank, start, stop };
            blocks.push(MicroBlock { piece, first });
            first += piece.rows().dim();
            start = stop;
        }
    }
    if blocks.is_empty() {
        blocks.push(MicroBlock { piece: Piece { rank, start: Position(0), stop: Position(0) }, first: 0 });
    }
    blocks
}

/// Rows that the mixer takes at one time on a GPU: its kernels want many rows, the segments' scratch wants few.
pub const MIXED_ROWS: u64 = 32_768;

/// Rows that the mixer takes at one time: whole micro-blocks.
#[derive(Debug)]
pub struct MixerBlock {
    /// Positions of the rows.
    pub piece: Piece,
    /// Its micro-blocks, at least one.
    pub micro_blocks: Vec<MicroBlock>,
}

impl MixerBlock {
    /// Rows of a micro-block in a tensor of the mixer block's rows; a view.
    pub fn rows_of(&self, x: &Tensor, micro: &MicroBlock) -> Tensor {
        x.narrow(0, micro.piece.start.since(self.piece.start).dim(), micro.piece.rows().dim())
    }
}

/// A tail in one layer, for the route on which rows stay and state travels.
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
}

/// One span's rows on this rank, for a backward.
#[derive(Clone, Copy)]
pub struct SpanRows<'a> {
    /// Rows of all ranks.
    pub span: &'a Span,
    /// Input of the block.
    pub x_tw: &'a Tensor,
    /// Gradient of the block's output.
    pub dy_tw: &'a Tensor,
}

/// Segment A and the mixer over a tail.
struct TailForward {
    /// One entry for each mixer block.
    queries: Vec<BlockQueries>,
    /// One entry for each mixer block.
    mixed: Vec<Mixed>,
    /// What A hands to B; one entry for each micro-block.
    handed: Vec<Planes>,
}

/// Gradients that segment B's backward returns besides that of the residual.
struct FinishGradient {
    dmixed: Tensor,
    dhanded: Planes,
}

impl Pass<'_> {
    /// This rank's rows of a span in blocks for the mixer. Equal on all ranks and in all phases, as micro-blocks are.
    #[must_use]
    pub fn mixer_blocks(&self, span: &Span) -> Vec<MixerBlock> {
        let rows_max = match self.decoder.device() {
            Device::Cpu => self.micro_block,
            _ => Tokens(self.micro_block.0 * (MIXED_ROWS / self.micro_block.0).max(1)),
        };
        let mut micro = micro_blocks(span, &self.cp_group, self.micro_block).into_iter().peekable();
        let mixer_block = |MicroBlock { piece, .. }: MicroBlock| {
            let inside = |micro: &MicroBlock| piece.start <= micro.piece.start && micro.piece.stop <= piece.stop;
            MixerBlock { piece, micro_blocks: std::iter::from_fn(|| micro.next_if(inside)).collect() }
        };
        micro_blocks(span, &self.cp_group, rows_max).into_iter().map(mixer_block).collect()
    }

    /// Segment A of one micro-block of this rank's rows `x_tw`.
    #[must_use]
    pub fn project(&self, layer: LayerIndex, micro: &MicroBlock, x_tw: &Tensor) -> Projected {
        self.decoder.project(layer, &micro.rows_of(x_tw), positions(&micro.piece), self.adapters)
    }

    /// One block forward over a span, no graph: this rank's rows in, this rank's rows out.
    pub fn forward(&self, layer: LayerIndex, span: &Span, x_tw: &Tensor, past: &Past) -> Tensor {
        tch::no_grad(|| {
            let blocks = micro_blocks(span, &self.cp_group, self.micro_block);
            let Projected { input, handed } = self.project_all(layer, &blocks, x_tw);
            let mixed = self.decoder.mixer(layer).forward(&self.cp_group, span, &input, past);
            let y_tw = |micro: &MicroBlock| {
                let handed = micro.planes_of(&handed);
                let (x_tw, out) = (micro.rows_of(x_tw), micro.rows_of(&mixed.out));
                self.decoder.finish(layer, &x_tw, &out, &handed, self.adapters)
            };
            Tensor::cat(&blocks.iter().map(y_tw).collect::<Vec<_>>(), 0)
        })
    }

    /// One block backward over a span: from the gradient of this rank's output rows to that of its input rows. Adapter
    /// gradients add up in the adapters' `.grad`, gradients of earlier positions' state in `past_gradient`. `later` is the
    /// gradient that later rows have left on the span's own state.
    ///
    /// # Errors
    /// When libtorch refuses.
    pub fn backward(
        &self,
        layer: LayerIndex,
        rows: &SpanRows,
        past: &Past,
        later: Option<Planes>,
        past_gradient: &mut PastGradient,
    ) -> Result<Tensor, tensor::Error> {
        let SpanRows { span, x_tw, .. } = *rows;
        let blocks = micro_blocks(span, &self.cp_group, self.micro_block);
        let mixer = self.decoder.mixer(layer);
        // 1. Segment A and the mixer, no graph.
        let (projected, mixed) = tch::no_grad(|| {
            let projected = self.project_all(layer, &blocks, x_tw);
            let mixed = mixer.forward(&self.cp_group, span, &projected.input, past);
            (projected, mixed)
        });
        // 2. Segment B.
        let dx_tw = x_tw.detach().zeros_like();
        let mut dmixed = Vec::with_capacity(blocks.len());
        let mut dhanded = Vec::with_capacity(blocks.len());
        for micro in &blocks {
            let handed = micro.planes_of(&projected.handed);
            let done = self.backward_finish(layer, micro, rows, &micro.rows_of(&mixed.out), &handed, &dx_tw)?;
            dmixed.push(done.dmixed);
            dhanded.push(done.dhanded);
        }
        let dmixed = join_rows(dmixed);
        // 3. The mixer.
        let dinput = tch::no_grad(|| {
            let input = &projected.input;
            let backward = Backward { span, input, past, mixed: &mixed, dout: &dmixed, later };
            mixer.backward(&self.cp_group, backward, past_gradient)
        });
        drop((projected, mixed, dmixed));
        // 4. Segment A.
        for (micro, handed) in blocks.iter().zip(dhanded) {
            let queries = micro.planes_of(&dinput.queries);
            let state = micro.planes_of(&dinput.state);
            let gradient = Projected { input: MixerInput { queries, state }, handed };
            self.backward_project(layer, micro, x_tw, &gradient, &dx_tw)?;
        }
        Ok(dx_tw)
    }

    /// Whether a tail is long enough that pages travel to its rows; a shorter one goes to the pages, as an answer does.
    #[must_use]
    pub fn travels(&self, tail: &Span) -> bool {
        tail.rows() > self.micro_block
    }

    /// Segment B of every micro-block of `blocks`, no graph: writes the block's output rows to `y_tw`, [t, w] like `x_tw`.
    /// `mixed` is the mixer's output of each block, `handed` what segment A handed on for each micro-block.
    pub fn finish_blocks(
        &self,
        layer: LayerIndex,
        blocks: &[MixerBlock],
        x_tw: &Tensor,
        mixed: &[Mixed],
        handed: &[Planes],
        y_tw: &Tensor,
    ) {
        let mut handed = handed.iter();
        for (block, mixed) in blocks.iter().zip(mixed) {
            for (micro, handed) in block.micro_blocks.iter().zip(handed.by_ref()) {
                let out = block.rows_of(&mixed.out, micro);
                let y = self.decoder.finish(layer, &micro.rows_of(x_tw), &out, handed, self.adapters);
                micro.rows_of(y_tw).copy_(&y);
            }
        }
    }

    /// One block forward over a tail whose rows stay while state travels, no graph.
    ///
    /// # Errors
    /// When kept mixer output cannot be brought back.
    pub fn forward_tail(&self, layer: LayerIndex, x_tw: &Tensor, tail: &Tail) -> Result<Tensor, tensor::Error> {
        tch::no_grad(|| {
            let blocks = self.mixer_blocks(tail.span);
            let TailForward { mixed, handed, .. } = self.tail_mixed(layer, &blocks, x_tw, tail)?;
            let y_tw = x_tw.empty_like();
            self.finish_blocks(layer, &blocks, x_tw, &mixed, &handed, &y_tw);
            Ok(y_tw)
        })
    }

    /// Segment A of the tail's mixer blocks and the mixer's output for them, computed or as it was kept.
    fn tail_mixed(
        &self,
        layer: LayerIndex,
        blocks: &[MixerBlock],
        x_tw: &Tensor,
        tail: &Tail,
    ) -> Result<TailForward, tensor::Error> {
        let mixer = self.decoder.mixer(layer);
        let mut queries = Vec::with_capacity(blocks.len());
        let mut handed = Vec::new();
        for block in blocks {
            let mut parts = Vec::with_capacity(block.micro_blocks.len());
            for micro in &block.micro_blocks {
                let projected = self.project(layer, micro, x_tw);
                parts.push(projected.input.queries);
                handed.push(projected.handed);
            }
            queries.push(BlockQueries { piece: block.piece, queries: Planes::join(parts) });
        }
        // Kept on all ranks or on none, so no rank waits in the ring for another that stays away; a rank without rows
        // has nothing to load.
        let mixed = match tail.kept {
            Some(pool) if tail.span.of(self.cp_group.axis.rank()).next().is_some() => {
                let load = |block| {
                    let (out, saved) =
                        pool.get(layer, block)?.expect("output is kept for every mixer block or for none");
                    Ok(Mixed { out, saved: saved.into() })
                };
                (0..blocks.len()).map(load).collect::<Result<_, tensor::Error>>()?
            }
            Some(_) => mixer.capture_no_rows(&queries),
            None => mixer.capture(&self.cp_group, tail.layout, &queries, ChunkState::filled(&tail.staged.slabs)),
        };
        Ok(TailForward { queries, mixed, handed })
    }

    /// One block backward over a tail whose rows stay while state travels: from the gradient of this rank's output rows to
    /// that of its input rows. `later` is the gradient that the answers have left on the tail's state. No rank holds rows of
    /// another, so a rank's memory grows with its own share of the tail only.
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
        let SpanRows { span, x_tw, .. } = *rows;
        let blocks = self.mixer_blocks(span);
        let mixer = self.decoder.mixer(layer);
        // 1. Segment A and the mixer, no graph.
        let TailForward { queries, mixed, handed } = tch::no_grad(|| self.tail_mixed(layer, &blocks, x_tw, tail))?;
        // 2. Segment B.
        let dx_tw = x_tw.detach().empty_like();
        let mut backward = Vec::with_capacity(blocks.len());
        let mut dhanded = Vec::new();
        let mut next_handed = handed.iter();
        for ((block, queries), mixed) in blocks.iter().zip(queries).zip(mixed) {
            let mut dmixed = Vec::with_capacity(block.micro_blocks.len());
            for (micro, handed) in block.micro_blocks.iter().zip(next_handed.by_ref()) {
                let out = block.rows_of(&mixed.out, micro);
                let done = self.backward_finish(layer, micro, rows, &out, handed, &dx_tw)?;
                dmixed.push(done.dmixed);
                dhanded.push(done.dhanded);
            }
            backward.push(BlockBackward { block: queries, mixed, dout: join_rows(dmixed) });
        }
        drop(handed);
        // 3. The mixer.
        let own = ChunkState::filled(&tail.staged.slabs);
        let later = later.into_chunks(&tail.staged.slabs, tail.layout);
        let gradient = tch::no_grad(|| mixer.capture_backward(&self.cp_group, tail.layout, backward, own, later));
        let dstate = gradient.state.join(self.decoder.kind());
        // 4. Segment A.
        let mut dhanded = dhanded.into_iter();
        for (block, dqueries) in blocks.iter().zip(gradient.queries) {
            for (micro, handed) in block.micro_blocks.iter().zip(dhanded.by_ref()) {
                let queries = dqueries.map(|plane| block.rows_of(plane, micro));
                let gradient = Projected { input: MixerInput { queries, state: micro.planes_of(&dstate) }, handed };
                self.backward_project(layer, micro, x_tw, &gradient, &dx_tw)?;
            }
        }
        Ok(dx_tw)
    }

    fn project_all(&self, layer: LayerIndex, blocks: &[MicroBlock], x_tw: &Tensor) -> Projected {
        Projected::join(blocks.iter().map(|micro| self.project(layer, micro, x_tw)).collect())
    }

    /// Segment B of one micro-block with a graph, and its backward. Writes the residual's gradient to the block's rows of
    /// `dx_tw`. `mixed` and `handed` are the block's rows.
    fn backward_finish(
        &self,
        layer: LayerIndex,
        micro: &MicroBlock,
        rows: &SpanRows,
        mixed: &Tensor,
        handed: &Planes,
        dx_tw: &Tensor,
    ) -> Result<FinishGradient, tensor::Error> {
        let leaf = |x: &Tensor| x.detach().set_requires_grad(true);
        let x = leaf(&micro.rows_of(rows.x_tw));
        let mixed = leaf(mixed);
        let handed = handed.map(leaf);
        let y = self.decoder.finish(layer, &x, &mixed, &handed, self.adapters);
        backward_graph(&[(&y, &micro.rows_of(rows.dy_tw))])?;
        micro.rows_of(dx_tw).copy_(&x.grad());
        Ok(FinishGradient { dmixed: mixed.grad(), dhanded: handed.map(Tensor::grad) })
    }

    /// Segment A of one micro-block with a graph, and its backward from the block's rows of `gradient`. Adds to the block's
    /// rows of `dx_tw`.
    fn backward_project(
        &self,
        layer: LayerIndex,
        micro: &MicroBlock,
        x_tw: &Tensor,
        gradient: &Projected,
        dx_tw: &Tensor,
    ) -> Result<(), tensor::Error> {
        let x = micro.rows_of(x_tw).detach().set_requires_grad(true);
        let projected = self.decoder.project(layer, &x, positions(&micro.piece), self.adapters);
        let pairs: Vec<(&Tensor, &Tensor)> = projected.tensors().zip(gradient.tensors()).collect();
        backward_graph(&pairs)?;
        let _ = micro.rows_of(dx_tw).g_add_(&x.grad());
        Ok(())
    }
}
