//! Advantages of a group, from its rewards.
//!
//! ```text
//!   A = (reward − mean of the group) / max(deviation of the group or of the batch, std_min)      or reward − mean
//! ```
//!
//! The deviation is that of the population (squares divided by n), so rewards 0 and 1 give −1 and +1, or of a sample
//! (divided by n − 1), so these give −0.707 and +0.707. Without it: Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783).

use crate::config::Deviation;
use crate::runtime::units::{float, from_index};

/// What advantages are divided by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// The deviation of the group's rewards, at least `std_min`.
    Group {
        /// The smallest deviation that advantages are divided by.
        std_min: f64,
        /// What squares are divided by.
        deviation: Deviation,
    },
    /// Nothing. A division by the deviation of the whole batch comes later, with the batch's denominator.
    None,
}

impl Scaling {
    /// The configuration's default: the population's deviation, however small.
    pub const DEFAULT: Scaling = Scaling::Group { std_min: 0.0, deviation: Deviation::Population };
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
    let Some(stretched) = stretch(rewards) else {
        return rewards.iter().map(|reward| reward.map(|_| 0.0)).collect();
    };
    let Stretched { rewards, half_width, mean, .. } = &stretched;
    let unit = match scaling {
        Scaling::Group { std_min, deviation } => 1.0 / stretched.deviation(deviation).max(std_min * 0.5 / half_width),
        Scaling::None => 2.0 * half_width,
    };
    rewards.iter().map(|reward| reward.map(|reward| (reward - mean) * unit)).collect()
}

/// What the gradient of a whole batch is divided by where advantages are scaled by the batch: the standard deviation of all
/// its known rewards, at least `std_min`. 1 where both are 0, since no advantage is left then.
#[must_use]
pub fn batch_deviation(rewards: &[Option<f64>], std_min: f64, deviation: Deviation) -> f64 {
    let deviation =
        stretch(rewards).map_or(0.0, |stretched| stretched.deviation(deviation) * 2.0 * stretched.half_width);
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
    /// Sum over the known ones of the squared distance from the mean.
    squares: f64,
    /// How many are known; at least 2, since they differ.
    count: f64,
}

impl Stretched {
    fn deviation(&self, deviation: Deviation) -> f64 {
        let divisor = match deviation {
            Deviation::Population => self.count,
            Deviation::Sample => self.count - 1.0,
        };
        (self.squares / divisor).sqrt()
    }
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
    let squares = known.iter().map(|reward| (reward - mean).powi(2)).sum::<f64>();
    Some(Stretched { rewards, half_width, mean, squares, count })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: Scaling = Scaling::DEFAULT;

    const fn group(std_min: f64, deviation: Deviation) -> Scaling {
        Scaling::Group { std_min, deviation }
    }

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
    fn a_small_deviation_is_not_stretched_to_one_where_it_has_a_floor() {
        let noise = [Some(0.50), Some(0.52)];
        let floored = |std_min| advantages(&noise, group(std_min, Deviation::Population))[1].unwrap();
        assert!((floored(0.0) - 1.0).abs() < 1e-12);
        assert!((floored(0.1) - 0.1).abs() < 1e-12, "0.01 above the mean, divided by 0.1");
        assert!((floored(0.005) - 1.0).abs() < 1e-12, "a deviation above the floor is itself");
        assert_eq!(advantages(&[Some(0.0), Some(1e308)], group(0.5, Deviation::Population))[1], Some(1.0));
    }

    #[test]
    fn the_deviation_of_a_batch_is_that_of_all_its_rewards() {
        let rewards = [Some(0.0), Some(1.0), None, Some(5.0), Some(6.0)];
        assert!((batch_deviation(&rewards, 0.0, Deviation::Population) - 6.5f64.sqrt()).abs() < 1e-12);
        assert!((batch_deviation(&rewards, 4.0, Deviation::Population) - 4.0).abs() < 1e-12);
        assert!(
            (batch_deviation(&[Some(2.0); 3], 0.0, Deviation::Sample) - 1.0).abs() < 1e-12,
            "no advantage is left to divide"
        );
    }

    #[test]
    fn a_sample_has_a_larger_deviation_than_a_population() {
        let sample = group(0.0, Deviation::Sample);
        let found = advantages(&[Some(0.0), Some(1.0)], sample);
        let expected = [-0.5f64.sqrt(), 0.5f64.sqrt()];
        assert!(found.iter().zip(expected).all(|(found, expected)| (found.unwrap() - expected).abs() < 1e-15));
        assert_eq!(advantages(&[Some(3.0), None], sample), [Some(0.0), None], "one reward has no deviation");
        let rewards = [Some(0.0), Some(1.0), None, Some(5.0), Some(6.0)];
        assert!((batch_deviation(&rewards, 0.0, Deviation::Sample) - (26.0f64 / 3.0).sqrt()).abs() < 1e-12);
        assert!((advantages(&rewards, group(9.0, Deviation::Sample))[4].unwrap() - 3.0 / 9.0).abs() < 1e-12);
    }
}
