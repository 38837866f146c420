//! The online loop on the tiny reference checkpoint: the policy answers for itself, and updates are made of what it
//! said.

use serde_json::Value;

use super::checkpoints::case;
use super::resume::{checkpoints, complete, numbers, signal, start, train};
use super::room::Room;
use super::training::{config, lines};

/// Sampled answers over prompts of uneven lengths, several updates of each group, some of them on two groups.
fn room(extra: &str) -> Room {
    let prompts: Vec<Value> = [96, 61, 5, 33]
        .into_iter()
        .map(|length| serde_json::json!({"name": format!("of {length}"), "prompt_ids": super::training::ids(length, length)}))
        .collect();
    let config = config(&case("qwen3"))
        .replace("reward_fn = \"data\"", "reward_fn = \"synthetic\"")
        .replace("[lora]", &format!("{extra}[rollout]\nsample = true\ntop_p = 0.9\nmax_tokens = 11\n[lora]"));
    Room::with(&[("config.toml", &config), ("train.jsonl", &lines(&prompts))])
}

#[test]
fn drawn_answers_are_the_same_at_one_two_and_four_ranks_and_the_ratio_is_one() {
    let room = room("");
    let answers = |run: &str| {
        let text = room.read(&format!("{run}/answers.jsonl"));
        let of = |line| {
            let line: Value = serde_json::from_str(line).unwrap();
            (line["prompt"].clone(), line["answer"].clone(), line["tokens"].clone(), line["text"].clone())
        };
        text.lines().map(of).collect::<Vec<_>>()
    };
    let mut all = Vec::new();
    for ranks in [1, 2, 4] {
        let run = format!("run{ranks}");
        let arguments = ["train", "--run-dir", &run, "--set", "model.dtype=float64", "--set", "run.steps=3"];
        room.ranks(ranks, &arguments).ended(0, &[]);
        let steps: Vec<Value> = room
            .read(&format!("{run}/metrics.jsonl"))
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert!(steps.iter().all(|step| step["ratio"] == serde_json::json!([1.0, 1.0])), "{steps:?}");
        assert!(steps.iter().all(|step| step["sampled_gap"].as_f64().unwrap() < 1e-10), "{steps:?}");
        assert!(steps.iter().all(|step| step["entropy"].as_f64().unwrap() > 0.0), "{steps:?}");
        all.push(answers(&run));
    }
    assert_eq!(all[0].len(), 9, "three answers of each of three groups");
    assert!(all[0] == all[1] && all[0] == all[2], "answers do not depend on the number of ranks");
}

#[test]
fn prompt_groups_side_by_side_draw_and_learn_as_one_with_its_groups_accumulated() {
    side_by_side_equals_accumulated(&room(""), &["model.dtype=float64", "run.steps=2"]);
}

/// Two prompt groups of ranks, and one that accumulates two groups, have the same loss and gradient norm.
fn side_by_side_equals_accumulated(room: &Room, sets: &[&str]) {
    train(room, "side", &[], &[sets, &["parallel.cp_size=1"]].concat()).ended(0, &[]);
    train(room, "one", &[], &[sets, &["optimizer.grad_accum=2"]].concat()).ended(0, &[]);
    let norm =
        |run: &str| -> Vec<f64> { numbers(room, run).iter().map(|step| step["grad_norm"].as_f64().unwrap()).collect() };
    let loss =
        |run: &str| -> Vec<f64> { numbers(room, run).iter().map(|step| step["loss"].as_f64().unwrap()).collect() };
    for (one, other) in norm("side").iter().zip(norm("one")).chain(loss("side").iter().zip(loss("one"))) {
        assert!((one - other).abs() <= 1e-10 * one.abs().max(1e-3), "{one} and {other}");
    }
}

/// Groups whose rewards differ by 1 and by 0.01.
fn rooms_of_unlike_rewards() -> Room {
    let record = |length: usize, rewards: [f64; 3]| {
        let mut record = super::training::record(length, [4, 2, 3]);
        for (answer, reward) in record["answers"].as_array_mut().unwrap().iter_mut().zip(rewards) {
            answer["reward"] = reward.into();
        }
        record
    };
    let data = lines(&[record(61, [0.0, 1.0, 0.0]), record(33, [0.50, 0.51, 0.50])]);
    Room::with(&[("config.toml", &config(&case("qwen3"))), ("train.jsonl", &data)])
}

