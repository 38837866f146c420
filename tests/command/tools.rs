//! Runs whose answers call a tool: a tokenizer of sixteen letters, of which `c` begins a call and `d` ends it.

use serde_json::{Map, Value, json};

use super::resume::{complete, train};
use super::room::Room;
use super::training::lines;

const LETTERS: &str = "abcdefghijklmnop";
/// Answers every call alike.
const ANSWERS: &str = "while read -r line; do echo '{\"reply\": \"mm\"}'; done";

/// A model of random weights that draws letters, and a tool.
fn room(tool: &str) -> Room {
    let shape = json!({
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 16, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true, "eos_token_id": 15
    });
    let vocab: Map<String, Value> =
        LETTERS.chars().enumerate().map(|(id, letter)| (letter.to_string(), id.into())).collect();
    let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": []
        }
    });
    let config = "[context]\nprompt_len = 40\nanswer_len = 40\npage_size = 8\n[optimizer]\nlr = 1e-3\n\
                  [grpo]\ngroup_size = 6\nreward_fn = \"synthetic\"\ngradient = \"response\"\n[rollout]\nsample = true\n\
                  [tools]\ncommand = [\"/bin/sh\", \"tool.sh\"]\ncall_start = \"c\"\ncall_end = \"d\"\n\
                  reply_start = \"a\"\nreply_end = \"b\"\nturns = 2\n[lora]\nrank = 4\nalpha = 8.0\n\
                  [model]\npath = \"shape\"\ndtype = \"float64\"\nrandom_init = true\n\
                  [data]\npath = \"train.jsonl\"\nheld_out = \"held_out.jsonl\"\n[run]\ndir = \"run\"\nsteps = 4\n";
    let record = |length: usize| {
        let ids: Vec<usize> = (0..length).map(|at| (length + 5 * at + at * at) % 15).collect();
        json!({ "name": format!("of {length}"), "prompt_ids": ids })
    };
    Room::with(&[
        ("shape/config.json", &shape.to_string()),
        ("shape/tokenizer.json", &tokenizer.to_string()),
        ("config.toml", config),
        ("train.jsonl", &lines(&[record(40), record(33), record(5)])),
        ("held_out.jsonl", &lines(&[record(21)])),
        ("tool.sh", tool),
    ])
}

/// The answers of a run: which, its text, its calls and its mask.
fn answers(room: &Room, run: &str) -> Vec<[Value; 5]> {
    let text = room.read(&format!("{run}/answers.jsonl"));
    let of = |line| {
        let line: Value = serde_json::from_str(line).unwrap();
        ["prompt", "answer", "text", "calls", "mask"].map(|key| line[key].clone())
    };
    text.lines().map(of).collect()
}

/// The first update's line of metrics.jsonl.
fn first_update(room: &Room, run: &str) -> Value {
    let metrics = room.read(&format!("{run}/metrics.jsonl"));
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.into_iter().find(|line| line["step"] == json!(1)).unwrap()
}

#[test]
fn answers_with_calls_are_the_same_on_any_ranks_and_show_their_replies() {
    let room = room(ANSWERS);
    let mut all = Vec::new();
    for ranks in [1, 2, 3] {
        let run = format!("run{ranks}");
        room.ranks(ranks, &["train", "--run-dir", &run, "--set", "run.steps=2"])
            .ended(0, &["answers what stands between \"c\" and \"d\"; a reply stands between \"a\" and \"b\""]);
        all.push(answers(&room, &run));
    }
    assert!(all[0] == all[1] && all[0] == all[2], "answers do not depend on the number of ranks");
    let called: Vec<&[Value; 5]> = all[0].iter().filter(|answer| !answer[3].is_null()).collect();
    assert!(called.len() > 2, "{} answers with calls show little", called.len());
    for [_, _, text, calls, mask] in &called {
        let (text, tokens) = (text.as_str().unwrap(), calls["tokens"].as_u64().unwrap());
        let given = mask.as_array().map_or(0, |mask| mask.iter().filter(|drawn| **drawn == json!(false)).count());
        assert_eq!((u64::try_from(given).unwrap(), tokens % 4), (tokens, 0), "each reply is four tokens");
        assert!(text.matches("dammb").count() >= usize::try_from(tokens / 4).unwrap(), "{text}");
    }
    let step = first_update(&room, "run2");
    let tools = &step["tools"];
    assert!(tools["calls"].as_u64().unwrap() > 0 && tools["seconds"].as_f64().unwrap() > 0.0, "{step}");
    assert_eq!((&tools["answers"], &tools["failed"], &tools["cut"]), (&json!(6), &json!(0), &json!(0)));
    assert!(room.read_json("run2/receipt.json")["tools"]["calls"].as_u64() >= tools["calls"].as_u64());
    assert!(
        step["sampled_gap"].as_f64().unwrap() < 1e-10,
        "replies are read as they were when they were drawn: {step}"
    );
}

#[test]
fn a_run_with_tools_goes_on_from_a_checkpoint_and_its_tools_may_not_change() {
    let room = room(ANSWERS);
    let rounds = ["grpo.updates_per_group=2", "run.steps=4"];
    train(&room, "whole", &[], &rounds).ended(0, &[]);
    train(&room, "run", &[], &["grpo.updates_per_group=2", "run.steps=1"]).ended(0, &[]);
    let other = [&rounds[..], &["tools.turns=3"]].concat();
    train(&room, "run", &["--resume"], &other).refused(2, &["tools.turns was 2 and is 3"]);
    train(&room, "run", &["--resume"], &[&rounds[..], &["tools.reply_sec=9"]].concat()).ended(0, &[]);
    assert_eq!(complete(&room, "run", 4), complete(&room, "whole", 4), "in the middle of a round, with its masks");
}

