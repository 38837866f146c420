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

/// A record whose prompt is one turn of a conversation.
fn conversation() -> Value {
    let mut record = record(9, [1, 2, 3]);
    record.as_object_mut().unwrap().remove("prompt_ids");
    record["messages"] = json!([{"role": "user", "content": "hi"}]);
    record
}

#[test]
fn tools_that_the_template_would_leave_out_are_refused_and_its_own_template_for_tools_is_read() {
    let draft = draft();
    let room = Room::with(&[("config.toml", &config(draft.path()))]);
    let mut record = conversation();
    record["tools"] = json!([{"name": "add"}]);
    room.write("train.jsonl", lines(&[record]));
    room.alone(&[]).refused(3, &["train.jsonl, line 1, messages: the chat template of ", "it does not read \"tools\""]);
    std::fs::create_dir(draft.path().join("additional_chat_templates")).unwrap();
    let file = draft.path().join("additional_chat_templates/tool_use.jinja");
    std::fs::write(file, format!("{{{{ tools | tojson }}}}{TEMPLATE}")).unwrap();
    room.alone(&["train", "--set", "run.steps=1"]).ended(0, &[]);
}

#[test]
fn a_template_that_writes_the_date_is_announced_since_its_prompts_are_others_tomorrow() {
    let draft = draft();
    let room = Room::with(&[("config.toml", &config(draft.path()))]);
    room.write("train.jsonl", lines(&[conversation()]));
    let start = |run_dir: &str| room.alone(&["train", "--set", "run.steps=1", "--run-dir", run_dir]);
    let words = "the chat template writes today's date";
    assert!(!start("without").ended(0, &[]).err.contains(words));
    let dated = format!("{{{{ strftime_now('%d') }}}}{TEMPLATE}");
    std::fs::write(draft.path().join("chat_template.jinja"), dated).unwrap();
    start("with").ended(0, &[words, "--resume refuses other data"]);
}

