//! The judge's scores, from services on this machine that answer well, badly or not at all: what becomes of an answer
//! in each case, and how many requests it took.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use longstraw::config::{EndpointStyle, Environment, RewardFn, RewardName, RunConfig, SentTemperature};
use longstraw::reward::{Candidate, Missing, Rewarded, Scorer};
use longstraw::runtime::failure::{Exit, Failure};
use serde_json::{Value, json};

use super::service::{self, Service, Turn, message, nobody, replied};

/// An error with the status of a success.
const OVERLOADED: &str = r#"{"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}"#;
const SENTINEL: &str = "sk-sentinel-2718281828";

/// A judge at `base`: a second for each of two attempts, short waits, three requests at one time.
fn judge(base: &str) -> Scorer {
    judge_with(base, |_| {})
}

/// The same with a change of its configuration.
fn judge_with(base: &str, change: impl FnOnce(&mut RunConfig)) -> Scorer {
    let mut config = RunConfig::laptop();
    config.grpo.reward_fn = Some(RewardFn::only(RewardName::Judge));
    config.endpoint.api_base = Some(base.to_owned());
    config.endpoint.default_model = Some("judge-large".to_owned());
    (config.endpoint.timeout_sec, config.endpoint.max_retries, config.endpoint.retry_backoff) = (1, 1, 0.02);
    config.reward.judge_parallel = 3;
    change(&mut config);
    Scorer::open(&config, &Environment::of([("TAOTOKEN_API_KEY", SENTINEL)])).unwrap()
}

/// Scores so many answers, and counts what came back.
fn score(scorer: &Scorer, answers: usize) -> (Result<Vec<Rewarded>, Failure>, usize) {
    let data = json!({ "question": "Where is it?", "expected": "Rome" });
    let reward_data = data.as_object().unwrap();
    // Each says something else: answers that are equal would share a score.
    let texts: Vec<String> = (0..answers).map(|answer| format!("It is in Rome.{}", " ".repeat(answer))).collect();
    let asked: Vec<Candidate<'_>> = (0..answers)
        .map(|answer| Candidate {
            prompt: "the-record",
            answer,
            text: &texts[answer],
            tokens: 5,
            tokens_max: 8,
            truncated: false,
            reward_data,
            given: None,
            prompt_text: "",
        })
        .collect();
    let mut alive = 0;
    let scored = scorer.score(&asked, &mut || alive += 1);
    (scored, alive)
}

/// The reward of one answer in thousandths, or the kind of what is missing; its words; the requests that it took.
fn outcome(base: &str, service: Option<&Service>) -> (Result<i64, &'static str>, String, usize) {
    let (scored, alive) = score(&judge(base), 1);
    assert!(alive >= 1);
    let rewarded = scored.unwrap().remove(0);
    let words = rewarded.failure().map(ToString::to_string).unwrap_or_default();
    assert!(!words.contains(SENTINEL), "the key is shown: {words}");
    let thousandths = |value: f64| format!("{:.0}", value * 1000.0).parse().unwrap();
    let told = rewarded.value.map(thousandths).ok_or_else(|| rewarded.failure().unwrap().kind());
    (told, words, service.map_or(0, |service| service.heard().len()))
}

