//! One capture for several updates: measured, refused, interrupted.

use serde_json::{Value, json};

use super::checkpoints::case;
use super::resume::{complete, numbers, quick, train};
use super::room::Room;
use super::training::{config, lines, record};

const FOUR: [&str; 4] =
    ["grpo.updates_per_group=4", "run.reuse_capture=4", "grpo.reuse_drift_max=inf", "model.dtype=float64"];

fn of<'a>(sets: &[&'a str]) -> Vec<&'a str> {
    [&FOUR[..], sets].concat()
}

/// [`numbers`] without the seconds of a reused capture.
fn steps(room: &Room, run: &str) -> Vec<Value> {
    let mut steps = numbers(room, run);
    for reuse in steps.iter_mut().filter_map(|step| step["reuse"].as_object_mut()) {
        let _ = ["saved_s", "measured_s"].map(|key| reuse.remove(key).unwrap());
    }
    steps
}

#[test]
fn the_last_update_on_reused_pages_measures_their_drift_and_a_rate_of_zero_has_none() {
    let room = quick();
    for (gradient, most) in [("{ last = 0 }", 0.0), ("response", 1e-13)] {
        let gradient = format!("grpo.gradient={gradient}");
        let still = of(&["run.steps=6", "optimizer.lr=0.0", &gradient]);
        train(&room, "still", &["--anew"], &still).ended(0, &[]);
        let ages: Vec<Value> = steps(&room, "still").iter().map(|step| step["reuse"]["age"].clone()).collect();
        assert_eq!(json!(ages), json!([null, 1, 2, 3, null, 1]));
        let measured = &steps(&room, "still")[3]["reuse"];
        assert!(
            measured["drift"].as_f64().unwrap() <= most && measured["gap"].as_f64().unwrap() <= 1e-12,
            "{measured}"
        );
        assert!(steps(&room, "still")[2]["reuse"]["drift"].is_null());
        assert!(steps(&room, "still")[5]["reuse"]["drift"].is_number(), "the run ends before its round");
    }
    train(&room, "moves", &[], &of(&["run.steps=4", "optimizer.lr=0.02"])).ended(0, &[]);
    let last = room.read("moves/metrics.jsonl").lines().last().unwrap().to_owned();
    let reuse = &serde_json::from_str::<Value>(&last).unwrap()["reuse"];
    let pair = |key: &str| [0, 1].map(|at| reuse[key][at].as_f64().unwrap());
    let [reused, fresh] = pair("nll");
    assert!((reuse["drift"].as_f64().unwrap() - (reused - fresh).abs() / fresh).abs() < 1e-12, "{reuse}");
    assert!(reuse["drift"].as_f64().unwrap() > 1e-6 && reuse["k3"].as_f64().unwrap() > 0.0, "{reuse}");
    assert!(reuse["measured_s"].as_f64().unwrap() > 0.0 && reuse["saved_s"].as_f64().unwrap() > 0.0, "{reuse}");
    assert!((pair("loss")[0] - serde_json::from_str::<Value>(&last).unwrap()["loss"].as_f64().unwrap()).abs() < 1e-12);
}

#[test]
fn a_run_that_goes_on_in_a_reused_capture_or_evaluates_there_makes_the_same_updates() {
    let room = quick();
    let sets = of(&["run.steps=7", "checkpoint.every=1", "checkpoint.keep=9", "optimizer.lr=0.02"]);
    train(&room, "run", &[], &sets).ended(0, &[]);
    let (whole, digest) = (steps(&room, "run"), complete(&room, "run", 7));
    for step in 3..=7 {
        std::fs::remove_dir_all(room.path().join(format!("run/checkpoints/step_{step}"))).unwrap();
    }
    room.write("run/latest", "checkpoints/step_2\n");
    train(&room, "run", &["--resume"], &sets).ended(0, &["update 3 is next"]);
    assert_eq!((steps(&room, "run"), complete(&room, "run", 7)), (whole, digest.clone()));
    train(&room, "whole", &[], &sets).ended(0, &[]);
    let held_out = [&sets[..], &["data.held_out=train.jsonl", "eval.every=1"]].concat();
    train(&room, "evaluates", &[], &held_out).ended(0, &[]);
    assert_eq!(complete(&room, "evaluates", 7), digest);
    // An evaluation lets go of the pages, so the next update captures again under the earlier adapters, on the device too.
    let held = |run: &str| {
        let receipt = room.read_json(&format!("{run}/receipt.json"));
        let phases = receipt["memory"].as_array().unwrap().clone();
        let capture = phases.into_iter().find(|phase| phase["phase"] == "capture").unwrap();
        ["adapters", "optimizer"].map(|kind| capture["kinds"][kind]["device"][0].as_u64().unwrap())
    };
    let ([whole, moments], [twice, _]) = (held("whole"), held("evaluates"));
    assert_eq!(twice - whole, moments / 2, "once more the adapters");
    let plan = |sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", *set]);
        let all: Vec<&str> = ["plan", "--ranks", "1", "--json"].into_iter().chain(sets).collect();
        let addends = room.alone(&all).json()["addends"].as_array().unwrap().clone();
        let bytes = |name: &str| addends.iter().find(|one| one["name"] == name).map(|one| one["bytes"].clone());
        ["adapters of a reused capture", "kept adapters"].map(bytes)
    };
    assert_eq!(plan(&[]), [None, None]);
    let planned = plan(&FOUR).map(|bytes| bytes.and_then(|bytes| bytes.as_u64()));
    assert_eq!(planned, [Some(twice - whole); 2], "float64 on one rank as on each of two");
}

