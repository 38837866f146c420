//! Families with gated delta rules: what their configs say, what they hold, and what is refused.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use longstraw::model::parts::{DeltaSpec, ExpertSpec, Router};
use longstraw::model::rope::{RopeSpec, Scaling};
use longstraw::model::spec::{Biases, BlockNorms, EXPERT_PROJECTIONS, NormForm, Spec};
use longstraw::model::weights::{Error, ExpertShare, Form, Opening, Share, Weights, ZeroWeights};
use longstraw::runtime::failure::{Classified, Exit};
use longstraw::runtime::units::LayerIndex;
use longstraw::tensor::bytes::bytes_of;
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use tch::{Device, Kind};

use crate::checkpoints::{Draft, Stored, Tensors, case, read};
use crate::experts::join;

const FAMILIES: [(&str, &str); 3] =
    [("qwen3_5", "qwen3_5_text"), ("qwen3_5_moe", "qwen3_5_moe_text"), ("qwen3_next", "qwen3_next")];
/// Layers of every case: three with a delta rule, one with attention.
const RULES: [bool; 4] = [true, true, true, false];
const SMALL: [&str; 3] = ["A_log", "dt_bias", "norm.weight"];

fn small(layer: usize, name: &str) -> String {
    format!("model.layers.{layer}.linear_attn.{name}")
}

fn composite() -> PathBuf {
    case("qwen3_5").with_file_name("composite")
}

/// The folders of all four cases.
fn folders() -> Vec<PathBuf> {
    FAMILIES.iter().map(|(folder, _)| case(folder)).chain([composite()]).collect()
}

fn load(folder: &Path, kind: Kind) -> Result<Weights, Error> {
    Weights::load(folder, &Spec::read(folder, None).unwrap(), kind, Device::Cpu, ExpertShare::ALL)
}

/// Few enough keys that the defaults of the family stand for the others.
fn bare(family: &str) -> Map<String, Value> {
    let mut config = json!({"model_type": family, "hidden_size": 64, "num_hidden_layers": 8});
    config.as_object_mut().unwrap().clone()
}

fn with(mut config: Map<String, Value>, changes: &Value) -> Map<String, Value> {
    config.extend(changes.as_object().unwrap().clone());
    config
}

fn spec(config: &Map<String, Value>) -> Spec {
    Spec::from_config(config, None, Path::new("config.json")).unwrap()
}

#[track_caller]
fn refuses(config: &Map<String, Value>, parts: &[&str]) {
    let error = Spec::from_config(config, None, Path::new("config.json")).unwrap_err();
    assert_eq!(error.exit(), Exit::Data);
    let words = error.to_string();
    for part in parts {
        assert!(words.contains(part), "{part:?} is not in: {words}");
    }
}

#[test]
fn each_case_is_read_field_by_field() {
    for (folder, family) in FAMILIES {
        let read = Spec::read(&case(folder), None).unwrap();
        assert_eq!((read.model_type, read.vocabulary, read.width, read.layers), (family, 256, 64, 4));
        // Where every layer has experts: the shared one and a row's two, 32 wide each.
        assert_eq!(read.ffn_width, if folder == "qwen3_5_moe" { 96 } else { 128 });
        assert_eq!((read.query_heads, read.kv_heads, read.head_dim), (4, 2, 32));
        assert!((read.norm_eps - 1e-6).abs() < f64::EPSILON);
        assert_eq!(read.rope, RopeSpec { theta: 1e7, rotary_dim: 8, scaling: Scaling::Default });
        assert!(!read.tied_embeddings && read.qk_norm && read.gated_attention);
        assert_eq!((read.biases, &read.window[..]), (Biases::default(), &[None; 4][..]));
        assert_eq!((read.max_positions, read.bos, &read.eos[..]), (512, None, &[][..]));
        assert_eq!((read.norm, read.block_norms), (NormForm::OnePlusWeight, BlockNorms::Two));
        assert_eq!(read.activation.name(), "silu");
        assert_eq!((read.score_scalar, read.sliding_rope, read.scaled_embeddings), (None, None, false));
        assert_eq!((read.logit_cap, &read.latent), (None, &None));
        let joined = folder == "qwen3_next";
        let rule = DeltaSpec {
            key_heads: 2,
            value_heads: 4,
            key_dim: 16,
            value_dim: 16,
            taps: 4,
            joined,
            layers: RULES.to_vec(),
        };
        assert_eq!(read.delta, Some(rule));
        let experts = ExpertSpec {
            count: 8,
            chosen: 2,
            width: 32,
            shared_width: 32,
            shared_gate: true,
            router: Router::Softmax,
            normalised: true,
            scaling: 1.0,
            groups: 1,
            kept_groups: 1,
            sparse: vec![true; 4],
        };
        assert_eq!(read.experts, (folder != "qwen3_5").then_some(experts));
    }
    let read = Spec::read(&composite(), None).unwrap();
    assert_eq!((read.model_type, read.vocabulary, read.width, read.ffn_width), ("qwen3_5_text", 64, 32, 48));
    assert_eq!((read.query_heads, read.kv_heads, read.head_dim, read.rope.rotary_dim), (2, 1, 16, 4));
    assert_eq!((read.delta.unwrap().channels(), read.experts, read.tied_embeddings), (64, None, false));
}

