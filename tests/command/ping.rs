//! `ping`, against services on this machine that fail in each way.

use std::time::Instant;

use super::room::{Call, LONGSTRAW, Room, Said};
use super::service::{Service, Turn, json, models, nobody, reply};

const SENTINEL: &str = "sk-sentinel-3141592653";

/// Pings `base` with at most three attempts of a second each and short waits. The key must not be shown.
fn ping(base: &str, more: &[&str]) -> Said {
    ping_with(base, more, &[("TAOTOKEN_API_KEY", SENTINEL)])
}

fn ping_with(base: &str, more: &[&str], variables: &[(&str, &str)]) -> Said {
    let settings = format!(
        r#"{{ "api_base": "{base}", "default_model": "judge-large", "timeout_sec": 1, "max_retries": 2,
              "retry_backoff": 0.02, "log_level": "trace" }}"#
    );
    let room = Room::with(&[("settings.json", &settings)]);
    let arguments: Vec<&str> = ["ping"].iter().chain(more).copied().collect();
    let said = room.run(&Call { ranks: 0, program: LONGSTRAW, arguments: &arguments, variables });
    assert!(!format!("{said}").contains(SENTINEL), "the key is shown:\n{said}");
    assert_eq!(room.files(""), ["settings.json"], "ping writes nothing");
    said
}

/// Pings a service with this script; returns the output and the requests.
fn answered(script: Vec<Turn>) -> (Said, Vec<String>) {
    let service = Service::of(script);
    let said = ping(&service.base(), &[]);
    (said, service.heard())
}

