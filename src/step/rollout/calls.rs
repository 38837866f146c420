//! Calls in answers that are being drawn: the reply to a call stands in the answer as tokens that nobody has drawn.
//!
//! ```text
//!   drawn   … <tool_call> 2 * 3 </tool_call>                                       it is 6 <end>
//!   given                                    <tool_response> 6 </tool_response>
//! ```
//!
//! All answers of a group stand at the same position. So a reply comes one token at a time, each in the place of one that
//! would be drawn: rows, states and choices follow as for any token, and the noise of a drawn token stays a function of its
//! place. The prompt's first rank finds the calls and has them answered; the other ranks learn each token as it comes, and
//! whether it was drawn.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::answer::{CallCounts, Origin, Replied, SampledAnswer};
use super::sampling::Token;
use crate::runtime::failure::Failure;
use crate::runtime::units::{Tokens, as_index, float, from_index};

/// Finds calls in answers, and has them answered. Only the prompt's first rank uses it while answers are drawn.
pub trait Caller: Debug {
    /// The call that the token `last` closes behind `ids`: the tokens since the answer began, or since its last reply.
    ///
    /// # Errors
    /// When the tokens have no text.
    fn closed(&self, ids: &[i64], last: i64) -> Result<Option<String>, Failure>;

    /// The replies to `calls`, in their order. `alive` is called while they are waited for.
    ///
    /// # Errors
    /// When every further call would end in the same.
    fn replies(&self, calls: &[Call<'_>], alive: &mut dyn FnMut()) -> Result<Vec<Reply>, Failure>;
}

/// A call in an answer.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    /// Index of the answer in its group.
    pub answer: usize,
    /// Which call of the answer it is, from 1.
    pub turn: u64,
    /// The text between the marks.
    pub text: String,
    /// The answer's tokens up to the call's end.
    pub ids: &'a [i64],
}

/// What stands in the answer behind a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// Its tokens, with what the model's format has around a reply.
    pub ids: Vec<i64>,
    /// How the call has ended.
    pub outcome: Replied,
}

/// Which calls are answered.
#[derive(Clone, Copy, Debug)]
pub struct Calls<'a> {
    /// Who answers them.
    pub caller: &'a dyn Caller,
    /// Calls of an answer that get a reply, at most; a further one ends the answer.
    pub turns: u64,
}

/// The calls of a group whose answers are being drawn; on the prompt's first rank.
#[derive(Debug)]
pub(super) struct Calling<'a> {
    calls: Calls<'a>,
    longest: Tokens,
    ends: &'a [i64],
    answers: Vec<Open>,
}

/// A call that a drawn token has closed.
struct Closed {
    row: usize,
    /// The answer's tokens, that one included.
    ids: Vec<i64>,
    text: String,
}

/// What is known of one answer's calls.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
struct Open {
    /// Tokens before the part in which a call is looked for.
    before: usize,
    /// Tokens of a reply that have not come yet.
    given: VecDeque<i64>,
    counts: CallCounts,
    seconds: f64,
}

