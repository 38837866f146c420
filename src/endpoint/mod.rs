//! The HTTP boundary: requests to the service that judges answers, for its list of models or for one message.
//!
//! Every attempt has one time-out; attempts, waits and the size of an answer are bounded. The key is sent in one header
//! and nowhere else. Redirects are not followed, since they would receive the key, and the key is removed from all text
//! of the service before that is repeated.

mod dialect;
mod error;
pub mod json;
pub mod ping;
mod redact;
mod retry;
mod spent;

use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::Value;
use ureq::http::{HeaderName, HeaderValue, Response, header};
use ureq::{Agent, Body, Proxy};

use error::error_type;
pub use error::{Error, Fault};
pub use spent::{Spent, cost_of};

use crate::config::{EndpointStyle, Environment, ProxyAddress, RunConfig};
use crate::runtime::failure::Failure;
use redact::Redactor;
use retry::{Deadline, RetryPolicy, retry_after};
use spent::Meter;

const ANSWER_BYTES_MAX: u64 = 8 << 20;
/// Maximum number of pages of the list of models.
const MODEL_PAGES_MAX: u64 = 64;

/// One message to a model.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// The model's name.
    pub model: &'a str,
    /// Maximum number of tokens of the reply.
    pub max_tokens: u64,
    /// The sampling temperature; `None` leaves it to the service.
    pub temperature: Option<f64>,
    /// The system prompt.
    pub system: Option<&'a str>,
    /// The user's message.
    pub user: &'a str,
}

/// The reply of a model.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Reply {
    /// The text, its blocks joined.
    pub text: String,
    /// Why the reply ends, as the service names it.
    pub stop_reason: Option<String>,
    /// Tokens of the message, as the service counts them.
    pub input_tokens: Option<u64>,
    /// Tokens of the reply, as the service counts them.
    pub output_tokens: Option<u64>,
}

/// A value from the service, and the effort it took.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Answered<T> {
    /// The value itself.
    pub value: T,
    /// Attempts, the one that succeeded included.
    pub attempts: u64,
    /// From the start of the first attempt to the end of the last, waits included.
    pub took: Duration,
}

/// Limits of a caller that are stricter than the configuration's.
#[derive(Clone, Copy, Debug)]
pub struct CallerLimits {
    /// All requests together, waits included, must end within this time from now.
    pub within: Option<Duration>,
    /// Maximum number of attempts after the first one.
    pub retries_max: u64,
    /// Whether the caller has given up; then no further attempt is made, and waits end.
    pub given_up: fn() -> bool,
}

/// The service of a configuration. It has no `Debug` form, since it holds the key. Several threads may use it at the
/// same time.
pub struct Endpoint {
    agent: Agent,
    base: String,
    style: EndpointStyle,
    chat_path: String,
    models_path: String,
    retry: RetryPolicy,
    /// Of every request, with the key.
    headers: Vec<(HeaderName, HeaderValue)>,
    /// Host and port of the proxy on the way to the service.
    proxy: Option<String>,
    /// The variable that the key was read from, for messages.
    variable: String,
    redactor: Redactor,
    meter: Meter,
}

/// A request for the list of models, or with a message.
#[derive(Clone, Copy)]
struct Request<'a> {
    /// The configuration key of `path`, for error messages.
    key: &'static str,
    path: &'a str,
    /// Appended to the path.
    query: &'a str,
    body: Option<&'a Value>,
}

