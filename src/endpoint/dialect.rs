//! The two interfaces that services of models speak: how a message is written, and how its reply is read.
//!
//! | `endpoint.style` | key in | body | text of the reply |
//! |---|---|---|---|
//! | `messages` | `x-api-key` | `system` beside `messages` | `content[].text` |
//! | `chat_completions` | `authorization: Bearer` | the system prompt as the first of `messages` | `choices[0].message.content` |

use serde::Deserialize;
use serde_json::{Value, json};
use ureq::http::{HeaderName, HeaderValue, header};

use super::{Message, Reply};
use crate::config::{EndpointStyle, Secret};

/// Value of the header `anthropic-version`.
const INTERFACE_VERSION: &str = "2023-06-01";

/// The headers of every request; the one with the key is marked as sensitive. `None` where the key cannot be a header.
pub(super) fn headers(style: EndpointStyle, key: &Secret) -> Option<Vec<(HeaderName, HeaderValue)>> {
    let (name, value) = match style {
        EndpointStyle::Messages => (HeaderName::from_static("x-api-key"), key.expose().to_owned()),
        EndpointStyle::ChatCompletions => (header::AUTHORIZATION, format!("Bearer {}", key.expose())),
    };
    let mut value = HeaderValue::from_str(&value).ok()?;
    value.set_sensitive(true);
    let mut headers = vec![(name, value), (header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    if style == EndpointStyle::Messages {
        let version = HeaderName::from_static("anthropic-version");
        headers.push((version, HeaderValue::from_static(INTERFACE_VERSION)));
    }
    Some(headers)
}

/// A message as the service takes it.
pub(super) fn body(style: EndpointStyle, message: &Message) -> Value {
    let Message { model, max_tokens, temperature, system, user } = *message;
    let said = |role: &str, content: &str| json!({ "role": role, "content": content });
    let mut messages = vec![said("user", user)];
    if let (EndpointStyle::ChatCompletions, Some(system)) = (style, system) {
        messages.insert(0, said("system", system));
    }
    let mut body = json!({ "model": model, "max_tokens": max_tokens, "messages": messages });
    if let Some(temperature) = temperature {
        body["temperature"] = temperature.into();
    }
    if let (EndpointStyle::Messages, Some(system)) = (style, system) {
        body["system"] = system.into();
    }
    body
}

/// What a reply must look like, for messages.
pub(super) fn wanted(style: EndpointStyle) -> &'static str {
    match style {
        EndpointStyle::Messages => "no message, `content` with a `text`",
        EndpointStyle::ChatCompletions => "no chat completion, `choices` with a `message` and its `content`",
    }
}

/// A reply as a service sends it, in either form.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Sent {
    /// Only text blocks have a text.
    Message {
        content: Vec<Block>,
        stop_reason: Option<String>,
        usage: Option<Value>,
    },
    Completion {
        choices: Vec<Choice>,
        usage: Option<Value>,
    },
}