impl<'a> Calling<'a> {
    pub(super) fn new(calls: Calls<'a>, answers: usize, longest: Tokens, ends: &'a [i64]) -> Calling<'a> {
        Calling { calls, longest, ends, answers: vec![Open::default(); answers] }
    }

    /// Puts given tokens in the place of drawn ones, and has the calls answered that the drawn ones close. `tokens` are the
    /// next ones of the answers `live`, which `sampled` are so far.
    pub(super) fn next(
        &mut self,
        live: &[usize],
        sampled: &[SampledAnswer],
        tokens: &mut [Token],
        alive: &mut dyn FnMut(),
    ) -> Result<Vec<Origin>, Failure> {
        let mut origins = vec![Origin::Drawn; live.len()];
        let mut closed: Vec<Closed> = Vec::new();
        for (row, &answer) in live.iter().enumerate() {
            let (open, ids) = (&mut self.answers[answer], &sampled[answer].ids);
            if let Some(id) = open.given.pop_front() {
                tokens[row] = Token { id, logprob: 0.0, entropy: 0.0 };
                origins[row] = Origin::Given;
                continue;
            }
            let last = tokens[row].id;
            let has_room = from_index(ids.len()) + 1 < self.longest.0;
            if !has_room || self.ends.contains(&last) {
                continue;
            }
            let Some(text) = self.calls.caller.closed(&ids[open.before..], last)? else { continue };
            if open.counts.calls >= self.calls.turns {
                origins[row] = Origin::DrawnLast;
            } else {
                closed.push(Closed { row, ids: [&ids[..], &[last]].concat(), text });
            }
        }
        self.answer(live, &closed, &mut origins, alive)?;
        Ok(origins)
    }

    /// Has closed calls answered.
    fn answer(
        &mut self,
        live: &[usize],
        closed: &[Closed],
        origins: &mut [Origin],
        alive: &mut dyn FnMut(),
    ) -> Result<(), Failure> {
        if closed.is_empty() {
            return Ok(());
        }
        let start = Instant::now();
        let mut calls = Vec::new();
        for Closed { row, ids, text } in closed {
            let answer = live[*row];
            calls.push(Call { answer, turn: self.answers[answer].counts.calls + 1, text: text.clone(), ids });
        }
        let replies = self.calls.caller.replies(&calls, alive)?;
        let seconds_each = start.elapsed().as_secs_f64() / float(from_index(closed.len()));
        for (Closed { row, ids, .. }, reply) in closed.iter().zip(replies) {
            let open = &mut self.answers[live[*row]];
            open.seconds += seconds_each;
            let end = ids.len() + reply.ids.len();
            if end >= as_index(self.longest.0) {
                open.counts.count_unread(&reply.outcome);
                origins[*row] = Origin::DrawnLast;
                continue;
            }
            open.counts.count(&reply.outcome);
            open.before = end;
            open.counts.tokens += from_index(reply.ids.len());
            open.given = reply.ids.into();
        }
        Ok(())
    }

    /// What is known of all answers' calls, for the other ranks.
    pub(super) fn told(&self) -> String {
        serde_json::to_string(&self.answers).expect("names are texts, so there is a JSON form")
    }
}

/// Adds to answers what [`Calling::told`] says of their calls.
pub(super) fn note(sampled: &mut [SampledAnswer], told: &str) {
    let answers: Vec<Open> = serde_json::from_str(told).expect("this version has written it");
    for (sampled, open) in sampled.iter_mut().zip(answers) {
        sampled.calls = open.counts;
        sampled.call_seconds = open.seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers every call with eight tokens and a failure.
    #[derive(Debug)]
    struct Fails;

    impl Caller for Fails {
        fn closed(&self, _: &[i64], last: i64) -> Result<Option<String>, Failure> {
            Ok((last == 7).then(String::new))
        }

        fn replies(&self, calls: &[Call<'_>], _: &mut dyn FnMut()) -> Result<Vec<Reply>, Failure> {
            let reply = Reply { ids: vec![1; 8], outcome: Replied::Failed("it fell".to_owned()) };
            Ok(vec![reply; calls.len()])
        }
    }

    #[test]
    fn a_call_that_failed_is_a_failure_also_where_nobody_has_room_to_read_it() {
        let counts = |before: usize| {
            let calls = Calls { caller: &Fails, turns: 2 };
            let mut calling = Calling::new(calls, 1, Tokens(20), &[]);
            let sampled = [SampledAnswer { ids: vec![2; before], ..SampledAnswer::default() }];
            let mut tokens = [Token { id: 7, logprob: 0.0, entropy: 0.0 }];
            let origins = calling.next(&[0], &sampled, &mut tokens, &mut || ()).unwrap();
            let CallCounts { calls, failed, tokens, .. } = calling.answers[0].counts;
            (origins[0], calls, failed, tokens)
        };
        assert_eq!(counts(10), (Origin::Drawn, 1, 1, 8));
        assert_eq!(counts(11), (Origin::DrawnLast, 1, 1, 0));
    }
}
