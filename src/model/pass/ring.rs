//! Rows of a long prompt on the route on which they stay and state travels past them, run by run.

use tch::{Device, Tensor};

use super::prompt::{PromptOutput, PromptRows, Tail};
use super::{BackwardRows, Finishing, MicroBlock, Pass, SpanRows, divided, micro_blocks};
use crate::model::decoder::{Projected, Values};
use crate::model::mixer::{BlockBackward, BlockQueries, Mixed, MixerInput, RingMixer};
use crate::model::past::{ChunkState, PastGradient};
use crate::model::planes::{Planes, join_rows};
use crate::prompt::layout::{Piece, PromptLayout, Span};
use crate::prompt::pages::Choice;
use crate::runtime::units::{LayerIndex, Tokens};
use crate::tensor;

/// Rows that the mixer takes at one time on a GPU: its kernels want many rows, the segments' scratch wants few.
pub const MIXED_ROWS: u64 = 32_768;

/// Rows that the mixer takes at one time: whole micro-blocks.
#[derive(Debug)]
pub(super) struct MixerBlock {
    /// Positions of the rows.
    pub piece: Piece,
    /// Its micro-blocks, at least one.
    pub micro_blocks: Vec<MicroBlock>,
}

impl MixerBlock {
    /// Rows of a micro-block in a tensor of the mixer block's rows; a view.
    pub(super) fn rows_of(&self, x: &Tensor, micro: &MicroBlock) -> Tensor {
        x.narrow(0, micro.piece().start.since(self.piece.start).dim(), micro.piece().rows().dim())
    }
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

impl Pass<'_> {
    /// This rank's rows of a span of `layout`'s prompt in blocks for the mixer. On a GPU row P−1, a micro-block of its own, is
    /// in one block with the rows before it: alone it would take an attention kernel as long as a thousand rows. Equal on all
    /// ranks and in all phases, as micro-blocks are.
    pub(super) fn ring_blocks(&self, span: &Span, layout: &PromptLayout) -> Vec<MixerBlock> {
        let rank = self.cp_group.axis.rank();
        let mut micro = micro_blocks(span, &self.cp_group, self.micro_block).into_iter().peekable();
        let mut pieces: Vec<Piece> = if self.decoder.device() == Device::Cpu {
            divided(span.of(rank), self.micro_block).collect()
        } else {
            let rows_max = Tokens(self.micro_block.0 * (MIXED_ROWS / self.micro_block.0).max(1));
            divided(span.joined(rank, layout.cut()).iter(), rows_max).collect()
        };
        if pieces.is_empty() {
            pieces.extend(micro.peek().map(MicroBlock::piece));
        }
        let mixer_block = |piece: Piece| {
            let inside = |micro: &MicroBlock| piece.start <= micro.piece().start && micro.piece().stop <= piece.stop;
            MixerBlock { piece, micro_blocks: std::iter::from_fn(|| micro.next_if(inside)).collect() }
        };
        pieces.into_iter().map(mixer_block).collect()
    }

    /// [`Pass::prompt`] where state travels.
    pub(super) fn ring_prompt(
        &self,
        mixer: &dyn RingMixer,
        layer: LayerIndex,
        rows: &PromptRows,
        keep: &mut dyn FnMut(&Piece, &Mixed) -> Result<(), tensor::Error>,
    ) -> Result<PromptOutput, tensor::Error> {
        let blocks = self.ring_blocks(&rows.layout.span(), rows.layout);
        // 1. Segment A: state goes to the slabs, queries and what segment B reads are kept.
        let mut queries = Vec::with_capacity(blocks.len());
        let mut handed = Vec::new();
        for block in &blocks {
            let mut parts = Vec::with_capacity(block.micro_blocks.len());
            for micro in &block.micro_blocks {
                let projected = self.project(layer, micro, rows.x_pw, Values::All);
                rows.store(&micro.piece(), 0, projected.input.state.tensors());
                parts.push(projected.input.queries);
                handed.push(projected.handed);
            }
            queries.push(BlockQueries { piece: block.piece, queries: Planes::join(parts) });
        }
        (rows.settle)()?;
        // 2. Attention over the pages of all ranks.
        let mixed = mixer.capture(&self.cp_group, rows.layout, &queries, ChunkState::filled(rows.slabs));
        drop(queries);
        for (block, mixed) in blocks.iter().zip(&mixed) {
            keep(&block.piece, mixed)?;
        }
        // 3. Segment B.
        let y_pw = rows.x_pw.empty_like();
        let held = rows.hold(&y_pw);
        let experts = self.finish_blocks(layer, &blocks, rows.x_pw, &mixed, &handed, &y_pw, None);
        Ok(PromptOutput { y_pw, held, index: None, experts })
    }

