//! Several files with weights, several judges with names, what the judges are shown of prompts, and what they cost.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::checkpoints::case;
use super::resume::arguments;
use super::room::{Call, LONGSTRAW, Room, Said};
use super::service::{Service, Turn, replied};
use super::test_tokenizer;
use super::training::{config, lines, record};

const SOURCES: &str = "sources = [{ name = \"codes\", path = \"codes.jsonl\", weight = 3.0 }, \
                       { name = \"books\", path = \"books.jsonl\" }]\n";

/// Three prompts of codes and two of books; of four groups three come from the codes.
fn room() -> Room {
    let text = config(&case("qwen3")).replace("path = \"train.jsonl\"\n", SOURCES).replace("lr = 1e-3", "lr = 1e-2");
    let codes = lines(&[record(61, [2, 13, 5]), record(5, [1, 1, 3]), record(33, [4, 2, 2])]);
    let books = lines(&[record(96, [24, 1, 7]), record(12, [1, 2, 9])]);
    Room::with(&[("config.toml", &text), ("codes.jsonl", &codes), ("books.jsonl", &books)])
}

fn train(room: &Room, ranks: usize, run: &str, flags: &[&str], sets: &[&str]) -> Said {
    room.ranks(ranks, &arguments(run, flags, sets))
}

