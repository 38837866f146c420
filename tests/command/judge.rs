//! The online loop with a judge behind the endpoint: four ranks of which one asks, and services that answer badly.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::checkpoints::case;
use super::resume::signal;
use super::room::{Call, LONGSTRAW, Room, Said};
use super::service::{Service, Turn, json as answers, replied};
use super::test_tokenizer;
use super::training::{config, ids, lines};

const SENTINEL: &str = "sk-sentinel-2718281828";

/// The tiny checkpoint with a tokenizer of bytes, prompts with questions, and a judge at `base`.
fn room(base: &str) -> Room {
    let prompts: Vec<Value> = [61, 33]
        .into_iter()
        .map(|length| {
            json!({"name": format!("of {length}"), "prompt_ids": ids(length, length),
                   "reward_data": {"question": "Which letter?", "expected": "a"}})
        })
        .collect();
    let text = config(Path::new("model"))
        .replace("reward_fn = \"data\"", "reward_fn = \"judge\"")
        .replace("[lora]", "[rollout]\nsample = true\nmax_tokens = 6\n[lora]");
    let settings = json!({
        "api_base": base, "default_model": "judge-large", "timeout_sec": 1, "max_retries": 1, "retry_backoff": 0.05,
        "usage": {"reward_scoring": true}
    });
    let data = lines(&prompts);
    let room = Room::with(&[("config.toml", &text), ("settings.json", &settings.to_string()), ("train.jsonl", &data)]);
    room.model_with_tokenizer(&case("qwen3"), &test_tokenizer::folder());
    room
}

/// Trains on four ranks; while it runs, the key stands in no process's arguments.
fn train(room: &Room, sets: &[&str]) -> Said {
    let mut arguments = vec!["train"];
    arguments.extend(sets.iter().flat_map(|set| ["--set", *set]));
    let variables = &[("TAOTOKEN_API_KEY", SENTINEL)];
    let mut running = room.start(&Call { ranks: 4, program: LONGSTRAW, arguments: &arguments, variables });
    let mut looked = 0;
    while !running.has_ended() {
        for process in fs::read_dir("/proc").unwrap().flatten() {
            let arguments = fs::read(process.path().join("cmdline")).unwrap_or_default();
            assert!(!holds(&arguments), "{}", process.path().display());
            looked += 1;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert!(looked > 0);
    let said = running.end();
    assert!(!format!("{said}").contains(SENTINEL), "{said}");
    for file in room.files("") {
        assert!(!holds(&fs::read(room.path().join(&file)).unwrap()), "the key stands in {file}");
    }
    said
}

fn holds(bytes: &[u8]) -> bool {
    bytes.windows(SENTINEL.len()).any(|window| window == SENTINEL.as_bytes())
}

fn steps(room: &Room) -> Vec<Value> {
    room.read("run/metrics.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn four_ranks_train_on_the_scores_of_a_judge_that_misbehaves() {
    let score = |text: &str| replied(text);
    let service = Service::of(vec![
        Turn::Say(429, "retry-after: 1\r\n", "{}".into()),
        score(r#"{"score": 7, "reason": "close"}"#),
        Turn::Say(529, "", "overloaded".into()),
        score("```json\n{\"score\": 2}\n```"),
        Turn::Say(200, "content-type: text/html\r\n", "<html>busy</html>".into()),
        Turn::Cut,
        score("I would say **9** of 10, since the letter stands there. {\"score\": 9}"),
        Turn::Hang,
        score(r#"{"score":"#),
        score(r#"{"score": 11}"#),
        score(r#"{"score": NaN}"#),
        answers(500, "{}"),
        score(r#"{"score": 4}"#),
        score(r#"{"score": 0}"#),
        score(r#"{"score": 10}"#),
    ]);
    let room = room(&service.base());
    let said = train(&room, &["reward.missing_share_max=1.0", "run.steps=4", "reward.judge_parallel=3"]);
    said.ended(0, &[]);
    let steps = steps(&room);
    assert_eq!(steps.len(), 4);
    let missing: u64 = steps.iter().map(|step| step["reward_missing"].as_u64().unwrap()).sum();
    let counted: u64 = steps
        .iter()
        .flat_map(|step| step["reward_failures"].as_object().unwrap().values().map(|count| count.as_u64().unwrap()))
        .sum();
    assert!(missing > 0 && missing < 12 && counted == missing, "{steps:?}");
    for line in room.read("run/answers.jsonl").lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        // Missing is missing, with its reason, and no zero.
        assert_eq!(line["reward"].is_null(), !line["failure"].is_null(), "{line}");
        assert_eq!(line["reward"].is_null(), line["advantage"].is_null(), "{line}");
    }
    let keys = service.heard().iter().filter(|request| request.contains(SENTINEL)).count();
    assert_eq!(keys, service.heard().len(), "the key goes to the service, in its header");
}

#[test]
fn a_judge_that_stays_down_ends_the_run_with_the_commonest_reason() {
    // It is there when the run starts, and never again.
    let service = Service::of(vec![replied("ready"), answers(500, "{}")]);
    let room = room(&service.base());
    let said = train(&room, &["run.steps=3"]);
    said.refused(7, &["3 of the 3 answers of update 1 have no reward", "reward.missing_share_max = 0.25", "HTTP 500"]);
    assert!(!room.path().join("run/receipt.json").exists());
}

#[test]
fn a_refused_key_ends_the_run_at_once_on_all_ranks() {
    let service = Service::of(vec![answers(401, &format!(r#"{{"error": "no {SENTINEL}"}}"#))]);
    let room = room(&service.base());
    let said = train(&room, &["reward.missing_share_max=1.0"]);
    said.refused(7, &["the service refuses the key (HTTP 401", "TAOTOKEN_API_KEY"]);
}

#[test]
fn a_stop_signal_to_another_rank_ends_the_wait_for_a_program_and_the_update_runs_again() {
    let room = room("http://127.0.0.1:9");
    let sets = ["grpo.reward_fn=command", "reward.command=[\"sleep\", \"9999\"]", "run.steps=2"];
    let sets = [&sets[..], &["reward.command_sec=9999", "run.log_level=debug"]].concat();
    let mut arguments = vec!["train"];
    arguments.extend(sets.iter().flat_map(|set| ["--set", *set]));
    let mut running = room.start(&Call { ranks: 2, program: LONGSTRAW, arguments: &arguments, variables: &[] });
    let log = room.path().join("run/logs/rank_1.log");
    running.until("rewards", || fs::read_to_string(&log).ok().filter(|text| text.contains("DEBUG reward")));
    // A run that waited for the program would not end while this test waits.
    signal(&room, &mut running, "run", 0, 1, "-USR1");
    running.end().ended(0, &["update 1 is dropped", "answers were being scored", "stopped after update 0 of 2"]);
    assert!(room.path().join("run/requeue").exists());
}