    /// Segment B of every micro-block of `blocks`, no graph: writes the block's output rows to `y_tw`, [t, w] like `x_tw`.
    /// `mixed` is the mixer's output of each block, `handed` what segment A handed on for each micro-block, `kept` are experts
    /// that were chosen before. Returns those that are chosen here.
    #[expect(clippy::too_many_arguments, reason = "every part of the block's input")]
    fn finish_blocks(
        &self,
        layer: LayerIndex,
        blocks: &[MixerBlock],
        x_tw: &Tensor,
        mixed: &[Mixed],
        handed: &[Planes],
        y_tw: &Tensor,
        kept: Option<&Tensor>,
    ) -> Option<Tensor> {
        let mut finishing = Finishing::new(self, layer, kept);
        let mut handed = handed.iter();
        for (block, mixed) in blocks.iter().zip(mixed) {
            for (micro, handed) in block.micro_blocks.iter().zip(handed.by_ref()) {
                finishing.rows(micro, x_tw, &block.rows_of(&mixed.out, micro), handed, y_tw);
            }
        }
        finishing.end()
    }

    /// [`Pass::forward_tail`] where state travels.
    pub(super) fn ring_forward_tail(
        &self,
        mixer: &dyn RingMixer,
        layer: LayerIndex,
        x_tw: &Tensor,
        tail: &Tail,
    ) -> Result<Tensor, tensor::Error> {
        let blocks = self.ring_blocks(tail.span, tail.layout);
        let TailForward { mixed, handed, .. } = self.tail_mixed(mixer, layer, &blocks, x_tw, tail)?;
        let y_tw = x_tw.empty_like();
        let kept = tail.choices.stage(Choice::Experts, layer)?;
        self.finish_blocks(layer, &blocks, x_tw, &mixed, &handed, &y_tw, kept.as_deref());
        Ok(y_tw)
    }

    /// Segment A of the tail's mixer blocks and the mixer's output for them, computed or as it was kept.
    fn tail_mixed(
        &self,
        mixer: &dyn RingMixer,
        layer: LayerIndex,
        blocks: &[MixerBlock],
        x_tw: &Tensor,
        tail: &Tail,
    ) -> Result<TailForward, tensor::Error> {
        let mut queries = Vec::with_capacity(blocks.len());
        let mut handed = Vec::new();
        for block in blocks {
            let mut parts = Vec::with_capacity(block.micro_blocks.len());
            for micro in &block.micro_blocks {
                // The state lies in the pages.
                let projected = self.project(layer, micro, x_tw, Values::WithoutState);
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
            None => mixer.capture(&self.cp_group, tail.layout, &queries, ChunkState::filled(tail.staged.slabs())),
        };
        Ok(TailForward { queries, mixed, handed })
    }

    /// [`Pass::backward_tail`] where state travels. The gradient of each micro-block's input takes the place of its output's in
    /// `rows.dy_tw`. No rank holds rows of another, so a rank's memory grows with its own share of the tail only.
    pub(super) fn ring_backward_tail(
        &self,
        mixer: &dyn RingMixer,
        layer: LayerIndex,
        rows: &SpanRows,
        tail: &Tail,
        later: PastGradient,
    ) -> Result<Tensor, tensor::Error> {
        let SpanRows { span, x_tw, .. } = *rows;
        let blocks = self.ring_blocks(span, tail.layout);
        let kept = rows.choices.stage(Choice::Experts, layer)?;
        // 1. Segment A and the mixer, no graph.
        let TailForward { queries, mixed, handed } =
            tch::no_grad(|| self.tail_mixed(mixer, layer, &blocks, x_tw, tail))?;
        // 2. Segment B.
        let dx_tw = rows.dy_tw.shallow_clone();
        let mut backward = Vec::with_capacity(blocks.len());
        let mut dhanded = Vec::new();
        let mut next_handed = handed.iter();
        for ((block, queries), mixed) in blocks.iter().zip(queries).zip(mixed) {
            let mut dmixed = Vec::with_capacity(block.micro_blocks.len());
            for (micro, handed) in block.micro_blocks.iter().zip(next_handed.by_ref()) {
                let out = block.rows_of(&mixed.out, micro);
                let b = BackwardRows { micro, rows, kept: kept.as_deref() };
                let done = self.backward_finish(layer, &b, &out, handed)?;
                micro.rows_of(&dx_tw).copy_(&done.dx_tw);
                dmixed.push(done.dmixed);
                dhanded.push(done.dhanded);
            }
            backward.push(BlockBackward { block: queries, mixed, dout: join_rows(dmixed) });
        }
        drop(handed);
        // 3. The mixer.
        let own = ChunkState::filled(tail.staged.slabs());
        let later = later.into_chunks(tail.staged.slabs(), tail.layout, mixer.gradient_planes());
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
}
