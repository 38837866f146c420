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

/// Runs the prompt of `group` under the pass's adapters.
///
/// # Errors
/// When page storage is not exactly pages × page bytes, or there is no more host memory.
pub fn run(pass: &Pass, group: &PlacedGroup, keeping: Keeping, tracker: &Tracker) -> Result<Captured, Failure> {
    tch::no_grad(|| capture(pass, group, keeping, tracker))
}

/// Pins the host memory that a transaction on `group` takes, so that no phase waits for it. Does nothing on a CPU.
///
/// # Errors
/// When the machine gives no more memory that can be pinned.
pub fn make_room(pass: &Pass, group: &PlacedGroup, keeping: Keeping) -> Result<(), Failure> {
    if pass.decoder.device() == Device::Cpu {
        return Ok(());
    }
    let layout = &group.layout;
    let rank = pass.cp_group.axis.rank();
    let layers = from_index(pass.decoder.layers());
    let element = element_bytes(pass.decoder.kind());
    let acc_element = element_bytes(accumulation(pass.decoder.kind()));
    let row = from_dim(pass.decoder.width()) * element;
    let mixer = pass.decoder.mixer(LayerIndex(0));
    let planes = mixer.planes();
    let tail = layout.tail();
    let rows = |span: &Span| span.of(rank).map(Piece::rows).sum::<Tokens>().0;
    let mut blocks = Vec::new();
    let mut add = |count: u64, bytes: u64| blocks.extend((0..count).map(|_| Bytes(bytes)));
    if keeping.pages == Residency::Host {
        for plane in &planes {
            for run in layout.chunks_of(rank) {
                add(layers, run.pages.0 * layout.page_size().0 * plane.bytes().0);
            }
        }
    }
    if keeping.tail == Residency::Host {
        add(keeping.layer_inputs(layers, pass.travels(&tail)), rows(&tail) * row);
        if keeping.attention && pass.travels(&tail) {
            let mixed_row = mixer.mixed_row();
            for block in pass.mixer_blocks(&tail) {
                add(layers, block.piece.rows().0 * mixed_row.out * element);
                add(layers, block.piece.rows().0 * mixed_row.saved * acc_element);
            }
        }
    }
    if pass.cp_group.axis.size() > 1 && !is_direct(pass.cp_group.axis, pass.decoder.device()) {
        // Runs that leave and arrive, and with a long tail the sums that travel with them.
        for (plane, run) in planes.iter().flat_map(|plane| layout.chunks_of(rank).map(move |run| (plane, run))) {
            let sums = if pass.travels(&tail) { plane.bytes().0 / element_bytes(plane.kind) * acc_element } else { 0 };
            add(3, run.rows().0 * plane.bytes().0);
            add(3, run.rows().0 * sums);
        }
    }
    for answer in &group.answers {
        add(layers, rows(&answer.span) * row);
    }
    let pinned = gpu::reserve_pinned(&blocks)?;
    tracing::debug!("{pinned} of host memory are pinned");
    Ok(())
}

fn capture(pass: &Pass, group: &PlacedGroup, keeping: Keeping, tracker: &Tracker) -> Result<Captured, Failure> {
    let layout = &group.layout;
    let rank = pass.cp_group.axis.rank();
    let span = layout.span();
    let blocks = pass.mixer_blocks(&span);
    let ids: Vec<i64> = span
        .of(rank)
        .flat_map(|piece| group.prompt_ids[piece.start.index()..piece.stop.index()].iter().copied())
        .collect();
    // A short tail goes to the pages on its way back, so it is another sum there; its inputs are few, so all are kept.
    let keeping =
        if pass.travels(&layout.tail()) { keeping } else { Keeping { every: 1, attention: false, ..keeping } };
    let ledger = pass.cp_group.ledger;
    let stamp = pass.adapters.stamp().clone();
    let mut pages = PagePool::new(layout.clone(), rank, keeping.pages, stamp, ledger.clone());
    let mut tail = HiddenPool::new(keeping.tail, Purpose::Checkpoints, ledger.clone());
    let mut mixed = MixedPool::new(keeping.tail, ledger.clone());
    let tail_rows = layout.tail().of(rank).map(Piece::rows).sum::<Tokens>().dim();
    let mut x_pw = pass.decoder.embed(&ids);
    let mut held = hold_rows(pass, &x_pw);
    let rows = x_pw.size()[0];
    for layer in (0..pass.decoder.layers()).map(LayerIndex) {
        tracker.layer(layer)?;
        // What the layer before has sent to host memory has had a layer's time to leave.
        tail.settle()?;
        mixed.settle()?;
        if tail_rows > 0 && layer.0.is_multiple_of(keeping.every) {
            tail.put(Slot { span: 0, layer }, &x_pw.narrow(0, rows - tail_rows, tail_rows))?;
        }
        let keep_mixed = keeping.attention.then_some(&mut mixed);
        let done = one_layer(pass, group, layer, &blocks, &x_pw, keep_mixed)?;
        pages.push(done.slabs)?;
        x_pw = done.y_pw;
        held = done.held;
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
fn hold_rows(pass: &Pass, x_pw: &Tensor) -> Held {
    pass.cp_group.ledger.hold(Purpose::Hidden, MemorySpace::Device, storage_bytes(x_pw))
}

/// What one block makes of this rank's prompt rows.
struct LayerOutput {
    y_pw: Tensor,
    held: Held,
    slabs: Vec<Slab>,
}

/// One block over this rank's prompt rows. Rows stay; state travels round the ring inside the mixer.
fn one_layer(
    pass: &Pass,
    group: &PlacedGroup,
    layer: LayerIndex,
    blocks: &[MixerBlock],
    x_pw: &Tensor,
    keep_mixed: Option<&mut MixedPool>,
) -> Result<LayerOutput, Failure> {
    let layout = &group.layout;
    let rank = pass.cp_group.axis.rank();
    let mixer = pass.decoder.mixer(layer);
    let planes = mixer.planes();
    let slabs = layout.chunks_of(rank).map(|run| Slab::zeros(run, layout.page_size(), &planes, pass.decoder.device()));
    let slab_bytes = slabs.iter().flat_map(|slab| &slab.planes).map(storage_bytes).sum();
    let _slabs_held = pass.cp_group.ledger.hold(Purpose::Stage, MemorySpace::Device, slab_bytes);
    // 1. Segment A: state goes to the slabs, queries and what segment B reads are kept.
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
    // 2. Attention over the pages of all ranks.
    let mixed = mixer.capture(&pass.cp_group, layout, &queries, ChunkState::filled(&slabs));
    drop(queries);
    if let Some(pool) = keep_mixed {
        let in_tail = |(piece, _): &(Piece, &Mixed)| piece.rows().0 > 0 && piece.start >= layout.cut();
        let tail = blocks.iter().map(|block| block.piece).zip(&mixed).filter(in_tail);
        for (index, (_, mixed)) in tail.enumerate() {
            pool.put(layer, index, &mixed.out, mixed.saved.tensors())?;
        }
    }
    // 3. Segment B.
    let y_pw = x_pw.empty_like();
    let held = hold_rows(pass, &y_pw);
    pass.finish_blocks(layer, blocks, x_pw, &mixed, &handed, &y_pw);
    Ok(LayerOutput { y_pw, held, slabs: slabs.into() })
}

fn holds(run: &Run, block: &Piece) -> bool {
    run.start <= block.start && block.stop <= run.stop
}
