//! Command lines that are refused with the nearest right one, and help.

use super::room::Room;

#[test]
fn a_word_that_is_no_verb_or_flag_ends_with_exit_2_and_the_nearest_one() {
    let room = Room::new();
    room.alone(&["trian"]).ended(2, &["unrecognized subcommand 'trian'", "'train'"]);
    room.alone(&["train", "--jsno"]).ended(2, &["unexpected argument '--jsno'", "'--json'"]);
    room.alone(&["plan", "--ranks", "many"]).ended(2, &["invalid value 'many' for '--ranks"]);
    room.alone(&["parity"]).ended(2, &["<CASE_DIR>"]);
    room.alone(&["parity", "x", "--gradient", "last"]).ended(2, &["should be exact, response or last=N"]);
    room.alone(&["parity", "x", "--dtype", "int8"]).ended(2, &["should be float32, float64 or bfloat16"]);
    room.alone(&["parity", "x", "--page-size", "0"]).ended(2, &["should be a number of at least 1"]);
}

#[test]
fn a_wrong_command_line_is_shown_once_by_several_ranks() {
    let said = Room::new().ranks(3, &["trian"]);
    assert_eq!(said.ended(2, &[]).err.matches("unrecognized subcommand").count(), 1, "{said}");
}

#[test]
fn help_lists_every_verb() {
    let said = Room::new().alone(&["--help"]);
    said.ended(0, &[]);
    for verb in ["train", "gate", "plan", "parity", "bench", "study", "report", "convert", "merge", "data"] {
        assert!(said.out.contains(&format!("\n  {verb} ")), "{verb}: {said}");
    }
    assert!(Room::new().alone(&["--version"]).out.starts_with("longstraw "));
}

#[test]
fn the_error_about_a_misspelt_key_names_the_nearest_one() {
    let room = Room::new();
    let said = room.alone(&["plan", "--set", "grpo.group_sise=4"]);
    said.refused(2, &["--set: unknown key grpo.group_sise; the nearest known one is grpo.group_size"]);
    let said = room.alone(&["plan", "--set", "group_size=4"]);
    said.refused(2, &["group_size is in the wrong place", "--set grpo.group_size=VALUE"]);
    room.alone(&["plan", "--set", "grpo.group_size"]).refused(2, &["grpo.group_size is no table.key=value"]);
    room.write("config.toml", "[optimiser]\nlr = 1\n");
    room.alone(&["plan"]).refused(2, &["config.toml: unknown table optimiser", "optimizer"]);
    room.write("config.toml", "[optimizer]\nlr = \n");
    room.alone(&["plan"]).refused(2, &["config.toml: line 2, column 6"]);
}

#[test]
fn an_absent_configuration_or_settings_file_is_named() {
    let room = Room::new();
    room.alone(&["plan", "--config", "absent.toml"]).refused(2, &["absent.toml: cannot be read", "No such file"]);
    room.alone(&["plan", "--settings", "absent.json"]).refused(2, &["absent.json: cannot be read", "No such file"]);
}

#[test]
fn one_message_has_every_problem_of_a_configuration() {
    let room = Room::with(&[("config.toml", include_str!("../../configs/config.toml"))]);
    let wrong = ["--set", "parallel.tp_size=2", "--set", "context.answer_len=4096", "--set", "grpo.group_size=0"];
    let said = room.ranks(2, &wrong);
    said.refused(
        2,
        &["configuration refused, 3 problems", "parallel.tp_size should be 1", "grpo.group_size should be"],
    );
    said.ended(2, &["context.max_seq_len should be 2093056: prompt_len 2088960 + answer_len 4096 (it is 2097152)"]);
}

/// `--set` counts on both sides of the verb. A verb that reads no configuration refuses it.
#[test]
fn sets_before_and_after_the_verb_both_count_and_other_verbs_refuse_them() {
    let room = Room::new();
    let said = room.alone(&["--set", "run.nonsense=1", "plan", "--set", "lora.rank=0"]);
    said.refused(2, &["run.nonsense", "lora.rank should be at least 1"]);
    let said = room.alone(&["--set=lora.rank=0", "plan"]);
    said.refused(2, &["lora.rank should be at least 1"]);
    room.alone(&["parity", "nowhere", "--set", "lora.rank=4"]).ended(2, &["reads no configuration"]);
}
