//! The endpoint's review of a run that has ended: requested by the run itself, within a time limit, and never a reason to
//! fail.

use std::path::Path;
use std::time::{Duration, Instant};

use longstraw::config::{Environment, RunConfig};
use longstraw::tools::review::{Diagnoses, Ended, RequestLimits, diagnose, summarize};
use serde_json::{Value, json as object};

use super::checkpoints::case;
use super::room::{Call, LONGSTRAW, Room, Said};
use super::service::{Service, Turn, json, nobody, says};
use super::training::{config, lines, record};

const SENTINEL: &str = "sk-sentinel-5772156649";
const REPLY: &str = "The loss stays at 0.\n\n- Look at the rewards.";

/// The body of a request, as JSON.
fn body(request: &str) -> Value {
    serde_json::from_str(request.split_once("\r\n\r\n").unwrap().1).unwrap()
}

fn message(request: &str) -> String {
    body(request)["messages"][0]["content"].as_str().unwrap().to_owned()
}

/// A room for a short run with the given `usage` settings.
fn room(base: &str, usage: &str) -> Room {
    let settings = format!(
        r#"{{ "api_base": "{base}", "default_model": "reader-large", "timeout_sec": 2, "max_retries": 5,
              "retry_backoff": 0.02, "usage": {{ {usage} }} }}"#
    );
    Room::with(&[
        ("config.toml", &config(&case("qwen3"))),
        ("settings.json", &settings),
        ("train.jsonl", &lines(&[record(9, [1, 2, 3]), record(12, [2, 2, 1])])),
    ])
}

#[track_caller]
fn train(room: &Room, ranks: usize, more: &[&str]) -> Said {
    let arguments: Vec<&str> = ["train", "--set", "run.log_level=debug"].iter().chain(more).copied().collect();
    let variables = &[("TAOTOKEN_API_KEY", SENTINEL)];
    let said = room.run(&Call { ranks, program: LONGSTRAW, arguments: &arguments, variables });
    assert!(!format!("{said}").contains(SENTINEL), "the key is shown:\n{said}");
    for file in room.files("run") {
        let bytes = std::fs::read(room.path().join("run").join(&file)).unwrap();
        assert!(!bytes.windows(SENTINEL.len()).any(|window| window == SENTINEL.as_bytes()), "it stands in {file}");
    }
    said
}

