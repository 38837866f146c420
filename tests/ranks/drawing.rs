//! Answers drawn by the kernels of a decode step, against the same answers drawn by single operations.

use std::collections::BTreeSet;

use longstraw::model::token::Drawer;
use longstraw::runtime::units::{Tokens, from_index};
use longstraw::step::rollout::{self, DrawnChoices, SampleRequest, Sampling, Stream};
use longstraw::world::World;
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::fixture::{How, Model, PLAIN, config, device};
use crate::sampling::{sample, worst_gap};

/// Widths that the kernels have: heads of 64, 80, 128 and 256, groups of 1, 2, 3 and 4 query heads.
fn shapes() -> Vec<Value> {
    let sized = |family: &str, heads: [u64; 3], extra: &Value| {
        let [query, groups, dim] = heads;
        let mut sized = config(
            family,
            &json!({ "hidden_size": 96, "intermediate_size": 136, "num_attention_heads": query,
                "num_key_value_heads": groups, "head_dim": dim, "vocab_size": 5_003 }),
        );
        if let (Some(sized), Some(extra)) = (sized.as_object_mut(), extra.as_object()) {
            sized.extend(extra.clone());
        }
        sized
    };
    let rope = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64 });
    let gemma = json!({ "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 16,
        "num_hidden_layers": 4, "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": { "rope_type": "linear", "factor": 8.0, "rope_theta": 1e6 },
            "sliding_attention": { "rope_type": "default", "rope_theta": 1e4 }
        } });
    vec![
        sized("gemma3_text", [4, 2, 256], &gemma),
        sized("llama", [4, 1, 80], &json!({ "rope_scaling": rope })),
        sized("mistral", [2, 2, 64], &json!({ "sliding_window": 9 })),
        sized("qwen2", [6, 2, 64], &json!({})),
        sized("qwen3", [4, 2, 128], &json!({ "tie_word_embeddings": false })),
    ]
}

fn request(number: u64, sampling: Sampling, longest: u64) -> SampleRequest<'static> {
    SampleRequest {
        answers: 5,
        greedy: 1,
        longest: Tokens(longest),
        // Seldom, so that some answers end by themselves and rows are taken out.
        ends: &[3, 17, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60],
        sampling,
        stream: Stream::of_seed(7).part(number),
        resident: usize::MAX,
        fused: true,
        choices: DrawnChoices::Drop,
        calls: None,
    }
}

/// Prompt, page size, longest answer, and from which tokens. The last one has more rows on each of `ranks` than room is made
/// for at first.
fn draws(ranks: usize) -> Vec<(usize, u64, u64, Sampling)> {
    let of = |top_p: f64, top_k: u64| Sampling { top_p, top_k };
    vec![
        (50, 7, 40, of(1.0, 0)),
        (50, 7, 40, of(0.9, 0)),
        (50, 7, 40, of(1.0, 12)),
        (50, 7, 40, of(0.5, 700)),
        (1, 3, 12, of(0.9, 0)),
        (333, 64, 256 * from_index(ranks) + 34, of(1.0, 0)),
    ]
}

