//! GRPO's numbers: advantages of a group, and loss and gradient of each token.
//!
//! ```text
//!   token = −w·min(r·A, clip(r, 1 − low, 1 + high)·A)  [+ kl · (e^d − d − 1)]   r = e^(logprob − old), d = ref − logprob
//!   loss  = Σ share · token / divisor        the divisor belongs to the whole batch; it divides the sum of all gradients once
//! ```
//!
//! The KL term is the k3 estimate of KL(policy ‖ reference), in the loss (not the reward), without importance weights.
//! (Shao et al. 2024, arXiv 2402.03300; Schulman's note on estimates of KL.) Advantages divide by the *population*
//! standard deviation, so rewards 0 and 1 give −1 and +1. w is 1, or an importance weight without a graph ([`Importance`]).

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::extremes::Range;
use crate::prompt::handoff::LocalGrads;
use crate::runtime::units::{float, from_index};

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

/// What advantages are divided by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// The deviation of the group's rewards, at least `std_min`.
    Group {
        /// Floor of the deviation.
        std_min: f64,
    },
    /// Nothing. A division by the deviation of the whole batch comes later, with the batch's denominator.
    None,
}

/// The objective's settings.
#[derive(Clone, Copy, Debug)]
pub struct Objective {
    /// Ratios below 1 − `clip_low` are clipped.
    pub clip_low: f64,
    /// Ratios above 1 + `clip_high` are clipped.
    pub clip_high: f64,
    /// Weight of the KL term; 0 leaves it out.
    pub kl_coef: f64,
    /// How tokens weigh.
    pub aggregation: Aggregation,
    /// What log-probabilities that come with the answers are for.
    pub importance: Importance,
}

impl Objective {
    /// The configuration's defaults: clips of 0.2, no KL term, every answer weighs the same, no importance weights.
    pub const DEFAULT: Objective = Objective {
        clip_low: 0.2,
        clip_high: 0.2,
        kl_coef: 0.0,
        aggregation: Aggregation::SequenceMean,
        importance: Importance::Ratio,
    };
}

/// Rewards this close together, relative to the largest, are equal: what is left is rounding of how they were summed.
const EQUAL: f64 = 1e-9;

/// Smallest and largest of the known rewards, if they differ by more than rounding.
#[must_use]
pub fn spread(rewards: &[Option<f64>]) -> Option<(f64, f64)> {
    let known = || rewards.iter().filter_map(|&reward| reward);
    let (least, most) = (known().fold(f64::INFINITY, f64::min), known().fold(f64::NEG_INFINITY, f64::max));
    // Halved, so that the difference of two finite numbers stays finite.
    let apart = most * 0.5 - least * 0.5;
    (apart > EQUAL * 0.5 * least.abs().max(most.abs())).then_some((least, most))
}

/// Advantage of each answer from the group's rewards. A missing reward (`None`) gives `None` and takes no part in mean
/// and deviation; a group whose rewards are all equal, but for rounding, gives exactly 0.
#[must_use]
pub fn advantages(rewards: &[Option<f64>], scaling: Scaling) -> Vec<Option<f64>> {
    let Some(Stretched { rewards, half_width, mean, deviation }) = stretch(rewards) else {
        return rewards.iter().map(|reward| reward.map(|_| 0.0)).collect();
    };
    let unit = match scaling {
        Scaling::Group { std_min } => 1.0 / deviation.max(std_min * 0.5 / half_width),
        Scaling::None => 2.0 * half_width,
    };
    rewards.iter().map(|reward| reward.map(|reward| (reward - mean) * unit)).collect()
}

/// What the gradient of a whole batch is divided by where advantages are scaled by the batch: the population standard
/// deviation of all its known rewards, at least `std_min`. 1 where both are 0, since no advantage is left then.
#[must_use]
pub fn batch_deviation(rewards: &[Option<f64>], std_min: f64) -> f64 {
    let deviation = stretch(rewards).map_or(0.0, |stretched| stretched.deviation * 2.0 * stretched.half_width);
    let floored = deviation.max(std_min);
    if floored > 0.0 { floored } else { 1.0 }
}

/// Rewards brought to 0..1: the deviation of very small or very large ones would under- or overflow.
struct Stretched {
    rewards: Vec<Option<f64>>,
    /// Half the distance of the smallest and the largest reward.
    half_width: f64,
    /// Of the known ones among `rewards`.
    mean: f64,
    /// Likewise, of the population.
    deviation: f64,
}