#[test]
fn absent_keys_have_the_defaults_of_the_family() {
    for (_, family) in FAMILIES {
        let read = spec(&bare(family));
        let next = family == "qwen3_next";
        assert_eq!(read.vocabulary, if next { 151_936 } else { 248_320 });
        assert_eq!((read.query_heads, read.head_dim, read.max_positions), (16, 256, 32_768));
        assert_eq!(read.kv_heads, if family == "qwen3_5_text" { 4 } else { 2 });
        assert_eq!(read.rope, RopeSpec { theta: 10_000.0, rotary_dim: 64, scaling: Scaling::Default });
        let ffn_width = match family {
            "qwen3_5_text" => 12_288,
            "qwen3_next" => 5632,
            _ => 512 + 8 * 512,
        };
        assert_eq!(read.ffn_width, ffn_width);
        let delta = read.delta.unwrap();
        assert_eq!(
            (delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.taps),
            (16, 32, 128, 128, 4)
        );
        assert_eq!((delta.joined, delta.layers), (next, RULES.repeat(2)));
        let experts = read.experts.map(|own| (own.count, own.chosen, own.width, own.shared_width, own.normalised));
        let wanted = if next { (512, 10, 512, 512, true) } else { (256, 8, 512, 512, true) };
        assert_eq!(experts, (family != "qwen3_5_text").then_some(wanted));
    }
}

#[test]
fn layers_follow_from_the_list_or_from_the_interval() {
    let layers = |changes: Value| spec(&with(bare("qwen3_5_text"), &changes)).delta.unwrap().layers;
    let every = |n: usize| (1..=8).map(|layer| layer % n != 0).collect::<Vec<bool>>();
    assert_eq!(layers(json!({"full_attention_interval": 3})), every(3));
    let kind = |full: bool| if full { "full_attention" } else { "linear_attention" };
    let listed: Vec<&str> = (0..8).map(|layer| kind(layer < 2)).collect();
    let wanted: Vec<bool> = (0..8).map(|layer| layer >= 2).collect();
    assert_eq!(layers(json!({"layer_types": listed, "full_attention_interval": 3})), wanted);
    let unknown = json!({"layer_types": vec!["sliding_attention"; 8]});
    refuses(&with(bare("qwen3_next"), &unknown), &["`layer_types`", "sliding_attention", "\"linear_attention\""]);
    refuses(&with(bare("qwen3_next"), &json!({"layer_types": ["full_attention"]})), &["1 entries for 8 layers"]);
}

