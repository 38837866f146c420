//! `parity`: what it says of a case, and of a case that is none.

use std::fs;
use std::path::Path;

use super::checkpoints::{case, read, write};
use super::room::Room;

/// A room with a copy of the qwen3 case in `case/`.
fn room() -> Room {
    let room = Room::new();
    fs::create_dir(room.path().join("case")).unwrap();
    for entry in fs::read_dir(case("qwen3")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), room.path().join("case").join(entry.file_name())).unwrap();
    }
    room
}

/// Changes the last value of a tensor of expected.safetensors, or takes the tensor out.
fn damage(room: &Room, tensor: &str, take_out: bool) {
    let file: &Path = &room.path().join("case/expected.safetensors");
    let mut tensors = read(file);
    if take_out {
        tensors.remove(tensor).unwrap();
    } else {
        let bytes = &mut tensors.get_mut(tensor).unwrap().bytes;
        let end = bytes.len();
        bytes[end - 8..].copy_from_slice(&1.5_f64.to_le_bytes());
    }
    write(file, &tensors);
}

#[test]
fn a_good_case_passes_on_one_and_on_three_ranks_in_words_and_in_json() {
    let room = room();
    let said = room.alone(&["parity", "case"]);
    said.ended(0, &[]);
    assert!(said.out.starts_with("case: passed, gradient response, float64, 1 ranks"), "{said}");
    assert!(said.out.contains("ratio exactly 1"), "{said}");
    let report = room.ranks(3, &["parity", "case", "--gradient", "last=0", "--page-size", "3", "--json"]).json();
    assert_eq!((report["ranks"].as_u64(), report["passed"].as_bool()), (Some(3), Some(true)));
    assert!(report["worst"].as_f64().unwrap() < 1e-9);
}

#[test]
fn a_damaged_expectation_ends_with_exit_8_and_its_tensor_comes_first() {
    let room = room();
    damage(&room, "grad.resp.grpo.lora.model.layers.2.self_attn.v_proj.lora_B", false);
    let said = room.alone(&["parity", "case"]);
    said.ended(8, &[]);
    let first = "grad.grpo.model.layers.2.self_attn.v_proj.lora_B";
    assert!(said.out.contains("FAILED") && said.out.lines().nth(1).unwrap().ends_with(first), "{said}");
    let said = room.ranks(2, &["parity", "case", "--json"]);
    let report = said.ended(8, &[]).json();
    assert_eq!(report["worst_tensor"], first);
    assert_eq!(report["errors"].as_object().unwrap().keys().next().unwrap(), first);
}

#[test]
fn a_tail_longer_than_the_prompt_is_refused_once() {
    let said = room().ranks(2, &["parity", "case", "--gradient", "last=97"]);
    said.refused(2, &["last=97 is more than the case's prompt of 96 positions"]);
}

#[test]
fn a_folder_that_is_no_case_is_refused_once() {
    let room = room();
    room.ranks(2, &["parity", "."]).refused(3, &["./case.json: No such file"]);
    damage(&room, "old_logprobs.1", true);
    room.ranks(2, &["parity", "case"]).refused(3, &["case/expected.safetensors: no tensor old_logprobs.1"]);
    room.write("case/expected.safetensors", "no safetensors");
    room.alone(&["parity", "case"]).refused(3, &["case/expected.safetensors"]);
    room.write("case/case.json", "{}");
    room.alone(&["parity", "case"]).refused(3, &["case/case.json: missing field"]);
}