#[test]
fn a_batch_has_one_deviation_over_all_its_groups_and_ranks() {
    let room = rooms_of_unlike_rewards();
    let sets = ["model.dtype=float64", "run.steps=2", "grpo.scale_rewards=batch"];
    side_by_side_equals_accumulated(&room, &sets);
    // The population deviation of 0, 1, 0, 0.5, 0.51, 0.5.
    let rewards = [0.0, 1.0, 0.0, 0.50, 0.51, 0.50];
    let mean = rewards.iter().sum::<f64>() / 6.0;
    let deviation = (rewards.iter().map(|reward| (reward - mean).powi(2)).sum::<f64>() / 6.0).sqrt();
    for run in ["side", "one"] {
        for step in numbers(&room, run) {
            assert!((step["advantage_scale"].as_f64().unwrap() - deviation).abs() < 1e-12, "{step}");
        }
    }
    // The same gradient as without scaling, divided by the deviation.
    let accumulated = ["model.dtype=float64", "run.steps=2", "optimizer.grad_accum=2"];
    train(&room, "none", &[], &[&accumulated[..], &["grpo.scale_rewards=none"]].concat()).ended(0, &[]);
    let norm = |run: &str| numbers(&room, run)[0]["grad_norm"].as_f64().unwrap();
    assert!((norm("none") / deviation / norm("one") - 1.0).abs() < 1e-12);
    let advantages = |run: &str| room.read_json(&format!("{run}/receipt.json"))["advantages"][1].as_f64().unwrap();
    assert!((advantages("none") / deviation - advantages("one")).abs() < 1e-12, "the receipt has what was trained");
    let said = train(&room, "kl", &[], &[&sets[..], &["grpo.kl_coef=0.1"]].concat());
    said.refused(2, &["grpo.kl_coef should be 0 with grpo.scale_rewards = \"batch\""]);
}

#[test]
fn a_floor_of_the_deviation_keeps_noise_small() {
    let room = rooms_of_unlike_rewards();
    let advantage = |run: &str, sets: &[&str]| {
        let sets = [&["run.steps=1", "optimizer.grad_accum=2", "data.shuffle=false"], sets].concat();
        train(&room, run, &[], &sets).ended(0, &["objective: reward data"]);
        room.read_json(&format!("{run}/receipt.json"))["advantages"][1].as_f64().unwrap()
    };
    assert!((advantage("free", &[]) - 2.0_f64.sqrt()).abs() < 1e-9, "noise of 0.01 at full size");
    assert!((advantage("floored", &["grpo.std_min=0.1"]) - 0.01 * 2.0 / 3.0 / 0.1).abs() < 1e-9);
    train(&room, "none", &[], &["grpo.scale_rewards=none", "grpo.std_min=0.1"])
        .refused(2, &["grpo.std_min should be 0: grpo.scale_rewards = \"none\" divides by no deviation"]);
}

#[test]
fn further_updates_of_a_group_move_the_ratio_and_go_on_from_a_checkpoint_between_them() {
    let room = room("updates_per_group = 3\n");
    let sets = ["run.steps=7", "checkpoint.every=2", "checkpoint.keep=9"];
    train(&room, "whole", &[], &sets).ended(0, &[]);
    let steps = numbers(&room, "whole");
    for (index, step) in steps.iter().enumerate() {
        let exactly_one = step["ratio"] == serde_json::json!([1.0, 1.0]);
        assert_eq!(
            exactly_one,
            index % 3 == 0,
            "only a round's first update has the frozen scores' own adapters: {step}"
        );
        assert_eq!(step["prompts"], steps[index - index % 3]["prompts"]);
    }
    assert_ne!(steps[0]["prompts"], steps[3]["prompts"]);
    let mut running = start(&room, "run", &[], &sets);
    signal(&room, &mut running, "run", 3, 1, "-9");
    assert_ne!(running.end().code, 0);
    assert!(checkpoints(&room, "run").contains(&"step_2".to_owned()), "in the middle of a round");
    std::fs::remove_dir_all(room.path().join("run/checkpoints/step_4")).ok();
    room.write("run/latest", "checkpoints/step_2\n");
    train(&room, "run", &["--resume"], &sets).ended(0, &["going on from run/checkpoints/step_2: update 3 is next"]);
    assert_eq!(complete(&room, "run", 7), complete(&room, "whole", 7));
    assert_eq!(numbers(&room, "run"), numbers(&room, "whole"));
}

