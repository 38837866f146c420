//! An answer that is drawn: its tokens, which of them were drawn, and how its calls have ended.

use serde::{Deserialize, Serialize};

use super::sampling::Token;

/// One answer that the policy has sampled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SampledAnswer {
    /// Its tokens, at least one; the last is an end unless it was cut off.
    pub ids: Vec<i64>,
    /// Which tokens were sampled; the others are of replies to its calls. `None`: all.
    pub mask: Option<Vec<bool>>,
    /// Log-probability of each sampled token when it was sampled, under the whole distribution at the head's temperature.
    pub logprobs: Vec<f64>,
    /// Sum over sampled tokens of the distribution's entropy, nats.
    pub entropy: f64,
    /// Whether it was cut off: at the longest length, or at a call that gets no reply.
    pub truncated: bool,
    /// How its calls have ended.
    pub calls: CallCounts,
    /// Seconds in which replies were waited for.
    pub call_seconds: f64,
}

impl SampledAnswer {
    /// Of `scored`, one number for each token, those of the sampled tokens.
    #[must_use]
    pub fn of_sampled(&self, scored: &[f64]) -> Vec<f64> {
        let is_sampled = |index: usize| self.mask.as_ref().is_none_or(|mask| mask[index]);
        scored.iter().enumerate().filter(|(index, _)| is_sampled(*index)).map(|(_, &number)| number).collect()
    }

    pub(super) fn push(&mut self, token: Token, origin: Origin) {
        let is_sampled = origin != Origin::Given;
        if !is_sampled {
            let sampled = self.ids.len();
            self.mask.get_or_insert_with(|| vec![true; sampled]);
        }
        self.ids.push(token.id);
        self.mask.iter_mut().for_each(|mask| mask.push(is_sampled));
        if is_sampled {
            self.logprobs.push(token.logprob);
            self.entropy += token.entropy;
        }
    }
}

/// How a call has ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Replied {
    /// With the program's text.
    Whole,
    /// With the beginning of a text that was too long.
    Cut,
    /// The program says that the call is wrong.
    Refused,
    /// The program has given no reply, for this reason.
    Failed(String),
}

/// How the calls of an answer, or of several, have ended. Checkpoints hold these field names.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct CallCounts {
    pub calls: u64,
    /// Calls that the program has called wrong.
    pub refused: u64,
    /// Replies that were cut off.
    pub cut: u64,
    /// Calls that got no reply of the program, whose fault it was.
    pub failed: u64,
    /// Tokens of replies in the answer.
    pub tokens: u64,
    /// Why the last failed call got none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

impl CallCounts {
    /// Adds the calls of another answer.
    pub fn add(&mut self, other: &CallCounts) {
        self.calls += other.calls;
        self.refused += other.refused;
        self.cut += other.cut;
        self.failed += other.failed;
        self.tokens += other.tokens;
        if other.failure.is_some() {
            self.failure.clone_from(&other.failure);
        }
    }

    /// As [`CallCounts::count`], of a reply that the answer has no room for. A tool that failed has failed all the same.
    pub(super) fn count_unread(&mut self, outcome: &Replied) {
        match outcome {
            Replied::Failed(_) => self.count(outcome),
            Replied::Whole | Replied::Cut | Replied::Refused => self.calls += 1,
        }
    }

    pub(super) fn count(&mut self, outcome: &Replied) {
        self.calls += 1;
        match outcome {
            Replied::Whole => {}
            Replied::Cut => self.cut += 1,
            Replied::Refused => self.refused += 1,
            Replied::Failed(reason) => {
                self.failed += 1;
                self.failure = Some(reason.clone());
            }
        }
    }
}

/// How a token has come into its answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Origin {
    Drawn,
    /// Drawn, and no further token can follow: its call gets no reply, or none that leaves room for a token.
    DrawnLast,
    /// A token of a reply.
    Given,
}

impl Origin {
    pub(super) fn byte(self) -> u8 {
        match self {
            Origin::Drawn => 0,
            Origin::DrawnLast => 1,
            Origin::Given => 2,
        }
    }

    pub(super) fn of_byte(byte: u8) -> Origin {
        match byte {
            0 => Origin::Drawn,
            1 => Origin::DrawnLast,
            _ => Origin::Given,
        }
    }
}
