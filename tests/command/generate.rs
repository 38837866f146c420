//! Questions over given texts, from local services that answer well, badly, or not at all.

use std::time::{Duration, Instant};

use serde_json::{Value, json as object};

use super::room::{Call, LONGSTRAW, Room, Running, Said};
use super::service::{Service, Turn, json, nobody, says};

const SENTINEL: &str = "sk-sentinel-1618033988";
const CHUNKS: usize = 12;

/// A folder of twelve chunks, each with its own code, and settings that allow sending them.
fn room(base: &str) -> Room {
    let settings = format!(
        r#"{{ "api_base": "{base}", "default_model": "writer-large", "timeout_sec": 2, "max_retries": 1,
              "retry_backoff": 0.02, "log_level": "trace", "usage": {{ "data_generation": true }} }}"#
    );
    let room = Room::with(&[("settings.json", &settings)]);
    for chunk in 0..CHUNKS {
        let filler = "The miller went to the market and came home again. ".repeat(5);
        room.write(&format!("texts/{chunk:02}.txt"), format!("{filler}The code of the mill is {}.\n", 7000 + chunk));
    }
    room.write("texts/picture", [0_u8; 300]);
    room
}

/// The reply of a good model: a question about the code of the chunk.
fn good(request: &str) -> String {
    let code = request.split("The code of the mill is ").nth(1).unwrap().split('.').next().unwrap();
    let question =
        object!({"question": "What is the code of the mill?", "answer": code, "wrong": ["1", "2", "3", "4"]});
    object!({"questions": [question]}).to_string()
}

fn number(request: &str) -> usize {
    serde_json::from_str::<Value>(&good(request)).unwrap()["questions"][0]["answer"]
        .as_str()
        .unwrap()
        .parse::<usize>()
        .unwrap()
        - 7000
}

/// Good replies in fences and words; the later the chunk, the faster.
fn writer(request: &str) -> Turn {
    std::thread::sleep(Duration::from_millis(40 * u64::try_from(CHUNKS - number(request)).unwrap()));
    says(&format!("Here it is:\n```json\n{}\n```\nShall I {{go on}}?", good(request)))
}

const GENERATE: [&str; 5] = ["data", "generate", "texts", "--out", "made.jsonl"];

fn start(room: &Room, more: &[&str]) -> Running {
    let arguments: Vec<&str> = GENERATE.iter().chain(more).copied().collect();
    room.start(&Call {
        ranks: 0,
        program: LONGSTRAW,
        arguments: &arguments,
        variables: &[("TAOTOKEN_API_KEY", SENTINEL)],
    })
}

/// Runs `data generate` and checks that the key is neither printed nor written.
#[track_caller]
fn generate(room: &Room, more: &[&str]) -> Said {
    let said = start(room, more).end();
    assert!(!format!("{said}").contains(SENTINEL), "the key is shown:\n{said}");
    for file in room.files("") {
        let bytes = std::fs::read(room.path().join(&file)).unwrap();
        assert!(!bytes.windows(SENTINEL.len()).any(|window| window == SENTINEL.as_bytes()), "it stands in {file}");
    }
    said
}

/// Codes of the records, in their order.
fn codes(room: &Room) -> Vec<usize> {
    let text = room.read("made.jsonl");
    let records = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    records.map(|record| record["reward_data"]["expected"].as_str().unwrap().parse::<usize>().unwrap() - 7000).collect()
}

