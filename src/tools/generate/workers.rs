//! Parallel requests, and when to stop sending them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error::{Error, Unusable};
use super::journal::{Journal, Outcome};
use super::questions::{QuestionSpec, SYSTEM};
use super::texts::Chunk;
use crate::endpoint::{self, Answered, Endpoint, Fault, Message, Reply};
use crate::report::say;
use crate::runtime::failure::Failure;
use crate::runtime::units::{as_index, from_index};
use crate::world::stop_requested;

/// The run ends after so many failures of the service without an answer between them.
const FAULTS_IN_A_ROW_MAX: u64 = 8;
/// Least time between two lines of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Messages per chunk: the second says what was wrong with the first reply.
const MESSAGES_MAX: usize = 2;

/// What all threads read.
pub(super) struct Workers<'a> {
    pub(super) endpoint: Endpoint,
    pub(super) model: &'a str,
    pub(super) spec: QuestionSpec,
    pub(super) chunks: &'a [Chunk],
}

/// The result of a run.
#[derive(Debug, Default)]
pub(super) struct Done {
    pub(super) tally: Tally,
    /// What ended the run early, or makes its result a failure.
    pub(super) error: Option<Failure>,
    pub(super) seconds: f64,
}

/// Counts of one run.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) requests: u64,
    pub(super) attempts: u64,
    pub(super) second_requests: u64,
    /// Chunks with questions.
    good: u64,
    pub(super) failed: u64,
    pub(super) unanswered: u64,
    pub(super) input_tokens: u64,
    pub(super) output_tokens: u64,
    pub(super) uncounted: u64,
    unusable: BTreeMap<Unusable, u64>,
    service: BTreeMap<String, u64>,
    /// Failures of the service since its last answer.
    faults_in_a_row: u64,
}

/// What the threads share and change.
struct Shared<'a, 'b> {
    journal: &'a mut Journal<'b>,
    pending: VecDeque<usize>,
    /// Requests that may still be sent.
    requests_left: u64,
    tally: Tally,
    error: Option<Failure>,
    /// Pending chunks at the start.
    chunks: usize,
    last_progress: Option<Instant>,
}

impl Workers<'_> {
    /// Sends requests about every pending chunk in order, `parallel` at a time. Ends early after `limit` requests, at a
    /// stop signal, or when the service keeps failing.
    pub(super) fn run(&self, journal: &mut Journal<'_>, parallel: u64, limit: Option<u64>) -> Done {
        let start = Instant::now();
        let pending = VecDeque::from(journal.pending());
        let chunks = pending.len();
        let shared = Mutex::new(Shared {
            journal,
            pending,
            requests_left: limit.unwrap_or(u64::MAX),
            tally: Tally::default(),
            error: None,
            chunks,
            last_progress: None,
        });
        std::thread::scope(|scope| {
            for _ in 0..as_index(parallel).min(chunks) {
                scope.spawn(|| {
                    loop {
                        // A statement of its own, so that the lock is released after it.
                        let next = lock(&shared).next_chunk();
                        if !next.is_some_and(|index| self.finish_chunk(index, &shared)) {
                            break;
                        }
                    }
                });
            }
        });
        let Shared { tally, error, .. } = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
        let error = error.or_else(|| tally.mostly_failed().map(Failure::from));
        Done { tally, error, seconds: start.elapsed().as_secs_f64() }
    }

    /// Sends the messages about one chunk and keeps its questions; false if the run ended before it was done.
    fn finish_chunk(&self, index: usize, shared: &Mutex<Shared<'_, '_>>) -> bool {
        let chunk = &self.chunks[index];
        let mut unusable = None;
        for _ in 0..MESSAGES_MAX {
            // If the run ends between the two messages, the chunk stays pending for the next run.
            if !lock(shared).take_request(unusable.is_some()) {
                return false;
            }
            let message = Message {
                temperature: None,
                model: self.model,
                max_tokens: self.spec.reply_tokens_max(),
                system: Some(SYSTEM),
                user: &self.spec.message(chunk, unusable),
            };
            let answered = match self.endpoint.message(&message) {
                Ok(answered) => answered,
                Err(error) => {
                    lock(shared).service_failed(index, error);
                    return true;
                }
            };
            let mut shared = lock(shared);
            shared.tally.count_answer(&answered);
            match self.spec.questions(&answered.value, chunk) {
                Ok(questions) => {
                    shared.finish(Outcome { chunk: index, questions, unusable: None });
                    return true;
                }
                Err(why) => {
                    *shared.tally.unusable.entry(why).or_default() += 1;
                    unusable = Some(why);
                }
            }
        }
        lock(shared).finish(Outcome { chunk: index, questions: Vec::new(), unusable });
        true
    }
}

