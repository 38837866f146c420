//! Capture: the shared prompt runs once, layer by layer, without a graph. What stays is the state of the pages that this
//! rank owns, the block inputs of its tail rows, and the last hidden state of row P−1.

use tch::{Device, Tensor};

use crate::model::mixer::{BlockQueries, Mixed};
use crate::model::pass::{MixerBlock, Pass};
use crate::model::past::ChunkState;
use crate::model::planes::Planes;
use crate::prompt::handoff::{Captured, Keeping, MixedPool, PlacedGroup};
use crate::prompt::layout::{Piece, Run, Span};
use crate::prompt::pages::{HiddenPool, PagePool, Residency, Slab, Slot};
use crate::runtime::failure::Failure;
use crate::runtime::liveness::Tracker;
use crate::runtime::memory::{Held, MemorySpace, Purpose};
use crate::runtime::units::{Bytes, LayerIndex, Tokens, from_dim, from_index};
use crate::tensor::boundary::storage_bytes;
use crate::tensor::{accumulation, element_bytes, gpu};
use crate::world::exchange::is_direct;

/// Runs the prompt of `work` under the pass's adapters.
///
/// # Errors
/// When page storage is not exactly pages × page bytes, or there is no more host memory.
pub fn run(pass: &Pass, work: &PlacedGroup, keeping: Keeping, tracker: &Tracker) -> Result<Captured, Failure> {
    tch::no_grad(|| capture(pass, work, keeping, tracker))
}

/// Pins the host memory that a step on `work` will take, so that no phase waits for it. Nothing on a CPU.
///
/// # Errors
/// When the machine gives no more memory that can be pinned.
pub fn make_room(pass: &Pass, work: &PlacedGroup, keeping: Keeping) -> Result<(), Failure> {
    if pass.decoder.device() == Device::Cpu {
        return Ok(());
    }
    let (layout, rank, layers) = (&work.layout, pass.cp_group.axis.rank(), from_index(pass.decoder.layers()));
    let (model, acc) = (element_bytes(pass.decoder.kind()), element_bytes(accumulation(pass.decoder.kind())));
    let width = from_dim(pass.decoder.width()) * model;
    let mut blocks = Vec::new();
    let mut add = |count: u64, bytes: u64| blocks.extend((0..count).map(|_| Bytes(bytes)));
    let planes = pass.decoder.mixer(LayerIndex(0)).planes();
    if keeping.pages == Residency::Host {
        for plane in &planes {
            for run in layout.chunks_of(rank) {
                add(layers, run.pages.0 * layout.page_size().0 * plane.bytes().0);
            }
        }
    }
    let tail = layout.tail();
    let rows = |span: &Span| span.of(rank).map(Piece::rows).sum::<Tokens>().0;
    if keeping.tail == Residency::Host {
        add(keeping.layer_inputs(layers, pass.travels(&tail)), rows(&tail) * width);
        if keeping.attention && pass.travels(&tail) {
            let row = pass.decoder.mixer(LayerIndex(0)).mixed_row();
            for block in pass.mixer_blocks(&tail) {
                add(layers, block.piece.rows().0 * row.out * model);
                add(layers, block.piece.rows().0 * row.saved * acc);
            }
        }
    }
    if pass.cp_group.axis.size() > 1 && !is_direct(pass.cp_group.axis, pass.decoder.device()) {
        // Runs that leave and arrive, and with a long tail the sums that travel with them.
        for (plane, run) in planes.iter().flat_map(|plane| layout.chunks_of(rank).map(move |run| (plane, run))) {
            let sums = if pass.travels(&tail) { plane.bytes().0 / element_bytes(plane.kind) * acc } else { 0 };
            add(3, run.rows().0 * plane.bytes().0);
            add(3, run.rows().0 * sums);
        }
    }
    for answer in &work.answers {
        add(layers, rows(&answer.span) * width);
    }
    let pinned = gpu::reserve_pinned(&blocks)?;
    tracing::debug!("{pinned} of host memory are pinned");
    Ok(())
}

