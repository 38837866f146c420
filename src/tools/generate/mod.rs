//! `data generate`: questions with one checkable short answer, and wrong answers beside it, over given texts, by the
//! endpoint's model.
//!
//! A chunk of text is one request, or two where the first reply cannot be used. Requests are made side by side; what comes
//! is on the disk before the next is sent, so that nothing that was paid for is lost, and the records stand in the order
//! of the chunks whatever came first. Not more than one process, and no ranks.

mod error;
mod journal;
mod questions;
mod texts;
mod workers;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

pub use error::Error;
pub use questions::Unusable;
pub use texts::ChunkSize;

use crate::config::{Environment, RunConfig};
use crate::data::Tokenizer;
use crate::endpoint::{CallerLimits, Endpoint};
use crate::runtime::digest::hex;
use crate::runtime::failure::Failure;
use crate::runtime::units::{as_index, from_index};
use crate::world::stop_requested;
use journal::{Journal, Paths};
use questions::{WORDS_VERSION, Wanted};
use texts::{Chunk, Measure, text_tokens_about};
use workers::{Done, Workers};

/// Requests that are under way at one time, at most.
pub const PARALLEL_MAX: u64 = 16;
/// Questions of a chunk, at most.
const QUESTIONS_MAX: u64 = 32;
/// Candidate answers of a question, at most.
const ANSWERS_MAX: u64 = 16;

/// What to make.
#[derive(Clone, Debug)]
pub struct Options {
    /// Files and folders of text.
    pub texts: Vec<PathBuf>,
    /// The data set; its state file stands beside it.
    pub out: PathBuf,
    /// Questions of a chunk.
    pub questions: u64,
    /// Candidate answers of a question, one of them right.
    pub answers: u64,
    /// How long a chunk is, at most.
    pub chunk: ChunkSize,
    /// The HF folder whose tokenizer counts tokens of a chunk.
    pub tokenizer: Option<PathBuf>,
    /// Requests of this run, at most.
    pub limit: Option<u64>,
    /// Requests that are under way at one time.
    pub parallel: u64,
    /// The model that is asked; absent: `endpoint.default_model`.
    pub model: Option<String>,
}

/// What a run will cost, before anything is sent.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Estimate {
    /// Chunks of the texts.
    pub chunks: u64,
    /// Those that an earlier run has finished.
    pub finished: u64,
    /// Files that the chunks come from.
    pub files: u64,
    /// Files in folders that are no text or too short.
    pub files_passed_over: u64,
    /// Requests, if every first reply can be used; at most twice as many within the limit.
    pub requests: u64,
    /// Tokens of their messages, by four characters a token.
    pub input_tokens_about: u64,
    /// Tokens of their replies, at most.
    pub output_tokens_max: u64,
    /// The model that is asked.
    pub model: String,
}

/// What came.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// The data set.
    pub out: PathBuf,
    /// What was expected of this run.
    pub estimate: Estimate,
    /// Whether nothing was asked because only the estimate was.
    pub dry_run: bool,
    /// Chunks that are finished, those of earlier runs included.
    pub finished: u64,
    /// Records in the data set.
    pub records: u64,
    /// Requests of this run.
    pub requests: u64,
    /// Attempts that they took.
    pub attempts: u64,
    /// Second requests, after a reply that could not be used.
    pub asked_again: u64,
    /// Chunks that gave no question in this run; they are not asked about again.
    pub failed: u64,
    /// Chunks of which the service's answer never came; a rerun asks about them.
    pub unanswered: u64,
    /// What was wrong, with how often, over all requests.
    pub faults: BTreeMap<String, u64>,
    /// Tokens of messages as the service counted them.
    pub input_tokens: u64,
    /// Tokens of replies as the service counted them.
    pub output_tokens: u64,
    /// Replies that the service gave no count for.
    pub uncounted: u64,
    /// Seconds of this run.
    pub seconds: f64,
    /// What ended it before its end, or says that it was for nothing.
    #[serde(skip)]
    pub error: Option<Failure>,
}

/// A run that is ready, before its first request.
#[derive(Debug)]
pub struct Ready {
    options: Options,
    wanted: Wanted,
    model: String,
    chunks: Vec<Chunk>,
    /// What a rerun must have in common with this one.
    fixed: Map<String, Value>,
    paths: Paths,
    estimate: Estimate,
}

