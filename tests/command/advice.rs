//! What `plan` advises: ways to share ranks out, the whole run, real lengths of the data; and what a run makes of an absent
//! `parallel.cp_size`.

use std::path::Path;

use serde_json::{Value, json};

use super::checkpoints::case;
use super::plan::{near, plan};
use super::resume::{quick, train};
use super::room::{Room, Said};
use super::test_tokenizer;
use super::training::{config, lines, record};

/// The configuration of 16 GPUs that docs/memory.md plans.
const DOCUMENTS: &str = include_str!("../../configs/documents-2x8.toml");

/// `plan` of it on 2 nodes of 8 H200, with these values set.
fn sixteen(flags: &[&str], sets: &[&str]) -> Said {
    let room = Room::with(&[("config.toml", DOCUMENTS)]);
    let sets = sets.iter().flat_map(|set| ["--set", *set]);
    let machine = ["--ranks", "16", "--device-gib", "139", "--host-gib", "1800"];
    plan(&room, "qwen3-8b", &machine.into_iter().chain(flags.iter().copied()).chain(sets).collect::<Vec<_>>())
}

#[test]
fn the_documents_of_sixteen_gpus_are_planned_with_ranks_hours_and_requests() {
    let said = sixteen(&[], &[]);
    said.ended(0, &[]);
    for words in [
        "16 ranks, 1 share a prompt, 16 prompts side by side",
        "micro-blocks of 8192 rows, chosen for this device and these lengths",
        "yes, the fastest <- this plan",
        "parallel.cp_size is absent: 1 chosen, the fastest that fits",
        "an update of 16 groups, 128 answers: ",
        "the run of 500 updates: ",
        "judge requests of the run: 64000 for training, and one for each held-out answer",
        "judge waits: 128 answers by 1 judge, 32 at a time (reward.judge_parallel): 4 times the seconds of a reply",
        "tokens drawn in the run: up to 131072000",
    ] {
        assert!(said.out.contains(words), "{words}: {said}");
    }
    let document = include_str!("../../docs/memory.md");
    let advice = said.out.split_once("ways to share out").unwrap().1;
    for line in advice.lines().skip(1) {
        assert!(document.contains(line.trim_end()), "docs/memory.md lacks this line:\n{line}");
    }
}

#[test]
fn every_way_to_share_ranks_out_has_the_same_groups_and_the_fastest_that_fits_is_taken() {
    let rows = |plan: &Value| plan["splits"]["rows"].as_array().unwrap().clone();
    let whole = sixteen(&["--json"], &[]).json();
    let of = |row: &Value, key: &str| row[key].as_u64().unwrap();
    assert_eq!(rows(&whole).len(), 5);
    for row in rows(&whole) {
        assert_eq!(
            (of(&row, "cp_size") * of(&row, "dp_size"), of(&row, "dp_size") * of(&row, "turns")),
            (16, 16),
            "{row}"
        );
    }
    let least = rows(&whole).iter().map(|row| row["update_seconds"].as_f64().unwrap()).fold(f64::INFINITY, f64::min);
    let chosen = rows(&whole).into_iter().find(|row| row["cp_size"] == whole["splits"]["fastest"]).unwrap();
    near(chosen["update_seconds"].as_f64().unwrap(), least, 1e-12, "the fastest");
    assert_eq!((&whole["cp_size"], &whole["splits"]["because"]), (&json!(1), &json!("fastest")));
    near(whole["forecast"]["update_seconds"].as_f64().unwrap(), least, 1e-12, "the plan is that row's");
    // 500 updates, and 25 saves of less than a GB at half a GB a second.
    let hours = whole["forecast"]["hours"].as_f64().unwrap();
    assert!(hours > 500.0 * least / 3600.0 && hours < 500.0 * least / 3600.0 + 0.02, "{hours}");
    // A device that does not hold the prompt's pages and its rows alone: more ranks share a prompt, the fastest of those that fit.
    let small = sixteen(&["--json"], &["context.prompt_len=1048576"]).json();
    assert_eq!(rows(&small)[0]["fits"], json!(false), "{}", small["splits"]);
    let fitting = rows(&small).into_iter().filter(|row| row["fits"] == json!(true));
    let best =
        fitting.min_by(|a, b| a["update_seconds"].as_f64().unwrap().total_cmp(&b["update_seconds"].as_f64().unwrap()));
    assert_eq!(small["cp_size"], best.unwrap()["cp_size"]);
    // Stated: the plan is of that, and names the faster way with the same update.
    let stated = sixteen(&[], &["parallel.cp_size=8", "optimizer.grad_accum=8"]);
    stated.ended(0, &[]);
    let words = "set parallel.cp_size = 1 and optimizer.grad_accum = 1 for the fastest with the same update";
    assert!(stated.out.contains(words) && stated.out.contains("16 ranks, 8 share a prompt"), "{stated}");
    // One group in an update: all ranks share it, as ever.
    let one = sixteen(&[], &["optimizer.grad_accum=1"]);
    assert!(one.out.contains("absent: all 16 ranks share a prompt; optimizer.grad_accum = 1 is all"), "{one}");
    assert!(one.out.contains("16 ranks, 16 share a prompt"), "{one}");
}

