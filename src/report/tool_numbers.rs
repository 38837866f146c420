//! Calls of tools in sampled answers, as metrics.jsonl and the receipt have them.

use serde::{Deserialize, Serialize};

use crate::runtime::units::float;
use crate::step::rollout::CallCounts;

/// The calls in the answers of one update, or of a run.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct ToolNumbers {
    /// Answers that could call.
    pub answers: u64,
    /// Calls in these answers.
    pub calls: u64,
    /// Calls that the program has called wrong.
    pub refused: u64,
    /// Replies that were cut off.
    pub cut: u64,
    /// Calls that got no reply because the program failed.
    pub failed: u64,
    /// Tokens of replies, which are read and not trained.
    pub tokens: u64,
    /// Seconds in which replies were waited for, over all prompts.
    pub seconds: f64,
}

impl ToolNumbers {
    /// The numbers of `answers` answers with these calls.
    #[must_use]
    pub fn of(counts: &CallCounts, answers: u64, seconds: f64) -> ToolNumbers {
        let CallCounts { calls, refused, cut, failed, tokens, .. } = *counts;
        ToolNumbers { answers, calls, refused, cut, failed, tokens, seconds }
    }

    /// Adds those of another update.
    pub fn add(&mut self, other: &ToolNumbers) {
        self.answers += other.answers;
        self.calls += other.calls;
        self.refused += other.refused;
        self.cut += other.cut;
        self.failed += other.failed;
        self.tokens += other.tokens;
        self.seconds += other.seconds;
    }

    /// Means over answers, shares of calls, and seconds, by name.
    pub(super) fn means(&self) -> [(&'static str, f64); 6] {
        let each = |count: u64| float(count) / float(self.answers.max(1));
        let share = |count: u64| float(count) / float(self.calls.max(1));
        [
            ("calls", each(self.calls)),
            ("tokens", each(self.tokens)),
            ("refused_share", share(self.refused)),
            ("cut_share", share(self.cut)),
            ("failed_share", share(self.failed)),
            ("seconds", self.seconds),
        ]
    }
}
