//! How a request can fail, and what to check then.

use std::fmt;
use std::time::Duration;

use serde_json::Value;

use crate::runtime::failure::{Classified, Exit};

/// What was wrong with the last attempt of a request. `said` is the service's, the system's or the client's own
/// message.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each variant and field is")]
pub enum Fault {
    #[error(
        "the service refuses the key (HTTP {status}{said}): check that the variable {variable} holds the complete, valid \
         key of this service"
    )]
    KeyRefused { status: u16, variable: String, said: String },
    #[error("nothing is there (HTTP {status}{said})")]
    NotFound { status: u16, said: String },
    #[error("the service knows no model {model} (HTTP {status}{said}): correct endpoint.default_model")]
    NoModel { status: u16, model: String, said: String },
    /// Another status that a further attempt would not change.
    #[error("the service rejects the request (HTTP {status}{said})")]
    Rejected { status: u16, said: String },
    /// The service redirects.
    #[error(
        "the service redirects to {target} (HTTP {status}); redirects are not followed, since they would receive the key: \
         if that address is right, set endpoint.api_base to it"
    )]
    Redirect { status: u16, target: String },
    /// The service is overloaded, limits requests, or has an error of its own.
    #[error("the service is overloaded or out of order (HTTP {status}{said})")]
    Busy { status: u16, said: String, wait: Option<Duration> },
    #[error("the answer is a web page (HTML) and not JSON")]
    WebPage,
    /// A success without a body.
    #[error("the answer is empty (HTTP {status})")]
    Empty { status: u16 },
    #[error("the answer is not JSON{said}")]
    NoJson { said: String },
    #[error("the answer is {wanted}{said}")]
    OtherJson { wanted: &'static str, said: String },
    #[error("the answer is longer than {bytes_max} bytes")]
    TooLong { bytes_max: u64 },
    #[error("the host is not known ({said})")]
    UnknownHost { said: String },
    #[error("the connection is refused: no service listens there")]
    ConnectionRefused,
    #[error("no answer within {seconds} s (endpoint.timeout_sec)")]
    Timeout { seconds: u64 },
    /// The caller's own deadline has passed.
    #[error("no answer within the {seconds:.0} s that the caller waits")]
    Late { seconds: f64 },
    #[error("the connection broke before the answer was whole ({said})")]
    ConnectionBroken { said: String },
    #[error(
        "no encrypted connection is possible ({said}): check https:// or http:// in endpoint.api_base, the clock of this \
         machine, and whether something on the way to the service replaces certificates"
    )]
    Encryption { said: String },
    #[error("the address is not valid ({said})")]
    Address { said: String },
    #[error("the proxy that the variables HTTPS_PROXY, ALL_PROXY or HTTP_PROXY name cannot be used ({said})")]
    Proxy { said: String },
    /// The proxy does not answer; nothing is known of the service.
    #[error(
        "the proxy {proxy}, which the variables HTTPS_PROXY, ALL_PROXY or HTTP_PROXY name, cannot be reached ({said}): start it, \
         correct the variable, or list the service's host in NO_PROXY"
    )]
    ProxyDown { proxy: String, said: String },
}

/// The type of the error that an answer holds, whatever its status says; empty where the error has none. `None`: it holds no
/// error.
pub(super) fn error_type(value: &Value) -> Option<&str> {
    let error = value.get("error").filter(|error| error.is_object() || error.is_string());
    let is_error = error.is_some() || value.get("type").and_then(Value::as_str) == Some("error");
    is_error.then(|| error.and_then(|error| error.get("type")?.as_str()).unwrap_or_default())
}

impl Fault {
    /// The fault of an error of this type in an answer whose status is a success. `said` and `wait` are the service's,
    /// `variable` is that of the key. A type that nobody has documented may pass.
    pub(super) fn of_error(kind: &str, status: u16, said: String, wait: Option<Duration>, variable: &str) -> Fault {
        match kind {
            "authentication_error" | "permission_error" => {
                Fault::KeyRefused { status, variable: variable.to_owned(), said }
            }
            "not_found_error" => Fault::NotFound { status, said },
            "invalid_request_error" | "request_too_large" | "billing_error" => Fault::Rejected { status, said },
            _ => Fault::Busy { status, said, wait },
        }
    }