#[test]
fn the_seconds_of_a_judges_reply_are_in_updates_and_hours_where_they_are_given() {
    let forecast =
        |flags: &[&str], sets: &[&str]| sixteen(&[&["--json"][..], flags].concat(), sets).json()["forecast"].clone();
    let number = |forecast: &Value, key: &str| forecast[key].as_f64().unwrap();
    let (without, with) = (forecast(&[], &[]), forecast(&["--judge-sec", "5"], &[]));
    near(number(&with, "update_seconds"), number(&without, "update_seconds") + 20.0, 1e-12, "four rounds of 5 s");
    assert!(number(&with, "hours") > number(&without, "hours") + 500.0 * 20.0 / 3600.0 - 1e-9);
    assert_eq!((&with["judge_waits"]["rounds"], &with["judge_waits"]["reply_sec"]), (&json!(4), &json!(5.0)));
    // One prompt at a time: each of 16 turns waits for itself.
    assert_eq!(forecast(&[], &["parallel.cp_size=16"])["judge_waits"]["rounds"], json!(16));
    let said = sixteen(&["--judge-sec", "5"], &[]);
    assert!(said.out.contains("the judges' time is in it") && said.out.contains("20 s at 5 s a reply"), "{said}");
    sixteen(&["--judge-sec", "5"], &["grpo.reward_fn=one"]).ended(0, &["--judge-sec changes nothing"]);
}

#[test]
fn a_plan_of_the_data_reads_rubrics_and_names_held_out_sets() {
    let text = config(&case("qwen3"))
        + "[rollout]\nsample = true\n[reward]\nrubric = \"rubric.txt\"\n[endpoint]\napi_base = \"https://example.org\"\n\
           default_model = \"j\"\n[endpoint.usage]\nreward_scoring = true\n";
    let text = text.replace("reward_fn = \"data\"", "reward_fn = \"judge\"");
    let text = text.replace(
        "path = \"train.jsonl\"",
        "path = \"train.jsonl\"\nheld_out = { codes = \"a.jsonl\", books = \"b.jsonl\" }",
    );
    let mut asked = record(9, [1, 2, 1]);
    asked["reward_data"] = json!({"question": "Which letter?"});
    let (one, two) = (lines(&[record(7, [1, 2, 1])]), lines(&[asked.clone(), record(9, [1, 2, 1])]));
    let files = [("config.toml", text.as_str()), ("train.jsonl", &two), ("a.jsonl", &one), ("b.jsonl", &one)];
    let room = Room::with(&files);
    let plan = ["plan", "--ranks", "1", "--data"];
    room.alone(&plan).refused(2, &["reward.rubric: rubric.txt: "]);
    room.alone(&plan[..3]).ended(0, &[]);
    room.write("rubric.txt", "Judge.");
    let said = room.alone(&plan);
    said.ended(0, &["Optional: with context.prompt_len = 9 "]);
    for words in [
        "data.held_out.codes: 1 prompts",
        "data.held_out.books: 1 prompts",
        "  1 of them have no reward_data.question: a judge gets their answers without one",
        "2 evaluations of 2 held-out prompts",
    ] {
        assert!(said.out.contains(words), "{words}: {said}");
    }
}

/// Prompts that switch thinking off, with `reward.after`, were scored as empty all night.
#[test]
fn a_plan_of_the_data_says_what_records_lack_and_whether_they_let_the_model_think() {
    let text = config(Path::new("model"))
        + "[rollout]\nsample = true\n[endpoint]\napi_base = \"https://example.org\"\ndefault_model = \"j\"\n\
           [endpoint.usage]\nreward_scoring = true\n";
    let text = text.replace("reward_fn = \"data\"", "reward_fn = \"judge\"");
    let text = text.replace("path = \"train.jsonl\"", "path = \"train.jsonl\"\nheld_out = \"held_out.jsonl\"");
    let asked = |thinks: Option<bool>, data: Value| {
        let kwargs = thinks.map(|thinks| json!({"enable_thinking": thinks}));
        json!({"messages": [{"role": "user", "content": "Which?"}], "chat_template_kwargs": kwargs, "reward_data": data})
    };
    let full = || json!({"question": "Which?", "expected": "this"});
    let train = [
        asked(None, full()),
        asked(Some(true), json!({"question": "Which?", "answer": "this"})),
        asked(Some(false), full()),
        json!({"prompt": "Which?", "reward_data": full()}),
    ];
    let held_out = lines(&[asked(Some(false), full())]);
    let files = [("config.toml", text.as_str()), ("train.jsonl", &lines(&train)), ("held_out.jsonl", &held_out)];
    let room = Room::with(&files);
    room.model_with_tokenizer(&case("qwen3"), &test_tokenizer::folder());
    room.write(
        "model/chat_template.jinja",
        "{% for m in messages %}{{ m.content }}\n{% endfor %}A:\n\
         {% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
    );
    let said = |sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", *set]);
        room.alone(&["plan", "--ranks", "1", "--data"].into_iter().chain(sets).collect::<Vec<_>>())
    };
    let plain = said(&[]);
    plain.ended(0, &[]);
    for words in [
        "  1 of them have no reward_data.expected: a judge has nothing to compare their answers with",
        "  2 of them let the model think before it answers, and rewards read the thinking too: set reward.after",
    ] {
        assert_eq!(plain.out.matches(words).count(), 1, "{words}: {plain}");
    }
    let after = said(&["reward.after=</think>"]);
    let words = "  1 of them end with \"</think>\", so their answers lack it";
    assert_eq!(after.ended(0, &[]).out.matches(words).count(), 2, "train and held-out: {after}");
    assert!(!after.out.contains("let the model think"), "{after}");
    let words =
        "data.path: 1 of 4 records have no reward_data.expected, which the reward contains compares answers with";
    let rule = said(&["grpo.reward_fn=contains", "checkpoint.keep_best=eval/held_out/margin"]);
    rule.ended(
        0,
        &[words, "data.held_out: no record has a better and a worse answer, so there is no eval/held_out/margin"],
    );
}

