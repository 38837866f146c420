//! What a request can end in, and what to look at then.

use std::fmt;
use std::time::Duration;

use crate::runtime::failure::{Classified, Exit};

/// What was wrong with the last attempt of a request.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// The service does not take the key.
    #[error(
        "the service refuses the key (HTTP {status}{said}): look whether the variable {variable} holds the key of this \
         service, whole and not withdrawn"
    )]
    KeyRefused {
        /// The HTTP status.
        status: u16,
        /// The variable that the key was read from.
        variable: String,
        /// What the service says.
        said: String,
    },
    /// Nothing is there.
    #[error("nothing is there (HTTP {status}{said})")]
    NotFound {
        /// The HTTP status.
        status: u16,
        /// What the service says.
        said: String,
    },
    /// The service does not know the model.
    #[error("the service knows no model {model} (HTTP {status}{said}): correct endpoint.default_model")]
    NoModel {
        /// The HTTP status.
        status: u16,
        /// The model that was asked.
        model: String,
        /// What the service says.
        said: String,
    },
    /// Another status that no further attempt changes.
    #[error("the service rejects the request (HTTP {status}{said})")]
    Rejected {
        /// The HTTP status.
        status: u16,
        /// What the service says.
        said: String,
    },
    /// The service asks to go elsewhere.
    #[error(
        "the service sends on to {target} (HTTP {status}), and redirects are not followed, since they would take the key \
         along: if that place is right, make it endpoint.api_base"
    )]
    Redirect {
        /// The HTTP status.
        status: u16,
        /// Where to.
        target: String,
    },
    /// The service is overloaded, limits requests, or has an error of its own.
    #[error("the service is overloaded or out of order (HTTP {status}{said})")]
    Busy {
        /// The HTTP status.
        status: u16,
        /// What the service says.
        said: String,
        /// How long it asks to wait.
        wait: Option<Duration>,
    },
    /// A page for people where JSON should be.
    #[error("a web page (HTML) answers where JSON should")]
    WebPage,
    /// No JSON.
    #[error("the answer is no JSON{said}")]
    NoJson {
        /// How it begins.
        said: String,
    },
    /// JSON of another kind.
    #[error("the answer is {wanted}{said}")]
    OtherJson {
        /// What it is not.
        wanted: &'static str,
        /// How it begins.
        said: String,
    },
    /// An answer without end.
    #[error("the answer is longer than {bytes_max} bytes")]
    TooLong {
        /// The most that is read.
        bytes_max: u64,
    },
    /// The host is not known.
    #[error("the host is not known ({said})")]
    UnknownHost {
        /// The system's words.
        said: String,
    },
    /// Nobody listens.
    #[error("the connection is refused: nobody listens there")]
    ConnectionRefused,
    /// The deadline has passed.
    #[error("no answer within {seconds} s (endpoint.timeout_sec)")]
    Timeout {
        /// Seconds that a request may take.
        seconds: u64,
    },
    /// The caller waits no longer.
    #[error("no answer within the {seconds:.0} s that this is waited for")]
    Late {
        /// Seconds from the first request of its kind.
        seconds: f64,
    },
    /// The connection broke.
    #[error("the connection broke before the answer was whole ({said})")]
    ConnectionBroken {
        /// The client's words.
        said: String,
    },
    /// No encrypted connection comes about.
    #[error(
        "no encrypted connection comes about ({said}): look at https:// or http:// in endpoint.api_base, at the clock of \
         this machine, and for something between here and the service that replaces certificates"
    )]
    Encryption {
        /// The client's words.
        said: String,
    },
    /// The address cannot be used.
    #[error("this is no address ({said})")]
    Address {
        /// The client's words.
        said: String,
    },
    /// The proxy cannot be used.
    #[error("the proxy that the variables HTTPS_PROXY, ALL_PROXY or HTTP_PROXY name cannot be used ({said})")]
    Proxy {
        /// The client's words.
        said: String,
    },
}

impl Fault {
    /// Whether another attempt may succeed.
    #[must_use]
    pub fn passes(&self) -> bool {
        matches!(
            self,
            Fault::Busy { .. }
                | Fault::UnknownHost { .. }
                | Fault::ConnectionRefused
                | Fault::Timeout { .. }
                | Fault::ConnectionBroken { .. }
        )
    }

    /// Whether every further request to the service would end in the same, whatever it asks for: the key, the model, the
    /// address or the way there is wrong.
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

    /// One word for counting.
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
        }
    }

    /// The wait that the service asks for.
    #[must_use]
    pub fn asked_wait(&self) -> Option<Duration> {
        match self {
            Fault::Busy { wait, .. } => *wait,
            _ => None,
        }
    }

    /// Whether the base address or a path is most likely wrong.
    fn is_of_address(&self) -> bool {
        matches!(
            self,
            Fault::NotFound { .. }
                | Fault::WebPage
                | Fault::NoJson { .. }
                | Fault::OtherJson { .. }
                | Fault::UnknownHost { .. }
                | Fault::ConnectionRefused
                | Fault::Address { .. }
        )
    }
}

/// A request that ended in a fault: of what, and after how much.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub struct Error {
    /// The base address.
    pub base: String,
    /// The key whose value the path is; empty where nothing was sent.
    pub key: &'static str,
    /// The path.
    pub path: String,
    /// Attempts that were made.
    pub attempts: u64,
    /// From the first attempt to the end of the last, waits included.
    pub took: Duration,
    /// What was wrong with the last one.
    pub fault: Box<Fault>,
}

impl Error {
    /// A fault that shows before anything is sent.
    pub(super) fn before(base: &str, fault: Fault) -> Error {
        Error {
            base: base.to_owned(),
            key: "",
            path: String::new(),
            attempts: 0,
            took: Duration::ZERO,
            fault: Box::new(fault),
        }
    }

    /// The same of a request that names a model, which may be what is not there.
    pub(super) fn of_model(mut self, model: &str) -> Error {
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
        if fault.is_of_address() {
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
