//! What `doctor` says of a machine, alone and under mpirun, and with one thing wrong at a time.

use std::fs;

use serde_json::Value;

use super::checkpoints::case;
use super::room::{Call, LONGSTRAW, Room, Said};
use super::training::config;

const SENTINEL: &str = "sk-sentinel-1618033988";
const SETTINGS: &str = r#"{ "api_base": "http://127.0.0.1:9", "default_model": "judge" }"#;

fn room() -> Room {
    Room::with(&[("config.toml", &config(&case("qwen3")))])
}

/// The line about `name`.
#[track_caller]
fn line<'a>(said: &'a Said, name: &str) -> &'a str {
    let about = |line: &&str| line.get(6..).is_some_and(|rest| rest.starts_with(&format!("{name} ")));
    said.out.lines().find(about).unwrap_or_else(|| panic!("no line about {name}:\n{said}"))
}

/// The command failed with `code`, and its only failure is the line about `name`, with `words` in it.
#[track_caller]
fn fails(said: &Said, code: i32, name: &str, words: &[&str]) {
    said.ended(code, &[]);
    let failures: Vec<&str> = said.out.lines().filter(|line| line.starts_with("FAIL")).collect();
    assert_eq!(failures, [line(said, name)], "{said}");
    for word in words {
        assert!(failures[0].contains(word), "no {word:?} in:\n{said}");
    }
}

#[test]
fn a_ready_machine_gives_one_line_for_each_check() {
    let room = room();
    let said = room.alone(&["doctor"]);
    said.ended(0, &[]);
    let names = ["mpi", "machines", "cores", "configuration", "libtorch", "device", "locked memory", "model", "memory"];
    for name in names.into_iter().chain(["run directory", "key"]) {
        assert!(["ok  ", "warn"].contains(&&line(&said, name)[..4]), "{said}");
    }
    assert_eq!(said.out.lines().count(), names.len() + 2, "{said}");
    assert!(line(&said, "mpi").contains("1 rank, no launcher"), "{said}");
    assert!(line(&said, "libtorch").contains("2.11") && line(&said, "model").contains("all tensors there"), "{said}");
    assert!(
        line(&said, "memory").contains("the plan takes") && line(&said, "memory").ends_with("machine: 1"),
        "{said}"
    );
    assert_eq!(room.files(""), ["config.toml"], "it leaves nothing behind");
}

#[test]
fn ranks_under_mpirun_check_together_and_one_prints() {
    let room = room();
    let said = room.ranks(2, &["doctor", "--json", "--set", "run.device=cpu"]);
    said.ended(0, &[]);
    let report = said.json();
    assert_eq!((&report["healthy"], &report["ranks"]), (&true.into(), &2.into()), "{said}");
    let about = |name: &str| -> Value {
        let findings = report["findings"].as_array().unwrap();
        findings.iter().find(|finding| finding["name"] == name).cloned().unwrap()
    };
    let detail = |name: &str| about(name)["detail"].as_str().unwrap().to_owned();
    assert!(detail("mpi").ends_with("2 ranks; OMPI_COMM_WORLD_SIZE says 2"), "{said}");
    assert!(detail("machines").contains("(2)"), "{said}");
    assert!(detail("memory").ends_with("machine: 2"), "{said}");
    assert_eq!((&about("device")["verdict"], &about("device")["exit"]), (&"ok".into(), &0.into()), "{said}");
}

#[test]
fn more_threads_than_cores_are_a_warning() {
    let variables = &[("OMP_NUM_THREADS", "64")];
    let said = room().run(&Call { ranks: 2, program: LONGSTRAW, arguments: &["doctor"], variables });
    said.ended(0, &[]);
    assert!(line(&said, "cores").starts_with("warn") && line(&said, "cores").contains("OMP_NUM_THREADS"), "{said}");
}

#[test]
fn nothing_configured_is_no_failure() {
    let said = Room::new().alone(&["doctor"]);
    said.ended(0, &[]);
    let configuration = line(&said, "configuration");
    assert!(configuration.starts_with("warn") && configuration.contains("there is no config.toml"), "{said}");
    assert!(line(&said, "model").starts_with("warn") && line(&said, "model").contains("model.path"), "{said}");
    assert!(line(&said, "key").contains("no endpoint is configured"), "{said}");
}

