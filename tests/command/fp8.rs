//! Checkpoints in fp8: what a user sees of them, and that both forms in memory train the same adapter.

use serde_json::Value;

use super::checkpoints::{Draft, case};
use super::room::{Room, Said};
use super::training::{config, lines, record};

const FP8: &str = "model.weights=fp8";

fn room(draft: &Draft) -> Room {
    draft.write();
    let records = lines(&[record(96, [24, 1, 7]), record(61, [2, 13, 5])]);
    Room::with(&[("config.toml", &config(draft.path())), ("train.jsonl", &records)])
}

fn train(room: &Room, ranks: usize, run_dir: &str, sets: &[&str]) -> Said {
    let mut arguments = vec!["train", "--run-dir", run_dir, "--set", "run.steps=2"];
    arguments.extend(sets.iter().flat_map(|set| ["--set", *set]));
    if ranks == 1 { room.alone(&arguments) } else { room.ranks(ranks, &arguments) }
}

/// What must not depend on how weights are held: loss, gradient norm and the adapter after two updates.
fn learnt(room: &Room, run_dir: &str) -> Vec<Value> {
    let receipt = room.read_json(&format!("{run_dir}/receipt.json"));
    ["loss_first", "loss", "grad_norm", "adapter_digest", "model_digest"].map(|key| receipt[key].clone()).to_vec()
}

#[test]
fn both_forms_of_fp8_weights_train_the_same_adapter_bit_for_bit() {
    for (family, ranks, sets) in [
        ("qwen3", 1, &[][..]),
        ("qwen3_moe", 1, &[]),
        ("qwen3_moe", 2, &["parallel.ep_size=2"]),
        ("qwen3_moe", 1, &["lora.targets=q_proj,experts.down_proj"]),
    ] {
        let mut draft = Draft::of(family);
        draft.linears_in_fp8(0.0004);
        let room = room(&draft);
        let plain = train(&room, ranks, "plain", sets);
        plain.ended(0, &["weights of the checkpoint are fp8: dequantised to Float while they are loaded"]);
        let fp8 = train(&room, ranks, "fp8", &[sets, &[FP8]].concat());
        fp8.ended(0, &["weights of the checkpoint are fp8: kept so, and dequantised to Float where they are used"]);
        assert_eq!(learnt(&room, "plain"), learnt(&room, "fp8"), "{family} on {ranks} ranks, {sets:?}");
    }
}

#[test]
fn fp8_without_an_fp8_checkpoint_is_refused_and_random_weights_are_rounded() {
    let draft = Draft::of("qwen3");
    let room = room(&draft);
    let words = ["model.weights = \"fp8\" asks for weights as an fp8 checkpoint holds them", "this one holds none"];
    train(&room, 1, "refused", &[FP8]).refused(2, &words);
    let path = format!("model.path={}", case("qwen3").display());
    for (run_dir, weights) in [("rounded", FP8), ("drawn", "model.weights=checkpoint")] {
        train(&room, 1, run_dir, &[&path, "model.random_init=true", weights]).ended(0, &[]);
    }
    assert_ne!(learnt(&room, "rounded"), learnt(&room, "drawn"));
}