#[test]
fn an_answering_service_is_reported_with_times_and_attempts() {
    let service = Service::of(vec![models(), reply()]);
    let said = ping(&service.base(), &["--json"]);
    said.ended(0, &[]);
    let told = said.json();
    assert_eq!((&told["passed"], &told["attempts"]), (&true.into(), &2.into()), "{said}");
    assert_eq!((&told["input_tokens"], &told["output_tokens"]), (&14.into(), &3.into()), "{said}");
    let names: Vec<&str> = told["checks"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["models_listed", "default_model_listed", "message_answered"]);
    assert!(told["checks"].as_array().unwrap().iter().all(|check| check["passed"] == true), "{said}");
    let [list, message] = service.heard().try_into().unwrap();
    let (list, message): (String, String) = (list, message);
    assert!(list.starts_with("GET /v1/models HTTP/1.1"), "{list}");
    assert!(message.starts_with("POST /v1/messages HTTP/1.1"), "{message}");
    for request in [list.to_lowercase(), message.to_lowercase()] {
        for header in
            [&format!("x-api-key: {SENTINEL}"), "anthropic-version: 2023-06-01", "content-type: application/json"]
        {
            assert!(request.contains(header), "no {header} in {request}");
        }
    }
    assert!(message.contains(r#""model":"judge-large""#) && message.contains(r#""max_tokens":16"#), "{message}");
}

#[test]
fn a_list_of_several_pages_is_read_to_its_end() {
    let first = json(200, r#"{"data": [{"id": "other"}], "has_more": true}"#);
    let (said, heard) = answered(vec![first, models(), reply()]);
    said.ended(0, &[]);
    assert!(said.out.contains("3 listed"), "{said}");
    assert!(heard[1].starts_with("GET /v1/models?after_id=other HTTP/1.1"), "{heard:?}");
}

#[test]
fn a_rate_limit_is_waited_for_as_long_as_the_service_requests() {
    let limit = || Turn::Say(429, "retry-after: 1\r\n", r#"{"error": {"message": "slow down"}}"#.into());
    let start = Instant::now();
    let (said, heard) = answered(vec![models(), limit(), limit(), reply()]);
    said.ended(0, &[]);
    assert!(start.elapsed().as_secs_f64() >= 2.0, "two waits of a second: {:?}", start.elapsed());
    assert_eq!(heard.len(), 4);
    assert!(said.out.contains("3 attempts"), "{said}");
}

#[test]
fn an_overloaded_service_gets_another_request() {
    for status in [408, 409, 500, 503, 529] {
        let (said, heard) = answered(vec![json(status, "{}"), models(), reply()]);
        said.ended(0, &[]);
        assert_eq!(heard.len(), 3, "HTTP {status}");
    }
}

#[test]
fn attempts_end_with_the_retries() {
    let (said, heard) = answered(vec![models(), json(500, r#"{"error": {"message": "out of order"}}"#)]);
    said.refused(7, &["/v1/messages: ", "overloaded or out of order (HTTP 500: out of order)", "3 attempts in"]);
    assert_eq!(heard.len(), 1 + 3, "one list, and 1 + max_retries messages");
    assert!(said.out.contains("ok    models_listed") && said.out.contains("FAIL  message_answered"), "{said}");
}

#[test]
fn a_hanging_service_ends_each_attempt_by_time_out() {
    let start = Instant::now();
    let (said, heard) = answered(vec![Turn::Hang]);
    said.refused(7, &["/v1/models: no answer within 1 s (endpoint.timeout_sec)", "3 attempts in 3."]);
    assert_eq!(heard.len(), 3);
    assert!((3.0..6.0).contains(&start.elapsed().as_secs_f64()), "{:?}", start.elapsed());
}

#[test]
fn an_incomplete_answer_is_requested_again() {
    let (said, heard) = answered(vec![Turn::Cut, models(), Turn::Cut, reply()]);
    said.ended(0, &[]);
    assert_eq!(heard.len(), 4);
    answered(vec![Turn::Cut]).0.refused(7, &["the connection broke before the answer was whole", "3 attempts"]);
}

#[test]
fn a_refused_key_is_reported_at_once_and_never_shown() {
    for status in [401, 403] {
        let body =
            format!(r#"{{"error": {{"type": "authentication_error", "message": "invalid x-api-key {SENTINEL}"}}}}"#);
        let (said, heard) = answered(vec![json(status, &body)]);
        let words = format!("refuses the key (HTTP {status}: invalid x-api-key [secret])");
        said.refused(7, &[&words, "variable TAOTOKEN_API_KEY"]);
        assert_eq!(heard.len(), 1, "no second attempt with a refused key, and no message");
    }
}

#[test]
fn a_wrong_base_address_is_recognized_by_the_answer() {
    let page = "<!DOCTYPE html><html><body>Welcome</body></html>";
    let html = || Turn::Say(200, "content-type: text/html; charset=utf-8\r\n", page.into());
    let (said, heard) = answered(vec![html()]);
    said.refused(7, &["the answer is a web page (HTML) and not JSON", "endpoint.api_base (http://127.0.0.1:"]);
    assert_eq!(heard.len(), 1);
    let (said, heard) = answered(vec![json(404, r#"{"error": "no route"}"#)]);
    said.refused(7, &["/v1/models: nothing is there (HTTP 404: no route)", "endpoint.api_base", "(/v1/models)"]);
    assert_eq!(heard.len(), 2, "the list may be missing where messages are not, so both are asked, each once");
    let (said, _) = answered(vec![json(200, r#"{"status": "fine"}"#)]);
    said.refused(7, &["the answer is no list of models", r#"{"status": "fine"}"#]);
    ping(&nobody(), &[]).refused(7, &["the connection is refused", "endpoint.api_base", "3 attempts"]);
    ping("https://no-such-host.invalid", &[]).refused(7, &["the host is not known", "endpoint.api_base"]);
}

#[test]
fn a_service_without_a_list_passes_where_a_message_answers() {
    let (said, heard) = answered(vec![json(404, "{}"), reply()]);
    said.ended(0, &[]);
    assert!(said.out.contains("note  models_listed") && said.out.contains("ok    message_answered"), "{said}");
    assert_eq!(heard.len(), 2);
}

#[test]
fn an_unknown_model_is_told_from_a_wrong_address() {
    let missing = r#"{"type": "error", "error": {"type": "not_found_error", "message": "model: judge-large"}}"#;
    let other = json(200, r#"{"data": [{"id": "judge-huge"}]}"#);
    let (said, _) = answered(vec![other.clone(), json(404, missing)]);
    said.refused(7, &["the service knows no model judge-large", "correct endpoint.default_model"]);
    assert!(said.out.contains("the nearest listed one is judge-huge"), "{said}");
    // A model that answers and is not listed is no failure: services list models under other names.
    let (said, _) = answered(vec![other, reply()]);
    said.ended(0, &[]);
    assert!(said.out.contains("note  default_model_listed"), "{said}");
}

#[test]
fn a_rejected_request_is_not_sent_again() {
    let (said, heard) = answered(vec![models(), json(400, r#"{"error": {"message": "max_tokens: too small"}}"#)]);
    said.refused(7, &["rejects the request (HTTP 400: max_tokens: too small)"]);
    assert_eq!(heard.len(), 2);
}

#[test]
fn a_redirect_is_not_followed_with_the_key() {
    let other = Service::of(vec![models()]);
    let location: &'static str = format!("location: {}/v1/models?key={SENTINEL}\r\n", other.base()).leak();
    let (said, heard) = answered(vec![Turn::Say(302, location, String::new())]);
    said.refused(
        7,
        &["redirects to", &format!("{}/v1/models (HTTP 302)", other.base()), "set endpoint.api_base to it"],
    );
    assert_eq!((heard.len(), other.heard().len()), (1, 0));
}

#[test]
fn an_answer_without_end_is_left() {
    let long = format!("{{\"data\": [{}", "1,".repeat(5 << 20));
    answered(vec![json(200, &long)]).0.refused(7, &["the answer is longer than 8388608 bytes"]);
}

#[test]
fn a_missing_key_is_named_by_its_variable_and_nothing_is_sent() {
    let service = Service::of(vec![models()]);
    for variables in [&[][..], &[("TAOTOKEN_API_KEY", " ")]] {
        let said = ping_with(&service.base(), &[], variables);
        said.refused(7, &["variable TAOTOKEN_API_KEY", "is not set", "export it"]);
    }
    let broken = format!("{SENTINEL} and more");
    ping_with(&service.base(), &[], &[("TAOTOKEN_API_KEY", &broken)]).refused(7, &["TAOTOKEN_API_KEY holds a blank"]);
    assert!(service.heard().is_empty());
}

#[test]
fn a_base_address_with_path_or_query_is_refused_with_the_right_one() {
    for (base, clean) in [
        ("http://127.0.0.1:9/api/v1", "endpoint.api_base should be http://127.0.0.1:9/api: the path /v1/messages"),
        (
            "http://127.0.0.1:9/api/?key=sk-sentinel-3141592653",
            "endpoint.api_base should be http://127.0.0.1:9/api: paths",
        ),
    ] {
        let clean = clean.strip_prefix("endpoint.").unwrap();
        ping(base, &[]).refused(2, &["configuration refused", clean]);
    }
    ping("http://127.0.0.1:9", &["--set", "endpoint.endpoints.chat=v1/messages"]).refused(2, &["begins with /"]);
}

#[test]
fn unset_keys_are_named() {
    let said = Room::new().alone(&["ping"]);
    said.refused(2, &["endpoint.api_base is not set"]);
    let variables = &[("TAOTOKEN_API_KEY", SENTINEL), ("LONGSTRAW_ENDPOINT__API_BASE", "http://127.0.0.1:9")];
    let said = Room::new().run(&Call { ranks: 0, program: LONGSTRAW, arguments: &["ping"], variables });
    said.refused(2, &["endpoint.default_model is not set"]);
}

#[test]
fn several_processes_are_refused() {
    let service = Service::of(vec![models()]);
    let key = ("TAOTOKEN_API_KEY", SENTINEL);
    let said = ping_with(&service.base(), &[], &[key, ("SLURM_STEP_NUM_TASKS", "4")]);
    said.refused(2, &["ping is for one process", "SLURM_STEP_NUM_TASKS says that 4"]);
    assert!(service.heard().is_empty());
}