/// `None` where the known rewards are equal, but for rounding.
fn stretch(rewards: &[Option<f64>]) -> Option<Stretched> {
    let (least, most) = spread(rewards)?;
    let (half, half_width) = (least * 0.5, most * 0.5 - least * 0.5);
    let rewards: Vec<Option<f64>> =
        rewards.iter().map(|reward| reward.map(|reward| (reward * 0.5 - half) / half_width)).collect();
    let known: Vec<f64> = rewards.iter().filter_map(|&reward| reward).collect();
    let count = float(from_index(known.len()));
    let mean = known.iter().sum::<f64>() / count;
    let deviation = (known.iter().map(|reward| (reward - mean).powi(2)).sum::<f64>() / count).sqrt();
    Some(Stretched { rewards, half_width, mean, deviation })
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
    /// The k3 estimates, without their weight; 0 without a KL term.
    pub kl: f64,
    /// Sum of the importance weights; 0 without weights.
    pub importance: f64,
    /// Tokens whose importance weight is the largest that is allowed.
    pub importance_capped: u64,
}

impl TokenStats {
    /// Adds other tokens.
    pub fn add(&mut self, other: TokenStats) {
        self.tokens += other.tokens;
        self.clipped_low += other.clipped_low;
        self.clipped_high += other.clipped_high;
        self.kl += other.kl;
        self.importance += other.importance;
        self.importance_capped += other.importance_capped;
    }
}