fn capture(pass: &Pass, work: &PlacedGroup, keeping: Keeping, tracker: &Tracker) -> Result<Captured, Failure> {
    let (layout, rank) = (&work.layout, pass.cp_group.axis.rank());
    let span = layout.span();
    let blocks = pass.mixer_blocks(&span);
    let ids: Vec<i64> = span
        .of(rank)
        .flat_map(|piece| work.prompt_ids[piece.start.index()..piece.stop.index()].iter().copied())
        .collect();
    // A short tail goes to the pages on its way back, so it is another sum there; its inputs are few, so all are kept.
    let keeping =
        if pass.travels(&layout.tail()) { keeping } else { Keeping { every: 1, attention: false, ..keeping } };
    let ledger = pass.cp_group.ledger;
    let stamp = pass.adapters.stamp().clone();
    let mut pages = PagePool::new(layout.clone(), rank, keeping.pages, stamp, ledger.clone());
    let mut tail = HiddenPool::new(keeping.tail, Purpose::Checkpoints, ledger.clone());
    let mut mixed = MixedPool::new(keeping.tail, ledger.clone());
    let tail_rows: Tokens = layout.tail().of(rank).map(Piece::rows).sum();
    let mut x_pw = pass.decoder.embed(&ids);
    let mut held = prompt_rows(pass, &x_pw);
    let rows = x_pw.size()[0];
    for layer in (0..pass.decoder.layers()).map(LayerIndex) {
        tracker.layer(layer)?;
        // What the layer before has left behind has had a layer's time to leave.
        tail.settle()?;
        mixed.settle()?;
        if tail_rows.0 > 0 && layer.0.is_multiple_of(keeping.every) {
            tail.put(Slot { span: 0, layer }, &x_pw.narrow(0, rows - tail_rows.dim(), tail_rows.dim()))?;
        }
        let (next, slabs) = one_layer(pass, work, layer, &blocks, &x_pw, keeping.attention.then_some(&mut mixed))?;
        pages.push(slabs)?;
        (x_pw, held) = next;
    }
    tail.settle()?;
    mixed.settle()?;
    pages.settle()?;
    pages.audit(&pass.decoder.mixer(LayerIndex(0)).planes())?;
    let last_row = (layout.last_row_owner() == rank).then(|| x_pw.narrow(0, rows - 1, 1).copy());
    drop(held);
    Ok(Captured { pages, keeping, tail, mixed, last_row })
}

/// Counts hidden states of prompt rows on the device.
fn prompt_rows(pass: &Pass, x_pw: &Tensor) -> Held {
    pass.cp_group.ledger.hold(Purpose::Hidden, MemorySpace::Device, storage_bytes(x_pw))
}

/// One block over this rank's prompt rows: the next hidden states, and the layer's slabs.
fn one_layer(
    pass: &Pass,
    work: &PlacedGroup,
    layer: LayerIndex,
    blocks: &[MixerBlock],
    x_pw: &Tensor,
    keep_mixed: Option<&mut MixedPool>,
) -> Result<((Tensor, Held), Vec<Slab>), Failure> {
    let (layout, rank) = (&work.layout, pass.cp_group.axis.rank());
    let mixer = pass.decoder.mixer(layer);
    let planes = mixer.planes();
    let slabs = layout.chunks_of(rank).map(|run| Slab::zeros(run, layout.page_size(), &planes, pass.decoder.device()));
    let slab_bytes = slabs.iter().flat_map(|slab| &slab.planes).map(storage_bytes).sum();
    let _slabs_held = pass.cp_group.ledger.hold(Purpose::Stage, MemorySpace::Device, slab_bytes);
    let mut queries = Vec::with_capacity(blocks.len());
    let mut handed = Vec::new();
    for block in blocks {
        let mut parts = Vec::with_capacity(block.micro_blocks.len());
        for micro in &block.micro_blocks {
            let projected = pass.project(layer, micro, x_pw);
            let piece = &micro.piece;
            if piece.rows().0 > 0 {
                let slab = slabs.iter().find(|slab| holds(&slab.run, piece));
                let slab = slab.expect("a rank's rows lie in its own chunks");
                for (plane, part) in slab.planes.iter().zip(projected.input.state.tensors()) {
                    plane.narrow(0, piece.start.since(slab.run.start).dim(), piece.rows().dim()).copy_(part);
                }
            }
            parts.push(projected.input.queries);
            handed.push(projected.handed);
        }
        queries.push(BlockQueries { piece: block.piece, queries: Planes::join(parts) });
    }
    let mixed = mixer.capture(&pass.cp_group, layout, &queries, ChunkState::filled(&slabs));
    drop(queries);
    if let Some(pool) = keep_mixed {
        let in_tail = |(piece, _): &(Piece, &Mixed)| piece.rows().0 > 0 && piece.start >= layout.cut();
        let tail = blocks.iter().map(|block| block.piece).zip(&mixed).filter(in_tail);
        for (index, (_, mixed)) in tail.enumerate() {
            pool.put(layer, index, &mixed.out, mixed.saved.tensors())?;
        }
    }
    let y_pw = x_pw.empty_like();
    let y_held = prompt_rows(pass, &y_pw);
    let mut handed = handed.iter();
    for (block, mixed) in blocks.iter().zip(&mixed) {
        for (micro, handed) in block.micro_blocks.iter().zip(handed.by_ref()) {
            let out = block.rows_of(&mixed.out, micro);
            let y = pass.decoder.finish(layer, &micro.rows_of(x_pw), &out, handed, pass.adapters);
            micro.rows_of(&y_pw).copy_(&y);
        }
    }
    Ok(((y_pw, y_held), slabs.into()))
}

fn holds(run: &Run, block: &Piece) -> bool {
    run.start <= block.start && block.stop <= run.stop
}
