//! The settings of the objective.

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
}

impl Importance {
    /// The largest weight; infinity without weights.
    #[must_use]
    pub fn most(self) -> f64 {
        match self {
            Importance::Ratio => f64::INFINITY,
            Importance::Token { most } | Importance::Sequence { most } => most,
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
