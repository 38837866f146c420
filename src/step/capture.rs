//! Capture: the shared prompt runs once, layer by layer, without a graph. What stays is the state of the pages that this
//! rank owns, the block inputs of its tail rows, and the last hidden state of row P−1.

use std::rc::Rc;

use tch::{Device, Tensor};

use crate::model::latent::IndexSet;
use crate::model::mixer::Mixed;
use crate::model::pass::{Forward, Pass, PromptOutput, PromptRows};
use crate::model::past::Past;
use crate::prompt::handoff::{Captured, Keeping, MixedPool, PlacedGroup};
use crate::prompt::layout::{Piece, Span};
use crate::prompt::pages::{BORDERS, Choice, ChoicePool, HiddenPool, LayerState, PagePool, Residency, Slot};
use crate::runtime::failure::Failure;
use crate::runtime::liveness::Tracker;
use crate::runtime::memory::{MemorySpace, Purpose};
use crate::runtime::units::{Bytes, LayerIndex, Tokens, from_dim, from_index};
use crate::tensor::boundary::storage_bytes;
use crate::tensor::{self, accumulation, element_bytes, gpu};
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
    let state_of = |layer| pass.decoder.mixer(LayerIndex(layer)).state_rows();
    let states: Vec<_> = (0..pass.decoder.layers()).map(state_of).collect();
    let tail = layout.tail();
    let rows = |span: &Span| span.of(rank).map(Piece::rows).sum::<Tokens>().0;
    let mut blocks = Vec::new();
    let mut add = |count: u64, bytes: u64| blocks.extend((0..count).map(|_| Bytes(bytes)));
    if keeping.pages == Residency::Host {
        for plane in states.iter().flat_map(|state| &state.page) {
            for run in layout.chunks_of(rank) {
                add(1, run.pages.0 * layout.page_size().0 * plane.bytes().0);
            }
        }
        for plane in states.iter().flat_map(|state| &state.border) {
            add(1, BORDERS * plane.bytes().0);
        }
    }
    if keeping.tail == Residency::Host {
        add(keeping.layer_inputs(layers, pass.travels(&tail)), rows(&tail) * row);
        if keeping.attention && pass.travels(&tail) {
            for layer in (0..pass.decoder.layers()).map(LayerIndex) {
                let mixed_row = pass.decoder.mixer(layer).mixed_row();
                for piece in pass.kept_pieces(layer, &tail, layout) {
                    add(1, piece.rows().0 * mixed_row.out * element);
                    add(1, piece.rows().0 * mixed_row.saved * acc_element);
                }
            }
        }
    }
    if pass.cp_group.axis.size() > 1 && !is_direct(pass.cp_group.axis, pass.decoder.device()) {
        // Runs that leave and arrive, and with a long tail the sums that travel with them.
        let travelling = states.iter().map(|state| &state.page).find(|planes| !planes.is_empty());
        let planes = travelling.into_iter().flatten();
        for (plane, run) in planes.flat_map(|plane| layout.chunks_of(rank).map(move |run| (plane, run))) {
            let sums = if pass.travels(&tail) { plane.bytes().0 / element_bytes(plane.kind) * acc_element } else { 0 };
            add(3, run.rows().0 * plane.bytes().0);
            add(3, run.rows().0 * sums);
        }
    }
    for pack in pass.packs(group) {
        add(layers, rows(&pack.span) * row);
        // Mixer outputs of the layers below the top one, from the way up to the way down.
        let below = (0..pass.decoder.layers() - 1).map(LayerIndex);
        for layer in below.filter(|&layer| keeping.answer_attention && pass.keeps_mixed(layer)) {
            let mixed_row = pass.decoder.mixer(layer).mixed_row();
            add(1, rows(&pack.span) * mixed_row.out * element);
            add(1, rows(&pack.span) * mixed_row.saved * acc_element);
        }
    }
    let pinned = gpu::reserve_pinned(&blocks)?;
    tracing::debug!("{pinned} of host memory are pinned");
    Ok(())
}

