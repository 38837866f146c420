//! Requests side by side, and when to stop making them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error::Error;
use super::journal::{Journal, Outcome};
use super::questions::{Unusable, Wanted};
use super::texts::Chunk;
use crate::endpoint::{self, Answered, Endpoint, Fault, Message, Reply};
use crate::report::say;
use crate::runtime::failure::Failure;
use crate::runtime::units::{as_index, from_index};
use crate::world::stop_requested;

/// So many failures of the service without an answer between them are no accident.
const FAULTS_IN_A_ROW_MAX: u64 = 8;
/// Least time between two lines that say how far it is.
const SAID_EVERY: Duration = Duration::from_secs(1);
/// Messages for one chunk: the second says what was wrong with the first one's reply.
const MESSAGES_MAX: usize = 2;

/// Who asks, and for what.
pub(super) struct Workers<'a> {
    pub(super) endpoint: Endpoint,
    pub(super) model: &'a str,
    pub(super) wanted: Wanted,
    pub(super) chunks: &'a [Chunk],
}

/// What a run has come to.
#[derive(Debug, Default)]
pub(super) struct Done {
    pub(super) tally: Tally,
    /// What ended it before its end, or says that it was for nothing.
    pub(super) error: Option<Failure>,
    pub(super) seconds: f64,
    /// Chunks that are finished, and records; filled in from the journal.
    pub(super) finished: u64,
    pub(super) records: u64,
}

/// Counts of one run.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) requests: u64,
    pub(super) attempts: u64,
    pub(super) asked_again: u64,
    /// Chunks with questions.
    good: u64,
    pub(super) failed: u64,
    pub(super) unanswered: u64,
    pub(super) input_tokens: u64,
    pub(super) output_tokens: u64,
    pub(super) uncounted: u64,
    unusable: BTreeMap<Unusable, u64>,
    service: BTreeMap<String, u64>,
    /// Failures of the service since the last answer.
    in_a_row: u64,
}

/// What the threads share.
struct Shared<'a, 'b> {
    journal: &'a mut Journal<'b>,
    pending: VecDeque<usize>,
    /// Requests that may still be made.
    left: u64,
    tally: Tally,
    error: Option<Failure>,
    all: usize,
    said: Option<Instant>,
}

impl Workers<'_> {
    /// Asks about every chunk that the journal misses, in order, `parallel` at a time, until `limit` requests are made, a
    /// signal asks for a stop, or the service fails for good.
    pub(super) fn run(&self, journal: &mut Journal<'_>, parallel: u64, limit: Option<u64>) -> Done {
        let start = Instant::now();
        let pending = VecDeque::from(journal.pending());
        let (all, left, tally) = (pending.len(), limit.unwrap_or(u64::MAX), Tally::default());
        let shared = Mutex::new(Shared { journal, pending, left, tally, error: None, all, said: None });
        std::thread::scope(|scope| {
            for _ in 0..as_index(parallel).min(all) {
                scope.spawn(|| while self.one(&shared) {});
            }
        });
        let Shared { tally, error, .. } = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
        let error = error.or_else(|| tally.mostly_failed().map(Failure::from));
        Done { tally, error, seconds: start.elapsed().as_secs_f64(), ..Done::default() }
    }

    /// Takes the next chunk and asks about it; false where there is no next one.
    fn one(&self, shared: &Mutex<Shared<'_, '_>>) -> bool {
        let next = {
            let mut shared = lock(shared);
            if shared.error.is_some() || stop_requested() || shared.left == 0 {
                None
            } else {
                shared.pending.pop_front()
            }
        };
        let Some(index) = next else { return false };
        let mut before = None;
        for _ in 0..MESSAGES_MAX {
            // Where the run ends between the two messages, the chunk is not finished, and is asked about again.
            if !lock(shared).may_ask(before.is_some()) {
                return false;
            }
            let text = self.wanted.message(&self.chunks[index], before);
            let message = Message {
                model: self.model,
                max_tokens: self.wanted.reply_tokens(),
                system: Some(Wanted::system()),
                user: &text,
            };
            let answered = self.endpoint.message(&message);
            match self.heard(index, answered, &mut lock(shared)) {
                Heard::Unusable(why) => before = Some(why),
                Heard::Settled => return true,
            }
        }
        lock(shared).finish(Outcome { chunk: index, questions: Vec::new(), unusable: before });
        true
    }

    /// Counts what came of a message, and keeps its questions.
    fn heard(&self, index: usize, answered: Result<Answered<Reply>, endpoint::Error>, shared: &mut Shared) -> Heard {
        match answered {
            Ok(answered) => {
                shared.tally.answered(&answered);
                match self.wanted.questions(&answered.value, &self.chunks[index]) {
                    Ok(questions) => shared.finish(Outcome { chunk: index, questions, unusable: None }),
                    Err(why) => {
                        *shared.tally.unusable.entry(why).or_default() += 1;
                        return Heard::Unusable(why);
                    }
                }
            }
            Err(error) => shared.failed(index, error),
        }
        Heard::Settled
    }
}

