//! The paged step against conventional autograd over whole sequences.

use longstraw::step::finalize;
use longstraw::step::optimizer::{AdamW, Settings};
use longstraw::tools::parity::distance::Distance;
use longstraw::world::World;
use longstraw::world::exchange::sum_number;
use serde_json::json;
use tch::{Kind, Tensor};

use crate::fixture::{
    Group, How, Model, PLAIN, config, conventional_step, distance, judged_step, own, reduced, run, step,
};

/// Largest relative error against autograd of the same float64 formulas: rounding only.
const LIMIT: f64 = 1e-9;

pub(crate) fn compare(world: &World, model: &Model, group: &Group, how: How, what: &str) {
    compare_with(world, model, group, how, &judged_step(world, model, group, how.tail, &group.batch()), what);
}

/// The paged step against the loss and the gradients that autograd has for the same group and tail.
fn compare_with(world: &World, model: &Model, group: &Group, how: How, judged: &(f64, Vec<Tensor>), what: &str) {
    let done = step(world, model, group, how, &group.batch());
    let paged = reduced(world, &model.adapters);
    let loss = sum_number(&world.cp, done.replayed.loss);
    let (expected, judged) = judged;
    let Distance { worst, worst_tensor, .. } = distance(&model.adapters, paged.gradients(), judged);
    assert!(worst <= LIMIT, "{what}: {worst_tensor} is {worst:.1e} off");
    assert!((loss - expected).abs() <= LIMIT, "{what}: loss {loss} for {expected}");
}

pub(crate) fn uneven(world: &mut World) {
    for (family, extra) in
        [("qwen3", json!({})), ("qwen2", json!({"hidden_size": 32})), ("llama", json!({"tie_word_embeddings": false}))]
    {
        let model = Model::random(&config(family, &extra), Kind::Double);
        for ((prompt, page_size, lengths), seed) in [
            (1, 64, &[1usize, 3][..]),
            (63, 64, &[3, 1]),
            (64, 64, &[1, 1]),
            (65, 7, &[9, 2, 1, 4, 6]),
            (130, 7, &[2]),
            (40, 1, &[5, 8]),
            (449, 7, &[4, 1]),
        ]
        .into_iter()
        .zip(5i64..)
        {
            for tail in [0, 1, 64, u64::MAX] {
                let group = Group::random(seed, 61, prompt, lengths);
                let how = How { page_size, tail, ..PLAIN };
                compare(world, &model, &group, how, &format!("{family}, prompt {prompt}, tail {tail}, {lengths:?}"));
            }
        }
    }
}

/// Every linear layer has adapters, those of experts too, over every number of ranks that can hold the experts together.
pub(crate) fn mixtures(world: &mut World) {
    let size = world.all.size();
    let extra = json!({
        "num_experts": 3 * size, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [1],
        "decoder_sparse_step": 1, "norm_topk_prob": true
    });
    let model = Model::random(&config("qwen3_moe", &extra), Kind::Double);
    for ((prompt, page_size, lengths), tail) in
        [(65, 7, &[9usize, 2, 1][..]), (33, 64, &[3, 1]), (40, 3, &[5, 8])].into_iter().zip([1, u64::MAX, 12])
    {
        let group = Group::random(5, 61, prompt, lengths);
        let how = How { page_size, tail, ..PLAIN };
        let judged = judged_step(world, &model, &group, tail, &group.batch());
        for ep in (1..=size).filter(|ep| size.is_multiple_of(*ep)) {
            run(world.cut(size, ep));
            let what = format!("experts over {ep} ranks, prompt {prompt}, tail {tail}");
            compare_with(world, &model, &group, how, &judged, &what);
        }
    }
}