#[test]
fn questions_come_in_the_order_of_the_texts_whatever_comes_first() {
    let service = Service::of(vec![Turn::By(writer)]);
    let room = room(&service.base());
    let said = generate(&room, &["--parallel", "5", "--questions", "1", "--json"]);
    said.ended(0, &["12 chunks of 12 files (0 finished, 1 files passed over", "12 requests to writer-large, about"]);
    let summary = said.json();
    for (key, value) in [
        ("finished", 12),
        ("records", 12),
        ("requests", 12),
        ("input_tokens", 1200),
        ("output_tokens", 240),
        ("failed", 0),
    ] {
        assert_eq!(summary[key], value, "{key}: {said}");
    }
    assert!(summary["estimate"]["input_tokens_about"].as_u64().unwrap() > 12 * 60, "{said}");
    assert_eq!(codes(&room), (0..CHUNKS).collect::<Vec<_>>());
    let first: Value = serde_json::from_str(room.read("made.jsonl").lines().next().unwrap()).unwrap();
    assert_eq!(first["name"], "texts/00.txt, part 1, question 1");
    let content = first["messages"][0]["content"].as_str().unwrap();
    assert!(content.starts_with("The miller went") && content.contains("Question: What is the code of the mill?"));
    let rewards: Vec<&Value> = first["answers"].as_array().unwrap().iter().map(|answer| &answer["reward"]).collect();
    assert_eq!((rewards.len(), rewards.iter().filter(|reward| reward.as_f64() == Some(1.0)).count()), (4, 1));
    let request = &service.heard()[0];
    assert!(request.contains(r#""model":"writer-large""#) && request.contains("max_tokens"), "{request}");
    // Everything is finished: nothing is sent again.
    let again = generate(&room, &["--questions", "1", "--json"]);
    assert_eq!((again.ended(0, &[]).json()["requests"].as_u64(), service.heard().len()), (Some(0), 12));
}

#[test]
fn a_killed_run_ends_in_the_same_file_and_sends_nothing_twice() {
    let service = Service::of(vec![Turn::By(writer)]);
    let base = service.base();
    let whole = room(&base);
    generate(&whole, &["--parallel", "1"]).ended(0, &[]);
    for parallel in ["1", "4"] {
        let room = room(&base);
        let before = service.heard().len();
        let mut running = start(&room, &["--parallel", parallel]);
        let state = room.path().join("made.jsonl.state");
        let lines = || std::fs::read_to_string(&state).unwrap_or_default().lines().count();
        running.until("the fourth chunk", || (lines() > 4).then_some(()));
        running.signal(libc::SIGKILL);
        assert_eq!(running.end().code, -1);
        let kept = lines() - 1;
        // As a kill in the middle of a write leaves the files.
        let torn = room.read("made.jsonl.state") + "{\"chunk\": 9, \"que";
        room.write("made.jsonl.state", torn);
        room.write("made.jsonl", room.read("made.jsonl") + "{\"na");
        let heard = service.heard().len();
        generate(&room, &["--parallel", parallel]).ended(0, &[&format!("12 files ({kept} finished")]);
        assert_eq!(service.heard().len() - heard, CHUNKS - kept, "{before} before");
        assert_eq!(room.read("made.jsonl"), whole.read("made.jsonl"), "with {parallel} at a time");
    }
}

#[test]
fn a_signal_stops_the_run_and_the_same_command_continues() {
    let service = Service::of(vec![Turn::By(writer)]);
    let room = room(&service.base());
    let mut running = start(&room, &["--parallel", "2", "--json"]);
    let state = room.path().join("made.jsonl.state");
    running
        .until("a chunk", || (std::fs::read_to_string(&state).unwrap_or_default().lines().count() > 1).then_some(()));
    running.signal(libc::SIGTERM);
    let said = running.end();
    said.refused(75, &["asked to stop:", "of 12 chunks are finished; the same command continues"]);
    let finished = said.json()["finished"].as_u64().unwrap();
    assert!((1..12).contains(&finished), "{said}");
    generate(&room, &["--parallel", "8"]).ended(0, &[]);
    assert_eq!((codes(&room).len(), service.heard().len()), (CHUNKS, CHUNKS), "what was under way was waited for");
}

#[test]
fn a_reply_that_cannot_be_used_is_asked_for_once_more_and_then_counted() {
    // Odd chunks answer in nothing but words, the second time too where they are above 8.
    fn moody(request: &str) -> Turn {
        let (number, again) = (number(request), request.contains("An earlier reply"));
        if number % 2 == 0 || (again && number < 8) { says(&good(request)) } else { says("I would rather not.") }
    }
    let service = Service::of(vec![Turn::By(moody)]);
    let room = room(&service.base());
    let said = generate(&room, &["--json"]);
    let summary = said.ended(0, &["10 with questions, 2 without"]).json();
    assert_eq!(
        (&summary["requests"], &summary["asked_again"], &summary["failed"]),
        (&18.into(), &6.into(), &2.into()),
        "{said}"
    );
    assert_eq!(summary["faults"]["there was no JSON in the reply"], 8, "{said}");
    assert_eq!(codes(&room), [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]);
    generate(&room, &[]).ended(0, &[]);
    assert_eq!(service.heard().len(), 18, "what gave nothing twice is not asked a third time");
}

#[test]
fn more_than_half_without_a_question_is_a_failure_with_its_reason() {
    fn liar(request: &str) -> Turn {
        says(&good(request).replace("\"answer\":\"7", "\"answer\":\"8"))
    }
    let service = Service::of(vec![Turn::By(liar)]);
    let room = room(&service.base());
    let said = generate(&room, &[]);
    said.refused(
        7,
        &["12 of 12 chunks gave no question, most often (24 times) because an answer did not stand in the text"],
    );
    assert_eq!(room.read("made.jsonl"), "");
}

#[test]
fn a_failing_service_ends_the_run_before_every_chunk_is_sent() {
    for (turn, words, most) in [
        (json(500, r#"{"error": "out of order"}"#), "failed 8 times in a row, and no further request is sent", 2 * 12),
        (Turn::Cut, "failed 8 times in a row", 2 * 12),
        (json(401, &format!(r#"{{"error": "no {SENTINEL}"}}"#)), "the service refuses the key", 4),
        (Turn::Say(200, "content-type: text/html\r\n", "<html>".into()), "the answer is a web page (HTML)", 4),
    ] {
        let service = Service::of(vec![turn]);
        let room = room(&service.base());
        generate(&room, &[]).refused(7, &[words]);
        assert!(service.heard().len() <= most, "{words}: {} requests", service.heard().len());
        assert_eq!(room.read("made.jsonl"), "");
    }
    generate(&room(&nobody()), &[]).refused(7, &["the connection is refused"]);
}

#[test]
fn a_rate_limit_is_waited_for_and_unanswered_chunks_are_sent_by_the_next_run() {
    // Two chunks get no answer, and one is rejected for what it holds.
    fn gaps(request: &str) -> Turn {
        match number(request) {
            3 | 7 => json(503, "{}"),
            5 => json(400, r#"{"error": {"message": "not this text"}}"#),
            _ => says(&good(request)),
        }
    }
    let limit = Turn::Say(429, "retry-after: 1\r\n", r#"{"error": {"message": "slow down"}}"#.into());
    let service = Service::of(vec![limit, Turn::By(gaps)]);
    let room = room(&service.base());
    let start = Instant::now();
    let summary = generate(&room, &["--json", "--parallel", "1"]).ended(0, &[]).json();
    assert!(start.elapsed() >= Duration::from_secs(1));
    assert_eq!(
        (&summary["unanswered"], &summary["failed"], &summary["finished"]),
        (&2.into(), &1.into(), &10.into()),
        "{summary}"
    );
    assert_eq!(codes(&room), [0, 1, 2, 4, 6, 8, 9, 10, 11], "records after a gap are written at the end");
    let better = Service::of(vec![Turn::By(writer)]);
    let base = format!("endpoint.api_base={}", better.base());
    generate(&room, &["--set", &base]).ended(0, &[]);
    assert_eq!((codes(&room), better.heard().len()), (vec![0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11], 2));
}

#[test]
fn a_hanging_service_is_given_up_after_its_time_out() {
    let service = Service::of(vec![Turn::Hang]);
    let said = generate(&room(&service.base()), &["--parallel", "16", "--set", "endpoint.timeout_sec=1"]);
    said.refused(7, &["no answer within 1 s (endpoint.timeout_sec)"]);
}

#[test]
fn nothing_is_sent_until_it_is_allowed_and_the_cost_comes_first() {
    let service = Service::of(vec![Turn::By(writer)]);
    let room = room(&service.base());
    let off = "endpoint.usage.data_generation=false";
    generate(&room, &["--set", off]).refused(2, &["turn it on with --set endpoint.usage.data_generation=true"]);
    let said = generate(&room, &["--dry-run", "--json", "--set", off, "--limit", "5"]);
    let summary = said.ended(0, &["5 requests to writer-large"]).json();
    assert_eq!((&summary["dry_run"], &summary["estimate"]["requests"]), (&true.into(), &5.into()));
    assert!(service.heard().is_empty() && !room.files("").iter().any(|file| file.contains("made")), "{said}");
    let summary = generate(&room, &["--limit", "5", "--json"]).ended(0, &[]).json();
    assert_eq!((&summary["finished"], &summary["records"]), (&5.into(), &5.into()));
    generate(&room, &["--answers", "3"])
        .refused(2, &["made.jsonl.state was begun with other options (answers: 4, now 3)"]);
    room.write("other.jsonl", "mine\n");
    generate(&room, &["--out", "other.jsonl"]).ended(2, &["cannot be used multiple times"]);
    let said = room.alone(&["data", "generate", "texts", "--out", "other.jsonl", "--dry-run"]);
    said.refused(2, &["other.jsonl exists, but other.jsonl.state does not"]);
    assert_eq!(room.read("other.jsonl"), "mine\n");
    assert_eq!(service.heard().len(), 5);
}

#[test]
fn several_processes_and_wrong_options_are_refused() {
    let room = room(&nobody());
    let arguments: Vec<&str> = GENERATE.to_vec();
    let variables = [("TAOTOKEN_API_KEY", SENTINEL), ("SLURM_STEP_NUM_TASKS", "4")];
    let said = room.run(&Call { ranks: 0, program: LONGSTRAW, arguments: &arguments, variables: &variables });
    said.refused(2, &["data generate is for one process", "SLURM_STEP_NUM_TASKS says that 4"]);
    generate(&room, &["--answers", "1"]).refused(2, &["--answers is 1, it must be from 2 to 16"]);
    generate(&room, &["--chunk-chars", "10"]).refused(2, &["--chunk-chars is 10, it must be from 200"]);
    generate(&room, &["--parallel", "17"]).ended(2, &["17 is not in 1..=16"]);
    generate(&room, &["--chunk-tokens", "100"]).ended(2, &["--tokenizer"]);
    let said = room.alone(&GENERATE);
    said.refused(7, &["TAOTOKEN_API_KEY", "is not set"]);
}
