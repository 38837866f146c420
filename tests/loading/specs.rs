//! What published configs say, and how those that cannot be computed are refused.

use std::fs;
use std::path::Path;

use longstraw::model::family;
use longstraw::model::rope::Scaling;
use longstraw::model::spec::{Biases, Error, Spec};
use longstraw::runtime::failure::{Classified, Exit};
use longstraw::runtime::units::Tokens;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::checkpoints::case;

/// The published config of Qwen3-8B, in the old spelling.
fn qwen3_8b() -> Map<String, Value> {
    let config = json!({
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "rope_scaling": null, "max_position_embeddings": 40_960,
        "attention_bias": false, "tie_word_embeddings": false, "use_sliding_window": false, "sliding_window": null,
        "max_window_layers": 36, "hidden_act": "silu", "bos_token_id": 151_643, "eos_token_id": 151_645
    });
    config.as_object().unwrap().clone()
}

fn with(mut config: Map<String, Value>, changes: &Value) -> Map<String, Value> {
    for (key, value) in changes.as_object().unwrap() {
        config.insert(key.clone(), value.clone());
    }
    config
}

fn without(mut config: Map<String, Value>, keys: &[&str]) -> Map<String, Value> {
    config.retain(|key, _| !keys.contains(&key.as_str()));
    config
}

fn spec(config: &Map<String, Value>) -> Spec {
    Spec::from_config(config, None, Path::new("here/config.json")).unwrap()
}

fn refusal(config: &Map<String, Value>) -> String {
    let error = Spec::from_config(config, None, Path::new("here/config.json")).unwrap_err();
    assert_eq!(error.exit(), Exit::Data);
    let words = error.to_string();
    assert!(words.starts_with("here/config.json: "), "{words}");
    words
}

#[track_caller]
fn assert_says(words: &str, parts: &[&str]) {
    for part in parts {
        assert!(words.contains(part), "{part:?} is not in: {words}");
    }
}

#[test]
fn each_family_reads_its_reference_config() {
    for name in ["qwen3", "qwen2", "llama", "mistral"] {
        let read = Spec::read(&case(name), None).unwrap();
        assert_eq!(read.model_type, name);
        assert_eq!((read.vocabulary, read.width, read.ffn_width, read.layers), (256, 64, 128, 4), "{name}");
        assert_eq!((read.query_heads, read.kv_heads), (4, 2), "{name}");
        assert_eq!(read.head_dim, if name == "mistral" { 24 } else { 16 });
        assert_eq!(read.rope.rotary_dim, read.head_dim);
        assert_eq!(read.qk_norm, name == "qwen3");
        let biased = name == "qwen2";
        assert_eq!(read.biases, Biases { q: biased, k: biased, v: biased, o: false, mlp: false }, "{name}");
        assert_eq!(read.window, [None; 4]);
        assert_eq!(matches!(read.rope.scaling, Scaling::Llama3 { .. }), name == "llama");
        assert_eq!(read.eos, if matches!(name, "llama" | "mistral") { vec![2] } else { vec![] });
        assert_eq!(read.bos, if matches!(name, "llama" | "mistral") { Some(1) } else { None });
        assert!(!read.tied_embeddings);
    }
}

#[test]
fn the_path_of_a_bare_config_is_read_too() {
    let by_file = Spec::read(&case("llama").join("config.json"), None).unwrap();
    assert_eq!(by_file.canonical(), Spec::read(&case("llama"), None).unwrap().canonical());
}

#[test]
fn the_published_8b_has_its_published_number_of_parameters() {
    let read = spec(&qwen3_8b());
    assert_eq!(read.parameter_count(), 8_190_735_360);
    assert_eq!((read.bos, &read.eos[..]), (Some(151_643), &[151_645][..]));
    assert_eq!(read.tensors().len(), 3 + 36 * 11);
}