#[test]
fn an_impossible_run_directory_is_named_with_its_obstacle() {
    for ranks in [0, 2] {
        let arguments = &["doctor", "--run-dir", "config.toml/run"];
        let said = room().run(&Call { ranks, program: LONGSTRAW, arguments, variables: &[] });
        fails(&said, 3, "run directory", &["config.toml/run: ", "config.toml is no folder", "--run-dir"]);
    }
}

#[test]
fn an_absent_or_truncated_model_is_named() {
    let said = room().alone(&["doctor", "--set", "model.path=absent"]);
    fails(&said, 3, "model", &["absent: No such file", "give the folder of a checkpoint"]);
    let room = room();
    let config_json = fs::read(case("qwen3").join("config.json")).unwrap();
    room.write("torn/config.json", config_json);
    let whole = fs::read(case("qwen3").join("model.safetensors")).unwrap();
    room.write("torn/model.safetensors", &whole[..whole.len() / 2]);
    let said = room.alone(&["doctor", "--set", "model.path=torn"]);
    fails(&said, 3, "model", &["torn/model.safetensors", "truncated or damaged"]);
}

#[test]
fn a_plan_that_does_not_fit_is_shown_with_its_sum() {
    let shape = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/shapes/qwen3-8b");
    let path = format!("model.path={shape}");
    let lengths = ["context.prompt_len=2088960", "context.answer_len=8192", "context.max_seq_len=2097152"];
    let mut arguments = vec!["doctor", "--set", &path, "--set", "model.random_init=true", "--set", "run.device=cpu"];
    for length in &lengths {
        arguments.extend(["--set", length]);
    }
    fails(&room().alone(&arguments), 5, "memory", &["host memory", "from the largest part down"]);
}

#[test]
fn the_rubrics_of_judges_are_read() {
    let room = room();
    room.write(
        "settings.json",
        r#"{ "api_base": "http://127.0.0.1:9", "default_model": "j", "usage": { "reward_scoring": true } }"#,
    );
    let arguments = [
        "doctor",
        "--set",
        "grpo.reward_fn=judge",
        "--set",
        "reward.rubric=rubric.txt",
        "--set",
        "rollout.sample=true",
    ];
    let doctor = || {
        room.run(&Call {
            ranks: 0,
            program: LONGSTRAW,
            arguments: &arguments,
            variables: &[("TAOTOKEN_API_KEY", SENTINEL)],
        })
    };
    fails(&doctor(), 2, "rubrics", &["reward.rubric: rubric.txt: "]);
    room.write("rubric.txt", "Judge.");
    let said = doctor();
    said.ended(0, &[]);
    assert!(line(&said, "rubrics").starts_with("ok"), "{said}");
}

#[test]
fn a_key_is_checked_if_an_endpoint_is_configured_and_never_shown() {
    let room = room();
    room.write("settings.json", SETTINGS);
    fails(&room.alone(&["doctor"]), 7, "key", &["TAOTOKEN_API_KEY", "is not set", "export it"]);
    let variables = &[("TAOTOKEN_API_KEY", SENTINEL)];
    let said = room.run(&Call { ranks: 2, program: LONGSTRAW, arguments: &["doctor"], variables });
    said.ended(0, &[]);
    assert!(line(&said, "key").contains("TAOTOKEN_API_KEY is set"), "{said}");
    assert!(!format!("{said}").contains(SENTINEL), "{said}");
}

#[test]
fn a_refused_configuration_does_not_stop_the_other_checks() {
    let said = room().alone(&["doctor", "--set", "optimizer.lr=-1"]);
    fails(&said, 2, "configuration", &["optimizer.lr should be a finite number from 0"]);
    assert!(line(&said, "memory").contains("of host memory for this job"), "{said}");
    let said = room().ranks(2, &["doctor", "--set", "parallel.cp_size=3"]);
    fails(&said, 2, "configuration", &["the job has 2 ranks, no multiple of 3"]);
}

#[test]
fn ranks_that_mpi_does_not_connect_learn_how_to_start() {
    let variables = &[("SLURM_STEP_NUM_TASKS", "4")];
    let said = room().run(&Call { ranks: 0, program: LONGSTRAW, arguments: &["doctor"], variables });
    fails(&said, 4, "mpi", &["SLURM_STEP_NUM_TASKS says that 4 were started", "srun --mpi=pmix"]);
    assert_eq!(said.out.lines().count(), 1, "{said}");
}
