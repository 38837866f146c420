//! Runs that are interrupted, stopped or damaged, and go on.

use std::fs;
use std::process::Command;

use serde_json::Value;

use super::checkpoints::case;
use super::room::{Call, LONGSTRAW, Room, Running, Said};
use super::training::{config, lines, record};

/// A room for updates that take long enough to be met in the middle: each is made of many groups.
fn slow() -> Room {
    let text = config(&case("qwen3")).replace("lr = 1e-3\n", "lr = 1e-3\ngrad_accum = 8\n");
    room_of(&text)
}

/// A room for quick updates.
fn quick() -> Room {
    room_of(&config(&case("qwen3")))
}

fn room_of(config: &str) -> Room {
    let data = lines(&[record(96, [24, 1, 7]), record(61, [2, 13, 5]), record(5, [1, 1, 3]), record(33, [4, 2, 2])]);
    Room::with(&[("config.toml", config), ("train.jsonl", &data)])
}

/// `train` on two ranks into `run_dir`, with `--resume` or whatever else stands in `flags`, and these values set.
fn arguments<'a>(run_dir: &'a str, flags: &[&'a str], sets: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = vec!["train", "--run-dir", run_dir];
    arguments.extend(flags);
    arguments.extend(sets.iter().flat_map(|set| ["--set", *set]));
    arguments
}

pub(crate) fn train(room: &Room, run_dir: &str, flags: &[&str], sets: &[&str]) -> Said {
    room.ranks(2, &arguments(run_dir, flags, sets))
}

pub(crate) fn start(room: &Room, run_dir: &str, flags: &[&str], sets: &[&str]) -> Running {
    room.start(&Call { ranks: 2, program: LONGSTRAW, arguments: &arguments(run_dir, flags, sets), variables: &[] })
}

/// Lines of the metrics that are whole.
fn updates(room: &Room, run_dir: &str) -> usize {
    let text = fs::read_to_string(room.path().join(run_dir).join("metrics.jsonl")).unwrap_or_default();
    text.matches('\n').count()
}

/// Sends a signal to a rank of a run that goes on, once it has made so many updates.
#[track_caller]
pub(crate) fn signal(room: &Room, running: &mut Running, run_dir: &str, made: usize, rank: usize, signal: &str) {
    running.until("the update", || (updates(room, run_dir) >= made).then_some(()));
    let log = room.read(&format!("{run_dir}/logs/rank_{rank}.log"));
    let process = log.rsplit("process ").next().unwrap().lines().next().unwrap().trim().to_owned();
    assert!(Command::new("kill").args([signal, &process]).status().unwrap().success());
}

/// The checkpoints that are there.
pub(crate) fn checkpoints(room: &Room, run_dir: &str) -> Vec<String> {
    let folder = room.path().join(run_dir).join("checkpoints");
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// A run that has made `steps` updates in all: its metrics have each once, its ranks hold the same adapters. Returns
/// their digest.
#[track_caller]
pub(crate) fn complete(room: &Room, run_dir: &str, steps: u64) -> String {
    let receipt = room.read_json(&format!("{run_dir}/receipt.json"));
    assert_eq!((&receipt["passed"], receipt["steps"].as_u64()), (&Value::Bool(true), Some(steps)));
    assert!(receipt.get("stopped").is_none(), "{receipt}");
    let metrics = room.read(&format!("{run_dir}/metrics.jsonl"));
    let made = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["step"].as_u64().unwrap());
    assert_eq!(made.collect::<Vec<_>>(), (1..=steps).collect::<Vec<_>>());
    assert_eq!(receipt["adapter_digest"][0], receipt["adapter_digest"][1]);
    receipt["adapter_digest"][0].as_str().unwrap().to_owned()
}

/// The metrics but for their seconds and what follows from them, and the allocator's bytes, which no two runs share.
pub(crate) fn numbers(room: &Room, run_dir: &str) -> Vec<Value> {
    let metrics = room.read(&format!("{run_dir}/metrics.jsonl"));
    let without_seconds = |line| {
        let mut step: Value = serde_json::from_str(line).unwrap();
        let _ =
            ["seconds", "tokens_per_second", "memory"].map(|key| step.as_object_mut().unwrap().remove(key).unwrap());
        step
    };
    metrics.lines().map(without_seconds).collect()
}

