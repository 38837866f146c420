//! Runs that are interrupted, stopped or damaged, and go on.

use std::fs;
use std::io::Write as _;
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
pub(crate) fn quick() -> Room {
    room_of(&config(&case("qwen3")))
}

fn room_of(config: &str) -> Room {
    let data = lines(&[record(96, [24, 1, 7]), record(61, [2, 13, 5]), record(5, [1, 1, 3]), record(33, [4, 2, 2])]);
    Room::with(&[("config.toml", config), ("train.jsonl", &data)])
}

/// `train` on two ranks into `run_dir`, with `--resume` or whatever else stands in `flags`, and these values set.
pub(crate) fn arguments<'a>(run_dir: &'a str, flags: &[&'a str], sets: &[&'a str]) -> Vec<&'a str> {
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
pub(crate) fn updates(room: &Room, run_dir: &str) -> usize {
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
    // A line about an evaluation has no step of its own.
    let made = metrics.lines().filter_map(|line| serde_json::from_str::<Value>(line).unwrap()["step"].as_u64());
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
fn an_interrupt_or_a_hang_up_stops_a_run_in_order_with_a_launcher_and_without() {
    let room = slow();
    let sets = ["run.steps=6"];
    train(&room, "whole", &[], &sets).ended(0, &[]);
    // To one rank of two: the ranks agree.
    for (made, rank, name) in [(1, 1, "-INT"), (3, 0, "-HUP")] {
        let mut running = start(&room, "run", &["--resume"], &sets);
        signal(&room, &mut running, "run", made, rank, name);
        running.end().ended(0, &["stopped after update ", "as requested; go on with `longstraw train --resume`"]);
        assert!(room.path().join("run/requeue").exists(), "{name}: a signal before the end wants another start");
    }
    train(&room, "run", &["--resume"], &sets).ended(0, &["going on from "]);
    assert_eq!(complete(&room, "run", 6), complete(&room, "whole", 6));
    // A process on its own, as a terminal signals it.
    let alone = |arguments: &[&str]| room.start(&Call { ranks: 0, program: LONGSTRAW, arguments, variables: &[] });
    for (number, name) in ["-INT", "-HUP"].into_iter().enumerate() {
        let mut running = alone(&arguments("alone", &["--resume"], &["run.steps=1000"]));
        signal(&room, &mut running, "alone", 1 + updates(&room, "alone"), 0, name);
        let said = running.end();
        said.ended(0, &["stopped after update "]);
        assert_eq!(
            said.err.contains("stopping in order; Ctrl-C again, or SIGTERM, ends it at once"),
            number == 0,
            "{said}"
        );
        let made = updates(&room, "alone");
        assert_eq!(room.read("alone/latest"), format!("checkpoints/step_{made}\n"), "nothing is lost");
    }
}

#[test]
fn an_interrupt_and_a_sigterm_end_a_process_at_once_in_either_order_and_an_ignored_hang_up_stays_ignored() {
    let room = slow();
    for (number, (first, second)) in
        [(libc::SIGINT, libc::SIGINT), (libc::SIGTERM, libc::SIGINT), (libc::SIGINT, libc::SIGTERM)]
            .into_iter()
            .enumerate()
    {
        // A write to a full pipe blocks, as a write to a disk that is gone does: the first request to stop is not met.
        let run_dir = format!("run_{number}");
        let metrics = room.path().join(&run_dir).join("metrics.jsonl");
        room.write(&format!("{run_dir}/keep"), "");
        assert!(Command::new("mkfifo").arg(&metrics).status().unwrap().success());
        let mut pipe = fs::OpenOptions::new().read(true).write(true).open(&metrics).unwrap();
        pipe.write_all(&vec![b' '; 65_536]).unwrap();
        let call = arguments(&run_dir, &[], &[]);
        let mut running = room.start(&Call { ranks: 0, program: LONGSTRAW, arguments: &call, variables: &[] });
        let log = format!("{run_dir}/logs/rank_0.log");
        running.until("the write", || room.try_read(&log).ok().filter(|log| log.contains("step 1/")));
        running.signal(first);
        // Another one within a second is taken for the first again.
        std::thread::sleep(std::time::Duration::from_millis(1500));
        assert!(!running.has_ended(), "one alone ends nothing");
        running.signal(second);
        assert_eq!(running.end().code, -1, "by the signal itself, without a code");
    }
    let script = room.script("ignore", &format!("trap '' HUP\nexec {LONGSTRAW} \"$@\""));
    let call = arguments("ignoring", &[], &["run.steps=3"]);
    let mut running = room.start(&Call { ranks: 0, program: &script, arguments: &call, variables: &[] });
    signal(&room, &mut running, "ignoring", 1, 0, "-HUP");
    running.end().ended(0, &[]);
    assert_eq!(room.read_json("ignoring/receipt.json")["steps"], 3);
}

#[test]
fn a_step_whose_end_would_come_too_late_is_dropped_by_all_ranks_and_runs_again_once() {
    // Two ranks on one prompt, and two prompts side by side, of which one sees the signal first.
    for (sides, cp_size) in [(2, 2), (4, 2)] {
        let (room, size) = (slow(), format!("parallel.cp_size={cp_size}"));
        let whole = ["run.steps=4", &size];
        let hasty = [&whole[..], &["run.grace_sec=0", "run.log_level=debug"]].concat();
        let ranks = |arguments: &[&str]| room.ranks(sides, arguments);
        ranks(&arguments("whole", &[], &whole)).ended(0, &[]);
        let call = arguments("run", &[], &hasty);
        let mut running = room.start(&Call { ranks: sides, program: LONGSTRAW, arguments: &call, variables: &[] });
        // In the middle of an update, and not between two of them.
        let log = format!("run/logs/rank_{}.log", sides - 1);
        running.until("the third update", || {
            let log = room.try_read(&log).ok()?;
            log.split_once("step 2/4")?.1.contains("DEBUG capture").then_some(())
        });
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

/// Flips one bit in the middle of a file.
pub(crate) fn damage(room: &Room, file: &str) {
    let file = room.path().join(file);
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
}

#[test]
fn a_damaged_checkpoint_is_kept_aside_and_the_run_goes_on_from_the_older_one_on_every_rank() {
    let (room, sets) = (quick(), ["run.steps=6", "checkpoint.every=2", "checkpoint.keep=3"]);
    train(&room, "run", &[], &sets).ended(0, &[]);
    let whole = complete(&room, "run", 6);
    let metrics = room.read("run/metrics.jsonl");
    for step in [4, 6] {
        damage(&room, &format!("run/checkpoints/step_{step}/masters.safetensors"));
    }
    let said = train(&room, "run", &["--resume"], &sets);
    said.ended(
        0,
        &[
            "run/checkpoints/step_6 is passed over: run/checkpoints/step_6/masters.safetensors is damaged",
            "it is kept as run/checkpoints/step_6.passed_over",
            "run/checkpoints/step_4 is passed over: run/checkpoints/step_4/masters.safetensors is damaged",
        ],
    );
    for rank in 0..2 {
        let log = room.read(&format!("run/logs/rank_{rank}.log"));
        assert_eq!(log.matches("going on from run/checkpoints/step_2: update 3 is next").count(), 1, "{log}");
    }
    assert_eq!(said.err.matches("is passed over").count(), 2, "one line each: {said}");
    assert_eq!(complete(&room, "run", 6), whole);
    let kept = ["step_2", "step_4", "step_4.passed_over", "step_6", "step_6.passed_over"];
    assert_eq!(checkpoints(&room, "run"), kept, "the others were written anew beside them");
    assert_eq!(
        room.read("run/metrics.dropped.jsonl"),
        metrics.lines().skip(2).map(|line| line.to_owned() + "\n").collect::<String>()
    );
    train(&room, "run", &["--resume"], &sets).ended(0, &["this run is finished: update 6 of 6 was its last"]);
    assert_eq!(complete(&room, "run", 6), whole);
}

/// Whatever a run directory holds but for its logs: names and bytes.
pub(crate) fn content(room: &Room, run_dir: &str) -> Vec<(String, Vec<u8>)> {
    let names = room.files(run_dir).into_iter().filter(|name| !name.starts_with("logs/") && name != ".lock");
    names.map(|name| (name.clone(), fs::read(room.path().join(run_dir).join(name)).unwrap())).collect()
}

#[test]
fn checkpoints_that_cannot_be_used_end_the_start_with_their_kind_of_fault_and_nothing_is_changed() {
    let (room, sets) = (quick(), ["run.steps=3", "checkpoint.every=1"]);
    train(&room, "run", &[], &sets).ended(0, &[]);
    let whole = complete(&room, "run", 3);
    let more = ["run.steps=4", "checkpoint.every=1"];
    let path = |name: &str| room.path().join("run/checkpoints").join(name);
    let refused = |words: &[&str]| {
        let before = content(&room, "run");
        train(&room, "run", &["--resume"], &more).refused(3, words);
        assert!(content(&room, "run") == before, "a refusal changes nothing");
    };
    // A file that is away for a moment, of the newest or of both.
    for steps in [&[3][..], &[2, 3]] {
        let files =
            steps.iter().map(|step| (path(&format!("step_{step}/masters.safetensors")), path(&format!("{step}"))));
        let files: Vec<_> = files.collect();
        for (file, away) in &files {
            fs::rename(file, away).unwrap();
        }
        refused(&["cannot read run/checkpoints/step_3/masters.safetensors: ", "Start again once the file can be read"]);
        for (file, away) in &files {
            fs::rename(away, file).unwrap();
        }
    }
    // A field of another version.
    let state = room.read("run/checkpoints/step_3/state.json");
    room.write("run/checkpoints/step_3/state.json", state.replacen("\"updates\"", "\"lessons\": 1, \"updates\"", 1));
    refused(&[
        "step_3/state.json is of another version of longstraw: unknown field `lessons`",
        "rename run/checkpoints/step_3",
    ]);
    room.write("run/checkpoints/step_3/state.json", &state);
    // The folder of all checkpoints, as of a disk that is not mounted.
    fs::rename(room.path().join("run/checkpoints"), room.path().join("run/away")).unwrap();
    refused(&["run/latest names checkpoints/step_3, and run/checkpoints holds no checkpoint", "--anew"]);
    fs::rename(room.path().join("run/away"), room.path().join("run/checkpoints")).unwrap();
    // Damage of all of them.
    for step in [2, 3] {
        damage(&room, &format!("run/checkpoints/step_{step}/masters.safetensors"));
    }
    refused(&["no checkpoint in run/checkpoints can be used: ", "step_3/masters.safetensors is damaged", "--anew"]);
    for step in [2, 3] {
        damage(&room, &format!("run/checkpoints/step_{step}/masters.safetensors"));
    }
    train(&room, "run", &["--resume"], &more).ended(0, &["going on from run/checkpoints/step_3: update 4 is next"]);
    assert_ne!(complete(&room, "run", 4), whole);
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
    let kept = content(&room, "run");
    let said = train(&room, "run", &[], &sets);
    said.refused(2, &["run/checkpoints holds checkpoints of an earlier run", "--resume", "--anew", "--run-dir"]);
    let said = train(&room, "run", &["--resume"], &[&sets[..], &["optimizer.lr=0.5", "lora.rank=8"]].concat());
    let words = ["step_2 is of another run: ", "lora.rank was 4 and is 8; optimizer.lr was 0.001 and is 0.5; "];
    said.refused(2, &words);
    let data = room.read("train.jsonl");
    room.write("train.jsonl", lines(&[record(50, [1, 2, 3])]));
    train(&room, "run", &["--resume"], &sets).refused(2, &["the data (digest) was "]);
    room.write("train.jsonl", data);
    let said = train(&room, "run", &["--resume"], &["run.steps=1", "checkpoint.every=1"]);
    said.refused(2, &["run.steps should be at least 2", "it is 1"]);
    let said = train(&room, "run", &["--resume"], &[&sets[..], &["optimizer.grad_accum=2"]].concat());
    said.refused(2, &["groups of an update (replicas × optimizer.grad_accum) was 1 and is 2"]);
    assert!(kept == content(&room, "run"), "a refusal changes nothing");
}

#[test]
fn a_finished_run_started_again_does_nothing_and_a_higher_number_of_steps_goes_on_from_its_end() {
    let room = quick();
    // Nothing is said about checkpoints: the run saves at its end.
    train(&room, "run", &[], &["run.steps=2"]).ended(0, &[]);
    assert_eq!(checkpoints(&room, "run"), ["step_2"]);
    let kept = content(&room, "run");
    let said = train(&room, "run", &["--resume", "--json"], &["run.steps=2"]);
    said.ended(0, &["this run is finished: update 2 of 2 was its last", "nothing is done", "--anew"]);
    assert_eq!(said.json(), room.read_json("run/receipt.json"));
    assert!(kept == content(&room, "run"));
    train(&room, "run", &["--resume"], &["run.steps=4"]).ended(0, &["step_2: update 3 is next"]);
    assert_eq!(room.read_json("run/receipt.step_2.json"), said.json(), "the receipt of the end before is kept");
    train(&room, "whole", &[], &["run.steps=4"]).ended(0, &[]);
    assert_eq!(complete(&room, "run", 4), complete(&room, "whole", 4));
    assert_eq!(numbers(&room, "run"), numbers(&room, "whole"));
    // Without its receipt only the evaluation after the last update is left to do.
    fs::remove_file(room.path().join("run/receipt.json")).unwrap();
    train(&room, "run", &["--resume"], &["run.steps=4"]).ended(0, &["step_4: update 5 is next"]);
    assert_eq!(complete(&room, "run", 4), complete(&room, "whole", 4));
}

#[test]
fn rows_of_a_micro_block_that_are_left_open_are_those_of_the_checkpoint() {
    let room = quick();
    train(&room, "whole", &[], &["run.steps=4", "memory.micro_block=3"]).ended(0, &[]);
    train(&room, "run", &[], &["run.steps=2", "memory.micro_block=3"]).ended(0, &[]);
    let said = train(&room, "run", &["--resume"], &["run.steps=4", "memory.micro_block=4"]);
    said.refused(2, &["memory.micro_block was 3 and is 4"]);
    let said = train(&room, "run", &["--resume"], &["run.steps=4", "memory.micro_block=0"]);
    said.ended(0, &["memory.micro_block: 3 rows, as in the checkpoint that the run goes on from"]);
    assert_eq!(complete(&room, "run", 4), complete(&room, "whole", 4));
}

#[test]
fn a_run_begun_anew_moves_the_earlier_one_aside_and_loses_none_of_it() {
    let room = quick();
    train(&room, "run", &[], &["run.steps=2"]).ended(0, &[]);
    let first = complete(&room, "run", 2);
    let before = content(&room, "run");
    let said = train(&room, "run", &["--anew"], &["run.steps=2", "run.seed=5", "optimizer.lr=0.01"]);
    said.ended(0, &["what an earlier run left in run is now in run/earlier/1"]);
    assert_ne!(complete(&room, "run", 2), first);
    assert!(content(&room, "run/earlier/1") == before, "every file, byte by byte");
    train(&room, "run", &["--anew", "--resume"], &[]).ended(2, &["cannot be used with"]);
    // Updates that no checkpoint holds cannot be gone on from; their numbers are kept too.
    fs::remove_dir_all(room.path().join("run/checkpoints")).unwrap();
    fs::remove_file(room.path().join("run/latest")).unwrap();
    let said = train(&room, "run", &["--resume"], &["run.steps=1"]);
    said.ended(0, &["no checkpoint in run/checkpoints to go on from: starting anew", "is now in run/earlier/2"]);
    complete(&room, "run", 1);
    assert_eq!(room.read("run/earlier/2/metrics.jsonl").lines().count(), 2);
}

#[test]
fn spellings_of_paths_and_keys_that_change_no_number_may_differ_when_a_run_goes_on() {
    let room = quick();
    let whole = ["run.steps=4"];
    train(&room, "whole", &[], &whole).ended(0, &[]);
    train(&room, "run", &[], &["run.steps=2"]).ended(0, &[]);
    // The model at another path, with a slash at its end; the data, too.
    let model = room.path().join("copy");
    fs::create_dir(&model).unwrap();
    for file in fs::read_dir(case("qwen3")).unwrap().map(|entry| entry.unwrap().path()) {
        fs::copy(&file, model.join(file.file_name().unwrap())).unwrap();
    }
    room.write("moved/train.jsonl", room.read("train.jsonl"));
    let sets = [
        "run.steps=4",
        "model.path=./copy/",
        "data.path=moved/../moved/train.jsonl",
        "checkpoint.keep=5",
        "checkpoint.every=1",
        "run.trace=true",
        "run.grace_sec=3",
        "run.log_level=debug",
        "memory.inputs_every=2",
    ];
    train(&room, "run", &["--resume"], &sets).ended(0, &["step_2: update 3 is next"]);
    assert_eq!(complete(&room, "run", 4), complete(&room, "whole", 4));
    assert_eq!(numbers(&room, "run"), numbers(&room, "whole"));
    // Another model under the old name is another run.
    let mut weights = fs::read(model.join("model.safetensors")).unwrap();
    let last = weights.len() - 3;
    weights[last] ^= 1;
    fs::write(model.join("model.safetensors"), weights).unwrap();
    let said = train(&room, "run", &["--resume"], &["run.steps=5", "model.path=copy"]);
    said.refused(2, &["the model (digest) was "]);
}

#[test]
fn a_decay_that_would_end_elsewhere_is_asked_for_and_the_rate_never_rises_again() {
    let room = quick();
    let sets = |more: &[&'static str]| [&["optimizer.schedule=cosine"][..], more].concat();
    let rates = |run: &str| -> Vec<f64> {
        let numbers = numbers(&room, run);
        numbers.iter().map(|step| step["learning_rate"].as_f64().unwrap()).collect()
    };
    train(&room, "run", &[], &sets(&["run.steps=4"])).ended(0, &[]);
    let said = train(&room, "run", &["--resume"], &sets(&["run.steps=6"]));
    let words = [
        "the cosine decay of the learning rate was over 4 updates and would be over 6",
        "schedule_steps=4",
        "schedule_steps=6",
    ];
    said.refused(2, &words);
    let kept = sets(&["run.steps=6", "optimizer.schedule_steps=4"]);
    train(&room, "run", &["--resume"], &kept).ended(0, &["the learning rate is 0 from update 5 of 6 on"]);
    assert_eq!(rates("run")[4..], [0.0, 0.0]);
    let stretched = sets(&["run.steps=8", "optimizer.schedule_steps=8"]);
    train(&room, "run", &["--resume"], &stretched)
        .ended(0, &["the decay of the learning rate now ends after update 8 (it was 4)"]);
    train(&room, "whole", &[], &sets(&["run.steps=8"])).ended(0, &[]);
    assert_eq!(rates("run")[6..], rates("whole")[6..]);
    assert!(rates("whole").windows(2).all(|pair| pair[1] < pair[0]));
}

#[test]
fn saves_by_time_change_no_number() {
    let room = slow();
    train(&room, "whole", &[], &["run.steps=4", "checkpoint.every_sec=0"]).ended(0, &[]);
    // Each update takes longer than a second or not: every number of saves is right.
    train(&room, "run", &[], &["run.steps=4", "checkpoint.every_sec=1"]).ended(0, &[]);
    assert_eq!(complete(&room, "run", 4), complete(&room, "whole", 4));
    assert_eq!(numbers(&room, "run"), numbers(&room, "whole"));
}

#[test]
fn a_run_that_saves_by_time_and_is_killed_goes_on_from_what_it_saved() {
    let (room, sets) = (quick(), ["run.steps=1000000", "checkpoint.every_sec=1"]);
    let mut running = start(&room, "run", &[], &sets);
    running.until("a save by time", || room.path().join("run/latest").exists().then_some(()));
    signal(&room, &mut running, "run", 1, 1, "-9");
    assert_ne!(running.end().code, 0);
    let made = updates(&room, "run") as u64;
    let said = train(&room, "run", &["--resume"], &[&format!("run.steps={}", made + 1), "checkpoint.every_sec=1"]);
    said.ended(0, &["going on from run/checkpoints/step_"]);
    let next = said.err.lines().find_map(|line| line.split_once(": update ")?.1.split_once(" is next")?.0.parse().ok());
    assert!(next.is_some_and(|next: u64| next > 1 && next <= made + 1), "{next:?} of {made}\n{said}");
    complete(&room, "run", made + 1);
}

#[test]
fn a_start_anew_that_was_interrupted_is_finished_by_the_next_start_with_a_line() {
    let room = quick();
    train(&room, "run", &[], &["run.steps=2"]).ended(0, &[]);
    // As a kill between two moves leaves it.
    room.write("run/earlier/1/.moving", "");
    fs::rename(room.path().join("run/metrics.jsonl"), room.path().join("run/earlier/1/metrics.jsonl")).unwrap();
    let said = train(&room, "run", &["--resume"], &["run.steps=1"]);
    said.ended(0, &["a start that began anew in run was interrupted", "is now in run/earlier/1", "starting anew"]);
    complete(&room, "run", 1);
    assert!(room.path().join("run/earlier/1/checkpoints/step_2").is_dir());
    assert!(!room.path().join("run/earlier/1/.moving").exists());
    assert_eq!(room.read("run/earlier/1/metrics.jsonl").lines().count(), 2);
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