#[test]
fn the_share_of_rotating_dimensions_is_read_in_both_spellings() {
    let rope = |changes: Value, scaling: Option<&Value>| {
        let config = with(bare("qwen3_5_text"), &changes);
        let read = Spec::from_config(&config, scaling, Path::new("config.json")).unwrap();
        (read.rope.rotary_dim, read.rope.theta)
    };
    let new = json!({"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 5e6}});
    let old = json!({"partial_rotary_factor": 0.5, "rope_theta": 5e6, "rope_scaling": null});
    assert_eq!(rope(new.clone(), None), (128, 5e6));
    assert_eq!(rope(old.clone(), None), (128, 5e6));
    // Rounded down: 0.34 of 256 is 87.04; of 200, 68.
    assert_eq!(rope(json!({"partial_rotary_factor": 0.34, "head_dim": 200}), None).0, 68);
    // The table goes before the top level, and a scaling of the run keeps what it does not state.
    let both = with(old.as_object().unwrap().clone(), &json!({"rope_parameters": {"partial_rotary_factor": 1.0}}));
    assert_eq!(rope(Value::Object(both), None), (256, 5e6));
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262_144,
        "mrope_section": [11, 11, 10], "mrope_interleaved": true});
    assert_eq!(rope(new, Some(&yarn)), (128, 5e6));
    assert_eq!(rope(old, Some(&yarn)), (128, 5e6));
    assert_eq!(rope(json!({}), Some(&yarn)), (64, 10_000.0));
    for share in [json!(0.13), json!(1.5), json!(0.001), json!(-1), json!("half")] {
        refuses(&with(bare("qwen3_next"), &json!({"partial_rotary_factor": share})), &["partial_rotary_factor` is "]);
        let table = json!({"rope_parameters": {"partial_rotary_factor": share}});
        refuses(&with(bare("qwen3_next"), &table), &["partial_rotary_factor` is "]);
    }
}

#[test]
fn keys_about_positions_of_images_and_about_what_is_not_trained_change_nothing() {
    let keys = json!({"mamba_ssm_dtype": "bfloat16", "mtp_num_hidden_layers": 1, "router_aux_loss_coef": 0.1,
        "mtp_use_dedicated_embeddings": false, "output_router_logits": true, "use_cache": false, "attn_output_gate": true,
        "output_gate_type": "silu", "initializer_range": 0.1, "attention_dropout": 0.0, "rope_parameters": {
        "rope_type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": true}});
    for (_, family) in FAMILIES {
        assert_eq!(spec(&with(bare(family), &keys)).canonical(), spec(&bare(family)).canonical());
    }
    // Neither is read where every layer has experts whose scores are always normalised.
    let experts = json!({"norm_topk_prob": false, "mlp_only_layers": [1], "decoder_sparse_step": 2});
    let everywhere = bare("qwen3_5_moe_text");
    assert_eq!(spec(&with(everywhere.clone(), &experts)).canonical(), spec(&everywhere).canonical());
    let some = spec(&with(bare("qwen3_next"), &experts)).experts.unwrap();
    assert!(!some.normalised);
    assert_eq!(some.sparse, [false, false, false, true, false, true, false, true]);
}

#[test]
fn what_is_not_computed_is_refused_by_key() {
    for (_, family) in FAMILIES {
        let says = |changes: Value, parts: &[&str]| refuses(&with(bare(family), &changes), parts);
        says(json!({"attn_output_gate": false}), &["`attn_output_gate` is false"]);
        says(json!({"output_gate_type": "sigmoid"}), &["`output_gate_type` is \"sigmoid\"", "\"swish\""]);
        says(
            json!({"linear_num_value_heads": 24}),
            &["`linear_num_value_heads` is 24", "multiple of `linear_num_key_heads`"],
        );
        says(json!({"linear_conv_kernel_dim": 0}), &["`linear_conv_kernel_dim` is 0"]);
        says(json!({"hidden_act": "gelu"}), &["`hidden_act` is \"gelu\""]);
        says(json!({"hidden_size": 99_999}), &["`hidden_size` is 99999", "32768"]);
        says(json!({"rope_parameters": {"rope_type": "mrope"}}), &["rope_parameters.rope_type` is \"mrope\""]);
    }
    for family in ["qwen3_5_moe_text", "qwen3_next"] {
        let changes = json!({"shared_expert_intermediate_size": 0});
        refuses(&with(bare(family), &changes), &["`shared_expert_intermediate_size` is 0"]);
    }
    let biased = spec(&with(bare("qwen3_5_text"), &json!({"attention_bias": true})));
    let tensors = biased.tensors();
    let bias = tensors.iter().find(|tensor| tensor.name == "model.layers.3.self_attn.q_proj.bias").unwrap();
    assert_eq!(bias.shape, [2 * 16 * 256], "of queries and of gates");
    assert!(tensors.iter().all(|tensor| !tensor.name.contains("linear_attn") || !tensor.name.ends_with("proj.bias")));
}

