//! `data generate`: the endpoint's model writes questions over given texts, each with one checkable short answer and wrong
//! answers.
//!
//! A chunk of text takes one request, or two if the first reply cannot be used. Requests run in parallel. Each reply is on
//! the disk before the next request of its thread, so that no paid reply is lost. The records are in the order of the
//! chunks, whatever the order of the replies. One process only, no ranks.

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

pub use error::{Error, Unusable};
pub use texts::ChunkSize;

use crate::config::{Environment, RunConfig};
use crate::data::Tokenizer;
use crate::endpoint::{CallerLimits, Endpoint};
use crate::runtime::digest::hex;
use crate::runtime::failure::Failure;
use crate::runtime::units::{as_index, from_index};
use crate::world::stop_requested;
use journal::{Journal, Paths};
use questions::{PROMPT_VERSION, QuestionSpec, SYSTEM};
use texts::{Chunk, Measure, tokens_about};
use workers::{Done, Workers};

/// Most parallel requests.
pub const PARALLEL_MAX: u64 = 16;
const QUESTIONS_MAX: u64 = 32;
const ANSWERS_MAX: u64 = 16;

/// Options of `data generate`.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Options {
    /// Files and folders of text.
    pub texts: Vec<PathBuf>,
    /// The data set; the path of its state file is this one with `.state` appended.
    pub out: PathBuf,
    /// Questions per chunk.
    pub questions: u64,
    /// Candidate answers per question, one of them right.
    pub answers: u64,
    /// Greatest length of a chunk.
    pub chunk: ChunkSize,
    /// The HF folder whose tokenizer measures chunks.
    pub tokenizer: Option<PathBuf>,
    /// Most requests of this run.
    pub limit: Option<u64>,
    pub parallel: u64,
    /// The endpoint's model; `None`: `endpoint.default_model`.
    pub model: Option<String>,
}

/// The cost of a run, before anything is sent.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[expect(missing_docs, reason = "the other fields' names say everything")]
pub struct Estimate {
    pub chunks: u64,
    /// Chunks that an earlier run finished.
    pub finished: u64,
    /// Files with at least one chunk.
    pub files: u64,
    /// Files in folders that are not text, or too short.
    pub files_passed_over: u64,
    /// Requests if every first reply can be used; otherwise up to twice as many, within the limit.
    pub requests: u64,
    /// Tokens of the messages, estimated as four characters a token.
    pub input_tokens_about: u64,
    /// Most tokens of the replies.
    pub output_tokens_max: u64,
    pub model: String,
}

/// The result of a run.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "the other fields' names say everything")]
pub struct Summary {
    pub out: PathBuf,
    pub estimate: Estimate,
    /// Whether only the estimate was wanted, so that nothing was sent.
    pub dry_run: bool,
    /// Finished chunks, those of earlier runs included.
    pub finished: u64,
    pub records: u64,
    pub requests: u64,
    /// HTTP attempts of these requests.
    pub attempts: u64,
    /// Second requests after an unusable reply.
    pub asked_again: u64,
    /// Chunks finished in this run without a question; a rerun leaves them out.
    pub failed: u64,
    /// Chunks without an answer of the service; a rerun sends them again.
    pub unanswered: u64,
    /// Faults of all requests with their counts.
    pub faults: BTreeMap<String, u64>,
    /// Tokens of messages, counted by the service.
    pub input_tokens: u64,
    /// Tokens of replies, counted by the service.
    pub output_tokens: u64,
    /// Replies without a token count.
    pub uncounted: u64,
    pub seconds: f64,
    /// What ended the run early, or makes its result a failure.
    #[serde(skip)]
    pub error: Option<Failure>,
}

/// A checked run before its first request.
#[derive(Debug)]
pub struct Ready {
    options: Options,
    spec: QuestionSpec,
    model: String,
    chunks: Vec<Chunk>,
    /// What a rerun must have in common with this run.
    fixed: Map<String, Value>,
    paths: Paths,
    estimate: Estimate,
}

