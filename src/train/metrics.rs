//! Metrics of one update: sums, counts and extremes of one rank, reduced once over ranks.

use crate::report::{Seconds, Step};
use crate::runtime::failure::Phase;
use crate::runtime::units::{Rank, float, from_index};
use crate::step::drift::Drift;
use crate::step::extremes::{Range, max_or_nan};
use crate::step::objective::{self, Importance, Objective, TokenStats};
use crate::step::observer::PhaseSeconds;
use crate::step::replay::Replayed;
use crate::step::rollout::{ChangedChoices, SampledAnswer};
use crate::world::World;

/// What an update's groups add up to, on one rank or on all of them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UpdateMetrics {
    /// Sum over answers; not divided by the batch's denominator.
    pub(super) loss: f64,
    /// Smallest and largest ratio to the frozen scores; `None` without a trained token.
    pub(super) ratio: Option<Range>,
    pub(super) trained: TokenStats,
    pub(super) sampled_tokens: u64,
    /// Sum over sampled tokens of the entropy of their distribution, nats.
    pub(super) sampled_entropy: f64,
    /// Largest distance of a sampled token's log-probability from its score, nats; `None` where none was compared.
    pub(super) sampled_gap: Option<f64>,
    /// Seconds in which replies to calls were waited for.
    pub(super) call_seconds: f64,
    /// Keys and experts that were chosen in sampling and not used, and how many were then chosen differently.
    pub(super) choices: ChangedChoices,
    /// Of reused pages, where it was measured.
    pub(super) drift: Drift,
}

/// An [`UpdateMetrics`] on its way to the other ranks: one word of 64 bits a field, floats by their bits.
const WORDS: usize = 25;

impl UpdateMetrics {
    /// Adds sampled answers.
    pub(super) fn add_sampled(&mut self, answers: &[SampledAnswer]) {
        for answer in answers {
            self.sampled_tokens += from_index(answer.logprobs.len());
            self.sampled_entropy += answer.entropy;
            self.call_seconds += answer.call_seconds;
        }
    }

    /// Adds the largest distance between sampling and scoring of one answer's tokens.
    pub(super) fn add_gap(&mut self, gap: f64) {
        self.sampled_gap = largest(self.sampled_gap, Some(gap));
    }

    /// Adds choices of a group that were made in sampling and again afterwards.
    pub(super) fn add_choices(&mut self, changed: ChangedChoices) {
        self.choices.choices += changed.choices;
        self.choices.changed += changed.changed;
    }

    /// Adds a group that was replayed.
    pub(super) fn add_replay(&mut self, replayed: &Replayed) {
        self.loss += replayed.loss;
        self.trained.add(replayed.stats);
        self.ratio = Range::cover(self.ratio, replayed.ratio);
    }

    /// The metrics of all ranks, the same bits on every rank: one gather, reduced in rank order.
    pub(super) fn reduce(mut self, world: &World) -> UpdateMetrics {
        // Every rank of a prompt has sampled the same answers; the first one counts them.
        if world.cp.rank() != Rank(0) {
            self.sampled_tokens = 0;
            self.sampled_entropy = 0.0;
            self.call_seconds = 0.0;
        }
        let bytes: Vec<u8> = self.to_words().iter().flat_map(|word| word.to_le_bytes()).collect();
        let gathered = world.all.all_gather(&bytes, &vec![bytes.len(); world.all.size()]);
        let ranks: Vec<UpdateMetrics> = gathered.chunks_exact(bytes.len()).map(UpdateMetrics::from_bytes).collect();
        let count = |of: fn(&UpdateMetrics) -> u64| ranks.iter().map(of).sum();
        let sum = |of: fn(&UpdateMetrics) -> f64| ranks.iter().map(of).sum();
        UpdateMetrics {
            loss: sum(|rank| rank.loss),
            ratio: ranks.iter().map(|rank| rank.ratio).fold(None, Range::cover),
            trained: TokenStats {
                tokens: count(|rank| rank.trained.tokens),
                clipped_low: count(|rank| rank.trained.clipped_low),
                clipped_high: count(|rank| rank.trained.clipped_high),
                clipped_dual: count(|rank| rank.trained.clipped_dual),
                kl: sum(|rank| rank.trained.kl),
                importance: sum(|rank| rank.trained.importance),
                importance_capped: count(|rank| rank.trained.importance_capped),
            },
            sampled_tokens: count(|rank| rank.sampled_tokens),
            sampled_entropy: sum(|rank| rank.sampled_entropy),
            sampled_gap: ranks.iter().map(|rank| rank.sampled_gap).fold(None, largest),
            call_seconds: sum(|rank| rank.call_seconds),
            choices: ChangedChoices {
                choices: count(|rank| rank.choices.choices),
                changed: count(|rank| rank.choices.changed),
            },
            drift: ranks.iter().map(|rank| rank.drift).fold(Drift::default(), |mut all, rank| {
                all.add(rank);
                all
            }),
        }
    }

