//! What a run optimises: nothing is put in the place of what the user said, and what is optimised is announced.

use std::path::Path;

use serde_json::{Value, json};

use super::checkpoints::case;
use super::resume::numbers;
use super::room::{Room, Said};
use super::test_tokenizer;
use super::training::{config, lines, record};

/// A room whose configuration names no reward, with these records.
fn unnamed(records: &[Value]) -> Room {
    let text = config(&case("qwen3")).replace("reward_fn = \"data\"\n", "");
    Room::with(&[("config.toml", &text), ("train.jsonl", &lines(records))])
}

fn train(room: &Room, run: &str, sets: &[&str]) -> Said {
    let mut arguments = vec!["train", "--run-dir", run];
    arguments.extend(sets.iter().flat_map(|set| ["--set", *set]));
    room.alone(&arguments)
}

/// The record with these rewards; null where there is none.
fn rewarded(rewards: [Value; 3]) -> Value {
    let mut record = record(33, [4, 2, 2]);
    for (answer, reward) in record["answers"].as_array_mut().unwrap().iter_mut().zip(rewards) {
        answer["reward"] = reward;
    }
    record
}

/// The run trained on 0 and 1 in turn, whatever rewards the data had.
#[test]
fn rewards_of_the_data_are_not_replaced_where_no_reward_is_named() {
    let room = unnamed(&[rewarded([json!(1), json!(0), json!(1)])]);
    let said = train(&room, "unnamed", &["run.steps=1"]);
    said.ended(
        0,
        &["objective: reward data (grpo.reward_fn is not set, and every answer has one)", "ratio clipped to 0.8"],
    );
    let receipt = room.read_json("unnamed/receipt.json");
    assert_eq!(receipt["rewards"], json!([1.0, 0.0, 1.0]));
    train(&room, "named", &["run.steps=1", "grpo.reward_fn=data"]).ended(0, &["objective: reward data; advantage"]);
    assert_eq!(receipt["adapter_digest"], room.read_json("named/receipt.json")["adapter_digest"]);
    assert!(room.read("unnamed/config.resolved.toml").contains("reward_fn = \"data\""));
}

#[test]
fn a_reward_that_nobody_can_know_is_asked_for_with_the_choices() {
    let room = unnamed(&[rewarded([json!(1), Value::Null, json!(0)])]);
    let choices = ["grpo.reward_fn is not set", "exact_match", "judge", "--set grpo.reward_fn=NAME", "docs/rewards.md"];
    let asks = |sets: &[&str], why: &str| {
        let said = train(&room, "run", sets);
        said.refused(2, &choices).refused(2, &[why]);
    };
    asks(&[], "answers[1] of record of 33 in train.jsonl has no reward");
    asks(&["rollout.sample=true"], "the policy samples its answers (rollout.sample = true)");
    room.write("config.toml", room.read("config.toml").replace("[data]\npath = \"train.jsonl\"\n", ""));
    asks(&[], "there is no data.path");
    assert_eq!(room.files("run").iter().filter(|file| file.contains("receipt")).count(), 0);
}

#[test]
fn a_reward_for_validation_that_is_named_is_taken_and_announced() {
    let room = unnamed(&[rewarded([json!(1), json!(0), json!(1)])]);
    train(&room, "run", &["grpo.reward_fn=synthetic", "run.steps=1"])
        .ended(0, &["objective: reward synthetic (0 and 1 in turn, whatever the answers say)"])
        .ended(0, &["warning: the rewards in train.jsonl are not used: grpo.reward_fn is \"synthetic\""]);
    assert_eq!(room.read_json("run/receipt.json")["rewards"], json!([0.0, 1.0, 0.0]));
}

#[test]
fn a_run_whose_reward_nobody_named_goes_on_and_lines_that_are_lost_do_not_make_it_untrained() {
    let room = unnamed(&[rewarded([json!(1), json!(0), json!(1)])]);
    train(&room, "run", &["run.steps=2"]).ended(0, &[]);
    let resume = |sets: &[&str]| {
        let mut arguments = vec!["train", "--run-dir", "run", "--resume"];
        arguments.extend(sets.iter().flat_map(|set| ["--set", *set]));
        room.alone(&arguments)
    };
    resume(&["run.steps=3"]).ended(0, &["update 3 is next"]);
    resume(&["run.steps=4", "grpo.reward_fn=data"]).ended(0, &["update 4 is next"]);
    resume(&["run.steps=5", "grpo.reward_fn=synthetic"]).refused(2, &["grpo.reward_fn was \"data\""]);
    std::fs::remove_file(room.path().join("run/metrics.jsonl")).unwrap();
    std::fs::remove_file(room.path().join("run/receipt.json")).unwrap();
    resume(&["run.steps=4"]).ended(0, &[]);
    let receipt = room.read_json("run/receipt.json");
    assert_eq!((&receipt["passed"], &receipt["updates_with_gradient"]), (&json!(true), &json!(4)), "{receipt}");
}

