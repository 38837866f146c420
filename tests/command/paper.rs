//! `scripts/ranks_on_paper.py`: an update on many GPUs simulated from one GPU's seconds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use super::room::Room;

fn of_the_project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// What the script prints; it must succeed.
fn simulate(arguments: &[&str]) -> String {
    let script = of_the_project("scripts/ranks_on_paper.py");
    let said = Command::new("python3").arg("-B").arg(script).args(arguments).output().unwrap();
    let table = String::from_utf8(said.stdout).unwrap();
    assert!(said.status.success(), "{table}{}", String::from_utf8_lossy(&said.stderr));
    table
}

/// Cells of the rows for this many GPUs.
fn row(table: &str, ranks: usize) -> Vec<f64> {
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.trim_matches(['|', ' ']).split(" | ").collect()).collect();
    let ranks = ranks.to_string();
    let mut found = rows.iter().filter(|cells| cells.get(1) == Some(&ranks.as_str()));
    let cells = found.next().unwrap_or_else(|| panic!("no row for {ranks} in:\n{table}"));
    assert!(found.next().is_none(), "two rows for {ranks} in:\n{table}");
    cells[3..].iter().map(|cell| cell.trim_matches('*').parse().unwrap()).collect()
}

/// The table from an update of Qwen3-8B's shape at 131,072 on one GPU, as `bench` prints it.
fn from_one_gpu(arguments: &[&str]) -> String {
    let room = Room::new();
    let run = json!({
        "schedule": "paged", "gradient": "exact", "group": 2,
        "capture_seconds": 12.0, "score_seconds": 0.0, "answers_seconds": 0.0, "tail_seconds": 30.0,
    });
    let file = room.write("one.json", json!({ "prompt": 131_072, "answer": 1_024, "runs": [run] }).to_string());
    let shape = of_the_project("configs/shapes/qwen3-8b/config.json");
    let given = ["--run", file.to_str().unwrap(), "--shape", shape.to_str().unwrap(), "--prompt", "131072"];
    simulate(&[&given, arguments].concat())
}

#[test]
fn the_simulation_agrees_with_the_runs_that_were_made() {
    let table = simulate(&["--check"]);
    let documented = fs::read_to_string(of_the_project("docs/benchmarks.md")).unwrap();
    for line in table.lines().skip(2) {
        let cells: Vec<&str> = line.trim_matches(['|', ' ']).split(" | ").collect();
        let [capture, tail, total, ratio] = [cells[4], cells[7], cells[8], cells[9]];
        let (gradient, group) = (cells[2], cells[3]);
        let shown = format!("| {gradient} | {group} | {capture} | {tail} | {total} | {ratio} |");
        assert!(documented.contains(&shown), "not in the document: {shown}");
    }
    assert_eq!(table.lines().count(), 12, "two lines of header and ten runs:\n{table}");
}

#[test]
fn one_gpu_is_what_was_measured_and_ranks_with_free_links_share_its_work() {
    let free = ["--link", "1e9", "--node-link", "1e9"];
    let table = from_one_gpu(&[&free[..], &["--ranks", "1", "--ranks", "2", "--ranks", "8"]].concat());
    assert!(
        table.contains("| 131,072 | 1 | exact | 12.00 | 0.00 | 0.00 | 30.00 | **42.00** | 1.00 | 42.00 |"),
        "{table}"
    );
    for (ranks, share) in [(2, 6.0), (8, 1.5)] {
        let cells = row(&table, ranks);
        assert!((cells[0] - share).abs() < 0.011, "both chunks together wait for nobody:\n{table}");
        assert!(cells[6] > 1.08 * cells[4], "one by one they wait:\n{table}");
    }
}

#[test]
fn slow_links_set_the_pace_of_the_ring() {
    let table = from_one_gpu(&["--ranks", "2", "--link", "1"]);
    // A layer's state of half of the prompt, 65,536 × 4,096 B at 1 GB/s, in each of 36 layers.
    let capture = 36.0 * 65_536.0 * 4_096.0 / 1e9;
    let cells = row(&table, 2);
    assert!(cells[0] > capture && cells[0] < capture + 12.0, "{capture}:\n{table}");
    // State beside the own chunks, the sums beside the others', and the sums' way home: 1 + 2 + 2 such messages.
    assert!(cells[3] > 5.0 * capture && cells[3] < 5.0 * capture + 30.0, "{capture}:\n{table}");
}