#[test]
fn old_and_new_rope_spellings_and_a_nested_text_config_give_one_spec() {
    let old = with(
        qwen3_8b(),
        &json!({"rope_scaling": {"type": "yarn", "factor": 4.0, "attn_factor": 9.0,
        "original_max_position_embeddings": 32_768}}),
    );
    let new = with(
        without(qwen3_8b(), &["rope_theta", "rope_scaling"]),
        &json!({"rope_parameters": {
        "rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}}),
    );
    let mut nested = Map::new();
    nested.insert("model_type".to_owned(), json!("some_wrapper"));
    nested.insert("text_config".to_owned(), Value::Object(old.clone()));
    assert_eq!(spec(&old).canonical(), spec(&new).canonical());
    assert_eq!(spec(&old).canonical(), spec(&nested).canonical());
    assert_ne!(spec(&old).canonical(), spec(&qwen3_8b()).canonical());
}

#[test]
fn a_tie_may_stand_beside_the_text_config() {
    let mut nested = Map::new();
    nested.insert("text_config".to_owned(), Value::Object(without(qwen3_8b(), &["tie_word_embeddings"])));
    nested.insert("tie_word_embeddings".to_owned(), json!(true));
    let read = spec(&nested);
    assert!(read.tied_embeddings);
    assert_eq!(read.parameter_count(), 8_190_735_360 - 151_936 * 4096);
    assert!(read.tensors().iter().all(|tensor| tensor.name != "lm_head.weight"));
}

#[test]
fn a_missing_head_dim_is_the_familys_own() {
    let config = without(qwen3_8b(), &["head_dim"]);
    let small = json!({"hidden_size": 1024, "num_attention_heads": 16});
    assert_eq!(spec(&with(config.clone(), &small)).head_dim, 128);
    for family in ["qwen2", "llama", "mistral"] {
        let config = with(with(config.clone(), &small), &json!({"model_type": family}));
        assert_eq!(spec(&config).head_dim, 64, "{family}");
    }
    let uneven = json!({"model_type": "llama", "hidden_size": 1000, "num_attention_heads": 24});
    assert_says(&refusal(&with(config, &uneven)), &["`head_dim`", "1000", "24"]);
}

#[test]
fn biases_follow_the_family_and_its_switches() {
    let on = json!({"attention_bias": true, "mlp_bias": true});
    let of = |family: &str| spec(&with(with(qwen3_8b(), &on), &json!({"model_type": family}))).biases;
    assert_eq!(of("qwen3"), Biases { q: true, k: true, v: true, o: true, mlp: false });
    assert_eq!(of("qwen2"), Biases { q: true, k: true, v: true, o: false, mlp: false });
    assert_eq!(of("llama"), Biases { q: true, k: true, v: true, o: true, mlp: true });
    assert_eq!(of("mistral"), Biases::default());
}

#[test]
fn windows_follow_the_family() {
    let four = |changes: Value| {
        let config = with(qwen3_8b(), &json!({"num_hidden_layers": 4, "sliding_window": 100, "max_window_layers": 2}));
        spec(&with(config, &changes)).window
    };
    assert_eq!(four(json!({})), [None; 4], "not switched on");
    assert_eq!(four(json!({"use_sliding_window": true})), [None, None, Some(100), Some(100)]);
    let types = json!(["sliding_attention", "full_attention", "full_attention", "sliding_attention"]);
    assert_eq!(four(json!({"use_sliding_window": true, "layer_types": types})), [Some(100), None, None, Some(100)]);
    assert_eq!(four(json!({"model_type": "mistral"})), [Some(100); 4]);
    assert_eq!(four(json!({"model_type": "mistral", "sliding_window": null})), [None; 4]);
    let early = with(without(qwen3_8b(), &["sliding_window"]), &json!({"model_type": "mistral"}));
    assert_eq!(spec(&early).window, [Some(4096); 36], "the first release's window");
    assert_eq!(four(json!({"model_type": "llama"})), [None; 4]);
}

#[test]
fn layer_types_that_contradict_or_do_not_fit_are_refused() {
    let types = |count: usize, kind: &str| json!({"layer_types": vec![kind; count]});
    assert_says(&refusal(&with(qwen3_8b(), &types(3, "full_attention"))), &["`layer_types`", "3 entries", "36 layers"]);
    assert_says(&refusal(&with(qwen3_8b(), &types(36, "linear_attention"))), &["layer_types", "linear_attention"]);
    let llama = with(with(qwen3_8b(), &types(36, "sliding_attention")), &json!({"model_type": "llama"}));
    assert_says(&refusal(&llama), &["layer_types", "sliding_attention"]);
}

#[test]
fn an_unknown_model_type_names_the_known_ones_and_the_nearest() {
    let words = refusal(&with(qwen3_8b(), &json!({"model_type": "qwen4"})));
    assert_says(&words, &["`model_type` is \"qwen4\"", "qwen3, qwen2, llama, mistral", "nearest of these is \"qwen"]);
    assert_says(&refusal(&without(qwen3_8b(), &["model_type"])), &["`model_type` is missing"]);
    assert_eq!(family::model_types()[..4], ["qwen3", "qwen2", "llama", "mistral"]);
}

#[test]
fn fp8_in_blocks_of_128_by_128_changes_nothing_in_the_spec() {
    let fp8 = json!({"quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"]
    }});
    assert_eq!(spec(&with(qwen3_8b(), &fp8)).canonical(), spec(&qwen3_8b()).canonical());
}

#[test]
fn values_whose_maths_is_not_built_are_refused_with_key_and_value() {
    let says = |changes: Value, parts: &[&str]| assert_says(&refusal(&with(qwen3_8b(), &changes)), parts);
    says(json!({"hidden_act": "gelu"}), &["`hidden_act` is \"gelu\"", "silu"]);
    says(json!({"num_key_value_heads": 5}), &["`num_attention_heads` is 32", "`num_key_value_heads` is 5"]);
    says(json!({"quantization_config": {"quant_method": "fp8"}}), &["`quantization_config`", "fp8"]);
    for other in [
        json!({"quant_method": "fp8", "weight_block_size": [64, 128]}),
        json!({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}),
        json!({"quant_method": "gptq", "weight_block_size": [128, 128]}),
    ] {
        says(json!({"quantization_config": other}), &["`quantization_config`", "`weight_block_size` [128, 128]"]);
    }
    says(json!({"head_dim": 127}), &["`head_dim` is 127", "even"]);
    says(json!({"hidden_size": 0}), &["`hidden_size` is 0", "whole number"]);
    says(json!({"rms_norm_eps": "tiny"}), &["`rms_norm_eps` is \"tiny\"", "finite number"]);
    says(json!({"num_hidden_layers": 1_000_000}), &["`num_hidden_layers` is 1000000", "16384"]);
    says(json!({"eos_token_id": "end"}), &["`eos_token_id` is \"end\""]);
    says(json!({"tie_word_embeddings": 1}), &["`tie_word_embeddings` is 1", "true or false"]);
    says(json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}), &["`rope_scaling.rope_type`", "dynamic"]);
    says(json!({"rope_scaling": 4}), &["`rope_scaling` is 4", "table"]);
}

