//! Checkpoints: loaded exactly, and refused in words when they are not whole.

use std::fs;
use std::path::Path;

use longstraw::model::digests::TensorDigests;
use longstraw::model::spec::Spec;
use longstraw::model::weights::{Error, ExpertShare, Opening, Share, Weights, ZeroWeights};
use longstraw::runtime::failure::{Classified, Exit};
use longstraw::tensor::bytes::bytes_of;
use safetensors::Dtype;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::checkpoints::{Draft, Stored, case, read, shard_name, write};

const FAMILIES: [&str; 4] = ["qwen3", "qwen2", "llama", "mistral"];
const Q0: &str = "model.layers.0.self_attn.q_proj.weight";

fn load(folder: &Path, kind: Kind) -> Result<Weights, Error> {
    let spec = Spec::read(folder, None).unwrap();
    Weights::load(folder, &spec, kind, Device::Cpu, ExpertShare::ALL)
}

#[track_caller]
fn refusal(folder: &Path, parts: &[&str]) -> String {
    let error = load(folder, Kind::Float).unwrap_err();
    assert_eq!(error.exit(), Exit::Data);
    let words = error.to_string();
    assert!(words.contains(&folder.display().to_string()), "the folder is not named: {words}");
    assert_eq!(words.lines().count(), 1, "{words}");
    for part in parts {
        assert!(words.contains(part), "{part:?} is not in: {words}");
    }
    words
}

fn same_bits(one: &Weights, other: &Weights) -> bool {
    let bytes = |weights: &Weights| -> Vec<(String, Vec<u8>)> {
        weights.iter().map(|(name, tensor)| (name.to_owned(), bytes_of(&tensor).unwrap())).collect()
    };
    bytes(one) == bytes(other)
}

#[test]
fn each_family_loads_the_bits_that_are_in_the_file() {
    for family in FAMILIES {
        let weights = load(&case(family), Kind::Float).unwrap();
        let stored = read(&case(family).join("model.safetensors"));
        assert_eq!(weights.iter().count(), stored.len(), "{family}");
        for (name, tensor) in &stored {
            let loaded = weights.get(name);
            assert_eq!(bytes_of(&loaded).unwrap(), tensor.bytes, "{family} {name}");
            assert!(loaded.kind() == Kind::Float && !loaded.requires_grad());
        }
        assert!(weights.try_get("model.layers.0.self_attn.nothing").is_none());
        let wide = load(&case(family), Kind::Double).unwrap();
        assert_eq!(wide.get(Q0).kind(), Kind::Double);
        assert_eq!(bytes_of(&wide.get(Q0).to_kind(Kind::Float)).unwrap(), stored[Q0].bytes);
        assert_eq!(wide.digest(), weights.digest(), "the dtype loaded into is no part of the digest");
    }
}

#[test]
fn every_float_dtype_of_a_file_is_read() {
    let mut draft = Draft::of("llama");
    let values: Vec<f32> = draft.tensors[Q0].floats();
    let tensor = Tensor::from_slice(&values).view([64, 64]);
    for (dtype, kind) in [(Dtype::F64, Kind::Double), (Dtype::F16, Kind::Half), (Dtype::BF16, Kind::BFloat16)] {
        let stored = tensor.to_kind(kind);
        *draft.tensor(Q0) = Stored { dtype, shape: vec![64, 64], bytes: bytes_of(&stored).unwrap() };
        draft.write();
        let weights = load(draft.path(), Kind::Float).unwrap();
        assert!(weights.get(Q0).equal(&stored.to_kind(Kind::Float)), "{dtype}");
        let narrow = load(draft.path(), Kind::BFloat16).unwrap();
        assert!(narrow.get(Q0).equal(&stored.to_kind(Kind::BFloat16)), "{dtype}");
    }
}

#[test]
fn shards_load_as_one_file_does_with_the_same_digest() {
    let draft = Draft::of("qwen2");
    draft.write_shards(3);
    // A shard that the index does not name may lie beside the others.
    write(&draft.path().join("other.safetensors"), &draft.tensors);
    let whole = load(&case("qwen2"), Kind::Float).unwrap();
    let shards = load(draft.path(), Kind::Float).unwrap();
    assert!(same_bits(&whole, &shards));
    assert_eq!(whole.digest(), shards.digest());
    assert_eq!(whole.digest().len(), 64);
}

