//! Log-probabilities that came with the answers, from whoever drew them, before they enter the loss.
//!
//! ```text
//!   ratio      r = e^(logprob − given)                                             the loss as in `objective`
//!   token      r = e^(logprob − scored),  weight of a token     min(e^(scored − given), most)
//!   sequence   r = e^(logprob − scored),  weight of its tokens  min(e^(Σ (scored − given)), most)
//!   token_mask, sequence_mask   the same before the bound, and 0 instead of a weight outside least … most
//! ```
//!
//! A mask takes tokens, or whole answers, out of the clipped term and leaves them in the denominators, as TRL's does.
//!
//! Weights are truncated importance weights without a graph (Ionides 2008; Yao et al. 2025 for answers of another engine). The
//! sum of a sequence is over its trained tokens, on all ranks of the prompt. A token without a log-probability takes its score,
//! so its ratio starts at 1 and its weight is 1.

use std::cell::RefCell;
use tch::{Kind, Tensor};

use super::objective::Importance;
use super::replay::{FrozenScores, TrainedAnswer};
use crate::prompt::handoff::{Logprobs, PlacedGroup, Scores};
use crate::world::Axis;
use crate::world::exchange::sum_number;

/// Log-probabilities of an answer as `given`, [t] in the dtype and on the device of `scored`; a missing one is that of `scored`.
pub fn fill(scored: &Tensor, given: &[Option<f64>]) -> Tensor {
    let numbers: Vec<f64> = given.iter().map(|logprob| logprob.unwrap_or(f64::NAN)).collect();
    let numbers = Tensor::from_slice(&numbers).to_kind(scored.kind()).to_device(scored.device());
    numbers.where_self(&numbers.isnan().logical_not(), scored)
}

/// Sum over the trained tokens of `scored` − `given`, nats. `trained`: 1 where a token is trained, else 0; `None`: all are.
#[must_use]
pub fn log_weight(scored: &Tensor, given: &Tensor, trained: Option<&Tensor>) -> f64 {
    let log_weights = scored - given;
    let log_weights = match trained {
        Some(trained) => log_weights.where_self(&trained.to_device(scored.device()).gt(0.0), &log_weights.zeros_like()),
        None => log_weights,
    };
    log_weights.sum(Kind::Double).double_value(&[])
}

/// The old policy's log-probabilities, and the importance weights where the rule has some, [t] each. `given` is filled;
/// `log_weight` is the sum over the whole answer.
pub fn split(rule: Importance, scored: &Tensor, given: &Tensor, log_weight: f64) -> (Tensor, Option<Tensor>) {
    match rule {
        Importance::Ratio => (given.shallow_clone(), None),
        Importance::Token { .. } | Importance::TokenMask { .. } => {
            (scored.shallow_clone(), Some(rule.all_bounded(&(scored - given).exp())))
        }
        Importance::Sequence { .. } | Importance::SequenceMask { .. } => {
            (scored.shallow_clone(), Some(scored.full_like(rule.bounded(log_weight.exp()))))
        }
    }
}