#[test]
fn a_wrapper_gives_the_spec_of_its_text_model() {
    for (wrapper, family) in [("qwen3_5", "qwen3_5_text"), ("qwen3_5_moe", "qwen3_5_moe_text")] {
        let alone = bare(family);
        let wrapped = |text: Map<String, Value>, outside: &Value| {
            let whole = json!({"model_type": wrapper, "text_config": text, "vision_config": {"depth": 1}});
            with(whole.as_object().unwrap().clone(), outside)
        };
        let plain = spec(&alone).canonical();
        assert_eq!(spec(&wrapped(alone.clone(), &json!({}))).canonical(), plain);
        let mut unnamed = alone.clone();
        unnamed.remove("model_type");
        assert_eq!(spec(&wrapped(unnamed, &json!({}))).canonical(), plain);
        let outside = json!({"tie_word_embeddings": true, "eos_token_id": [7, 8]});
        let read = spec(&wrapped(alone.clone(), &outside));
        assert_eq!((read.tied_embeddings, &read.eos[..]), (true, &[7, 8][..]));
        let inside = json!({"tie_word_embeddings": false, "eos_token_id": 9});
        let read = spec(&wrapped(with(alone.clone(), &inside), &outside));
        assert_eq!((read.tied_embeddings, &read.eos[..]), (false, &[9][..]));
        // The wrapper's name is no family of its own.
        refuses(
            &bare(wrapper),
            &[&format!("`model_type` is \"{wrapper}\""), &format!("nearest of these is \"{wrapper}")],
        );
    }
}

#[test]
fn all_tensors_of_a_case_are_expected_and_loaded_as_they_are() {
    for folder in folders() {
        let spec = Spec::read(&folder, None).unwrap();
        let stored = read(&folder.join("model.safetensors"));
        let weights = load(&folder, Kind::Float).unwrap();
        let plain = |name: &str| name.replacen("model.language_model.", "model.", 1);
        let is_text = |name: &&String| !name.starts_with("model.visual.") && !name.starts_with("mtp.");
        let mut single = BTreeSet::new();
        for (name, stored) in stored.iter().filter(|(name, _)| is_text(name)) {
            if let Some((before, _)) = name.split_once(".mlp.experts.") {
                single.insert(before.to_owned());
            } else {
                assert_eq!(bytes_of(&weights.get(&plain(name))).unwrap(), stored.bytes, "{name}");
            }
        }
        assert_eq!(single.len(), spec.experts.as_ref().map_or(0, |_| 4));
        let skipped = stored.len() - stored.keys().filter(is_text).count();
        let unread = if skipped == 0 {
            Vec::new()
        } else {
            vec!["tensors of the checkpoint that are not read: model.visual.* (1), mtp.* (1)"]
        };
        assert_eq!(weights.notes(), unread);
    }
}

#[test]
fn experts_of_a_case_stand_in_two_tensors_a_layer_and_the_digest_does_not_depend_on_the_file() {
    // Joined in the file: as they are.
    let folder = case("qwen3_5_moe");
    let (stored, weights) = (read(&folder.join("model.safetensors")), load(&folder, Kind::Float).unwrap());
    for layer in (0..4).map(LayerIndex) {
        for name in [ExpertSpec::gate_up_name(layer), ExpertSpec::down_name(layer)] {
            assert_eq!(bytes_of(&weights.get(&name)).unwrap(), stored[&name].bytes, "{name}");
        }
    }
    let config: Value = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    for mut draft in [Draft::made_of(&config), Draft::of("qwen3_next")] {
        let load = |draft: &Draft| {
            draft.write();
            let weights = load(draft.path(), Kind::Float).unwrap();
            let content: Vec<_> = weights.iter().map(|(name, x)| (name.to_owned(), bytes_of(&x).unwrap())).collect();
            (weights.digest().to_owned(), content)
        };
        let single = load(&draft);
        let tensors = draft.tensors.len();
        join(&mut draft);
        assert_eq!(draft.tensors.len(), tensors - 4 * 8 * 3 + 4 * 2);
        assert_eq!(load(&draft), single);
    }
}

/// The upper halves of float32 values: bfloat16.
fn halved(stored: &Stored) -> Stored {
    let bytes = stored.bytes.chunks(4).flat_map(|bytes| [bytes[2], bytes[3]]).collect();
    Stored { dtype: Dtype::BF16, shape: stored.shape.clone(), bytes }
}

