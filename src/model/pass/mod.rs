//! One block over one span's rows: forward, and backward with everything recomputed from the block's input.
//!
//! ```text
//!   forward    x ──A──▶ q k v ──mixer (ranks meet)──▶ mixed ──B──▶ y
//!   backward   1. recompute A without a graph, run the mixer unless its output was kept
//!              2. B with a graph, backward from dy: d mixed
//!              3. the mixer's backward, by hand: dq dk dv
//!              4. A with a graph, backward from dq dk dv: dx
//!              The largest graph that is ever alive is one segment of one micro-block.
//! ```
//!
//! What an index or a router chooses in a forward is kept for the backward, and for every other pass over the same rows.
//! Experts add to B's output; their part has no graph of its own either (`experts`).

mod gathered;
mod prompt;
mod recurrent;
mod ring;

pub use prompt::{PromptOutput, PromptRows, Tail};
pub use ring::MIXED_ROWS;

use tch::Tensor;

use super::decoder::{Decoder, FinishRows, Projected, Values};
use super::latent::{IndexProjected, IndexSet};
use super::lora::Adapters;
use super::mixer::{Backward, CpGroup, Mixed, MixerInput};
use super::past::{Past, PastGradient};
use super::planes::{Planes, join_rows};
use crate::prompt::handoff::PlacedGroup;
use crate::prompt::layout::{Piece, Positions, Span, positions};
use crate::prompt::pack::Pack;
use crate::prompt::pages::{Choice, SpanChoices};
use crate::runtime::units::{LayerIndex, Position, Rank, Tokens};
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
#[derive(Clone, Debug)]
pub struct MicroBlock {
    /// Positions of the rows: one piece, or those of all sequences of a packed span.
    pieces: Vec<Piece>,
    /// First row in a tensor of this rank's rows.
    pub first: i64,
}

impl MicroBlock {
    /// Positions of the rows of a span with one sequence.
    ///
    /// # Panics
    /// When the span is packed; the prompt is not.
    #[must_use]
    pub fn piece(&self) -> Piece {
        let [piece] = self.pieces[..] else { panic!("rows of one sequence are one piece") };
        piece
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> i64 {
        self.pieces.iter().map(|piece| piece.rows().dim()).sum()
    }

    /// Positions of all rows.
    #[must_use]
    pub fn positions(&self) -> Positions {
        self.pieces.iter().map(positions).collect()
    }

    /// The block's rows in a tensor of this rank's rows; a view.
    pub fn rows_of(&self, x: &Tensor) -> Tensor {
        x.narrow(0, self.first, self.rows())
    }

    fn planes_of(&self, planes: &Planes) -> Planes {
        planes.narrow(self.first, self.rows())
    }
}

/// This rank's rows of a span in blocks of at most `rows_max`; those of a packed span, which is no longer than that, are one
/// block. A rank without rows gets one empty block, so that it still knows the shapes with which it takes part. Where experts
/// are spread over ranks, every rank gets as many blocks as the one with the most: it takes part in every exchange.
#[must_use]
pub fn micro_blocks(span: &Span, cp_group: &CpGroup, rows_max: Tokens) -> Vec<MicroBlock> {
    let rank = cp_group.axis.rank();
    let mut blocks = blocks_of(span, rank, rows_max);
    let end = |block: &MicroBlock| {
        let stop = block.pieces.last().map_or(Position(0), |piece| piece.stop);
        (stop, block.first + block.rows())
    };
    let (stop, first) = blocks.last().map_or((Position(0), 0), end);
    let empty = MicroBlock { pieces: vec![Piece { rank, start: stop, stop }], first };
    let ranks = if cp_group.ep.size() > 1 { cp_group.axis.size() } else { 0 };
    let most = (0..ranks).map(|rank| blocks_of(span, Rank(rank), rows_max).len()).max().unwrap_or(0);
    blocks.resize(most.max(blocks.len()).max(1), empty);
    blocks
}

fn blocks_of(span: &Span, rank: Rank, rows_max: Tokens) -> Vec<MicroBlock> {
    if span.is_packed() {
        let pieces: Vec<Piece> = span.of(rank).copied().collect();
        return if pieces.is_empty() { Vec::new() } else { vec![MicroBlock { pieces, first: 0 }] };
    }
    let mut first = 0;
    let block = |piece| {
        let block = MicroBlock { pieces: vec![piece], first };
        first += block.rows();
        block
    };
    divided(span.of(rank), rows_max).map(block).collect()
}

/// The same positions in pieces of at most `rows_max` rows.
fn divided<'a>(pieces: impl Iterator<Item = &'a Piece>, rows_max: Tokens) -> impl Iterator<Item = Piece> {
    pieces.flat_map(move |&Piece { rank, start, stop }| {
        let starts = (start.0..stop.0).step_by(rows_max.index()).map(Position);
        starts.map(move |start| Piece { rank, start, stop: start.plus(rows_max).min(stop) })
    })
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
    /// What was chosen for the rows.
    pub choices: SpanChoices<'a>,
}

