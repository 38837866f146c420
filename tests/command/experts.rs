//! Experts over ranks, with adapters on them.

use std::fs;

use safetensors::SafeTensors;
use serde_json::Value;

use super::checkpoints::case;
use super::room::Room;
use super::training::{config, lines, record};

const TARGETS: &str = "targets = [\"q_proj\", \"experts.gate_proj\", \"experts.up_proj\", \"experts.down_proj\"]";

/// A room for a small mixture with adapters on experts, in float64: only the order of sums may differ.
fn room() -> Room {
    let text = config(&case("qwen3_moe"))
        .replace("float32", "float64")
        .replace("alpha = 8.0\n", &format!("alpha = 8.0\n{TARGETS}\n"));
    let data = lines(&[record(96, [24, 1, 7]), record(61, [2, 13, 5]), record(5, [1, 1, 3]), record(33, [4, 2, 2])]);
    Room::with(&[("config.toml", &text), ("train.jsonl", &data)])
}

fn train(room: &Room, ranks: usize, ep: usize, run_dir: &str, steps: u64, flags: &[&str]) -> Value {
    let sets =
        [format!("parallel.ep_size={ep}"), format!("run.steps={steps}"), "optimizer.max_grad_norm=0.01".to_owned()];
    let mut arguments = vec!["train", "--run-dir", run_dir];
    arguments.extend(flags);
    arguments.extend(sets.iter().flat_map(|set| ["--set", set.as_str()]));
    room.ranks(ranks, &arguments).ended(0, &[]);
    let receipt = room.read_json(&format!("{run_dir}/receipt.json"));
    assert_eq!(receipt["passed"], true, "{receipt}");
    let digests = receipt["adapter_digest"].as_array().unwrap().clone();
    assert!(digests.len() == ranks && digests.iter().all(|digest| *digest == digests[0]), "{digests:?}");
    receipt
}

/// The saved adapter's tensors by name.
fn adapter(room: &Room, run_dir: &str) -> Vec<(String, Vec<f32>)> {
    let bytes = fs::read(room.path().join(run_dir).join("adapter/adapter_model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let value = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    let mut all: Vec<_> =
        tensors.tensors().into_iter().map(|(name, view)| (name, view.data().chunks(4).map(value).collect())).collect();
    all.sort_by(|(one, _): &(String, Vec<f32>), (two, _)| one.cmp(two));
    all
}

/// The largest difference of two adapters, and the largest value.
fn apart(one: &[(String, Vec<f32>)], two: &[(String, Vec<f32>)]) -> (f32, f32) {
    let mut worst = (0.0_f32, 0.0_f32);
    assert_eq!(one.len(), two.len());
    for ((name, one), (other, two)) in one.iter().zip(two) {
        assert_eq!((name, one.len()), (other, two.len()));
        for (one, two) in one.iter().zip(two) {
            worst = (worst.0.max((one - two).abs()), worst.1.max(one.abs()));
        }
    }
    worst
}

#[test]
fn adapters_on_experts_learn_the_same_over_any_ranks_and_go_on_with_another_number() {
    let room = room();
    train(&room, 1, 1, "alone", 4, &[]);
    let expected = adapter(&room, "alone");
    let name = "base_model.model.model.layers.3.mlp.experts.5.gate_proj.lora_B.weight";
    let moved = expected.iter().find(|(found, _)| found == name).unwrap();
    assert!(moved.1.iter().any(|value| *value != 0.0), "an expert's adapter has learnt");
    let config = room.read_json("alone/adapter/adapter_config.json");
    let targets: Vec<&str> = config["target_modules"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(targets, ["q_proj", "experts.gate_proj", "experts.up_proj", "experts.down_proj"]);
    // Four updates; and two, then two more with the experts spread otherwise.
    train(&room, 4, 2, "spread", 4, &[]);
    let (first, whole) = (train(&room, 2, 2, "resumed", 2, &[]), train(&room, 2, 1, "resumed", 4, &["--resume"]));
    assert_ne!(first["adapter_digest"][0], whole["adapter_digest"][0]);
    for run in ["spread", "resumed"] {
        let (worst, largest) = apart(&adapter(&room, run), &expected);
        assert!(worst < 1e-6 * largest, "{run}: {worst:e} of {largest:e}");
    }
}

#[test]
fn a_model_without_experts_says_that_ranks_for_them_have_no_effect() {
    let data = lines(&[record(40, [2, 3, 4])]);
    let room = Room::with(&[("config.toml", &config(&case("qwen3"))), ("train.jsonl", &data)]);
    let said = room.ranks(2, &["train", "--set", "parallel.ep_size=2", "--set", "run.steps=1"]);
    said.ended(0, &[]);
    let words = "parallel.ep_size = 2 has no effect: qwen3 has no experts";
    assert!(said.out.contains(words) || said.err.contains(words), "{said}");
}

#[test]
fn ranks_that_do_not_divide_the_experts_are_refused() {
    let said = room().ranks(3, &["train", "--set", "parallel.ep_size=3"]);
    said.refused(2, &["parallel.ep_size = 3 does not divide the 8 experts of a layer of qwen3_moe"]);
}