#[test]
fn the_digest_tells_models_apart() {
    let mut digests = vec![];
    for family in FAMILIES {
        digests.push(load(&case(family), Kind::Float).unwrap().digest().to_owned());
    }
    let mut draft = Draft::of("qwen3");
    draft.tensor("model.norm.weight").set(63, 1.25);
    draft.write();
    digests.push(load(draft.path(), Kind::Float).unwrap().digest().to_owned());
    let mut draft = Draft::of("qwen3");
    draft.config.insert("rms_norm_eps".to_owned(), json!(1e-5));
    draft.write();
    digests.push(load(draft.path(), Kind::Float).unwrap().digest().to_owned());
    digests.sort();
    digests.dedup();
    assert_eq!(digests.len(), 6);
}

#[test]
fn the_digest_covers_every_byte_of_a_tensor() {
    let mut draft = Draft::of("qwen3");
    draft.write();
    let whole = load(draft.path(), Kind::Float).unwrap().digest().to_owned();
    // One value in the middle of a tensor of 32 KiB.
    let name = "model.layers.1.mlp.down_proj.weight";
    let middle = draft.tensors[name].bytes.len() / 8;
    draft.tensor(name).set(middle, 1.25);
    draft.write();
    assert_ne!(load(draft.path(), Kind::Float).unwrap().digest(), whole);
}

#[test]
fn ranks_that_share_the_digests_get_the_digest_of_one_that_is_alone() {
    let draft = Draft::of("qwen3");
    draft.write_shards(2);
    let spec = Spec::read(draft.path(), None).unwrap();
    let load = |share| {
        let opening = Opening::open(draft.path(), &spec, None).unwrap();
        opening.load(&spec, Kind::Float, Device::Cpu, ZeroWeights::Refuse, share, ExpertShare::ALL).unwrap()
    };
    let alone = load(Share::ALL);
    assert_eq!(alone.own_digests().len(), draft.tensors.len());
    let shares: Vec<TensorDigests> = (0..3).map(|rank| load(Share { rank, ranks: 3 }).own_digests().clone()).collect();
    assert_eq!(shares.iter().map(TensorDigests::len).sum::<usize>(), draft.tensors.len(), "each is made once");
    let alone = alone.finish([], false);
    for rank in 0..3 {
        let weights = load(Share { rank, ranks: 3 }).finish(shares.clone(), false);
        assert_eq!(weights.digest(), alone.digest());
    }
}

#[test]
fn ranks_that_read_other_files_know_that_they_do() {
    let (one, other) = (Draft::of("qwen3"), Draft::of("qwen3"));
    let identity = |draft: &Draft| {
        draft.write();
        let spec = Spec::read(draft.path(), None).unwrap();
        Opening::open(draft.path(), &spec, None).unwrap().identity()
    };
    let first = identity(&one);
    assert_ne!(first, identity(&other), "an equal file in another folder is another file");
}

#[test]
fn weights_that_are_all_zero_are_refused_and_biases_may_be() {
    let mut draft = Draft::of("qwen2");
    let zero = |draft: &mut Draft, name: &str| draft.tensor(name).bytes.fill(0);
    zero(&mut draft, "model.layers.0.self_attn.q_proj.bias");
    draft.write();
    load(draft.path(), Kind::Float).unwrap();
    zero(&mut draft, "model.layers.2.mlp.up_proj.weight");
    zero(&mut draft, "model.norm.weight");
    draft.write();
    refusal(
        draft.path(),
        &[
            "model.safetensors: model.layers.2.mlp.up_proj.weight [",
            "] is all zero",
            "model.norm.weight [",
            "model.allow_zero_weights = true",
        ],
    );
    let spec = Spec::read(draft.path(), None).unwrap();
    let opening = Opening::open(draft.path(), &spec, None).unwrap();
    assert!(opening.load(&spec, Kind::Float, Device::Cpu, ZeroWeights::Allow, Share::ALL, ExpertShare::ALL).is_ok());
}

#[test]
fn a_norm_that_adds_one_to_its_weight_may_be_zero() {
    let mut draft = Draft::of("gemma3_text");
    draft.tensor("model.norm.weight").bytes.fill(0);
    draft.write();
    load(draft.path(), Kind::Float).unwrap();
}

