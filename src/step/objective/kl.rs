//! Estimates of KL(policy ‖ reference) from one token, with d = ref − logprob and r = e^(logprob − old).
//!
//! ```text
//!   k1         −d                     gradient 1           its mean under the policy is 0: it pulls nowhere
//!   k2         d² / 2                 gradient −d          that of the divergence where the policy drew the token
//!   k3         e^d − d − 1            gradient 1 − e^d     that of KL(reference ‖ policy) where the policy drew the token
//!   k3_ratio   r · (e^d − d − 1)      gradient −r · d      that of the divergence, whatever policy drew the token
//! ```
//!
//! k1, k2 and k3: Schulman's note on estimates of KL. The value of k3 has no bias and its gradient has one; times the ratio both have
//! none (DeepSeek-V3.2, arXiv 2512.02556). r is the token's own ratio, without a clip, in every loss.

use tch::Tensor;

use crate::config::KlEstimator;

/// The estimates of some tokens, [t] each.
pub(super) struct Divergence {
    pub(super) value: Tensor,
    /// With respect to the log-probabilities.
    pub(super) gradient: Tensor,
    /// What metrics count, whatever the loss has.
    pub(super) k3: Tensor,
}

pub(super) fn divergence(
    estimator: KlEstimator,
    logprobs: &Tensor,
    reference: &Tensor,
    token_ratio: &Tensor,
) -> Divergence {
    let gap = reference - logprobs;
    let k3 = gap.exp() - &gap - 1.0;
    let (value, gradient) = match estimator {
        KlEstimator::K1 => (-&gap, gap.ones_like()),
        KlEstimator::K2 => (gap.square() * 0.5, -&gap),
        KlEstimator::K3 => (k3.shallow_clone(), 1.0 - gap.exp()),
        KlEstimator::K3Ratio => (token_ratio * &k3, -(token_ratio * &gap)),
    };
    Divergence { value, gradient, k3 }
}
