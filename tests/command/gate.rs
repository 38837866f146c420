//! Gates on the tiny reference checkpoint, scaled down: order, checks, receipts.

use std::process::Command;

use serde_json::{Value, json};

use super::checkpoints::case;
use super::room::{Call, LONGSTRAW, Room, Said};

/// A receipt of the first gate, which needs an endpoint.
const KEY: (&str, &str) = ("runs/gates/gate1_key/receipt.json", "{\"gate\": \"gate1_key\", \"passed\": true}");

/// A scale at which a gate takes a second: 64 positions in gate2, 4,096 in gate4 to gate6, answers of 16, pages of 1.
/// The gates' own pages of 64 would not be divided by it.
const SHORT: [&str; 4] =
    ["gate.scale=512", "context.page_size=512", "memory.micro_block=65536", "memory.head_block=65536"];

/// What users have in their config.toml, for 2 ranks, with the gates scaled down. Lengths, pages, group and data are
/// the gates' own.
fn config(family: &str) -> String {
    format!(
        "[context]\nmax_seq_len = 2097152\nprompt_len = 2088960\nanswer_len = 8192\ncp_pages_per_gpu = 16320\n\
         [parallel]\ncp_size = 2\n[optimizer]\nlr = 1e-3\ngrad_accum = 3\n\
         [grpo]\ngroup_size = 5\nreward_fn = \"data\"\n[lora]\nrank = 4\nalpha = 8.0\n\
         [model]\npath = \"{}\"\ndtype = \"float32\"\n[data]\npath = \"absent.jsonl\"\n[gate]\nscale = 64\n",
        case(family).display()
    )
}

fn room() -> Room {
    Room::with(&[("config.toml", &config("llama")), KEY])
}

/// Runs a gate on two ranks with these flags and values.
fn gate(room: &Room, name: &str, flags: &[&str], sets: &[&str]) -> Said {
    let mut arguments = vec!["gate", name];
    arguments.extend(flags);
    arguments.extend(sets.iter().flat_map(|set| ["--set", *set]));
    room.ranks(2, &arguments)
}

fn receipt(room: &Room, name: &str) -> Value {
    room.read_json(&format!("runs/gates/{name}/receipt.json"))
}

/// Names of a receipt's checks that did or did not hold.
fn checks(receipt: &Value, passed: bool) -> Vec<&str> {
    let all = receipt["checks"].as_array().unwrap().iter();
    all.filter(|check| check["passed"] == passed).map(|check| check["name"].as_str().unwrap()).collect()
}

/// The receipt of a gate that has passed every one of its checks.
#[track_caller]
fn passed(room: &Room, name: &str) -> Value {
    let receipt = receipt(room, name);
    assert_eq!((&receipt["gate"], &receipt["passed"], checks(&receipt, false)), (&json!(name), &json!(true), vec![]));
    for check in receipt["checks"].as_array().unwrap() {
        let keys: Vec<&String> = check.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["name", "value", "limit", "passed", "means"]);
    }
    receipt
}