/// Gradients that segment B's backward returns for the rows of a micro-block.
struct FinishGradient {
    /// Of the block's input, through the residual.
    dx_tw: Tensor,
    dmixed: Tensor,
    dhanded: Planes,
}

/// What a block's forward makes of a span's rows on this rank.
#[derive(Debug)]
pub struct Forward {
    /// Output of the block.
    pub y_tw: Tensor,
    /// Output of the mixer, for the backward over the same rows.
    pub mixed: Mixed,
    /// State of the rows, which belongs on their pages.
    pub state: Planes,
}

impl Pass<'_> {
    /// The answers of a group in packs of at most a micro-block of rows on all ranks together; each by itself where a layer's mixer
    /// does not tell sequences apart. Equal on all ranks and in all phases.
    #[must_use]
    pub fn packs(&self, group: &PlacedGroup) -> Vec<Pack> {
        let mut layers = (0..self.decoder.layers()).map(LayerIndex);
        let together = layers.all(|layer| self.decoder.mixer(layer).tells_sequences_apart());
        group.packs(self.cp_group.axis.rank(), if together { self.micro_block } else { Tokens(0) })
    }

    /// Segment A of one micro-block of this rank's rows `x_tw`.
    #[must_use]
    pub fn project(&self, layer: LayerIndex, micro: &MicroBlock, x_tw: &Tensor, values: Values) -> Projected {
        self.decoder.project(layer, &micro.rows_of(x_tw), &micro.positions(), self.adapters, values)
    }

    /// One block forward over a span, no graph: this rank's rows in, this rank's rows out. What was chosen for the rows before
    /// is used again, else it is chosen and kept in `choices`.
    ///
    /// # Errors
    /// When a choice cannot be kept or brought back.
    pub fn forward(
        &self,
        layer: LayerIndex,
        span: &Span,
        x_tw: &Tensor,
        past: &Past,
        choices: SpanChoices,
    ) -> Result<Tensor, tensor::Error> {
        self.forward_whole(layer, span, x_tw, past, choices).map(|forward| forward.y_tw)
    }

    /// [`Pass::forward`] that returns the mixer's output and the state of the rows too.
    ///
    /// # Errors
    /// As [`Pass::forward`].
    pub fn forward_whole(
        &self,
        layer: LayerIndex,
        span: &Span,
        x_tw: &Tensor,
        past: &Past,
        choices: SpanChoices,
    ) -> Result<Forward, tensor::Error> {
        tch::no_grad(|| {
            let blocks = micro_blocks(span, &self.cp_group, self.micro_block);
            let Projected { input, handed } = self.project_all(layer, &blocks, x_tw);
            let index = self.index_set(layer, span, x_tw, past, choices)?;
            let lent = index.as_ref().map(IndexSet::lend);
            let mixed = self.decoder.mixer(layer).forward(&self.cp_group, span, &input, past, lent);
            let mut y_tw = BlockRows::new(&blocks, x_tw);
            let kept = choices.stage(Choice::Experts, layer)?;
            let mut finishing = Finishing::new(self, layer, kept.as_deref());
            for micro in &blocks {
                let y = finishing.block(micro, x_tw, &micro.rows_of(&mixed.out), &micro.planes_of(&handed));
                y_tw.put(micro, &y);
            }
            if let Some(chosen) = finishing.end() {
                choices.put(Choice::Experts, layer, &chosen)?;
            }
            Ok(Forward { y_tw: y_tw.end(), mixed, state: input.state })
        })
    }

    /// The keys of a span's rows, in layers that choose them: as they were chosen in an earlier pass or layer, else chosen here
    /// and kept.
    fn index_set(
        &self,
        layer: LayerIndex,
        span: &Span,
        x_tw: &Tensor,
        past: &Past,
        choices: SpanChoices,
    ) -> Result<Option<IndexSet>, tensor::Error> {
        let Some(owner) = self.decoder.index_owner(layer) else { return Ok(None) };
        if let Some(kept) = choices.stage(Choice::Index, owner)? {
            return Ok(Some(IndexSet::staged(kept)));
        }
        let indexer = self.decoder.indexer(layer).expect("an index set is made before a layer borrows it");
        let own = self.project_index(layer, span, x_tw);
        let chosen = indexer.choose(&self.cp_group, span, &own, past);
        choices.put(Choice::Index, owner, chosen.lend().positions())?;
        Ok(Some(chosen))
    }

    /// What the layer's index reads and leaves of this rank's rows of a span.
    fn project_index(&self, layer: LayerIndex, span: &Span, x_tw: &Tensor) -> IndexProjected {
        let blocks = micro_blocks(span, &self.cp_group, self.micro_block);
        let of = |micro: &MicroBlock| {
            self.decoder.project_index(layer, &micro.rows_of(x_tw), positions(&micro.piece()), self.adapters)
        };
        IndexProjected::join(&blocks.iter().map(of).collect::<Vec<_>>())
    }

    /// One block backward over a span: from the gradient of this rank's output rows to that of its input rows. Adapter
    /// gradients add up in the adapters' `.grad`, gradients of earlier positions' state in `past_gradient`. `later` is the
    /// gradient that later rows have left on the span's own state. `kept` is what the mixer's forward returned for these rows under the
    /// same adapters, on all ranks or on none; without it the mixer runs again.
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
        kept: Option<Mixed>,
    ) -> Result<Tensor, tensor::Error> {
        let SpanRows { span, x_tw, choices, .. } = *rows;
        let blocks = micro_blocks(span, &self.cp_group, self.micro_block);
        let mixer = self.decoder.mixer(layer);
        // 1. Segment A and the mixer, no graph.
        let index = tch::no_grad(|| self.index_set(layer, span, x_tw, past, choices))?;
        let lent = index.as_ref().map(IndexSet::lend);
        let (projected, mixed) = tch::no_grad(|| {
            let projected = self.project_all(layer, &blocks, x_tw);
            let mixed = kept.unwrap_or_else(|| mixer.forward(&self.cp_group, span, &projected.input, past, lent));
            (projected, mixed)
        });
        // 2. Segment B.
        let kept = choices.stage(Choice::Experts, layer)?;
        let mut dx_tw = BlockRows::new(&blocks, x_tw);
        let mut dmixed = BlockRows::new(&blocks, x_tw);
        let mut dhanded = Vec::with_capacity(blocks.len());
        for micro in &blocks {
            let handed = micro.planes_of(&projected.handed);
            let b = BackwardRows { micro, rows, kept: kept.as_deref() };
            let done = self.backward_finish(layer, &b, &micro.rows_of(&mixed.out), &handed)?;
            dx_tw.put(micro, &done.dx_tw);
            dmixed.put(micro, &done.dmixed);
            dhanded.push(done.dhanded);
        }
        let dx_tw = dx_tw.end();
        let dmixed = dmixed.end();
        // 3. The mixer.
        let dinput = tch::no_grad(|| {
            let input = &projected.input;
            let backward = Backward { span, input, past, mixed: &mixed, dout: &dmixed, later, index: lent };
            mixer.backward(&self.cp_group, backward, past_gradient)
        })?;
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

    fn project_all(&self, layer: LayerIndex, blocks: &[MicroBlock], x_tw: &Tensor) -> Projected {
        let [first, others @ ..] = blocks else { unreachable!("a rank without rows has an empty block") };
        let projected = self.project(layer, first, x_tw, Values::All);
        if others.is_empty() {
            return projected;
        }
        // Written in place, so that no row exists twice.
        let rows = x_tw.size()[0];
        let all = projected.map(|plane| {
            let shape: Vec<i64> = std::iter::once(rows).chain(plane.size().into_iter().skip(1)).collect();
            Tensor::empty(shape, (plane.kind(), plane.device()))
        });
        let write = |micro: &MicroBlock, part: &Projected| {
            for (whole, rows) in all.tensors().zip(part.tensors()) {
                micro.rows_of(whole).copy_(rows);
            }
        };
        write(first, &projected);
        drop(projected);
        for micro in others {
            write(micro, &self.project(layer, micro, x_tw, Values::All));
        }
        all
    }

    /// Segment B of one micro-block with a graph, and its backward. `mixed` and `handed` are the block's rows.
    fn backward_finish(
        &self,
        layer: LayerIndex,
        of: &BackwardRows,
        mixed: &Tensor,
        handed: &Planes,
    ) -> Result<FinishGradient, tensor::Error> {
        let BackwardRows { micro, rows, kept } = *of;
        let leaf = |x: &Tensor| x.detach().set_requires_grad(true);
        let x = leaf(&micro.rows_of(rows.x_tw));
        let mixed = leaf(mixed);
        let handed = handed.map(leaf);
        let dy_tw = micro.rows_of(rows.dy_tw);
        let kept = kept.map(|kept| micro.rows_of(kept));
        let read = FinishRows { x_tw: &x, mixed: &mixed, handed: &handed, kept: kept.as_ref() };
        let finished = self.decoder.finish(layer, &read, self.adapters, Values::ForGradient);
        let mut pairs: Vec<(&Tensor, &Tensor)> = Vec::with_capacity(4);
        pairs.extend(std::iter::once(&finished.y_tw).chain(&finished.unread_tw).map(|y_tw| (y_tw, &dy_tw)));
        let routed = finished.routed.as_ref().zip(self.decoder.experts(layer));
        let of_experts = routed
            .map(|(routed, experts)| experts.backward(self.cp_group.ep, routed, &dy_tw, self.adapters))
            .transpose()?;
        if let (Some((routed, _)), Some(done)) = (routed, &of_experts) {
            pairs.extend([(&routed.x_tw, &done.dx_tw), (&routed.weight_tk, &done.dweight_tk)]);
        }
        backward_graph(&pairs)?;
        Ok(FinishGradient { dx_tw: x.grad(), dmixed: mixed.grad(), dhanded: handed.map(Tensor::grad) })
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
        let projected = self.decoder.project(layer, &x, &micro.positions(), self.adapters, Values::ForGradient);
        let pairs: Vec<(&Tensor, &Tensor)> = projected.tensors().zip(gradient.tensors()).collect();
        backward_graph(&pairs)?;
        let _ = micro.rows_of(dx_tw).g_add_(&x.grad());
        Ok(())
    }
}

