//! Bad input ends with exit 3 and one message with file, tensor or field, and numbers, on 1 and 2 ranks; no file is
//! left.

use std::fs;

use serde_json::{Value, json};

use super::checkpoints::{Draft, Stored, Tensors, shard_name, write};
use super::room::Room;
use super::training::{config, lines, record};

/// `train` on this checkpoint and these records is refused with these words, on 1 and on 2 ranks.
#[track_caller]
fn refused_with(draft: &Draft, records: &str, words: &[&str]) {
    let room = Room::with(&[("config.toml", &config(draft.path())), ("train.jsonl", records)]);
    for ranks in [0, 2] {
        let said = if ranks == 0 { room.alone(&["train"]) } else { room.ranks(ranks, &["train"]) };
        said.refused(3, &[&["rank 0, start: "], words].concat());
        for file in room.files("run") {
            assert!(file.starts_with("logs/rank_") || file == ".lock", "{file} is left");
        }
    }
}

#[track_caller]
fn checkpoint_refused(draft: &Draft, words: &[&str]) {
    refused_with(draft, &lines(&[record(9, [1, 2, 3])]), words);
}

#[test]
fn a_checkpoint_with_wrong_tensors_is_refused_with_all_of_them() {
    let mut draft = Draft::of("qwen3");
    draft.tensors.remove("model.layers.1.self_attn.q_norm.weight").unwrap();
    draft.tensors.insert("model.layers.0.extra.weight".to_owned(), Stored::float(&[2, 3], &[0.0; 6]));
    let shape = &mut draft.tensor("model.layers.3.mlp.up_proj.weight").shape;
    shape.swap(0, 1);
    draft.write();
    checkpoint_refused(
        &draft,
        &[
            "model.layers.1.self_attn.q_norm.weight [16] is missing",
            "model.safetensors: model.layers.0.extra.weight [2, 3] is not part of this model",
            "model.safetensors: model.layers.3.mlp.up_proj.weight is [64, 128], the config asks for [128, 64]",
        ],
    );
}

#[test]
fn an_index_that_names_absent_shards_is_refused() {
    let draft = Draft::of("qwen3");
    draft.write_shards(3);
    fs::remove_file(draft.path().join(shard_name(1, 3))).unwrap();
    checkpoint_refused(
        &draft,
        &["model-00002-of-00003.safetensors is not there, but the index places", "tensors in it"],
    );
}

#[test]
fn two_shards_with_the_same_tensor_are_refused() {
    let draft = Draft::of("qwen3");
    draft.write_shards(2);
    let mut shards = [Tensors::new(), Tensors::new()];
    for (index, (name, stored)) in draft.tensors.iter().enumerate() {
        shards[index % 2].insert(name.clone(), stored.clone());
    }
    shards[1].insert("model.norm.weight".to_owned(), draft.tensors["model.norm.weight"].clone());
    shards[0].insert("model.norm.weight".to_owned(), draft.tensors["model.norm.weight"].clone());
    for (index, shard) in shards.iter().enumerate() {
        write(&draft.path().join(shard_name(index, 2)), shard);
    }
    checkpoint_refused(
        &draft,
        &["model.norm.weight stands both in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors"],
    );
}

#[test]
fn a_truncated_shard_is_refused_with_its_length() {
    let draft = Draft::of("qwen3");
    draft.write();
    let file = draft.path().join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    let [wanted, found] = [bytes.len(), bytes.len() / 2].map(|length| length.to_string());
    checkpoint_refused(&draft, &["model.safetensors: the header describes ", &wanted, &found, "fetch it again"]);
}

#[test]
fn an_unsupported_family_is_refused_with_the_supported_ones() {
    let mut draft = Draft::of("qwen3");
    draft.config.insert("model_type".to_owned(), json!("qwen9"));
    draft.write();
    checkpoint_refused(
        &draft,
        &["config.json: `model_type` is \"qwen9\", which longstraw does not compute", "qwen3, qwen2, llama, mistral"],
    );
}