#[test]
fn two_checkpoints_in_one_folder_are_refused() {
    let draft = Draft::of("qwen3");
    let index = draft.write_shards(2);
    draft.write();
    refusal(
        draft.path(),
        &["both model.safetensors and the shards of model.safetensors.index.json hold weights", &shard_name(0, 2)],
    );
    // An index may place every tensor in the one file.
    let all_in_one = index.keys().map(|name| (name.clone(), json!("model.safetensors"))).collect();
    draft.write_index(&all_in_one);
    let weights = load(draft.path(), Kind::Float).unwrap();
    assert!(same_bits(&weights, &load(&case("qwen3"), Kind::Float).unwrap()));
    assert!(weights.notes()[0].contains("files of weights in the model's folder that are not read: 2, the first is "));
}

#[test]
fn more_layers_than_the_config_asks_for_are_refused() {
    for shards in [1, 3] {
        let mut draft = Draft::of("llama");
        let layers = draft.config["num_hidden_layers"].as_u64().unwrap();
        draft.config.insert("num_hidden_layers".to_owned(), json!(layers - 1));
        if shards == 1 {
            draft.write();
        } else {
            draft.write_shards(shards);
        }
        let (found, wanted) = (format!("holds {layers} layers"), format!("the config asks for {}", layers - 1));
        refusal(draft.path(), &[&found, &wanted, &format!("set `num_hidden_layers` to {layers}")]);
    }
}

#[test]
fn names_of_composite_models_are_stripped_and_foreign_parts_skipped() {
    let mut draft = Draft::of("qwen3");
    let plain = std::mem::take(&mut draft.tensors);
    for (name, stored) in plain {
        draft.tensors.insert(name.replacen("model.", "model.language_model.", 1), stored);
    }
    for name in ["model.visual.patch.weight", "mtp.fc.weight", "model.layers.4.enorm.weight"] {
        draft.tensors.insert(name.to_owned(), Stored::float(&[2], &[f32::NAN, 0.0]));
    }
    let frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq".to_owned();
    draft.tensors.insert(frequencies, Stored::float(&[1], &[1.0]));
    let config = std::mem::take(&mut draft.config);
    draft.config.insert("text_config".to_owned(), config.into());
    draft.write();
    let weights = load(draft.path(), Kind::Float).unwrap();
    assert!(same_bits(&weights, &load(&case("qwen3"), Kind::Float).unwrap()));
    let note = "tensors of the checkpoint that are not read: layers of multi-token prediction (1), model.visual.* (1), \
                mtp.* (1)";
    assert_eq!(weights.notes(), [note]);
}

#[test]
fn a_tied_head_shares_the_embeddings_storage() {
    let mut draft = Draft::of("llama");
    let head = draft.tensors.remove("lm_head.weight").unwrap();
    draft.config.insert("tie_word_embeddings".to_owned(), json!(false));
    draft.write();
    refusal(draft.path(), &["lm_head.weight [", "is missing", "set `tie_word_embeddings` to true"]);
    draft.config.insert("tie_word_embeddings".to_owned(), json!(true));
    draft.write();
    let weights = load(draft.path(), Kind::Float).unwrap();
    assert_eq!(weights.get("model.embed_tokens.weight").data_ptr(), weights.get("lm_head.weight").data_ptr());
    // A tied checkpoint may hold the embedding a second time, but not another head.
    draft.tensors.insert("lm_head.weight".to_owned(), draft.tensors["model.embed_tokens.weight"].clone());
    draft.write();
    let weights = load(draft.path(), Kind::Float).unwrap();
    assert_eq!(weights.get("model.embed_tokens.weight").data_ptr(), weights.get("lm_head.weight").data_ptr());
    draft.tensors.insert("lm_head.weight".to_owned(), head);
    draft.write();
    refusal(draft.path(), &["lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings"]);
}

#[test]
fn missing_extra_and_wrongly_shaped_tensors_stand_in_one_message() {
    let mut draft = Draft::of("qwen3");
    draft.tensors.remove("model.layers.2.mlp.up_proj.weight");
    draft.tensors.insert("model.layers.1.self_attn.q_proj.bias".to_owned(), Stored::float(&[3], &[0.0; 3]));
    draft.tensor("model.layers.3.self_attn.k_norm.weight").shape = vec![2, 8];
    draft.write();
    let parts = [
        "model.layers.2.mlp.up_proj.weight [128, 64] is missing",
        "model.safetensors: model.layers.1.self_attn.q_proj.bias [3] is not part of this model",
        "model.safetensors: model.layers.3.self_attn.k_norm.weight is [2, 8], the config asks for [16]",
    ];
    refusal(draft.path(), &parts);
}