#[test]
fn small_tensors_of_a_delta_rule_keep_their_bits_in_a_model_of_bfloat16() {
    let whole = Draft::of("qwen3_5");
    let is_small = |name: &str| SMALL.iter().any(|end| name.ends_with(&format!(".linear_attn.{end}")));
    // In the file float32 as in Qwen3.5, or all bfloat16 as in Qwen3.6.
    for small_as_float in [true, false] {
        let mut draft = Draft::of("qwen3_5");
        let convert = |(name, stored): (&String, &Stored)| {
            let stored = if small_as_float && is_small(name) { stored.clone() } else { halved(stored) };
            (name.clone(), stored)
        };
        draft.tensors = whole.tensors.iter().map(convert).collect::<Tensors>();
        draft.write();
        let weights = load(draft.path(), Kind::BFloat16).unwrap();
        for (name, stored) in &draft.tensors {
            let held = weights.get(name);
            assert_eq!(held.kind(), if is_small(name) { Kind::Float } else { Kind::BFloat16 }, "{name}");
            if is_small(name) && !small_as_float {
                assert_eq!(bytes_of(&held.to_kind(Kind::BFloat16)).unwrap(), stored.bytes, "{name}");
            } else {
                assert_eq!(bytes_of(&held).unwrap(), stored.bytes, "{name}");
            }
        }
        // Also through another dtype and in a part of the model.
        let spec = Spec::read(draft.path(), None).unwrap();
        for other in [weights.converted(Kind::BFloat16), weights.part(&spec.first_layers(2), Kind::BFloat16)] {
            for name in SMALL {
                let name = small(1, name);
                assert_eq!(bytes_of(&other.get(&name)).unwrap(), bytes_of(&weights.get(&name)).unwrap());
            }
        }
        let double = weights.converted(Kind::Double);
        assert!(double.iter().all(|(_, tensor)| tensor.kind() == Kind::Double));
    }
}

#[test]
fn the_first_layers_are_a_model_of_their_own() {
    for (folder, _) in FAMILIES {
        let whole = Spec::read(&case(folder), None).unwrap();
        for layers in 1..=4 {
            let first = whole.first_layers(layers);
            let delta = first.delta.as_ref().unwrap();
            assert_eq!((first.layers, &delta.layers[..]), (layers, &RULES[..layers]));
            assert!(first.experts.as_ref().is_none_or(|experts| experts.sparse.len() == layers));
            let names =
                |spec: &Spec| -> BTreeSet<String> { spec.tensors().into_iter().map(|tensor| tensor.name).collect() };
            let beyond = |name: &str| {
                let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
                layer.is_some_and(|layer| layer.parse::<usize>().unwrap() >= layers)
            };
            let wanted: BTreeSet<String> = names(&whole).into_iter().filter(|name| !beyond(name)).collect();
            assert_eq!(names(&first), wanted);
            let elements: u64 = first.tensors().iter().map(longstraw::model::spec::Expected::elements).sum();
            assert_eq!(first.parameter_count(), elements);
        }
    }
}

#[test]
fn the_published_27b_has_its_851_tensors_and_its_targets() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/shapes/qwen3.6-27b");
    let read = Spec::read(&folder, None).unwrap();
    assert_eq!((read.tensors().len(), read.parameter_count(), &read.eos[..]), (851, 26_895_998_464, &[248_044][..]));
    let rule = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"];
    let others = ["gate_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"];
    assert_eq!(read.projections(), [&rule[..], &others].concat());
    let joined = Spec::read(&case("qwen3_next"), None).unwrap().projections();
    assert_eq!(joined[..3], ["in_proj_qkvz", "in_proj_ba", "out_proj"]);
    assert_eq!(joined[joined.len() - 3..], EXPERT_PROJECTIONS);
}

#[test]
fn an_output_norm_of_zeros_is_refused_and_norms_that_add_one_may_be_zero() {
    let mut draft = Draft::of("qwen3_5");
    for name in
        ["model.norm.weight", "model.layers.3.self_attn.q_norm.weight", &small(0, "A_log"), &small(1, "dt_bias")]
    {
        draft.tensor(name).bytes.fill(0);
    }
    draft.write();
    load(draft.path(), Kind::Float).unwrap();
    for name in ["norm.weight", "conv1d.weight"] {
        draft.tensor(&small(2, name)).bytes.fill(0);
    }
    draft.write();
    let words = load(draft.path(), Kind::Float).unwrap_err().to_string();
    for part in [
        format!("{} [16] is all zero", small(2, "norm.weight")),
        format!("{} [128, 1, 4] is all", small(2, "conv1d.weight")),
    ] {
        assert!(words.contains(&part), "{part} is not in: {words}");
    }
    assert!(!words.contains("A_log") && !words.contains("q_norm"), "{words}");
}