#[test]
fn calls_that_fail_are_told_and_a_share_above_the_limit_ends_the_run() {
    let room = room("echo 'no licence' >&2; exit 4");
    // Fewer than four failed calls end nothing.
    let said = train(&room, "run", &[], &["run.steps=1", "grpo.group_size=24", "eval.samples=0", "eval.greedy=false"]);
    let words = "got no reply, more than tools.failed_share_max = 0.25 allows; the last: the program failed (exit status: 4); \
                 it said: no licence";
    said.ended(3, &[words]);
    let said = train(&room, "allowed", &[], &["run.steps=1", "tools.failed_share_max=1.0", "tools.turns=1"]);
    said.ended(0, &["calls in the answers of update 1 got no reply; the last: the program failed"]);
    let tools = &first_update(&room, "allowed")["tools"];
    assert!(tools["failed"] == tools["calls"] && tools["calls"].as_u64() > Some(0), "{tools}");
}

/// An evaluation took the failures of a tool for answers of the policy.
#[test]
fn an_evaluation_whose_calls_fail_ends_with_the_name_of_its_set_and_its_prompts_are_drawn_again() {
    let room = room("if [ -e works ]; then while read -r line; do echo '\"mm\"'; done; else exit 4; fi");
    let config = room.read("config.toml").replace("turns = 2", "turns = 2\nfailed_share_max = 0.0");
    room.write("config.toml", config);
    let eval = || room.ranks(2, &["eval", "--base", "--out", "out", "--set", "eval.samples=12"]);
    let words = ["calls in held-out answers of held_out got no reply, more than tools.failed_share_max = 0 allows"];
    eval().ended(3, &words);
    room.write("works", "");
    let said = eval();
    said.ended(0, &[]);
    assert!(!said.err.contains("are finished already"), "{said}");
    let again = eval();
    again.ended(0, &["held_out: 1 of 1 prompts are finished already"]);
    let other = ["--set", "eval.samples=12", "--set", "tools.turns=3"];
    room.ranks(2, &[&["eval", "--base", "--out", "out"][..], &other].concat())
        .refused(2, &["out holds another evaluation: tools.turns was 2 and is 3"]);
    std::fs::remove_file(room.path().join("works")).unwrap();
    let sets = ["eval.samples=12", "eval.every=1", "run.steps=1"];
    train(&room, "run", &[], &sets).ended(3, &words);
}

/// The prompts that are drawn again were judged by themselves, so that a finished evaluation failed and lost its numbers.
#[test]
fn a_finished_evaluation_that_is_asked_for_again_is_judged_with_all_its_prompts() {
    let reads = "all=$(cat); case \"$all\" in *'\"one\"'*) exit 4;; esac";
    let room = room(&format!("{reads}; echo \"$all\" | {ANSWERS}"));
    let prompt = |name: &str, first: usize| json!({ "name": name, "prompt_ids": [first, 2, 9] });
    let others = ["a", "b", "c", "d"].into_iter().zip(3..).map(|(name, first)| prompt(name, first));
    room.write("held_out.jsonl", lines(&[prompt("one", 1)].into_iter().chain(others).collect::<Vec<_>>()));
    let sets = ["--set", "eval.samples=24", "--set", "tools.failed_share_max=0.6"];
    let eval = || room.alone(&[&["eval", "--base", "--out", "out"][..], &sets].concat());
    eval().ended(0, &["calls in held-out answers of held_out got no reply"]);
    let numbers = room.read_json("out/evaluation.json")["sets"].clone();
    eval().ended(0, &["held_out: 4 of 5 prompts are finished already", "got no reply"]);
    assert_eq!(room.read_json("out/evaluation.json")["sets"], numbers);
}

#[test]
fn records_with_marks_are_told_where_nothing_answers_calls() {
    let room = room(ANSWERS);
    let record = json!({ "name": "own", "prompt_ids": [1, 2], "tool_marks": { "reply_start": "n".repeat(38) } });
    room.write("train.jsonl", lines(&[record]));
    train(&room, "run", &[], &["run.steps=1"])
        .refused(3, &["data.path, record own: what stands around a tool's reply"]);
    let config = room.read("config.toml").replace("command = ", "# ");
    room.write("config.toml", config.replace("reply_start", "# ").replace("reply_end", "# "));
    let words = ["data.path: 1 of 1 records have \"tool_marks\", and nothing answers calls"];
    train(&room, "run", &[], &["run.steps=1", "data.held_out=train.jsonl"]).ended(0, &words);
}

#[test]
fn tools_that_cannot_work_are_refused_with_what_to_do() {
    let room = room(ANSWERS);
    train(&room, "run", &[], &["rollout.sample=false"]).refused(2, &["tools.command should be left out"]);
    train(&room, "run", &[], &["tools.command=[]"]).refused(2, &["tools.command should be a program"]);
    train(&room, "run", &[], &["tools.turns=0"]).refused(2, &["tools.turns should be"]);
    train(&room, "run", &[], &["tools.call_end=\"\""])
        .refused(2, &["tools.call_end should be a text that is not empty"]);
    train(&room, "run", &[], &["tools.command=[\"./none\"]"]).refused(2, &["cannot start ./none: No such file"]);
    std::fs::remove_file(room.path().join("shape/tokenizer.json")).unwrap();
    train(&room, "run", &[], &[]).refused(3, &["there is no tokenizer.json", "tools.command"]);
}