#[test]
fn a_run_that_is_killed_between_capture_and_update_repeats_that_prompt_once_with_the_same_answers() {
    let room = room("");
    let sets = ["run.steps=5", "optimizer.grad_accum=4", "checkpoint.every=1", "checkpoint.keep=9"];
    train(&room, "whole", &[], &sets).ended(0, &[]);
    let mut running = start(&room, "run", &[], &sets);
    // Each update is made of four groups, so the kill falls between a capture and the update.
    signal(&room, &mut running, "run", 2, 1, "-9");
    assert_ne!(running.end().code, 0);
    train(&room, "run", &["--resume"], &sets).ended(0, &["going on from run/checkpoints/step_"]);
    assert_eq!(complete(&room, "run", 5), complete(&room, "whole", 5));
    assert_eq!(numbers(&room, "run"), numbers(&room, "whole"), "curves go on without repeated updates");
    let answers = room.read("run/answers.jsonl");
    assert_eq!(answers.lines().count(), 5 * 4 * 3, "each group's answers stand there once");
    assert_eq!(answers, room.read("whole/answers.jsonl"));
}

#[test]
fn a_group_with_equal_rewards_is_left_out_and_counted_and_with_a_reference_policy_it_is_not() {
    let record = |rewards: [f64; 3]| {
        let mut record = super::training::record(33, [4, 2, 2]);
        for (answer, reward) in record["answers"].as_array_mut().unwrap().iter_mut().zip(rewards) {
            answer["reward"] = reward.into();
        }
        record
    };
    let data = lines(&[record([1.0, 1.0, 1.0]), record([0.0, 1.0, 0.0])]);
    let room = Room::with(&[("config.toml", &config(&case("qwen3"))), ("train.jsonl", &data)]);
    let sets = ["run.steps=1", "optimizer.grad_accum=2"];
    train(&room, "run", &[], &sets).ended(0, &[]);
    let step = numbers(&room, "run").remove(0);
    assert_eq!((&step["groups_skipped"], &step["frac_groups_zero_std"]), (&1.into(), &0.5.into()));
    assert!(step["grad_norm"].as_f64().unwrap() > 0.0 && step["kl"].is_null());
    train(&room, "kl", &[], &[&sets[..], &["grpo.kl_coef=0.1"]].concat()).ended(0, &[]);
    let step = numbers(&room, "kl").remove(0);
    assert_eq!((&step["groups_skipped"], step["kl"].as_f64()), (&0.into(), Some(0.0)));
}

/// A fifth of the vocabulary ends an answer, so that of answers of three tokens at most some are cut off.
#[test]
fn answers_that_were_cut_off_are_in_no_denominator_of_the_whole_batch() {
    let room = room("mask_truncated = true\n");
    room.write("model/config.json", std::fs::read(case("qwen3").join("config.json")).unwrap());
    let ends: Vec<i64> = (0..256).filter(|id| id % 5 == 0).collect();
    room.write("model/generation_config.json", serde_json::json!({"eos_token_id": ends}).to_string());
    let sets = ["model.path=model", "model.random_init=true", "model.dtype=float64", "rollout.max_tokens=3"];
    for (aggregation, more) in [("token_mean", "run.steps=2"), ("constant", "grpo.constant_divisor=5")] {
        let rule = format!("grpo.aggregation={aggregation}");
        let sets: Vec<&str> = sets.iter().copied().chain(["run.steps=2", &rule, more]).collect();
        side_by_side_equals_accumulated(&room, &sets);
        let answers = room.read("side/answers.jsonl");
        let mut counts = [0, 0];
        for step in numbers(&room, "side") {
            let lines = answers.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            let (cut, whole): (Vec<Value>, Vec<Value>) =
                lines.filter(|line| line["step"] == step["step"]).partition(|line| line["truncated"] == true);
            counts = [counts[0] + cut.len(), counts[1] + whole.len()];
            assert!(cut.iter().all(|line| line["advantage"].is_null() && line["reward"].is_number()), "{cut:?}");
            // The ratio is 1, so the loss of a token is −advantage.
            let of = |key: &str| whole.iter().map(|line| line[key].as_f64().unwrap()).collect::<Vec<f64>>();
            let (advantages, tokens) = (of("advantage"), of("tokens"));
            let count = f64::from(u32::try_from(whole.len().max(1)).unwrap());
            let by_token: f64 = advantages.iter().zip(&tokens).map(|(advantage, tokens)| advantage * tokens).sum();
            let expected = match aggregation {
                "token_mean" => -by_token / tokens.iter().sum::<f64>().max(1.0),
                _ => -by_token / (5.0 * count),
            };
            assert!((step["loss"].as_f64().unwrap() - expected).abs() < 1e-12, "{aggregation}: {step} for {expected}");
        }
        assert!(counts[0] > 1 && counts[1] > 1 && counts[0] + counts[1] == 12, "{counts:?}");
        for run in ["side", "one"] {
            std::fs::remove_dir_all(room.path().join(run)).unwrap();
        }
    }
}