#[derive(Deserialize)]
pub(super) struct Block {
    text: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct Choice {
    message: Said,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Said {
    /// Null where the model has said nothing.
    content: Option<Content>,
}

/// A text, or parts of which some have a text.
#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Block>),
}

/// Tokens that a service counts, under the name of either interface. Whatever stands there, the reply is a reply.
fn tokens(usage: Option<&Value>, names: [&str; 2]) -> Option<u64> {
    let usage = usage?;
    names.iter().find_map(|name| usage.get(name)?.as_u64())
}

/// The reply of the form that `style` has; `None` for the other form, and where there is no choice.
pub(super) fn reply(style: EndpointStyle, sent: Sent) -> Option<Reply> {
    let texts = |blocks: Vec<Block>| blocks.into_iter().filter_map(|block| block.text).collect::<String>();
    let (text, stop_reason, usage) = match (style, sent) {
        (EndpointStyle::Messages, Sent::Message { content, stop_reason, usage }) => {
            (texts(content), stop_reason, usage)
        }
        (EndpointStyle::ChatCompletions, Sent::Completion { choices, usage }) => {
            let Choice { message, finish_reason } = choices.into_iter().next()?;
            let text = match message.content {
                Some(Content::Text(text)) => text,
                Some(Content::Parts(parts)) => texts(parts),
                None => String::new(),
            };
            // One name for each reason, whatever the interface.
            let reason = finish_reason.map(|reason| match reason.as_str() {
                "length" => "max_tokens".to_owned(),
                "stop" => "end_turn".to_owned(),
                _ => reason,
            });
            (text, reason, usage)
        }
        _ => return None,
    };
    let input_tokens = tokens(usage.as_ref(), ["input_tokens", "prompt_tokens"]);
    let output_tokens = tokens(usage.as_ref(), ["output_tokens", "completion_tokens"]);
    Some(Reply { text, stop_reason, input_tokens, output_tokens })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Environment;

    const MESSAGE: Message =
        Message { model: "m", max_tokens: 7, temperature: Some(0.5), system: Some("be"), user: "hi" };

    fn read(style: EndpointStyle, sent: Value) -> Option<Reply> {
        serde_json::from_value(sent).ok().and_then(|sent| reply(style, sent))
    }

    #[test]
    fn the_system_prompt_stands_where_each_interface_has_it() {
        let messages = body(EndpointStyle::Messages, &MESSAGE);
        assert_eq!(messages["system"], "be");
        assert_eq!(messages["messages"], json!([{"role": "user", "content": "hi"}]));
        let chat = body(EndpointStyle::ChatCompletions, &MESSAGE);
        assert_eq!(chat["messages"][0], json!({"role": "system", "content": "be"}));
        assert_eq!((&chat["messages"][1]["content"], &chat["system"]), (&json!("hi"), &Value::Null));
        let plain = Message { temperature: None, system: None, ..MESSAGE };
        for style in [EndpointStyle::Messages, EndpointStyle::ChatCompletions] {
            let body = body(style, &plain);
            assert_eq!(body.as_object().map(serde_json::Map::len), Some(3), "{body}");
        }
    }

    #[test]
    fn a_reply_of_either_interface_is_read_and_that_of_the_other_is_not() {
        let message = json!({"content": [{"type": "text", "text": "a"}, {"type": "other"}, {"type": "text", "text": "b"}],
            "stop_reason": "max_tokens", "usage": {"input_tokens": 3, "output_tokens": 2}});
        let chat = json!({"choices": [{"index": 0, "message": {"role": "assistant", "content": "ab"},
            "finish_reason": "length"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}});
        let wanted = Reply {
            text: "ab".into(),
            stop_reason: Some("max_tokens".into()),
            input_tokens: Some(3),
            output_tokens: Some(2),
        };
        assert_eq!(read(EndpointStyle::Messages, message.clone()).as_ref(), Some(&wanted));
        assert_eq!(read(EndpointStyle::ChatCompletions, chat.clone()).as_ref(), Some(&wanted));
        assert_eq!(read(EndpointStyle::Messages, chat), None);
        assert_eq!(read(EndpointStyle::ChatCompletions, message), None);
    }

    #[test]
    fn no_count_of_tokens_makes_a_reply_unreadable() {
        for (usage, wanted) in [
            (json!({"prompt_tokens": 3, "input_tokens": 3, "completion_tokens": 2, "output_tokens": 2}), Some(3)),
            (json!({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}), Some(3)),
            (json!({"prompt_tokens": -1}), None),
            (json!("many"), None),
            (Value::Null, None),
        ] {
            let sent = json!({"choices": [{"message": {"content": "x"}}], "usage": usage});
            let reply = read(EndpointStyle::ChatCompletions, sent).unwrap();
            assert_eq!((reply.text.as_str(), reply.input_tokens), ("x", wanted), "{usage}");
        }
    }

    #[test]
    fn an_empty_completion_is_an_empty_text_and_none_is_no_reply() {
        let of = |choices: Value| read(EndpointStyle::ChatCompletions, json!({ "choices": choices }));
        assert_eq!(
            of(json!([{"message": {"content": null}, "finish_reason": "stop"}])).map(|reply| reply.text),
            Some(String::new())
        );
        let parts = json!([{"message": {"content": [{"type": "text", "text": "x"}, {"type": "image"}]}}]);
        assert_eq!(of(parts).map(|reply| reply.text), Some("x".into()));
        assert_eq!(of(json!([])), None);
    }

    #[test]
    fn the_key_is_in_one_header_and_marked() {
        let secret = |text: &str| Environment::of([("https_proxy", text)]).proxy("https://a").unwrap().address;
        for style in [EndpointStyle::Messages, EndpointStyle::ChatCompletions] {
            let headers = headers(style, &secret("open-sesame")).unwrap();
            let has_key = |value: &HeaderValue| value.to_str().unwrap().contains("sesame");
            let with_key: Vec<_> = headers.iter().filter(|(_, value)| has_key(value)).collect();
            assert!(matches!(&with_key[..], [(_, value)] if value.is_sensitive()));
            assert!(super::headers(style, &secret("a\nb")).is_none());
        }
    }
}
