//! A run that leaves its limits says so in the update where it happens, and ends where it was asked to.

use serde_json::{Value, json};

use super::checkpoints::case;
use super::resume::numbers;
use super::room::{Room, Said};
use super::training::{config, lines, record};

fn room() -> Room {
    Room::with(&[("config.toml", &config(&case("qwen3"))), ("train.jsonl", &lines(&[record(33, [4, 2, 2])]))])
}

fn train(room: &Room, ranks: usize, run: &str, sets: &[&str]) -> Said {
    let mut arguments = vec!["train", "--run-dir", run, "--set", "grpo.kl_coef=0.1", "--set", "run.steps=6"];
    arguments.extend(sets.iter().flat_map(|set| ["--set", *set]));
    room.ranks(ranks, &arguments)
}

/// Updates of a run that raised the alarm for the KL divergence.
fn raised(steps: &[Value]) -> Vec<u64> {
    let is_raised = |step: &&Value| step["alarms"]["kl"].is_number();
    steps.iter().filter(is_raised).filter_map(|step| step["step"].as_u64()).collect()
}

#[test]
fn a_policy_that_diverges_is_named_where_it_happens_and_a_healthy_one_is_not() {
    let room = room();
    for seed in ["run.seed=1", "run.seed=2", "run.seed=3"] {
        let healthy = train(&room, 1, &format!("healthy-{seed}"), &[seed, "optimizer.lr=1e-3"]);
        healthy.ended(0, &[]);
        assert!(!healthy.err.contains("alarm kl"), "{healthy}");
        assert_eq!(raised(&numbers(&room, &format!("healthy-{seed}"))), Vec::<u64>::new());
    }
    let wild = train(&room, 1, "wild", &["optimizer.lr=1"]);
    wild.ended(0, &["warning: alarm kl: ", "nats a token between the policy and the one that it began from"]);
    let steps = numbers(&room, "wild");
    let first = steps.iter().find(|step| step["kl"].as_f64() > Some(1.0)).map(|step| step["step"].clone());
    assert_eq!(
        raised(&steps).first().copied(),
        first.as_ref().and_then(Value::as_u64),
        "the first update above the limit"
    );
    let span = &room.read_json("wild/receipt.json")["alarms"]["kl"];
    assert_eq!(span["first_update"], json!(raised(&steps)[0]));
    assert_eq!(span["updates"], json!(raised(&steps).len()));
}

#[test]
fn an_alarm_that_may_stop_ends_all_ranks_with_its_own_code_and_keeps_every_checkpoint() {
    let room = room();
    let sets = ["optimizer.lr=1", "alarm.kl_stop=1", "checkpoint.every=1", "checkpoint.keep=1"];
    let said = train(&room, 2, "run", &sets);
    said.ended(9, &["ends this run, as asked for by alarm.kl_stop: "]);
    let receipt = room.read_json("run/receipt.json");
    assert_eq!((&receipt["passed"], &receipt["stopped_by_alarm"]), (&json!(false), &json!(true)));
    let last = raised(&numbers(&room, "run"))[0];
    assert_eq!(receipt["steps"], json!(last), "the update that raised it is the last");
    let files = room.files("run/checkpoints");
    for kept in [last - 1, last] {
        assert!(files.iter().any(|file| file.contains(&format!("step_{kept}"))), "{kept}: {files:?}");
    }
    // Whoever has looked at it goes on, with the limit raised.
    let mut arguments =
        vec!["train", "--run-dir", "run", "--resume", "--set", "grpo.kl_coef=0.1", "--set", "run.steps=6"];
    arguments.extend(["--set", "optimizer.lr=1", "--set", "alarm.kl_stop=inf"]);
    room.ranks(2, &arguments).ended(0, &[&format!("update {} is next", last + 1)]);
    assert_eq!(room.read_json("run/receipt.json")["alarms"]["kl"]["first_update"], json!(last));
}

#[test]
fn limits_that_are_none_are_refused_by_name() {
    let room = room();
    train(&room, 1, "run", &["alarm.kl_stop=-1", "alarm.window=0", "alarm.truncated_warn=nan"]).refused(
        2,
        &[
            "alarm.kl_stop should be at least 0, or inf",
            "alarm.window should be at least 1",
            "alarm.truncated_warn should be",
        ],
    );
}
