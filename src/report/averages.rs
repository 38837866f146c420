//! Means, extremes and deviations of lists of numbers.

use crate::runtime::units::{float, from_index};

/// The mean; `None` for no numbers.
pub(super) fn mean(numbers: &[f64]) -> Option<f64> {
    (!numbers.is_empty()).then(|| numbers.iter().sum::<f64>() / float(from_index(numbers.len())))
}

/// Smallest and largest; `None` for no numbers.
pub(super) fn ends(numbers: &[f64]) -> Option<[f64; 2]> {
    let (first, rest) = numbers.split_first()?;
    Some(rest.iter().fold([*first; 2], |[least, most], &next| [least.min(next), most.max(next)]))
}

/// Standard deviation of the population; `None` for no numbers.
pub(super) fn deviation(numbers: &[f64]) -> Option<f64> {
    let center = mean(numbers)?;
    let squares: Vec<f64> = numbers.iter().map(|number| (number - center).powi(2)).collect();
    mean(&squares).map(f64::sqrt)
}