    fn to_words(self) -> [u64; WORDS] {
        let Range { least, most } = self.ratio.unwrap_or(Range::at(0.0));
        [
            self.loss.to_bits(),
            u64::from(self.ratio.is_some()),
            least.to_bits(),
            most.to_bits(),
            self.trained.tokens,
            self.trained.clipped_low,
            self.trained.clipped_high,
            self.trained.kl.to_bits(),
            self.sampled_tokens,
            self.sampled_entropy.to_bits(),
            u64::from(self.sampled_gap.is_some()),
            self.sampled_gap.unwrap_or_default().to_bits(),
            self.trained.importance.to_bits(),
            self.trained.importance_capped,
            self.choices.choices,
            self.choices.changed,
            self.trained.clipped_dual,
            self.drift.tokens,
            self.drift.nll_reused.to_bits(),
            self.drift.nll_fresh.to_bits(),
            self.drift.loss_reused.to_bits(),
            self.drift.loss_fresh.to_bits(),
            self.drift.k3.to_bits(),
            self.drift.gap.to_bits(),
            self.call_seconds.to_bits(),
        ]
    }

    fn from_bytes(bytes: &[u8]) -> UpdateMetrics {
        let word = |index: usize| {
            let (start, stop) = (index * size_of::<u64>(), (index + 1) * size_of::<u64>());
            u64::from_le_bytes(bytes[start..stop].try_into().expect("a word has eight bytes"))
        };
        let number = |index: usize| f64::from_bits(word(index));
        UpdateMetrics {
            loss: number(0),
            ratio: (word(1) == 1).then(|| Range { least: number(2), most: number(3) }),
            trained: TokenStats {
                tokens: word(4),
                clipped_low: word(5),
                clipped_high: word(6),
                clipped_dual: word(16),
                kl: number(7),
                importance: number(12),
                importance_capped: word(13),
            },
            sampled_tokens: word(8),
            sampled_entropy: number(9),
            sampled_gap: (word(10) == 1).then(|| number(11)),
            call_seconds: number(24),
            choices: ChangedChoices { choices: word(14), changed: word(15) },
            drift: Drift {
                tokens: word(17),
                nll_reused: number(18),
                nll_fresh: number(19),
                loss_reused: number(20),
                loss_fresh: number(21),
                k3: number(22),
                gap: number(23),
            },
        }
    }