#[test]
fn pages_that_have_drifted_too_far_end_the_run_before_the_update_and_it_goes_on_with_a_larger_limit() {
    let room = quick();
    let sets = |most| vec!["grpo.updates_per_group=3", "run.reuse_capture=3", most, "run.steps=4", "optimizer.lr=0.02"];
    let said = train(&room, "run", &[], &sets("grpo.reuse_drift_max=1e-9"));
    said.refused(
        9,
        &["update 3: pages captured 2 updates ago have drifted by", "grpo.reuse_drift_max", "saved after update 2"],
    );
    train(&room, "run", &["--resume"], &sets("grpo.reuse_drift_max=0.9")).ended(0, &["update 3 is next"]);
    train(&room, "whole", &[], &sets("grpo.reuse_drift_max=inf")).ended(0, &[]);
    assert_eq!(complete(&room, "run", 4), complete(&room, "whole", 4));
    // A run that ends before the round does has a limit too, and measuring changes no number.
    let two = |most| [&sets(most)[..3], &["run.steps=2", "optimizer.lr=0.02"]].concat();
    train(&room, "short", &[], &two("grpo.reuse_drift_max=1e-9"))
        .refused(9, &["update 2: pages captured 1 updates ago have drifted by", "saved after update 1"]);
    train(&room, "short", &["--resume"], &two("grpo.reuse_drift_max=inf")).ended(0, &[]);
    train(&room, "short", &["--resume"], &sets("grpo.reuse_drift_max=inf")).ended(0, &["update 3 is next"]);
    assert_eq!(complete(&room, "short", 4), complete(&room, "whole", 4));
}

#[test]
fn one_update_a_capture_is_what_it_was_and_what_cannot_be_reused_is_refused_by_name() {
    let room = quick();
    let three = ["grpo.updates_per_group=3", "run.steps=4"];
    train(&room, "plain", &[], &three).ended(0, &[]);
    train(&room, "one", &[], &[&three[..], &["run.reuse_capture=1"]].concat()).ended(0, &[]);
    assert_eq!(complete(&room, "plain", 4), complete(&room, "one", 4));
    assert!(steps(&room, "one").iter().all(|step| step["reuse"].is_null()));
    let refused = |sets: &[&str], words: &str| {
        train(&room, "refused", &[], &of(sets)).refused(2, &[words]);
    };
    refused(&["grpo.gradient=exact"], "grpo.gradient should be \"response\" or { last = N }: an exact gradient goes");
    refused(&["grpo.updates_per_group=2"], "run.reuse_capture should be at most 2");
    refused(&["optimizer.grad_accum=2"], "optimizer.grad_accum should be 1");
    refused(&["run.reuse_capture=1"], "grpo.reuse_drift_max should be left out");
    refused(&["grpo.gradient={ last = 9 }", "memory.micro_block=8"], "the last 9 prompt positions carry gradient");
    let mixed = Room::with(&[
        ("config.toml", &config(&case("qwen3_5"))),
        ("train.jsonl", &lines(&[record(33, [4, 2, 2]), record(5, [1, 1, 3])])),
    ]);
    train(&mixed, "run", &[], &of(&[]))
        .refused(2, &["layers without keys and values: set grpo.gradient = { last = 0 }"]);
    let free = of(&["grpo.gradient={ last = 0 }", "run.steps=2", "grpo.updates_per_group=2", "run.reuse_capture=2"]);
    train(&mixed, "run", &[], &free).ended(0, &[]);
}
