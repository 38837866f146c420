//! Checks that the service answers: the list of models, and one tiny message to each model that a run asks.

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
    /// `models_listed`, `default_model_listed` or `message_answered`; of a model that only judges name `judge_model_listed` or
    /// `judge_answered`.
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

/// A model that is sent a message.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The model's name.
    pub model: &'a str,
    /// The temperature that a run states to it; `None`: none.
    pub temperature: Option<f64>,
    /// Whether it is `endpoint.default_model`.
    pub is_default: bool,
}

/// The results of all checks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ping {
    /// Whether every required check passed.
    pub passed: bool,
    /// The base address.
    pub api_base: String,
    /// The model of the message, the first one where there are several.
    pub default_model: String,
    /// The models of the further messages.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub further_models: Vec<String>,
    /// Seconds of all checks.
    pub seconds: f64,
    /// Attempts of all checks.
    pub attempts: u64,
    /// In order; no check follows a fault of the key or the host.
    pub checks: Vec<Check>,
    /// Tokens of the last message, as the service counts them.
    pub input_tokens: Option<u64>,
    /// Tokens of the reply, as the service counts them.
    pub output_tokens: Option<u64>,
    /// The first fault, if the ping did not pass.
    #[serde(skip)]
    pub error: Option<Error>,
    /// The temperature that the request of this fault stated.
    #[serde(skip)]
    pub temperature: Option<f64>,
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