#[test]
fn the_first_gates_pass_in_their_order_only() {
    let room = Room::with(&[("config.toml", &config("llama"))]);
    let said = gate(&room, "gate2_32k", &[], &[]);
    said.refused(8, &["gate2_32k runs after gate1_key", "runs/gates/gate1_key/receipt.json: it is not there"]);
    said.ended(8, &["`make gates`", "LONGSTRAW_FORCE=1 or --force"]);
    assert_eq!(room.files("runs"), Vec::<String>::new(), "a refusal leaves nothing behind");
    room.write(KEY.0, KEY.1);

    let said = gate(&room, "gate2_32k", &["--json"], &[]);
    said.ended(0, &["gate2_32k has passed", "gate1_key passed with commit"]);
    let two = passed(&room, "gate2_32k");
    assert_eq!(said.json(), two);
    let names = checks(&two, true);
    for name in ["response.ratio_first", "exact.lora_b_moved", "exact.page_bytes", "parity.response", "as_named"] {
        assert!(names.contains(&name), "{name} in {names:?}");
    }
    assert_eq!(names.len(), 2 * 12 + 2 + 1);
    assert_eq!((&two["positions"], &two["prompt_len"], &two["answer_len"]), (&json!(512), &json!(384), &json!(128)));
    assert_eq!((&two["gradient"], &two["scale"], &two["ranks"]), (&json!("response"), &json!(64), &json!(2)));
    assert_eq!((&two["group_size"], &two["steps"], &two["forced"]), (&json!(2), &json!(1), &json!(false)));
    assert_eq!((&two["adapter"]["rank"], &two["pages_per_rank"]), (&json!(4), &json!([192, 192])));
    assert_eq!(receipt(&room, "gate2_32k/exact")["gradient"], "exact");

    let said = gate(&room, "gate3_256k", &[], &[]);
    said.refused(8, &["gate3_256k runs after gate3_128k", "it is not there"]);
    gate(&room, "gate3_128k", &[], &[]).ended(0, &["gate3_128k has passed"]);
    let three = passed(&room, "gate3_128k");
    assert_eq!((&three["positions"], &three["pages_per_rank"]), (&json!(2048), &json!([960, 960])));
    let growth = three["checks"].as_array().unwrap().iter().find(|check| check["name"] == "host_growth").unwrap();
    // Keys and values of 2 heads of 16 in 4 layers, of float32, on two ranks.
    assert_eq!(growth["value"], json!(2.0 * 2.0 * 16.0 * 4.0 * 4.0 / 2.0));
    another_thing_is_refused(&room);
}

/// After a passed `gate3_128k`: another model, adapter, scale or world is another thing.
fn another_thing_is_refused(room: &Room) {
    let model = format!("model.path={}", case("qwen3").display());
    for (set, words) in [
        (model.as_str(), "its model's digest was"),
        ("lora.rank=8", "its adapters were rank 4, alpha 8, on q_proj"),
        ("gate.scale=32", "its gate.scale was 64, here 32"),
        ("model.dtype=float64", "its model.dtype was float32, here float64"),
    ] {
        gate(room, "gate3_256k", &[], &[set]).refused(8, &["gate3_256k runs after gate3_128k", words]);
    }
    let alone = ["gate", "gate3_256k", "--set", "parallel.cp_size=1"];
    let said = room.ranks(1, &alone);
    said.refused(8, &["its ranks were 2, here 1, its ranks on one prompt were 2, here 1"]);
    assert!(!room.path().join("runs/gates/gate3_256k/receipt.json").exists(), "none of them has run");
}

#[test]
fn a_gate_that_is_told_to_save_saves_nothing_and_runs_again_beside_earlier_checkpoints() {
    let room = room();
    let sets = [&SHORT[..], &["checkpoint.every=1"]].concat();
    gate(&room, "gate3_128k", &["--force"], &sets).ended(0, &["gate3_128k has passed"]);
    assert!(!room.path().join("runs/gates/gate3_128k/checkpoints").exists());
    let left = "runs/gates/gate3_128k/checkpoints/step_1/state.json";
    room.write(left, "of another version");
    gate(&room, "gate3_128k", &["--force"], &sets).ended(0, &["gate3_128k has passed"]);
    assert_eq!(room.read(left), "of another version");
}

#[test]
fn a_forced_gate_reports_that_and_what_it_could_not_compare() {
    let room = room();
    gate(&room, "gate3_128k", &["--force"], &SHORT)
        .ended(0, &["out of order, by force: gate3_128k runs after gate2_32k"]);
    let forced = passed(&room, "gate3_128k");
    assert_eq!(forced["forced"], true);
    assert_eq!(forced["not_checked"][0], "growth with the length: runs/gates/gate2_32k/receipt.json is not there");
    let mut arguments = vec!["gate", "gate3_128k"];
    arguments.extend(SHORT.iter().flat_map(|set| ["--set", *set]));
    let variables = [("LONGSTRAW_FORCE", "1")];
    room.run(&Call { ranks: 2, program: LONGSTRAW, arguments: &arguments, variables: &variables })
        .ended(0, &["by force"]);
    assert_eq!(room.read_json("runs/gates/gate3_128k/receipt.earlier.json"), forced);
    // Forcing changes nothing for the next one: it stands in order after a passed one.
    gate(&room, "gate3_256k", &["--force"], &SHORT).ended(0, &["gate3_128k passed out of order: it was forced"]);
    assert_eq!(passed(&room, "gate3_256k")["forced"], false);
}