/// Tokens that a tool has put into an answer take no part, wherever they stand: first, last, at ranks' edges, nearly all.
pub(crate) fn masked(world: &mut World) {
    let model = Model::random(&config("qwen3", &json!({})), Kind::Double);
    for (prompt, page_size, tail) in [(65, 7, 1), (33, 64, u64::MAX), (40, 3, 0)] {
        let mut group = Group::random(4, 61, prompt, &[9, 2, 1, 12, 7]);
        let every = |kept: fn(usize) -> bool, length: usize| Some((0..length).map(kept).collect::<Vec<bool>>());
        group.masks = vec![
            every(|at| at != 0, 9),
            every(|at| at == 0, 2),
            None,
            every(|at| at % 3 == 1, 12),
            every(|at| at == 6, 7),
        ];
        let how = How { page_size, tail, ..PLAIN };
        compare(world, &model, &group, how, &format!("masks, prompt {prompt}, tail {tail}"));
        let trained = longstraw::runtime::units::from_index(8 + 1 + 1 + 4 + 1);
        let done = step(world, &model, &group, how, &group.batch());
        let _ = own(&model.adapters);
        let counted: u64 = world.cp.gather_numbers(done.replayed.stats.tokens).iter().sum();
        assert_eq!(counted, trained, "tokens that take part, over all ranks");
    }
}

/// Windows of 1 (a query sees itself), of less than a page, of about a page, and of more than a rank's chunk.
pub(crate) fn windows(world: &mut World) {
    for window in [1, 5, 8, 33, 500] {
        let mistral = config("mistral", &json!({"sliding_window": window}));
        let qwen2 = config(
            "qwen2",
            &json!({"hidden_size": 32, "use_sliding_window": true, "sliding_window": window,
            "max_window_layers": 1}),
        );
        for shape in [mistral, qwen2] {
            let model = Model::random(&shape, Kind::Double);
            let group = Group::random(window, 61, 90, &[11, 4]);
            for (page_size, tail) in [(7, 0), (7, 1), (3, 20), (64, u64::MAX)] {
                let how = How { page_size, tail, ..PLAIN };
                let family = &shape["model_type"];
                compare(
                    world,
                    &model,
                    &group,
                    how,
                    &format!("{family}, window {window}, page {page_size}, tail {tail}"),
                );
            }
        }
    }
}

/// A tail that fits a micro-block goes to the pages, a longer one has the pages come to it: two schedules, one gradient.
pub(crate) fn both_tails(world: &mut World) {
    let model = Model::random(&config("qwen3", &json!({})), Kind::Double);
    let group = Group::random(9, 61, 77, &[6, 3]);
    for tail in [2, 33, u64::MAX] {
        let gathered = How { tail, micro_block: 4096, ..PLAIN };
        let travelling = How { tail, micro_block: 1, ..PLAIN };
        for how in [gathered, travelling] {
            compare(world, &model, &group, how, &format!("tail {tail}, micro-block {}", how.micro_block));
        }
    }
}

/// Ten updates in exact mode, against the same ten of the conventional schedule.
pub(crate) fn ten_exact_updates(world: &mut World) {
    let shape = config("qwen3", &json!({}));
    let (mut paged, mut judged) = (Model::random(&shape, Kind::Double), Model::random(&shape, Kind::Double));
    let settings = Settings { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01 };
    let mut optimizers = [AdamW::new(&paged.adapters, settings), AdamW::new(&judged.adapters, settings)];
    let how = How { tail: u64::MAX, ..PLAIN };
    for update in 0..10 {
        let group = Group::random(update, 61, 30 + usize::try_from(update).expect("small") * 7, &[7, 3, 1]);
        let batch = group.batch();
        step(world, &paged, &group, how, &batch);
        let gradients = reduced(world, &paged.adapters);
        optimizers[0].update(&mut paged.adapters, &gradients, 1e-3);
        conventional_step(&judged, &group, how.tail, &batch);
        // Every rank has the whole gradient here, so the sum over one rank is the gradient itself.
        world.cut(1, 1).expect("one rank a prompt");
        let whole = finalize::run(&world.cp, finalize::take(&judged.adapters), &judged.adapters, 0.0);
        optimizers[1].update(&mut judged.adapters, &run(whole), 1e-3);
        world.cut(world.all.size(), 1).expect("all ranks on one prompt");
    }
    let tensors = |model: &Model| model.adapters.tensors().map(Tensor::detach).collect::<Vec<_>>();
    let Distance { worst, worst_tensor, .. } = distance(&paged.adapters, &tensors(&paged), &tensors(&judged));
    assert!(worst <= 1e-8, "{worst_tensor} is {worst:.1e} off after ten updates");
}
