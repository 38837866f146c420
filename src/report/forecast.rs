//! Predicts the time that is left.
//!
//! Attention grows with the square of a prompt's length, everything else with the length. So an update takes
//! `a · Σ length + b · Σ length²` seconds, summed over its prompts; `a` and `b` are not negative and come from least squares
//! over the last updates. If those prompts all had one length, `a` and `b` cannot be separated. Then the prediction is a
//! range, from growth with the length to growth with its square. If the next prompts have that length too, the range is one
//! number.

use std::collections::VecDeque;

use crate::runtime::units::{float, from_index};

/// Most updates that are remembered.
const DONE_MAX: usize = 32;
/// The two terms can be separated if lengths differ by at least this ratio.
const APART: f64 = 1.25;

/// Sums of an update's prompt lengths and of their squares.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    tokens: f64,
    squares: f64,
}

impl Load {
    fn new(lengths: &[u64]) -> Load {
        let squares = lengths.iter().map(|&length| float(length).powi(2)).sum();
        Load { tokens: lengths.iter().map(|&length| float(length)).sum(), squares }
    }
}

/// Past updates with their seconds, and the updates to come.
#[derive(Debug, Default)]
pub(super) struct Forecast {
    ahead: VecDeque<Load>,
    /// Mean load: that of an update with unknown lengths.
    mean: Load,
    left: u64,
    done: VecDeque<(Load, f64)>,
    /// All updates done, also those that are no longer remembered.
    count: u64,
}

impl Forecast {
    /// Sets the updates to come: `left` of them; `ahead` has the prompt lengths of the next ones, one entry an update.
    pub(super) fn expect(&mut self, ahead: &[Vec<u64>], left: u64) {
        self.ahead = ahead.iter().map(|lengths| Load::new(lengths)).collect();
        let share =
            |of: fn(&Load) -> f64| self.ahead.iter().map(of).sum::<f64>() / float(from_index(ahead.len().max(1)));
        self.mean = Load { tokens: share(|load| load.tokens), squares: share(|load| load.squares) };
        self.left = left;
    }

    /// Records that the next update took `seconds`.
    pub(super) fn done(&mut self, seconds: f64) {
        let load = self.ahead.pop_front().unwrap_or(self.mean);
        self.left = self.left.saturating_sub(1);
        self.count += 1;
        // The first update is slower, since it warms up.
        if self.count == 2 || self.done.len() == DONE_MAX {
            self.done.pop_front();
        }
        self.done.push_back((load, seconds));
    }

    /// Least and most seconds that are left; `None` before the first update and after the last.
    pub(super) fn left_s(&self) -> Option<[f64; 2]> {
        let known = u64::min(self.left, from_index(self.ahead.len()));
        let mut rest = Load::default();
        for load in self.ahead.iter().take(crate::runtime::units::as_index(known)) {
            rest = Load { tokens: rest.tokens + load.tokens, squares: rest.squares + load.squares };
        }
        let unknown = float(self.left - known);
        rest.tokens += unknown * self.mean.tokens;
        rest.squares += unknown * self.mean.squares;
        if self.left == 0 || self.done.is_empty() || self.done.iter().any(|(load, _)| load.tokens <= 0.0) {
            return None;
        }
        let means = || self.done.iter().map(|(load, _)| load.squares / load.tokens);
        let (least, most) = (means().fold(f64::INFINITY, f64::min), means().fold(0.0, f64::max));
        if most >= APART * least {
            let (a, b) = self.fit();
            return Some([a * rest.tokens + b * rest.squares; 2]);
        }
        let sum = |of: fn(&(Load, f64)) -> f64| self.done.iter().map(of).sum::<f64>();
        let spent = sum(|(_, seconds)| *seconds);
        let (line, square) = (sum(|(load, _)| load.tokens), sum(|(load, _)| load.squares));
        let (one, two) = (spent / line * rest.tokens, spent / square * rest.squares);
        Some([one.min(two), one.max(two)])
    }

    /// Seconds a token and seconds a squared token, neither negative.
    fn fit(&self) -> (f64, f64) {
        let sum =
            |of: &dyn Fn(&Load, f64) -> f64| self.done.iter().map(|(load, seconds)| of(load, *seconds)).sum::<f64>();
        let (tt, ts, ss) = (
            sum(&|load, _| load.tokens * load.tokens),
            sum(&|load, _| load.tokens * load.squares),
            sum(&|load, _| load.squares * load.squares),
        );
        let (ty, sy) = (sum(&|load, seconds| load.tokens * seconds), sum(&|load, seconds| load.squares * seconds));
        let (line, square) = ((ty / tt, 0.0), (0.0, sy / ss));
        let determinant = tt * ss - ts * ts;
        if determinant <= 1e-9 * tt * ss {
            return line;
        }
        let (a, b) = ((ty * ss - sy * ts) / determinant, (sy * tt - ty * ts) / determinant);
        match (a >= 0.0, b >= 0.0) {
            (true, true) => (a, b),
            (true, false) => line,
            _ => square,
        }
    }
}