#[test]
fn a_gate_at_another_length_than_its_own_does_not_pass() {
    let room = room();
    let shorter = [&SHORT[..], &["context.max_seq_len=65536", "context.prompt_len=57344"]].concat();
    gate(&room, "gate3_128k", &["--force"], &shorter).ended(8, &["as_named: a flag or a variable of the environment"]);
    let short = receipt(&room, "gate3_128k");
    assert_eq!((checks(&short, false), &short["positions"]), (vec!["as_named"], &json!(128)));
}

/// gate2 runs both modes, so the ladder may be climbed in either, but not with one foot in each.
#[test]
fn the_ladder_passes_in_exact_mode_too_and_an_impossible_comparison_fails() {
    let room = room();
    let exact = [&SHORT[..], &["grpo.gradient=exact"]].concat();
    for name in ["gate2_32k", "gate3_128k"] {
        gate(&room, name, &[], &exact).ended(0, &[]);
    }
    let three = passed(&room, "gate3_128k");
    assert_eq!((&three["gradient"], &three["not_checked"]), (&json!("exact"), &json!([])));
    assert!(checks(&three, true).contains(&"device_growth"), "{three}");
    gate(&room, "gate3_256k", &[], &SHORT).ended(8, &["compared: this gate is about what it adds to an earlier one"]);
    let other = receipt(&room, "gate3_256k");
    assert_eq!((checks(&other, false), &other["forced"]), (vec!["compared"], &json!(false)));
    let found = other["checks"].as_array().unwrap().iter().find(|check| check["name"] == "compared").unwrap();
    assert_eq!(found["value"], "growth with the length: its gradient was exact, here response");
}

#[test]
fn a_learning_rate_of_zero_fails_its_check_and_stops_the_chain() {
    let room = room();
    gate(&room, "gate3_128k", &["--force"], &SHORT).ended(0, &[]);
    let said = gate(&room, "gate3_128k", &["--force", "--json"], &[&SHORT[..], &["optimizer.lr=0"]].concat());
    let means =
        "lora_b_moved: these adapters have learnt nothing: no gradient has reached their layers, or optimizer.lr";
    said.ended(
        8,
        &["gate3_128k has NOT passed", "gate3_128k has not passed, see runs/gates/gate3_128k/receipt.json", means],
    );
    assert_eq!(said.err.matches("longstraw: rank 0").count(), 1, "one message: {said}");
    let failed = receipt(&room, "gate3_128k");
    assert_eq!(
        (said.json(), &failed["passed"], checks(&failed, false)),
        (failed.clone(), &json!(false), vec!["lora_b_moved"])
    );
    assert_eq!(room.read_json("runs/gates/gate3_128k/receipt.earlier.json")["passed"], true);
    gate(&room, "gate3_256k", &[], &SHORT).refused(8, &["gate3_128k/receipt.json: it has not passed (lora_b_moved)"]);
}

/// Whole sequences under autograd have no pages, no frozen scores and no layers to go through.
#[test]
fn the_conventional_schedule_fails_the_checks_of_pages() {
    let room = room();
    let mut arguments = vec!["gate", "gate3_128k", "--force"];
    let sets = ["memory.prompt_no_grad=false", "parallel.cp_size=1", "grpo.gradient=exact"];
    arguments.extend(sets.iter().chain(&SHORT).flat_map(|set| ["--set", *set]));
    let said = room.ranks(1, &arguments);
    said.ended(8, &["check parallel.cp_size and memory.prompt_no_grad", "has no ratio at all"]);
    let failed = receipt(&room, "gate3_128k");
    let failed = checks(&failed, false);
    for name in ["ratio_first", "layers", "pages_per_rank", "page_bytes"] {
        assert!(failed.contains(&name), "{name} in {failed:?}");
    }
}