/// Rows of a tensor that is made micro-block by micro-block. A block that is all of a rank's rows is taken as it is; those of
/// several are written in place, so that no row exists twice for longer than its block.
struct BlockRows {
    blocks: usize,
    /// Of all blocks.
    rows: i64,
    whole: Option<Tensor>,
}

impl BlockRows {
    /// `x_tw` are this rank's rows in `blocks`.
    fn new(blocks: &[MicroBlock], x_tw: &Tensor) -> BlockRows {
        BlockRows { blocks: blocks.len(), rows: x_tw.size()[0], whole: None }
    }

    /// The rows of one block.
    fn put(&mut self, micro: &MicroBlock, part: &Tensor) {
        if self.blocks == 1 {
            self.whole = Some(part.contiguous());
            return;
        }
        let whole = self.whole.get_or_insert_with(|| {
            let shape: Vec<i64> = std::iter::once(self.rows).chain(part.size().into_iter().skip(1)).collect();
            Tensor::empty(shape, (part.kind(), part.device()))
        });
        micro.rows_of(whole).copy_(part);
    }

    fn end(self) -> Tensor {
        self.whole.expect("there is a block, with or without rows")
    }
}

/// Rows of one micro-block in the backward of segment B.
#[derive(Clone, Copy)]
struct BackwardRows<'a> {
    micro: &'a MicroBlock,
    rows: &'a SpanRows<'a>,
    /// Experts of all of this rank's rows, where the layer has them.
    kept: Option<&'a Tensor>,
}

