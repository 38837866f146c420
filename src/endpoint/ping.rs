//! Checks that the service answers: the list of models, and one tiny message.

use std::time::Duration;

use serde::Serialize;
use strsim::normalized_damerau_levenshtein;

use super::{Answered, Endpoint, Error, Fault, Message, Reply};
use crate::runtime::failure::{Classified, Exit};

/// Enough for a word.
const REPLY_TOKENS_MAX: u64 = 16;
const QUESTION: &str = "Reply with the one word: ready";

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// `models_listed`, `default_model_listed` or `message_answered`.
    pub name: &'static str,
    /// Whether the check passed.
    pub passed: bool,
    /// Whether the ping fails with this check. A model that is not listed may answer under another name, and a service
    /// without a list may answer, too.
    pub required: bool,
    /// Seconds, including waits between attempts.
    pub seconds: f64,
    /// 0 if nothing was sent.
    pub attempts: u64,
    /// The result in words.
    pub detail: String,
}

/// The results of all checks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ping {
    /// Whether every required check passed.
    pub passed: bool,
    /// The base address.
    pub api_base: String,
    /// The model of the message.
    pub default_model: String,
    /// Seconds of all checks.
    pub seconds: f64,
    /// Attempts of all checks.
    pub attempts: u64,
    /// In order; no check follows a fault of the key or the host.
    pub checks: Vec<Check>,
    /// Tokens of the message, as the service counts them.
    pub input_tokens: Option<u64>,
    /// Tokens of the reply, as the service counts them.
    pub output_tokens: Option<u64>,
    /// The first fault, if the ping did not pass.
    #[serde(skip)]
    pub error: Option<Error>,
}

/// Ping was started in several processes, which would each send requests.
#[derive(Debug, thiserror::Error)]
#[error(
    "ping is for one process: {variable} says that {tasks} were started, and each would send requests; start it without \
     mpirun, or with `srun --ntasks=1`"
)]
pub struct SeveralProcesses {
    /// The launcher's variable.
    pub variable: &'static str,
    /// How many processes it names.
    pub tasks: u64,
}

impl Classified for SeveralProcesses {
    fn exit(&self) -> Exit {
        Exit::Config
    }
}

/// Requests the list of models and sends `model` one tiny message. A fault is part of the result.
#[must_use]
pub fn run(endpoint: &Endpoint, model: &str) -> Ping {
    let mut ping = Ping::new(endpoint.base(), model);
    let listed = endpoint.models();
    let continues = !listed.as_ref().is_err_and(|error| ends_all(&error.fault));
    ping.models(listed);
    if continues {
        let message = Message { model, max_tokens: REPLY_TOKENS_MAX, temperature: None, system: None, user: QUESTION };
        ping.message(endpoint.message(&message));
    }
    ping.passed = ping.error.is_none();
    ping
}

/// Whether a message would fail like the list did. Some services have no list and answer messages.
fn ends_all(fault: &Fault) -> bool {
    !matches!(fault, Fault::NotFound { .. } | Fault::OtherJson { .. } | Fault::Rejected { .. })
}

impl Ping {
    /// Before the first check.
    fn new(api_base: &str, model: &str) -> Ping {
        Ping {
            passed: false,
            api_base: api_base.to_owned(),
            default_model: model.to_owned(),
            seconds: 0.0,
            attempts: 0,
            checks: Vec::new(),
            input_tokens: None,
            output_tokens: None,
            error: None,
        }
    }

    fn models(&mut self, listed: Result<Answered<Vec<String>>, Error>) {
        match listed {
            Ok(Answered { value: models, attempts, took }) => {
                self.note("models_listed", true, (took, attempts), format!("{} listed", models.len()));
                let known = models.contains(&self.default_model);
                let detail = if known {
                    format!("{} is among them", self.default_model)
                } else {
                    let near = |model: &&String| normalized_damerau_levenshtein(model, &self.default_model);
                    let nearest = models.iter().max_by(|a, b| near(a).total_cmp(&near(b)));
                    let nearest = nearest.map(|model| format!("; the nearest listed one is {model}"));
                    format!("{} is not among them{}", self.default_model, nearest.unwrap_or_default())
                };
                self.note("default_model_listed", known, (Duration::ZERO, 0), detail);
            }
            Err(error) => self.fail("models_listed", error),
        }
    }