    /// The numbers of an update over all ranks, as far as they follow from these metrics. `denominator`: the batch's; `terms`:
    /// the run's objective.
    pub(super) fn describe(&self, denominator: f64, terms: &Objective) -> Step {
        let (has_kl, has_weights) = (terms.kl_coef > 0.0, terms.importance != Importance::Ratio);
        let TokenStats { tokens, clipped_low, clipped_high, clipped_dual, kl, importance, importance_capped } =
            self.trained;
        let share = |count: u64| float(count) / float(tokens.max(1));
        let finite = |ratio: f64| ratio.clamp(-f64::MAX, f64::MAX);
        let entropy = self.sampled_entropy / float(self.sampled_tokens);
        Step {
            loss: objective::mean_loss(self.loss, denominator),
            // JSON has no word for infinity, and a ratio that has overflowed was clipped.
            ratio: self.ratio.map(|Range { least, most }| [finite(least), finite(most)]),
            clipped_tokens: clipped_low + clipped_high + clipped_dual,
            clip_low_share: share(clipped_low),
            clip_high_share: share(clipped_high),
            clip_dual_share: terms.clip_dual.map(|_| share(clipped_dual)),
            kl: (has_kl && tokens > 0).then(|| kl / float(tokens)),
            importance_mean: (has_weights && tokens > 0).then(|| importance / float(tokens)),
            importance_capped_share: (has_weights && tokens > 0).then(|| share(importance_capped)),
            entropy: (self.sampled_tokens > 0).then_some(entropy),
            sampled_gap: self.sampled_gap,
            choices_changed: (self.choices.choices > 0)
                .then(|| float(self.choices.changed) / float(self.choices.choices)),
            ..Step::default()
        }
    }
}

/// Seconds by phase as metrics.jsonl has them, without the total.
pub(super) fn report_seconds(spent: &PhaseSeconds) -> Seconds {
    Seconds {
        capture: spent[Phase::Capture],
        rollout: spent[Phase::Rollout],
        reward: spent[Phase::Reward],
        score: spent[Phase::Score],
        replay: spent[Phase::Replay],
        sweep: spent[Phase::Sweep],
        finalize: spent[Phase::Finalize],
        update: spent[Phase::Update],
        total: 0.0,
    }
}

/// The larger one; a NaN is larger than any number, so that it is seen.
pub(super) fn largest(one: Option<f64>, two: Option<f64>) -> Option<f64> {
    let (Some(a), Some(b)) = (one, two) else { return one.or(two) };
    Some(max_or_nan(a, b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_come_back_from_their_bytes_with_every_bit() {
        let metrics = UpdateMetrics {
            loss: -0.0,
            ratio: Some(Range { least: 0.1, most: f64::INFINITY }),
            trained: TokenStats {
                tokens: 7,
                clipped_low: 1,
                clipped_high: u64::MAX,
                clipped_dual: 17,
                kl: f64::MIN_POSITIVE,
                importance: 0.3,
                importance_capped: 5,
            },
            sampled_tokens: 3,
            sampled_entropy: 0.1 + 0.2,
            sampled_gap: Some(f64::NAN),
            call_seconds: 0.7,
            choices: ChangedChoices { choices: 11, changed: 13 },
            drift: Drift {
                tokens: 19,
                nll_reused: 0.5,
                nll_fresh: 0.7,
                loss_reused: -0.1,
                loss_fresh: -0.3,
                k3: 1e-9,
                gap: f64::NAN,
            },
        };
        for metrics in [metrics, UpdateMetrics::default()] {
            let bytes: Vec<u8> = metrics.to_words().iter().flat_map(|word| word.to_le_bytes()).collect();
            assert_eq!(UpdateMetrics::from_bytes(&bytes).to_words(), metrics.to_words());
        }
    }

    #[test]
    fn a_nan_is_larger_than_any_number_wherever_it_stands() {
        let largest = |numbers: [f64; 3]| numbers.into_iter().map(Some).fold(None, largest);
        assert_eq!(largest([1.0, 3.0, 2.0]), Some(3.0));
        for numbers in [[f64::NAN, 1.0, 2.0], [1.0, f64::NAN, 2.0], [1.0, 2.0, f64::NAN]] {
            assert!(largest(numbers).is_some_and(f64::is_nan), "{numbers:?}");
        }
        assert_eq!(super::largest(None, None), None);
    }
}