/// What became of a message.
enum Heard {
    /// A reply that cannot be used.
    Unusable(Unusable),
    /// Everything else.
    Settled,
}

fn lock<'m, 'a, 'b>(shared: &'m Mutex<Shared<'a, 'b>>) -> MutexGuard<'m, Shared<'a, 'b>> {
    // A thread that panicked ends the run when the threads are joined.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared<'_, '_> {
    /// Takes a request from what may still be made.
    fn may_ask(&mut self, again: bool) -> bool {
        if self.left == 0 || self.error.is_some() {
            return false;
        }
        self.left -= 1;
        self.tally.requests += 1;
        self.tally.asked_again += u64::from(again);
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
        self.say();
    }

    /// The service has not answered. What it rejects it would reject again; what it would refuse of every other chunk
    /// too ends the run.
    fn failed(&mut self, index: usize, error: endpoint::Error) {
        let tally = &mut self.tally;
        tally.attempts += error.attempts;
        *tally.service.entry(error.fault.to_string()).or_default() += 1;
        tally.in_a_row += 1;
        let faults = tally.in_a_row;
        if matches!(*error.fault, Fault::Rejected { .. }) && faults < FAULTS_IN_A_ROW_MAX {
            *tally.unusable.entry(Unusable::Refused).or_default() += 1;
            let (questions, unusable) = (Vec::new(), Some(Unusable::Refused));
            return self.finish(Outcome { chunk: index, questions, unusable });
        }
        tally.unanswered += 1;
        if !stop_requested() {
            if is_of_every_request(&error.fault) {
                self.error.get_or_insert(error.into());
            } else if faults >= FAULTS_IN_A_ROW_MAX {
                self.error.get_or_insert(Error::GivenUp { faults, last: error }.into());
            }
        }
        self.say();
    }

    /// How far it is, not too often.
    fn say(&mut self) {
        let Tally { good, failed, unanswered, input_tokens, output_tokens, .. } = self.tally;
        let done = good + failed + unanswered;
        let last = done == from_index(self.all);
        if !last && self.said.is_some_and(|said| said.elapsed() < SAID_EVERY) {
            return;
        }
        self.said = Some(Instant::now());
        say(&format!(
            "{done} of {} chunks: {good} with questions, {failed} without, {unanswered} not answered; {input_tokens} tokens \
             in, {output_tokens} out",
            self.all
        ));
    }
}

impl Tally {
    fn answered(&mut self, answered: &Answered<Reply>) {
        let Reply { input_tokens, output_tokens, .. } = answered.value;
        self.attempts += answered.attempts;
        self.in_a_row = 0;
        self.input_tokens += input_tokens.unwrap_or(0);
        self.output_tokens += output_tokens.unwrap_or(0);
        self.uncounted += u64::from(input_tokens.is_none() || output_tokens.is_none());
    }

    /// What was wrong, with how often.
    pub(super) fn faults(&self) -> BTreeMap<String, u64> {
        let unusable = self.unusable.iter().filter(|(why, _)| **why != Unusable::Refused);
        let unusable = unusable.map(|(why, count)| (why.to_string(), *count));
        unusable.chain(self.service.iter().map(|(why, count)| (why.clone(), *count))).collect()
    }

    /// More chunks without an answer or a question than with: what was wrong most often.
    fn mostly_failed(&self) -> Option<Error> {
        let failed = self.failed + self.unanswered;
        if failed <= self.good {
            return None;
        }
        let unusable = self.unusable.iter().filter(|(why, _)| **why != Unusable::Refused);
        let unusable = unusable.map(|(why, count)| (*count, why.to_string(), Some(*why)));
        let refused = (self.unusable.contains_key(&Unusable::Refused)).then_some(Unusable::Refused);
        let service = self.service.iter().map(|(why, count)| (*count, why.clone(), refused));
        let (count, why, unusable) = unusable.chain(service).max_by_key(|(count, ..)| *count)?;
        Some(Error::MostFailed { failed, asked: failed + self.good, why, count, unusable })
    }
}

/// Whether every other request would end in the same.
fn is_of_every_request(fault: &Fault) -> bool {
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
