//! Data sets: `data keychain` writes them, and runs read them.

use serde_json::{Value, json};

use super::checkpoints::Draft;
use super::room::{Room, Said};
use super::test_tokenizer;
use super::training::{config, lines, record};

/// A tokenizer of bytes, each a token of its own.
fn bytes_tokenizer() -> String {
    std::fs::read_to_string(test_tokenizer::folder().path().join("tokenizer.json")).unwrap()
}

const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\
                        <{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}\
                        {% if add_generation_prompt %}<assistant>{% endif %}";

/// A folder of tokenizer and template, and enough text.
fn keychain_room() -> Room {
    let room = Room::with(&[
        ("model/tokenizer.json", &bytes_tokenizer()),
        ("model/chat_template.jinja", TEMPLATE),
        ("model/tokenizer_config.json", r#"{"eos_token": "~"}"#),
    ]);
    for file in 0..8 {
        let line =
            |line: usize| format!("Line {line} of file {file} says that the sea is wide and number {}\n", file * line);
        let text: String = (0..40).map(|at| line(at) + if at % 4 == 3 { "\n" } else { "" }).collect();
        room.write(&format!("text/{file}.txt"), text);
    }
    room
}

const KEYCHAIN: &str = "data keychain --model model --text text --out made --train 3 --held-out 2 --prompt-tokens 3001 \
                        --keys 5";

fn keychain(room: &Room, further: &[&str]) -> Said {
    room.alone(&KEYCHAIN.split(' ').chain(further.iter().copied()).collect::<Vec<_>>())
}

#[test]
fn a_keychain_has_prompts_of_the_exact_length_with_their_question() {
    let room = keychain_room();
    let said = keychain(&room, &["--hops", "2", "--depth", "10..90", "--short", "--answers", "3"]);
    said.ended(0, &["made: 5 prompts of 3001 tokens from 8 text files"]);
    let records: Vec<Value> =
        room.read("made/train.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let depths: Vec<f64> =
        records.iter().map(|record| record["reward_data"]["depth_percent"].as_f64().unwrap()).collect();
    assert_eq!(depths, [10.0, 50.0, 90.0]);
    for record in records {
        let prompt = record["prompt"].as_str().unwrap();
        assert_eq!(prompt.len(), 3_001);
        assert!(prompt.starts_with("<user>Read this text.") && prompt.ends_with("~<assistant>"), "{prompt}");
        assert_eq!(record["reward_data"]["hops"], 2);
        assert!(prompt.contains(record["reward_data"]["question"].as_str().unwrap()));
        let code = record["reward_data"]["expected"].as_str().unwrap();
        let answers = record["answers"].as_array().unwrap();
        let right = json!({"text": format!("{code}~"), "reward": 1.0});
        assert_eq!((answers.len(), answers.iter().filter(|answer| **answer == right).count()), (3, 1));
    }
    keychain(&room, &["--answers", "0"]).ended(0, &[]);
    assert!(!room.read("made/held_out.jsonl").contains("answers"));
}

#[test]
fn options_of_a_keychain_that_cannot_be_met_are_refused() {
    let room = keychain_room();
    for depth in ["10", "90..10", "0..101", "-1..5", "a..b"] {
        let said = keychain(&room, &[&format!("--depth={depth}")]);
        said.ended(2, &["should be FROM..TO, whole percents from 0 to 100"]);
    }
    keychain(&room, &["--hops", "3"]).refused(2, &["keys is 5, it must be from 6", "2 more hops"]);
    keychain(&room, &["--answers", "1"]).refused(2, &["answers is 1, it must be 0, or at least 2"]);
    assert!(room.files("").iter().all(|file| !file.starts_with("made/")));
}

/// The tiny checkpoint with a tokenizer and a template.
fn draft() -> Draft {
    let draft = Draft::of("qwen3");
    draft.write();
    std::fs::write(draft.path().join("tokenizer.json"), bytes_tokenizer()).unwrap();
    std::fs::write(draft.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    draft
}

#[test]
fn conversations_are_trained_on_and_cut_prompts_are_counted() {
    let draft = draft();
    let room = Room::with(&[("config.toml", &config(draft.path()))]);
    let turn = |words: &str| json!([{"role": "user", "content": words}]);
    let answers = json!([
        {"text": "yes", "reward": 1},
        {"parts": [{"text": "a"}, {"text": "tool", "train": false}, {"ids": [98]}], "reward": 0},
        {"ids": [1, 2, 3], "mask": [0, 1, 1], "reward": 0},
    ]);
    let data = [turn("short"), turn(&"long ".repeat(30)), turn(&"longer ".repeat(30))]
        .map(|messages| json!({"messages": messages, "answers": answers, "reward_data": {"expected": "yes"}}));
    room.write("train.jsonl", lines(&data));
    // The template adds 17 characters to a turn.
    room.alone(&[]).refused(3, &["line 2, messages: 167 tokens, the plan's context.prompt_len is 96", "data.too_long"]);
    room.alone(&["train", "--set", "data.too_long=cut_middle"]).ended(
        0,
        &["data.path: 2 of 3 prompts are longer than context.prompt_len and were cut as data.too_long says: 202 tokens \
           left out, at most 131 of one prompt"],
    );
    assert_eq!(room.read_json("run/receipt.json")["prompt_len"], 96);
}

#[test]
fn template_refusals_and_missing_answers_name_file_and_line() {
    let draft = draft();
    let room = Room::with(&[("config.toml", &config(draft.path()))]);
    let tool = json!({"messages": [{"role": "tool", "content": "4"}], "answers": []});
    room.write("train.jsonl", lines(&[record(9, [1, 2, 3]), tool]));
    room.alone(&[])
        .refused(3, &["train.jsonl, line 2, messages: the chat template of ", "says: line 1: no tools here"]);
    room.write("train.jsonl", lines(&[json!({"prompt_ids": [1, 2]})]));
    room.alone(&[]).refused(3, &["train.jsonl, line 1, answers: none is given", "set rollout.sample = true"]);
}