    fn message(&mut self, answered: Result<Answered<Reply>, Error>) {
        match answered {
            Ok(Answered { value: Reply { input_tokens, output_tokens, stop_reason, .. }, attempts, took }) => {
                let count = |tokens: Option<u64>| tokens.map_or_else(|| "?".to_owned(), |tokens| tokens.to_string());
                let end = stop_reason.map(|reason| format!(", {reason}")).unwrap_or_default();
                let detail = format!("{} tokens sent, {} replied{end}", count(input_tokens), count(output_tokens));
                (self.input_tokens, self.output_tokens) = (input_tokens, output_tokens);
                self.note("message_answered", true, (took, attempts), detail);
                self.forgive_list();
            }
            Err(error) => self.fail("message_answered", error),
        }
    }

    /// After an answered message a missing list does no harm, as nothing else needs it.
    fn forgive_list(&mut self) {
        if self.error.take_if(|error| !ends_all(&error.fault)).is_some() {
            let list = self.checks.iter_mut().filter(|check| check.name == "models_listed");
            list.for_each(|check| check.required = false);
        }
    }

    fn note(&mut self, name: &'static str, passed: bool, (took, attempts): (Duration, u64), detail: String) {
        let (seconds, required) = (took.as_secs_f64(), name != "default_model_listed");
        self.seconds += seconds;
        self.attempts += attempts;
        self.checks.push(Check { name, passed, required, seconds, attempts, detail });
    }

    fn fail(&mut self, name: &'static str, error: Error) {
        self.note(name, false, (error.took, error.attempts), error.fault.to_string());
        self.error.get_or_insert(error);
    }

    /// One line for each check, after a line with address and model.
    #[must_use]
    pub fn text(&self) -> String {
        let mut lines = vec![format!("{}, model {}", self.api_base, self.default_model)];
        for Check { name, passed, required, seconds, attempts, detail } in &self.checks {
            let verdict = match (passed, required) {
                (true, _) => "ok",
                (false, true) => "FAIL",
                (false, false) => "note",
            };
            let effort = match attempts {
                0 => String::new(),
                1 => format!(" ({seconds:.2} s)"),
                _ => format!(" ({seconds:.2} s, {attempts} attempts)"),
            };
            lines.push(format!("{verdict:<4}  {name:<20}  {detail}{effort}"));
        }
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_is_not_listed_is_a_note_with_the_nearest_name() {
        let mut ping = Ping::new("http://x", "judge-large");
        let value = vec!["other".to_owned(), "judge-larg".to_owned()];
        ping.models(Ok(Answered { value, attempts: 2, took: Duration::from_millis(1500) }));
        assert_eq!((ping.checks[0].passed, ping.checks[1].passed, ping.checks[1].required), (true, false, false));
        assert_eq!(ping.checks[1].detail, "judge-large is not among them; the nearest listed one is judge-larg");
        assert!(ping.error.is_none());
        assert_eq!(
            ping.text(),
            "http://x, model judge-large\n\
             ok    models_listed         2 listed (1.50 s, 2 attempts)\n\
             note  default_model_listed  judge-large is not among them; the nearest listed one is judge-larg"
        );
    }

    #[test]
    fn a_list_that_is_missing_is_a_note_where_a_message_answers() {
        let other = Fault::OtherJson { wanted: "a list of models", said: "{}".into() };
        for fault in [Fault::NotFound { status: 404, said: String::new() }, other] {
            let mut ping = Ping::new("http://x", "judge-large");
            ping.models(Err(Error { attempts: 1, ..Error::before_sending("http://x", fault) }));
            assert!(ping.error.is_some() && ping.text().contains("\nFAIL  models_listed"), "{}", ping.text());
            ping.forgive_list();
            assert!(ping.error.is_none() && ping.text().contains("\nnote  models_listed"), "{}", ping.text());
        }
        let mut ping = Ping::new("http://x", "judge-large");
        ping.fail("models_listed", Error::before_sending("http://x", Fault::WebPage));
        ping.forgive_list();
        assert!(ping.error.is_some() && ping.checks[0].required);
    }

    #[test]
    fn the_first_fault_is_the_one_that_is_reported() {
        let fault = |status| Fault::NotFound { status, said: String::new() };
        let error = |status| Error { attempts: 1, ..Error::before_sending("http://x", fault(status)) };
        let mut ping = Ping::new("http://x", "judge-large");
        ping.fail("models_listed", error(404));
        ping.fail("message_answered", error(405));
        assert_eq!(ping.error.map(|error| *error.fault), Some(fault(404)));
        assert_eq!((ping.attempts, ping.checks.len()), (2, 2));
        assert!(!ends_all(&fault(404)) && ends_all(&Fault::WebPage));
    }
}
