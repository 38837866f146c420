//! How long tensors live, and how many bytes they take.

use longstraw::prompt::handoff::Keeping;
use longstraw::prompt::pages::{PlaneRow, Residency};
use longstraw::runtime::memory::{Ledger, Purpose};
use longstraw::runtime::units::{Bytes, LayerIndex, Rank};
use longstraw::step::capture;
use longstraw::tensor::boundary::{MemorySpace, counted, forget_peaks};
use longstraw::world::World;
use serde_json::json;
use tch::{Device, Kind};

use crate::fixture::{Group, How, Model, PLAIN, config, device, own, placed, run, step, transaction};

fn model(kind: Kind) -> Model {
    Model::random(&config("qwen3", &json!({})), kind)
}

/// A stale or shared staging buffer holds NaN, so equal bits mean that none was read.
pub(crate) fn residency(world: &mut World) {
    let model = model(Kind::Double);
    let group = Group::random(3, 61, 50, &[6, 9]);
    let keeping = |pages, tail| Keeping { pages, tail, ..Keeping::HOST };
    for tail in [1, 9, 50] {
        let gradients = [Residency::Host, Residency::Device].map(|place| {
            let how = How { keeping: keeping(place, place), tail, ..PLAIN };
            step(world, &model, &group, how, &group.batch());
            own(&model.adapters)
        });
        assert!(gradients[0].iter().zip(&gradients[1]).all(|(host, device)| host.equal(device)));
        assert!(gradients[0].iter().all(|gradient| gradient.isfinite().all().int64_value(&[]) == 1));
    }
}

/// Every k-th layer's inputs kept or all of them, attention outputs kept or not: what is computed again is the same, so
/// gradients are the same bits, and what is kept is what was asked for.
pub(crate) fn keeping(world: &mut World) {
    let model = Model::random(&config("qwen3", &json!({"num_hidden_layers": 5})), Kind::Double);
    let group = Group::random(3, 61, 50, &[6, 1, 9]);
    for tail in [1, 9, 50] {
        let all = [(1, false), (1, true), (2, false), (2, true), (3, false), (5, true), (7, false)].map(
            |(every, attention)| {
                let keeping = Keeping { every, attention, ..Keeping::HOST };
                let how = How { tail, keeping, ..PLAIN };
                step(world, &model, &group, how, &group.batch());
                own(&model.adapters)
            },
        );
        for other in &all[1..] {
            assert!(all[0].iter().zip(other).all(|(one, two)| one.equal(two)), "tail {tail}");
        }
    }
}

pub(crate) fn exact_pages(world: &mut World) {
    for kind in [Kind::Float, Kind::Double] {
        let model = model(kind);
        for (prompt, page_size) in [(50, 7), (64, 64), (1, 3)] {
            let group = Group::random(3, 61, prompt, &[3]);
            let how = How { page_size, ..PLAIN };
            let ledger = Ledger::default();
            let (transaction, work) = (transaction(world, &model, how, &ledger), placed(world, &model, &group, how));
            let captured = run(capture::run(&transaction.policy, &work, Keeping::HOST, world.tracker()));
            assert!(!captured.pages.has_graph(), "pages carry no graph");
            let rows = model.decoder.mixer(LayerIndex(0)).state_rows();
            let row_bytes = rows.page.iter().map(PlaneRow::bytes).sum::<Bytes>().0;
            let pages = work.layout.pages_of(world.cp.rank());
            let expected = Bytes(pages.0 * page_size * row_bytes * 3);
            assert_eq!(
                captured.pages.audit(|layer| model.decoder.mixer(layer).state_rows()).expect("exact"),
                expected,
                "three layers"
            );
            assert_eq!(ledger.now(Purpose::Pages), expected);
        }
    }
}

/// The same prompt on 1 rank, 2, 4, … as the world can be cut: the rank that holds most has its share of the pages, all
/// ranks together hold the prompt once, and what is alive after the capture is that and next to nothing else.
pub(crate) fn falling_pages(world: &mut World) {
    const PAGES: u64 = 67;
    /// The tail's one row in each layer, its last hidden state, and gaps between tensors.
    const BESIDE: u64 = 16 << 10;
    let model = model(Kind::Float);
    let group = Group::random(3, 61, 200, &[3]);
    let how = How { page_size: 3, ..PLAIN };
    let row_bytes = model.decoder.mixer(LayerIndex(0)).planes().iter().map(PlaneRow::bytes).sum::<Bytes>().0;
    let page_bytes = 3 * row_bytes * 3;
    let alive = || counted(MemorySpace::Device).live.0 + counted(MemorySpace::Host).live.0;
    let all = world.all.size();
    for ranks in (1..=all).filter(|ranks| all.is_multiple_of(*ranks)) {
        world.cut(ranks, 1).expect("a divisor of the world");
        let ledger = Ledger::default();
        let (transaction, work) = (transaction(world, &model, how, &ledger), placed(world, &model, &group, how));
        let before = alive();
        let captured = run(capture::run(&transaction.policy, &work, Keeping::HOST, world.tracker()));
        let kept = alive() - before;
        let held = captured.pages.audit(|layer| model.decoder.mixer(layer).state_rows()).expect("exact").0;
        let all_held = world.cp.gather_numbers(held);
        let share = PAGES.div_ceil(u64::try_from(ranks).expect("few"));
        assert_eq!(all_held.iter().max(), Some(&(share * page_bytes)), "on {ranks} ranks");
        assert_eq!(all_held.iter().sum::<u64>(), PAGES * page_bytes, "on {ranks} ranks");
        // A GPU's own allocator deals in blocks, and pinned host memory in powers of two.
        if device() == Device::Cpu {
            assert!((held..=held + BESIDE).contains(&kept), "{kept} B are alive, {held} B of them pages");
        }
    }
}

