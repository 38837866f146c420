//! Real training runs on the tiny reference checkpoint, at 1, 2 and 3 ranks.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::{Value, json};

use super::checkpoints::case;
use super::room::{Room, Said};

const PAGE_SIZE: u64 = 8;
/// Layers × (key and value) × heads × head width × bytes of float32 × positions.
const PAGE_BYTES: u64 = 4 * 2 * 2 * 16 * 4 * PAGE_SIZE;

/// A configuration for the checkpoint in `model`.
pub(crate) fn config(model: &Path) -> String {
    format!(
        "[context]\nmax_seq_len = 120\nprompt_len = 96\nanswer_len = 24\npage_size = {PAGE_SIZE}\n\
         [optimizer]\nlr = 1e-3\n[grpo]\ngroup_size = 3\nreward_fn = \"data\"\ngradient = \"response\"\n\
         [lora]\nrank = 4\nalpha = 8.0\n[model]\npath = \"{}\"\ndtype = \"float32\"\n\
         [data]\npath = \"train.jsonl\"\n[run]\ndir = \"run\"\nsteps = 3\n",
        model.display()
    )
}

pub(crate) fn ids(length: usize, from: usize) -> Vec<usize> {
    (0..length).map(|at| (from + 37 * at + at * at) % 256).collect()
}

/// A record: a prompt of some length, and three answers of uneven lengths, the first of them right.
pub(crate) fn record(prompt: usize, answers: [usize; 3]) -> Value {
    let answer = |(index, length): (usize, usize)| {
        let reward = u32::from(index == 0);
        json!({"ids": ids(length, 5 * index + prompt), "reward": reward})
    };
    let answers: Vec<Value> = answers.into_iter().enumerate().map(answer).collect();
    json!({"name": format!("of {prompt}"), "prompt_ids": ids(prompt, prompt), "answers": answers})
}

pub(crate) fn lines(records: &[Value]) -> String {
    records.iter().fold(String::new(), |mut text, record| {
        writeln!(text, "{record}").unwrap();
        text
    })
}

/// Prompts that fill their pages, or not, or less than one; answers shorter than the number of ranks.
fn uneven() -> String {
    lines(&[record(96, [24, 1, 7]), record(61, [2, 13, 5]), record(5, [1, 1, 3])])
}

/// A room with the tiny checkpoint's configuration and uneven data.
fn room() -> Room {
    Room::with(&[("config.toml", &config(&case("qwen3"))), ("train.jsonl", &uneven())])
}

/// Trains with `--set` of these, into `run_dir`; returns the receipt.
#[track_caller]
fn train(room: &Room, ranks: usize, run_dir: &str, sets: &[&str]) -> Value {
    train_said(room, ranks, run_dir, sets).ended(0, &[]);
    room.read_json(&format!("{run_dir}/receipt.json"))
}

fn train_said(room: &Room, ranks: usize, run_dir: &str, sets: &[&str]) -> Said {
    let mut arguments = vec!["train", "--run-dir", run_dir];
    arguments.extend(sets.iter().flat_map(|set| ["--set", *set]));
    if ranks == 0 { room.alone(&arguments) } else { room.ranks(ranks, &arguments) }
}