#[test]
fn an_unsupported_rope_type_is_refused() {
    let mut draft = Draft::of("qwen3");
    draft.config.insert("rope_parameters".to_owned(), json!({"rope_type": "spiral", "rope_theta": 10000.0}));
    draft.write();
    checkpoint_refused(&draft, &["config.json: ", "rope_type` is \"spiral\", which longstraw does not compute"]);
}

#[test]
fn weights_that_are_not_finite_are_refused_with_the_first_index() {
    let mut draft = Draft::of("qwen3");
    draft.tensor("model.layers.2.self_attn.k_proj.weight").set(2 * 64 + 5, f32::NAN);
    draft.tensor("model.layers.2.self_attn.k_proj.weight").set(3 * 64, f32::INFINITY);
    draft.write();
    checkpoint_refused(
        &draft,
        &[
            "model.safetensors: model.layers.2.self_attn.k_proj.weight has 1 NaN and 1 infinite of 2048 values",
            "[2, 5]",
        ],
    );
}

#[test]
fn weights_that_are_all_zero_are_refused_unless_a_key_allows_them() {
    let mut draft = Draft::of("qwen3");
    draft.tensor("model.layers.1.mlp.gate_proj.weight").bytes.fill(0);
    draft.write();
    checkpoint_refused(
        &draft,
        &[
            "model.safetensors: model.layers.1.mlp.gate_proj.weight [128, 64] is all zero",
            "model.allow_zero_weights = true",
        ],
    );
    let records = lines(&[record(9, [1, 2, 3])]);
    let room = Room::with(&[("config.toml", &config(draft.path())), ("train.jsonl", &records)]);
    room.alone(&["train", "--set", "model.allow_zero_weights=true", "--set", "run.steps=1"]).ended(0, &[]);
}

#[test]
fn a_folder_that_leaves_open_what_the_model_is_is_refused() {
    let draft = Draft::of("qwen3");
    draft.write_shards(2);
    draft.write();
    checkpoint_refused(&draft, &["both model.safetensors and the shards of model.safetensors.index.json hold weights"]);
    let mut draft = Draft::of("qwen3");
    draft.config.insert("num_hidden_layers".to_owned(), json!(3));
    draft.config.remove("layer_types");
    draft.write();
    checkpoint_refused(&draft, &["model.safetensors: holds 4 layers and the config asks for 3"]);
    let mut draft = Draft::of("llama");
    draft.tensors.remove("lm_head.weight").unwrap();
    draft.write();
    checkpoint_refused(&draft, &["lm_head.weight [", "is missing", "set `tie_word_embeddings` to true"]);
}

#[test]
fn what_a_model_folder_holds_and_a_run_does_not_read_is_said_on_the_screen() {
    let mut draft = Draft::of("qwen3");
    draft.tensors.insert("model.visual.patch.weight".to_owned(), Stored::float(&[2], &[1.0, 2.0]));
    draft.write();
    write(&draft.path().join("model-00001-of-00002.safetensors"), &Tensors::new());
    let records = lines(&[record(9, [1, 2, 3])]);
    let room = Room::with(&[("config.toml", &config(draft.path())), ("train.jsonl", &records)]);
    room.ranks(2, &["train", "--set", "run.steps=1"]).ended(
        0,
        &[
            "tensors of the checkpoint that are not read: model.visual.* (1)",
            "files of weights in the model's folder that are not read: 1, the first is model-00001-of-00002.safetensors",
        ],
    );
}