/// A page of the list of models.
#[derive(Deserialize)]
struct ModelPage {
    data: Vec<Model>,
    #[serde(default)]
    has_more: bool,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

impl Endpoint {
    /// The service that `config` names, with the key and the proxy of `environment`. Sends nothing.
    ///
    /// # Errors
    /// When the base address or the key is not set, or the address of the proxy is not valid.
    pub fn open(config: &RunConfig, environment: &Environment) -> Result<Endpoint, Failure> {
        let base = config.api_base()?.trim_end_matches('/').to_owned();
        let key = environment.api_key(&config.endpoint)?;
        let table = &config.endpoint;
        let bad_key = || crate::config::Error::BadApiKey { variable: table.api_key_env.clone() };
        let headers = dialect::headers(table.style, &key).ok_or_else(bad_key)?;
        // What is sent without encryption goes to its address alone.
        let proxy = environment.proxy(&base).filter(|_| !base.starts_with("http://"));
        let proxy = proxy.map(|proxy| proxy_of(&proxy)).transpose();
        let proxy = proxy.map_err(|fault| Error::before_sending(&base, fault))?;
        let on_the_way = proxy.as_ref().filter(|proxy| base.parse().is_ok_and(|base| !proxy.is_no_proxy(&base)));
        let on_the_way = on_the_way.map(|proxy| format!("{}:{}", proxy.host(), proxy.port()));
        let retry = RetryPolicy {
            timeout: Duration::from_secs(table.timeout_sec),
            retries_max: table.max_retries,
            backoff: table.retry_backoff,
            deadline: None,
            given_up: || false,
        };
        let agent = Agent::config_builder()
            // Statuses are handled here. A redirect is not followed: it would receive the key.
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            // An idle connection that the service has closed would count as a failed attempt.
            .max_idle_connections(0)
            .user_agent(concat!("longstraw/", env!("CARGO_PKG_VERSION")))
            .proxy(proxy)
            .build()
            .new_agent();
        Ok(Endpoint {
            agent,
            base,
            style: table.style,
            chat_path: table.chat_path().to_owned(),
            models_path: table.endpoints.models.clone(),
            retry,
            headers,
            proxy: on_the_way,
            variable: table.api_key_env.clone(),
            redactor: Redactor::new(&key),
            meter: Meter::default(),
        })
    }

    /// The same service with the limits of a caller; their time starts now.
    #[must_use]
    pub fn with_limits(mut self, limits: &CallerLimits) -> Endpoint {
        let retry = &mut self.retry;
        retry.deadline = limits.within.map(Deadline::after);
        retry.retries_max = retry.retries_max.min(limits.retries_max);
        retry.given_up = limits.given_up;
        self
    }

    /// The base address.
    #[must_use]
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The longest time that one call can take.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.retry.time_max()
    }

    /// Text of the service, ready to be repeated: short, on one line, and without the key.
    #[must_use]
    pub fn plain(&self, text: &str) -> String {
        self.redactor.plain(text)
    }

    /// What was sent since the last time that this was asked, without its cost.
    #[must_use]
    pub fn take_spent(&self) -> Spent {
        self.meter.take()
    }

    /// Names of the models that the service lists.
    ///
    /// # Errors
    /// When no attempt succeeds.
    pub fn models(&self) -> Result<Answered<Vec<String>>, Error> {
        let mut all = Answered { value: Vec::new(), attempts: 0, took: Duration::ZERO };
        let mut query = String::new();
        for _ in 0..MODEL_PAGES_MAX {
            let path = &self.models_path;
            let request = Request { key: "endpoint.endpoints.models", path, query: &query, body: None };
            let read = |value| serde_json::from_value(value).ok();
            let wanted = "no list of models, `data` with an `id` each";
            let page: Answered<ModelPage> = self.request(request, read, wanted)?;
            all.attempts += page.attempts;
            all.took += page.took;
            all.value.extend(page.value.data.iter().map(|model| self.redactor.plain(&model.id)));
            match all.value.last() {
                Some(last) if page.value.has_more && is_plain_name(last) => query = format!("?after_id={last}"),
                _ => break,
            }
        }
        Ok(all)
    }

    /// Sends one message and waits for the reply.
    ///
    /// # Errors
    /// When no attempt succeeds.
    pub fn message(&self, message: &Message<'_>) -> Result<Answered<Reply>, Error> {
        let body = dialect::body(self.style, message);
        let path = &self.chat_path;
        let request = Request { key: "endpoint.endpoints.chat", path, query: "", body: Some(&body) };
        let read = |value| serde_json::from_value(value).ok().and_then(|sent| dialect::reply(self.style, sent));
        let mut answered = self.request(request, read, dialect::wanted(self.style)).map_err(|error| {
            // The service also returns 404 for an unknown model, although the address is right.
            error.with_model(message.model)
        })?;
        let reply: &mut Reply = &mut answered.value;
        self.meter.reply(reply.input_tokens, reply.output_tokens);
        reply.stop_reason = reply.stop_reason.take().map(|reason| self.redactor.plain(&reason));
        Ok(answered)
    }