#[test]
fn one_answer_has_the_advantage_1_and_trains_every_layer() {
    let room = room();
    let said = gate(&room, "gate4_g1", &["--force"], &SHORT);
    said.ended(0, &["gate4_g1 has passed"]);
    assert!(!said.err.contains("advantage of a lone answer"), "{said}");
    let one = passed(&room, "gate4_g1");
    assert_eq!((&one["advantages"], &one["rewards"]), (&json!([1.0]), &json!([1.0])));
    assert_eq!(
        (&one["group_size"], &one["optimizer_calls"], &one["lora_b_unmoved"]),
        (&json!(1), &json!(1), &json!([]))
    );
    assert_eq!(one["layers_by_phase"], json!({"capture": 4, "replay": 1, "score": 4, "sweep": 4}));
    assert!(one["grad_norm"].as_f64().unwrap() > 0.0);
    // The same answer under rewards that are subtracted from their mean has no gradient.
    let said = gate(&room, "gate4_g1", &["--force"], &[&SHORT[..], &["grpo.reward_fn=synthetic"]].concat());
    said.ended(2, &["grpo.group_size should be at least 2: it is 1"]);
    assert!(!room.path().join("runs/gates/gate4_g1/receipt.json").exists(), "no receipt of an earlier run is left");
}

#[test]
fn further_answers_are_measured_against_the_gate_with_two() {
    let room = room();
    gate(&room, "gate5_g2", &["--force"], &SHORT).ended(0, &["gate5_g2 has passed"]);
    assert_eq!(passed(&room, "gate5_g2")["advantages"], json!([-1.0, 1.0]));
    gate(&room, "gate6_g8", &[], &SHORT)
        .ended(0, &["gate6_g8 has passed", "(guide: about 90 %)", "(guide: about 265 s)"]);
    let eight = passed(&room, "gate6_g8");
    assert_eq!(eight["advantages"], json!([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0]));
    assert!(checks(&eight, true).contains(&"group_memory") && checks(&eight, true).contains(&"group_host_memory"));
    let bytes = eight["device_bytes_per_further_answer"].as_f64().unwrap();
    assert!(bytes.abs() < 0.21e9 / 512.0 / 6.0, "{bytes}");
    assert!(eight["seconds_per_further_answer"].is_f64());
    // As if two answers had taken a megabyte less: eight would then take so much more.
    let mut two = receipt(&room, "gate5_g2");
    for peak in two["peak_device_bytes"].as_array_mut().unwrap() {
        *peak = json!(peak.as_u64().unwrap() - 1_000_000);
    }
    room.write("runs/gates/gate5_g2/receipt.json", two.to_string());
    let said = gate(&room, "gate6_g8", &[], &SHORT);
    said.ended(8, &["further answers take more than one pack does: check prompt_no_grad and layer_wise_transfer"]);
    assert_eq!(checks(&receipt(&room, "gate6_g8"), false), ["group_memory"]);
}

#[test]
fn a_stopped_and_resumed_run_equals_the_run_that_was_not_stopped() {
    let room = room();
    for _again in 0..2 {
        gate(&room, "gate7_online", &["--force"], &SHORT)
            .ended(0, &["gate7_online has passed", "stopped after update 2 of 4"]);
    }
    let online = passed(&room, "gate7_online");
    let names = checks(&online, true);
    for name in ["stopped_after", "resumed_steps", "resumed_adapters", "whole.ratio_first", "resumed.optimizer_calls"] {
        assert!(names.contains(&name), "{name} in {names:?}");
    }
    let (whole, parted) = (receipt(&room, "gate7_online/whole"), receipt(&room, "gate7_online/parted"));
    assert_eq!((&whole["adapter_digest"], &whole["steps"]), (&parted["adapter_digest"], &json!(4)));
    assert_eq!(online["gradient"], "exact");
    assert_eq!(room.read("runs/gates/gate7_online/parted/metrics.jsonl").lines().count(), 4);
}

