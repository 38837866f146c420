//! The ratio of a whole answer: what its tokens add up to over all ranks of its prompt.

use tch::{Kind, Tensor};

use crate::runtime::units::float;
use crate::world::Axis;
use crate::world::exchange::sum_number;

/// Means over the trained tokens of an answer, on all ranks of its prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SequenceMeans {
    /// Of logprob − old, nats.
    pub log_ratio: f64,
    /// Of the importance weights; 1 without weights.
    pub importance: f64,
}

/// Some tokens of one answer, [t] each.
#[derive(Debug)]
pub struct SequencePart<'a> {
    /// Log-probabilities under the policy.
    pub logprobs: &'a Tensor,
    /// Those of the old policy.
    pub old: &'a Tensor,
    /// Importance weights; `None`: 1 for every token.
    pub importance: Option<&'a Tensor>,
    /// 1 for tokens that are trained, 0 for the others; `None`: all are.
    pub trained: Option<Tensor>,
}

impl SequencePart<'_> {
    /// Sum over the trained tokens.
    fn sum(&self, x: &Tensor) -> f64 {
        let trained = self.trained.as_ref().map(|trained| trained.to_device(x.device()).gt(0.0));
        // Chosen, not multiplied: a token that takes no part may have any value.
        let x = trained.map_or_else(|| x.shallow_clone(), |trained| x.where_self(&trained, &x.zeros_like()));
        x.sum(Kind::Double).double_value(&[])
    }
}

impl SequenceMeans {
    /// From the `parts` of an answer that this rank has; `tokens` is the number of trained tokens on all ranks. Every rank takes
    /// part, with or without tokens; all have importance weights or none has.
    #[must_use]
    pub fn of(parts: &[SequencePart], has_importance: bool, tokens: u64, cp: &Axis) -> SequenceMeans {
        let count = float(tokens.max(1));
        let log_ratio: f64 = parts.iter().map(|part| part.sum(&(part.logprobs - part.old))).sum();
        let log_ratio = sum_number(cp, log_ratio) / count;
        let importance = if has_importance {
            let weights: f64 = parts.iter().filter_map(|part| Some(part.sum(part.importance?))).sum();
            sum_number(cp, weights) / count
        } else {
            1.0
        };
        SequenceMeans { log_ratio, importance }
    }

    /// The answer's ratio for each of some tokens, shaped like `tokens`.
    pub(super) fn ratio(self, tokens: &Tensor) -> Tensor {
        tokens.full_like(self.log_ratio.exp())
    }
}
