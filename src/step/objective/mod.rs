//! GRPO's numbers: loss and gradient of each token.
//!
//! ```text
//!   r = e^(logprob − old)      s = e^(mean over the answer's trained tokens of logprob − old)      [x]: x without a graph
//!   clip(x) = x within 1 − low … 1 + high
//!
//!   grpo    token = −w · min(r·A, clip(r)·A)           Shao et al. 2024, arXiv 2402.03300
//!   gspo    token = −w · min(s·A, clip(s)·A)           Zheng et al. 2025, arXiv 2507.18071
//!   cispo   token = −w · [clip(r)] · A · logprob       MiniMax 2025, arXiv 2506.13585
//!
//!   token ← token + kl · estimate                      of KL(policy ‖ reference); in the loss, not in the reward
//!   loss  = Σ share · token / divisor                  the divisor belongs to the whole batch; it divides the sum of all
//!                                                      gradients once
//! ```
//!
//! 1. w is 1, or an importance weight without a graph ([`Importance`]); it does not multiply the KL term.
//! 2. With a dual clip c and A < 0 the minimum is at least c·A (Ye et al. 2020, arXiv 1912.09729).
//! 3. s belongs to the answer, so its gradient reaches every token alike: that of a token is the mean over the answer of
//!    w, times −s·A. The means are sums over all ranks of the prompt ([`SequenceMeans`]).

mod advantage;
mod batch;
mod kl;
mod sequence;
mod surrogate;
mod terms;
#[cfg(test)]
mod trl;

use tch::{Kind, Tensor};

pub use advantage::{Scaling, advantages, batch_deviation, spread};
pub use batch::{Aggregation, Batch, Counted, divide_gradients, mean_loss};
pub use sequence::{SequenceMeans, SequencePart};
pub use terms::{Importance, Objective};

use super::extremes::Range;
use crate::config::Loss;
use kl::Divergence;
use surrogate::Surrogate;

/// Some tokens of one answer, in the accumulation dtype, [t] each.
#[derive(Debug)]
pub struct AnswerTokens<'a> {
    /// Log-probabilities under the policy.
    pub logprobs: &'a Tensor,
    /// Frozen log-probabilities under the policy that is being improved upon.
    pub old: &'a Tensor,
    /// Log-probabilities under the reference policy; needed if there is a KL term.
    pub reference: Option<&'a Tensor>,
    /// Importance weights; `None`: 1 for every token.
    pub importance: Option<&'a Tensor>,
    /// The answer's advantage.
    pub advantage: f64,
    /// Weight of each token.
    pub weight: f64,
    /// 1 for tokens that are trained, 0 for those that take no part (what a tool has put into the answer); `None`: all are.
    pub trained: Option<&'a Tensor>,
    /// Means over the whole answer; needed if the ratio is the sequence's.
    pub means: Option<SequenceMeans>,
}

/// What those tokens add.
#[derive(Debug)]
pub struct Added {
    /// To the loss.
    pub loss: f64,
    /// Gradient of the loss with respect to `logprobs`, [t].
    pub dlogprobs: Tensor,
    /// Smallest and largest ratio, if there are tokens.
    pub ratio: Option<Range>,
    /// Counts and sums of the trained tokens.
    pub stats: TokenStats,
}

/// Counts and sums over trained tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct TokenStats {
    pub tokens: u64,
    /// Those whose ratio was clipped in effect from below.
    pub clipped_low: u64,
    /// And from above.
    pub clipped_high: u64,
    /// Those whose loss is bounded by the dual clip.
    pub clipped_dual: u64,
    /// The k3 estimates, without their weight; 0 without a KL term.
    pub kl: f64,
    /// Sum of the importance weights; 0 without weights.
    pub importance: f64,
    /// Tokens whose importance weight is the largest that is allowed, or 0 by a mask.
    pub importance_capped: u64,
}

impl TokenStats {
    /// Adds other tokens.
    pub fn add(&mut self, other: TokenStats) {
        self.tokens += other.tokens;
        self.clipped_low += other.clipped_low;
        self.clipped_high += other.clipped_high;
        self.clipped_dual += other.clipped_dual;
        self.kl += other.kl;
        self.importance += other.importance;
        self.importance_capped += other.importance_capped;
    }
}