/// Segment B of several micro-blocks, one after another, without a graph; keeps what experts they chose.
struct Finishing<'a> {
    pass: &'a Pass<'a>,
    layer: LayerIndex,
    /// Experts that an earlier pass has chosen for this rank's rows.
    kept: Option<&'a Tensor>,
    chosen: Vec<Tensor>,
}

impl<'a> Finishing<'a> {
    fn new(pass: &'a Pass, layer: LayerIndex, kept: Option<&'a Tensor>) -> Self {
        Finishing { pass, layer, kept, chosen: Vec::new() }
    }

    /// Writes the micro-block's output to its rows of `y_tw`, [t, w] like `x_tw`. `out` and `handed` are the block's rows.
    fn rows(&mut self, micro: &MicroBlock, x_tw: &Tensor, out: &Tensor, handed: &Planes, y_tw: &Tensor) {
        micro.rows_of(y_tw).copy_(&self.block(micro, x_tw, out, handed));
    }

    /// The micro-block's output. `out` and `handed` are the block's rows.
    fn block(&mut self, micro: &MicroBlock, x_tw: &Tensor, out: &Tensor, handed: &Planes) -> Tensor {
        let Pass { decoder, adapters, cp_group, .. } = *self.pass;
        let kept = self.kept.map(|kept| micro.rows_of(kept));
        let rows = FinishRows { x_tw: &micro.rows_of(x_tw), mixed: out, handed, kept: kept.as_ref() };
        let finished = decoder.finish(self.layer, &rows, adapters, Values::All);
        let mut y_tw = finished.y_tw;
        if let (Some(routed), Some(experts)) = (finished.routed, decoder.experts(self.layer)) {
            let _ = y_tw.g_add_(&experts.forward(cp_group.ep, &routed, adapters));
            self.chosen.push(routed.expert_tk);
        }
        y_tw
    }

    /// The experts of all rows, [t, k], where the layer has them and they were chosen here.
    fn end(self) -> Option<Tensor> {
        (self.kept.is_none() && !self.chosen.is_empty()).then(|| join_rows(self.chosen))
    }
}
