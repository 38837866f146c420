//! Experts: one by one or joined in the file, spread over ranks in memory; the indexer of layers that choose keys.

use std::path::Path;

use longstraw::model::digests::TensorDigests;
use longstraw::model::parts::ExpertSpec;
use longstraw::model::spec::Spec;
use longstraw::model::weights::{Error, ExpertShare, Opening, Share, Weights, ZeroWeights};
use longstraw::runtime::units::LayerIndex;
use longstraw::tensor::bytes::bytes_of;
use safetensors::Dtype;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::checkpoints::{Draft, Stored};

const EXPERTS: u64 = 5;
const BIAS: &str = "model.layers.1.mlp.gate.e_score_correction_bias";

/// A softmax mixture of five experts; layer 1 has none.
fn mixture() -> Value {
    json!({
        "model_type": "qwen3_moe", "vocab_size": 24, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 20, "max_position_embeddings": 256,
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "mlp_only_layers": [1],
    })
}

/// Attention over latents: layers 0 and 2 choose keys, layers 1 and 2 have experts.
fn latent() -> Value {
    json!({
        "model_type": "glm_moe_dsa", "vocab_size": 24, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2,
        "intermediate_size": 20, "max_position_embeddings": 256, "q_lora_rank": 10, "kv_lora_rank": 8,
        "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6, "index_n_heads": 2, "index_head_dim": 8,
        "index_topk": 4, "indexer_types": ["full", "shared", "full"], "mlp_layer_types": ["dense", "sparse", "sparse"],
        "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
    })
}

pub(crate) fn expert(layer: u64, expert: u64, projection: &str) -> String {
    format!("model.layers.{layer}.mlp.experts.{expert}.{projection}.weight")
}