/// Runs the tail's rows of a reused prompt again, under the pass's adapters, behind the pages of earlier ones: what carries
/// gradient belongs to the present adapters, and only constants are older. Their state goes to the pages. The mixers must be
/// attention over keys and values, and the tail no longer than a micro-block.
///
/// # Errors
/// When the pages are lent to other adapters than the pass's, or there is no more host memory.
pub fn renew_tail(pass: &Pass, group: &PlacedGroup, captured: &mut Captured, tracker: &Tracker) -> Result<(), Failure> {
    let layout = &group.layout;
    let (span, rank, ledger) = (layout.tail(), pass.cp_group.axis.rank(), pass.cp_group.ledger);
    if span.is_empty() {
        return Ok(());
    }
    let pieces: Vec<&Piece> = span.of(rank).collect();
    let prompt_ids = |piece: &&Piece| group.prompt_ids[piece.start.index()..piece.stop.index()].iter().copied();
    captured.tail_choices = ChoicePool::new(captured.keeping.tail, ledger);
    captured.tail = HiddenPool::new(captured.keeping.tail, Purpose::Checkpoints, ledger.clone());
    let mut x_tw = pass.decoder.embed(&pieces.iter().flat_map(prompt_ids).collect::<Vec<i64>>());
    let has_rows = x_tw.size()[0] > 0;
    for layer in (0..pass.decoder.layers()).map(LayerIndex) {
        tracker.layer(layer)?;
        captured.tail.settle()?;
        captured.tail_choices.settle()?;
        if has_rows {
            captured.tail.put(Slot { span: 0, layer }, &x_tw)?;
        }
        // The next layer is not prefetched: its rows of the tail are written before it is read.
        let staged = captured.pages.stage(layer, None, pass.adapters.stamp())?;
        let past = Past::of_tail(&staged, layout);
        let applied = pass.applied(layer);
        let pass = Pass { adapters: applied.as_ref().unwrap_or(pass.adapters), ..*pass };
        let Forward { y_tw, state, .. } =
            pass.forward_whole(layer, &span, &x_tw, &past, captured.tail_choices.of(0))?;
        drop((past, staged));
        let mut first = 0;
        for piece in &pieces {
            let rows = piece.rows().dim();
            let planes: Vec<Tensor> = state.tensors().iter().map(|plane| plane.narrow(0, first, rows)).collect();
            captured.pages.write(layer, piece.start, &planes);
            first += rows;
        }
        x_tw = y_tw;
    }
    captured.tail.settle()?;
    captured.tail_choices.settle()?;
    captured.last_row = (layout.last_row_owner() == rank).then(|| x_tw.narrow(0, x_tw.size()[0] - 1, 1).copy());
    Ok(())
}

fn capture(pass: &Pass, group: &PlacedGroup, keeping: Keeping, tracker: &Tracker) -> Result<Captured, Failure> {
    let layout = &group.layout;
    let rank = pass.cp_group.axis.rank();
    let ids: Vec<i64> = (layout.span().of(rank))
        .flat_map(|piece| group.prompt_ids[piece.start.index()..piece.stop.index()].iter().copied())
        .collect();
    // A short tail goes to the pages on its way back, so it is another sum there; its inputs are few, so all are kept.
    let keeping = if pass.travels(&layout.tail()) {
        keeping
    } else {
        Keeping { every: 1, attention: false, index_sets: true, ..keeping }
    };
    let ledger = pass.cp_group.ledger;
    let stamp = pass.adapters.stamp().clone();
    let mut pages = PagePool::new(layout.clone(), rank, keeping.pages, stamp, ledger.clone());
    let mut tail = TailKept::new(pass, layout.tail(), keeping);
    let mut x_pw = pass.decoder.embed(&ids);
    let mut held = ledger.hold(Purpose::Hidden, MemorySpace::Device, storage_bytes(&x_pw));
    let mut index: Option<IndexSet> = None;
    for layer in (0..pass.decoder.layers()).map(LayerIndex) {
        tracker.layer(layer)?;
        // What the layer before has sent to host memory has had a layer's time to leave.
        tail.settle()?;
        tail.input(layer, &x_pw)?;
        let state_rows = pass.decoder.mixer(layer).state_rows();
        let state = LayerState::zeros(&state_rows, layout, rank, pass.decoder.device());
        let state_held = ledger.hold(Purpose::Stage, MemorySpace::Device, state.bytes());
        let settle = || pages.settle();
        let rows =
            PromptRows { layout, x_pw: &x_pw, slabs: &state.slabs, borders: &state.borders, ledger, settle: &settle };
        let lent = index.as_ref().map(IndexSet::lend);
        let mut block = 0;
        let applied = pass.applied(layer);
        let pass = Pass { adapters: applied.as_ref().unwrap_or(pass.adapters), ..*pass };
        let done = pass.prompt(layer, &rows, lent, &mut |piece, mixed| tail.mixed(layer, &mut block, piece, mixed))?;
        drop(state_held);
        tail.choices(layer, &done)?;
        pages.push(state)?;
        index = done.index.or(index);
        x_pw = done.y_pw;
        held = done.held;
    }
    tail.settle()?;
    pages.settle()?;
    pages.audit(|layer| pass.decoder.mixer(layer).state_rows())?;
    let rows = x_pw.size()[0];
    let last_row = (layout.last_row_owner() == rank).then(|| x_pw.narrow(0, rows - 1, 1).copy());
    drop(held);
    let TailKept { inputs, mixed, choices, .. } = tail;
    Ok(Captured {
        pages,
        keeping,
        tail: inputs,
        mixed,
        tail_choices: choices,
        choices: Rc::new(ChoicePool::new(Residency::Host, ledger)),
        from_sampling: false,
        drawn: None,
        last_row,
    })
}