/// Requests the list of models and sends each of `models` one tiny message. A fault is part of the result.
#[must_use]
pub fn run(endpoint: &Endpoint, models: &[Asked<'_>]) -> Ping {
    let mut ping = Ping::new(endpoint.base(), models);
    let listed = endpoint.models();
    let continues = !listed.as_ref().is_err_and(|error| ends_all(&error.fault));
    ping.models(listed, models);
    if continues {
        let mut answered = Vec::new();
        for asked in models {
            let Asked { model, temperature, .. } = *asked;
            let message = Message { model, max_tokens: REPLY_TOKENS_MAX, temperature, system: None, user: QUESTION };
            let reply = endpoint.message(&message);
            let ends = reply.as_ref().is_err_and(|error| ends_all(&error.fault));
            answered.push((asked, reply));
            if ends {
                break;
            }
        }
        if answered.iter().any(|(_, reply)| reply.is_ok()) {
            ping.forgive_list();
        }
        for (asked, reply) in answered {
            ping.message(asked, reply);
        }
    }
    ping.passed = ping.error.is_none();
    ping
}

/// Whether a message would fail like the list did. Some services have no list and answer messages.
fn ends_all(fault: &Fault) -> bool {
    !matches!(fault, Fault::NotFound { .. } | Fault::NoModel { .. } | Fault::OtherJson { .. } | Fault::Rejected { .. })
}

impl Ping {
    /// Before the first check.
    fn new(api_base: &str, models: &[Asked<'_>]) -> Ping {
        let mut names = models.iter().map(|asked| asked.model.to_owned());
        Ping {
            passed: false,
            api_base: api_base.to_owned(),
            default_model: names.next().unwrap_or_default(),
            further_models: names.collect(),
            seconds: 0.0,
            attempts: 0,
            checks: Vec::new(),
            input_tokens: None,
            output_tokens: None,
            error: None,
            temperature: None,
        }
    }

    fn models(&mut self, listed: Result<Answered<Vec<String>>, Error>, asked: &[Asked<'_>]) {
        match listed {
            Ok(Answered { value: models, attempts, took }) => {
                self.note("models_listed", true, (took, attempts), format!("{} listed", models.len()));
                for Asked { model: wanted, is_default, .. } in asked {
                    let known = models.iter().any(|model| model == wanted);
                    let detail = if known {
                        format!("{wanted} is among them")
                    } else {
                        let near = |model: &&String| normalized_damerau_levenshtein(model, wanted);
                        let nearest = models.iter().max_by(|a, b| near(a).total_cmp(&near(b)));
                        let nearest = nearest.map(|model| format!("; the nearest listed one is {model}"));
                        format!("{wanted} is not among them{}", nearest.unwrap_or_default())
                    };
                    let name = if *is_default { "default_model_listed" } else { "judge_model_listed" };
                    self.note(name, known, (Duration::ZERO, 0), detail);
                }
            }
            Err(error) => self.fail("models_listed", error, None),
        }
    }

    fn message(&mut self, asked: &Asked<'_>, answered: Result<Answered<Reply>, Error>) {
        let name = if asked.is_default { "message_answered" } else { "judge_answered" };
        match answered {
            Ok(Answered { value: Reply { input_tokens, output_tokens, stop_reason, .. }, attempts, took }) => {
                let count = |tokens: Option<u64>| tokens.map_or_else(|| "?".to_owned(), |tokens| tokens.to_string());
                let end = stop_reason.map(|reason| format!(", {reason}")).unwrap_or_default();
                let of = if self.further_models.is_empty() { String::new() } else { format!("{}: ", asked.model) };
                let detail = format!("{of}{} tokens sent, {} replied{end}", count(input_tokens), count(output_tokens));
                (self.input_tokens, self.output_tokens) = (input_tokens, output_tokens);
                self.note(name, true, (took, attempts), detail);
            }
            Err(error) => self.fail(name, error, asked.temperature),
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
        let (seconds, required) = (took.as_secs_f64(), !name.ends_with("_model_listed"));
        self.seconds += seconds;
        self.attempts += attempts;
        self.checks.push(Check { name, passed, required, seconds, attempts, detail });
    }

    fn fail(&mut self, name: &'static str, error: Error, temperature: Option<f64>) {
        self.note(name, false, (error.took, error.attempts), error.fault.to_string());
        if self.error.is_none() {
            (self.error, self.temperature) = (Some(error), temperature);
        }
    }

    /// One line for each check, after a line with address and model.
    #[must_use]
    pub fn text(&self) -> String {
        let models = [vec![self.default_model.clone()], self.further_models.clone()].concat();
        let word = if models.len() == 1 { "model" } else { "models" };
        let mut lines = vec![format!("{}, {word} {}", self.api_base, models.join(", "))];
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

    const JUDGE: Asked<'static> = Asked { model: "judge-large", temperature: None, is_default: true };

    #[test]
    fn a_model_that_is_not_listed_is_a_note_with_the_nearest_name() {
        let mut ping = Ping::new("http://x", &[JUDGE]);
        let value = vec!["other".to_owned(), "judge-larg".to_owned()];
        ping.models(Ok(Answered { value, attempts: 2, took: Duration::from_millis(1500) }), &[JUDGE]);
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
            let mut ping = Ping::new("http://x", &[JUDGE]);
            ping.models(Err(Error { attempts: 1, ..Error::before_sending("http://x", fault) }), &[JUDGE]);
            assert!(ping.error.is_some() && ping.text().contains("\nFAIL  models_listed"), "{}", ping.text());
            ping.forgive_list();
            assert!(ping.error.is_none() && ping.text().contains("\nnote  models_listed"), "{}", ping.text());
        }
        let mut ping = Ping::new("http://x", &[JUDGE]);
        ping.fail("models_listed", Error::before_sending("http://x", Fault::WebPage), None);
        ping.forgive_list();
        assert!(ping.error.is_some() && ping.checks[0].required);
    }

    #[test]
    fn the_first_fault_is_the_one_that_is_reported() {
        let fault = |status| Fault::NotFound { status, said: String::new() };
        let error = |status| Error { attempts: 1, ..Error::before_sending("http://x", fault(status)) };
        let mut ping = Ping::new("http://x", &[JUDGE]);
        ping.fail("models_listed", error(404), None);
        ping.fail("message_answered", error(405), Some(0.0));
        assert_eq!(ping.error.map(|error| *error.fault), Some(fault(404)));
        assert_eq!((ping.attempts, ping.checks.len(), ping.temperature), (2, 2, None));
        assert!(!ends_all(&fault(404)) && ends_all(&Fault::WebPage));
    }
}