/// Freezes the scores of a group for the updates of a round. Every rank of the prompt takes part.
#[must_use]
pub fn freeze(
    rule: Importance,
    scored: Scores,
    reference: Option<Scores>,
    group: &PlacedGroup,
    answers: &[TrainedAnswer],
    cp: &Axis,
) -> FrozenScores {
    if answers.iter().all(|answer| answer.given.is_none()) && rule == Importance::Ratio {
        return FrozenScores { old: scored, reference, importance: None, choices: RefCell::default() };
    }
    let mut old = Vec::new();
    let mut weights = Vec::new();
    for ((own, answer), placed) in scored.0.into_iter().zip(answers).zip(&group.answers) {
        let rank = cp.rank();
        let missing = vec![None; placed.ids.len()];
        let given = answer.given.as_ref().unwrap_or(&missing);
        let rows = fill(&own.rows, &group.own_tokens(placed, rank, given));
        let first = own.first.as_ref().map(|first| fill(first, &given[..1]));
        let mut log_sum = log_weight(&own.rows, &rows, group.trained(placed, rank).as_ref());
        if let (Some(scored), Some(given)) = (&own.first, &first) {
            log_sum += log_weight(scored, given, placed.first_is_trained().as_ref());
        }
        let log_sum = sum_number(cp, log_sum);
        let (old_rows, row_weights) = split(rule, &own.rows, &rows, log_sum);
        let first = own.first.as_ref().zip(first).map(|(scored, given)| split(rule, scored, &given, log_sum));
        let (old_first, first_weight) = first.map_or((None, None), |(old, weight)| (Some(old), weight));
        old.push(Logprobs { rows: old_rows, first: old_first });
        weights.extend(row_weights.map(|rows| Logprobs { rows, first: first_weight }));
    }
    let importance = (rule != Importance::Ratio).then_some(Scores(weights));
    FrozenScores { old: Scores(old), reference, importance, choices: RefCell::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_without_a_log_probability_takes_its_score() {
        let scored = Tensor::from_slice(&[-1.0f32, -2.0, -3.0]);
        let given = fill(&scored, &[Some(-1.5), None, Some(-2.5)]);
        assert_eq!(Vec::<f32>::try_from(&given).unwrap(), [-1.5, -2.0, -2.5]);
        assert_eq!(given.kind(), Kind::Float);
        let trained = Tensor::from_slice(&[1.0f32, 1.0, 0.0]);
        assert!((log_weight(&scored, &given, None) - 0.0).abs() < 1e-12);
        assert!((log_weight(&scored, &given, Some(&trained)) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn weights_are_truncated_and_the_ratio_starts_at_one() {
        let (scored, given) = (Tensor::from_slice(&[-1.0f64, -1.0]), Tensor::from_slice(&[-3.0f64, -0.5]));
        let weights = |rule| {
            let (old, weights) = split(rule, &scored, &given, log_weight(&scored, &given, None));
            (Vec::<f64>::try_from(old).unwrap(), weights.map(|weights| Vec::<f64>::try_from(weights).unwrap()))
        };
        assert_eq!(weights(Importance::Ratio), (vec![-3.0, -0.5], None));
        let (old, token) = weights(Importance::Token { most: 2.0 });
        assert_eq!((old, token), (vec![-1.0, -1.0], Some(vec![2.0, (-0.5f64).exp()])));
        assert_eq!(weights(Importance::Sequence { most: 10.0 }).1, Some(vec![1.5f64.exp(); 2]));
        assert_eq!(weights(Importance::Sequence { most: 3.0 }).1, Some(vec![3.0; 2]));
    }

    #[test]
    fn a_mask_has_the_weight_or_nothing() {
        let (scored, given) = (Tensor::from_slice(&[-1.0f64, -1.0, -9.0]), Tensor::from_slice(&[-3.0f64, -0.5, -9.0]));
        let weights = |rule| {
            let (_, weights) = split(rule, &scored, &given, log_weight(&scored, &given, None));
            Vec::<f64>::try_from(weights.unwrap()).unwrap()
        };
        let low = (-0.5f64).exp();
        assert_eq!(weights(Importance::TokenMask { least: 0.0, most: 2.0 }), [0.0, low, 1.0]);
        assert_eq!(weights(Importance::TokenMask { least: 0.7, most: 8.0 }), [2.0f64.exp(), 0.0, 1.0]);
        assert_eq!(weights(Importance::TokenMask { least: low, most: 2.0 }), [0.0, low, 1.0]);
        assert_eq!(weights(Importance::SequenceMask { least: 0.5, most: 4.0 }), [0.0; 3]);
        assert_eq!(weights(Importance::SequenceMask { least: 0.5, most: 5.0 }), [1.5f64.exp(); 3]);
        assert_eq!(weights(Importance::SequenceMask { least: 4.6, most: 5.0 }), [0.0; 3]);
    }
}