/// What capture keeps of this rank's tail rows, the last of its rows.
struct TailKept {
    keeping: Keeping,
    tail: Span,
    /// Rows of the tail on this rank.
    rows: i64,
    inputs: HiddenPool,
    mixed: MixedPool,
    choices: ChoicePool,
}

impl TailKept {
    fn new(pass: &Pass, tail: Span, keeping: Keeping) -> TailKept {
        let ledger = pass.cp_group.ledger;
        TailKept {
            rows: tail.of(pass.cp_group.axis.rank()).map(Piece::rows).sum::<Tokens>().dim(),
            inputs: HiddenPool::new(keeping.tail, Purpose::Checkpoints, ledger.clone()),
            mixed: MixedPool::new(keeping.tail, ledger.clone()),
            choices: ChoicePool::new(keeping.tail, ledger),
            keeping,
            tail,
        }
    }

    fn settle(&mut self) -> Result<(), tensor::Error> {
        self.inputs.settle()?;
        self.mixed.settle()?;
        self.choices.settle()
    }

    /// The tail's rows among all of this rank's; a view.
    fn of(&self, x: &Tensor) -> Tensor {
        x.narrow(0, x.size()[0] - self.rows, self.rows)
    }

    fn input(&mut self, layer: LayerIndex, x_pw: &Tensor) -> Result<(), tensor::Error> {
        if self.rows == 0 || !layer.0.is_multiple_of(self.keeping.every) {
            return Ok(());
        }
        let rows = self.of(x_pw);
        self.inputs.put(Slot { span: 0, layer }, &rows)
    }

    /// Keeps the mixer's output of a block, if it lies in the tail and outputs are kept; `block` counts them.
    fn mixed(
        &mut self,
        layer: LayerIndex,
        block: &mut usize,
        piece: &Piece,
        mixed: &Mixed,
    ) -> Result<(), tensor::Error> {
        let first = self.tail.gathered().map(|tail| tail.start).min();
        let in_tail = piece.rows().0 > 0 && first.is_some_and(|first| piece.start >= first);
        if !self.keeping.attention || !in_tail {
            return Ok(());
        }
        self.mixed.put(layer, *block, &mixed.out, mixed.saved.tensors())?;
        *block += 1;
        Ok(())
    }

    /// Keeps what was chosen for the tail's rows. Every rank does, with or without rows.
    fn choices(&self, layer: LayerIndex, done: &PromptOutput) -> Result<(), tensor::Error> {
        if self.tail.is_empty() {
            return Ok(());
        }
        let span = self.choices.of(0);
        if let Some(experts) = &done.experts {
            span.put(Choice::Experts, layer, &self.of(experts))?;
        }
        if let Some(index) = done.index.as_ref().filter(|_| self.keeping.index_sets) {
            span.put(Choice::Index, layer, &self.of(index.lend().positions()))?;
        }
        Ok(())
    }
}