#[test]
fn a_run_whose_rank_is_killed_goes_on_to_the_same_adapters_and_each_update_is_told_once() {
    let (room, sets) = (slow(), ["run.steps=6", "checkpoint.every=3"]);
    train(&room, "whole", &[], &sets).ended(0, &[]);
    let mut running = start(&room, "run", &[], &sets);
    signal(&room, &mut running, "run", 4, 1, "-9");
    let said = running.end();
    assert!(said.code != 0 && said.err.contains("signal 9"), "{said}");
    assert_eq!((updates(&room, "run"), checkpoints(&room, "run")), (4, vec!["step_3".to_owned()]));
    assert_eq!(room.read("run/latest"), "checkpoints/step_3\n");
    train(&room, "run", &["--resume"], &sets).ended(0, &["going on from run/checkpoints/step_3: update 4 is next"]);
    assert_eq!(complete(&room, "run", 6), complete(&room, "whole", 6));
    assert_eq!(numbers(&room, "run"), numbers(&room, "whole"), "prompts, losses and norms are the same too");
    let seconds = |run: &str| room.read_json(&format!("{run}/receipt.json"))["seconds"]["total"].as_f64().unwrap();
    let metrics = room.read("run/metrics.jsonl");
    let steps = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let sum: f64 = steps.map(|step| step["seconds"]["total"].as_f64().unwrap()).sum();
    assert!((seconds("run") - sum).abs() < 1e-6, "the receipt counts the updates before the interruption");
}

#[test]
fn a_file_or_a_signal_to_any_rank_stops_a_run_in_order_and_it_goes_on_to_the_same_adapters() {
    let (room, sets) = (slow(), ["run.steps=6"]);
    train(&room, "whole", &[], &sets).ended(0, &[]);
    room.write("run/stop", "");
    let go_on = "as requested; go on with `longstraw train --resume`";
    train(&room, "run", &[], &sets).ended(0, &["stopped after update 0 of 6", go_on]);
    assert!(!room.path().join("run/stop").exists(), "it stops one run");
    assert!(!room.path().join("run/requeue").exists(), "whoever puts a file there wants a stop");
    let receipt = room.read_json("run/receipt.json");
    assert_eq!((&receipt["passed"], &receipt["stopped"]), (&Value::Bool(false), &Value::Bool(true)));
    for (made, rank, name) in [(1, 1, "-USR1"), (3, 0, "-TERM")] {
        let mut running = start(&room, "run", &["--resume"], &sets);
        signal(&room, &mut running, "run", made, rank, name);
        running.end().ended(0, &["stopped after update ", go_on]);
        assert!(room.path().join("run/requeue").exists(), "a signal before the end wants another start");
        let receipt = room.read_json("run/receipt.json");
        let steps = receipt["steps"].as_u64().unwrap();
        assert!((made as u64..6).contains(&steps), "it stopped in the middle: {steps}");
        assert_eq!((&receipt["passed"], &receipt["stopped"]), (&Value::Bool(false), &Value::Bool(true)));
        assert_eq!(room.read("run/latest"), format!("checkpoints/step_{steps}\n"));
        assert_eq!(updates(&room, "run") as u64, steps);
    }
    train(&room, "run", &["--resume"], &sets).ended(0, &["going on from "]);
    assert_eq!(complete(&room, "run", 6), complete(&room, "whole", 6));
    assert_eq!(numbers(&room, "run"), numbers(&room, "whole"));
}

#[test]
fn a_step_whose_end_would_come_too_late_is_dropped_by_all_ranks_and_runs_again_once() {
    // Two ranks on one prompt, and two prompts side by side, of which one sees the signal first.
    for (sides, cp_size) in [(2, 2), (4, 2)] {
        let (room, size) = (slow(), format!("parallel.cp_size={cp_size}"));
        let whole = ["run.steps=4", &size];
        let hasty = [&whole[..], &["run.grace_sec=0"]].concat();
        let ranks = |arguments: &[&str]| room.ranks(sides, arguments);
        ranks(&arguments("whole", &[], &whole)).ended(0, &[]);
        let call = arguments("run", &[], &hasty);
        let mut running = room.start(&Call { ranks: sides, program: LONGSTRAW, arguments: &call, variables: &[] });
        signal(&room, &mut running, "run", 2, sides - 1, "-USR1");
        let said = running.end();
        said.ended(
            0,
            &["update 3 is dropped ", "run.grace_sec", "its prompts run again", "stopped after update 2 of 4"],
        );
        assert_eq!((updates(&room, "run"), checkpoints(&room, "run")), (2, vec!["step_2".to_owned()]));
        let receipt = room.read_json("run/receipt.json");
        assert_eq!((&receipt["passed"], &receipt["stopped"]), (&Value::Bool(false), &Value::Bool(true)));
        assert!(room.path().join("run/requeue").exists(), "it wants to be started again");
        ranks(&arguments("run", &["--resume"], &whole)).ended(0, &["step_2: update 3 is next"]);
        assert!(!room.path().join("run/requeue").exists(), "it has been");
        assert_eq!(complete(&room, "run", 4), complete(&room, "whole", 4));
        assert_eq!(numbers(&room, "run"), numbers(&room, "whole"), "the same prompts, each once");
    }
}