#[test]
fn a_long_list_of_problems_is_cut_and_counted() {
    let mut draft = Draft::of("qwen3");
    draft.config.insert("num_hidden_layers".to_owned(), json!(6));
    draft.config.remove("layer_types");
    draft.write();
    let words = refusal(draft.path(), &["model.layers.4.input_layernorm.weight [64] is missing", "and 10 more"]);
    assert!(words.len() < 2000, "{words}");
}

#[test]
fn an_index_that_names_absent_shards_is_refused() {
    let draft = Draft::of("llama");
    draft.write_shards(3);
    fs::remove_file(draft.path().join(shard_name(1, 3))).unwrap();
    refusal(draft.path(), &["model-00002-of-00003.safetensors is not there", "13 tensors"]);
}

#[test]
fn two_shards_that_hold_the_same_tensor_are_refused() {
    let draft = Draft::of("llama");
    draft.write_shards(2);
    let second = draft.path().join(shard_name(1, 2));
    let first = read(&draft.path().join(shard_name(0, 2)));
    let (name, stored) = first.into_iter().next().unwrap();
    let mut tensors = read(&second);
    tensors.insert(name.clone(), stored);
    write(&second, &tensors);
    refusal(draft.path(), &[&format!("{name} stands both in {} and in {}", shard_name(0, 2), shard_name(1, 2))]);
}

#[test]
fn an_index_that_places_a_tensor_where_it_is_not_is_refused() {
    let draft = Draft::of("llama");
    let mut index = draft.write_shards(2);
    let (here, there) = (shard_name(0, 2), shard_name(1, 2));
    let moved = if index[Q0] == here.as_str() { &there } else { &here };
    index.insert(Q0.to_owned(), json!(moved));
    draft.write_index(&index);
    refusal(draft.path(), &[&format!("{moved} lacks {Q0}, which the index places there")]);
}

#[test]
fn an_index_that_leaves_the_folder_or_is_no_index_is_refused() {
    let draft = Draft::of("llama");
    let mut index = draft.write_shards(2);
    index.insert(Q0.to_owned(), json!("../model.safetensors"));
    index.insert("model.norm.weight".to_owned(), json!(7));
    draft.write_index(&index);
    refusal(draft.path(), &[&format!("places {Q0} in \"../model.safetensors\""), "model.norm.weight in 7"]);
    for (text, part) in [("{}", "no `weight_map`"), ("{\"weight_map\": {}}", "no `weight_map`"), ("{", "line 1")] {
        fs::write(draft.path().join("model.safetensors.index.json"), text).unwrap();
        refusal(draft.path(), &["model.safetensors.index.json", part]);
    }
}

#[test]
fn truncated_and_damaged_files_are_refused_with_their_bytes() {
    let draft = Draft::of("mistral");
    draft.write();
    let file = draft.path().join("model.safetensors");
    let whole = fs::read(&file).unwrap();
    let length = whole.len();
    let damaged = |bytes: &[u8], parts: &[&str]| {
        fs::write(&file, bytes).unwrap();
        refusal(draft.path(), parts);
    };
    damaged(&[], &["model.safetensors: ", "has 0 bytes"]);
    damaged(&whole[..5], &["has 5 bytes"]);
    damaged(&whole[..100], &["but the file has 100", "truncated"]);
    let describes = format!("describes {length} bytes, but the file has {}", length - 1);
    damaged(&whole[..length - 1], &[&describes]);
    let longer: Vec<u8> = whole.iter().copied().chain([0; 3]).collect();
    damaged(&longer, &[&format!("describes {length} bytes, but the file has {}", length + 3)]);
    let mut spoiled = whole.clone();
    spoiled[8] = b'?';
    damaged(&spoiled, &["model.safetensors: the header is damaged"]);
    damaged(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 825512\n",
        &["truncated or no safetensors"],
    );
}