/// The time that is left in words, as exact as it is known.
pub(super) fn words([least, most]: [f64; 2]) -> String {
    let (unit, size) = match most {
        ..90.0 => ("s", 1.0),
        90.0..5400.0 => ("min", 60.0),
        5400.0..172_800.0 => ("h", 3600.0),
        _ => ("days", 86400.0),
    };
    // The first decimal matters below ten hours or days.
    let decimals = usize::from(size >= 3600.0 && most < 10.0 * size);
    let text = |seconds: f64| format!("{:.decimals$}", seconds / size);
    let (from, to) = (text(least), text(most.max(1.0)));
    if most <= 1.25 * least || from == to {
        format!("about {} {unit} left", text(f64::midpoint(least, most).max(1.0)))
    } else if least < 0.5 * size {
        format!("less than {to} {unit} left")
    } else {
        format!("about {from} to {to} {unit} left")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A forecast over updates with one prompt of each length; the first ones have taken these seconds.
    fn after(lengths: &[u64], seconds: &[f64]) -> Forecast {
        let mut forecast = Forecast::default();
        let ahead: Vec<Vec<u64>> = lengths.iter().map(|&length| vec![length]).collect();
        forecast.expect(&ahead, from_index(lengths.len()));
        for &spent in seconds {
            forecast.done(spent);
        }
        forecast
    }

    #[track_caller]
    fn assert_close(found: Option<[f64; 2]>, expected: [f64; 2]) {
        let found = found.expect("a forecast");
        let close = found.iter().zip(expected).all(|(one, two)| (one - two).abs() <= 1e-6 * two.abs());
        assert!(close, "{found:?} and not {expected:?}");
    }

    #[test]
    fn equal_lengths_give_the_mean_of_the_updates_done_for_each_to_come() {
        assert_close(after(&[100; 6], &[9.0, 2.0, 4.0]).left_s(), [9.0, 9.0]);
        assert_close(after(&[100; 6], &[9.0]).left_s(), [45.0, 45.0]);
    }

    #[test]
    fn longer_prompts_to_come_take_longer_by_their_length_at_least_and_its_square_at_most() {
        assert_close(after(&[100, 100, 200, 400], &[7.0, 1.0]).left_s(), [6.0, 20.0]);
        assert_close(after(&[100, 100, 50], &[7.0, 1.0]).left_s(), [0.25, 0.5]);
    }

    #[test]
    fn different_lengths_separate_the_two_terms() {
        let seconds = |length: f64| 0.01 * length + 1e-4 * length * length;
        let forecast = after(&[50, 100, 200, 300, 1000], &[99.0, seconds(100.0), seconds(200.0), seconds(300.0)]);
        assert_close(forecast.left_s(), [seconds(1000.0); 2]);
    }

    #[test]
    fn no_term_is_negative_however_the_seconds_scatter() {
        let falling = after(&[50, 100, 1000, 2000], &[1.0, 50.0, 5.0]);
        assert!(falling.left_s().unwrap().iter().all(|seconds| *seconds > 0.0), "{falling:?}");
        let steep = after(&[50, 100, 200, 400], &[1.0, 1.0, 100.0]);
        let (a, b) = steep.fit();
        assert!(a.abs() < 1e-12 && b > 0.0, "{a} {b}");
    }

    #[test]
    fn there_is_no_forecast_before_the_first_update_or_after_the_last() {
        assert_eq!(after(&[10; 3], &[]).left_s(), None);
        assert_eq!(after(&[10; 2], &[1.0, 1.0]).left_s(), None);
    }

    #[test]
    fn updates_with_unknown_prompts_count_as_mean_ones() {
        let mut forecast = Forecast::default();
        forecast.expect(&[vec![100, 50], vec![100, 50]], 10);
        forecast.done(3.0);
        assert_close(forecast.left_s(), [27.0, 27.0]);
        for _ in 0..3 {
            forecast.done(3.0);
        }
        assert_close(forecast.left_s(), [18.0, 18.0]);
    }

    #[test]
    fn words_are_as_exact_as_what_is_known() {
        assert_eq!(words([0.2, 0.2]), "about 1 s left");
        assert_eq!(words([41.6, 42.0]), "about 42 s left");
        assert_eq!(words([170.0, 190.0]), "about 3 min left");
        assert_eq!(words([170.0, 310.0]), "about 3 to 5 min left");
        assert_eq!(words([0.1, 3.0]), "less than 3 s left");
        assert_eq!(words([7900.0, 7900.0]), "about 2.2 h left");
        assert_eq!(words([3600.0, 72_000.0]), "about 1 to 20 h left");
        assert_eq!(words([200_000.0, 200_000.0]), "about 2.3 days left");
    }
}