impl Ready {
    /// Reads the texts, cuts them, and looks at what an earlier run has left. Nothing is sent or written yet, so
    /// this needs neither the key nor the permission.
    ///
    /// # Errors
    /// When an option cannot be met, a text cannot be read, or what stands at `out` is not of the same options.
    pub fn of(options: Options, config: &RunConfig) -> Result<Ready, Failure> {
        let wanted = check(&options)?;
        let model = match &options.model {
            Some(model) => model.clone(),
            None => config.default_model()?.to_owned(),
        };
        let tokenizer = options.tokenizer.as_deref().map(Tokenizer::open).transpose()?;
        let texts = texts::read(&options.texts, &Measure::new(options.chunk, tokenizer.as_ref()))?;
        let fixed = fixed(&options, &model, &texts.chunks);
        let paths = Paths::of(&options.out);
        let stand = paths.stand(&fixed, texts.chunks.len())?;
        let limit = options.limit.map_or(usize::MAX, as_index);
        let asked = texts.chunks.iter().enumerate().filter(|(index, _)| !stand.outcomes.contains_key(index));
        let messages: Vec<String> = asked.take(limit).map(|(_, chunk)| wanted.message(chunk, None)).collect();
        let requests = from_index(messages.len());
        let system = text_tokens_about([Wanted::system()].into_iter());
        let estimate = Estimate {
            chunks: from_index(texts.chunks.len()),
            finished: from_index(stand.outcomes.len()),
            files: texts.files,
            files_passed_over: texts.passed_over,
            requests,
            input_tokens_about: text_tokens_about(messages.iter().map(String::as_str)) + requests * system,
            output_tokens_max: requests.saturating_mul(wanted.reply_tokens()),
            model: model.clone(),
        };
        Ok(Ready { options, wanted, model, chunks: texts.chunks, fixed, paths, estimate })
    }

    /// What it will cost.
    #[must_use]
    pub fn estimate(&self) -> &Estimate {
        &self.estimate
    }

    /// Only the estimate.
    #[must_use]
    pub fn dry_run(self) -> Summary {
        let mut summary = self.summary(Done::default());
        summary.dry_run = true;
        summary
    }

    /// Asks about every chunk that is not finished, and says on the terminal how far it is. What ends it is part of what
    /// comes back.
    ///
    /// # Errors
    /// When the endpoint cannot be opened, or the files cannot.
    pub fn run(self, config: &RunConfig, environment: &Environment) -> Result<Summary, Failure> {
        allow(config, environment)?;
        let bound = CallerLimits { within: None, retries_max: u64::MAX, given_up: stop_requested };
        let endpoint = Endpoint::open(config, environment)?.with_limits(&bound);
        let mut journal = Journal::open(&self.paths, &self.fixed, &self.chunks)?;
        let workers = Workers { endpoint, model: &self.model, wanted: self.wanted, chunks: &self.chunks };
        let mut done = workers.run(&mut journal, self.options.parallel, self.options.limit);
        let settled = journal.settle().map_err(Failure::from);
        done.error = done.error.or(settled.err());
        (done.finished, done.records) = (journal.finished(), journal.questions());
        if done.error.is_none() && stop_requested() && done.finished < self.estimate.chunks {
            let (finished, chunks) = (done.finished, self.estimate.chunks);
            done.error = Some(Error::Stopped { finished, chunks }.into());
        }
        Ok(self.summary(done))
    }

    fn summary(self, done: Done) -> Summary {
        let Done { finished, records, tally, error, seconds } = done;
        Summary {
            out: self.options.out,
            finished: finished.max(self.estimate.finished),
            estimate: self.estimate,
            dry_run: false,
            records,
            requests: tally.requests,
            attempts: tally.attempts,
            asked_again: tally.asked_again,
            failed: tally.failed,
            unanswered: tally.unanswered,
            faults: tally.faults(),
            input_tokens: tally.input_tokens,
            output_tokens: tally.output_tokens,
            uncounted: tally.uncounted,
            seconds,
            error,
        }
    }
}