/// In float32 the same tokens, log-probabilities and entropies to rounding; in bfloat16 as near to the scores as single
/// operations come. On a CPU there are no such kernels, and asking for them changes nothing.
pub(crate) fn same(world: &mut World) {
    let kernels = device().is_cuda();
    for shape in shapes().into_iter().take(if kernels { usize::MAX } else { 1 }) {
        let family = &shape["model_type"];
        let model = Model::random(&shape, Kind::Float);
        let drawer = rollout::computed_by(&*model.decoder, &model.adapters, 8);
        assert_eq!(drawer == Drawer::Kernels, kernels, "{family}: {drawer}");
        let many = rollout::computed_by(&*model.decoder, &model.adapters, 65);
        assert_ne!(many, Drawer::Kernels, "{family}: more answers than rows of a step");
        let mut lengths = BTreeSet::new();
        for (number, (prompt, page_size, longest, sampling)) in draws(world.all.size()).into_iter().enumerate() {
            let how = How { page_size, ..PLAIN };
            let request = request(from_index(number), sampling, longest);
            let (fused, scores) = sample(world, &model, prompt, how, &request);
            let (single, of_single) = sample(world, &model, prompt, how, &SampleRequest { fused: false, ..request });
            for (one, other) in fused.iter().zip(&single) {
                lengths.insert(one.ids.len());
                assert_eq!(one.ids, other.ids, "{family}, prompt {prompt}, {sampling:?}");
                let apart = rollout::gap(&one.logprobs, &Tensor::from_slice(&other.logprobs));
                assert!(apart <= 1e-4, "{family}, prompt {prompt}, {sampling:?}: {apart}");
                assert!((one.entropy - other.entropy).abs() <= 1e-4 * other.entropy.abs().max(1.0));
            }
            let (gap, theirs) = (worst_gap(&fused, &scores), worst_gap(&single, &of_single));
            assert!(gap <= 1.25 * theirs.max(8e-5), "{family}, prompt {prompt}: {gap} to the scores, {theirs}");
            if !kernels {
                return assert_eq!(fused, single);
            }
            if number == 0 {
                let (passing, _) = sample(world, &model, prompt, how, &SampleRequest { resident: 1, ..request });
                assert_eq!(fused, passing, "{family}: pages that stay and pages that come give the same bits");
            }
        }
        assert!(lengths.len() > 5, "answers of different lengths: {lengths:?}");
        near_to_scores(world, &shape);
    }
}

fn near_to_scores(world: &World, shape: &Value) {
    let family = &shape["model_type"];
    let model = Model::random(shape, Kind::BFloat16);
    let request = SampleRequest { ends: &[], ..request(77, Sampling { top_p: 1.0, top_k: 0 }, 60) };
    let (fused, scores) = sample(world, &model, 333, PLAIN, &request);
    let (single, of_single) = sample(world, &model, 333, PLAIN, &SampleRequest { fused: false, ..request });
    let mean = |answers: &[rollout::SampledAnswer], scores: &[Tensor]| {
        let gaps = answers.iter().zip(scores).map(|(answer, scored)| {
            (Tensor::from_slice(&answer.logprobs) - scored.to_kind(Kind::Double).to_device(tch::Device::Cpu)).abs()
        });
        Tensor::cat(&gaps.collect::<Vec<_>>(), 0).mean(Kind::Double).double_value(&[])
    };
    let (ours, theirs) = (mean(&fused, &scores), mean(&single, &of_single));
    if world.all.rank().0 == 0 {
        println!("{family}: bfloat16, mean gap of drawn and scored {ours:.2e}, by single operations {theirs:.2e}");
    }
    assert!(ours <= 1.25 * theirs, "{family}: {ours} and {theirs}");
}

/// An answer has the same bits alone and beside many others, for which a product takes its columns otherwise.
pub(crate) fn alone(world: &mut World) {
    let kinds = [Kind::BFloat16, Kind::Float, Kind::BFloat16, Kind::Half, Kind::BFloat16];
    // On a CPU the library's products may add in another order.
    let shapes = if device().is_cuda() { shapes() } else { Vec::new() };
    for (shape, kind) in shapes.into_iter().zip(kinds) {
        let model = Model::random(&shape, kind);
        let request = SampleRequest { ends: &[], greedy: 0, ..request(3, Sampling { top_p: 1.0, top_k: 0 }, 30) };
        let (one, _) = sample(world, &model, 90, PLAIN, &SampleRequest { answers: 1, ..request });
        for answers in [20, 40] {
            let (many, _) = sample(world, &model, 90, PLAIN, &SampleRequest { answers, ..request });
            // The first token is drawn by single operations from one row of the prompt, whatever the number of answers.
            assert_eq!(one[0], many[0], "{} beside {answers}, {kind:?}", shape["model_type"]);
        }
    }
}
