//! Faults of the machine under a run: disks that are full, read-only, without locks or that do not read, memory that runs
//! out. What was learnt before stays.

use std::process::Command;

use serde_json::json;

use super::resume::{arguments, checkpoints, complete, content, numbers, quick, train};
use super::room::{Call, LONGSTRAW, Room, Said};
use super::training::{ids, lines};

/// A call of the system that fails, with which error, on paths that contain a text.
#[derive(Clone, Copy)]
pub(crate) struct Fault {
    /// `flock`, `read`, `write`, `create` or `disk`; faults.c has the functions.
    pub(crate) call: &'static str,
    /// A negative number is a signal, sent once.
    pub(crate) errno: libc::c_int,
    pub(crate) path: &'static str,
    /// The rank that meets it; `None` for all.
    pub(crate) rank: Option<usize>,
    /// So many of the calls succeed first.
    pub(crate) skip: u32,
}

/// The preloaded library that makes calls fail, built in `room`.
pub(crate) fn library(room: &Room) -> String {
    let file = room.path().join("faults.so").display().to_string();
    if !std::path::Path::new(&file).exists() {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/command/faults.c");
        let status = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o", &file, source, "-ldl"]).status();
        assert!(status.unwrap().success(), "cc builds the library");
    }
    file
}

/// The variables of a program that meets the fault.
pub(crate) fn variables(room: &Room, fault: Fault) -> Vec<(&'static str, String)> {
    let mut variables = vec![
        ("LD_PRELOAD", library(room)),
        ("FAULT_CALL", fault.call.to_owned()),
        ("FAULT_ERRNO", fault.errno.to_string()),
        ("FAULT_PATH", fault.path.to_owned()),
        ("FAULT_SKIP", fault.skip.to_string()),
    ];
    variables.extend(fault.rank.map(|rank| ("FAULT_RANK", rank.to_string())));
    variables
}

/// Trains on two ranks under a fault, on all ranks or on one.
pub(crate) fn train_under(room: &Room, fault: Fault, run_dir: &str, flags: &[&str], sets: &[&str]) -> Said {
    let variables = variables(room, fault);
    let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let call =
        Call { ranks: 2, program: LONGSTRAW, arguments: &arguments(run_dir, flags, sets), variables: &variables };
    room.run(&call)
}

#[test]
fn a_file_system_without_locks_is_a_warning_of_a_run_and_of_doctor() {
    let room = quick();
    for (number, errno) in [libc::ENOSYS, libc::EOPNOTSUPP, libc::ENOLCK].into_iter().enumerate() {
        let fault = Fault { call: "flock", errno, path: "/", rank: None, skip: 0 };
        let flag: &[&str] = if number == 0 { &[] } else { &["--anew"] };
        let said = train_under(&room, fault, "run", flag, &["run.steps=1"]);
        said.ended(0, &["longstraw: the file system of run has no file locks (", "a second run in the same folder"]);
        complete(&room, "run", 1);
        let (library, errno) = (library(&room), errno.to_string());
        let variables =
            [("LD_PRELOAD", &*library), ("FAULT_CALL", "flock"), ("FAULT_ERRNO", &errno), ("FAULT_PATH", "/")];
        let doctor = Call { ranks: 0, program: LONGSTRAW, arguments: &["doctor"], variables: &variables };
        let said = room.run(&doctor);
        let line = said.out.lines().find(|line| line.contains("run directory")).unwrap();
        assert!(line.starts_with("warn") && line.contains("has no file locks"), "{said}");
    }
    let other = Fault { call: "flock", errno: libc::EIO, path: "/run/.lock", rank: None, skip: 0 };
    train_under(&room, other, "run", &["--anew"], &[]).refused(3, &["cannot write run/.lock: Input/output error"]);
}