#[test]
fn data_that_cannot_train_anything_are_refused_before_the_first_step() {
    let room = unnamed(&[rewarded([json!(1), json!(1), json!(1)]), rewarded([json!(0.5), json!(0.5), json!(0.5)])]);
    train(&room, "run", &[]).refused(3, &["train.jsonl: none of its 2 records has answers with different rewards"]);
    let none = unnamed(&[rewarded([Value::Null, Value::Null, Value::Null])]);
    train(&none, "run", &["grpo.reward_fn=data"])
        .refused(3, &["none of its 1 records has answers with different rewards"]);
    let alone = ["grpo.group_size=1", "grpo.reward_fn=length", "reward.length_tokens=3"];
    train(&room, "run", &alone).refused(2, &["grpo.group_size should be at least 2: it is 1"]);
    // A KL term has a gradient without rewards.
    train(&room, "kl", &["grpo.kl_coef=0.1", "run.steps=2"]).ended(0, &["KL term × 0.1"]);
    assert_eq!(room.read_json("kl/receipt.json")["passed"], true);
}

#[test]
fn a_run_in_which_nothing_was_trained_has_not_passed() {
    let room = unnamed(&[record(33, [4, 2, 2])]);
    // Every answer is short enough, which only its length tells.
    let sets = ["grpo.reward_fn=length", "reward.length_tokens=9", "run.steps=2"];
    let said = train(&room, "run", &sets);
    said.refused(3, &["nothing was trained: the gradient of all 2 updates was 0"]);
    let receipt = room.read_json("run/receipt.json");
    assert_eq!((&receipt["passed"], &receipt["updates_with_gradient"]), (&json!(false), &json!(0)));
    assert!(numbers(&room, "run").iter().all(|step| step["grad_norm"] == 0.0));
    let mut arguments = vec!["train", "--run-dir", "two"];
    arguments.extend(sets.iter().flat_map(|set| ["--set", *set]));
    room.ranks(2, &arguments).refused(3, &["nothing was trained: the gradient of all 2 updates was 0"]);
    train(&room, "frozen", &["grpo.reward_fn=data", "optimizer.lr=0", "run.steps=1"]).ended(0, &["optimizer.lr = 0"]);
    let receipt = room.read_json("frozen/receipt.json");
    assert_eq!((&receipt["passed"], &receipt["updates_with_gradient"]), (&json!(false), &json!(1)));
}

/// Three answers of which each token has this log-probability, `None`: null.
fn drawn(logprob: Option<f64>, rewards: [Value; 3]) -> Value {
    let mut record = rewarded(rewards);
    for answer in record["answers"].as_array_mut().unwrap() {
        let tokens = answer["ids"].as_array().unwrap().len();
        answer["logprobs"] = json!(vec![logprob; tokens]);
    }
    record
}

const SETS: [&str; 2] = ["run.steps=1", "model.dtype=float64"];

/// The ratio was 1 in every update, and clipping never acted.
#[test]
fn the_ratio_is_to_the_log_probabilities_that_came_with_the_answers() {
    let rewards = || [json!(1), json!(0), json!(1)];
    let ends = |logprob: Option<f64>, more: &[&str]| {
        let room = unnamed(&[drawn(logprob, rewards())]);
        let said = train(&room, "run", &[&SETS[..], more].concat());
        said.ended(0, &[]);
        (numbers(&room, "run").remove(0), said)
    };
    let (own, said) = ends(None, &[]);
    assert_eq!(own["ratio"], json!([1.0, 1.0]), "a null takes this policy's score");
    assert!(said.err.contains("old policy: no answer of data.path brings \"logprobs\""), "{said}");
    let (near, said) = ends(Some(-5.5), &[]);
    assert!(
        said.err.contains("log-probabilities of 3 of 3 answers came with the data and are the old policy"),
        "{said}"
    );
    let (far, _) = ends(Some(-7.0), &[]);
    let ratios = |step: &Value| [0, 1].map(|end| step["ratio"][end].as_f64().unwrap());
    for (near, far) in ratios(&near).into_iter().zip(ratios(&far)) {
        assert!((far / near - 1.5_f64.exp()).abs() < 1e-9, "e^(logprob − given): {near} and {far}");
    }
    // Far above 1 everything with a positive advantage is clipped, and nothing else.
    let (above, _) = ends(Some(-40.0), &[]);
    assert_eq!((&above["clipped_tokens"], &above["clip_low_share"]), (&json!(6), &json!(0.0)), "{above}");
    // Far below 1 everything with a negative one.
    let (below, _) = ends(Some(0.0), &[]);
    assert_eq!((&below["clipped_tokens"], &below["clip_high_share"]), (&json!(2), &json!(0.0)), "{below}");
}