    /// Whether another attempt may succeed.
    pub(super) fn is_transient(&self) -> bool {
        matches!(
            self,
            Fault::Busy { .. }
                | Fault::UnknownHost { .. }
                | Fault::ConnectionRefused
                | Fault::Timeout { .. }
                | Fault::ConnectionBroken { .. }
                | Fault::Empty { .. }
                | Fault::ProxyDown { .. }
        )
    }

    /// Whether every further request would fail in the same way: the key, the model, the address or the proxy is wrong.
    #[must_use]
    pub fn affects_every_request(&self) -> bool {
        matches!(
            self,
            Fault::KeyRefused { .. }
                | Fault::NotFound { .. }
                | Fault::NoModel { .. }
                | Fault::Redirect { .. }
                | Fault::Address { .. }
                | Fault::Proxy { .. }
        )
    }

    /// One word, under which faults are counted.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Fault::KeyRefused { .. } => "key_refused",
            Fault::NotFound { .. } => "not_there",
            Fault::NoModel { .. } => "no_model",
            Fault::Rejected { .. } => "rejected",
            Fault::Redirect { .. } => "redirect",
            Fault::Busy { .. } => "busy",
            Fault::WebPage => "web_page",
            Fault::Empty { .. } => "empty",
            Fault::NoJson { .. } => "no_json",
            Fault::OtherJson { .. } => "other_json",
            Fault::TooLong { .. } => "too_long",
            Fault::UnknownHost { .. } => "no_host",
            Fault::ConnectionRefused => "nobody_there",
            Fault::Timeout { .. } | Fault::Late { .. } => "time_out",
            Fault::ConnectionBroken { .. } => "cut",
            Fault::Encryption { .. } => "encryption",
            Fault::Address { .. } => "address",
            Fault::Proxy { .. } => "proxy",
            Fault::ProxyDown { .. } => "proxy_down",
        }
    }

    /// The wait that the service requests.
    pub(super) fn requested_wait(&self) -> Option<Duration> {
        match self {
            Fault::Busy { wait, .. } => *wait,
            _ => None,
        }
    }

    /// Whether the base address or a path is most likely wrong.
    fn suggests_wrong_address(&self) -> bool {
        matches!(
            self,
            Fault::NotFound { .. }
                | Fault::WebPage
                | Fault::Empty { .. }
                | Fault::NoJson { .. }
                | Fault::OtherJson { .. }
                | Fault::UnknownHost { .. }
                | Fault::ConnectionRefused
                | Fault::Address { .. }
        )
    }
}

/// A request that failed after all its attempts.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub struct Error {
    /// The base address.
    pub base: String,
    /// The configuration key of `path`; empty if nothing was sent.
    pub key: &'static str,
    /// Appended to `base`.
    pub path: String,
    /// 0 if nothing was sent.
    pub attempts: u64,
    /// From the start of the first attempt to the end of the last, waits included.
    pub took: Duration,
    /// The fault of the last attempt.
    pub fault: Box<Fault>,
}

impl Error {
    /// A fault that is found before anything is sent.
    pub(super) fn before_sending(base: &str, fault: Fault) -> Error {
        Error {
            base: base.to_owned(),
            key: "",
            path: String::new(),
            attempts: 0,
            took: Duration::ZERO,
            fault: Box::new(fault),
        }
    }

    /// Corrects the fault of a request with a model name: the model may be what the service does not find.
    pub(super) fn with_model(mut self, model: &str) -> Error {
        if let Fault::NotFound { status, said } = self.fault.as_ref()
            && said.contains("model")
        {
            *self.fault = Fault::NoModel { status: *status, model: model.to_owned(), said: said.clone() };
        }
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Error { base, key, path, attempts, took, fault } = self;
        let address = if path.is_empty() { base.clone() } else { format!("{base}/{}", path.trim_start_matches('/')) };
        write!(f, "{address}: {fault}")?;
        if fault.suggests_wrong_address() {
            write!(f, ": most likely endpoint.api_base ({base}) is wrong, or the path {key} ({path})")?;
        }
        match attempts {
            0 | 1 => Ok(()),
            _ => write!(f, "; {attempts} attempts in {:.1} s", took.as_secs_f64()),
        }
    }
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        Exit::Endpoint
    }
}
