//! A service that speaks chat completions, in every way of failing that one that speaks messages has (`ping`).

use serde_json::{Value, json};

use super::room::{Call, LONGSTRAW, Room, Said};
use super::service::{Service, Turn, json as answer, models, reply};

const KEY: &str = "sk-sentinel-2718281828";

fn ping(base: &str, more: &[&str]) -> Said {
    let room = Room::with(&[(
        "settings.json",
        &json!({"style": "chat_completions", "api_base": base, "default_model": "judge-large", "timeout_sec": 1,
            "max_retries": 1, "retry_backoff": 0.02})
        .to_string(),
    )]);
    let arguments: Vec<&str> = ["ping"].iter().chain(more).copied().collect();
    let variables = [("TAOTOKEN_API_KEY", KEY)];
    let said = room.run(&Call { ranks: 0, program: LONGSTRAW, arguments: &arguments, variables: &variables });
    assert!(!format!("{said}").contains(KEY), "the key is shown:\n{said}");
    said
}

fn completion(content: &Value) -> Turn {
    let body = json!({"object": "chat.completion", "choices": [{"index": 0, "message": {"role": "assistant",
        "content": content}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 14, "completion_tokens": 3}});
    answer(200, &body.to_string())
}

#[test]
fn chat_completions_are_asked_with_a_bearer_token_and_counted_in_tokens() {
    let service = Service::of(vec![models(), completion(&json!("ready"))]);
    let said = ping(&service.base(), &["--json"]);
    said.ended(0, &[]);
    let told = said.json();
    assert_eq!((&told["input_tokens"], &told["output_tokens"]), (&json!(14), &json!(3)), "{said}");
    let [list, message] = service.heard().try_into().unwrap();
    let (list, message): (String, String) = (list, message);
    assert!(list.starts_with("GET /v1/models HTTP/1.1"), "{list}");
    assert!(message.starts_with("POST /v1/chat/completions HTTP/1.1"), "{message}");
    for request in [list.to_lowercase(), message.to_lowercase()] {
        assert!(request.contains(&format!("authorization: bearer {KEY}")), "{request}");
        assert!(!request.contains("x-api-key") && !request.contains("anthropic-version"), "{request}");
    }
}

#[test]
fn every_misbehaviour_is_told_as_it_is_of_messages() {
    let say = |status: u16, body: &Value| answer(status, &body.to_string());
    let ready = || completion(&json!("ready"));
    let error =
        |kind: &str, words: &str| json!({"error": {"message": words, "type": kind, "param": null, "code": null}});
    let page = Turn::Say(200, "content-type: text/html\r\n", "<html>Welcome</html>".into());
    let moved = Turn::Say(302, "location: https://elsewhere.example.com/\r\n", String::new());
    // The script after the list of models, the exit code, requests in all, and words.
    let table: Vec<(&str, Vec<Turn>, i32, usize, &str)> = vec![
        ("a rate limit", vec![say(429, &error("rate_limit_error", "slow down")), ready()], 0, 3, ""),
        ("overload", vec![say(503, &error("server_error", "busy"))], 7, 3, "busy"),
        ("no reply in time", vec![Turn::Hang], 7, 3, "2 attempts"),
        ("half an answer", vec![Turn::Cut, ready()], 0, 3, ""),
        ("an empty answer", vec![answer(200, ""), ready()], 0, 3, ""),
        ("an error with status 200", vec![say(200, &error("overloaded_error", "so"))], 7, 3, "overloaded"),
        ("a refused key", vec![say(401, &error("invalid_api_key", "no such key"))], 7, 2, "refuses the key"),
        (
            "no such model",
            vec![say(404, &error("invalid_request_error", "the model judge-large does not exist"))],
            7,
            2,
            "knows no model judge-large",
        ),
        ("a rejected request", vec![say(400, &error("invalid_request_error", "max_tokens"))], 7, 2, "max_tokens"),
        ("a web page", vec![page], 7, 2, "a web page (HTML)"),
        ("another address", vec![moved], 7, 2, "elsewhere.example.com"),
        ("no choice", vec![say(200, &json!({"choices": []}))], 7, 2, "no chat completion"),
        ("the other interface", vec![reply()], 7, 2, "no chat completion"),
        ("no JSON", vec![answer(200, "ready")], 7, 2, "ready"),
    ];
    for (name, script, code, requests, words) in table {
        let service = Service::of([vec![models()], script].concat());
        let said = ping(&service.base(), &[]);
        assert_eq!(said.code, code, "{name}: {said}");
        assert!(format!("{said}").contains(words), "{name}: no {words:?} in {said}");
        assert_eq!(service.heard().len(), requests, "{name}: {said}");
    }
}

#[test]
fn a_path_of_the_other_interface_and_a_public_address_in_clear_are_refused() {
    let set = |value: &'static str| ping("http://127.0.0.1:9", &["--set", value]);
    set("endpoint.endpoints.chat=/v1/messages").refused(2, &["that path is of another interface than endpoint.style"]);
    set("endpoint.style=completions").refused(2, &["endpoint.style", "chat_completions"]);
    ping("http://10.255.255.1:9", &[]).refused(2, &["endpoint.allow_http = true permits it for a private address"]);
    let allow = ["--set", "endpoint.allow_http=true"];
    ping("http://a.example.com", &allow).refused(2, &["http:// is for a service on this machine"]);
    // Permitted, and nobody is there.
    let said = ping("http://no-such-host-of-longstraw:9", &allow);
    assert_eq!(said.code, 7, "{said}");
}
