//! The paged step against conventional autograd over whole sequences.

use longstraw::exchange::sum_number;
use longstraw::world::World;
use serde_json::json;
use tch::Kind;

use crate::fixture::{Group, How, Model, PLAIN, apart, config, conventional_step, own, reduced, step};

/// Largest relative error against autograd of the same float64 formulas: rounding only.
const LIMIT: f64 = 1e-9;

fn compare(world: &World, model: &Model, group: &Group, how: How, what: &str) {
    let batch = group.batch();
    let done = step(world, model, group, how, &batch);
    let paged = reduced(world, &model.adapters);
    let loss = sum_number(&world.cp, done.replayed.loss);
    let expected = conventional_step(model, group, how.tail, &batch);
    let judged = own(&model.adapters);
    let (worst, name) = apart(&model.adapters, paged.gradients(), &judged);
    assert!(worst <= LIMIT, "{what}: {name} is {worst:.1e} off");
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
        ]
        .into_iter()
        .zip(5i64..)
        {
            for tail in [0, 1, 7, u64::MAX] {
                let group = Group::random(seed, 61, prompt, lengths);
                let how = How { page_size, tail, ..PLAIN };
                compare(world, &model, &group, how, &format!("{family}, prompt {prompt}, tail {tail}, {lengths:?}"));
            }
        }
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
