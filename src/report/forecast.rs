//! How long the rest of a run takes.
//!
//! Attention grows with the square of a prompt's length and everything else with the length, so an update's seconds are
//! taken for `a · Σ length + b · Σ length²` over its prompts, with `a` and `b` not negative, by least squares over the
//! last updates. Where those were all of one length nothing tells the two apart: then the answer is the range between
//! growth with the length and growth with its square, which is one number where the prompts to come are alike too.

use std::collections::VecDeque;

use crate::runtime::units::{float, from_index};

/// Updates that are remembered.
const DONE_MAX: usize = 32;
/// Lengths tell the two terms apart from this ratio of the longest to the shortest on.
const APART: f64 = 1.25;

/// An update's prompts: sum of their lengths, and of the lengths' squares.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    tokens: f64,
    squares: f64,
}

impl Load {
    fn of(lengths: &[u64]) -> Load {
        let squares = lengths.iter().map(|&length| float(length).powi(2)).sum();
        Load { tokens: lengths.iter().map(|&length| float(length)).sum(), squares }
    }
}

/// What is known of the updates done, and of those to come.
#[derive(Debug, Default)]
pub(super) struct Forecast {
    ahead: VecDeque<Load>,
    /// What an update has whose lengths are not told.
    usual: Load,
    left: u64,
    done: VecDeque<(Load, f64)>,
    /// Updates done here, the forgotten ones included.
    count: u64,
}

impl Forecast {
    /// So many updates are to come, the first of them with prompts of these lengths, one entry an update.
    pub(super) fn expect(&mut self, ahead: &[Vec<u64>], left: u64) {
        self.ahead = ahead.iter().map(|lengths| Load::of(lengths)).collect();
        let share =
            |of: fn(&Load) -> f64| self.ahead.iter().map(of).sum::<f64>() / float(from_index(ahead.len().max(1)));
        self.usual = Load { tokens: share(|load| load.tokens), squares: share(|load| load.squares) };
        self.left = left;
    }

    /// The next update is done.
    pub(super) fn done(&mut self, seconds: f64) {
        let load = self.ahead.pop_front().unwrap_or(self.usual);
        self.left = self.left.saturating_sub(1);
        self.count += 1;
        // The first one warms up what the others find warm.
        if self.count == 2 || self.done.len() == DONE_MAX {
            self.done.pop_front();
        }
        self.done.push_back((load, seconds));
    }

    /// Seconds that the rest takes, at the least and at the most; nothing before an update is done or where none is left.
    pub(super) fn left_s(&self) -> Option<[f64; 2]> {
        let told = u64::min(self.left, from_index(self.ahead.len()));
        let mut rest = Load::default();
        for load in self.ahead.iter().take(crate::runtime::units::as_index(told)) {
            rest = Load { tokens: rest.tokens + load.tokens, squares: rest.squares + load.squares };
        }
        let untold = float(self.left - told);
        rest.tokens += untold * self.usual.tokens;
        rest.squares += untold * self.usual.squares;
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

    /// Seconds a token and seconds a token squared, neither negative.
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

/// The rest in words, as exact as it is known.
pub(super) fn words([least, most]: [f64; 2]) -> String {
    let (unit, size) = match most {
        ..90.0 => ("s", 1.0),
        90.0..5400.0 => ("min", 60.0),
        5400.0..172_800.0 => ("h", 3600.0),
        _ => ("days", 86400.0),
    };
    // Below ten hours or days the first decimal still matters.
    let decimals = usize::from(size >= 3600.0 && most < 10.0 * size);
    let of = |seconds: f64| format!("{:.decimals$}", seconds / size);
    let (from, to) = (of(least), of(most.max(1.0)));
    if most <= 1.25 * least || from == to {
        format!("about {} {unit} left", of(f64::midpoint(least, most).max(1.0)))
    } else if least < 0.5 * size {
        format!("less than {to} {unit} left")
    } else {
        format!("about {from} to {to} {unit} left")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A forecast over updates of these prompt lengths, one prompt each, that has seen the first ones take their seconds.
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
    fn lengths_that_differ_tell_the_two_terms_apart() {
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
    fn nothing_is_said_before_an_update_is_done_or_behind_the_last() {
        assert_eq!(after(&[10; 3], &[]).left_s(), None);
        assert_eq!(after(&[10; 2], &[1.0, 1.0]).left_s(), None);
    }

    #[test]
    fn updates_whose_prompts_are_not_told_count_as_usual_ones() {
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
