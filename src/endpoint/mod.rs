//! The HTTP boundary: the service that judges answers, asked for its list of models and for one message at a time.
//!
//! A request has one deadline for all of it, attempts are bounded, and so are waits and the size of an answer. The key
//! travels in one header and nowhere else: redirects are not followed, since they would take it along, and it is cut out
//! of every word of the service before a word is repeated.

mod error;
pub mod json;
mod patience;
pub mod ping;
mod words;

use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};
use ureq::http::{HeaderValue, Response, header};
use ureq::{Agent, Body, Proxy};

pub use error::{Error, Fault};

use crate::config::{EndpointPaths, Environment, ProxyAddress, RunConfig};
use crate::runtime::failure::Failure;
use patience::{Patience, retry_after};
use words::Veil;

/// The version of the interface that requests are written for.
const INTERFACE_VERSION: &str = "2023-06-01";
/// The longest answer that is read.
const ANSWER_BYTES_MAX: u64 = 8 << 20;
/// Pages of the list of models, at most.
const MODEL_PAGES_MAX: u64 = 64;

/// One message to a model.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// The model that is asked.
    pub model: &'a str,
    /// Tokens of the reply, at most.
    pub max_tokens: u64,
    /// What the model is told before the message.
    pub system: Option<&'a str>,
    /// The message.
    pub user: &'a str,
}

/// What a model replies.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Reply {
    /// The text, its blocks joined.
    pub text: String,
    /// Why it ends, in the service's word.
    pub stop_reason: Option<String>,
    /// Tokens of the message, as the service counts them.
    pub input_tokens: Option<u64>,
    /// Tokens of the reply, as the service counts them.
    pub output_tokens: Option<u64>,
}

/// What came, and what it took.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Answered<T> {
    /// What came.
    pub value: T,
    /// Attempts, the one that succeeded included.
    pub attempts: u64,
    /// Time from the first attempt to the end of the last, waits included.
    pub took: Duration,
}

/// Bounds of a caller's own, where they are narrower than the configuration's.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// All requests together, waits included, end in this time from now.
    pub within: Option<Duration>,
    /// Further attempts after a failed one, at most.
    pub retries_max: u64,
    /// Whether the caller has given up: no further attempt is made then, and no wait goes on.
    pub given_up: fn() -> bool,
}

/// The service of a configuration. It shows nothing of itself: it holds the key. Several threads may ask it at one time;
/// each waits for itself.
pub struct Endpoint {
    agent: Agent,
    base: String,
    paths: EndpointPaths,
    patience: Patience,
    key: HeaderValue,
    /// The variable that the key was read from, for messages.
    variable: String,
    veil: Veil,
}

/// One of the two things that are asked for.
#[derive(Clone, Copy)]
struct Request<'a> {
    /// The key of the path, for messages.
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

/// A reply as the service sends it; blocks that are no text have none.
#[derive(Deserialize)]
struct Sent {
    content: Vec<Block>,
    stop_reason: Option<String>,
    #[serde(default)]
    usage: Usage,
}

#[derive(Deserialize)]
struct Block {
    text: Option<String>,
}

#[derive(Default, Deserialize)]
struct Usage {
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
}

impl Endpoint {
    /// The service that `config` names, with the key and the proxy of `environment`. Nothing is sent yet.
    ///
    /// # Errors
    /// When the base address or the key is not set, or the address of the proxy is none.
    pub fn open(config: &RunConfig, environment: &Environment) -> Result<Endpoint, Failure> {
        let base = config.api_base()?.trim_end_matches('/').to_owned();
        let key = environment.api_key(&config.endpoint)?;
        let table = &config.endpoint;
        let bad_key = || crate::config::Error::BadApiKey { variable: table.api_key_env.clone() };
        let mut header = HeaderValue::from_str(key.expose()).map_err(|_| bad_key())?;
        header.set_sensitive(true);
        let proxy = environment.proxy(&base).map(|proxy| through(&proxy)).transpose();
        let proxy = proxy.map_err(|fault| Error::before(&base, fault))?;
        let patience = Patience {
            timeout: Duration::from_secs(table.timeout_sec),
            retries: table.max_retries,
            backoff: table.retry_backoff,
            end: None,
            given_up: || false,
        };
        let agent = Agent::config_builder()
            // A status is judged here, and a redirect is one: following it would hand the key on.
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            // A kept connection that the service has closed meanwhile would count as a failed attempt.
            .max_idle_connections(0)
            .user_agent(concat!("longstraw/", env!("CARGO_PKG_VERSION")))
            .proxy(proxy)
            .build()
            .new_agent();
        let (paths, variable) = (table.endpoints.clone(), table.api_key_env.clone());
        Ok(Endpoint { agent, base, paths, patience, key: header, variable, veil: Veil::over(&key) })
    }

