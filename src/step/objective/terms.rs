//! The settings of the objective.

use tch::Tensor;

use super::batch::Aggregation;
use crate::config::{KlEstimator, Loss};

/// What log-probabilities that come with the answers are for, from whoever drew them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Importance {
    /// They are the old policy of the ratio.
    Ratio,
    /// The old policy is the scored one; each token weighs e^(scored − given), at most `most`.
    Token {
        /// The largest weight.
        most: f64,
    },
    /// The old policy is the scored one; each token weighs e^(Σ (scored − given)) of its answer, at most `most`.
    Sequence {
        /// The largest weight.
        most: f64,
    },
    /// As [`Importance::Token`], but the weight is 0 where it would lie outside the bounds: such a token is in no clipped term.
    TokenMask {
        /// The smallest weight.
        least: f64,
        /// The largest weight.
        most: f64,
    },
    /// As [`Importance::Sequence`], but the weight is 0 where it would lie outside the bounds.
    SequenceMask {
        /// The smallest weight.
        least: f64,
        /// The largest weight.
        most: f64,
    },
}

impl Importance {
    /// The largest weight; infinity without weights.
    #[must_use]
    pub fn most(self) -> f64 {
        match self {
            Importance::Ratio => f64::INFINITY,
            Importance::Token { most }
            | Importance::Sequence { most }
            | Importance::TokenMask { most, .. }
            | Importance::SequenceMask { most, .. } => most,
        }
    }

    /// A weight within the bounds: truncated, or 0 where a mask leaves it out.
    #[must_use]
    pub fn bounded(self, weight: f64) -> f64 {
        match self {
            Importance::Ratio => 1.0,
            Importance::Token { most } | Importance::Sequence { most } => weight.min(most),
            Importance::TokenMask { least, most } | Importance::SequenceMask { least, most } => {
                if (least..=most).contains(&weight) { weight } else { 0.0 }
            }
        }
    }

    /// [`Importance::bounded`] of many weights.
    pub fn all_bounded(self, weights: &Tensor) -> Tensor {
        match self {
            Importance::Ratio => weights.ones_like(),
            Importance::Token { most } | Importance::Sequence { most } => weights.clamp_max(most),
            Importance::TokenMask { least, most } | Importance::SequenceMask { least, most } => {
                let inside = weights.ge(least).logical_and(&weights.le(most));
                weights.where_self(&inside, &weights.zeros_like())
            }
        }
    }

    /// Whether a bound has changed each of these weights, which are bounded.
    pub fn is_changed(self, bounded: &Tensor) -> Tensor {
        match self {
            Importance::TokenMask { .. } | Importance::SequenceMask { .. } => bounded.eq(0.0),
            _ => bounded.ge(self.most()),
        }
    }
}

/// The objective's settings.
#[derive(Clone, Copy, Debug)]
pub struct Objective {
    /// What is improved.
    pub loss: Loss,
    /// Ratios below 1 − `clip_low` are clipped.
    pub clip_low: f64,
    /// Ratios above 1 + `clip_high` are clipped.
    pub clip_high: f64,
    /// For a negative advantage the loss counts the ratio as at most this; `None`: no such bound.
    pub clip_dual: Option<f64>,
    /// Weight of the KL term; 0 leaves it out.
    pub kl_coef: f64,
    /// What the KL term is.
    pub kl_estimator: KlEstimator,
    /// How tokens weigh.
    pub aggregation: Aggregation,
    /// What log-probabilities that come with the answers are for.
    pub importance: Importance,
}

impl Objective {
    /// The configuration's defaults: ratios of tokens, clips of 0.2, no KL term, every answer weighs the same, no importance
    /// weights.
    pub const DEFAULT: Objective = Objective {
        loss: Loss::Grpo,
        clip_low: 0.2,
        clip_high: 0.2,
        clip_dual: None,
        kl_coef: 0.0,
        kl_estimator: KlEstimator::K3,
        aggregation: Aggregation::SequenceMean,
        importance: Importance::Ratio,
    };
}