    /// Repeats the request until an answer comes, a fault is permanent, or all attempts are made. `read` is what the caller
    /// makes of the JSON, `wanted` what is said where it is something else.
    fn request<T>(
        &self,
        request: Request<'_>,
        read: impl Fn(Value) -> Option<T>,
        wanted: &'static str,
    ) -> Result<Answered<T>, Error> {
        let address = format!("{}/{}{}", self.base, request.path.trim_start_matches('/'), request.query);
        let start = Instant::now();
        let mut attempts = 0;
        loop {
            attempts += 1;
            self.meter.request();
            let value = self.attempt(&address, request.body);
            let value = value.and_then(|(value, said)| read(value).ok_or(Fault::OtherJson { wanted, said }));
            let fault = match value {
                Ok(value) => return Ok(Answered { value, attempts, took: start.elapsed() }),
                Err(fault) => fault,
            };
            let continues = self.retry.wait(attempts, &fault).is_some_and(|wait| {
                tracing::warn!("{address}: {fault}; attempt {} follows in {:.1} s", attempts + 1, wait.as_secs_f64());
                self.retry.sleep(wait)
            });
            if !continues {
                let (base, took) = (self.base.clone(), start.elapsed());
                let (key, path) = (request.key, request.path.to_owned());
                return Err(Error { base, key, path, attempts, took, fault: Box::new(fault) });
            }
        }
    }

    /// The JSON of an answer, and how it begins.
    fn attempt(&self, address: &str, body: Option<&Value>) -> Result<(Value, String), Fault> {
        let mut response = self.send(address, body).map_err(|error| self.transport_fault(&error))?;
        let read = response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec();
        if !response.status().is_success() {
            // The status says enough if the body cannot be read.
            return Err(self.status_fault(&response, &read.unwrap_or_default()));
        }
        let bytes = read.map_err(|error| self.transport_fault(&error))?;
        let status = response.status().as_u16();
        if bytes.trim_ascii().is_empty() {
            return Err(Fault::Empty { status });
        }
        if is_web_page(&response, &bytes) {
            return Err(Fault::WebPage);
        }
        let said = || self.redactor.said(&bytes);
        let value: Value = serde_json::from_slice(&bytes).map_err(|_| Fault::NoJson { said: said() })?;
        if let Some(kind) = error_type(&value) {
            return Err(Fault::of_error(kind, status, said(), wait_of(&response), &self.variable));
        }
        Ok((value, said()))
    }

    fn send(&self, address: &str, body: Option<&Value>) -> Result<Response<Body>, ureq::Error> {
        let most = Some(self.retry.attempt_timeout());
        match body {
            None => {
                let get = self.agent.get(address).config().timeout_global(most).build();
                self.headers.iter().fold(get, |get, (name, value)| get.header(name, value)).call()
            }
            Some(body) => {
                let post = self.agent.post(address).config().timeout_global(most).build();
                let post = self.headers.iter().fold(post, |post, (name, value)| post.header(name, value));
                post.send(body.to_string())
            }
        }
    }

    /// The fault if no complete answer came.
    fn transport_fault(&self, error: &ureq::Error) -> Fault {
        use std::io::ErrorKind;
        let said = self.redactor.plain(&error.to_string());
        match error {
            ureq::Error::Timeout(_) => self.retry.timeout_fault(),
            ureq::Error::HostNotFound => self.unreached(said, |said| Fault::UnknownHost { said }),
            ureq::Error::BodyExceedsLimit(_) => Fault::TooLong { bytes_max: ANSWER_BYTES_MAX },
            ureq::Error::Rustls(_) | ureq::Error::Tls(_) | ureq::Error::TlsRequired => Fault::Encryption { said },
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => Fault::Address { said },
            ureq::Error::ConnectProxyFailed(_) | ureq::Error::InvalidProxyUrl => Fault::Proxy { said },
            ureq::Error::Io(error) => match error.kind() {
                ErrorKind::ConnectionRefused => self.unreached(said, |_| Fault::ConnectionRefused),
                ErrorKind::TimedOut => self.retry.timeout_fault(),
                ErrorKind::InvalidData => Fault::Encryption { said },
                _ if said.contains("lookup address") => self.unreached(said, |said| Fault::UnknownHost { said }),
                _ => Fault::ConnectionBroken { said },
            },
            _ => Fault::ConnectionBroken { said },
        }
    }

