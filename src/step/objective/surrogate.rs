//! What is improved: the ratio within its clips, or the log-probability weighted by it.

use tch::Tensor;

use super::terms::Objective;

/// Loss of some tokens before importance weights, with its gradient, [t] each.
pub(super) struct Surrogate {
    pub(super) token: Tensor,
    /// With respect to the tokens' log-probabilities; of a sequence's ratio, before the mean over the answer.
    pub(super) dtoken: Tensor,
    pub(super) clipped: Clipped,
}

/// Which tokens a bound has changed, [t]; `None`: none.
#[derive(Default)]
pub(super) struct Clipped {
    pub(super) low: Option<Tensor>,
    pub(super) high: Option<Tensor>,
    pub(super) dual: Option<Tensor>,
}

/// The smaller of the free and the clipped ratio, times the advantage; a clipped token has no gradient.
pub(super) fn clipped(ratio: &Tensor, advantage: f64, terms: &Objective) -> Surrogate {
    let free = ratio * advantage;
    let bounded = ratio.clamp(1.0 - terms.clip_low, 1.0 + terms.clip_high) * advantage;
    let mut active = free.le_tensor(&bounded);
    let outside = Some(active.logical_not());
    // A token is clipped from below where its advantage is negative, else from above.
    let mut clipped = if advantage < 0.0 {
        Clipped { low: outside, ..Clipped::default() }
    } else {
        Clipped { high: outside, ..Clipped::default() }
    };
    let mut gain = free.minimum(&bounded);
    if let Some(least) = terms.clip_dual.filter(|_| advantage < 0.0).map(|most| most * advantage) {
        let beyond = free.lt(least);
        gain = gain.clamp_min(least);
        active = active.logical_and(&beyond.logical_not());
        clipped.dual = Some(beyond);
    }
    // Chosen, not multiplied: a clipped token has no gradient, also where its ratio has overflowed.
    Surrogate { token: -gain, dtoken: -free.where_self(&active, &free.zeros_like()), clipped }
}

/// The log-probability times the clipped ratio, which has no graph, times the advantage; every token has a gradient.
pub(super) fn weighted(ratio: &Tensor, logprobs: &Tensor, advantage: f64, terms: &Objective) -> Surrogate {
    let (least, most) = (1.0 - terms.clip_low, 1.0 + terms.clip_high);
    let weights = ratio.clamp(least, most) * advantage;
    let changes = advantage != 0.0;
    let clipped = Clipped { low: changes.then(|| ratio.lt(least)), high: changes.then(|| ratio.gt(most)), dual: None };
    Surrogate { token: -(&weights * logprobs), dtoken: -weights, clipped }
}