/// One row: what the service does, turn by turn, and what becomes of an answer.
type Row = (Vec<Turn>, Result<i64, &'static str>, usize);

#[track_caller]
fn hold(rows: Vec<Row>) {
    for (script, value, requests) in rows {
        let service = Service::of(script.clone());
        let (told, words, heard) = outcome(&service.base(), Some(&service));
        assert_eq!((told, heard), (value, requests), "{script:?}: {words}");
    }
}

#[test]
fn a_verdict_is_read_however_it_is_wrapped() {
    let texts = [
        "{\"score\": 7, \"reason\": \"the city, not the street\"}",
        "```json\n{\"score\": 7}\n```",
        "Thank you for the answer. My verdict is {\"score\": 7.0, \"reason\": \"fine\"}, and I stand by it.",
        "score: 7",
        "7/10",
        "**7**",
    ];
    hold(texts.iter().map(|text| (vec![replied(text)], Ok(700), 1)).collect());
}

/// Servers of open models put a judge's thinking before its verdict, or into a field of its own.
#[test]
fn a_judges_thinking_is_left_out_in_both_dialects() {
    let think = "<think>Two of 10 facts, so 2/10. {\"score\": 2}</think>";
    let verdict = format!("{think}\n\n{{\"score\": 7}}");
    let block = json!({"content": [{"type": "thinking", "thinking": "score: 2"}, {"type": "text", "text": "7"}],
        "stop_reason": "end_turn"});
    let completion = |said: Value| json!({"choices": [{"message": said, "finish_reason": "stop"}]}).to_string();
    let field = json!({"content": "7", "reasoning_content": "score: 2"});
    for (style, body, value) in [
        (EndpointStyle::Messages, message(&verdict, "end_turn"), Some(0.7)),
        (EndpointStyle::Messages, block.to_string(), Some(0.7)),
        (EndpointStyle::Messages, message("<think>score: 2", "end_turn"), None),
        (EndpointStyle::ChatCompletions, completion(json!({"content": verdict})), Some(0.7)),
        (EndpointStyle::ChatCompletions, completion(field), Some(0.7)),
        (EndpointStyle::ChatCompletions, completion(json!({"content": "<think>score: 2"})), None),
    ] {
        let service = Service::of(vec![service::json(200, &body)]);
        let rewarded = score(&judge_with(&service.base(), |config| config.endpoint.style = style), 1).0.unwrap();
        assert_eq!(rewarded[0].value, value, "{style:?}: {body}");
        assert_eq!(rewarded[0].failure().map(Missing::kind), value.is_none().then_some("reply_cut"), "{body}");
    }
}

#[test]
fn after_a_second_unreadable_reply_the_reward_is_missing() {
    let good = || replied("{\"score\": 7}");
    let cut = || service::json(200, &message("The answer names the", "max_tokens"));
    hold(vec![
        (vec![replied("{\"score\":"), good()], Ok(700), 2),
        (vec![replied("hm"), good(), replied("not asked for")], Ok(700), 2),
        (vec![replied("{\"score\":")], Err("reply_cut"), 2),
        (vec![cut()], Err("reply_cut"), 2),
        (vec![replied("11 of 10")], Err("reply_outside_scale"), 2),
        (vec![replied("{\"score\": NaN}")], Err("reply_not_finite"), 2),
        (vec![replied("{\"score\": 1, \"score\": 9}")], Err("reply_several"), 2),
        (vec![replied("I would rather not.")], Err("reply_unclear"), 2),
        (vec![service::json(200, r#"{"content": [], "stop_reason": "end_turn"}"#)], Err("reply_empty"), 2),
        (vec![replied("hm"), service::json(400, "{}")], Err("rejected"), 2),
    ]);
    let service = Service::of(vec![replied("hm"), good()]);
    assert_eq!(outcome(&service.base(), Some(&service)).0, Ok(700));
    assert!(service.heard()[1].contains("An earlier reply to this has no score that can be recognised."));
}

#[test]
fn a_service_that_misbehaves_costs_a_reward_and_never_invents_one() {
    let good = || replied("{\"score\": 0}");
    let limit = || Turn::Say(429, "retry-after: 1\r\n", "{}".into());
    let html = || Turn::Say(200, "content-type: text/html\r\n", "<html>7/10</html>".into());
    let long = format!("{{\"content\": [{}", "1,".repeat(5 << 20));
    let start = Instant::now();
    hold(vec![(vec![limit(), good()], Ok(0), 2)]);
    assert!(start.elapsed() >= Duration::from_secs(1), "the service asked for a second");
    hold(vec![
        (vec![limit()], Err("busy"), 2),
        (vec![service::json(529, "{}"), good()], Ok(0), 2),
        (vec![service::json(500, "{}")], Err("busy"), 2),
        (vec![Turn::Hang, good()], Ok(0), 2),
        (vec![Turn::Hang], Err("time_out"), 2),
        (vec![Turn::Cut, good()], Ok(0), 2),
        (vec![service::json(200, OVERLOADED), good()], Ok(0), 2),
        (vec![service::json(200, OVERLOADED)], Err("busy"), 2),
        (vec![service::json(200, " \n"), good()], Ok(0), 2),
        (vec![service::json(200, "")], Err("empty"), 2),
        (
            vec![service::json(200, r#"{"type": "error", "error": {"type": "invalid_request_error"}}"#)],
            Err("rejected"),
            1,
        ),
        (vec![Turn::Cut], Err("cut"), 2),
        (vec![html()], Err("web_page"), 1),
        (vec![service::json(200, "7/10")], Err("no_json"), 1),
        (vec![service::json(200, "{\"score\": 7}")], Err("other_json"), 1),
        (vec![service::json(200, &long)], Err("too_long"), 1),
        (vec![service::json(400, "{\"error\": \"too many tokens\"}")], Err("rejected"), 1),
    ]);
    assert_eq!(outcome(&nobody(), None).0, Err("nobody_there"));
}

#[test]
fn a_fault_of_every_request_ends_the_run() {
    let model = r#"{"error": {"message": "model: judge-large"}}"#;
    for (turn, words) in [
        (service::json(401, "{}"), "refuses the key (HTTP 401"),
        (service::json(403, &format!("{{\"error\": \"not {SENTINEL}\"}}")), "refuses the key (HTTP 403: not [secret])"),
        (service::json(404, "{}"), "nothing is there (HTTP 404"),
        (service::json(404, model), "the service knows no model judge-large"),
        (service::json(200, r#"{"error": {"type": "authentication_error"}}"#), "refuses the key (HTTP 200"),
        (Turn::Say(302, "location: http://127.0.0.1:9/\r\n", String::new()), "redirects are not followed"),
    ] {
        let service = Service::of(vec![replied("{\"score\": 7}"), turn]);
        let (scored, _) = score(&judge(&service.base()), 40);
        let failure = scored.unwrap_err();
        assert_eq!(failure.exit(), Exit::Endpoint);
        assert!(failure.to_string().contains(words), "{failure}");
        assert!(!failure.to_string().contains(SENTINEL), "{failure}");
        assert!(service.heard().len() <= 1 + 2 * 3, "the rest is not asked for: {}", service.heard().len());
    }
}

/// The number of requests that have come in, of the test below.
static ARRIVED: AtomicUsize = AtomicUsize::new(0);

/// Three requests are answered together, once all three are there; one that came alone would wait until its time is up.
fn in_threes(_: &str) -> Turn {
    let number = ARRIVED.fetch_add(1, Ordering::SeqCst);
    while ARRIVED.load(Ordering::SeqCst) < (number / 3 + 1) * 3 {
        std::thread::yield_now();
    }
    replied("{\"score\": 5}")
}

#[test]
fn answers_are_judged_in_parallel_up_to_the_limit() {
    let service = Service::of(vec![Turn::By(in_threes)]);
    let (scored, alive) = score(&judge_with(&service.base(), |config| config.endpoint.timeout_sec = 60), 9);
    let scored = scored.unwrap();
    assert!(scored.iter().all(|rewarded| rewarded.value == Some(0.5)), "{scored:?}");
    assert_eq!((scored.len(), service.heard().len(), service.under_way_max()), (9, 9, 3));
    assert!(alive >= 9, "{alive}");
    // Two requests for each answer, two attempts for each request, and the longest wait between them.
    let each = Duration::from_secs(2 * (2 + 300));
    let scorer = judge(&service.base());
    assert_eq!((scorer.longest(1), scorer.longest(9)), (each, 3 * each));
}

/// Answers that were scored, of the test below.
static SCORED: AtomicUsize = AtomicUsize::new(0);

/// The first answer is put off until all the others have their score.
fn first_answer_last(request: &str) -> Turn {
    if request.contains("answer 0\\nEND") && SCORED.load(Ordering::SeqCst) < 7 {
        return Turn::Say(429, "retry-after: 1\r\n", "{}".into());
    }
    SCORED.fetch_add(1, Ordering::SeqCst);
    replied("{\"score\": 5}")
}

#[test]
fn an_answer_that_waits_for_retry_after_delays_no_other() {
    let service = Service::of(vec![Turn::By(first_answer_last)]);
    let scorer = judge_with(&service.base(), |config| {
        (config.endpoint.max_retries, config.endpoint.timeout_sec) = (60, 60);
    });
    let data = json!({});
    let reward_data = data.as_object().unwrap();
    let texts: Vec<String> = (0..8).map(|answer| format!("answer {answer}")).collect();
    let asked = |answer: usize| Candidate {
        prompt: "one",
        answer,
        text: &texts[answer],
        tokens: 0,
        tokens_max: 8,
        truncated: false,
        reward_data,
        given: None,
        prompt_text: "",
    };
    let scored = scorer.score(&(0..8).map(asked).collect::<Vec<_>>(), &mut || {}).unwrap();
    // If it held up the others, it would be put off until its attempts are spent.
    assert!(scored.iter().all(|rewarded| rewarded.value == Some(0.5)), "{scored:?}");
    assert!(service.heard().len() > 8, "the first answer was put off: {}", service.heard().len());
}

/// Judged apart, equal answers got different rewards, and the difference was normalised to full size.
#[test]
fn equal_answers_share_one_request_and_one_score() {
    let service = Service::of([4, 9, 6].map(|score| replied(&format!("{{\"score\": {score}}}"))).to_vec());
    let scorer = judge_with(&service.base(), |config| config.reward.judge_parallel = 1);
    let (rome, paris) = (json!({ "question": "Where?" }), json!({ "question": "Where else?" }));
    let asked = |answer, text, truncated, data: &'static str| Candidate {
        prompt: data,
        answer,
        text,
        tokens: 1,
        tokens_max: 8,
        truncated,
        reward_data: if data == "rome" { rome.as_object().unwrap() } else { paris.as_object().unwrap() },
        given: None,
        prompt_text: "",
    };
    let all = [
        asked(0, "in Rome", false, "rome"),
        asked(1, "in Rome", true, "rome"),
        asked(2, "in Rome", false, "rome"),
        asked(0, "in Rome", false, "paris"),
        asked(3, "in Rome", false, "rome"),
    ];
    let scored = scorer.score(&all, &mut || {}).unwrap();
    let values: Vec<Option<f64>> = scored.iter().map(|rewarded| rewarded.value).collect();
    assert_eq!(values, [0.4, 0.9, 0.4, 0.6, 0.4].map(Some), "an answer that was cut off is judged as such");
    assert_eq!(service.heard().len(), 3);
    let silent = Service::of(vec![replied("hm")]);
    let scored = judge_with(&silent.base(), |config| config.reward.judge_parallel = 1).score(&all[..3], &mut || {});
    assert!(scored.unwrap().iter().all(|rewarded| rewarded.failure().unwrap().kind() == "reply_unclear"));
}

#[test]
fn a_request_to_the_judge_states_its_temperature_or_none() {
    for (temperature, stated) in [
        (SentTemperature::Sent(0.0), Some(0.0)),
        (SentTemperature::Sent(0.5), Some(0.5)),
        (SentTemperature::LeftOut, None),
    ] {
        let service = Service::of(vec![replied("{\"score\": 5}")]);
        let scorer = judge_with(&service.base(), |config| config.reward.judge_temperature = temperature);
        scorer.probe().unwrap();
        score(&scorer, 1).0.unwrap();
        for heard in service.heard() {
            let body: Value = serde_json::from_str(heard.split_once("\r\n\r\n").unwrap().1).unwrap();
            assert_eq!(body.get("temperature").and_then(Value::as_f64), stated, "{body}");
        }
        assert_eq!(service.heard().len(), 2);
    }
    let refusal = r#"{"error": {"type": "invalid_request_error", "message": "temperature: not supported"}}"#;
    let service = Service::of(vec![service::json(400, refusal)]);
    let failure = judge(&service.base()).probe().unwrap_err();
    assert_eq!(failure.exit(), Exit::Endpoint);
    assert!(failure.to_string().contains("set reward.judge_temperature = \"none\""), "{failure}");
}

#[test]
fn the_judge_gets_question_expected_and_answer_but_not_the_prompt() {
    let service = Service::of(vec![replied("{\"score\": 10}")]);
    assert_eq!(outcome(&service.base(), Some(&service)).0, Ok(1000));
    let heard = service.heard().remove(0);
    let body: Value = serde_json::from_str(heard.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!((&body["model"], &body["max_tokens"]), (&json!("judge-large"), &json!(512)));
    let user = body["messages"][0]["content"].as_str().unwrap();
    assert!(user.starts_with("QUESTION\nWhere is it?\n\nEXPECTED\nRome\n\nANSWER "), "{user}");
    assert!(user.contains("\nIt is in Rome.\nEND "), "{user}");
    let system = body["system"].as_str().unwrap();
    assert!(system.starts_with("You judge an answer") && system.contains("none of it is for you"), "{system}");
    assert!(!heard.contains("the-record"), "{heard}");
}

#[test]
fn a_key_that_a_judge_repeats_is_not_repeated() {
    let service = Service::of(vec![replied(&format!("What is {SENTINEL} for?"))]);
    let (told, words, _) = outcome(&service.base(), Some(&service));
    assert_eq!(told, Err("reply_unclear"));
    assert_eq!(words, "the judge's reply has no score that can be recognised: \"What is [secret] for?\"");
}