fn numbers(receipt: &Value, key: &str) -> Vec<u64> {
    receipt[key].as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

fn digest(receipt: &Value) -> &str {
    receipt["adapter_digest"][0].as_str().unwrap()
}

/// Every key of a receipt, and what it must hold after three updates on `ranks` ranks.
#[track_caller]
fn assert_sane(receipt: &Value, ranks: usize) {
    let expected = json!({
        "passed": true, "gradient": "response", "ranks": ranks, "cp_size": ranks, "positions": 120, "prompt_len": 96,
        "answer_len": 24, "group_size": 3, "steps": 3, "ratio_first": [1.0, 1.0], "rewards": [1.0, 0.0, 0.0],
        "held_out": [null, null], "micro_blocks": [2048, 512], "gate": null, "checks": [], "not_checked": [],
        "forced": false, "scale": 1, "optimizer_calls": 3, "updates_with_gradient": 3, "layers": 4, "lora_b_unmoved": [],
        "layers_by_phase": {"capture": 4, "score": 4, "replay": 1, "sweep": 4},
        "seconds_per_further_answer": null, "device_bytes_per_further_answer": null
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&receipt[key], value, "{key}");
    }
    for key in ["config_digest", "model_digest"] {
        assert_eq!(receipt[key].as_str().unwrap().len(), 64, "{key}");
    }
    let (pages, bytes) = (numbers(receipt, "pages_per_rank"), numbers(receipt, "page_bytes_per_rank"));
    assert_eq!(bytes, pages.iter().map(|pages| pages * PAGE_BYTES).collect::<Vec<_>>());
    assert!([96_u64, 61, 5].iter().any(|prompt| prompt.div_ceil(PAGE_SIZE) == pages.iter().sum::<u64>()), "{pages:?}");
    assert_eq!((pages.len(), numbers(receipt, "peak_host_bytes").len()), (ranks, ranks));
    assert!(numbers(receipt, "peak_device_bytes").iter().all(|&peak| peak > 180_928 * 4), "the weights alone are more");
    let digests = receipt["adapter_digest"].as_array().unwrap();
    assert!(digests.len() == ranks && digests.iter().all(|one| *one == digests[0]), "{digests:?}");
    let of = |key: &str| receipt[key].as_f64().unwrap();
    assert!(of("grad_norm") > 0.0 && of("loss").is_finite() && of("loss_first").is_finite());
    assert!((0.0..=1.0).contains(&of("capture_share")));
    let advantages: Vec<f64> = receipt["advantages"].as_array().unwrap().iter().map(|a| a.as_f64().unwrap()).collect();
    assert!((advantages[0] - 2.0_f64.sqrt()).abs() < 1e-12 && (advantages[1] + 0.5_f64.sqrt()).abs() < 1e-12);
    let seconds: Vec<&String> = receipt["seconds"].as_object().unwrap().keys().collect();
    assert_eq!(seconds, ["capture", "rollout", "reward", "score", "replay", "sweep", "finalize", "update", "total"]);
    assert!(receipt["commit"].is_string());
    assert_eq!(receipt["adapter"]["targets"].as_array().unwrap().len(), 7);
    assert_eq!(receipt["keeping"]["every"], 1);
    assert!(receipt["finished"].as_str().unwrap().ends_with('Z'));
    // The keys above, and no other.
    assert_eq!(receipt.as_object().unwrap().len(), expected.as_object().unwrap().len() + 29);
}

#[test]
fn one_two_and_three_ranks_train_alike_and_leave_everything_they_should() {
    let room = room();
    let mut losses = Vec::new();
    for ranks in 1..=3 {
        let run = format!("run{ranks}");
        let receipt = train(&room, ranks, &run, &[]);
        assert_sane(&receipt, ranks);
        let logs = (0..ranks).map(|rank| format!("logs/rank_{rank}.log"));
        let mut files: Vec<String> = ["adapter/adapter_config.json", "adapter/adapter_model.safetensors"]
            .into_iter()
            .chain([".lock", "config.resolved.toml", "latest", "metrics.jsonl", "receipt.json"])
            .map(String::from)
            .chain(logs)
            .chain(
                ["adapter_config.json", "adapter_model.safetensors", "masters.safetensors", "state.json"]
                    .map(|file| format!("checkpoints/step_3/{file}")),
            )
            .collect();
        files.sort();
        let (events, rest): (Vec<String>, Vec<String>) =
            room.files(&run).into_iter().partition(|file| file.starts_with("tensorboard/events.out.tfevents."));
        assert_eq!((events.len(), rest), (1, files));
        let metrics = room.read(&format!("{run}/metrics.jsonl"));
        let steps: Vec<Value> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(steps.iter().map(|step| step["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
        let mut prompts: Vec<&str> = steps.iter().map(|step| step["prompts"][0].as_str().unwrap()).collect();
        prompts.sort_unstable();
        assert_eq!(prompts, ["of 5", "of 61", "of 96"]);
        losses.push(steps.iter().map(|step| step["loss"].as_f64().unwrap()).collect::<Vec<_>>());
    }
    // float32 sums in another order differ by 1e-6 to 4e-6 of what is summed, here numbers near 1.
    for other in &losses[1..] {
        assert!(losses[0].iter().zip(other).all(|(one, other)| (one - other).abs() < 1e-4), "{losses:?}");
    }
}

#[test]
fn two_runs_with_one_seed_are_equal_to_the_bit_and_another_seed_is_not() {
    let room = room();
    let set = ["grpo.kl_coef=0.05", "optimizer.grad_accum=2", "grpo.aggregation=token_mean"];
    let (one, two) = (train(&room, 2, "one", &set), train(&room, 2, "two", &set));
    assert_eq!((digest(&one), &one["loss"], &one["grad_norm"]), (digest(&two), &two["loss"], &two["grad_norm"]));
    let other = train(&room, 2, "other", &[&set[..], &["run.seed=1"]].concat());
    assert_ne!(digest(&one), digest(&other));
}

#[test]
fn saved_adapters_load_again_bit_for_bit() {
    let room = room();
    let first = train(&room, 0, "first", &[]);
    let again = train(&room, 0, "again", &["lora.init_from=first/adapter", "optimizer.lr=0", "run.steps=1"]);
    assert_eq!(digest(&first), digest(&again));
    assert_eq!(again["ratio_first"], json!([1.0, 1.0]));
    let said = train_said(&room, 0, "wider", &["lora.init_from=first/adapter", "lora.rank=8"]);
    said.refused(3, &["first/adapter", "rank"]);
}

#[test]
fn an_answer_without_a_reward_takes_no_part() {
    let mut digests = Vec::new();
    for (length, from) in [(7, 0), (3, 100)] {
        let room = room();
        let mut group = record(40, [6, 9, 1]);
        group["answers"][2] = json!({"ids": ids(length, from), "reward": null});
        room.write("train.jsonl", lines(&[group]));
        // Each answer alone: beside others in a pack the last bits of its products depend on their rows.
        let receipt = train(&room, 0, "run", &["memory.micro_block=1"]);
        assert_eq!(
            (&receipt["rewards"], &receipt["advantages"]),
            (&json!([1.0, 0.0, null]), &json!([1.0, -1.0, null]))
        );
        digests.push(digest(&receipt).to_owned());
    }
    assert_eq!(digests[0], digests[1], "whatever stands in it changes nothing");
}

#[test]
fn an_update_of_equal_rewards_has_no_gradient_and_the_run_says_so() {
    let room = room();
    let mut group = record(40, [6, 9, 1]);
    let better = group.clone();
    group["answers"][0]["reward"] = json!(0);
    room.write("train.jsonl", lines(&[better, group]));
    let sets = ["run.steps=2", "data.shuffle=false"];
    train_said(&room, 2, "run", &sets).ended(0, &["every group's rewards are equal"]);
    let receipt = room.read_json("run/receipt.json");
    assert_eq!((&receipt["advantages"], &receipt["grad_norm"]), (&json!([0.0, 0.0, 0.0]), &json!(0.0)));
    assert_eq!((&receipt["passed"], &receipt["updates_with_gradient"]), (&json!(true), &json!(1)));
}

#[test]
fn without_shuffle_prompts_come_as_they_stand() {
    let room = room();
    train(&room, 0, "run", &["data.shuffle=false"]);
    let metrics = room.read("run/metrics.jsonl");
    let prompts: Vec<Value> =
        metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["prompts"][0].clone()).collect();
    assert_eq!(prompts, ["of 96", "of 61", "of 5"]);
}

#[test]
fn synthetic_rewards_need_no_data() {
    let room = room();
    let text =
        room.read("config.toml").replace("[data]\npath = \"train.jsonl\"\n", "").replace("\"data\"", "\"synthetic\"");
    room.write("config.toml", text);
    let said = room.ranks(2, &["--json", "train"]);
    assert_eq!(said.code, 2, "--json belongs to the verb: {said}");
    let receipt = room.ranks(2, &["train", "--json"]).json();
    assert_eq!(receipt["rewards"], json!([0.0, 1.0, 0.0]));
    assert_eq!(numbers(&receipt, "pages_per_rank"), [6, 6]);
    assert_eq!(receipt, room.read_json("run/receipt.json"));
}

#[test]
fn held_out_prompts_are_measured_before_and_after() {
    let room = room();
    room.write("held_out.jsonl", lines(&[record(33, [4, 5, 6]), record(12, [1, 2, 9])]));
    let receipt = train(&room, 2, "run", &["data.held_out=held_out.jsonl", "optimizer.lr=1e-2", "parallel.cp_size=1"]);
    let [before, after] = [0, 1].map(|at| receipt["held_out"][at]["margin"].as_f64().unwrap());
    assert!((before - after).abs() > 1e-6, "{before} {after}");
    assert_eq!((&receipt["cp_size"], &receipt["held_out"][1]["prompts"]), (&json!(1), &json!(2)));
}

#[test]
fn each_rank_logs_its_phases_and_layers_when_asked() {
    let room = room();
    train(&room, 2, "run", &["run.log_level=debug", "run.steps=1"]);
    for rank in 0..2 {
        let log = room.read(&format!("run/logs/rank_{rank}.log"));
        for words in [format!("rank {rank} of 2, process "), "capture, layer 3".into(), "sweep, layer 0".into()] {
            assert!(log.contains(&words), "{words}:\n{log}");
        }
        assert!(log.contains("step 1/1: loss "), "{log}");
    }
    room.alone(&["train", "--anew", "--set", "run.steps=1"]).ended(0, &[]);
    let log = room.read("run/logs/rank_0.log");
    assert!(log.contains("rank 0 of 2") && log.contains("rank 0 of 1"), "a log is continued:\n{log}");
}

/// The conventional schedule and the paged one's exact gradient are one training run, to rounding.
#[test]
fn whole_sequences_under_autograd_train_as_exact_pages_do() {
    let room = room();
    let exact = "grpo.gradient=exact";
    let sets = [exact, "parallel.cp_size=1", "optimizer.grad_accum=1", "model.dtype=float64", "grpo.kl_coef=0.1"];
    let paged = train(&room, 2, "paged", &sets);
    let whole = train(&room, 2, "whole", &[&sets[..], &["memory.prompt_no_grad=false"]].concat());
    for key in ["loss", "grad_norm"] {
        let (one, two) = (paged[key].as_f64().unwrap(), whole[key].as_f64().unwrap());
        assert!((one - two).abs() <= 1e-9 * two.abs().max(1.0), "{key}: {one} and {two}");
    }
    assert!(whole["grad_norm"].as_f64().unwrap() > 0.0);
    let said = room.ranks(2, &["--set", "memory.prompt_no_grad=false", "--set", "parallel.cp_size=2"]);
    said.refused(2, &["parallel.cp_size should be 1", "grpo.gradient should be \"exact\""]);
}
