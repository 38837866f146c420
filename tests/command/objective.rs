//! What a run optimises: nothing is put in the place of what the user said, and what is optimised is announced.

use serde_json::{Value, json};

use super::checkpoints::case;
use super::resume::numbers;
use super::room::{Room, Said};
use super::training::{config, lines, record};

/// A room whose configuration names no reward, with these records.
fn unnamed(records: &[Value]) -> Room {
    let text = config(&case("qwen3")).replace("reward_fn = \"data\"\n", "");
    Room::with(&[("config.toml", &text), ("train.jsonl", &lines(records))])
}

fn train(room: &Room, run: &str, sets: &[&str]) -> Said {
    let mut arguments = vec!["train", "--run-dir", run];
    arguments.extend(sets.iter().flat_map(|set| ["--set", *set]));
    room.alone(&arguments)
}

/// The record with these rewards; null where there is none.
fn rewarded(rewards: [Value; 3]) -> Value {
    let mut record = record(33, [4, 2, 2]);
    for (answer, reward) in record["answers"].as_array_mut().unwrap().iter_mut().zip(rewards) {
        answer["reward"] = reward;
    }
    record
}

/// The run trained on 0 and 1 in turn, whatever rewards the data had.
#[test]
fn rewards_of_the_data_are_not_replaced_where_no_reward_is_named() {
    let room = unnamed(&[rewarded([json!(1), json!(0), json!(1)])]);
    let said = train(&room, "unnamed", &["run.steps=1"]);
    said.ended(
        0,
        &["objective: reward data (grpo.reward_fn is not set, and every answer has one)", "ratio clipped to 0.8"],
    );
    let receipt = room.read_json("unnamed/receipt.json");
    assert_eq!(receipt["rewards"], json!([1.0, 0.0, 1.0]));
    train(&room, "named", &["run.steps=1", "grpo.reward_fn=data"]).ended(0, &["objective: reward data; advantage"]);
    assert_eq!(receipt["adapter_digest"], room.read_json("named/receipt.json")["adapter_digest"]);
    assert!(room.read("unnamed/config.resolved.toml").contains("reward_fn = \"data\""));
}

#[test]
fn a_reward_that_nobody_can_know_is_asked_for_with_the_choices() {
    let room = unnamed(&[rewarded([json!(1), Value::Null, json!(0)])]);
    let choices = ["grpo.reward_fn is not set", "exact_match", "judge", "--set grpo.reward_fn=NAME", "docs/rewards.md"];
    let asks = |sets: &[&str], why: &str| {
        let said = train(&room, "run", sets);
        said.refused(2, &choices).refused(2, &[why]);
    };
    asks(&[], "answers[1] of record of 33 in train.jsonl has no reward");
    asks(&["rollout.sample=true"], "the policy samples its answers (rollout.sample = true)");
    room.write("config.toml", room.read("config.toml").replace("[data]\npath = \"train.jsonl\"\n", ""));
    asks(&[], "there is no data.path");
    assert_eq!(room.files("run").iter().filter(|file| file.contains("receipt")).count(), 0);
}

#[test]
fn a_reward_for_validation_that_is_named_is_taken_and_announced() {
    let room = unnamed(&[rewarded([json!(1), json!(0), json!(1)])]);
    train(&room, "run", &["grpo.reward_fn=synthetic", "run.steps=1"])
        .ended(0, &["objective: reward synthetic (0 and 1 in turn, whatever the answers say)"]);
    assert_eq!(room.read_json("run/receipt.json")["rewards"], json!([0.0, 1.0, 0.0]));
}

#[test]
fn data_that_cannot_train_anything_are_refused_before_the_first_step() {
    let room = unnamed(&[rewarded([json!(1), json!(1), json!(1)]), rewarded([json!(0.5), json!(0.5), json!(0.5)])]);
    train(&room, "run", &[]).refused(3, &["train.jsonl: none of its 2 records has answers with different rewards"]);
    let none = unnamed(&[rewarded([Value::Null, Value::Null, Value::Null])]);
    train(&none, "run", &["grpo.reward_fn=data"])
        .refused(3, &["none of its 1 records has answers with different rewards"]);
    let alone = ["grpo.group_size=1", "grpo.reward_fn=length", "reward.length_tokens=3"];
    train(&room, "run", &alone).refused(2, &["grpo.group_size should be at least 2: it is 1"]);
    // A KL term has a gradient without rewards.
    train(&room, "kl", &["grpo.kl_coef=0.1", "run.steps=2"]).ended(0, &["KL term × 0.1"]);
    assert_eq!(room.read_json("kl/receipt.json")["passed"], true);
}

#[test]
fn a_run_in_which_nothing_was_trained_has_not_passed() {
    let room = unnamed(&[record(33, [4, 2, 2])]);
    // Every answer is short enough, which only its length tells.
    let sets = ["grpo.reward_fn=length", "reward.length_tokens=9", "run.steps=2"];
    let said = train(&room, "run", &sets);
    said.refused(3, &["nothing was trained: the gradient of all 2 updates was 0"]);
    let receipt = room.read_json("run/receipt.json");
    assert_eq!((&receipt["passed"], &receipt["updates_with_gradient"]), (&json!(false), &json!(0)));
    assert!(numbers(&room, "run").iter().all(|step| step["grad_norm"] == 0.0));
    train(&room, "frozen", &["grpo.reward_fn=data", "optimizer.lr=0", "run.steps=1"]).ended(0, &["optimizer.lr = 0"]);
    let receipt = room.read_json("frozen/receipt.json");
    assert_eq!((&receipt["passed"], &receipt["updates_with_gradient"]), (&json!(false), &json!(1)));
}