#[test]
fn values_that_are_not_finite_are_counted_and_placed() {
    let mut draft = Draft::of("qwen3");
    let tensor = draft.tensor(Q0);
    tensor.set(3 * 64 + 7, f32::NAN);
    tensor.set(3 * 64 + 9, f32::INFINITY);
    tensor.set(50 * 64, f32::NEG_INFINITY);
    draft.tensor("model.norm.weight").set(11, f32::NAN);
    draft.write_shards(2);
    let parts = [
        &format!("{Q0} has 1 NaN and 2 infinite of 4096 values, the first at [3, 7]"),
        "model.norm.weight has 1 NaN and 0 infinite of 64 values, the first at [11]",
        "-of-00002.safetensors: ",
        "dtype Float",
    ];
    refusal(draft.path(), &parts);
}

#[test]
fn values_that_exceed_the_target_dtype_are_refused() {
    let mut draft = Draft::of("qwen3");
    draft.tensor(Q0).set(64, 1e5);
    draft.write();
    assert!(load(draft.path(), Kind::Float).is_ok());
    let words = load(draft.path(), Kind::Half).unwrap_err().to_string();
    assert!(
        words.contains("0 NaN and 1 infinite") && words.contains("[1, 0]") && words.contains("dtype Half"),
        "{words}"
    );
}

#[test]
fn quantised_weights_are_refused_in_words() {
    let mut draft = Draft::of("qwen3");
    *draft.tensor(Q0) = Stored { dtype: Dtype::F8_E4M3, shape: vec![64, 64], bytes: vec![0; 4096] };
    draft.write();
    refusal(draft.path(), &[Q0, "is fp8, but its factors", "_scale_inv [1, 1] are missing", "128 by 128"]);
    *draft.tensor(Q0) = Stored { dtype: Dtype::F8_E5M2, shape: vec![64, 64], bytes: vec![0; 4096] };
    draft.write();
    refusal(
        draft.path(),
        &[Q0, "F8_E5M2", "F32, F16, BF16 and F64, and matrices of F8_E4M3 with factors of F32, BF16 or F16"],
    );
}

#[test]
fn a_folder_without_weights_says_what_it_holds_instead() {
    let draft = Draft::of("qwen3");
    draft.write_config();
    refusal(draft.path(), &["neither model.safetensors nor model.safetensors.index.json"]);
    fs::write(draft.path().join("m.Q4_1.gguf"), "").unwrap();
    refusal(draft.path(), &["GGUF", "longstraw convert"]);
    fs::write(draft.path().join("pytorch_model.bin"), "").unwrap();
    refusal(draft.path(), &["pytorch_model", "safetensors"]);
}

#[test]
fn random_weights_are_the_same_for_a_seed_and_of_sensible_scale() {
    let spec = Spec::read(&case("qwen2"), None).unwrap();
    let random = |seed, kind| Weights::random(&spec, seed, kind, Device::Cpu, ExpertShare::ALL).unwrap();
    let one = random(1, Kind::Float);
    assert!(same_bits(&one, &random(1, Kind::Float)));
    assert!(!same_bits(&one, &random(2, Kind::Float)));
    assert_ne!(one.digest(), random(2, Kind::Float).digest());
    for expected in spec.tensors() {
        let size: Vec<u64> = one.get(&expected.name).size().iter().map(|size| u64::try_from(*size).unwrap()).collect();
        assert_eq!(size, expected.shape);
    }
    let deviation = |name: &str| one.get(name).std(true).double_value(&[]);
    assert!((deviation(Q0) - 0.125).abs() < 0.005, "1/√64, not {}", deviation(Q0));
    assert!((deviation("model.layers.3.mlp.down_proj.weight") - 128_f64.sqrt().recip()).abs() < 0.005);
    assert!((one.get("model.norm.weight").min().double_value(&[]) - 1.0).abs() < f64::EPSILON);
    assert!(one.get("model.layers.0.self_attn.k_proj.bias").abs().max().double_value(&[]) < f64::EPSILON);
    let (first, second) = (one.get(Q0), one.get("model.layers.1.self_attn.q_proj.weight"));
    assert!(!first.equal(&second), "tensors differ from each other");
    assert!(random(1, Kind::BFloat16).get(Q0).equal(&random(1, Kind::Double).get(Q0).to_kind(Kind::BFloat16)));
}