#[test]
fn a_checkpoint_that_does_not_read_ends_the_start_and_is_gone_on_from_once_it_does() {
    let room = quick();
    train(&room, "whole", &[], &["run.steps=3"]).ended(0, &[]);
    train(&room, "run", &[], &["run.steps=2", "checkpoint.every=1"]).ended(0, &[]);
    let kept = content(&room, "run");
    for (errno, words) in [(libc::EIO, "Input/output error"), (libc::ESTALE, "Stale file handle")] {
        for path in ["step_2/masters.safetensors", "step_2/state.json", "run/latest"] {
            let said = train_under(
                &room,
                Fault { call: "read", errno, path, rank: None, skip: 0 },
                "run",
                &["--resume"],
                &["run.steps=3"],
            );
            said.refused(3, &["cannot read run/", words]);
            assert!(content(&room, "run") == kept, "a refusal changes nothing");
        }
    }
    train(&room, "run", &["--resume"], &["run.steps=3"]).ended(0, &["step_2: update 3 is next"]);
    assert_eq!(complete(&room, "run", 3), complete(&room, "whole", 3));
}

#[test]
fn a_disk_that_is_full_for_the_metrics_ends_the_run_with_what_was_learnt_saved() {
    let room = quick();
    train(&room, "whole", &[], &["run.steps=5"]).ended(0, &[]);
    // The first update finds room, the second does not.
    train(&room, "run", &[], &["run.steps=1"]).ended(0, &[]);
    let fault = Fault { call: "write", errno: libc::ENOSPC, path: "run/metrics.jsonl", rank: None, skip: 0 };
    let said = train_under(&room, fault, "run", &["--resume"], &["run.steps=5"]);
    said.refused(3, &["cannot write run/metrics.jsonl: No space left on device", "saved after update 2; "]);
    assert_eq!(checkpoints(&room, "run"), ["step_1", "step_2"]);
    assert_eq!(room.read("run/latest"), "checkpoints/step_2\n");
    train(&room, "run", &["--resume"], &["run.steps=5"]).ended(0, &["step_2: update 3 is next"]);
    let digest = |run: &str| room.read_json(&format!("{run}/receipt.json"))["adapter_digest"][0].clone();
    assert_eq!(digest("run"), digest("whole"));
    // Only the line that the full disk refused is missing, also after another start.
    train(&room, "run", &["--resume"], &["run.steps=6"]).ended(0, &["step_5: update 6 is next"]);
    let steps: Vec<_> = numbers(&room, "run").iter().map(|step| step["step"].clone()).collect();
    assert_eq!(steps, [1, 3, 4, 5, 6].map(|step| json!(step)));
}

#[test]
fn metrics_that_cannot_be_brought_to_the_disk_do_not_stop_a_save_after_a_failure() {
    let room = quick();
    train(&room, "run", &[], &["run.steps=1"]).ended(0, &[]);
    let fault = Fault { call: "disk", errno: libc::EIO, path: "run/metrics.jsonl", rank: None, skip: 0 };
    let said = train_under(&room, fault, "run", &["--resume"], &["run.steps=5"]);
    let words =
        ["run/metrics.jsonl: Input/output error", "the checkpoint is written all the same", "saved after update 2; "];
    said.refused(3, &words);
    assert_eq!(checkpoints(&room, "run"), ["step_1", "step_2"]);
    train(&room, "run", &["--resume"], &["run.steps=3"]).ended(0, &["step_2: update 3 is next"]);
}

#[test]
fn a_rank_that_fails_alone_after_an_update_saves_it_before_the_job_ends() {
    let room = quick();
    train(&room, "whole", &[], &["run.steps=4"]).ended(0, &[]);
    for rank in [1, 0] {
        let run_dir = format!("run_{rank}");
        // The trace is written before the first update and after each, by each rank for itself.
        let fault = Fault { call: "write", errno: libc::ENOSPC, path: "/trace/", rank: Some(rank), skip: 1 };
        let said = train_under(&room, fault, &run_dir, &[], &["run.steps=4", "run.trace=true"]);
        said.ended(3, &[&format!("rank {rank}, "), "No space left on device", "saved after update 1; "]);
        assert_eq!(checkpoints(&room, &run_dir), ["step_1"]);
        assert_eq!(room.read(&format!("{run_dir}/latest")), "checkpoints/step_1\n");
        train(&room, &run_dir, &["--resume"], &["run.steps=4"]).ended(0, &["step_1: update 2 is next"]);
        assert_eq!(complete(&room, &run_dir, 4), complete(&room, "whole", 4));
    }
}

