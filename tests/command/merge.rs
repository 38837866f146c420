//! Adapters that are added to a copy of the model.

use std::fs;
use std::path::Path;

use safetensors::SafeTensors;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::checkpoints::case;
use super::room::Room;
use super::training::{config, lines, record};

/// Every tensor of a model or of adapters in a folder, in float64, by name.
fn tensors(folder: &Path) -> Vec<(String, Tensor)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let file = entry.unwrap().path();
        if !["model.safetensors", "adapter_model.safetensors"].iter().any(|name| file.ends_with(name)) {
            continue;
        }
        let bytes = fs::read(&file).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let values = view.data().chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap()));
            let shape: Vec<i64> = view.shape().iter().map(|&size| i64::try_from(size).unwrap()).collect();
            let tensor = Tensor::from_slice(&values.collect::<Vec<f32>>()).view(&shape[..]).to_kind(Kind::Double);
            all.push((name, tensor.to_device(Device::Cpu)));
        }
    }
    all.sort_by(|one, other| one.0.cmp(&other.0));
    all
}

fn of<'a>(tensors: &'a [(String, Tensor)], name: &str) -> Option<&'a Tensor> {
    tensors.iter().find(|(known, _)| known == name).map(|(_, tensor)| tensor)
}

#[test]
fn a_merged_model_has_the_adapters_in_its_weights_and_every_other_byte_of_the_base() {
    let model = case("qwen3");
    let room = Room::with(&[("config.toml", &config(&model)), ("train.jsonl", &lines(&[record(33, [4, 2, 2])]))]);
    room.alone(&["train", "--set", "run.steps=2"]).ended(0, &[]);
    room.alone(&["merge", "run", "merged/model"]).ended(0, &["with adapters added to", "28 layers"]);
    let merged = room.path().join("merged/model");
    let (before, after) = (tensors(&model), tensors(&merged));
    let adapters = tensors(&room.path().join("run/adapter"));
    assert_eq!(before.len(), after.len());
    let mut moved = 0;
    for ((name, old), (same, new)) in before.iter().zip(&after) {
        assert_eq!(name, same);
        let module = name.trim_end_matches(".weight");
        let half = |half: &str| of(&adapters, &format!("base_model.model.{module}.{half}.weight"));
        let Some((a_ri, b_or)) = half("lora_A").zip(half("lora_B")) else {
            assert!(old.equal(new), "{name} has no adapter");
            continue;
        };
        // Rank 4 and alpha 8.
        let wanted = (old + b_or.matmul(a_ri) * 2.0).to_kind(Kind::Float).to_kind(Kind::Double);
        // A product of libtorch may add up in another order, half a unit of float32 apart at most.
        let apart = ((new - &wanted) / wanted.abs().clamp_min(1e-3)).abs().max().double_value(&[]);
        assert!(apart <= 1.2e-7, "{name}: {apart}");
        moved += i32::from(!old.equal(new));
    }
    assert_eq!(moved, 28, "seven projections of four layers have learnt");
    assert_eq!(fs::read(model.join("config.json")).unwrap(), fs::read(merged.join("config.json")).unwrap());
    let files = room.files("merged/model");
    assert_eq!(
        files,
        ["case.json", "config.json", "model.safetensors"],
        "neither other weights nor notes about the base"
    );
    room.alone(&["merge", "run/latest", "merged/newest"]).ended(0, &[]);
    let weights = |folder: &str| fs::read(room.path().join(folder).join("model.safetensors")).unwrap();
    assert_eq!(weights("merged/model"), weights("merged/newest"), "the last checkpoint has the same adapters");
    room.alone(&["merge", "run/best", "other"]).refused(3, &["run/best is not there: ", "checkpoint.keep_best"]);
    fs::rename(room.path().join("run/adapter"), room.path().join("adapter")).unwrap();
    room.alone(&["merge", "run", "other"]).refused(2, &["run has no folder adapter", "run/latest", "run/best"]);
    // The merged model is a model: it trains.
    room.alone(&["train", "--run-dir", "next", "--set", "model.path=merged/model", "--set", "run.steps=1"])
        .ended(0, &[]);
}

#[test]
fn adapters_name_their_base_by_an_absolute_path_or_by_the_hubs_name() {
    let room = Room::with(&[("train.jsonl", &lines(&[record(33, [4, 2, 2])]))]);
    let snapshot = "hub/models--some--model/snapshots/0123abcd";
    for folder in ["models/tiny", snapshot] {
        fs::create_dir_all(room.path().join(folder)).unwrap();
        for entry in fs::read_dir(case("qwen3")).unwrap() {
            let file = entry.unwrap().path();
            fs::copy(&file, room.path().join(folder).join(file.file_name().unwrap())).unwrap();
        }
        room.write("config.toml", config(Path::new(folder)));
        room.alone(&["train", "--run-dir", "run", "--anew", "--set", "run.steps=1"]).ended(0, &[]);
        let named = room.read_json("run/adapter/adapter_config.json")["base_model_name_or_path"].clone();
        if folder == snapshot {
            assert_eq!(named, Value::from("some/model"));
        } else {
            let path = Path::new(named.as_str().unwrap());
            assert!(path.is_absolute() && path.join("config.json").is_file(), "{named}");
        }
    }
    room.alone(&["merge", "run", "merged"])
        .refused(2, &["names the base model \"some/model\"", "give it with --model"]);
    room.alone(&["merge", "run", "merged", "--model", snapshot]).ended(0, &[]);
    room.alone(&["merge", "run", "merged", "--model", snapshot]).refused(2, &["merged exists"]);
    room.alone(&["merge", "run", "other", "--model", "models/absent"]).ended(3, &["models/absent"]);
    assert!(!room.path().join("other").exists(), "nothing is left of a merge that failed");
}

/// A merged model was served without the scaling that it was trained with.
#[test]
fn a_merged_model_has_the_rotary_scaling_of_the_run() {
    let model = case("qwen3");
    let room = Room::with(&[("config.toml", &config(&model)), ("train.jsonl", &lines(&[record(33, [4, 2, 2])]))]);
    let scaling = "model.rope_scaling={ rope_type = \"yarn\", factor = 4.0, original_max_position_embeddings = 64 }";
    room.alone(&["train", "--set", "run.steps=1", "--set", scaling]).ended(0, &[]);
    room.alone(&["merge", "run", "merged"]).ended(0, &["config.json has the run's rope_scaling"]);
    let merged = room.read_json("merged/config.json");
    let found = merged.get("rope_scaling").filter(|table| table.is_object()).unwrap_or(&merged["rope_parameters"]);
    assert_eq!((&found["rope_type"], &found["factor"]), (&Value::from("yarn"), &Value::from(4.0)), "{merged}");
    assert_eq!(found["original_max_position_embeddings"], Value::from(64));
    let before: Value = serde_json::from_str(&fs::read_to_string(model.join("config.json")).unwrap()).unwrap();
    assert_eq!((&merged["hidden_size"], &merged["model_type"]), (&before["hidden_size"], &before["model_type"]));
}
