//! Capture: the shared prompt runs once, layer by layer, without a graph. What stays is the state of the pages that this
//! rank owns, the block inputs of its tail rows, and the last hidden state of row P−1.

use tch::Tensor;

use crate::failure::Failure;
use crate::handoff::{Captured, Keeping, MixedPool, Work};
use crate::layout::{Piece, Run};
use crate::model::pass::{Pass, micro_blocks};
use crate::pages::{HiddenPool, PagePool, Slab, Slot};
use crate::units::{LayerIndex, Tokens};
use crate::watch::Board;

/// Runs the prompt of `work` under the pass's adapters.
///
/// # Errors
/// When page storage is not exactly pages × page bytes.
pub fn run(pass: &Pass, work: &Work, keeping: Keeping, board: &Board) -> Result<Captured, Failure> {
    tch::no_grad(|| capture(pass, work, keeping, board))
}

fn capture(pass: &Pass, work: &Work, keeping: Keeping, board: &Board) -> Result<Captured, Failure> {
    let (layout, rank) = (&work.layout, pass.seat.axis.rank());
    let span = layout.span();
    let blocks = micro_blocks(&span, &pass.seat, pass.micro_block);
    let ids: Vec<i64> = span
        .of(rank)
        .flat_map(|piece| work.prompt_ids[piece.start.index()..piece.stop.index()].iter().copied())
        .collect();
    // A short tail goes to the pages on its way back, so it is another sum there; its inputs are few, so all are kept.
    let keeping =
        if pass.travels(&layout.tail()) { keeping } else { Keeping { every: 1, attention: false, ..keeping } };
    let ledger = pass.seat.ledger;
    let stamp = pass.adapters.stamp().clone();
    let mut pages = PagePool::new(layout.clone(), rank, keeping.pages, stamp, ledger.clone());
    let mut tail = HiddenPool::new(keeping.tail, ledger.clone());
    let mut mixed = MixedPool::new(keeping.tail, ledger.clone());
    let tail_rows: Tokens = layout.tail().of(rank).map(Piece::rows).sum();
    let mut x_pw = pass.decoder.embed(&ids);
    let rows = x_pw.size()[0];
    for layer in (0..pass.decoder.layers()).map(LayerIndex) {
        board.layer(layer);
        if tail_rows.0 > 0 && layer.0.is_multiple_of(keeping.every) {
            tail.put(Slot { span: 0, layer }, &x_pw.narrow(0, rows - tail_rows.dim(), tail_rows.dim()));
        }
        let (next, slabs) = one_layer(pass, work, layer, &blocks, &x_pw, keeping.attention.then_some(&mut mixed));
        pages.push(slabs);
        x_pw = next;
    }
    pages.audit(&pass.decoder.mixer(LayerIndex(0)).planes())?;
    let last_row = (layout.last_row_owner() == rank).then(|| x_pw.narrow(0, rows - 1, 1).copy());
    Ok(Captured { pages, keeping, tail, mixed, last_row })
}

/// One block over this rank's prompt rows: the next hidden states, and the layer's slabs.
fn one_layer(
    pass: &Pass,
    work: &Work,
    layer: LayerIndex,
    blocks: &[(Piece, i64)],
    x_pw: &Tensor,
    keep_mixed: Option<&mut MixedPool>,
) -> (Tensor, Vec<Slab>) {
    let (layout, rank) = (&work.layout, pass.seat.axis.rank());
    let mixer = pass.decoder.mixer(layer);
    let planes = mixer.planes();
    let slabs = layout.chunks_of(rank).map(|run| Slab::zeros(run, layout.page_size(), &planes, pass.decoder.device()));
    let rows = |block: &Piece, first: i64| x_pw.narrow(0, first, block.rows().dim());
    let mut asks = Vec::new();
    let mut keeps = Vec::new();
    for (block, first) in blocks {
        let projected = pass.project(layer, block, &rows(block, *first));
        let (ask, state) = mixer.split(projected.mix);
        if block.rows().0 > 0 {
            let slab = slabs.iter().find(|slab| holds(&slab.run, block)).expect("a rank's rows lie in its own chunks");
            for (plane, part) in slab.planes.iter().zip(&state) {
                plane.narrow(0, block.start.since(slab.run.start).dim(), block.rows().dim()).copy_(part);
            }
        }
        asks.push((*block, ask));
        keeps.push(projected.keep);
    }
    let own = [slabs[0].filled(), slabs[1].filled()];
    let mixed = mixer.capture(&pass.seat, layout, &asks, own);
    drop(asks);
    if let Some(pool) = keep_mixed {
        let in_tail = |(block, _): &&(Piece, i64)| block.rows().0 > 0 && block.start >= layout.cut();
        let tail = blocks.iter().zip(&mixed).filter(|(block, _)| in_tail(block));
        for (index, (_, mixed)) in tail.enumerate() {
            pool.put(layer, index, &mixed.out, &mixed.saved);
        }
    }
    let ys: Vec<Tensor> = blocks
        .iter()
        .zip(&mixed)
        .zip(&keeps)
        .map(|(((block, first), mixed), keep)| {
            pass.decoder.finish(layer, &rows(block, *first), &mixed.out, keep, pass.adapters)
        })
        .collect();
    (Tensor::cat(&ys, 0), slabs.into())
}

fn holds(run: &Run, block: &Piece) -> bool {
    run.start <= block.start && block.stop <= run.stop
}