#[test]
fn a_damaged_checkpoint_is_passed_over_for_the_older_one_on_every_rank() {
    let (room, sets) = (quick(), ["run.steps=6", "checkpoint.every=2", "checkpoint.keep=3"]);
    train(&room, "run", &[], &sets).ended(0, &[]);
    let whole = complete(&room, "run", 6);
    let file = room.path().join("run/checkpoints/step_6/masters.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
    fs::remove_file(room.path().join("run/checkpoints/step_4/adapter_config.json")).unwrap();
    let said = train(&room, "run", &["--resume"], &sets);
    said.ended(
        0,
        &[
            "run/checkpoints/step_6 is passed over: run/checkpoints/step_6/masters.safetensors is damaged",
            "run/checkpoints/step_4 is passed over: cannot read run/checkpoints/step_4/adapter_config.json",
        ],
    );
    for rank in 0..2 {
        let log = room.read(&format!("run/logs/rank_{rank}.log"));
        assert_eq!(log.matches("going on from run/checkpoints/step_2: update 3 is next").count(), 1, "{log}");
    }
    assert_eq!(said.err.matches("is passed over").count(), 2, "one line each: {said}");
    assert_eq!(complete(&room, "run", 6), whole);
    assert_eq!(checkpoints(&room, "run"), ["step_2", "step_4", "step_6"], "they were written anew");
    train(&room, "run", &["--resume"], &sets).ended(0, &["going on from run/checkpoints/step_6"]);
    assert_eq!(complete(&room, "run", 6), whole);
    // One digit of the data's position, which no other file holds.
    for step in [2, 4, 6] {
        let state = format!("run/checkpoints/step_{step}/state.json");
        room.write(&state, room.read(&state).replace("\"epoch\": ", "\"epoch\": 1"));
    }
    let said = train(&room, "run", &["--resume"], &sets);
    said.ended(0, &["step_2/state.json is damaged", "no checkpoint in run/checkpoints to go on from: starting anew"]);
    assert_eq!(complete(&room, "run", 6), whole);
}

/// A script in whose runs no file grows beyond `kib` KiB, as on a disk that is full.
fn limited(room: &Room, kib: u64) -> String {
    // Ignored, the signal that comes with it leaves the error for the program to see.
    room.script("limited", &format!("trap '' XFSZ\nulimit -f {}\nexec {LONGSTRAW} \"$@\"", 2 * kib))
}

#[test]
fn a_save_that_fails_leaves_latest_where_it_was_and_later_ones_succeed() {
    let room = quick();
    let sets = |steps: &'static str| [steps, "checkpoint.every=3"];
    train(&room, "whole", &[], &sets("run.steps=9")).ended(0, &[]);
    train(&room, "run", &[], &sets("run.steps=3")).ended(0, &[]);
    let script = limited(&room, 100);
    let call = Call {
        ranks: 2,
        program: &script,
        arguments: &arguments("run", &["--resume"], &sets("run.steps=6")),
        // Memory that ranks share is a file as well.
        variables: &[("OMPI_MCA_btl", "self,tcp")],
    };
    let said = room.run(&call);
    said.refused(3, &["rank 0, save: cannot write run/checkpoints/.step_6.partial/masters.safetensors: ", "too large"]);
    assert_eq!(room.read("run/latest"), "checkpoints/step_3\n");
    assert_eq!(checkpoints(&room, "run"), ["step_3"], "what was begun is removed");
    assert!(!room.path().join("run/receipt.json").exists());
    // What a rank leaves that is killed while it saves.
    room.write("run/checkpoints/.step_6.partial/masters.safetensors", "torn");
    train(&room, "run", &["--resume"], &sets("run.steps=6")).ended(0, &["step_3: update 4 is next"]);
    complete(&room, "run", 6);
    assert_eq!(checkpoints(&room, "run"), ["step_3", "step_6"]);
    train(&room, "run", &["--resume"], &sets("run.steps=9")).ended(0, &["step_6: update 7 is next"]);
    assert_eq!(complete(&room, "run", 9), complete(&room, "whole", 9));
    assert_eq!(room.read("run/latest"), "checkpoints/step_9\n");
}

#[test]
fn a_place_where_no_checkpoint_can_lie_ends_the_run_with_its_reason() {
    let room = quick();
    room.write("run/checkpoints", "a file");
    let said = train(&room, "run", &[], &["checkpoint.every=2"]);
    said.refused(3, &["rank 0, start: cannot read run/checkpoints: Not a directory"]);
}

#[test]
fn as_many_checkpoints_stay_as_are_to_be_kept_and_each_can_be_gone_on_from_to_the_bit() {
    let room = quick();
    let sets = |steps: &'static str| {
        [steps, "checkpoint.every=1", "checkpoint.keep=2", "model.dtype=float64", "grpo.kl_coef=0.05"]
    };
    train(&room, "whole", &[], &sets("run.steps=5")).ended(0, &[]);
    assert_eq!(checkpoints(&room, "whole"), ["step_4", "step_5"]);
    assert_eq!(
        room.files("whole/checkpoints/step_5"),
        ["adapter_config.json", "adapter_model.safetensors", "masters.safetensors", "state.json"]
    );
    train(&room, "run", &[], &sets("run.steps=2")).ended(0, &[]);
    assert_eq!(checkpoints(&room, "run"), ["step_1", "step_2"]);
    train(&room, "run", &["--resume"], &sets("run.steps=5")).ended(0, &["step_2: update 3 is next"]);
    assert_eq!(checkpoints(&room, "run"), ["step_4", "step_5"]);
    assert_eq!(complete(&room, "run", 5), complete(&room, "whole", 5));
    let file = "checkpoints/step_5/masters.safetensors";
    let bytes = |run: &str| fs::read(room.path().join(run).join(file)).unwrap();
    assert!(bytes("run") == bytes("whole"), "moments are the same to the bit");
}