#[test]
fn a_rank_that_fails_alone_and_does_not_see_the_run_directory_says_that_it_saves_nothing() {
    let room = quick();
    let fault = Fault { call: "write", errno: libc::ENOSPC, path: "/trace/", rank: Some(1), skip: 1 };
    let mut variables = variables(&room, fault);
    variables.push(("FAULT_HIDDEN", "run/.lock".into()));
    let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let call = arguments("run", &[], &["run.steps=4", "run.trace=true"]);
    let said = room.run(&Call { ranks: 2, program: LONGSTRAW, arguments: &call, variables: &variables });
    said.ended(3, &["rank 1 saves nothing after update 1: rank 0's run directory is not on its machine"]);
    assert!(!room.path().join("run/latest").exists());
}

#[test]
fn a_run_directory_that_cannot_be_written_is_refused_before_weights_are_loaded() {
    let room = quick();
    let fault = Fault { call: "create", errno: libc::EROFS, path: "run", rank: None, skip: 0 };
    let said = train_under(&room, fault, "run", &[], &[]);
    said.refused(3, &["cannot write run: Read-only file system", "--run-dir"]);
    train(&room, "run", &[], &["run.steps=1"]).ended(0, &[]);
    let kept = content(&room, "run");
    let said = train_under(&room, Fault { path: "run/", ..fault }, "run", &["--resume"], &["run.steps=2"]);
    said.refused(3, &["cannot write run/.lock: Read-only file system"]);
    assert!(content(&room, "run") == kept);
}

/// One layer's intermediates of the long prompt are 256 MiB each, three or four at a time, and all else is small.
#[test]
fn memory_that_runs_out_in_a_later_update_leaves_what_was_learnt_before_it() {
    let shape = json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 32768, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true
    });
    let config = "[context]\nmax_seq_len = 4160\nprompt_len = 4096\nanswer_len = 64\n[memory]\nmicro_block = 4096\n\
                  [grpo]\ngroup_size = 2\ngradient = \"response\"\nreward_fn = \"data\"\n[lora]\nrank = 2\n\
                  [model]\npath = \"shape\"\ndtype = \"float32\"\nrandom_init = true\n\
                  [data]\npath = \"train.jsonl\"\nshuffle = false\n[run]\ndir = \"run\"\nsteps = 3\n";
    let record = |prompt: usize| {
        let answers = [json!({"ids": ids(5, 1), "reward": 1}), json!({"ids": ids(6, 2), "reward": 0})];
        json!({"prompt_ids": ids(prompt, prompt), "answers": answers})
    };
    let data = lines(&[record(40), record(60), record(4096)]);
    let files = [("shape/config.json", &*shape.to_string()), ("config.toml", config), ("train.jsonl", &data)];
    let room = Room::with(&files);
    let script = room.script("start", &format!("ulimit -v 1200000 && exec {LONGSTRAW} \"$@\""));
    let said = room.run(&Call { ranks: 1, program: &script, arguments: &["train"], variables: &[] });
    said.refused(5, &["rank 0, capture, layer 0: out of host memory: ", "saved after update 2; "]);
    assert_eq!(checkpoints(&room, "run"), ["step_2"]);
    room.ranks(1, &["train", "--resume"]).ended(0, &["going on from run/checkpoints/step_2: update 3 is next"]);
    room.ranks(1, &["train", "--run-dir", "whole"]).ended(0, &[]);
    let digest = |run: &str| room.read_json(&format!("{run}/receipt.json"))["adapter_digest"][0].clone();
    assert_eq!(digest("run"), digest("whole"));
}
