//! What a run reports: its lines, its files, and the page about it.

use std::fs;

use serde_json::{Value, json};

use super::checkpoints::case;
use super::room::Room;
use super::training::{config, lines, record};

fn room() -> Room {
    let data = lines(&[record(96, [24, 1, 7]), record(61, [2, 13, 5]), record(5, [1, 1, 3])]);
    Room::with(&[("config.toml", &config(&case("qwen3"))), ("train.jsonl", &data)])
}

fn metrics(room: &Room, run: &str) -> Vec<Value> {
    room.read(&format!("{run}/metrics.jsonl")).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn an_update_reports_rewards_lengths_seconds_and_bytes_and_its_line_the_time_left() {
    let room = room();
    let said = room.ranks(2, &["--set", "grpo.kl_coef=0.05", "--set", "data.shuffle=false"]);
    said.ended(0, &[" left\n"]);
    let updates: Vec<&str> = said.err.lines().filter(|line| line.starts_with("step ")).collect();
    assert!(updates.len() == 3 && updates[0].contains(" left") && !updates[2].contains("left"), "{updates:?}");
    let steps = metrics(&room, "run");
    // Rewards 1, 0, 0.
    let deviation = (2.0_f64 / 9.0).sqrt();
    for (step, (prompt, answers)) in steps.iter().zip([(96, [24, 1, 7]), (61, [2, 13, 5]), (5, [1, 1, 3])]) {
        let of = |key: &str| step[key].as_f64().unwrap();
        assert!((of("reward_std") - deviation).abs() < 1e-12 && (of("group_std") - deviation).abs() < 1e-12);
        let ends = [answers.into_iter().min(), answers.into_iter().max()].map(Option::unwrap);
        assert_eq!(step["prompt_tokens"], prompt);
        assert_eq!(step["answer_tokens"].as_array().unwrap()[1..], ends.map(|end| json!(f64::from(end))));
        let tokens = f64::from(prompt + answers.iter().sum::<i32>());
        let speed = of("tokens_per_second") * step["seconds"]["total"].as_f64().unwrap();
        assert!((speed - tokens).abs() < 1e-6 * tokens);
        assert!(of("kl") >= 0.0 && of("clip_low_share") == 0.0 && of("clip_high_share") == 0.0);
        assert_eq!(
            (&step["reward_missing"], &step["entropy"], &step["group_update"]),
            (&json!(0), &json!(null), &json!(0))
        );
        for phase in ["capture", "score", "replay", "sweep", "finalize", "update"] {
            let bytes = step["memory"][phase][0].as_u64().unwrap();
            assert!(bytes > 180_928 * 4, "{phase}: the weights alone are more than {bytes}");
        }
        assert!(step["memory"].get("save").is_none() && step["memory"].get("start").is_none(), "{}", step["memory"]);
    }
    assert_eq!(steps[0]["kl"], 0.0, "the policy has not moved yet");
    assert!(steps[2]["kl"].as_f64().unwrap() > 0.0);
}

#[test]
fn a_resumed_run_has_its_own_event_file_and_loses_answers_of_updates_that_it_makes_again() {
    let room = room();
    room.alone(&["--set", "run.steps=2", "--set", "checkpoint.every=1"]).ended(0, &[]);
    room.write("run/answers.jsonl", "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"st");
    room.alone(&["train", "--resume", "--set", "run.steps=3", "--set", "checkpoint.every=1"])
        .ended(0, &["going on from"]);
    assert_eq!(room.read("run/answers.jsonl"), "{\"step\":1}\n{\"step\":2}\n");
    assert_eq!(room.files("run/tensorboard").len(), 2);
}

#[test]
fn a_report_of_a_run_is_a_page_in_its_directory() {
    let room = room();
    room.ranks(2, &[]).ended(0, &[]);
    let said = room.alone(&["report", "run"]);
    assert_eq!(said.code, 0, "{said}");
    assert!(said.out.contains("run: ended well, 3 updates") && said.out.contains("written: run/report.html"), "{said}");
    assert_eq!(metrics(&room, "run")[0]["reward_range"], json!([0.0, 1.0]));
    let page = room.read("run/report.html");
    for part in ["Reward", "Loss", "Gradient norm", "Seconds by phase", "Device memory by phase", "rank 1", "plan "] {
        assert!(page.contains(part), "{part}");
    }
    let said = room.alone(&["report", "run", "--json", "--out", "other.html"]).json();
    assert_eq!((&said["out"], &said["runs"][0]["updates"]), (&json!("other.html"), &json!(3)));
    assert!(room.read("other.html").contains("</html>"));
}

#[test]
fn several_runs_unfinished_runs_and_folders_of_gates_share_one_page() {
    let room = room();
    room.alone(&["--run-dir", "one"]).ended(0, &[]);
    room.alone(&["--run-dir", "two", "--set", "context.prompt_len=97", "--set", "context.max_seq_len=121"])
        .ended(0, &[]);
    fs::remove_file(room.path().join("two/receipt.json")).unwrap();
    let torn = room.read("two/metrics.jsonl") + "{\"step\": 4, \"lo";
    room.write("two/metrics.jsonl", torn);
    room.write("empty/metrics.jsonl", "");
    let receipt = room.read("one/receipt.json").replace("\"gate\": null", "\"gate\": \"gate5_g2\"");
    room.write("gates/gate5_g2/receipt.json", receipt);
    let said = room.alone(&["report", "one", "two", "empty", "gates"]);
    assert_eq!(said.code, 0, "{said}");
    for words in [
        "two: was interrupted, 3 updates",
        "metrics.jsonl, line 4: torn",
        "empty: goes on, or was interrupted, 0 updates\n  metrics.jsonl has no update yet",
        "gates: a folder of gates, 0 updates\n  gate5_g2: passed",
        "written: report.html",
    ] {
        assert!(said.out.contains(words), "{words}:\n{said}");
    }
    let page = room.read("report.html");
    for part in ["Device peak against context", "Device peak against group size", "Run empty", "gate5_g2"] {
        assert!(page.contains(part), "{part}");
    }
}

#[test]
fn a_run_that_failed_says_so_at_the_top_with_exit_cause_and_rank() {
    let room = room();
    room.ranks(2, &["--set", "optimizer.lr=1e30"]).refused(6, &["rank 0, finalize: the gradient of model.layers."]);
    let said = room.alone(&["report", "run"]);
    assert!(said.out.contains("run: failed (exit 6), 1 updates\n  rank 0, finalize: the gradient of "), "{said}");
    let page = room.read("run/report.html");
    let top = page.split("Curves").next().unwrap();
    for words in
        ["This run has failed after update 1", "6: a number is not finite", "rank 0, at 20", "1 of 3", "--resume"]
    {
        assert!(top.contains(words), "{words}");
    }
    let said = room.alone(&["report", "run", "--json"]).json();
    assert_eq!((&said["runs"][0]["exit"], &said["runs"][0]["state"]), (&json!(6), &json!("failed")));
}

#[test]
fn a_folder_that_is_no_run_is_refused_in_words() {
    let room = room();
    fs::create_dir(room.path().join("folder")).unwrap();
    room.alone(&["report", "folder"]).refused(3, &["folder is no run directory", "metrics.jsonl", "run.dir"]);
    room.alone(&["report", "absent"]).refused(3, &["absent is no run directory"]);
    room.alone(&["report", "train.jsonl"]).refused(3, &["train.jsonl is no run directory"]);
    room.write("run/metrics.jsonl", "");
    room.alone(&["report", "run", "--out", "absent/page.html"]).refused(3, &["cannot write absent/page.html", "--out"]);
    room.alone(&["report", "run", "--config", "config.toml"]).ended(2, &["this verb reads no configuration"]);
    room.alone(&["report"]).ended(2, &["RUN_DIR"]);
}
