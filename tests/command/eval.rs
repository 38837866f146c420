//! Evaluation on the way of a run, the best checkpoint, and evaluation without training.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::checkpoints::case;
use super::resume::{checkpoints, train};
use super::room::{Room, Said};
use super::test_tokenizer;
use super::training::{config, ids, lines, record};

/// A program that scores an answer by its length, and kills the rank that has started it when it is started for the time
/// that the file `kill_at` says.
const SCORE: &str = "echo >> calls\n\
    if [ \"$(wc -l < calls)\" -eq \"$(cat kill_at 2> /dev/null || echo 0)\" ]; then rm kill_at; kill -9 $PPID; exit; fi\n\
    while read -r line; do echo 0.$(( ${#line} % 10 )); done";

/// Two held-out sets; prompts of `codes` have answers of the data besides, so they have a margin.
const SETS: &str = "data.held_out={ codes = \"codes.jsonl\", books = \"books.jsonl\" }";

/// Prompts without answers: the policy gives them.
fn asked(lengths: &[usize]) -> String {
    let prompts =
        lengths.iter().map(|&length| json!({"name": format!("of {length}"), "prompt_ids": ids(length, length)}));
    lines(&prompts.collect::<Vec<_>>())
}

/// The tiny checkpoint with a tokenizer, answers that the policy samples, and a program that scores them.
fn drawing() -> Room {
    let text = config(Path::new("model"))
        .replace("reward_fn = \"data\"", "reward_fn = \"command\"")
        .replace("dtype = \"float32\"", "dtype = \"float64\"")
        .replace("[lora]", "[rollout]\nsample = true\nmax_tokens = 5\n[reward]\ncommand = [\"./score\"]\n[lora]");
    let room = Room::with(&[("config.toml", &text), ("train.jsonl", &asked(&[61, 33, 5]))]);
    room.write("codes.jsonl", lines(&[record(40, [3, 1, 2]), record(12, [1, 2, 3]), record(25, [2, 2, 1])]));
    room.write("books.jsonl", asked(&[17, 50]));
    room.script("score", SCORE);
    room.model_with_tokenizer(&case("qwen3"), &test_tokenizer::folder());
    room
}

/// Updates and evaluations of metrics.jsonl, without seconds and bytes.
fn metrics(room: &Room, run: &str) -> (Vec<Value>, Vec<Value>) {
    let (mut steps, mut evaluations) = (Vec::new(), Vec::new());
    for line in room.read(&format!("{run}/metrics.jsonl")).lines() {
        let mut line: Value = serde_json::from_str(line).unwrap();
        if let Some(evaluation) = line.get_mut("evaluation") {
            assert!(evaluation["seconds"].as_f64().unwrap() > 0.0);
            evaluation.as_object_mut().unwrap().remove("seconds");
            evaluations.push(evaluation.take());
        } else {
            let _ = ["seconds", "tokens_per_second", "memory"]
                .map(|key| line.as_object_mut().unwrap().remove(key).unwrap());
            steps.push(line);
        }
    }
    (steps, evaluations)
}

fn receipt(room: &Room, run: &str) -> Value {
    room.read_json(&format!("{run}/receipt.json"))
}

fn steps_of(evaluations: &[Value]) -> Vec<u64> {
    evaluations.iter().map(|evaluation| evaluation["step"].as_u64().unwrap()).collect()
}

/// `longstraw eval` on so many ranks, with these arguments and values.
fn eval(room: &Room, ranks: usize, arguments: &[&str], sets: &[&str]) -> Said {
    let mut all = vec!["eval"];
    all.extend(arguments);
    all.extend(sets.iter().flat_map(|set| ["--set", *set]));
    if ranks == 1 { room.alone(&all) } else { room.ranks(ranks, &all) }
}

#[track_caller]
fn assert_near(one: &Value, other: &Value) {
    for (key, value) in one.as_object().unwrap() {
        let (a, b) = (value.as_f64().unwrap_or(0.0), other[key].as_f64().unwrap_or(0.0));
        assert!((a - b).abs() <= 1e-11 * a.abs().max(1.0), "{key}: {one} and {other}");
        assert_eq!(value.is_null(), other[key].is_null(), "{key}: {one} and {other}");
    }
}