/// Loss and gradient of some tokens. By hand, since the graph would be a few lines long.
///
/// # Panics
/// When the ratio is a sequence's and its means are missing.
#[must_use]
pub fn tokens(tokens: &AnswerTokens, terms: &Objective) -> Added {
    let AnswerTokens { logprobs, old, reference, importance, advantage, weight, trained, means } = *tokens;
    let token_ratio = (logprobs - old).exp();
    let ratio = match terms.loss {
        Loss::Grpo | Loss::Cispo => token_ratio.shallow_clone(),
        Loss::Gspo => means.expect("means over the answer were summed").ratio(&token_ratio),
    };
    let Surrogate { mut token, mut dtoken, clipped } = match terms.loss {
        Loss::Grpo | Loss::Gspo => surrogate::clipped(&ratio, advantage, terms),
        Loss::Cispo => surrogate::weighted(&ratio, logprobs, advantage, terms),
    };
    if let Some(importance) = importance {
        token *= importance;
        match means {
            Some(means) if terms.loss == Loss::Gspo => dtoken *= means.importance,
            _ => dtoken *= importance,
        }
    }
    let mut kl = token.zeros_like();
    if let Some(reference) = reference.filter(|_| terms.kl_coef > 0.0) {
        let Divergence { value, gradient, k3 } = kl::divergence(terms.kl_estimator, logprobs, reference, &token_ratio);
        kl = k3;
        token += value * terms.kl_coef;
        dtoken += gradient * terms.kl_coef;
    }
    let takes_part = trained.map_or_else(|| ratio.ones_like(), Tensor::shallow_clone).gt(0.0);
    // Chosen, not multiplied: a token that takes no part may have any value.
    let only = |x: &Tensor| x.where_self(&takes_part, &x.zeros_like());
    let count = |x: &Tensor| u64::try_from(x.sum(Kind::Int64).int64_value(&[])).unwrap_or(0);
    let of_those = |x: &Option<Tensor>| x.as_ref().map_or(0, |x| count(&x.logical_and(&takes_part)));
    let sum = |x: &Tensor| only(x).sum(Kind::Double).double_value(&[]);
    let (kl, loss) = (sum(&kl), sum(&token) * weight);
    let capped = importance.map(|weights| terms.importance.is_changed(weights));
    let ratios = ratio.masked_select(&takes_part);
    let any = ratios.numel() > 0;
    Added {
        loss,
        dlogprobs: only(&dtoken) * weight,
        ratio: any.then(|| Range { least: ratios.min().double_value(&[]), most: ratios.max().double_value(&[]) }),
        stats: TokenStats {
            tokens: count(&takes_part),
            clipped_low: of_those(&clipped.low),
            clipped_high: of_those(&clipped.high),
            clipped_dual: of_those(&clipped.dual),
            kl,
            importance: importance.map_or(0.0, sum),
            importance_capped: of_those(&capped),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::KlEstimator;

    const TERMS: Objective = Objective { kl_coef: 0.04, ..Objective::DEFAULT };

    /// Tokens of an answer with advantage 1 and weight 1, all trained, without reference and importance weights.
    fn plain<'a>(logprobs: &'a Tensor, old: &'a Tensor) -> AnswerTokens<'a> {
        let (advantage, weight) = (1.0, 1.0);
        AnswerTokens { logprobs, old, reference: None, importance: None, advantage, weight, trained: None, means: None }
    }

    /// Asserts that loss and gradient by hand are those of autograd, for log-probabilities `lp` that have a graph.
    #[track_caller]
    fn assert_autograd(lp: &Tensor, loss: &Tensor, added: &Added) {
        loss.backward();
        assert!((added.loss - loss.double_value(&[])).abs() < 1e-15);
        assert!((&added.dlogprobs - lp.grad()).abs().max().double_value(&[]) < 1e-15);
    }

    #[test]
    fn a_clipped_token_whose_ratio_overflows_has_no_gradient() {
        let (lp, old) = (Tensor::from_slice(&[0.0f32]), Tensor::from_slice(&[-200.0f32]));
        let added = tokens(&plain(&lp, &old), &TERMS);
        assert!((added.loss + 1.2).abs() < 1e-6 && added.dlogprobs.double_value(&[0]).abs() < 1e-12);
    }

    #[test]
    fn the_gradient_by_hand_is_autograds() {
        let old = Tensor::from_slice(&[-1.0f64, -2.0, -0.5, -3.0, -1.0]);
        let reference = Tensor::from_slice(&[-1.2f64, -1.0, -0.7, -2.5, -4.0]);
        for advantage in [1.0, -1.0, 0.7, 0.0] {
            let lp = Tensor::from_slice(&[-1.0f64, -1.0, -1.5, -2.9, -1.25]).set_requires_grad(true);
            let ratio = (&lp - &old).exp();
            let token = -(&ratio * advantage).minimum(&(ratio.clamp(0.8, 1.2) * advantage));
            let gap = &reference - &lp;
            let loss = (token + (gap.exp() - &gap - 1.0) * 0.04).sum(Kind::Double) * 0.125;
            let detached = lp.detach();
            let given =
                AnswerTokens { reference: Some(&reference), advantage, weight: 0.125, ..plain(&detached, &old) };
            assert_autograd(&lp, &loss, &tokens(&given, &TERMS));
        }
    }

    #[test]
    fn tokens_that_take_no_part_change_nothing_whatever_they_hold() {
        let (lp, old) = (Tensor::from_slice(&[-1.0f64, f64::NAN, -0.5]), Tensor::from_slice(&[-1.4f64, -1.0, -0.5]));
        let mask = Tensor::from_slice(&[1.0f64, 0.0, 1.0]);
        let all = |logprobs: &Tensor, old: &Tensor, trained: Option<&Tensor>| {
            tokens(&AnswerTokens { reference: Some(old), weight: 0.5, trained, ..plain(logprobs, old) }, &TERMS)
        };
        let part = |x: &Tensor| x.index_select(0, &Tensor::from_slice(&[0i64, 2]));
        let (masked, without) = (all(&lp, &old, Some(&mask)), all(&part(&lp), &part(&old), None));
        assert!((masked.loss - without.loss).abs() < 1e-15);
        assert_eq!((masked.stats, masked.ratio), (without.stats, without.ratio));
        assert_eq!((masked.stats.tokens, masked.stats.clipped_high), (2, 1));
        assert_eq!(
            Vec::<f64>::try_from(part(&masked.dlogprobs)).unwrap(),
            Vec::<f64>::try_from(without.dlogprobs).unwrap()
        );
        assert!(masked.dlogprobs.double_value(&[1]).abs() == 0.0);
    }

    #[test]
    fn clipped_tokens_are_told_by_their_side_and_divergence_as_a_sum() {
        let (lp, old) =
            (Tensor::from_slice(&[0.5f64, -0.5, 0.0]), Tensor::zeros([3], (Kind::Double, tch::Device::Cpu)));
        let reference = Tensor::from_slice(&[1.5f64, -0.5, 0.0]);
        let at =
            |advantage, reference| tokens(&AnswerTokens { reference, advantage, ..plain(&lp, &old) }, &TERMS).stats;
        assert_eq!(at(1.0, None), TokenStats { tokens: 3, clipped_high: 1, ..TokenStats::default() });
        assert_eq!(at(-1.0, None), TokenStats { tokens: 3, clipped_low: 1, ..TokenStats::default() });
        assert_eq!(at(0.0, None), TokenStats { tokens: 3, ..TokenStats::default() });
        let mut sum = at(1.0, Some(&reference));
        sum.add(at(-1.0, Some(&reference)));
        assert_eq!((sum.tokens, sum.clipped_low, sum.clipped_high), (6, 1, 1));
        assert!((sum.kl - 2.0 * (1.0_f64.exp() - 2.0)).abs() < 1e-12);
    }

    #[test]
    fn kl_weight_changes_the_gradient_of_a_policy_that_has_moved() {
        let (lp, old, reference) = (Tensor::from(-1.0f64), Tensor::from(-1.0f64), Tensor::from(-2.0f64));
        let at = |kl_coef| {
            let given = AnswerTokens { reference: Some(&reference), advantage: 0.5, ..plain(&lp, &old) };
            tokens(&given, &Objective { kl_coef, ..TERMS }).dlogprobs.double_value(&[])
        };
        assert!((at(0.0) + 0.5).abs() < 1e-15);
        assert!((at(10.0) - (-0.5 + 10.0 * (1.0 - (-1.0f64).exp()))).abs() < 1e-12);
    }

    /// Autograd of the formula, with weights that carry no graph.
    #[test]
    fn importance_weights_multiply_the_surrogate_and_not_the_kl_term() {
        let slice = |numbers: [f64; 4]| Tensor::from_slice(&numbers);
        let (old, reference) = (slice([-1.0, -2.0, -0.5, -3.0]), slice([-1.2, -1.0, -0.7, -2.5]));
        let weights = slice([0.25, 3.0, 1.0, 0.5]);
        let terms = Objective { importance: Importance::Token { most: 3.0 }, ..TERMS };
        for advantage in [0.7, -1.3] {
            let lp = slice([-1.0, -1.0, -1.5, -2.9]).set_requires_grad(true);
            let ratio = (&lp - &old).exp();
            let surrogate = (&ratio * advantage).minimum(&(ratio.clamp(0.8, 1.2) * advantage));
            let gap = &reference - &lp;
            let loss = (-surrogate * &weights + (gap.exp() - &gap - 1.0) * 0.04).sum(Kind::Double) * 0.125;
            let detached = lp.detach();
            let (reference, importance) = (Some(&reference), Some(&weights));
            let given = AnswerTokens { reference, importance, advantage, weight: 0.125, ..plain(&detached, &old) };
            let added = tokens(&given, &terms);
            assert_autograd(&lp, &loss, &added);
            assert_eq!((added.stats.importance.to_bits(), added.stats.importance_capped), (4.75f64.to_bits(), 1));
        }
    }

    /// Loss and gradient of `terms` with these log-probabilities, old ones 0 and advantage `advantage`.
    fn at(logprobs: &[f64], advantage: f64, terms: &Objective) -> Added {
        let lp = Tensor::from_slice(logprobs);
        let (old, reference) = (lp.zeros_like(), &lp * 0.5);
        let mean = logprobs.iter().sum::<f64>() / f64::from(u32::try_from(logprobs.len()).unwrap());
        let means = Some(SequenceMeans { log_ratio: mean, importance: 1.0 });
        let given = AnswerTokens { reference: Some(&reference), advantage, means, ..plain(&lp, &old) };
        tokens(&given, terms)
    }

    fn values(x: &Tensor) -> Vec<f64> {
        Vec::try_from(x).unwrap()
    }

    #[test]
    fn a_dual_clip_bounds_the_loss_of_a_negative_advantage_and_stops_its_gradient() {
        let terms = Objective { clip_dual: Some(3.0), ..Objective::DEFAULT };
        let ratios = [0.5f64.ln(), 2.0f64.ln(), 5.0f64.ln(), 800.0];
        let added = at(&ratios, -1.0, &terms);
        assert!((added.loss - (0.8 + 2.0 + 3.0 + 3.0)).abs() < 1e-12, "{added:?}");
        let expected = [0.0, 2.0, 0.0, 0.0];
        assert!(values(&added.dlogprobs).iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-12), "{added:?}");
        assert_eq!((added.stats.clipped_low, added.stats.clipped_dual), (1, 2));
        let positive = at(&ratios[..3], 1.0, &terms);
        assert_eq!(values(&positive.dlogprobs), values(&at(&ratios[..3], 1.0, &Objective::DEFAULT).dlogprobs));
        assert_eq!(positive.stats.clipped_dual, 0);
    }

    #[test]
    fn a_weighted_log_probability_keeps_the_gradient_of_every_token() {
        let terms = Objective { loss: Loss::Cispo, clip_low: 1.0, clip_high: 1.0, ..Objective::DEFAULT };
        let added = at(&[5.0f64.ln(), 0.0, -40.0], 0.5, &terms);
        let found = values(&added.dlogprobs);
        assert!((found[0] + 1.0).abs() < 1e-12 && (found[1] + 0.5).abs() < 1e-12 && found[2] < 0.0, "{found:?}");
        assert!((added.loss + 0.5 * (2.0 * 5.0f64.ln() - 40.0 * (-40.0f64).exp())).abs() < 1e-12);
        assert_eq!((added.stats.clipped_low, added.stats.clipped_high), (0, 1));
        let none = at(&[5.0f64.ln()], 0.0, &terms);
        assert_eq!(none.stats.clipped_high, 0, "without an advantage no bound has an effect");
    }

    #[test]
    fn a_sequence_is_clipped_as_a_whole() {
        let terms = Objective { loss: Loss::Gspo, ..Objective::DEFAULT };
        let inside = at(&[0.9, -0.7], 1.0, &terms);
        let ratio = 0.1f64.exp();
        assert!(values(&inside.dlogprobs).iter().all(|x| (x + ratio).abs() < 1e-12), "{inside:?}");
        assert!((inside.loss + 2.0 * ratio).abs() < 1e-12);
        let outside = at(&[0.9, -0.3], 1.0, &terms);
        assert_eq!((values(&outside.dlogprobs), outside.stats.clipped_high), (vec![0.0, 0.0], 2));
        assert!((outside.loss + 2.4).abs() < 1e-12);
    }

    /// Sums over a vocabulary of four tokens, drawn by the old policy, in the place of samples.
    #[test]
    fn estimates_have_the_mean_gradients_that_are_said_of_them() {
        let logits = |numbers: [f64; 4]| Tensor::from_slice(&numbers).log_softmax(-1, Kind::Double);
        let reference = logits([0.3, -0.2, 0.9, 0.0]);
        let theta = Tensor::from_slice(&[0.1f64, 0.7, -0.4, 0.2]).set_requires_grad(true);
        let logprobs = theta.log_softmax(-1, Kind::Double);
        let gradient = |loss: &Tensor| values(&Tensor::run_backward(&[loss], &[&theta], true, false)[0]);
        let forward = gradient(&(logprobs.exp() * (&logprobs - &reference)).sum(Kind::Double));
        let backward = gradient(&(reference.exp() * (&reference - &logprobs)).sum(Kind::Double));
        let mean = |estimator, old: &Tensor| {
            let detached = logprobs.detach();
            let estimate = kl::divergence(estimator, &detached, &reference, &(&detached - old).exp());
            gradient(&(old.exp() * estimate.gradient * &logprobs).sum(Kind::Double))
        };
        let near = |found: Vec<f64>, expected: &[f64]| found.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-12);
        let (policy, other) = (logprobs.detach(), logits([0.0, 0.5, -0.5, 1.0]));
        assert!(near(mean(KlEstimator::K1, &policy), &[0.0; 4]), "k1 pulls nowhere");
        assert!(near(mean(KlEstimator::K2, &policy), &forward));
        assert!(near(mean(KlEstimator::K3, &policy), &backward));
        assert!(near(mean(KlEstimator::K3Ratio, &policy), &forward));
        assert!(near(mean(KlEstimator::K3Ratio, &other), &forward), "whatever policy drew the token");
        assert!(!near(mean(KlEstimator::K2, &other), &forward));
    }

    #[test]
    fn estimates_add_their_value_and_gradient_and_metrics_count_k3() {
        for estimator in [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::K3Ratio] {
            let terms = Objective { kl_coef: 2.0, kl_estimator: estimator, ..Objective::DEFAULT };
            let added = at(&[0.6], 0.0, &terms);
            let lp = Tensor::from_slice(&[0.6f64]).set_requires_grad(true);
            let gap = lp.detach() * 0.5 - &lp;
            let k3: Tensor = gap.exp() - &gap - 1.0;
            let estimate = match estimator {
                KlEstimator::K1 => -&gap,
                KlEstimator::K2 => &gap * &gap / 2.0,
                KlEstimator::K3 => k3.shallow_clone(),
                KlEstimator::K3Ratio => lp.exp() * &k3,
            };
            assert_autograd(&lp, &(estimate * 2.0).sum(Kind::Double), &added);
            assert!((added.stats.kl - k3.sum(Kind::Double).double_value(&[])).abs() < 1e-15);
        }
    }
}