#[test]
fn a_byte_order_mark_is_passed_over_in_every_file_that_is_read() {
    let draft = Draft::of("qwen3");
    let index = draft.write_shards(2);
    draft.write_index(&index);
    for (name, text) in [
        ("tokenizer.json", bytes_tokenizer()),
        ("chat_template.jinja", TEMPLATE.to_owned()),
        ("tokenizer_config.json", r#"{"eos_token": "~"}"#.to_owned()),
        ("generation_config.json", r#"{"eos_token_id": 5}"#.to_owned()),
        ("special_tokens_map.json", "{}".to_owned()),
    ] {
        std::fs::write(draft.path().join(name), text).unwrap();
    }
    for entry in std::fs::read_dir(draft.path()).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_some_and(|extension| extension != "safetensors") {
            let marked = [&b"\xef\xbb\xbf"[..], &std::fs::read(&file).unwrap()].concat();
            std::fs::write(&file, marked).unwrap();
        }
    }
    let records = lines(&[json!({"messages": [{"role": "user", "content": "hi"}]})]);
    let room = Room::with(&[("train.jsonl", &format!("\u{feff}{records}")), ("settings.json", "\u{feff}{}")]);
    room.write("config.toml", format!("\u{feff}{}", config(draft.path())));
    let sets = ["rollout.sample=true", "run.steps=1", "grpo.reward_fn=one"];
    let arguments: Vec<&str> = ["train"].into_iter().chain(sets.iter().flat_map(|set| ["--set", *set])).collect();
    room.alone(&arguments).ended(0, &[]);
}

#[test]
fn a_byte_that_is_no_text_is_told_with_file_line_and_offset() {
    let draft = draft();
    let room = Room::with(&[("config.toml", &config(draft.path()))]);
    let mut data = lines(&[record(9, [1, 2, 3])]).into_bytes();
    let offset = data.len() + 9;
    data.extend_from_slice(b"{\"name\":\"\xe9\"}\n");
    room.write("train.jsonl", data);
    let words = format!("line 2, byte 10 of the line (offset {offset} of the file): 0xe9 is no UTF-8");
    room.alone(&[]).refused(3, &["train.jsonl: cannot read it: ", &words]);
    std::fs::write(draft.path().join("chat_template.jinja"), b"\n{# \xff #}").unwrap();
    room.write("train.jsonl", lines(&[json!({"messages": [{"role": "user", "content": "hi"}], "answers": []})]));
    room.alone(&[]).refused(3, &["chat_template.jinja", "line 2, byte 4 of the line (offset 4 of the file)"]);
    room.write("config.toml", b"# caf\xe9\n");
    room.alone(&[]).refused(2, &["config.toml", "line 1, byte 6 of the line"]);
}

#[test]
fn names_and_answers_reach_the_terminal_and_the_log_without_control_characters_and_files_with_them() {
    let draft = draft();
    let room = Room::with(&[("config.toml", &config(draft.path()))]);
    let name = "a\u{1b}]0;title\u{7}\u{9b}2J\u{202e}b\rc";
    let mut bad = record(9, [1, 2, 3]);
    bad["name"] = json!(name);
    bad["reward_data"] = json!({"pattern": "("});
    room.write("train.jsonl", lines(&[bad.clone()]));
    let acts = |text: &str| text.chars().any(|c| (c.is_control() && !"\n\t".contains(c)) || c == '\u{202e}');
    let said = room.alone(&["train", "--set", "grpo.reward_fn=regex"]);
    said.ended(3, &["a\\u001b]0;title\\u0007\\u009b2J\\u202eb\\u000dc"]);
    let log = room.read("run/logs/rank_0.log");
    assert!(!acts(&said.err) && !acts(&log), "{said}\n{log}");
    // A folder's name and a flag are text of others too.
    let said = room.alone(&["train", "--set", "data.path=\u{1b}[2Jx"]);
    assert!(said.code == 3 && said.err.contains("\\u001b[2Jx") && !acts(&said.err), "{said}");
    let said = room.alone(&["train", "--\u{9b}2J\u{202e}x"]);
    assert!(said.code == 2 && said.err.contains("\\u009b2J\\u202ex") && !acts(&said.err), "{said}");
    // JSON on the terminal is escaped as JSON is, and holds the exact text; so do files.
    let said = room.alone(&["plan", "--json", "--ranks", "1", "--set", "data.path=\u{202e}x"]);
    assert!(said.code == 0 && !acts(&said.out), "{said}");
}

#[test]
fn a_full_disk_is_told_with_the_file_that_was_written() {
    let draft = draft();
    let records = lines(&[record(9, [1, 2, 3])]);
    let full = |file: &str, words: &[&str]| {
        let room = Room::with(&[("config.toml", &config(draft.path())), ("train.jsonl", &records)]);
        let place = room.path().join(file);
        std::fs::create_dir_all(place.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink("/dev/full", place).unwrap();
        room.alone(&["train", "--set", "run.steps=1", "--set", "run.trace=true"]).ended(3, words);
    };
    for file in ["metrics.jsonl", "trace/rank_0.json", "config.resolved.toml"] {
        full(&format!("run/{file}"), &[&format!("cannot write run/{file}: No space left on device")]);
    }
    // The partial file's name is of no use to a reader.
    full(
        "run/adapter/.adapter_model.safetensors.partial",
        &["cannot write run/adapter/adapter_model.safetensors: ", "No space left on device"],
    );
    full(
        "run/adapter/.adapter_config.json.partial",
        &["cannot write run/adapter/adapter_config.json: No space left on device"],
    );
}

#[test]
fn a_full_disk_under_a_log_or_the_output_is_said_and_the_run_goes_on() {
    let draft = draft();
    let records = lines(&[record(9, [1, 2, 3])]);
    let room = Room::with(&[("config.toml", &config(draft.path())), ("train.jsonl", &records)]);
    std::fs::create_dir_all(room.path().join("run/logs")).unwrap();
    std::os::unix::fs::symlink("/dev/full", room.path().join("run/logs/rank_0.log")).unwrap();
    let said = room.alone(&["train", "--set", "run.steps=1"]);
    said.ended(0, &["cannot write run/logs/rank_0.log: No space left on device", "the run goes on without this log"]);
    assert_eq!(said.err.matches("No space left").count(), 1, "it is said once: {said}");
    let script = room.script("start", &format!("exec {} plan --ranks 1 > /dev/full", super::room::LONGSTRAW));
    let said = room.run(&super::room::Call { ranks: 0, program: &script, arguments: &[], variables: &[] });
    said.ended(0, &["cannot write standard output: No space left on device"]);
}

/// Records of a data set whose text is long enough for its token ids to be kept in a file.
fn large(prompts: [usize; 3]) -> String {
    let filler = "x".repeat(2 << 20);
    lines(&prompts.map(|prompt| {
        let mut record = record(prompt, [3, 1, 2]);
        record["reward_data"] = json!({"filler": filler});
        record
    }))
}

#[test]
fn a_large_data_set_is_tokenised_once_for_a_machine_and_read_again_by_the_next_start() {
    let draft = draft();
    let room = Room::with(&[("config.toml", &config(draft.path()))]);
    room.write("data/train.jsonl", large([96, 61, 5]));
    room.write("small.jsonl", lines(&[record(96, [3, 1, 2]), record(61, [3, 1, 2]), record(5, [3, 1, 2])]));
    let train = |run_dir: &str, data: &str, further: &[&str]| {
        let data = format!("data.path={data}");
        let first = ["train", "--run-dir", run_dir, "--set", &data, "--set", "checkpoint.every=1"];
        room.ranks(3, &first.into_iter().chain(further.iter().copied()).collect::<Vec<_>>())
    };
    let note = "data.path: the ranks of a machine read the token ids from ";
    train("large", "data/train.jsonl", &[]).ended(0, &[note, "data/.train.jsonl."]);
    assert_eq!(room.files("data").len(), 2, "{:?}", room.files("data"));
    let made = |run_dir: &str, words: &str| {
        (0..3).filter(|rank| room.read(&format!("{run_dir}/logs/rank_{rank}.log")).contains(words)).count()
    };
    assert_eq!((made("large", "were made in "), made("large", "were found in ")), (1, 0));
    // The numbers are those of a data set that every rank holds in memory.
    let said = train("small", "small.jsonl", &[]);
    said.ended(0, &[]);
    assert!(!said.err.contains(note), "{said}");
    let losses = |run_dir: &str| -> Vec<Value> {
        let metrics = room.read(&format!("{run_dir}/metrics.jsonl"));
        metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].clone()).collect()
    };
    assert_eq!(losses("large"), losses("small"));
    // The next start finds the file, also to go on.
    train("large", "data/train.jsonl", &["--resume", "--set", "run.steps=4"]).ended(0, &["going on from"]);
    assert_eq!((made("large", "were made in "), made("large", "were found in ")), (1, 1));
    assert_eq!(losses("large").len(), 4);
}

#[test]
fn a_bad_record_of_a_large_data_set_is_refused_on_all_ranks_and_leaves_no_tokens() {
    let draft = draft();
    let room = Room::with(&[("config.toml", &config(draft.path())), ("train.jsonl", &large([96, 61, 5]))]);
    let text = room.read("train.jsonl");
    let broken = text.replacen("\"ids\":[", "\"ids\":[999,", 1);
    room.write("train.jsonl", broken);
    room.ranks(2, &["train"]).refused(3, &["train.jsonl, line 1, answers[0].ids: token 0 has id 999"]);
    assert!(room.files("").iter().all(|file| !file.contains(".tokens")), "{:?}", room.files(""));
}