#[test]
fn a_plan_of_the_data_has_its_real_lengths_and_names_records_that_are_too_long() {
    let text = config(&case("qwen3"))
        + "[rollout]\nsample = true\n[endpoint]\napi_base = \"https://example.org\"\ndefault_model = \"j\"\n";
    let text = text.replace("reward_fn = \"data\"", "reward_fn = \"judge\"");
    let text = text.replace("path = \"train.jsonl\"", "path = \"train.jsonl\"\nheld_out = \"held_out.jsonl\"");
    let train = lines(&[record(61, [2, 13, 5]), record(130, [2, 1, 1]), record(5, [1, 1, 3]), record(8, [1, 1, 30])]);
    let held_out = lines(&[record(33, [4, 2, 2]), record(9, [1, 2, 1])]);
    let files = [("config.toml", text.as_str()), ("train.jsonl", &train), ("held_out.jsonl", &held_out)];
    let room = Room::with(&files);
    let usage = ["--set", "endpoint.usage.reward_scoring=true", "--rate-host", "50", "--data"];
    let said = room.alone(&[&["plan", "--ranks", "1"][..], &usage].concat());
    said.ended(0, &["data.path: 2 of 4 records are too long", "`longstraw train` ends with exit 3"]);
    for words in [
        "data.path: 4 prompts, the longest 130 tokens, 51 on average; 42 prompt tokens an update",
        "2 of them would be refused as too long: of 130: prompt of 130 tokens; of 8: answer of 30 tokens",
        "data.held_out: 2 prompts, the longest 33 tokens",
        // Three updates of a group of three; twice two held-out prompts with a greedy answer each.
        "judge requests of the run: 9 for training, 16 for held-out answers",
        "2 evaluations of 2 held-out prompts",
    ] {
        assert!(said.out.contains(words), "{words}: {said}");
    }
    // Shorter prompts take less than the longest, and memory is that of the longest there is.
    let json = |extra: &[&str]| room.alone(&[&["plan", "--ranks", "1", "--json"][..], &usage, extra].concat()).json();
    let all = json(&["--set", "context.prompt_len=256", "--set", "context.max_seq_len=280"]);
    let seconds = &all["forecast"]["update_seconds"];
    assert!(seconds.as_f64().unwrap() < all["seconds"]["total"].as_f64().unwrap(), "{seconds}");
    assert_eq!(all["pages"], json!(17), "of 130 positions in pages of 8");
    let cut = json(&["--set", "data.too_long=cut_left"]);
    assert_eq!(cut["lengths"][0][1]["cuts"], json!(true));
    let none = room.alone(&["plan", "--ranks", "1", "--data", "--set", "data.path=absent.jsonl"]);
    none.ended(2, &["endpoint.usage.reward_scoring"]);
}

#[test]
fn a_resumed_run_keeps_the_ranks_that_shared_a_prompt_where_nobody_says_how_many() {
    let room = quick();
    let (side, steps) = ("parallel.cp_size=1", "run.steps=2");
    train(&room, "whole", &[], &[side, steps]).ended(0, &[]);
    train(&room, "run", &[], &[side, "run.steps=1"]).ended(0, &[]);
    let words = "parallel.cp_size: 1 of 2 ranks share a prompt, as in the checkpoint that the run goes on from";
    train(&room, "run", &["--resume"], &["optimizer.grad_accum=2", steps]).ended(0, &[words]);
    let receipt = |run: &str| room.read_json(&format!("{run}/receipt.json"));
    let (run, whole) = (receipt("run"), receipt("whole"));
    assert_eq!((&run["cp_size"], &run["cp_size_because"]), (&json!(1), &json!(words)));
    assert_eq!(run["adapter_digest"], whole["adapter_digest"], "the same sums in the same order");
    assert_eq!(whole.get("cp_size_because"), None);
    // Without a checkpoint all ranks share a prompt on a CPU, whatever an update has.
    train(&room, "new", &[], &["optimizer.grad_accum=2", steps]).ended(0, &[]);
    assert_eq!(receipt("new")["cp_size"], json!(2));
}