    /// The same service for a caller that has bounds of its own; what is waited for begins now.
    #[must_use]
    pub fn bounded(mut self, bound: &Bound) -> Endpoint {
        let patience = &mut self.patience;
        patience.end = bound.within.map(|within| (Instant::now() + within, within));
        patience.retries = patience.retries.min(bound.retries_max);
        patience.given_up = bound.given_up;
        self
    }

    /// The base address.
    #[must_use]
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The longest that one of its calls can take, for whoever sets a deadline for it.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.patience.longest()
    }

    /// Words that came from the service, fit to be repeated: short, on one line, and without the key.
    #[must_use]
    pub fn plain(&self, text: &str) -> String {
        self.veil.plain(text)
    }

    /// The names of the models that the service lists.
    ///
    /// # Errors
    /// [`Error`] with what is wrong, after all attempts.
    pub fn models(&self) -> Result<Answered<Vec<String>>, Error> {
        let mut all = Answered { value: Vec::new(), attempts: 0, took: Duration::ZERO };
        let mut query = String::new();
        for _ in 0..MODEL_PAGES_MAX {
            let path = &self.paths.models;
            let request = Request { key: "endpoint.endpoints.models", path, query: &query, body: None };
            let page: Answered<ModelPage> = self.ask(request, "no list of models, `data` with an `id` each")?;
            all.attempts += page.attempts;
            all.took += page.took;
            all.value.extend(page.value.data.iter().map(|model| self.veil.plain(&model.id)));
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
    /// [`Error`] with what is wrong, after all attempts.
    pub fn message(&self, message: &Message<'_>) -> Result<Answered<Reply>, Error> {
        let Message { model, max_tokens, system, user } = *message;
        let mut body = json!({
            "model": model,
            "max_tokens": max_tokens,
            "messages": [{ "role": "user", "content": user }],
        });
        if let Some(system) = system {
            body["system"] = system.into();
        }
        let request = Request { key: "endpoint.endpoints.chat", path: &self.paths.chat, query: "", body: Some(&body) };
        let sent: Answered<Sent> = self.ask(request, "no message, `content` with a `text`").map_err(|error| {
            // The service says 404 to an unknown model too, and then the address is right.
            error.of_model(model)
        })?;
        let Answered { value: Sent { content, stop_reason, usage }, attempts, took } = sent;
        let stop_reason = stop_reason.map(|reason| self.veil.plain(&reason));
        let text = content.into_iter().filter_map(|block| block.text).collect();
        let Usage { input_tokens, output_tokens } = usage;
        Ok(Answered { value: Reply { text, stop_reason, input_tokens, output_tokens }, attempts, took })
    }

    /// Asks until an answer comes, the fault is none that passes, or all attempts are made.
    fn ask<T: for<'a> Deserialize<'a>>(
        &self,
        request: Request<'_>,
        wanted: &'static str,
    ) -> Result<Answered<T>, Error> {
        let address = format!("{}/{}{}", self.base, request.path.trim_start_matches('/'), request.query);
        let start = Instant::now();
        let mut attempts = 0;
        loop {
            attempts += 1;
            let fault = match self.attempt(&address, request.body, wanted) {
                Ok(value) => return Ok(Answered { value, attempts, took: start.elapsed() }),
                Err(fault) => fault,
            };
            let goes_on = self.patience.wait(attempts, &fault).is_some_and(|wait| {
                tracing::warn!("{address}: {fault}; attempt {} follows in {:.1} s", attempts + 1, wait.as_secs_f64());
                self.patience.sleep(wait)
            });
            if !goes_on {
                let (base, took) = (self.base.clone(), start.elapsed());
                let (key, path) = (request.key, request.path.to_owned());
                return Err(Error { base, key, path, attempts, took, fault: Box::new(fault) });
            }
        }
    }

    fn attempt<T>(&self, address: &str, body: Option<&Value>, wanted: &'static str) -> Result<T, Fault>
    where
        T: for<'a> Deserialize<'a>,
    {
        let mut response = self.send(address, body).map_err(|error| self.broken(&error))?;
        let read = response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec();
        if !response.status().is_success() {
            // The status says enough where the rest does not come.
            return Err(self.refused(&response, &read.unwrap_or_default()));
        }
        let bytes = read.map_err(|error| self.broken(&error))?;
        if is_web_page(&response, &bytes) {
            return Err(Fault::WebPage);
        }
        let said = || self.veil.said(&bytes);
        let value: Value = serde_json::from_slice(&bytes).map_err(|_| Fault::NoJson { said: said() })?;
        serde_json::from_value(value).map_err(|_| Fault::OtherJson { wanted, said: said() })
    }

    fn send(&self, address: &str, body: Option<&Value>) -> Result<Response<Body>, ureq::Error> {
        const JSON: &str = "application/json";
        let most = Some(self.patience.attempt());
        match body {
            None => {
                let get = self.agent.get(address).config().timeout_global(most).build();
                let get = get.header("x-api-key", &self.key);
                get.header("anthropic-version", INTERFACE_VERSION).header(header::CONTENT_TYPE, JSON).call()
            }
            Some(body) => {
                let post = self.agent.post(address).config().timeout_global(most).build();
                let post = post.header("x-api-key", &self.key);
                let post = post.header("anthropic-version", INTERFACE_VERSION).header(header::CONTENT_TYPE, JSON);
                post.send(body.to_string())
            }
        }
    }

    /// No answer, or half of one.
    fn broken(&self, error: &ureq::Error) -> Fault {
        use std::io::ErrorKind;
        let said = self.veil.plain(&error.to_string());
        match error {
            ureq::Error::Timeout(_) => self.patience.late(),
            ureq::Error::HostNotFound => Fault::NoHost { said },
            ureq::Error::BodyExceedsLimit(_) => Fault::TooLong { bytes_max: ANSWER_BYTES_MAX },
            ureq::Error::Rustls(_) | ureq::Error::Tls(_) | ureq::Error::TlsRequired => Fault::Encryption { said },
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => Fault::Address { said },
            ureq::Error::ConnectProxyFailed(_) | ureq::Error::InvalidProxyUrl => Fault::Proxy { said },
            ureq::Error::Io(error) => match error.kind() {
                ErrorKind::ConnectionRefused => Fault::NobodyThere,
                ErrorKind::TimedOut => self.patience.late(),
                ErrorKind::InvalidData => Fault::Encryption { said },
                _ if said.contains("lookup address") => Fault::NoHost { said },
                _ => Fault::Cut { said },
            },
            _ => Fault::Cut { said },
        }
    }

    /// An answer with a status that is no success.
    fn refused(&self, response: &Response<Body>, bytes: &[u8]) -> Fault {
        let headers = response.headers();
        let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        let status = response.status().as_u16();
        let said = if is_web_page(response, bytes) { " with a web page".into() } else { self.veil.said(bytes) };
        match status {
            300..=399 => {
                let target = text(header::LOCATION).unwrap_or("nowhere");
                // What follows the path may hold anything.
                let target = target.split(['?', '#']).next().unwrap_or_default();
                Fault::Redirect { status, target: self.veil.plain(target) }
            }
            401 | 403 => Fault::KeyRefused { status, variable: self.variable.clone(), said },
            404 | 405 => Fault::NotThere { status, said },
            408 | 409 | 429 | 500..=599 => {
                Fault::Busy { status, said, wait: text(header::RETRY_AFTER).and_then(retry_after) }
            }
            _ => Fault::Rejected { status, said },
        }
    }
}

/// A proxy, but for the hosts that are reached without it; this machine always is.
fn through(address: &ProxyAddress) -> Result<Proxy, Fault> {
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

/// Whether a name can stand in an address as it is.
fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._~".contains(&b))
}

/// Whether an answer is a page for people.
fn is_web_page(response: &Response<Body>, bytes: &[u8]) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    kind.is_some_and(|kind| kind.contains("html")) || bytes.trim_ascii_start().starts_with(b"<")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_threads_may_ask_at_one_time() {
        fn shared<T: Send + Sync>() {}
        shared::<Endpoint>();
    }

    #[test]
    fn a_name_that_an_address_would_read_otherwise_is_not_put_into_one() {
        assert!(is_plain_name("claude-sonnet-4.5"));
        for name in ["", "a b", "a&limit=1", "a/../b", "m\u{e4}"] {
            assert!(!is_plain_name(name), "{name}");
        }
    }

    #[test]
    fn a_proxy_keeps_its_parts_and_is_never_asked_for_this_machine() {
        let environment = Environment::of([
            ("https_proxy", "http://me:open-sesame@proxy.example.com:3128"),
            ("NO_PROXY", "inside.example.com, .local"),
        ]);
        assert!(environment.proxy("http://a.example.com").is_none());
        let address = environment.proxy("https://a.example.com").expect("it is set");
        assert!(!format!("{address:?}").contains("open-sesame"));
        let proxy = through(&address).expect("an address");
        assert_eq!((proxy.host(), proxy.port(), proxy.password()), ("proxy.example.com", 3128, Some("open-sesame")));
        let around = |uri: &str| proxy.is_no_proxy(&uri.parse().expect("an address"));
        assert!(around("https://inside.example.com/") && around("https://a.local/") && around("http://127.0.0.1:1/"));
        assert!(!around("https://outside.example.com/"));
    }
}
