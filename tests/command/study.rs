//! `study`: gradient modes against the exact gradient, on generated prompts.

use std::fs;

use serde_json::{Value, json};

use super::checkpoints::Draft;
use super::room::Room;
use super::test_tokenizer;

const PROJECTIONS: [&str; 8] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "all"];

/// A tiny llama with a tokenizer of bytes, in `model/`, and text to make prompts of, in `text/`.
fn room() -> Room {
    let room = Room::new();
    let mut draft = Draft::of("llama");
    let tokenizer = test_tokenizer::folder();
    draft.config["vocab_size"] = json!(test_tokenizer::END + 1);
    draft.config["max_position_embeddings"] = json!(1_024);
    for table in ["model.embed_tokens.weight", "lm_head.weight"] {
        let table = draft.tensor(table);
        // Rows for the special tokens, which the reference checkpoint lacks.
        let further = table.bytes[..3 * 64 * 4].to_vec();
        table.bytes.extend(further);
        table.shape[0] += 3;
    }
    draft.write();
    fs::create_dir(room.path().join("model")).unwrap();
    for folder in [draft.path(), tokenizer.path()] {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), room.path().join("model").join(entry.file_name())).unwrap();
        }
    }
    let paragraph = |number: u32| format!("Paragraph {number} says what no other one does. ").repeat(5);
    room.write("text/notes.txt", (0..24).map(paragraph).collect::<Vec<_>>().join("\n\n"));
    room
}

const SHORT: [&str; 8] = ["study", "model", "--text", "text", "--length", "900:2", "--dtype", "float64"];

/// `key` of a projection, prompt by prompt.
fn numbers(run: &Value, projection: &str, key: &str) -> Vec<f64> {
    run["projections"][projection][key].as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

#[test]
fn exact_agrees_with_exact_at_any_world_size_and_response_does_not() {
    let room = room();
    let flags = ["--gradient", "exact", "--gradient", "response", "--adapters", "drawn", "--page-size", "16", "--json"];
    let arguments = [&SHORT[..], &flags].concat();
    let reports = [1, 3].map(|ranks| room.ranks(ranks, &arguments).ended(0, &["900, drawn: prompt 2 of 2"]).json());
    let [alone, several] = reports.each_ref().map(|report| report["runs"].as_array().unwrap());
    assert_eq!((alone.len(), several.len(), &reports[1]["ranks"]), (2, 2, &json!(3)));
    assert_eq!((&alone[0]["gradient"], &alone[1]["gradient"]), (&json!("exact"), &json!("response")));
    for projection in PROJECTIONS {
        for key in ["cosine", "norm_ratio"] {
            // Two runs with the same configuration give the same bits; the quotient of equal sums rounds once.
            assert!(numbers(&alone[0], projection, key).iter().all(|number| (number - 1.0).abs() < 1e-15));
            let (one, two) = (numbers(&alone[1], projection, key), numbers(&several[1], projection, key));
            assert!(one.len() == 2 && one.iter().all(|number| (0.0..0.999).contains(&number.abs())), "{one:?}");
            assert!(one.iter().zip(&two).all(|(one, two)| (one - two).abs() < 1e-11), "{one:?} {two:?}");
        }
    }
    assert_eq!(alone[0]["projections"].as_object().unwrap().keys().collect::<Vec<_>>(), PROJECTIONS);
    let longest = alone[1]["prompt_tokens"][1].as_u64().unwrap();
    assert_eq!(longest, 836, "64 positions are left to the answer");
}

#[test]
fn a_last_that_covers_the_prompt_is_exact_and_leaves_no_file() {
    let room = room();
    let before = room.files("");
    let said = room.alone(&[&SHORT[..], &["--gradient", "last=5000", "--adapters", "start"]].concat());
    said.ended(0, &[]);
    let row = said.out.lines().find(|line| line.contains("last=5000")).unwrap();
    assert_eq!(row.matches("1.000 ±0.000").count(), PROJECTIONS.len(), "{said}");
    assert_eq!(room.files(""), before);
}

#[test]
fn lengths_that_are_too_short_and_absent_adapters_are_refused() {
    let room = room();
    let short = ["study", "model", "--text", "text", "--length", "100"];
    room.ranks(2, &short).refused(2, &["prompt_tokens is 36", "at least"]);
    room.alone(&[&SHORT[..], &["--adapters", "absent"]].concat()).refused(3, &["absent"]);
    room.alone(&["study", "model", "--length", "0"]).ended(2, &["should be POSITIONS or POSITIONS:PROMPTS"]);
}

/// A line of metrics.jsonl for an evaluation with one set for each depth.
fn evaluation(step: u64, far: [f64; 2]) -> Value {
    let set = |[reward, greedy]: [f64; 2]| json!({ "reward": reward, "greedy": greedy, "margin": 1.5, "truncated_share": 0.25 });
    json!({ "evaluation": { "step": step, "sets": { "far": set(far), "middle": set([0.5, 0.5]), "near": set([1.0, 1.0]) } } })
}

#[test]
fn the_table_of_the_study_of_learning_has_means_over_seeds_and_no_row_for_arms_that_were_not_run() {
    let room = Room::new();
    for (seed, rewards, far) in [(0, [0.0, 0.5], [0.25, 0.5]), (1, [0.25, 0.75], [0.75, 1.0])] {
        let mut lines = vec![evaluation(0, [0.0, 0.0])];
        lines.extend(
            (1..).zip(rewards).map(|(step, reward): (u64, f64)| json!({ "step": step, "reward_mean": reward })),
        );
        lines.push(evaluation(2, far));
        let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
        let dir = format!("out/8k-exact-{seed}");
        fs::create_dir_all(room.path().join(&dir)).unwrap();
        room.write(&format!("{dir}/metrics.jsonl"), lines.join("\n"));
    }
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/study_learning.py");
    let said = std::process::Command::new("python3")
        .arg(script)
        .args(["full", "--table-only", "--stage", "8k", "--out", "out"])
        .current_dir(room.path())
        .output()
        .unwrap();
    let table = String::from_utf8(said.stdout).unwrap();
    assert!(said.status.success(), "{table}{}", String::from_utf8_lossy(&said.stderr));
    let row = |start: &str| {
        let rows: Vec<&str> = table.lines().filter(|line| line.starts_with(start)).collect();
        assert_eq!(rows.len(), 1, "{start} in:\n{table}");
        rows[0].to_owned()
    };
    assert_eq!(
        row("| exact | 0, 1 | 2 |"),
        "| exact | 0, 1 | 2 | 0.38 | 0.50 ± 0.25 | 0.75 | 1.50 | 0.50 ± 0.00 | 0.50 | 1.50 | 1.00 ± 0.00 | 1.00 | 1.50 | 0.25 |"
    );
    assert!(row("| exact | 0, 1 | 0 |").contains("| 0.00 ± 0.00 | 0.00 |"));
    assert!(!table.contains("response"), "an arm without runs has no row:\n{table}");
    let curve = fs::read_to_string(room.path().join("out/8k.svg")).unwrap();
    assert_eq!(curve.matches("<polyline").count(), 1, "{curve}");
}