fn steps(room: &Room, run: &str) -> Vec<Value> {
    let text = room.read(&format!("{run}/metrics.jsonl"));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The prompts of a run in the order in which they came.
fn drawn(room: &Room, run: &str) -> Vec<String> {
    let prompts = steps(room, run).into_iter().flat_map(|step| step["prompts"].as_array().unwrap().clone());
    prompts.map(|name| name.as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_mix_draws_by_its_weights_at_any_number_of_ranks_and_goes_on_where_it_stopped() {
    let room = room();
    let whole = "data.sources, shares of the groups: codes 75.0 % (3 prompts), books 25.0 % (2 prompts)";
    train(&room, 2, "whole", &[], &["run.steps=8"]).ended(0, &[whole]);
    let prompts = drawn(&room, "whole");
    for (four, taken) in prompts.chunks(4).enumerate() {
        let codes = taken.iter().filter(|name| name.starts_with("codes/")).count();
        assert_eq!((taken.len(), codes), (4, 3), "{four}: {prompts:?}");
    }
    let epoch = |source: &str| -> Vec<&String> { prompts.iter().filter(|name| name.starts_with(source)).collect() };
    for (source, size) in [("codes/", 3), ("books/", 2)] {
        for epoch in epoch(source).chunks_exact(size) {
            let unique: std::collections::BTreeSet<_> = epoch.iter().collect();
            assert_eq!(unique.len(), size, "{prompts:?}");
        }
    }
    // Side by side on two replicas, and alone.
    train(&room, 2, "pairs", &[], &["run.steps=4", "parallel.cp_size=1"]).ended(0, &[]);
    assert_eq!(drawn(&room, "pairs"), prompts);
    train(&room, 1, "alone", &[], &["run.steps=5"]).ended(0, &[]);
    assert_eq!(drawn(&room, "alone"), prompts[..5]);
    // Stopped in the middle of both epochs; a file may have another place.
    train(&room, 2, "run", &[], &["run.steps=3"]).ended(0, &[]);
    fs::rename(room.path().join("codes.jsonl"), room.path().join("moved.jsonl")).unwrap();
    let with = |weight: &str| {
        format!(
            "data.sources=[{{name=\"codes\",path=\"moved.jsonl\",weight={weight}}},{{name=\"books\",path=\"books.jsonl\"}}]"
        )
    };
    let other = train(&room, 2, "run", &["--resume"], &["run.steps=8", &with("2.0")]);
    other.refused(2, &["data.sources was [{\"name\":\"codes\",\"weight\":3.0}", "\"weight\":2.0"]);
    train(&room, 2, "run", &["--resume"], &["run.steps=8", &with("3.0")]).ended(0, &["update 4 is next"]);
    assert_eq!(drawn(&room, "run"), prompts);
    let receipt = |run: &str| room.read_json(&format!("{run}/receipt.json"));
    assert_eq!(receipt("run")["adapter_digest"], receipt("whole")["adapter_digest"]);
    assert_eq!(receipt("run")["sources"], receipt("whole")["sources"], "those before the stop are counted");
    let (codes, books) = (&receipt("run")["sources"]["codes"], &receipt("run")["sources"]["books"]);
    assert_eq!((&codes["groups"], &codes["epoch"]), (&json!(6), &json!(2.0)));
    assert_eq!((&books["groups"], &books["epoch"], &books["reward"]), (&json!(2), &json!(1.0), &json!(1.0 / 3.0)));
    for step in steps(&room, "whole") {
        let of = |name: &str, key: &str| step["sources"][name][key].clone();
        let groups = [of("codes", "groups"), of("books", "groups")];
        let [own, _] = if groups == [json!(1), json!(0)] { ["codes", "books"] } else { ["books", "codes"] };
        assert_eq!(
            (of(own, "prompt_tokens"), of(own, "answer_tokens")),
            (step["prompt_tokens"].clone(), step["answer_tokens"].clone())
        );
        assert_eq!(of(own, "reward_mean"), step["reward_mean"]);
    }
}

#[test]
fn sources_that_cannot_be_drawn_from_are_refused_by_name() {
    let room = room();
    let sets = |sets: &str| room.alone(&["train", "--set", sets]);
    sets("data.path=codes.jsonl").refused(2, &["data.path should be left out: data.sources names the files"]);
    room.write("books.jsonl", "\n");
    sets("run.steps=1").refused(3, &["books.jsonl: holds no record"]);
    fs::remove_file(room.path().join("books.jsonl")).unwrap();
    sets("run.steps=1").refused(3, &["books.jsonl: cannot open it"]);
}

#[test]
fn the_mix_of_a_run_is_shown_before_it_and_planned_with() {
    let room = room();
    let sets = ["--set", "run.steps=8"];
    let said = room.alone(&[&["data", "mix", "--ranks", "2"][..], &sets].concat());
    said.ended(0, &[]);
    let rows: Vec<Vec<&str>> = said.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["8", "groups", "in", "8", "updates", "of", "1"], "{said}");
    assert_eq!(rows[2], ["codes", "3", "33", "61", "3", "75.0", "%", "6.0", "2.00"], "{said}");
    assert_eq!(rows[3], ["books", "2", "54", "96", "1", "25.0", "%", "2.0", "1.00"], "{said}");
    let told = room.alone(&[&["data", "mix", "--json"][..], &sets].concat()).json();
    assert_eq!((&told["groups"], &told["sources"][1]["share"]), (&json!(8), &json!(0.25)));
    let said = room.alone(&["plan", "--ranks", "1", "--data"]);
    // A group has 33 tokens in three of four, 54 in the fourth.
    let words = [
        "data.sources: 5 prompts, the longest 96 tokens, 38 on average; 38 prompt tokens an update",
        "data.sources.codes: 3 prompts, the longest 61 tokens, 33 on average; 25 prompt tokens an update",
        "data.sources.books: 2 prompts, the longest 96 tokens, 54 on average; 14 prompt tokens an update",
    ];
    for words in words {
        assert!(said.out.contains(words), "{words}: {said}");
    }
    // Prompts that a run refuses keep their length, and are named.
    let cut = ["--set", "context.prompt_len=50", "--set", "context.max_seq_len=74"];
    let said = room.alone(&[&["data", "mix", "--ranks", "2"][..], &cut].concat());
    let words =
        "data.sources.books: 2 prompts, the longest 96 tokens, 54 on average\n  1 of them would be refused as too long";
    assert!(said.ended(0, &[words]).out.contains(" 96 "), "{said}");
    let told = room.alone(&[&["data", "mix", "--json"][..], &cut].concat()).json();
    assert_eq!((&told["sources"][1]["tokens_max"], &told["sources"][1]["too_long"]), (&json!(96), &json!(1)));
}

/// A score that follows from the answer's code and the rubric.
fn verdict(request: &str) -> Turn {
    let Some((_, rest)) = request.split_once("ANSWER ").filter(|_| request.contains("Judge the ")) else {
        return replied("ready");
    };
    let code = rest.chars().next().unwrap().to_digit(16).unwrap();
    let score = if request.contains("Judge the clarity") { 1 + code % 5 } else { code % 11 };
    replied(&format!("{{\"score\": {score}}}"))
}

/// Two sources of texts with questions, and two judges of which one gets a part of the prompt.
fn judged(base: &str) -> Room {
    let ask = |name: &str, place: &str| {
        let prompt = format!("There was a long way to go. In {place} the letter was a. There were others, too.");
        json!({"name": name, "prompt": prompt, "reward_data": {
            "question": "Which letter?", "expected": "a", "evidence": ["the letter was a"]}})
    };
    let text = config(Path::new("model"))
        .replace("path = \"train.jsonl\"\n", SOURCES)
        .replace(
            "reward_fn = \"data\"",
            "reward_fn = [{ name = \"judge:clarity\", weight = 0.25 }, { name = \"judge:truth\", weight = 0.75 }]",
        )
        .replace(
            "[lora]",
            "[rollout]\nsample = true\nmax_tokens = 6\n[reward.judges.clarity]\nrubric = \"clarity.txt\"\n\
                  scale = [1, 5]\nmodel = \"judge-small\"\n[reward.judges.truth]\nrubric = \"truth.txt\"\n\
                  prompt_chars = 24\n[lora]",
        );
    let settings = json!({
        "api_base": base, "default_model": "judge-large", "timeout_sec": 5, "max_retries": 1, "retry_backoff": 0.05,
        "price_in": 2.0, "price_out": 10.0, "usage": {"reward_scoring": true, "prompt_text": true}
    });
    let room = Room::with(&[
        ("config.toml", &text),
        ("settings.json", &settings.to_string()),
        ("codes.jsonl", &lines(&[ask("one", "Rome"), ask("two", "Oslo")])),
        ("books.jsonl", &lines(&[ask("three", "Bern")])),
        ("clarity.txt", "Judge the clarity."),
        ("truth.txt", "Judge the truth."),
    ]);
    room.model_with_tokenizer(&case("qwen3"), &test_tokenizer::folder());
    room
}

fn judge(room: &Room, ranks: usize, arguments: &[&str]) -> Said {
    let variables = &[("TAOTOKEN_API_KEY", "sk-sentinel-2718281828")];
    room.run(&Call { ranks, program: LONGSTRAW, arguments, variables })
}

/// The service's record of a message: who was asked, and what.
fn message(request: &str) -> (String, String, String) {
    let body: Value = serde_json::from_str(request.split_once("\r\n\r\n").unwrap().1).unwrap();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (text(&body["model"]), text(&body["system"]), text(&body["messages"][0]["content"]))
}

#[test]
fn two_sources_are_judged_by_two_judges_and_everything_is_counted() {
    let service = Service::of(vec![Turn::By(verdict)]);
    let room = judged(&service.base());
    let said = judge(&room, 2, &["train", "--set", "run.steps=4"]);
    said.ended(0, &["judges: "]);
    let heard: Vec<_> = service.heard().iter().map(|request| message(request)).collect();
    let of = |model: &str| {
        heard.iter().filter(|(asked, system, _)| asked == model && !system.is_empty()).collect::<Vec<_>>()
    };
    let (clarity, truth) = (of("judge-small"), of("judge-large"));
    assert_eq!(clarity.len() + truth.len() + 2, heard.len(), "each model is tried once at the start");
    assert_eq!(clarity.len(), truth.len());
    for (_, system, user) in clarity {
        assert!(
            system.starts_with("Judge the clarity.\n\nThe answer stands") && system.contains("from 1 to 5"),
            "{system}"
        );
        assert!(!user.contains("the letter was") && user.starts_with("QUESTION\nWhich letter?"), "{user}");
    }
    for (_, system, user) in truth {
        assert!(system.starts_with("Judge the truth.\n\nWhat was asked stands") && system.contains("from 0 to 10"));
        assert!(user.starts_with("PROMPT ") && user.contains("the letter was a"), "{user}");
        assert!(user.contains("characters are left out here") && !user.contains("long way"), "{user}");
    }
    // The sum of the parts by their weights, each on its own scale.
    for line in room.read("run/answers.jsonl").lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let part = |name: &str| line["parts"][name].as_f64().unwrap();
        let sum = 0.25 * part("judge:clarity") + 0.75 * part("judge:truth");
        assert!((line["reward"].as_f64().unwrap() - sum).abs() < 1e-12, "{line}");
    }
    let steps = steps(&room, "run");
    assert!(steps.iter().all(|step| step["reward_parts"]["judge:truth"].is_number()), "{steps:?}");
    let receipt = room.read_json("run/receipt.json");
    let count = |source: &str| receipt["sources"][source]["groups"].as_u64().unwrap();
    assert_eq!((count("codes"), count("books")), (3, 1));
    // Each reply says 14 tokens in and 3 out.
    let requests = u64::try_from(heard.len()).unwrap();
    let spent = &receipt["judge"];
    assert_eq!((&spent["requests"], &spent["tokens_in"]), (&json!(requests), &json!(14 * requests)));
    let told: u64 = steps.iter().map(|step| step["judge"]["requests"].as_u64().unwrap()).sum();
    assert_eq!(told, requests, "the first update has those of the start");
    let cost = spent["cost"].as_f64().unwrap();
    let wanted = 14.0 * 2.0 + 3.0 * 10.0;
    assert!((cost * 1e6 / f64::from(u32::try_from(requests).unwrap()) - wanted).abs() < 1e-6, "{spent}");
    assert!(said.err.contains(&format!("judges: {requests} requests, {} tokens in", 14 * requests)), "{said}");
}

#[test]
fn what_judges_need_is_said_by_name_before_anything_is_sent() {
    let service = Service::of(vec![Turn::By(verdict)]);
    let room = judged(&service.base());
    let refused = |sets: &str, code: i32, words: &[&str]| {
        judge(&room, 0, &["train", "--set", sets]).refused(code, words);
    };
    refused("endpoint.usage.prompt_text=false", 2, &["endpoint.usage.prompt_text should be true: judge:truth gets 24"]);
    refused(
        "grpo.reward_fn=judge:style",
        2,
        &["reward.judges should be given a table style", "names the judge style (it has clarity, truth)"],
    );
    fs::remove_file(room.path().join("clarity.txt")).unwrap();
    refused("run.steps=1", 2, &["clarity.txt: No such file"]);
    room.write("clarity.txt", "Judge the clarity.");
    // What the run takes is forecast with its cost.
    let said = judge(&room, 0, &["plan", "--ranks", "1", "--set", "rollout.max_tokens=6", "--set", "run.steps=4"]);
    // Twelve answers for each judge: (900 + 18) / 4 and (900 + 16 + 24) / 4 tokens, and 6 of the answer to each.
    for words in [
        "judge requests of the run: 24 for training",
        "judge tokens of the run: about 5724 in and 12288 out",
        "cost about 0.13",
    ] {
        assert!(said.out.contains(words), "{words}: {said}");
    }
    // A judge that no reward names is said beside the service.
    let said = judge(&room, 0, &["plan", "--ranks", "1", "--set", "grpo.reward_fn=judge:truth"]);
    said.ended(0, &["judges: ", "reward.judges.clarity is not used: grpo.reward_fn does not name judge:clarity"]);
    assert!(service.heard().is_empty());
    let data = room.read("books.jsonl").replace("[\"the letter was a\"]", "\"the letter\"");
    room.write("books.jsonl", data);
    refused("run.steps=1", 3, &["record books/three: its reward_data.evidence is \"the letter\"", "prompt_chars"]);
}