#[test]
fn evaluations_on_the_way_change_no_bit_of_training_and_stand_in_metrics_events_receipt_and_page() {
    let room = drawing();
    train(&room, "without", &[], &["optimizer.grad_accum=2"]).ended(0, &[]);
    let sets = ["optimizer.grad_accum=2", SETS, "eval.every=1", "eval.samples=2"];
    train(&room, "with", &[], &sets).ended(0, &["evaluation after update 2, codes: margin "]);
    assert_eq!(receipt(&room, "with")["adapter_digest"], receipt(&room, "without")["adapter_digest"]);
    let (steps, evaluations) = metrics(&room, "with");
    assert_eq!(steps, metrics(&room, "without").0);
    assert_eq!(steps_of(&evaluations), [0, 1, 2, 3]);
    for evaluation in &evaluations {
        let (codes, books) = (&evaluation["sets"]["codes"], &evaluation["sets"]["books"]);
        assert_eq!((&codes["prompts"], &books["prompts"], &books["margin"]), (&json!(3), &json!(2), &Value::Null));
        for key in ["reward", "tokens", "truncated_share", "greedy", "greedy_tokens", "greedy_truncated_share"] {
            assert!(codes[key].is_number() && books[key].is_number(), "{key}: {evaluation}");
        }
        assert!(codes["margin"].is_number() && codes["accuracy"].is_number());
    }
    let ends = [&evaluations[0], &evaluations[3]].map(|evaluation| evaluation["sets"]["books"].clone());
    assert_eq!(receipt(&room, "with")["held_out_sets"]["books"], json!(ends));
    assert_eq!(receipt(&room, "with")["held_out"], json!([null, null]));
    let events = room.files("with/tensorboard").remove(0);
    let events = fs::read(room.path().join("with/tensorboard").join(events)).unwrap();
    for tag in ["eval/codes/margin", "eval/books/greedy/reward", "eval/books/sampled/truncated_share"] {
        assert_eq!(events.windows(tag.len()).filter(|window| *window == tag.as_bytes()).count(), 4, "{tag}");
    }
    assert_eq!(room.alone(&["report", "with"]).code, 0);
    let page = room.read("with/report.html");
    for part in ["Held-out reward", "books, greedy", "Held-out margin", "held-out codes, accuracy"] {
        assert!(page.contains(part), "{part}");
    }
    // One file without a name, before and after, with group_size samples and a greedy answer.
    let sets = ["data.held_out=codes.jsonl", "run.steps=1", "checkpoint.keep_best=eval/held_out/sampled/reward"];
    train(&room, "one", &[], &sets).ended(0, &["best checkpoint"]);
    let (_, evaluations) = metrics(&room, "one");
    assert_eq!(steps_of(&evaluations), [0, 1]);
    let held_out = |at: usize| evaluations[at]["sets"]["held_out"].clone();
    assert_eq!(receipt(&room, "one")["held_out"], json!([held_out(0), held_out(1)]));
}

#[test]
fn a_run_that_is_killed_in_an_evaluation_goes_on_to_the_same_curves_and_eval_alone_gives_the_same_numbers() {
    let room = drawing();
    // Each update and each held-out prompt starts the program once on one rank: 5 prompts, 2 updates, 5 prompts.
    let sets =
        [SETS, "run.steps=4", "eval.every=2", "eval.samples=1", "checkpoint.keep_best=eval/books/sampled/reward"];
    train(&room, "whole", &[], &sets).ended(0, &[]);
    fs::remove_file(room.path().join("calls")).unwrap();
    room.write("kill_at", "9");
    assert_ne!(train(&room, "run", &[], &sets).code, 0);
    assert_eq!(steps_of(&metrics(&room, "run").1), [0], "it was killed in the middle of the second");
    assert_eq!(checkpoints(&room, "run"), ["step_2"]);
    train(&room, "run", &["--resume"], &sets).ended(0, &["step_2: update 3 is next", "evaluation after update 2, "]);
    assert_eq!(metrics(&room, "run"), metrics(&room, "whole"));
    assert_eq!(receipt(&room, "run")["best"], receipt(&room, "whole")["best"]);
    assert_eq!(receipt(&room, "run")["adapter_digest"], receipt(&room, "whole")["adapter_digest"]);
    // Killed after the last update, in the last evaluation: 5 + 2 + 5 + 2 programs before it.
    fs::remove_file(room.path().join("calls")).unwrap();
    room.write("kill_at", "17");
    assert_ne!(train(&room, "late", &[], &sets).code, 0);
    train(&room, "late", &["--resume"], &sets).ended(0, &["update 5 is next"]);
    assert_eq!(metrics(&room, "late"), metrics(&room, "whole"));

    let expected = metrics(&room, "whole").1.remove(2)["sets"].take();
    let same = ["--config", "whole/config.resolved.toml", "--json"];
    let said = eval(&room, 2, &[&same[..], &["whole/checkpoints/step_4", "--out", "apart"]].concat(), &[]);
    assert_eq!(said.ended(0, &[]).json()["sets"], expected, "the same ranks give the same bits");
    // Killed in the last prompt; one rank finishes what two began, each with a prompt of its own.
    let side = ["parallel.cp_size=1"];
    let arguments = [&same[..], &["whole/checkpoints/step_4", "--out", "side"]].concat();
    fs::remove_file(room.path().join("calls")).unwrap();
    room.write("kill_at", "3");
    assert_ne!(eval(&room, 2, &arguments, &side).code, 0);
    let finished = room.read("side/results.jsonl");
    assert_eq!(finished.lines().count(), 4, "two sets of two prompts side by side");
    let said = eval(&room, 1, &arguments, &side);
    said.ended(0, &["books: 2 of 2 prompts are finished already", "codes: 2 of 3 prompts are finished already"]);
    for set in ["codes", "books"] {
        assert_near(&said.json()["sets"][set], &expected[set]);
    }
    assert!(room.read("side/results.jsonl").starts_with(&finished), "what was finished stays as it was");
    // Other adapters, another set or other settings are another evaluation.
    let arguments = [&same[..2], &["--base", "--out", "side"]].concat();
    eval(&room, 1, &arguments, &side)
        .refused(2, &["side holds another evaluation: the adapters (digest) was ", "--anew"]);
    let arguments = [&same[..2], &["whole/adapter", "--out", "side"]].concat();
    let said = eval(&room, 1, &arguments, &["run.seed=3", "data.held_out=codes.jsonl"]);
    said.refused(2, &["run.seed was 0 and is 3", "the held-out data (digest) was absent"]);
    let arguments = [&same[..], &["--base", "--out", "side", "--anew"]].concat();
    let said = eval(&room, 1, &arguments, &side);
    said.ended(0, &["the results that were in side are now in side/earlier/1"]);
    let first = metrics(&room, "whole").1.remove(0)["sets"].take();
    assert_near(&said.json()["sets"]["codes"], &first["codes"]);
    assert!(room.read("side/earlier/1/results.jsonl").starts_with(&finished));
}