/// Loss and gradient of some tokens. By hand, since the graph would be three lines long.
#[must_use]
pub fn tokens(tokens: &AnswerTokens, terms: &Objective) -> Added {
    let AnswerTokens { logprobs, old, reference, importance, advantage, weight, trained } = *tokens;
    let ratio = (logprobs - old).exp();
    let free = &ratio * advantage;
    let bounded = ratio.clamp(1.0 - terms.clip_low, 1.0 + terms.clip_high) * advantage;
    let active = free.le_tensor(&bounded);
    let mut token = -free.minimum(&bounded);
    // A clipped token has no gradient, also where its ratio has overflowed.
    let mut dtoken = -free.where_self(&active, &free.zeros_like());
    if let Some(importance) = importance {
        token *= importance;
        dtoken *= importance;
    }
    let mut kl = token.zeros_like();
    if let Some(reference) = reference.filter(|_| terms.kl_coef > 0.0) {
        let gap = reference - logprobs;
        kl = gap.exp() - &gap - 1.0;
        token += &kl * terms.kl_coef;
        dtoken += (1.0 - gap.exp()) * terms.kl_coef;
    }
    let takes_part = trained.map_or_else(|| ratio.ones_like(), Tensor::shallow_clone).gt(0.0);
    // Chosen, not multiplied: a token that takes no part may have any value.
    let only = |x: &Tensor| x.where_self(&takes_part, &x.zeros_like());
    let count = |x: &Tensor| u64::try_from(x.sum(Kind::Int64).int64_value(&[])).unwrap_or(0);
    // A token is clipped from below where its advantage is negative, else from above.
    let clipped = count(&active.logical_not().logical_and(&takes_part));
    let (clipped_low, clipped_high) = if advantage < 0.0 { (clipped, 0) } else { (0, clipped) };
    let sum = |x: &Tensor| only(x).sum(Kind::Double).double_value(&[]);
    let (kl, loss) = (sum(&kl), sum(&token) * weight);
    let capped = importance.map(|weights| weights.ge(terms.importance.most()).logical_and(&takes_part));
    let ratios = ratio.masked_select(&takes_part);
    let any = ratios.numel() > 0;
    Added {
        loss,
        dlogprobs: only(&dtoken) * weight,
        ratio: any.then(|| Range { least: ratios.min().double_value(&[]), most: ratios.max().double_value(&[]) }),
        stats: TokenStats {
            tokens: count(&takes_part),
            clipped_low,
            clipped_high,
            kl,
            importance: importance.map_or(0.0, sum),
            importance_capped: capped.as_ref().map_or(0, count),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Objective = Objective { kl_coef: 0.04, ..Objective::DEFAULT };
    const GROUP: Scaling = Scaling::Group { std_min: 0.0 };

    #[test]
    fn rewards_0_and_1_give_minus_and_plus_one() {
        assert_eq!(advantages(&[Some(0.0), Some(1.0)], GROUP), [Some(-1.0), Some(1.0)]);
        assert_eq!(advantages(&[Some(0.0), Some(1.0)], Scaling::None), [Some(-0.5), Some(0.5)]);
    }

    #[test]
    fn equal_rewards_give_exactly_zero_and_a_missing_one_takes_no_part() {
        assert_eq!(advantages(&[Some(0.1); 3], GROUP), [Some(0.0); 3]);
        assert_eq!(advantages(&[Some(1.0), None], GROUP), [Some(0.0), None]);
        assert_eq!(advantages(&[None, None], GROUP), [None, None]);
        assert_eq!(advantages(&[Some(0.0), None, Some(1.0)], GROUP), [Some(-1.0), None, Some(1.0)]);
        assert_eq!(advantages(&[Some(0.1 + 0.2), Some(0.3)], GROUP), [Some(0.0); 2]);
        assert_eq!(advantages(&[Some(0.7), Some(0.1 * 7.0)], GROUP), [Some(0.0); 2]);
    }

    #[test]
    fn tiny_and_huge_rewards_give_finite_advantages() {
        for pair in [[0.0, 1e-200], [0.0, 1e200], [-1e308, 1e308]] {
            assert_eq!(advantages(&pair.map(Some), GROUP), [Some(-1.0), Some(1.0)], "{pair:?}");
        }
        let three = advantages(&[Some(1e308), Some(1e308), Some(0.0)], GROUP);
        assert!(three.iter().flatten().all(|advantage| advantage.is_finite()));
        assert_eq!(advantages(&[Some(-3.0), Some(5.0)], Scaling::None), [Some(-4.0), Some(4.0)]);
    }

    #[test]
    fn a_clipped_token_whose_ratio_overflows_has_no_gradient() {
        let (lp, old) = (Tensor::from_slice(&[0.0f32]), Tensor::from_slice(&[-200.0f32]));
        let given = AnswerTokens {
            logprobs: &lp,
            old: &old,
            reference: None,
            importance: None,
            advantage: 1.0,
            weight: 1.0,
            trained: None,
        };
        let added = tokens(&given, &TERMS);
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
            loss.backward();
            let detached = lp.detach();
            let given = AnswerTokens {
                logprobs: &detached,
                old: &old,
                reference: Some(&reference),
                importance: None,
                advantage,
                weight: 0.125,
                trained: None,
            };
            let added = tokens(&given, &TERMS);
            assert!((added.loss - loss.double_value(&[])).abs() < 1e-15);
            assert!((added.dlogprobs - lp.grad()).abs().max().double_value(&[]) < 1e-15);
        }
    }

    #[test]
    fn tokens_that_take_no_part_change_nothing_whatever_they_hold() {
        let (lp, old) = (Tensor::from_slice(&[-1.0f64, f64::NAN, -0.5]), Tensor::from_slice(&[-1.4f64, -1.0, -0.5]));
        let mask = Tensor::from_slice(&[1.0f64, 0.0, 1.0]);
        let all = |logprobs: &Tensor, old: &Tensor, trained: Option<&Tensor>| {
            tokens(
                &AnswerTokens {
                    logprobs,
                    old,
                    reference: Some(old),
                    importance: None,
                    advantage: 1.0,
                    weight: 0.5,
                    trained,
                },
                &TERMS,
            )
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
        let at = |advantage, reference| {
            let given = AnswerTokens {
                logprobs: &lp,
                old: &old,
                reference,
                importance: None,
                advantage,
                weight: 1.0,
                trained: None,
            };
            tokens(&given, &TERMS).stats
        };
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
            let given = AnswerTokens {
                logprobs: &lp,
                old: &old,
                reference: Some(&reference),
                importance: None,
                advantage: 0.5,
                weight: 1.0,
                trained: None,
            };
            tokens(&given, &Objective { kl_coef, ..TERMS }).dlogprobs.double_value(&[])
        };
        assert!((at(0.0) + 0.5).abs() < 1e-15);
        assert!((at(10.0) - (-0.5 + 10.0 * (1.0 - (-1.0f64).exp()))).abs() < 1e-12);
    }

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
            loss.backward();
            let detached = lp.detach();
            let given = AnswerTokens {
                logprobs: &detached,
                old: &old,
                reference: Some(&reference),
                importance: Some(&weights),
                advantage,
                weight: 0.125,
                trained: None,
            };
            let added = tokens(&given, &terms);
            assert!((added.loss - loss.double_value(&[])).abs() < 1e-15);
            assert!((added.dlogprobs - lp.grad()).abs().max().double_value(&[]) < 1e-15);
            assert_eq!((added.stats.importance.to_bits(), added.stats.importance_capped), (4.75f64.to_bits(), 1));
        }
    }

    #[test]
    fn a_small_deviation_is_not_stretched_to_one_where_it_has_a_floor() {
        let noise = [Some(0.50), Some(0.52)];
        let floored = |std_min| advantages(&noise, Scaling::Group { std_min })[1].unwrap();
        assert!((floored(0.0) - 1.0).abs() < 1e-12);
        assert!((floored(0.1) - 0.1).abs() < 1e-12, "0.01 above the mean, divided by 0.1");
        assert!((floored(0.005) - 1.0).abs() < 1e-12, "a deviation above the floor is itself");
        assert_eq!(advantages(&[Some(0.0), Some(1e308)], Scaling::Group { std_min: 0.5 })[1], Some(1.0));
    }

    #[test]
    fn the_deviation_of_a_batch_is_that_of_all_its_rewards() {
        let rewards = [Some(0.0), Some(1.0), None, Some(5.0), Some(6.0)];
        assert!((batch_deviation(&rewards, 0.0) - 6.5f64.sqrt()).abs() < 1e-12);
        assert!((batch_deviation(&rewards, 4.0) - 4.0).abs() < 1e-12);
        assert!((batch_deviation(&[Some(2.0); 3], 0.0) - 1.0).abs() < 1e-12, "no advantage is left to divide");
    }
}