/// Whether texts may be sent, and by this process.
///
/// # Errors
/// When the configuration does not say so, or several processes would send them.
pub fn allow(config: &RunConfig, environment: &Environment) -> Result<(), Error> {
    if !config.endpoint.usage.data_generation {
        return Err(Error::Off);
    }
    match environment.launcher_tasks().filter(|told| told.tasks > 1) {
        Some(told) => Err(Error::Several { variable: told.variable, tasks: told.tasks }),
        None => Ok(()),
    }
}

/// Options that no text can mend.
fn check(options: &Options) -> Result<Wanted, Error> {
    let within = |option, found, least, most: u64| {
        let wanted = format!("from {least} to {most}");
        if (least..=most).contains(&found) { Ok(()) } else { Err(Error::Option { option, found, wanted }) }
    };
    within("--questions", options.questions, 1, QUESTIONS_MAX)?;
    within("--answers", options.answers, 2, ANSWERS_MAX)?;
    within("--parallel", options.parallel, 1, PARALLEL_MAX)?;
    within("--limit", options.limit.unwrap_or(1), 1, u64::MAX)?;
    texts::check(options.chunk)?;
    if let (ChunkSize::Tokens(tokens), None) = (options.chunk, &options.tokenizer) {
        let wanted = "given with --tokenizer FOLDER, the model's folder whose tokenizer counts them".to_owned();
        return Err(Error::Option { option: "--chunk-tokens", found: tokens.0, wanted });
    }
    Ok(Wanted { questions: options.questions, answers: options.answers })
}

/// Everything that decides what is asked: a rerun with another of these would mix two data sets.
fn fixed(options: &Options, model: &str, chunks: &[Chunk]) -> Map<String, Value> {
    let mut digest = Sha256::new();
    for Chunk { name, text } in chunks {
        for part in [name, text] {
            digest.update(from_index(part.len()).to_le_bytes());
            digest.update(part);
        }
    }
    let texts = hex(digest)[..16].to_owned();
    let chunk = match options.chunk {
        ChunkSize::Chars(chars) => format!("{chars} characters"),
        ChunkSize::Tokens(tokens) => format!("{tokens} tokens"),
    };
    Map::from_iter([
        ("questions".to_owned(), json!(options.questions)),
        ("answers".to_owned(), json!(options.answers)),
        ("chunk".to_owned(), json!(chunk)),
        ("model".to_owned(), json!(model)),
        ("chunks".to_owned(), json!(chunks.len())),
        ("texts (digest)".to_owned(), json!(texts)),
        ("words (version)".to_owned(), json!(WORDS_VERSION)),
    ])
}

impl Estimate {
    /// A line or two, for before.
    #[must_use]
    pub fn text(&self) -> String {
        let passed_over = match self.files_passed_over {
            0 => String::new(),
            files => format!(", {files} files passed over: no text, or too short"),
        };
        format!(
            "{} chunks of {} files ({} finished{passed_over}): {} requests to {}, about {} tokens in, at most {} out; a \
             reply that cannot be used is asked for once more",
            self.chunks,
            self.files,
            self.finished,
            self.requests,
            self.model,
            self.input_tokens_about,
            self.output_tokens_max
        )
    }
}

impl Summary {
    /// What came, in words.
    #[must_use]
    pub fn text(&self) -> String {
        let uncounted = match self.uncounted {
            0 => String::new(),
            replies => format!(" ({replies} replies without a count)"),
        };
        let mut lines = vec![
            format!(
                "{}: {} records of {} chunks, {} of {} finished",
                self.out.display(),
                self.records,
                self.estimate.chunks,
                self.finished,
                self.estimate.chunks
            ),
            format!(
                "{} requests in {} attempts, {:.1} s; tokens as the service counts them: {} in, {} out{uncounted}",
                self.requests, self.attempts, self.seconds, self.input_tokens, self.output_tokens
            ),
        ];
        if self.failed + self.unanswered + self.asked_again > 0 {
            lines.push(format!(
                "{} asked again after a reply that could not be used; {} chunks gave no question; {} got no answer, and \
                 the same command asks about those again",
                self.asked_again, self.failed, self.unanswered
            ));
        }
        lines.extend(self.faults.iter().map(|(fault, count)| format!("  {count} times: {fault}")));
        lines.join("\n")
    }
}