#[test]
fn all_problems_stand_in_one_message() {
    let config = with(
        without(qwen3_8b(), &["vocab_size", "intermediate_size"]),
        &json!({"hidden_act": "relu",
        "rms_norm_eps": -1, "rope_scaling": {"rope_type": "longrope"}}),
    );
    let words = refusal(&config);
    let parts =
        ["`vocab_size` is missing", "`intermediate_size` is missing", "relu", "`rms_norm_eps` is -1", "longrope"];
    assert_says(&words, &parts);
    assert_eq!(words.lines().count(), 1, "{words}");
    let nested = Map::from_iter([("text_config".to_owned(), Value::Object(config))]);
    assert_says(&refusal(&nested), &["`text_config.vocab_size` is missing", "`text_config.rms_norm_eps`"]);
}

#[test]
fn a_file_that_is_absent_or_no_object_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = Spec::read(folder.path(), None).unwrap_err();
    assert!(matches!(error, Error::Unreadable { .. }) && error.exit() == Exit::Data);
    assert_says(&error.to_string(), &["config.json", "No such file"]);
    for text in ["[1, 2]", "{\"model_type\": ", ""] {
        fs::write(folder.path().join("config.json"), text).unwrap();
        let error = Spec::read(folder.path(), None).unwrap_err();
        assert_eq!(error.exit(), Exit::Data);
        assert_says(&error.to_string(), &["config.json", "not a JSON object", "line 1"]);
    }
}