    /// The fault of a connection that was not made: the proxy's where there is one on the way, since nobody else was asked.
    fn unreached(&self, said: String, fault: impl Fn(String) -> Fault) -> Fault {
        match &self.proxy {
            Some(proxy) => Fault::ProxyDown { proxy: proxy.clone(), said },
            None => fault(said),
        }
    }

    /// The fault of an answer whose status is no success.
    fn status_fault(&self, response: &Response<Body>, bytes: &[u8]) -> Fault {
        let headers = response.headers();
        let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        let status = response.status().as_u16();
        let said = if is_web_page(response, bytes) { " with a web page".into() } else { self.redactor.said(bytes) };
        match status {
            300..=399 => {
                let target = text(header::LOCATION).unwrap_or("nowhere");
                // The query may contain secrets.
                let target = target.split(['?', '#']).next().unwrap_or_default();
                Fault::Redirect { status, target: self.redactor.plain(target) }
            }
            401 | 403 => Fault::KeyRefused { status, variable: self.variable.clone(), said },
            404 | 405 => Fault::NotFound { status, said },
            408 | 409 | 429 | 500..=599 => Fault::Busy { status, said, wait: wait_of(response) },
            _ => Fault::Rejected { status, said },
        }
    }
}

/// The wait that the service asks for.
fn wait_of(response: &Response<Body>) -> Option<Duration> {
    response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()).and_then(retry_after)
}

/// The proxy, with the hosts that are reached without it; this machine always is.
fn proxy_of(address: &ProxyAddress) -> Result<Proxy, Fault> {
    let wrong = |_| Fault::Proxy { said: "its address cannot be read".into() };
    let parts = Proxy::new(address.address.expose()).map_err(wrong)?;
    let mut proxy = Proxy::builder(parts.protocol()).host(parts.host()).port(parts.port());
    proxy = proxy.resolve_target(parts.resolve_target());
    if let Some(name) = parts.username() {
        proxy = proxy.username(name);
    }
    if let Some(password) = parts.password() {
        proxy = proxy.password(password);
    }
    let around = address.except.iter().map(String::as_str).chain(["localhost", "127.0.0.1", "[::1]"]);
    around.fold(proxy, ureq::ProxyBuilder::no_proxy).build().map_err(wrong)
}

/// Whether a name can be part of an address without escapes.
fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._~".contains(&b))
}

/// Whether an answer is HTML.
fn is_web_page(response: &Response<Body>, bytes: &[u8]) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    kind.is_some_and(|kind| kind.contains("html")) || bytes.trim_ascii_start().starts_with(b"<")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_threads_may_send_at_one_time() {
        fn shared<T: Send + Sync>() {}
        shared::<Endpoint>();
    }

    #[test]
    fn a_name_that_needs_escapes_is_not_put_into_an_address() {
        assert!(is_plain_name("claude-sonnet-4.5"));
        for name in ["", "a b", "a&limit=1", "a/../b", "m\u{e4}"] {
            assert!(!is_plain_name(name), "{name}");
        }
    }

    #[test]
    fn a_proxy_keeps_its_parts_and_is_never_used_for_this_machine() {
        let environment = Environment::of([
            ("https_proxy", "http://me:open-sesame@proxy.example.com:3128"),
            ("NO_PROXY", "inside.example.com, .local"),
        ]);
        assert!(environment.proxy("http://a.example.com").is_none());
        let address = environment.proxy("https://a.example.com").expect("it is set");
        assert!(!format!("{address:?}").contains("open-sesame"));
        let proxy = proxy_of(&address).expect("an address");
        assert_eq!((proxy.host(), proxy.port(), proxy.password()), ("proxy.example.com", 3128, Some("open-sesame")));
        let around = |uri: &str| proxy.is_no_proxy(&uri.parse().expect("an address"));
        assert!(around("https://inside.example.com/") && around("https://a.local/") && around("http://127.0.0.1:1/"));
        assert!(!around("https://outside.example.com/"));
    }
}
