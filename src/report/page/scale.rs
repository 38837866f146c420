//! How values become places along an axis: evenly, or by their logarithm where a few of them would flatten the rest.

use super::numbers::short;
use crate::runtime::units::as_index;

/// Fewer values than these have no outlier.
const VALUES_MIN: usize = 8;
/// On an even axis the middle three fifths of the values must reach over this share of it.
const MIDDLE_SHARE_MIN: f64 = 0.15;
/// The largest value over the median one, zeros aside, below which a logarithm would gain little.
const OUTLIER_MIN: f64 = 12.0;
/// An axis of positive values that spans more than this factor is even below its largest value over [`AROUND_MAX`].
const SPAN_MAX: f64 = 1e6;
/// Largest value over the one up to which an axis around zero is even: smaller ones are noise beside it.
const AROUND_MAX: f64 = 1e4;

/// How values become places.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scale {
    Even,
    /// Of positive values.
    Log,
    /// Even from `-even_to` to `even_to`, nearly, and by the logarithm beyond.
    LogAround {
        even_to: f64,
    },
}

impl Scale {
    /// The scale that shows most of `values`. A logarithm is chosen where an even axis would leave the middle of them too little
    /// of it, and the largest lies far from the usual one.
    pub(super) fn of(values: &[f64]) -> Scale {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let (Some(&least), Some(&most)) = (sorted.first(), sorted.last()) else { return Scale::Even };
        let fifth = sorted.len().div_ceil(5);
        if sorted.len() < VALUES_MIN {
            return Scale::Even;
        }
        let middle = sorted[sorted.len() - 1 - fifth] - sorted[fifth];
        if middle <= 0.0 || middle >= MIDDLE_SHARE_MIN * (most - least) {
            return Scale::Even;
        }
        let mut sizes: Vec<f64> = sorted.iter().map(|value| value.abs()).filter(|&size| size > 0.0).collect();
        sizes.sort_by(f64::total_cmp);
        let (median, largest) = (sizes[sizes.len() / 2], sizes[sizes.len() - 1]);
        if largest < OUTLIER_MIN * median {
            return Scale::Even;
        }
        if least > 0.0 && most / least <= SPAN_MAX {
            return Scale::Log;
        }
        let usual = median.max(largest / AROUND_MAX);
        Scale::LogAround { even_to: 10_f64.powf(usual.log10().floor()) }
    }

    /// The same scale for an axis that begins at `least`: a logarithm has no place for 0 and what lies below.
    pub(super) fn reaching(self, least: f64) -> Scale {
        if self == Scale::Log && least <= 0.0 { Scale::Even } else { self }
    }

    /// The place of a value, in units of its own.
    pub(super) fn place(self, value: f64) -> f64 {
        match self {
            Scale::Even => value,
            Scale::Log => value.max(f64::MIN_POSITIVE).log10(),
            Scale::LogAround { even_to } => (1.0 + value.abs() / even_to).log10().copysign(value),
        }
    }

    /// What a reader of the axis must know; empty where it is even.
    pub(super) fn words(self) -> String {
        match self {
            Scale::Even => String::new(),
            Scale::Log => "logarithmic axis".to_owned(),
            Scale::LogAround { even_to } => format!("logarithmic axis beyond ±{}", short(even_to)),
        }
    }

    /// Round values from `least` to `most` along a logarithmic axis, about `count`.
    pub(super) fn round_values(self, least: f64, most: f64, count: u32) -> Vec<f64> {
        match self {
            Scale::Even => Vec::new(),
            Scale::Log => {
                let decades = powers(least, most);
                if decades.len() >= 3 {
                    return every(&decades, count);
                }
                let around = powers(least / 10.0, most * 10.0);
                let times = |&power: &f64| [1.0, 2.0, 5.0].map(|times| times * power);
                around.iter().flat_map(times).filter(|value| (least..=most).contains(value)).collect()
            }
            Scale::LogAround { even_to } => {
                let side = |end: f64| if end > 0.0 { every(&powers(even_to, end), count / 2) } else { Vec::new() };
                let below = side(-least).into_iter().rev().map(|value| -value);
                below.chain([0.0]).chain(side(most)).collect()
            }
        }
    }
}

/// Powers of ten from `least` to `most`.
fn powers(least: f64, most: f64) -> Vec<f64> {
    let (first, last) = (least.log10().ceil(), most.log10().floor());
    let exponents = (0..=700).map(|index| first + f64::from(index)).take_while(|&exponent| exponent <= last);
    exponents.map(|exponent| 10_f64.powf(exponent)).collect()
}

/// Every so many of the values that about `count` are left, the last one among them.
fn every(values: &[f64], count: u32) -> Vec<f64> {
    let step = values.len().div_ceil(as_index(u64::from(count.max(1))));
    let mut kept: Vec<f64> = values.iter().rev().step_by(step.max(1)).copied().collect();
    kept.reverse();
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outlier_makes_an_axis_logarithmic_and_a_steady_curve_does_not() {
        let steady: Vec<f64> = (1..=40).map(|at| f64::from(at) / 40.0).collect();
        assert_eq!(Scale::of(&steady), Scale::Even);
        assert_eq!(Scale::of(&[]), Scale::Even);
        assert_eq!(Scale::of(&[1.0, 2.0, 3.0, 4.0, 1000.0]), Scale::Even, "too few to say what is usual");
        let mut seldom = vec![0.0; 40];
        seldom[7..10].copy_from_slice(&[0.1, 0.2, 0.3]);
        seldom.extend((0..12).map(|at| f64::from(at) / 100.0));
        assert_eq!(Scale::of(&seldom), Scale::Even, "what is mostly zero has no outlier for that");
        let mut spiked = steady.clone();
        spiked[17] = 400.0;
        assert_eq!(Scale::of(&spiked), Scale::Log);
        spiked[3] = 0.0;
        assert_eq!(Scale::of(&spiked), Scale::LogAround { even_to: 0.1 });
        spiked[17] = -400.0;
        assert!(matches!(Scale::of(&spiked), Scale::LogAround { .. }));
        let mut constant = vec![1.0; 40];
        constant[5] = 1e6;
        assert_eq!(Scale::of(&constant), Scale::Even, "there is nothing that it flattens");
        spiked[17] = f64::NAN;
        assert_eq!(Scale::of(&spiked), Scale::Even, "what is not finite has no place on an axis");
    }

    #[test]
    fn places_rise_with_values_through_zero() {
        for scale in [Scale::Even, Scale::LogAround { even_to: 0.1 }] {
            let places = [-100.0, -0.5, -0.01, 0.0, 0.01, 0.5, 100.0].map(|value| scale.place(value));
            assert!(places.is_sorted() && places[3].abs() < 1e-12, "{places:?}");
        }
        assert!((Scale::Log.place(1000.0) - 3.0).abs() < 1e-12 && Scale::Log.place(0.0).is_finite());
    }

    #[test]
    fn round_values_are_decades_and_finer_where_these_are_too_few() {
        assert_eq!(Scale::Log.round_values(0.5, 2000.0, 5), [1.0, 10.0, 100.0, 1000.0]);
        assert_eq!(Scale::Log.round_values(1.5, 30.0, 5), [2.0, 5.0, 10.0, 20.0]);
        assert_eq!(Scale::Log.round_values(1.0, 1e9, 5).len(), 5);
        let around = Scale::LogAround { even_to: 1.0 }.round_values(-20.0, 150.0, 6);
        assert_eq!(around, [-10.0, -1.0, 0.0, 1.0, 10.0, 100.0]);
    }
}
