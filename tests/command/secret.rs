//! The endpoint's key is in the environment and nowhere else.

use super::checkpoints::case;
use super::room::{Call, LONGSTRAW, Room};
use super::service::{Service, json};
use super::training::{config, lines, record};

const SENTINEL: &str = "sk-sentinel-2718281828";

#[test]
fn the_key_appears_in_no_output_and_in_no_file_of_a_run() {
    let room = Room::with(&[
        ("config.toml", &config(&case("qwen3"))),
        ("settings.json", include_str!("../../configs/settings.json")),
        ("train.jsonl", &lines(&[record(9, [1, 2, 3])])),
    ]);
    // The settings request a review of the run; the request goes to this service, with the key.
    let service = Service::of(vec![json(401, &format!(r#"{{"error": {{"message": "no {SENTINEL}"}}}}"#))]);
    let base = format!("endpoint.api_base={}", service.base());
    for (arguments, code) in [
        (
            &["train", "--json", "--set", "run.log_level=trace", "--set", "run.steps=1", "--set", base.as_str()]
                as &[&str],
            0,
        ),
        (&["train", "--set", "endpoint.api_key_env=sk-sentinel-2718281828"], 2),
        (&["train", "--set", "endpoint.api_base=https://user:sk-sentinel-2718281828@example.com"], 2),
        (&["train", "--set", "endpoint.timeout_sec=sk-sentinel-2718281828"], 2),
        (&["train", "--set", "model.path=absent"], 3),
        (&["plan", "--set", "optimizer.lr=-1"], 2),
    ] {
        let variables = &[("TAOTOKEN_API_KEY", SENTINEL)];
        let ranks = if code == 0 { 2 } else { 0 };
        let said = room.run(&Call { ranks, program: LONGSTRAW, arguments, variables });
        said.ended(code, &[]);
        assert!(!format!("{said}").contains(SENTINEL), "{arguments:?}: {said}");
    }
    assert_eq!(service.heard().len(), 1, "the review of the completed run");
    assert!(service.heard()[0].contains(SENTINEL), "the key is in its header");
    let files = room.files("");
    assert!(files.contains(&"run/receipt.json".to_owned()) && files.contains(&"run/logs/rank_1.log".to_owned()));
    for file in files {
        let bytes = std::fs::read(room.path().join(&file)).unwrap();
        assert!(!bytes.windows(SENTINEL.len()).any(|window| window == SENTINEL.as_bytes()), "the key is in {file}");
    }
}