#[test]
fn importance_weights_are_counted_and_their_cap_is_asked_for() {
    let data = [drawn(Some(-7.0), [json!(1), json!(0), json!(1)])];
    let room = unnamed(&data);
    let token = ["grpo.importance=token", "grpo.importance_max=2.5"];
    let said = train(&room, "token", &[&SETS[..], &token].concat());
    said.ended(
        0,
        &["old policy: log-probabilities of 3 of 3 answers came with the data and give token importance weights"],
    );
    let step = numbers(&room, "token").remove(0);
    assert_eq!(step["ratio"], json!([1.0, 1.0]), "the ratio is to the scored policy: {step}");
    let (mean, capped) = (step["importance_mean"].as_f64().unwrap(), step["importance_capped_share"].as_f64().unwrap());
    assert!(mean > 0.0 && mean <= 2.5 && capped > 0.0, "{step}");
    let unweighted = numbers(&room, "token")[0]["loss"].as_f64().unwrap();
    assert!(unweighted.is_finite());
    train(&room, "run", &["grpo.importance=token"])
        .refused(2, &["grpo.importance_max should be set to the largest weight"]);
    train(&room, "run", &["grpo.importance_max=2.0"]).refused(2, &["grpo.importance_max should be left out"]);
    train(&room, "run", &[&token[..], &["rollout.sample=true", "grpo.reward_fn=synthetic"]].concat())
        .refused(2, &["grpo.importance should be \"none\""]);
    let none = unnamed(&[record(33, [4, 2, 2])]);
    train(&none, "run", &token).refused(3, &["train.jsonl: no answer brings \"logprobs\""]);
}

/// One rank, two that share a prompt, and the conventional schedule weigh a sequence alike.
#[test]
fn a_sequence_has_one_weight_whoever_computes_it_and_a_stopped_round_goes_on_with_it() {
    let room = unnamed(&[drawn(Some(-5.0), [json!(1), json!(0), json!(0.5)])]);
    let sets = ["model.dtype=float64", "run.steps=4", "grpo.importance=sequence", "grpo.importance_max=1e6"];
    let run = |ranks: usize, run: &str, more: &[&str]| {
        let mut arguments = vec!["train", "--run-dir", run];
        let more = [&sets[..], more].concat();
        arguments.extend(more.iter().flat_map(|set| ["--set", *set]));
        room.ranks(ranks, &arguments).ended(0, &[]);
        numbers(&room, run)
    };
    let one = run(1, "one", &["grpo.gradient=exact"]);
    assert!((one[0]["importance_mean"].as_f64().unwrap() - 1.0).abs() > 1e-3, "{}", one[0]);
    for other in [
        run(2, "two", &["grpo.gradient=exact"]),
        run(1, "whole", &["grpo.gradient=exact", "memory.prompt_no_grad=false"]),
    ] {
        for (one, other) in one.iter().zip(&other) {
            let [a, b] = [one, other].map(|step| step["loss"].as_f64().unwrap());
            assert!((a - b).abs() <= 1e-9 * a.abs().max(1e-3), "{a} and {b}");
        }
    }
    // Within a round the weights are frozen with the scores, also over a checkpoint.
    let round = ["grpo.updates_per_group=4", "checkpoint.every=1", "checkpoint.keep=9"];
    let whole = run(2, "round", &round);
    std::fs::remove_dir_all(room.path().join("round/checkpoints/step_4")).unwrap();
    std::fs::remove_dir_all(room.path().join("round/checkpoints/step_3")).unwrap();
    room.write("round/latest", "checkpoints/step_2\n");
    let arguments = [&["train", "--resume", "--run-dir", "round"][..]].concat();
    let flags: Vec<&str> = sets.iter().chain(&round).flat_map(|set| ["--set", *set]).collect();
    room.ranks(2, &[&arguments[..], &flags].concat()).ended(0, &["update 3 is next"]);
    assert_eq!(numbers(&room, "round"), whole);
}