/// The same tensors with the experts of each layer joined, as transformers holds them in memory.
pub(crate) fn join(draft: &mut Draft) {
    let spec = Spec::from_config(&draft.config, None, Path::new("config.json")).unwrap();
    let (layers, experts) = (u64::try_from(spec.layers).unwrap(), spec.experts.unwrap().count);
    for layer in 0..layers {
        let names = [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"][..])];
        for (joined, parts) in names {
            let mut bytes = Vec::new();
            let mut shape = Vec::new();
            for number in 0..experts {
                for part in parts {
                    let Some(stored) = draft.tensors.remove(&expert(layer, number, part)) else { continue };
                    bytes.extend(stored.bytes);
                    shape = vec![usize::try_from(experts).unwrap(), parts.len() * stored.shape[0], stored.shape[1]];
                }
            }
            if !shape.is_empty() {
                let name = format!("model.layers.{layer}.mlp.experts.{joined}");
                draft.tensors.insert(name, Stored { dtype: Dtype::F32, shape, bytes });
            }
        }
    }
}

fn spec_of(draft: &Draft) -> Spec {
    Spec::read(draft.path(), None).unwrap()
}

fn load(draft: &Draft, kind: Kind, share: ExpertShare) -> Result<Weights, Error> {
    Weights::load(draft.path(), &spec_of(draft), kind, Device::Cpu, share)
}

#[track_caller]
fn refusal(draft: &Draft, parts: &[&str]) -> String {
    draft.write();
    let words = load(draft, Kind::Float, ExpertShare::ALL).unwrap_err().to_string();
    for part in parts {
        assert!(words.contains(part), "{part:?} is not in: {words}");
    }
    words
}

fn shares(of: usize) -> impl Iterator<Item = ExpertShare> {
    (0..of).map(move |index| ExpertShare { index, of })
}

/// Names and bytes of everything in memory.
fn content(weights: &Weights) -> Vec<(String, Vec<u8>)> {
    weights.iter().map(|(name, tensor)| (name.to_owned(), bytes_of(&tensor).unwrap())).collect()
}

/// The shares together hold every expert once, in order, and are alike in everything else.
#[track_caller]
fn assert_shares_add_up(whole: &Weights, parts: &[Weights]) {
    for (name, tensor) in whole.iter() {
        let here: Vec<Tensor> = parts.iter().map(|part| part.get(name)).collect();
        if name.contains(".experts.") {
            assert!(Tensor::cat(&here, 0).equal(&tensor), "{name} over {} ranks", parts.len());
        } else {
            assert!(here.iter().all(|here| here.equal(&tensor)), "{name} over {} ranks", parts.len());
        }
    }
    assert!(parts.iter().all(|part| part.digest() == whole.digest()), "digests over {} ranks", parts.len());
}

#[test]
fn experts_one_by_one_stand_in_two_tensors_a_layer() {
    let draft = Draft::made_of(&mixture());
    draft.write();
    let weights = load(&draft, Kind::Float, ExpertShare::ALL).unwrap();
    let names: Vec<&str> = weights.iter().map(|(name, _)| name).filter(|name| name.contains("experts")).collect();
    let joined = |layer| [ExpertSpec::down_name(LayerIndex(layer)), ExpertSpec::gate_up_name(LayerIndex(layer))];
    assert_eq!(names, [joined(0), joined(2)].concat());
    let (gate_up, down) =
        (weights.get(&ExpertSpec::gate_up_name(LayerIndex(2))), weights.get(&ExpertSpec::down_name(LayerIndex(2))));
    assert_eq!((gate_up.size(), down.size()), (vec![5, 12, 12], vec![5, 12, 6]));
    for number in 0..EXPERTS {
        let row = i64::try_from(number).unwrap();
        let stored = |projection| &draft.tensors[&expert(2, number, projection)].bytes;
        assert_eq!(&bytes_of(&gate_up.get(row).narrow(0, 0, 6)).unwrap(), stored("gate_proj"));
        assert_eq!(&bytes_of(&gate_up.get(row).narrow(0, 6, 6)).unwrap(), stored("up_proj"));
        assert_eq!(&bytes_of(&down.get(row)).unwrap(), stored("down_proj"));
    }
    let bytes: u64 = draft.tensors.values().map(|stored| u64::try_from(stored.bytes.len()).unwrap()).sum();
    assert_eq!(weights.bytes().0, bytes);
}

#[test]
fn joined_experts_load_as_single_ones_do_with_the_same_digest() {
    for config in [mixture(), latent()] {
        let draft = Draft::made_of(&config);
        draft.write();
        let single = load(&draft, Kind::Float, ExpertShare::ALL).unwrap();
        let mut draft = draft;
        join(&mut draft);
        draft.write();
        let joined = load(&draft, Kind::Float, ExpertShare::ALL).unwrap();
        assert_eq!(content(&joined), content(&single));
        assert_eq!(joined.digest(), single.digest());
        // Also in several files, and one of the two tensors a layer joined.
        std::fs::remove_file(draft.path().join("model.safetensors")).unwrap();
        draft.write_shards(3);
        assert_eq!(load(&draft, Kind::Float, ExpertShare::ALL).unwrap().digest(), single.digest());
    }
}

#[test]
fn shares_of_experts_hold_every_expert_once_with_one_digest() {
    for config in [mixture(), latent()] {
        let mut draft = Draft::made_of(&config);
        for joined in [false, true] {
            if joined {
                join(&mut draft);
            }
            draft.write();
            let whole = load(&draft, Kind::Float, ExpertShare::ALL).unwrap();
            // Five experts over two, four and eight ranks: uneven shares, and ranks without an expert.
            for of in [1, 2, 4, 8] {
                let parts: Vec<Weights> = shares(of).map(|share| load(&draft, Kind::Float, share).unwrap()).collect();
                assert_shares_add_up(&whole, &parts);
                let all: u64 = parts.iter().map(|part| part.bytes().0).sum();
                assert!(of == 1 || all < whole.bytes().0 * u64::try_from(of).unwrap(), "a rank holds its share only");
            }
        }
    }
}

#[test]
fn ranks_with_other_experts_share_the_digests_of_all() {
    let draft = Draft::made_of(&mixture());
    draft.write();
    let spec = spec_of(&draft);
    let load = |rank: usize| {
        let opening = Opening::open(draft.path(), &spec, None).unwrap();
        let (share, experts) = (Share { rank, ranks: 2 }, ExpertShare { index: rank, of: 2 });
        opening.load(&spec, Kind::Float, Device::Cpu, ZeroWeights::Refuse, share, experts).unwrap()
    };
    let made: Vec<TensorDigests> = (0..2).map(|rank| load(rank).own_digests().clone()).collect();
    assert_eq!(made.iter().map(TensorDigests::len).sum::<usize>(), draft.tensors.len(), "each is made once");
    let digests: Vec<String> = (0..2).map(|rank| load(rank).finish(made.clone(), false).digest().to_owned()).collect();
    let alone = Weights::load(draft.path(), &spec, Kind::Float, Device::Cpu, ExpertShare::ALL).unwrap();
    assert_eq!(digests, [alone.digest(), alone.digest()]);
}

#[test]
fn random_experts_are_the_same_in_every_share() {
    for config in [mixture(), latent()] {
        let draft = Draft::made_of(&config);
        draft.write_config();
        let spec = spec_of(&draft);
        let random = |share| Weights::random(&spec, 3, Kind::BFloat16, Device::Cpu, share).unwrap();
        let whole = random(ExpertShare::ALL);
        for of in [1, 2, 4, 8] {
            assert_shares_add_up(&whole, &shares(of).map(random).collect::<Vec<_>>());
        }
        let gate_up = whole.get(&ExpertSpec::gate_up_name(LayerIndex(2)));
        assert!(!gate_up.get(0).equal(&gate_up.get(1)), "experts differ from each other");
        let down = whole.get(&ExpertSpec::down_name(LayerIndex(2))).to_kind(Kind::Double);
        let deviation = down.std(true).double_value(&[]);
        assert!((deviation - 6_f64.sqrt().recip()).abs() < 0.05, "1/√6, not {deviation}");
    }
}

#[test]
fn the_correction_bias_keeps_the_accumulation_dtype_and_may_be_zero() {
    let mut draft = Draft::made_of(&latent());
    draft.tensor(BIAS).bytes.fill(0);
    // Too large for float16, and not a value of bfloat16.
    draft.tensor(BIAS).set(2, 70_001.0);
    draft.write();
    for (kind, wide) in [(Kind::BFloat16, Kind::Float), (Kind::Half, Kind::Float), (Kind::Double, Kind::Double)] {
        let weights = load(&draft, kind, ExpertShare::ALL).unwrap();
        // What decides between scores that lie close together: the sigmoid router, and the weights of an index's heads.
        let decides = |name: &str| [".mlp.gate.", ".indexer.weights_proj."].iter().any(|part| name.contains(part));
        let misfit = |(name, tensor): &(&str, Tensor)| tensor.kind() != if decides(name) { wide } else { kind };
        assert_eq!(weights.iter().filter(misfit).count(), 0);
        assert_eq!(weights.get(BIAS).kind(), wide);
        let values = Vec::<f64>::try_from(weights.get(BIAS).to_kind(Kind::Double)).unwrap();
        assert!(values.iter().zip([0.0, 0.0, 70_001.0, 0.0, 0.0]).all(|(value, wanted)| (value - wanted).abs() < 1e-9));
        let spec = spec_of(&draft);
        assert_eq!(weights.converted(Kind::BFloat16).get(BIAS).kind(), Kind::Float);
        assert_eq!(weights.part(&spec.first_layers(2), Kind::Double).get(BIAS).kind(), Kind::Double);
    }
    draft.tensor(BIAS).bytes.fill(0);
    draft.write();
    load(&draft, Kind::Float, ExpertShare::ALL).unwrap();
    let random = Weights::random(&spec_of(&draft), 1, Kind::BFloat16, Device::Cpu, ExpertShare::ALL).unwrap();
    assert_eq!(random.get(BIAS).kind(), Kind::Float);
    assert!(random.get(BIAS).abs().max().double_value(&[]) < f64::EPSILON);
}

#[test]
fn a_part_has_the_experts_of_its_layers() {
    let draft = Draft::made_of(&mixture());
    draft.write();
    let (spec, share) = (spec_of(&draft), ExpertShare { index: 1, of: 2 });
    let weights = load(&draft, Kind::Float, share).unwrap();
    let part = weights.part(&spec.first_layers(1), Kind::Float);
    let (kept, left_out) = (ExpertSpec::down_name(LayerIndex(0)), ExpertSpec::down_name(LayerIndex(2)));
    assert_eq!(part.get(&kept).data_ptr(), weights.get(&kept).data_ptr(), "tensors of the same dtype are shared");
    assert!(part.try_get(&left_out).is_none());
    let wide = weights.part(&spec.first_layers(1), Kind::Double);
    assert!(wide.get(&kept).equal(&weights.get(&kept).to_kind(Kind::Double)));
}

#[test]
fn experts_that_are_missing_too_many_or_of_another_shape_are_refused() {
    let mut draft = Draft::made_of(&mixture());
    draft.tensors.remove(&expert(2, 3, "up_proj"));
    draft.tensors.insert(expert(2, 5, "up_proj"), Stored::float(&[1], &[1.0]));
    draft.tensors.insert(expert(1, 0, "up_proj"), Stored::float(&[1], &[1.0]));
    draft.tensor(&expert(0, 4, "down_proj")).shape = vec![6, 12];
    refusal(
        &draft,
        &[
            &format!("{} [6, 12] is missing", expert(2, 3, "up_proj")),
            &format!("{} [1] is not part of this model", expert(2, 5, "up_proj")),
            &format!("{} [1] is not part of this model", expert(1, 0, "up_proj")),
            &format!("{} is [6, 12], the config asks for [12, 6]", expert(0, 4, "down_proj")),
        ],
    );
}

#[test]
fn joined_experts_of_another_shape_or_dtype_are_one_problem_each() {
    let mut draft = Draft::made_of(&mixture());
    join(&mut draft);
    let (gate_up, down) = (ExpertSpec::gate_up_name(LayerIndex(0)), ExpertSpec::down_name(LayerIndex(2)));
    draft.tensor(&gate_up).shape = vec![5, 6, 24];
    *draft.tensor(&down) = Stored { dtype: Dtype::I8, shape: vec![5, 12, 6], bytes: vec![1; 360] };
    draft.tensors.insert(ExpertSpec::down_name(LayerIndex(1)), Stored::float(&[1], &[1.0]));
    let words = refusal(
        &draft,
        &[
            &format!("{gate_up} is [5, 6, 24], the config asks for [5, 12, 12]"),
            &format!("{down} is I8; longstraw reads"),
            "model.layers.1.mlp.experts.down_proj [1] is not part of this model",
        ],
    );
    assert!(!words.contains("is missing"), "{words}");
}

#[test]
fn experts_that_stand_twice_are_refused() {
    let mut draft = Draft::made_of(&mixture());
    let single = draft.tensors[&expert(0, 1, "down_proj")].clone();
    join(&mut draft);
    draft.tensors.insert(expert(0, 1, "down_proj"), single);
    let joined = ExpertSpec::down_name(LayerIndex(0));
    refusal(&draft, &[&format!("joined in {joined}, and one by one ({} and so on)", expert(0, 1, "down_proj"))]);
}

#[test]
fn values_of_an_expert_are_judged_on_the_rank_that_holds_it() {
    for joined in [false, true] {
        let mut draft = Draft::made_of(&mixture());
        draft.tensor(&expert(0, 4, "down_proj")).set(8, f32::NAN);
        draft.tensor(&expert(2, 4, "up_proj")).bytes.fill(0);
        if joined {
            join(&mut draft);
        }
        draft.write();
        load(&draft, Kind::Float, ExpertShare { index: 0, of: 2 }).unwrap();
        let words = |draft: &Draft| load(draft, Kind::Float, ExpertShare { index: 1, of: 2 }).unwrap_err().to_string();
        let wanted =
            format!("{} has 1 NaN and 0 infinite of 72 values, the first at [1, 2]", expert(0, 4, "down_proj"));
        assert!(words(&draft).contains(&wanted), "{}", words(&draft));
        let mut draft = Draft::made_of(&mixture());
        draft.tensor(&expert(2, 4, "up_proj")).bytes.fill(0);
        draft.write();
        assert!(
            words(&draft).contains(&format!("{} [6, 12] is all zero", expert(2, 4, "up_proj"))),
            "{}",
            words(&draft)
        );
    }
}

#[test]
fn an_indexer_missing_on_a_layer_that_chooses_is_refused() {
    let mut draft = Draft::made_of(&latent());
    for name in ["wk.weight", "k_norm.bias"] {
        draft.tensors.remove(&format!("model.layers.2.self_attn.indexer.{name}"));
    }
    refusal(
        &draft,
        &[
            "layer 2 chooses its keys, but model.layers.2.self_attn.indexer.wk.weight, \
             model.layers.2.self_attn.indexer.k_norm.bias are missing",
            "`indexer_types`",
        ],
    );
}

#[test]
fn an_indexer_on_a_layer_that_borrows_a_choice_is_noted_and_not_read() {
    let mut draft = Draft::made_of(&latent());
    draft.write();
    let plain = load(&draft, Kind::Float, ExpertShare::ALL).unwrap();
    assert!(plain.notes().is_empty());
    for name in ["wq_b.weight", "wk.weight"] {
        let name = format!("model.layers.1.self_attn.indexer.{name}");
        draft.tensors.insert(name, Stored::float(&[2], &[f32::NAN, 0.0]));
    }
    draft.write();
    let weights = load(&draft, Kind::Float, ExpertShare::ALL).unwrap();
    assert_eq!(content(&weights), content(&plain));
    assert_eq!(weights.digest(), plain.digest());
    let note = "tensors of the checkpoint that are not read: indexers of layers that use another layer's choice (2)";
    assert_eq!(weights.notes(), [note]);
    // In a family without latents such a tensor belongs to another model.
    let mut draft = Draft::made_of(&mixture());
    let name = "model.layers.1.self_attn.indexer.wk.weight";
    draft.tensors.insert(name.to_owned(), Stored::float(&[1], &[1.0]));
    refusal(&draft, &[&format!("{name} [1] is not part of this model")]);
}

#[test]
fn a_layer_of_multi_token_prediction_with_experts_is_noted_and_not_read() {
    let mut draft = Draft::made_of(&latent());
    for name in ["enorm.weight", "eh_proj.weight", "mlp.experts.0.up_proj.weight", "self_attn.indexer.wk.weight"] {
        draft.tensors.insert(format!("model.layers.3.{name}"), Stored::float(&[2], &[f32::NAN, 0.0]));
    }
    draft.write();
    let weights = load(&draft, Kind::Float, ExpertShare::ALL).unwrap();
    let note = "tensors of the checkpoint that are not read: layers of multi-token prediction (4)";
    assert_eq!(weights.notes(), [note]);
}
