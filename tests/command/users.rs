//! The users' own two files, and plans.

use serde_json::{Value, json};

use super::room::{Room, Said};

const CONFIG: &str = include_str!("../../configs/config.toml");
const SETTINGS: &str = include_str!("../../configs/settings.json");

/// A room with the users' files, and a config.json of an 8B shape without weights.
fn room() -> Room {
    let shape = json!({
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "hidden_act": "silu",
        "tie_word_embeddings": false
    });
    let room = Room::with(&[("config.toml", CONFIG), ("settings.json", SETTINGS)]);
    room.write("shape/config.json", shape.to_string());
    room
}

/// Nothing but what was there before.
#[track_caller]
fn nothing_new(room: &Room) {
    assert_eq!(room.files(""), ["config.toml", "settings.json", "shape/config.json"]);
}

#[test]
fn eight_ranks_without_a_model_are_told_once_how_to_name_one() {
    let room = room();
    let said = room.ranks(8, &[]);
    said.refused(2, &["model.path is not set", "--set model.path=FOLDER", "path under [model] in config.toml"]);
    nothing_new(&room);
}

#[test]
fn eight_ranks_whose_memory_is_not_there_are_refused_before_weights_are_looked_for() {
    let room = room();
    let said = room.ranks(8, &["--set", "model.path=shape"]);
    said.refused(5, &["8 ranks on this machine need", "of host memory", "tail's block inputs, 21.91 GiB a rank"]);
    said.ended(5, &["11 of 36 layers", "or grpo.gradient = \"response\"", "pages, 35.85 GiB a rank", "use more ranks"]);
    assert!(!said.err.contains("safetensors"), "{said}");
    nothing_new(&room);
}

#[test]
fn without_any_file_the_laptop_run_says_where_its_model_should_be() {
    let room = Room::new();
    let said = room.ranks(2, &[]);
    said.refused(2, &["there is no ./config.toml", "models/smollm2-135m-instruct", "--config FILE"]);
    assert!(room.files("").is_empty());
}

#[test]
fn a_world_that_is_no_multiple_of_cp_size_is_refused_once() {
    let said = room().ranks(3, &["--set", "model.path=shape"]);
    said.refused(2, &["parallel.cp_size should be 3: the job has 3 ranks, no multiple of 8; or start 8 ranks"]);
}

#[test]
fn a_plan_without_a_model_shows_the_layout_and_how_to_name_one() {
    let room = room();
    let said = room.alone(&["plan"]);
    said.ended(0, &[]);
    for words in [
        "8 ranks, 8 share a prompt",
        "prompt 2088960 + answer 8192 = 2097152 positions, pages of 64",
        "32640 pages, 4080 pages a rank",
        "memory unknown",
        "--model FOLDER or --set model.path=FOLDER",
    ] {
        assert!(said.out.contains(words), "{words}: {said}");
    }
    nothing_new(&room);
}

#[test]
fn a_plan_with_a_model_is_a_sum_with_a_reason_for_each_addend() {
    let said = room().alone(&["plan", "--model", "shape/config.json"]);
    said.ended(0, &["2097152 positions: the checkpoint's native context ends at 40960"]);
    for words in ["8190735360 parameters × 2 B", "device memory of a rank: ", "host memory of all 8 ranks: 865.12 GiB"]
    {
        assert!(said.out.contains(words), "{words}: {said}");
    }
}

fn addend<'a>(plan: &'a Value, name: &str) -> &'a Value {
    plan["addends"].as_array().unwrap().iter().find(|addend| addend["name"] == name).unwrap()
}

#[test]
fn a_plan_in_json_is_one_object_and_nothing_else_on_standard_output() {
    let room = room();
    let plan = room.alone(&["plan", "--json"]).json();
    assert_eq!((&plan["pages"], &plan["pages_per_rank"], &plan["addends"]), (&json!(32640), &json!(4080), &json!([])));
    let said = room.alone(&["plan", "--model", "shape", "--json"]);
    let plan = said.ended(0, &["native context"]).json();
    // Positions × (key and value) × heads × head width × bytes × layers.
    assert_eq!(addend(&plan, "pages")["bytes"], json!(261_120_u64 * 2 * 8 * 128 * 2 * 36));
    assert_eq!(addend(&plan, "tail's block inputs")["bytes"], json!(261_120_u64 * 4096 * 36 * 2));
    assert_eq!(addend(&plan, "weights")["place"], "device");
}

#[test]
fn a_plan_that_does_not_fit_is_refused_with_the_knobs_that_bring_it_in() {
    let room = room();
    let plan = |flag: &[&str]| -> Said { room.alone(&[&["plan", "--model", "shape"], flag].concat()) };
    let said = plan(&["--host-gib", "64"]);
    said.refused(5, &["8 ranks on this machine need 466.68 GiB of host memory and 64.00 GiB are there"]);
    said.ended(5, &["or grpo.gradient = \"response\"", "a shorter context.prompt_len"]);
    let said = plan(&["--device-gib", "16", "--json"]);
    said.refused(
        5,
        &["one rank needs 44.28 GiB of device memory and 16.00 GiB are there", "weights, 15.25 GiB a rank"],
    );
    said.json();
    plan(&["--host-gib", "900", "--device-gib", "80"]).ended(0, &[]);
}

/// Less room keeps fewer layers' inputs, more room keeps attention outputs too; each says what it costs.
#[test]
fn a_plan_chooses_what_is_kept_by_the_room_there_is_and_prints_the_price() {
    let room = room();
    let with = |host: &str, flags: &[&str]| {
        let flags = [&["plan", "--model", "shape", "--host-gib", host, "--device-gib", "80"], flags].concat();
        room.alone(&flags)
    };
    let chosen = |host: &str, words: &str| {
        let said = with(host, &[]);
        assert!(said.ended(0, &[]).out.contains(words), "{host} GiB, {words}: {said}");
    };
    chosen("600", "tail inputs of one layer in 2 (costs 1/2 of a prompt forward) in host memory");
    // 594.18 GiB for one layer in 2; with 23.91 GiB of messages in host memory they are too many.
    let through_host = with("600", &["--set", "run.direct=false"]);
    let words = "tail inputs of one layer in 3 (costs 2/3 of a prompt forward) in host memory";
    assert!(through_host.ended(0, &[]).out.contains(words), "{through_host}");
    chosen("470", "tail inputs of one layer in 6 (costs 5/6 of a prompt forward) in host memory");
    chosen(
        "900",
        "every layer's tail inputs in host memory, attention outputs computed again (costs one attention pass",
    );
    chosen("1700", "every layer's tail inputs in host memory, attention outputs kept");
    let fixed = ["plan", "--model", "shape", "--set", "memory.inputs_every=4"];
    assert!(room.alone(&fixed).out.contains("tail inputs of one layer in 4"));
}

#[test]
fn a_plan_for_other_ranks_than_cp_size_is_refused() {
    room().alone(&["plan", "--ranks", "12"]).refused(2, &["parallel.cp_size should be 6", "or start 16 ranks"]);
}
