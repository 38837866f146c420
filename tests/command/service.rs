//! A service on this machine that answers according to a script.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The answer to one connection.
#[derive(Clone, Debug)]
pub(crate) enum Turn {
    /// An answer with this status, headers (each with its line end) and body.
    Say(u16, &'static str, String),
    /// No answer, as long as the client waits.
    Hang,
    /// Only the beginning of an answer.
    Cut,
    /// JSON that is compressed.
    Gzip(&'static [u8]),
    /// Depends on the request.
    By(fn(&str) -> Turn),
}

/// JSON with this status.
pub(crate) fn json(status: u16, body: &str) -> Turn {
    Turn::Say(status, "content-type: application/json\r\n", body.to_owned())
}

/// The list of models.
pub(crate) fn models() -> Turn {
    json(200, r#"{"data": [{"id": "judge-large"}, {"id": "judge-small"}], "has_more": false}"#)
}

/// The reply that judges nothing.
pub(crate) fn reply() -> Turn {
    replied("ready")
}

/// A reply of this text.
pub(crate) fn replied(text: &str) -> Turn {
    json(200, &message(text, "end_turn"))
}

/// The body of a reply.
pub(crate) fn message(text: &str, stop_reason: &str) -> String {
    let content = serde_json::json!([{ "type": "text", "text": text }]);
    let usage = r#"{"input_tokens": 14, "output_tokens": 3}"#;
    format!(r#"{{"content": {content}, "stop_reason": "{stop_reason}", "usage": {usage}}}"#)
}

/// A reply with this text.
pub(crate) fn says(text: &str) -> Turn {
    let value = serde_json::json!({
        "content": [{"type": "text", "text": text}], "stop_reason": "end_turn",
        "usage": {"input_tokens": 100, "output_tokens": 20},
    });
    json(200, &value.to_string())
}

/// A service with one turn for each connection; the last turn repeats.
pub(crate) struct Service {
    port: u16,
    log: Arc<Log>,
}

/// Requests so far.
#[derive(Default)]
struct Log {
    heard: Mutex<Vec<String>>,
    under_way: AtomicUsize,
    under_way_max: AtomicUsize,
}

impl Service {
    pub(crate) fn of(script: Vec<Turn>) -> Service {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let log = Arc::new(Log::default());
        let kept = Arc::clone(&log);
        // The thread ends with the test process.
        std::thread::spawn(move || {
            for (index, stream) in listener.incoming().enumerate() {
                let turn = script[index.min(script.len() - 1)].clone();
                let log = Arc::clone(&kept);
                std::thread::spawn(move || serve(stream.unwrap(), &turn, &log));
            }
        });
        Service { port, log }
    }

    /// The base address.
    pub(crate) fn base(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// All requests so far, headers and body.
    pub(crate) fn heard(&self) -> Vec<String> {
        self.log.heard.lock().unwrap().clone()
    }

    /// Maximum number of concurrent requests.
    pub(crate) fn under_way_max(&self) -> usize {
        self.log.under_way_max.load(Ordering::SeqCst)
    }
}

/// An address without a service.
pub(crate) fn nobody() -> String {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    format!("http://127.0.0.1:{port}")
}

fn serve(mut stream: TcpStream, turn: &Turn, log: &Log) {
    let request = request(&mut stream);
    log.heard.lock().unwrap().push(request.clone());
    let under_way = log.under_way.fetch_add(1, Ordering::SeqCst) + 1;
    log.under_way_max.fetch_max(under_way, Ordering::SeqCst);
    let turn = match turn {
        Turn::By(decide) => &decide(&request),
        turn => turn,
    };
    let answer = match turn {
        Turn::By(_) => panic!("a decision leads to an answer"),
        Turn::Say(status, headers, body) => {
            format!("HTTP/1.1 {status} X\r\n{headers}content-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())
        }
        Turn::Gzip(body) => {
            let head = "content-type: application/json\r\ncontent-encoding: gzip\r\nconnection: close";
            let head = format!("HTTP/1.1 200 OK\r\n{head}\r\ncontent-length: {}\r\n\r\n", body.len());
            log.under_way.fetch_sub(1, Ordering::SeqCst);
            let _ = stream.write_all(&[head.as_bytes(), body].concat());
            return;
        }
        Turn::Hang => {
            let _ = stream.set_read_timeout(Some(Duration::from_secs(30)));
            let _ = stream.read(&mut [0]);
            log.under_way.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        Turn::Cut => {
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{\"data\"".to_owned()
        }
    };
    log.under_way.fetch_sub(1, Ordering::SeqCst);
    let _ = stream.write_all(answer.as_bytes());
}

/// A whole request: the body is as long as its headers say.
fn request(stream: &mut TcpStream) -> String {
    let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length =
                head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length:")?.trim().parse().ok());
            if body.len() >= length.unwrap_or(0) {
                return text;
            }
        }
        match stream.read(&mut part) {
            Ok(count) if count > 0 => bytes.extend_from_slice(&part[..count]),
            _ => return text,
        }
    }
}