/// Held-out answers whose rewards are the other way round than those that are trained: their margin falls.
fn falling() -> Room {
    let text =
        config(&case("qwen3")).replace("lr = 1e-3", "lr = 1e-2").replace("[run]", "held_out = \"other.jsonl\"\n[run]");
    let records = [record(61, [2, 13, 5]), record(33, [4, 2, 2])];
    let mut other = records.clone();
    for answer in other.iter_mut().flat_map(|record| record["answers"].as_array_mut().unwrap()) {
        answer["reward"] = json!(1 - answer["reward"].as_u64().unwrap());
    }
    let room = Room::with(&[("config.toml", &text), ("train.jsonl", &lines(&records))]);
    room.write("other.jsonl", lines(&other));
    room
}

#[test]
fn the_best_checkpoint_stays_besides_the_last_one_and_over_a_resume() {
    let room = falling();
    let metric = "checkpoint.keep_best=eval/held_out/margin";
    let sets = |steps| vec![steps, metric, "eval.every=2", "checkpoint.keep=1"];
    train(&room, "run", &[], &sets("run.steps=6"))
        .ended(0, &["best checkpoint", "checkpoints/step_2 (eval/held_out/margin "]);
    let margin = |at: usize| metrics(&room, "run").1[at]["sets"]["held_out"]["margin"].as_f64().unwrap();
    assert!(margin(1) > margin(2) && margin(2) > margin(3), "it falls, so the first one stays the best");
    assert_eq!(
        (checkpoints(&room, "run"), room.read("run/best")),
        (vec!["step_2".into(), "step_6".into()], "checkpoints/step_2\n".into())
    );
    train(&room, "run", &["--resume"], &sets("run.steps=9")).ended(0, &["step_6: update 7 is next"]);
    assert_eq!(checkpoints(&room, "run"), ["step_2", "step_9"]);
    let best = receipt(&room, "run")["best"].clone();
    let expected =
        json!({"metric": "eval/held_out/margin", "value": margin(1), "step": 2, "checkpoint": "checkpoints/step_2"});
    assert_eq!(best, expected);
    assert_eq!(steps_of(&metrics(&room, "run").1), [0, 2, 4, 6, 8, 9], "that of the earlier end stays");
    // Without the metrics the checkpoint still knows.
    fs::remove_file(room.path().join("run/metrics.jsonl")).unwrap();
    train(&room, "run", &["--resume"], &sets("run.steps=10")).ended(0, &[]);
    assert_eq!(
        (receipt(&room, "run")["best"].clone(), checkpoints(&room, "run")),
        (expected, vec!["step_10".into(), "step_2".into()])
    );
    // What stops a run whose policy diverges has nothing to stop here.
    let diverges = ["grpo.kl_coef=0.05", "alarm.kl_stop=5.0"];
    let said = eval(&room, 2, &["run/best", "--json"], &diverges);
    assert!(
        (said.ended(0, &[]).json()["sets"]["held_out"]["margin"].as_f64().unwrap() - best["value"].as_f64().unwrap())
            .abs()
            < 1e-12
    );
    assert!(room.path().join("run/eval/step_2/results.jsonl").is_file());
    room.alone(&["merge", "run/best", "merged"]).ended(0, &["with adapters added to"]);
    room.alone(&["merge", "run/checkpoints/step_2", "of_step_2"]).ended(0, &[]);
    let weights = |folder: &str| fs::read(room.path().join(folder).join("model.safetensors")).unwrap();
    assert_eq!(weights("merged"), weights("of_step_2"));
    train(&room, "next", &[], &["lora.init_from=run/best", "run.steps=1"]).ended(0, &[]);
}