fn lock<'m, 'a, 'b>(shared: &'m Mutex<Shared<'a, 'b>>) -> MutexGuard<'m, Shared<'a, 'b>> {
    // If a thread panicked, joining the threads ends the run.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared<'_, '_> {
    fn next_chunk(&mut self) -> Option<usize> {
        let ended = self.error.is_some() || stop_requested() || self.requests_left == 0;
        if ended { None } else { self.pending.pop_front() }
    }

    /// Counts a request; false if none may be sent any more.
    fn take_request(&mut self, again: bool) -> bool {
        if self.requests_left == 0 || self.error.is_some() {
            return false;
        }
        self.requests_left -= 1;
        self.tally.requests += 1;
        self.tally.second_requests += u64::from(again);
        true
    }

    fn finish(&mut self, outcome: Outcome) {
        if outcome.questions.is_empty() {
            self.tally.failed += 1;
        } else {
            self.tally.good += 1;
        }
        if let Err(error) = self.journal.finish(outcome) {
            self.error.get_or_insert(error.into());
        }
        self.show_progress();
    }

    /// Handles a request without an answer. A rejected chunk would be rejected again, so it is finished; a fault of every
    /// request ends the run.
    fn service_failed(&mut self, index: usize, error: endpoint::Error) {
        let tally = &mut self.tally;
        tally.attempts += error.attempts;
        *tally.service.entry(error.fault.to_string()).or_default() += 1;
        tally.faults_in_a_row += 1;
        let faults = tally.faults_in_a_row;
        if matches!(*error.fault, Fault::Rejected { .. }) && faults < FAULTS_IN_A_ROW_MAX {
            *tally.unusable.entry(Unusable::Refused).or_default() += 1;
            let (questions, unusable) = (Vec::new(), Some(Unusable::Refused));
            return self.finish(Outcome { chunk: index, questions, unusable });
        }
        tally.unanswered += 1;
        if !stop_requested() {
            if affects_every_request(&error.fault) {
                self.error.get_or_insert(error.into());
            } else if faults >= FAULTS_IN_A_ROW_MAX {
                self.error.get_or_insert(Error::GivenUp { faults, last: error }.into());
            }
        }
        self.show_progress();
    }

    fn show_progress(&mut self) {
        let Tally { good, failed, unanswered, input_tokens, output_tokens, .. } = self.tally;
        let done = good + failed + unanswered;
        let last = done == from_index(self.chunks);
        if !last && self.last_progress.is_some_and(|time| time.elapsed() < PROGRESS_INTERVAL) {
            return;
        }
        self.last_progress = Some(Instant::now());
        say(&format!(
            "{done} of {} chunks: {good} with questions, {failed} without, {unanswered} not answered; {input_tokens} tokens \
             in, {output_tokens} out",
            self.chunks
        ));
    }
}

impl Tally {
    fn count_answer(&mut self, answered: &Answered<Reply>) {
        let Reply { input_tokens, output_tokens, .. } = answered.value;
        self.attempts += answered.attempts;
        self.faults_in_a_row = 0;
        self.input_tokens += input_tokens.unwrap_or(0);
        self.output_tokens += output_tokens.unwrap_or(0);
        self.uncounted += u64::from(input_tokens.is_none() || output_tokens.is_none());
    }

    fn faulty_replies(&self) -> impl Iterator<Item = (Unusable, u64)> {
        let counts = self.unusable.iter().map(|(why, count)| (*why, *count));
        counts.filter(|(why, _)| *why != Unusable::Refused)
    }

    /// All faults with their counts.
    pub(super) fn faults(&self) -> BTreeMap<String, u64> {
        let replies = self.faulty_replies().map(|(why, count)| (why.to_string(), count));
        replies.chain(self.service.iter().map(|(why, count)| (why.clone(), *count))).collect()
    }

    /// The most frequent fault, if more chunks are without questions than with.
    fn mostly_failed(&self) -> Option<Error> {
        let failed = self.failed + self.unanswered;
        if failed <= self.good {
            return None;
        }
        let replies = self.faulty_replies().map(|(why, count)| (count, why.to_string(), Some(why)));
        let refused = (self.unusable.contains_key(&Unusable::Refused)).then_some(Unusable::Refused);
        let service = self.service.iter().map(|(why, count)| (*count, why.clone(), refused));
        let (count, why, unusable) = replies.chain(service).max_by_key(|(count, ..)| *count)?;
        Some(Error::MostFailed { failed, chunks: failed + self.good, why, count, unusable })
    }
}

/// Whether every other request would fail in the same way.
fn affects_every_request(fault: &Fault) -> bool {
    matches!(
        fault,
        Fault::KeyRefused { .. }
            | Fault::NotFound { .. }
            | Fault::NoModel { .. }
            | Fault::Redirect { .. }
            | Fault::WebPage
            | Fault::Encryption { .. }
            | Fault::Address { .. }
            | Fault::Proxy { .. }
    )
}