#[test]
fn linear_layers_come_layer_by_layer_with_their_sizes() {
    let read = Spec::read(&case("mistral"), None).unwrap();
    let linears = read.linear_layers();
    assert_eq!(linears.len(), 28);
    let sizes: Vec<_> = linears[..7].iter().map(|linear| (linear.projection, linear.inputs, linear.outputs)).collect();
    let wanted = [
        ("q_proj", 64, 96),
        ("k_proj", 64, 48),
        ("v_proj", 64, 48),
        ("o_proj", 96, 64),
        ("gate_proj", 64, 128),
        ("up_proj", 64, 128),
        ("down_proj", 128, 64),
    ];
    assert_eq!(sizes, wanted);
    assert_eq!(linears[7].module, "model.layers.1.self_attn.q_proj");
    assert_eq!(linears[27].module, "model.layers.3.mlp.down_proj");
}

#[test]
fn adapter_targets_are_put_in_order_or_refused_with_the_nearest() {
    let read = Spec::read(&case("qwen3"), None).unwrap();
    let names = |targets: &[&str]| targets.iter().map(ToString::to_string).collect::<Vec<_>>();
    let adapted = read.adapted(Some(&names(&["down_proj", "q_proj"]))).unwrap();
    let modules: Vec<&str> = adapted.iter().take(3).map(|linear| linear.module.as_str()).collect();
    let wanted = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"];
    assert_eq!(modules, wanted);
    assert_eq!(read.adapted(None).unwrap(), read.linear_layers());
    let error = read.adapted(Some(&names(&["q_porj"]))).unwrap_err();
    assert_eq!(error.exit(), Exit::Config);
    assert_says(&error.to_string(), &["\"q_porj\"", "qwen3", "nearest is \"q_proj\"", "down_proj"]);
    assert_says(&read.adapted(Some(&[])).unwrap_err().to_string(), &["empty", "q_proj"]);
}

#[test]
fn positions_beyond_the_native_context_are_said_in_words() {
    let plain = spec(&qwen3_8b());
    assert_eq!(plain.context_note(Tokens(40_960)), None);
    assert_says(&plain.context_note(Tokens(2_097_152)).unwrap(), &["2097152", "40960", "rope_scaling"]);
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768});
    let stretched = Spec::from_config(&qwen3_8b(), Some(&yarn), Path::new("config.json")).unwrap();
    assert_eq!(stretched.context_note(Tokens(131_072)), None);
    assert_says(&stretched.context_note(Tokens(131_073)).unwrap(), &["131073", "40960", "131072"]);
}

/// Digests of models are taken over these texts: a new difference of one family adds no field to another's.
#[test]
fn canonical_specs_of_the_first_families_never_change() {
    for (name, digest) in [
        ("qwen3", "d0abc0d6f6b9027ab614d239e3b7e035eca210e34b4cfb67f6a06761648e3b0b"),
        ("qwen2", "6feaf532e5fe17eab22728fd069299e14301560965cde08cf15057c6a070f06d"),
        ("llama", "1257827eb8f87b7b5848fdae7b875f6af49d4788e76623549a9a36948759cd28"),
        ("mistral", "063c3e06ef1cbd3f3f3179cf841d4fd211185f130ea83a7c7c8ff54d7352cdea"),
    ] {
        let canonical = Spec::read(&case(name), None).unwrap().canonical();
        assert_eq!(format!("{:x}", Sha256::digest(&canonical)), digest, "{canonical}");
    }
}