#[test]
fn tensors_of_the_other_layer_kind_or_form_are_missing_and_in_excess() {
    let mut draft = Draft::of("qwen3_5");
    draft.config.insert(
        "layer_types".to_owned(),
        json!(["full_attention", "linear_attention", "linear_attention", "full_attention"]),
    );
    draft.write();
    let words = load(draft.path(), Kind::Float).unwrap_err().to_string();
    for part in [
        "model.layers.0.self_attn.q_proj.weight [256, 64] is missing",
        "model.layers.0.linear_attn.A_log [4] is not part",
    ] {
        assert!(words.contains(part), "{part} is not in: {words}");
    }
    let mut draft = Draft::of("qwen3_next");
    draft.config.insert("model_type".to_owned(), json!("qwen3_5_moe_text"));
    draft.write();
    let words = load(draft.path(), Kind::Float).unwrap_err().to_string();
    assert!(words.contains("model.layers.0.linear_attn.in_proj_qkv.weight [128, 64] is missing"), "{words}");
}

#[test]
fn projections_in_fp8_are_the_same_numbers_in_both_forms_and_the_rule_stays_as_it_is() {
    let mut draft = Draft::of("qwen3_next");
    let plain = draft.tensors.clone();
    draft.linears_in_fp8(0.01);
    draft.write();
    let spec = Spec::read(draft.path(), None).unwrap();
    let as_form = |form| {
        let opening = Opening::open(draft.path(), &spec, None).unwrap().held_as(form).unwrap();
        let loading =
            opening.load(&spec, Kind::BFloat16, Device::Cpu, ZeroWeights::Refuse, Share::ALL, ExpertShare::ALL);
        loading.unwrap().finish([], false)
    };
    let (dequantised, held) = (as_form(Form::Plain), as_form(Form::Fp8));
    for (name, tensor) in dequantised.iter() {
        assert!(held.get(name).equal(&tensor), "{name}");
    }
    for name in SMALL {
        assert_eq!(bytes_of(&held.get(&small(0, name))).unwrap(), plain[&small(0, name)].bytes);
    }
    assert!(held.bytes() < dequantised.bytes());
}

#[test]
fn random_heads_remember_from_few_positions_to_many() {
    let config = json!({"num_hidden_layers": 4, "linear_num_value_heads": 64, "vocab_size": 64, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "intermediate_size": 64});
    let spec = spec(&with(bare("qwen3_5_text"), &config));
    for kind in [Kind::Float, Kind::BFloat16] {
        let weights = Weights::random(&spec, 5, kind, Device::Cpu, ExpertShare::ALL).unwrap();
        let mut decays: Vec<f64> = Vec::new();
        for layer in 0..3 {
            let [log_rate, bias] = ["A_log", "dt_bias"].map(|name| weights.get(&small(layer, name)));
            assert_eq!((log_rate.kind(), bias.kind()), (Kind::Float, Kind::Float));
            let rate = log_rate.to_kind(Kind::Double).exp() * bias.to_kind(Kind::Double).softplus();
            decays.extend(Vec::<f64>::try_from((-rate).exp()).unwrap());
            let convolution = weights.get(&small(layer, "conv1d.weight")).to_kind(Kind::Double);
            let deviation = convolution.std(true).double_value(&[]);
            assert!((deviation - 0.5).abs() < 0.02, "1/√4, not {deviation}");
            assert!((weights.get(&small(layer, "norm.weight")) - 1.0).abs().max().double_value(&[]) < f64::EPSILON);
        }
        assert!(decays.iter().all(|decay| (0.499_999..0.9995).contains(decay)), "{decays:?}");
        // Logarithms of rates are uniform over 7: of 192 heads a seventh, 27 ± 5, halve within 2.7 positions, and as many after
        // 403 or more; four standard deviations are left.
        let short = decays.iter().filter(|decay| **decay < 0.775).count();
        let long = decays.iter().filter(|decay| **decay > 0.998_28).count();
        assert!((8..=47).contains(&short) && (8..=47).contains(&long), "{short}, {long} of {decays:?}");
        assert!(weights.get("model.norm.weight").abs().max().double_value(&[]) < f64::EPSILON);
    }
}
