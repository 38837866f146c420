//! Adapters on disk: bit-equal after a round trip, refused in words when they do not match, never half-written.

use std::fs;
use std::path::Path;

use longstraw::model::adapter_file::{AdapterShape, CONFIG, VALUES, load, save};
use longstraw::model::lora::Adapter;
use longstraw::model::spec::Spec;
use longstraw::runtime::failure::{Classified, Exit};
use longstraw::runtime::units::as_dim;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::checkpoints::{Stored, case, read, write};

fn spec() -> Spec {
    Spec::read(&case("mistral"), None).unwrap()
}

fn shape(targets: &[&str]) -> AdapterShape {
    let targets = targets.iter().map(ToString::to_string).collect();
    AdapterShape { rank: 4, alpha: 8.0, targets, base_model: "models/some".to_owned(), rope_scaling: None }
}

fn entries(shape: &AdapterShape, kind: Kind) -> Vec<Adapter> {
    tch::manual_seed(7);
    let random = |rows: u64, columns: u64| Tensor::randn([as_dim(rows), as_dim(columns)], (kind, Device::Cpu));
    let linears = spec().adapted(Some(&shape.targets)).unwrap();
    linears
        .into_iter()
        .map(|linear| Adapter {
            a_ri: random(shape.rank, linear.inputs),
            b_or: random(linear.outputs, shape.rank),
            module: linear.module,
        })
        .collect()
}

fn saved(targets: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let shape = shape(targets);
    save(folder.path(), &shape, &entries(&shape, Kind::Float)).unwrap();
    folder
}

#[track_caller]
fn refusal(folder: &Path, wanted: Option<&AdapterShape>, parts: &[&str]) {
    let error = load(folder, &spec(), wanted, Kind::Float, Device::Cpu).unwrap_err();
    assert_eq!(error.exit(), Exit::Data);
    let words = error.to_string();
    assert_eq!(words.lines().count(), 1, "{words}");
    for part in [&folder.display().to_string()[..]].iter().chain(parts) {
        assert!(words.contains(part), "{part:?} is not in: {words}");
    }
}

fn edit_config(folder: &Path, changes: &Value) {
    let file = folder.join(CONFIG);
    let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    fs::write(file, config.to_string()).unwrap();
}

#[test]
fn a_round_trip_is_bit_equal_and_in_canonical_order() {
    for targets in [&["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"][..], &["v_proj"]] {
        let shape = shape(targets);
        let entries = entries(&shape, Kind::Float);
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("not/there/yet");
        save(&folder, &shape, &entries).unwrap();
        let mut names: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, [CONFIG, VALUES], "nothing else remains");
        let (read, loaded) = load(&folder, &spec(), Some(&shape), Kind::Float, Device::Cpu).unwrap();
        assert_eq!(read, shape);
        assert_eq!(loaded.len(), entries.len());
        for (loaded, entry) in loaded.iter().zip(&entries) {
            assert_eq!(loaded.module, entry.module);
            assert!(loaded.a_ri.equal(&entry.a_ri) && loaded.b_or.equal(&entry.b_or), "{}", entry.module);
        }
    }
}

#[test]
fn the_files_have_pefts_names_in_float32() {
    let folder = tempfile::tempdir().unwrap();
    let shape = AdapterShape { alpha: 2.5, ..shape(&["q_proj"]) };
    save(folder.path(), &shape, &entries(&shape, Kind::Double)).unwrap();
    let tensors = read(&folder.path().join(VALUES));
    assert_eq!(tensors.len(), 8);
    assert_eq!(tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape, [4, 64]);
    assert_eq!(tensors["base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight"].shape, [96, 4]);
    assert!(tensors.values().all(|stored| stored.dtype == safetensors::Dtype::F32));
    let config: Value = serde_json::from_slice(&fs::read(folder.path().join(CONFIG)).unwrap()).unwrap();
    assert_eq!(
        (&config["peft_type"], &config["task_type"], &config["bias"]),
        (&json!("LORA"), &json!("CAUSAL_LM"), &json!("none"))
    );
    assert_eq!(
        (&config["r"], &config["lora_alpha"], &config["target_modules"]),
        (&json!(4), &json!(2.5), &json!(["q_proj"]))
    );
    assert_eq!(config["base_model_name_or_path"], "models/some");
    let (read, loaded) = load(folder.path(), &spec(), None, Kind::BFloat16, Device::Cpu).unwrap();
    assert!((read.alpha - 2.5).abs() < f64::EPSILON);
    assert_eq!(loaded[0].a_ri.kind(), Kind::BFloat16);
}

#[test]
fn saving_again_replaces_both_files() {
    let folder = saved(&["q_proj", "v_proj"]);
    let shape = AdapterShape { alpha: 16.0, ..shape(&["up_proj"]) };
    save(folder.path(), &shape, &entries(&shape, Kind::Float)).unwrap();
    let (read, loaded) = load(folder.path(), &spec(), Some(&shape), Kind::Float, Device::Cpu).unwrap();
    assert_eq!((read, loaded.len()), (shape, 4));
}