#[test]
fn a_run_goes_on_only_as_what_it_was_and_never_anew_among_its_checkpoints() {
    let (room, sets) = (quick(), ["run.steps=2", "checkpoint.every=1"]);
    train(&room, "run", &["--resume"], &sets).ended(0, &["no checkpoint in run/checkpoints to go on from"]);
    let kept = (room.read("run/metrics.jsonl"), room.read("run/receipt.json"));
    train(&room, "run", &[], &sets).refused(2, &["run/checkpoints holds checkpoints of an earlier run", "--resume"]);
    let said = train(&room, "run", &["--resume"], &[&sets[..], &["optimizer.lr=0.5", "lora.rank=8"]].concat());
    let words = ["step_2 is of another run: ", "lora.rank was 4 and is 8; optimizer.lr was 0.001 and is 0.5; "];
    said.refused(2, &words);
    let data = room.read("train.jsonl");
    room.write("train.jsonl", lines(&[record(50, [1, 2, 3])]));
    train(&room, "run", &["--resume"], &sets).refused(2, &["the data (digest) was "]);
    room.write("train.jsonl", data);
    let said = train(&room, "run", &["--resume"], &["run.steps=1", "checkpoint.every=1"]);
    said.refused(2, &["run.steps should be at least 2", "it is 1"]);
    assert_eq!(kept, (room.read("run/metrics.jsonl"), room.read("run/receipt.json")), "a refusal changes nothing");
    train(&room, "run", &["--resume"], &sets).ended(0, &["step_2: update 3 is next"]);
    complete(&room, "run", 2);
}

#[test]
fn a_signal_during_the_held_out_evaluation_saves_and_a_start_without_an_update_asks_for_one_more_only() {
    let text = config(&case("qwen3")).replace("[data]\n", "[data]\nheld_out = \"held_out.jsonl\"\n");
    let room = room_of(&text);
    let many: Vec<Value> = (0..1500).map(|_| record(96, [24, 1, 7])).collect();
    room.write("held_out.jsonl", lines(&many));
    // Before the first update there is nothing to save, and nothing is lost.
    let sets = ["run.steps=2"];
    for requeued in [true, false] {
        let mut running = start(&room, "run", &["--resume"], &sets);
        let beating = room.path().join("run/heartbeat/rank_1.json");
        let process = running.until("the evaluation", || {
            let beat: Value = serde_json::from_str(&fs::read_to_string(&beating).ok()?).ok()?;
            (beat["phase"] == "evaluate").then(|| beat["pid"].as_u64())?
        });
        assert!(Command::new("kill").args(["-USR1", &process.to_string()]).status().unwrap().success());
        running.end().ended(0, &["the held-out evaluation is dropped ", "stopped after update 0 of 2"]);
        assert_eq!(room.path().join("run/requeue").exists(), requeued, "the second time it would go on like that");
    }
    assert!(!room.path().join("run/checkpoints").exists());
    // With fewer prompts it comes to its end.
    room.write("held_out.jsonl", lines(&many[..2]));
    train(&room, "run", &["--resume"], &sets).ended(0, &[]);
    complete(&room, "run", 2);
    assert!(!room.path().join("run/without_progress").exists());
}