/// bfloat16 is judged by plain bfloat16 autograd's own distance from float32.
#[test]
fn bfloat16_is_held_to_its_own_autograd() {
    let room = room();
    let sets = ["gate.scale=128", "context.page_size=128", "model.dtype=bfloat16", "run.log_level=debug"];
    gate(&room, "gate2_32k", &[], &sets).ended(0, &[]);
    let two = passed(&room, "gate2_32k");
    let parity = two["checks"].as_array().unwrap().iter().find(|check| check["name"] == "parity.exact").unwrap();
    let (paged, plain) = (parity["value"]["all"].as_f64().unwrap(), parity["value"]["plain"].as_f64().unwrap());
    assert!(plain > 1e-4 && paged <= 1.1 * plain, "{parity}");
    assert!(parity["limit"].as_str().unwrap().contains("4 of 4 layers, prompt 192"), "{parity}");
    // Each pass of plain autograd is a place of its own, so that the watchdog sees rank 0 move: in either mode two
    // backwards, and the scores of two answers before each.
    let places = |rank: usize| {
        let log = room.read(&format!("runs/gates/gate2_32k/logs/rank_{rank}.log"));
        log.lines().filter(|line| line.ends_with("DEBUG evaluate")).count()
    };
    assert_eq!([places(0), places(1)], [1 + 2 * (1 + 2 * (2 + 1)), 1 + 2]);
}

/// Each rank holds half of the experts; plain autograd needs all of them on one.
#[test]
fn experts_that_are_spread_are_judged_by_plain_autograd_over_all_of_them() {
    for (family, attention, scores) in
        [("qwen3_moe", "cpu", Value::Null), ("glm_moe_dsa", "gathered keys, matrix products", json!("plain"))]
    {
        let room = Room::with(&[("config.toml", &config(family)), KEY]);
        gate(&room, "gate2_32k", &[], &["parallel.ep_size=2"]).ended(0, &[]);
        let two = passed(&room, "gate2_32k");
        assert!(checks(&two, true).contains(&"parity.exact"), "{two}");
        let exact = receipt(&room, "gate2_32k/exact");
        assert_eq!((&exact["attention_kernel"], &exact["index_scores"]), (&json!(attention), &scores), "{family}");
    }
}

#[test]
fn an_unknown_gate_and_a_scale_that_does_not_divide_are_refused() {
    let room = room();
    room.alone(&["gate", "gate8"]).ended(2, &["should be one of gate1_key, gate2_32k", "gate7_online"]);
    gate(&room, "gate2_32k", &[], &["gate.scale=48"])
        .refused(2, &["gate.scale should be 32", "page_size 64 (it is 48)"]);
}

#[test]
fn a_stopped_gate_starts_again_and_has_neither_passed_nor_failed() {
    let room = room();
    let arguments = ["gate", "gate3_2m", "--force", "--set", "run.grace_sec=0"];
    let call = Call { ranks: 2, program: LONGSTRAW, arguments: &arguments, variables: &[] };
    let mut running = room.start(&call);
    let beating = room.path().join("runs/gates/gate3_2m/heartbeat/rank_1.json");
    let process = running.until("capture", || {
        let text = std::fs::read_to_string(&beating).ok()?;
        let beat: Value = serde_json::from_str(&text).ok()?;
        (beat["phase"] == "capture").then(|| beat["pid"].as_u64())?
    });
    assert!(Command::new("kill").args(["-USR1", &process.to_string()]).status().unwrap().success());
    running.end().ended(0, &["was asked to stop before its end and begins anew"]);
    let receipt = room.read_json("runs/gates/gate3_2m/receipt.json");
    assert_eq!((&receipt["passed"], &receipt["stopped"]), (&Value::Bool(false), &Value::Bool(true)));
    assert!(room.path().join("runs/gates/gate3_2m/requeue").exists());
}