impl Ready {
    /// Reads the texts, cuts them into chunks, and reads the state of an earlier run. Sends and writes nothing, so this
    /// needs neither the key nor the permission.
    ///
    /// # Errors
    /// When an option cannot be met, a text cannot be read, or the files at `out` have other options.
    pub fn new(options: Options, config: &RunConfig) -> Result<Ready, Failure> {
        let spec = check(&options)?;
        let model = match &options.model {
            Some(model) => model.clone(),
            None => config.default_model()?.to_owned(),
        };
        let tokenizer = options.tokenizer.as_deref().map(Tokenizer::open).transpose()?;
        let texts = texts::read(&options.texts, &Measure::new(options.chunk, tokenizer.as_ref()))?;
        let fixed = fixed(&options, &model, &texts.chunks);
        let paths = Paths::new(&options.out);
        let saved = paths.saved_state(&fixed, texts.chunks.len())?;
        let limit = options.limit.map_or(usize::MAX, as_index);
        let pending = texts.chunks.iter().enumerate().filter(|(index, _)| !saved.outcomes.contains_key(index));
        let message_tokens: Vec<u64> =
            pending.take(limit).map(|(_, chunk)| tokens_about(&spec.message(chunk, None))).collect();
        let requests = from_index(message_tokens.len());
        let estimate = Estimate {
            chunks: from_index(texts.chunks.len()),
            finished: from_index(saved.outcomes.len()),
            files: texts.files,
            files_passed_over: texts.passed_over,
            requests,
            input_tokens_about: message_tokens.iter().sum::<u64>() + requests * tokens_about(SYSTEM),
            output_tokens_max: requests.saturating_mul(spec.reply_tokens_max()),
            model: model.clone(),
        };
        Ok(Ready { options, spec, model, chunks: texts.chunks, fixed, paths, estimate })
    }

    /// The cost of [`Ready::run`].
    #[must_use]
    pub fn estimate(&self) -> &Estimate {
        &self.estimate
    }

    /// A summary with the estimate alone.
    #[must_use]
    pub fn dry_run(self) -> Summary {
        let finished = self.estimate.finished;
        Summary { dry_run: true, ..self.summary(Done::default(), finished, 0) }
    }

    /// Sends requests about every unfinished chunk and prints its progress. A failure of the run is part of the summary.
    ///
    /// # Errors
    /// When the endpoint or a file cannot be opened.
    pub fn run(self, config: &RunConfig, environment: &Environment) -> Result<Summary, Failure> {
        allow(config, environment)?;
        let bound = CallerLimits { within: None, retries_max: u64::MAX, given_up: stop_requested };
        let endpoint = Endpoint::open(config, environment)?.with_limits(&bound);
        let mut journal = Journal::open(&self.paths, &self.fixed, &self.chunks)?;
        let workers = Workers { endpoint, model: &self.model, spec: self.spec, chunks: &self.chunks };
        let mut done = workers.run(&mut journal, self.options.parallel, self.options.limit);
        let written = journal.write_all_records().map_err(Failure::from);
        done.error = done.error.or(written.err());
        let (finished, chunks) = (journal.finished(), self.estimate.chunks);
        if done.error.is_none() && stop_requested() && finished < chunks {
            done.error = Some(Error::Stopped { finished, chunks }.into());
        }
        let records = journal.questions();
        drop(journal);
        Ok(self.summary(done, finished, records))
    }

    fn summary(self, done: Done, finished: u64, records: u64) -> Summary {
        let Done { tally, error, seconds } = done;
        Summary {
            out: self.options.out,
            finished,
            estimate: self.estimate,
            dry_run: false,
            records,
            requests: tally.requests,
            attempts: tally.attempts,
            asked_again: tally.second_requests,
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

/// Checks that this process may send texts.
///
/// # Errors
/// When the configuration does not allow it, or several processes would send them.
pub fn allow(config: &RunConfig, environment: &Environment) -> Result<(), Error> {
    if !config.endpoint.usage.data_generation {
        return Err(Error::Off);
    }
    match environment.launcher_tasks().filter(|launcher| launcher.tasks > 1) {
        Some(launcher) => Err(Error::Several { variable: launcher.variable, tasks: launcher.tasks }),
        None => Ok(()),
    }
}

/// Refuses options that no text can satisfy.
fn check(options: &Options) -> Result<QuestionSpec, Error> {
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
    Ok(QuestionSpec { questions: options.questions, answers: options.answers })
}

/// Everything that determines the requests: a rerun with other values would mix two data sets.
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
        ("words (version)".to_owned(), json!(PROMPT_VERSION)),
    ])
}

impl Estimate {
    /// The estimate as a sentence.
    #[must_use]
    pub fn text(&self) -> String {
        let passed_over = match self.files_passed_over {
            0 => String::new(),
            files => format!(", {files} files passed over: not text, or too short"),
        };
        format!(
            "{} chunks of {} files ({} finished{passed_over}): {} requests to {}, about {} tokens in, at most {} out; an \
             unusable reply costs a second request",
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
    /// The result as lines of text.
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
                "{} requests in {} attempts, {:.1} s; tokens counted by the service: {} in, {} out{uncounted}",
                self.requests, self.attempts, self.seconds, self.input_tokens, self.output_tokens
            ),
        ];
        if self.failed + self.unanswered + self.asked_again > 0 {
            lines.push(format!(
                "{} second requests after an unusable reply; {} chunks gave no question; {} got no answer, and the same \
                 command sends those again",
                self.asked_again, self.failed, self.unanswered
            ));
        }
        lines.extend(self.faults.iter().map(|(fault, count)| format!("  {count} times: {fault}")));
        lines.join("\n")
    }
}