/// The mean of the answers that a judge happened to score is no measurement of the set.
#[test]
fn an_evaluation_with_an_answer_that_nobody_has_scored_is_announced_and_never_the_best() {
    let room = drawing();
    // The prompt of 17 tokens: its third evaluation has a missing reward and is the best otherwise, the fourth is the worst.
    room.script(
        "score",
        "first=1\nwhile read -r line; do case \"$line\" in\n\
         *'\"of 17\"'*) [ -z \"$first\" ] || echo >> seen\n\
         case \"$(wc -l < seen | tr -d ' ')$first\" in 31) echo null;; 3) echo 1;; 4*) echo 0;; *) echo 0.1;; esac;;\n\
         *'\"of 50\"'*) echo 0.1;;\n\
         *) echo 0.$(( ${#line} % 10 ));; esac; first=; done",
    );
    let metric = "checkpoint.keep_best=eval/books/sampled/reward";
    let sets = ["data.held_out={ books = \"books.jsonl\" }", metric, "eval.every=2", "run.steps=6"];
    let words = "warning: the evaluation after update 4 is not compared by checkpoint.keep_best = \"eval/books/sampled/reward\": 1 \
                 held-out answers of books have no reward";
    let said = train(&room, "run", &[], &sets);
    said.ended(0, &[words]);
    assert_eq!(said.err.matches("is not compared by").count(), 1, "{said}");
    let means = metrics(&room, "run").1;
    let mean = |at: usize| means[at]["sets"]["books"]["reward"].as_f64().unwrap();
    assert!(mean(2) > mean(1) && mean(1) > mean(3), "{means:?}");
    assert_eq!(room.read("run/best"), "checkpoints/step_2\n");
    assert_eq!(receipt(&room, "run")["best"]["step"], json!(2));
}

#[test]
fn contradictions_of_evaluation_are_refused_by_name() {
    let room = falling();
    let refused = |sets: &[&str], words: &[&str]| {
        train(&room, "run", &[], sets).refused(2, words);
    };
    refused(&["checkpoint.keep_best=eval/codes/margin"], &["one of eval/held_out/margin, eval/held_out/accuracy"]);
    refused(
        &["eval.samples=2"],
        &["eval.samples should be left out: answers come with the data where rollout.sample = false"],
    );
    refused(&["data.held_out={ \"a/b\" = \"other.jsonl\" }"], &["data.held_out should be a file, or a table"]);
    let text = room.read("config.toml").replace("held_out = \"other.jsonl\"\n", "");
    room.write("config.toml", &text);
    refused(&["eval.every=2"], &["eval.every should be 0: there is no data.held_out"]);
    room.write("equal.jsonl", lines(&[record(9, [1, 1, 1])]).replace("\"reward\":1", "\"reward\":0"));
    train(&room, "run", &[], &["data.held_out=equal.jsonl", "checkpoint.keep_best=eval/held_out/margin"])
        .refused(3, &["no prompt of held_out has a better and a worse answer", "data.held_out"]);
    eval(&room, 1, &["--base"], &[]).refused(2, &["data.held_out is not set"]);
    eval(&room, 1, &["--base"], &["data.held_out=equal.jsonl"]).refused(3, &["nothing can be measured on held_out"]);
    room.write("run/metrics.jsonl", "");
    eval(&room, 1, &["--base", "--out", "run"], &["data.held_out=equal.jsonl"])
        .refused(2, &["run is a run's directory"]);
    eval(&room, 1, &["absent"], &["data.held_out=equal.jsonl"]).refused(3, &["absent/adapter_config.json"]);
    eval(&room, 1, &[], &[]).ended(2, &["<ADAPTERS>"]);
}
