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
fn each_model_that_judges_name_gets_a_message_with_their_temperature() {
    let judged = |temperature: &str, script: Vec<Turn>| {
        let service = Service::of(script);
        let sets = [
            r#"grpo.reward_fn=[{name="judge",weight=1.0},{name="judge:small",weight=1.0}]"#,
            r#"reward.judges={small={model="judge-small"}}"#,
            temperature,
            "endpoint.usage.reward_scoring=true",
            "rollout.sample=true",
            "data.path=train.jsonl",
        ];
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
        (ping(&service.base(), &sets), service.heard())
    };
    let (said, heard) = judged("reward.judge_temperature=0", vec![models(), reply(), reply()]);
    said.ended(0, &[]);
    for words in
        ["models judge-large, judge-small", "judge-small is among them", "judge_answered", "judge-small: 14 tokens"]
    {
        assert!(said.out.contains(words), "{words}: {said}");
    }
    assert_eq!(heard.len(), 3);
    for (request, model) in heard[1..].iter().zip(["judge-large", "judge-small"]) {
        assert!(request.contains(&format!(r#""model":"{model}""#)), "{request}");
        assert!(request.contains(r#""temperature":0"#), "{request}");
    }
    let (_, heard) = judged("reward.judge_temperature=none", vec![models(), reply(), reply()]);
    assert!(heard.iter().all(|request| !request.contains("temperature")), "{heard:?}");
    // What is wrong with the first model does not hide the second, and a temperature that is refused names its key.
    let refused = || json(400, r#"{"error": {"message": "temperature is not supported"}}"#);
    let (said, heard) = judged("reward.judge_temperature=0", vec![models(), refused(), reply()]);
    said.refused(7, &["reward.judge_temperature = \"none\""]);
    assert!(
        heard.len() == 3 && said.out.contains("FAIL  message_answered") && said.out.contains("ok    judge_answered"),
        "{said}"
    );
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
    assert!(start.elapsed().as_secs_f64() >= 3.0, "three attempts of a second: {:?}", start.elapsed());
}

#[test]
fn an_incomplete_answer_is_requested_again() {
    let (said, heard) = answered(vec![Turn::Cut, models(), Turn::Cut, reply()]);
    said.ended(0, &[]);
    assert_eq!(heard.len(), 4);
    answered(vec![Turn::Cut]).0.refused(7, &["the connection broke before the answer was whole", "3 attempts"]);
}

#[test]
fn an_error_in_a_success_counts_as_its_type_says() {
    let error =
        |kind: &str| json(200, &format!(r#"{{"type": "error", "error": {{"type": "{kind}", "message": "so"}}}}"#));
    for kind in ["overloaded_error", "rate_limit_error", "api_error", "an_error_that_nobody_has_documented"] {
        let (said, heard) = answered(vec![error(kind), models(), error(kind), reply()]);
        said.ended(0, &[]);
        assert_eq!(heard.len(), 4, "{kind}");
    }
    for (kind, words) in [
        ("authentication_error", "refuses the key (HTTP 200: so)"),
        ("permission_error", "refuses the key (HTTP 200: so)"),
        ("invalid_request_error", "rejects the request (HTTP 200: so)"),
    ] {
        let (said, heard) = answered(vec![models(), error(kind)]);
        said.refused(7, &[words]);
        assert_eq!(heard.len(), 2, "{kind}: no further attempt would change it");
    }
    let (said, _) = answered(vec![models(), json(200, r#"{"error": {"type": "overloaded_error", "message": "so"}}"#)]);
    said.refused(7, &["overloaded or out of order (HTTP 200: so)", "3 attempts"]);
}

#[test]
fn an_empty_success_is_requested_again() {
    let (said, heard) = answered(vec![json(200, ""), models(), json(200, " \r\n"), reply()]);
    said.ended(0, &[]);
    assert_eq!(heard.len(), 4);
    answered(vec![json(200, "")]).0.refused(7, &["the answer is empty (HTTP 200)", "3 attempts"]);
}

/// `{"data": [{"id": "judge-large"}], "has_more": false}`, by gzip.
const MODELS_GZIP: &[u8] = &[
    0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0xff, 0xab, 0x56, 0x4a, 0x49, 0x2c, 0x49, 0x54, 0xb2, 0x52,
    0x88, 0xae, 0x56, 0xca, 0x4c, 0x01, 0xd2, 0x4a, 0x59, 0xa5, 0x29, 0xe9, 0xa9, 0xba, 0x39, 0x89, 0x45, 0xe9, 0xa9,
    0x4a, 0xb5, 0xb1, 0x3a, 0x0a, 0x4a, 0x19, 0x89, 0xc5, 0xf1, 0xb9, 0xf9, 0x45, 0xa9, 0x40, 0xc9, 0xb4, 0xc4, 0x9c,
    0xe2, 0xd4, 0x5a, 0x00, 0x2b, 0x73, 0x79, 0x14, 0x34, 0x00, 0x00, 0x00,
];
/// `{"content": [{"type": "text", "text": "ready"}], "stop_reason": "end_turn"}`, by gzip.
const REPLY_GZIP: &[u8] = &[
    0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0xff, 0xab, 0x56, 0x4a, 0xce, 0xcf, 0x2b, 0x49, 0xcd, 0x2b,
    0x51, 0xb2, 0x52, 0x88, 0xae, 0x56, 0x2a, 0xa9, 0x2c, 0x48, 0x05, 0xb2, 0x94, 0x4a, 0x52, 0x2b, 0x4a, 0x94, 0x74,
    0xa0, 0x34, 0x90, 0x5f, 0x94, 0x9a, 0x98, 0x52, 0xa9, 0x54, 0x1b, 0x0b, 0x14, 0x2a, 0x2e, 0xc9, 0x2f, 0x88, 0x07,
    0xf2, 0x8b, 0xf3, 0xf3, 0x40, 0x32, 0xa9, 0x79, 0x29, 0xf1, 0x25, 0xa5, 0x45, 0x79, 0x4a, 0xb5, 0x00, 0xa0, 0x1e,
    0xc4, 0x53, 0x4b, 0x00, 0x00, 0x00,
];

#[test]
fn a_compressed_answer_is_read_and_half_of_one_is_requested_again() {
    let half = Turn::Gzip(&REPLY_GZIP[..40]);
    let (said, heard) = answered(vec![Turn::Gzip(MODELS_GZIP), half, Turn::Gzip(REPLY_GZIP)]);
    said.ended(0, &[]);
    assert!(said.out.contains("1 listed"), "{said}");
    assert_eq!(heard.len(), 3);
    assert!(heard.iter().all(|request| request.to_lowercase().contains("accept-encoding: gzip")), "{heard:?}");
}

/// The service got the blame, and its address.
#[test]
fn a_proxy_that_is_not_there_is_named_and_not_the_service() {
    let proxy = nobody();
    let host = proxy.strip_prefix("http://").unwrap();
    let variables = [("TAOTOKEN_API_KEY", SENTINEL), ("HTTPS_PROXY", proxy.as_str())];
    let said = ping_with("https://service.example", &[], &variables);
    said.refused(7, &[&format!("the proxy {host}, which the variables HTTPS_PROXY"), "NO_PROXY", "3 attempts"]);
    assert!(!said.err.contains("most likely endpoint.api_base"), "{said}");
    let secret = format!("http://me:{SENTINEL}@{host}");
    let variables = [("TAOTOKEN_API_KEY", SENTINEL), ("HTTPS_PROXY", secret.as_str())];
    ping_with("https://service.example", &[], &variables).refused(7, &[&format!("the proxy {host}, ")]);
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
        ("http://127.0.0.1:9/v1/messages", "endpoint.api_base should be http://127.0.0.1:9: the path /v1/messages"),
        ("https://a.example/v1/models/", "endpoint.api_base should be https://a.example: the path /v1/models"),
        ("localhost:8000", "endpoint.api_base should be http://localhost:8000: it has no scheme"),
        ("api.example.com", "endpoint.api_base should be an address that begins with https://"),
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