/// Answers that transformers sampled at another temperature, and one update of them as plain Python computes it:
/// `scripts/given_logprobs.py` made the files of `tests/given_logprobs`.
#[test]
fn ratios_clips_and_weights_of_an_outside_engines_answers_are_those_of_a_plain_computation() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/given_logprobs");
    let room = unnamed(&[]);
    std::fs::copy(folder.join("answers.jsonl"), room.path().join("train.jsonl")).unwrap();
    for (importance, more) in
        [("none", &[][..]), ("token", &["grpo.importance_max=1.5"]), ("sequence", &["grpo.importance_max=1.5"])]
    {
        let importance_set = format!("grpo.importance={importance}");
        let sets = ["run.steps=1", "optimizer.grad_accum=2", "data.shuffle=false", importance_set.as_str()];
        train(&room, importance, &[&sets[..], more].concat()).ended(0, &["log-probabilities of 6 of 6 answers"]);
        let step = numbers(&room, importance).remove(0);
        let expected = std::fs::read_to_string(folder.join(format!("{importance}.json"))).unwrap();
        let expected: Value = serde_json::from_str(&expected).unwrap();
        let near = |found: &Value, expected: &Value, key: &str| {
            let (found, expected) = (found.as_f64().unwrap(), expected.as_f64().unwrap());
            assert!(
                (found - expected).abs() <= 1e-5 * expected.abs().max(1.0),
                "{importance}, {key}: {found} for {expected}"
            );
        };
        for key in ["loss", "clipped_tokens", "clip_low_share", "clip_high_share"] {
            near(&step[key], &expected[key], key);
        }
        for end in [0, 1] {
            near(&step["ratio"][end], &expected["ratio"][end], "ratio");
        }
        for key in ["importance_mean", "importance_capped_share"] {
            assert_eq!(step[key].is_null(), expected[key].is_null(), "{key}: {step}");
            if !step[key].is_null() {
                near(&step[key], &expected[key], key);
            }
        }
    }
}

/// A model folder with a shape, for random weights, and a tokenizer of bytes.
fn with_tokenizer(room: &Room) {
    let shape = std::fs::read_to_string(case("qwen3").join("config.json")).unwrap();
    let mut shape: Value = serde_json::from_str(&shape).unwrap();
    shape["vocab_size"] = json!(264);
    room.write("model/config.json", shape.to_string());
    let tokenizer = test_tokenizer::folder();
    room.write("model/tokenizer.json", std::fs::read(tokenizer.path().join("tokenizer.json")).unwrap());
    room.write("model/generation_config.json", format!("{{\"eos_token_id\": {}}}", test_tokenizer::END));
}

/// `5</think>4` and `4</think>5` were "54" and "45" where `</think>` is special, and both had the reward 0.
#[test]
fn rewards_see_special_tokens_and_not_the_token_that_ends_the_turn() {
    let answer = |text: &str| json!({"text": text});
    let answers = ["5<|im_start|>4<|im_end|>", "4<|im_start|>5<|im_end|>", "4<|im_end|>"].map(answer);
    let record = json!({"name": "one", "prompt_ids": [1, 2, 3], "answers": answers, "reward_data": {"expected": "4"}});
    let room = unnamed(&[record]);
    with_tokenizer(&room);
    let sets = ["model.path=model", "model.random_init=true", "grpo.reward_fn=exact_match", "run.steps=1"];
    train(&room, "run", &[&sets[..], &["reward.after=<|im_start|>"]].concat()).ended(0, &[]);
    assert_eq!(room.read_json("run/receipt.json")["rewards"], json!([1.0, 0.0, 0.0]));
    let texts: Vec<Value> = room
        .read("run/answers.jsonl")
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["text"].clone())
        .collect();
    assert_eq!(texts, ["5<|im_start|>4", "4<|im_start|>5", "4"]);
}

#[test]
fn sampling_from_a_part_of_the_distribution_is_announced() {
    let room = unnamed(&[record(33, [4, 2, 2])]);
    let sets = ["rollout.sample=true", "rollout.max_tokens=4", "grpo.reward_fn=synthetic", "run.steps=1"];
    let part = ["rollout.top_p=0.9", "rollout.top_k=20"];
    let said = train(&room, "part", &[&sets[..], &part].concat());
    said.ended(0, &["old policy: answers are sampled with top_p 0.9 and top_k 20"]);
    assert!(!train(&room, "whole", &sets).ended(0, &[]).err.contains("old policy"));
}