#[test]
fn a_failed_save_leaves_nothing_half_written() {
    let folder = tempfile::tempdir().unwrap();
    let shape = shape(&["q_proj"]);
    // The place of the config's partial file is taken by a folder, so the second file cannot be begun.
    fs::create_dir(folder.path().join(format!(".{CONFIG}.partial"))).unwrap();
    let error = save(folder.path(), &shape, &entries(&shape, Kind::Float)).unwrap_err();
    assert_eq!(error.exit(), Exit::Data);
    assert!(error.to_string().contains(CONFIG), "{error}");
    assert!(!folder.path().join(VALUES).exists());
    assert!(!folder.path().join(format!(".{VALUES}.partial")).exists());
    let below_a_file = folder.path().join("file/below");
    fs::write(folder.path().join("file"), "").unwrap();
    assert!(save(&below_a_file, &shape, &entries(&shape, Kind::Float)).is_err());
}

#[test]
fn what_the_run_asks_for_must_be_what_is_there() {
    let folder = saved(&["q_proj", "v_proj"]);
    let wanted = AdapterShape { rank: 8, alpha: 32.0, ..shape(&["q_proj", "k_proj"]) };
    let parts =
        ["`r` is 4; it must be 8", "`lora_alpha` is 8; it must be 32", "k_proj, q_proj", "q_proj, v_proj", "[lora]"];
    refusal(folder.path(), Some(&wanted), &parts);
    let reordered = AdapterShape { base_model: "elsewhere".to_owned(), ..shape(&["v_proj", "q_proj"]) };
    assert!(load(folder.path(), &spec(), Some(&reordered), Kind::Float, Device::Cpu).is_ok());
}

#[test]
fn tensors_that_do_not_match_stand_in_one_message() {
    let folder = saved(&["q_proj", "v_proj"]);
    let file = folder.path().join(VALUES);
    let mut tensors = read(&file);
    let name =
        |layer: usize, half: &str| format!("base_model.model.model.layers.{layer}.self_attn.q_proj.{half}.weight");
    tensors.remove(&name(0, "lora_A"));
    tensors.get_mut(&name(1, "lora_B")).unwrap().shape = vec![4, 96];
    tensors.insert(name(9, "lora_A"), Stored::float(&[4, 64], &[0.0; 256]));
    write(&file, &tensors);
    let missing = format!("{} [4, 64] is missing", name(0, "lora_A"));
    let reshaped = format!("{} is [4, 96], the model and the rank ask for [96, 4]", name(1, "lora_B"));
    let extra = format!("{} [4, 64] belongs to none", name(9, "lora_A"));
    refusal(folder.path(), None, &[&missing, &reshaped, &extra]);
}

#[test]
fn values_that_are_not_finite_are_refused() {
    let folder = saved(&["q_proj"]);
    let file = folder.path().join(VALUES);
    let mut tensors = read(&file);
    tensors.values_mut().next().unwrap().set(5, f32::NAN);
    write(&file, &tensors);
    refusal(folder.path(), None, &["lora_A.weight has 1 values of 256 that are NaN or infinite"]);
}

#[test]
fn variants_of_lora_that_are_not_computed_are_refused_by_key() {
    let folder = saved(&["q_proj"]);
    edit_config(
        folder.path(),
        &json!({"use_dora": true, "bias": "all", "rank_pattern": {"q_proj": 2}, "r": 0,
        "peft_type": "IA3", "lora_alpha": "big", "init_lora_weights": "pissa", "eva_config": {"rho": 2}}),
    );
    let parts = [
        "`use_dora` is true",
        "`bias` is \"all\"",
        "`rank_pattern`",
        "`r` is 0",
        "\"IA3\"",
        "\"pissa\"",
        "`eva_config`",
        "`lora_alpha`",
    ];
    refusal(folder.path(), None, &parts);
    let folder = saved(&["q_proj"]);
    edit_config(folder.path(), &json!({"target_modules": "all-linear"}));
    refusal(folder.path(), None, &["`target_modules` is \"all-linear\"", "a list"]);
    edit_config(folder.path(), &json!({"target_modules": ["q_proj", "lm_head"]}));
    refusal(folder.path(), None, &["lm_head", "q_proj, k_proj"]);
}

#[test]
fn absent_and_damaged_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    refusal(folder.path(), None, &[CONFIG, "No such file"]);
    let folder = saved(&["q_proj"]);
    let file = folder.path().join(VALUES);
    let whole = fs::read(&file).unwrap();
    fs::write(&file, &whole[..whole.len() - 4]).unwrap();
    refusal(folder.path(), None, &[VALUES]);
    fs::remove_file(&file).unwrap();
    refusal(folder.path(), None, &[VALUES, "No such file"]);
    fs::write(folder.path().join(CONFIG), "{").unwrap();
    refusal(folder.path(), None, &[CONFIG, "not a JSON object"]);
}