pub(crate) fn foreign_runs(world: &mut World) {
    let model = model(Kind::Double);
    let group = Group::random(3, 61, 200, &[3, 5]);
    let how = How { page_size: 3, ..PLAIN };
    let done = step(world, &model, &group, how, &group.batch());
    let _ = own(&model.adapters);
    let layout = placed(world, &model, &group, how).layout;
    let row_bytes = model.decoder.mixer(LayerIndex(0)).planes().iter().map(PlaneRow::bytes).sum::<Bytes>().0;
    let pages_of = |rank| layout.chunks_of(Rank(rank)).iter().map(|run| run.rows().0 * row_bytes).sum::<u64>();
    let largest = (0..world.cp.size()).map(pages_of).max().unwrap_or(0);
    let peak = done.ledger.peak(Purpose::Foreign);
    assert!(peak <= Bytes(2 * largest), "{peak} are foreign, a rank's pages are at most {}", Bytes(largest));
    assert!(world.cp.size() == 1 || peak > Bytes(0));
    assert!(!done.pages_have_graph);
}

pub(crate) fn flat_in_group(world: &mut World) {
    let shape = config("qwen3", &json!({"hidden_size": 64, "intermediate_size": 160}));
    let model = Model::random(&shape, Kind::Float);
    let how = How { page_size: 16, ..PLAIN };
    let measured: Vec<(u64, Bytes, Bytes)> =
        [2u64, 2, 4, 8].into_iter().map(|answers| measure(world, &model, how, answers)).collect();
    let rows = rows_of_an_answer(world, &model, how);
    for &(answers, _, pool) in &measured {
        assert_eq!(pool, Bytes(answers * rows * 64 * 3 * 4), "answers × rows × width × layers × dtype");
    }
    // The first run warms caches up. Beyond that a further answer adds its log-probabilities, and not one hidden state
    // or graph.
    for pair in measured[1..].windows(2) {
        let (fewer, more) = (pair[0], pair[1]);
        let grown = more.1.0.saturating_sub(fewer.1.0);
        assert!(grown <= (more.0 - fewer.0) * logprob_bytes(), "device bytes with 2, 4, 8 answers: {measured:?}");
    }
}

/// A micro-block holds the rows of four answers: four take more than two, at most in proportion, and more answers take
/// no more than four but for their log-probabilities.
pub(crate) fn grows_to_one_pack(world: &mut World) {
    let shape = config("qwen3", &json!({"hidden_size": 64, "intermediate_size": 160}));
    let model = Model::random(&shape, Kind::Float);
    let how = How { page_size: 16, micro_block: 256, ..PLAIN };
    // The first run warms caches up.
    let [_, two, four, eight, sixteen] = [2, 2, 4, 8, 16].map(|answers| measure(world, &model, how, answers).1.0);
    let words = format!("device bytes with 2, 4, 8, 16 answers: {:?}", [two, four, eight, sixteen]);
    let hidden = rows_of_an_answer(world, &model, how) * 64 * 4;
    assert!(four >= two + 2 * hidden, "the rows of a pack are on the device together; {words}");
    assert!(four <= 2 * two, "no more than twice the rows; {words}");
    // On a GPU the first rows of the next layer set out while the last pack of a layer is at work.
    let ahead = if device() == Device::Cpu { 0 } else { 4 * hidden };
    assert!(eight <= four + 4 * logprob_bytes() + ahead, "{words}");
    assert!(sixteen <= eight + 8 * logprob_bytes(), "{words}");
}

/// Device bytes at the peak of a step over `answers` answers of 65 tokens, and the bytes of their hidden states.
fn measure(world: &World, model: &Model, how: How, answers: u64) -> (u64, Bytes, Bytes) {
    let lengths = vec![65; usize::try_from(answers).expect("few")];
    let group = Group::random(3, 61, 100, &lengths);
    let before = counted(MemorySpace::Device).live;
    forget_peaks();
    let done = step(world, model, &group, how, &group.batch());
    let peak = Bytes(counted(MemorySpace::Device).peak.0 - before.0);
    let _ = own(&model.adapters);
    (answers, peak, done.replayed.pool_bytes)
}

/// This rank's rows of an answer of [`measure`].
fn rows_of_an_answer(world: &World, model: &Model, how: How) -> u64 {
    let group = Group::random(3, 61, 100, &[65]);
    placed(world, model, &group, how).answers[0].span.counts()[world.cp.rank().0].0
}

/// Four numbers for each token of an answer of [`measure`]: log-probabilities frozen, old, of the reference and of the
/// replay.
fn logprob_bytes() -> u64 {
    // A GPU's allocator deals in blocks of 512 bytes, and those numbers lie in eight tensors.
    if device() == Device::Cpu { 4 * 65 * 4 } else { 8 * 512 }
}