#[test]
fn a_run_does_not_go_on_with_weights_that_differ_in_the_middle_of_a_tensor() {
    let mut draft = Draft::of("qwen3");
    draft.write();
    let records = lines(&[record(9, [1, 2, 3])]);
    let room = Room::with(&[("config.toml", &config(draft.path())), ("train.jsonl", &records)]);
    let train = |further: &[&str]| {
        let first = ["train", "--set", "checkpoint.every=1"];
        room.alone(&first.iter().chain(further).copied().collect::<Vec<_>>())
    };
    train(&["--set", "run.steps=1"]).ended(0, &[]);
    let name = "model.layers.1.mlp.down_proj.weight";
    let middle = draft.tensors[name].bytes.len() / 8;
    draft.tensor(name).set(middle, 0.75);
    draft.write();
    train(&["--resume", "--set", "run.steps=2"]).refused(2, &["is of another run", "the model"]);
}

#[test]
fn records_outside_the_plan_are_refused_with_line_and_field() {
    let draft = Draft::of("qwen3");
    draft.write();
    let good = record(9, [1, 2, 3]);
    let with = |change: &dyn Fn(&mut Value)| {
        let mut bad = good.clone();
        change(&mut bad);
        lines(&[good.clone(), bad])
    };
    for (records, words) in [
        (
            lines(&[good.clone(), record(97, [1, 2, 3])]),
            "line 2, prompt_ids: 97 tokens, the plan's context.prompt_len is 96",
        ),
        (with(&|bad| bad["answers"][1]["ids"] = json!([])), "line 2, answers[1].ids: is empty"),
        (
            with(&|bad| bad["answers"][2]["ids"][1] = json!(256)),
            "line 2, answers[2].ids: token 1 has id 256, outside the vocabulary of 256",
        ),
    ] {
        refused_with(&draft, &records, &["train.jsonl, ", words]);
    }
}

#[test]
fn records_that_cannot_be_read_are_refused() {
    let draft = Draft::of("qwen3");
    draft.write();
    let room = Room::with(&[("config.toml", &config(draft.path()))]);
    room.alone(&[]).refused(3, &["train.jsonl: cannot open it: No such file"]);
    room.write("train.jsonl", "\n");
    room.alone(&[]).refused(3, &["train.jsonl: holds no record"]);
    room.write("train.jsonl", "{\"prompt\": \"text\", \"answers\": []}");
    room.alone(&[]).refused(3, &["train.jsonl, line 1, prompt: is text, but no tokenizer"]);
    room.write("train.jsonl", lines(&[record(9, [1, 25, 3])]));
    room.alone(&[]).refused(3, &["line 1, answers[1].ids: 25 tokens, the plan's context.answer_len is 24"]);
}

#[test]
fn a_missing_model_folder_is_named() {
    let room = Room::with(&[("config.toml", &config("absent".as_ref()))]);
    room.alone(&[]).refused(3, &["absent: No such file", "give the folder of a checkpoint, or its config.json"]);
    room.write("absent/config.json", fs::read(Draft::of("qwen3").path().join("config.json")).unwrap_or_default());
    room.alone(&[]).refused(3, &["absent/config.json: not a JSON object"]);
    let draft = Draft::of("qwen3");
    draft.write_config();
    fs::copy(draft.path().join("config.json"), room.path().join("absent/config.json")).unwrap();
    room.write("train.jsonl", lines(&[record(9, [1, 2, 3])]));
    room.alone(&[]).refused(3, &["absent: there is neither model.safetensors nor model.safetensors.index.json"]);
    room.ranks(2, &["--set", "lora.targets=q_prj"])
        .refused(2, &["\"q_prj\" is no linear layer", "nearest is \"q_proj\""]);
}

#[test]
fn an_earlier_run_is_unchanged_if_the_next_is_refused() {
    let draft = Draft::of("qwen3");
    draft.write();
    let room = Room::with(&[("config.toml", &config(draft.path())), ("train.jsonl", "{}")]);
    room.write("run/metrics.jsonl", "earlier\n");
    room.write("run/receipt.json", "earlier\n");
    room.alone(&[]).refused(3, &["train.jsonl, line 1"]);
    assert_eq!(
        (room.read("run/metrics.jsonl").as_str(), room.read("run/receipt.json").as_str()),
        ("earlier\n", "earlier\n")
    );
}