#[test]
fn a_finished_run_has_a_summary_of_its_numbers_and_no_name_was_sent() {
    let service = Service::of(vec![says(REPLY)]);
    let room = room(&service.base(), r#""log_summary": true"#);
    let said = train(&room, 2, &["--json"]);
    said.ended(0, &["a summary of the run by the endpoint's model: run/summary.md"]);
    assert_eq!(said.json()["passed"], true);
    let summary = room.read("run/summary.md");
    assert!(
        summary.starts_with("# Summary of a run that came to its end\n\nThe loss stays at 0.\n\n- Look"),
        "{summary}"
    );
    assert!(summary.contains("By reader-large, 20") && summary.contains("(100 tokens in, 20 out)"), "{summary}");
    assert_eq!(service.heard().len(), 1, "only rank 0 sends a request");
    let request = &service.heard()[0];
    assert_eq!(body(request)["model"], "reader-large");
    let sent = message(request);
    for words in [
        "It came to its end.",
        "Steps: 3; different prompts: 2",
        "\nTable of 3 steps\nstep,",
        "grad_norm: ",
        r#""passed":true"#,
    ] {
        assert!(sent.contains(words), "no {words:?} in\n{sent}");
    }
    assert!(!sent.contains("of 9") && !sent.contains("of 12"), "names of prompts are not sent:\n{sent}");
}

#[test]
fn a_run_that_fails_in_an_update_has_a_summary_with_its_message_and_the_same_exit() {
    let service = Service::of(vec![says(REPLY)]);
    let room = room(&service.base(), r#""log_summary": true, "sample_replay": true"#);
    let said = train(&room, 2, &["--set", "optimizer.lr=1e30"]);
    said.refused(6, &["is not finite", "a summary of the run by the endpoint's model"]);
    assert!(room.read("run/summary.md").starts_with("# Summary of a run that failed\n"));
    assert_eq!(service.heard().len(), 1, "answers of a failed run are not sent");
    let sent = message(&service.heard()[0]);
    assert!(sent.contains("It failed: rank 0, ") && sent.contains("is not finite"), "{sent}");
    assert!(!room.path().join("run/receipt.json").exists() && !sent.contains("\nReceipt\n"), "{sent}");
}

#[test]
fn a_run_that_is_refused_before_its_first_step_sends_nothing() {
    let service = Service::of(vec![says(REPLY)]);
    let room = room(&service.base(), r#""log_summary": true"#);
    room.write("run/summary.md", "of an earlier run");
    train(&room, 0, &["--set", "data.path=absent.jsonl"]).refused(3, &["absent.jsonl"]);
    assert_eq!((service.heard().len(), room.read("run/summary.md").as_str()), (0, "of an earlier run"));
}

#[test]
fn a_service_that_hangs_or_fails_is_one_line_and_the_run_passes() {
    for (turn, words) in [
        (Turn::Hang, "no summary of the run: "),
        (json(500, "{}"), "overloaded or out of order (HTTP 500"),
        (json(401, &format!(r#"{{"error": "no {SENTINEL}"}}"#)), "the service refuses the key (HTTP 401: no [secret])"),
    ] {
        let service = Service::of(vec![turn]);
        let room = room(&service.base(), r#""log_summary": true, "sample_replay": true"#);
        room.write("run/summary.md", "of an earlier run");
        let said = train(&room, 0, &["--set", "run.steps=1"]);
        said.ended(0, &[words, "no diagnosis of the worst answers: ", "only runs that sample answers"]);
        assert_eq!(said.err.lines().filter(|line| line.starts_with("no summary of the run: ")).count(), 1, "{said}");
        assert!(service.heard().len() <= 2, "{} attempts", service.heard().len());
        assert_eq!(room.read_json("run/receipt.json")["passed"], true);
        assert!(!room.path().join("run/summary.md").exists(), "an earlier one must not pass for this run's");
    }
    let room = room(&nobody(), r#""log_summary": true"#);
    let said = room.alone(&["train", "--set", "run.steps=1"]);
    said.ended(0, &["no summary of the run: ", "TAOTOKEN_API_KEY", "is not set"]);
}

/// The laptop's configuration with a service, and a key.
fn config_with_service(base: &str) -> (RunConfig, Environment) {
    let mut config = RunConfig::laptop();
    config.endpoint.api_base = Some(base.to_owned());
    config.endpoint.default_model = Some("reader-large".to_owned());
    (config, Environment::of([("TAOTOKEN_API_KEY", SENTINEL)]))
}

#[test]
fn no_service_delays_a_summary_beyond_its_limit() {
    let limits = RequestLimits { total_time: Duration::from_secs(2), ..RequestLimits::SUMMARY };
    let later = Turn::Say(429, "retry-after: 60\r\n", "{}".into());
    let page = Turn::Say(200, "content-type: text/html\r\n", "<html>".into());
    for (turn, words, attempts) in [
        (Turn::Hang, "no answer within the 2 s that the caller waits", 1),
        (later, "HTTP 429", 1),
        (json(529, "{}"), "HTTP 529", 2),
        (Turn::Cut, "the connection broke", 2),
        (page, "a web page (HTML)", 1),
        (json(200, "{}"), "the answer is no message", 1),
        (says(" \n"), "the model's reply is empty", 1),
    ] {
        let (service, dir) = (Service::of(vec![turn]), tempfile::tempdir().unwrap());
        let (mut config, environment) = config_with_service(&service.base());
        config.endpoint.retry_backoff = 0.1;
        let start = Instant::now();
        // Only a service that hangs meets the limit.
        let total_time = if attempts == 1 { limits.total_time } else { Duration::from_mins(1) };
        let limits = RequestLimits { total_time, ..limits };
        let failure = summarize(dir.path(), &config, &environment, Ended::Finished, limits).unwrap_err().to_string();
        let time_out = Duration::from_secs(config.endpoint.timeout_sec);
        assert!(start.elapsed() < time_out, "{words}: {:?}", start.elapsed());
        assert!(failure.contains(words) && !failure.contains(SENTINEL), "{failure}");
        assert_eq!(service.heard().len(), attempts, "{words}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
    let (config, environment) = config_with_service(&nobody());
    let none = RequestLimits::SUMMARY.within(Some(Duration::from_millis(100)));
    let failure = summarize(Path::new("absent"), &config, &environment, Ended::Stopped, none).unwrap_err().to_string();
    assert!(failure.contains("only 0.1 s are left"), "{failure}");
}

/// A run's folder with answers of four prompts.
fn answers() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let line = |step: u64, index: u64| {
        let reward = if step < 4 { -5.0 } else { 0.25 * f64::from(u32::try_from(index).unwrap()) };
        object!({"step": step, "prompt": format!("named {index}"), "answer": index % 2, "text": format!("said {step} {index}"), "tokens": 3,
            "reward": reward, "parts": {"exact": reward}, "advantage": 0.0, "truncated": false, "failure": null,
            "reward_data": {"question": format!("asked {index}"), "expected": "seven"}})
    };
    let all = (1..=4).flat_map(|step| (0..4).map(move |index| line(step, index)));
    let text: String = all.flat_map(|line| [line.to_string(), "\n".to_owned()]).collect();
    std::fs::write(dir.path().join("answers.jsonl"), text).unwrap();
    dir
}

fn diagnoses(dir: &Path, base: &str, limits: RequestLimits) -> (Diagnoses, Vec<Value>) {
    let (config, environment) = config_with_service(base);
    let diagnoses = diagnose(dir, &config, &environment, limits).unwrap();
    let text = std::fs::read_to_string(&diagnoses.file).unwrap();
    assert!(!text.contains(SENTINEL) && !format!("{diagnoses:?}").contains(SENTINEL), "{text}");
    (diagnoses, text.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

#[test]
fn the_worst_answers_of_the_last_steps_are_diagnosed() {
    fn judge(request: &str) -> Turn {
        if message(request).contains("said 4 1") { json(400, "{}") } else { says("It says nothing.") }
    }
    let (service, dir) = (Service::of(vec![Turn::By(judge)]), answers());
    let (diagnoses, lines) =
        diagnoses(dir.path(), &service.base(), RequestLimits { requests_max: 3, ..RequestLimits::DIAGNOSES });
    assert_eq!((diagnoses.answers, diagnoses.failed), (3, 1));
    let texts: Vec<&str> = lines.iter().map(|line| line["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["said 4 0", "said 4 1", "said 4 2"], "only the last quarter of the steps, the worst first");
    assert_eq!(
        lines[0],
        object!({"step": 4, "prompt": "named 0", "answer": 0, "reward": 0.0, "text": "said 4 0", "diagnosis": "It says nothing."})
    );
    assert!(lines[1]["failure"].as_str().unwrap().contains("HTTP 400") && lines[1]["diagnosis"].is_null());
    for request in service.heard() {
        let sent = message(&request);
        assert!(!sent.contains("Question: ") && sent.contains("Expected: seven") && !sent.contains("named"), "{sent}");
    }
}

#[test]
fn no_service_delays_diagnoses_beyond_their_limit() {
    let limits = RequestLimits { total_time: Duration::from_secs(2), ..RequestLimits::DIAGNOSES };
    for turn in [Turn::Hang, json(503, "{}"), json(401, "{}"), Turn::Cut] {
        let (service, dir, start) = (Service::of(vec![turn.clone()]), answers(), Instant::now());
        let (diagnoses, lines) = diagnoses(dir.path(), &service.base(), limits);
        let time_out = Duration::from_secs(RunConfig::laptop().endpoint.timeout_sec);
        assert!(start.elapsed() < time_out, "{turn:?}: {:?}", start.elapsed());
        assert_eq!((diagnoses.answers, diagnoses.failed, lines.len()), (4, 4, 4), "{turn:?}");
        assert!(diagnoses.first_failure.is_some());
    }
}
