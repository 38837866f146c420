//! How much a token weighs, and what a whole batch is divided by.

use serde::{Deserialize, Serialize};

use crate::prompt::handoff::LocalGrads;
use crate::runtime::units::float;

/// How tokens weigh in the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Aggregation {
    /// Mean over answers of the mean over the answer's tokens.
    SequenceMean,
    /// Mean over all tokens of the batch.
    TokenMean,
    /// Sum over tokens divided by a constant, mean over answers.
    Constant(f64),
}

impl Aggregation {
    /// Weight of each trained token of an answer that has so many of them, before the batch's divisor.
    #[must_use]
    pub fn share(self, tokens: u64) -> f64 {
        match self {
            Aggregation::SequenceMean => 1.0 / float(tokens.max(1)),
            Aggregation::TokenMean => 1.0,
            Aggregation::Constant(divisor) => 1.0 / divisor,
        }
    }
}

/// One answer's place in a batch: how many tokens, and whether it has a reward.
#[derive(Clone, Copy, Debug)]
pub struct Counted {
    /// Trained tokens of the answer.
    pub tokens: u64,
    /// Whether it has a reward; without one it takes no part.
    pub scored: bool,
}

/// Sizes of a whole batch (all groups of an update, over all ranks), from which every token's weight follows.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Batch {
    answers: u64,
    tokens: u64,
}

impl Batch {
    /// Counts every answer of the batch once, whatever ranks it is spread over. Groups with equal rewards count.
    pub fn of(answers: impl IntoIterator<Item = Counted>) -> Batch {
        let mut batch = Batch::default();
        answers.into_iter().for_each(|answer| batch.add(answer));
        batch
    }

    /// Counts a further answer.
    pub fn add(&mut self, answer: Counted) {
        if answer.scored {
            self.answers += 1;
            self.tokens += answer.tokens;
        }
    }

    /// Denominator of the batch's loss and of its gradient, whose tokens weigh their [`Aggregation::share`].
    #[must_use]
    pub fn denominator(&self, aggregation: Aggregation) -> f64 {
        match aggregation {
            Aggregation::SequenceMean | Aggregation::Constant(_) => float(self.answers.max(1)),
            Aggregation::TokenMean => float(self.tokens.max(1)),
        }
    }

    /// Weight of each token of an answer of `tokens` trained tokens, where the whole batch is known beforehand.
    #[must_use]
    pub fn weight(&self, aggregation: Aggregation, tokens: u64) -> f64 {
        aggregation.share(tokens) / self.denominator(aggregation)
    }
}

/// Divides a sum of losses by the batch's denominator.
#[must_use]
pub fn mean_loss(sum: f64, denominator: f64) -> f64 {
    sum / denominator
}

/// Divides this rank's gradients by the batch's denominator, which is known only when all its answers are.
pub fn divide_gradients(local: LocalGrads, denominator: f64) -> LocalGrads {
    let LocalGrads(gradients) = local;
    LocalGrads(gradients.into_iter().map(|gradient| gradient / denominator).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_do_not_depend_on_how_a_batch_is_cut() {
        let lengths = [10u64, 1000, 3];
        let batch = Batch::of(lengths.map(|tokens| Counted { tokens, scored: true }));
        let total = |aggregation| -> f64 { lengths.iter().map(|&n| batch.weight(aggregation, n) * float(n)).sum() };
        assert!((total(Aggregation::SequenceMean) - 1.0).abs() < 1e-12);
        assert!((total(Aggregation::TokenMean) - 1.0).abs() < 1e-12);
        assert!((total(Aggregation::Constant(100.0)) - 1013.0 / 300.0).abs() < 1e-12);
        assert!(batch.weight(Aggregation::TokenMean, 10) < batch.weight(Aggregation::SequenceMean, 10));
        let unscored = Batch::of([Counted { tokens: 5, scored: false }, Counted { tokens: 10, scored: true }]);
        assert!((unscored.weight(Aggregation::SequenceMean, 10) - 0.1).abs() < 1e-15);
    }
}
