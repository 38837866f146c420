//! Laws of a phase's seconds and of a token's, fitted to measured updates and tokens.

use std::collections::BTreeSet;

use super::file::{AttentionRate, DrawPoint, MeasuredGradient, UpdatePoint};
use crate::model::token::Drawer;
use crate::plan::operations::Amount;
use crate::runtime::units::{Tokens, float};

/// Seconds of a phase as a sum: what it takes once, for each prompt position whatever the layers (what waits for the last copy),
/// and for the operations of the layers' rows and of their pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Fit {
    pub(super) once: f64,
    /// Seconds a position.
    pub(super) position: f64,
    /// Seconds for 10¹² operations of rows.
    pub(super) rows: f64,
    /// The same of pairs of rows.
    pub(super) pairs: f64,
}

/// One measured phase.
#[derive(Clone, Copy)]
struct Sample {
    layers: u64,
    prompt: f64,
    amount: Amount,
    seconds: f64,
}

/// A layer's seconds at one prompt, and what is left without layers.
#[derive(Clone, Copy)]
struct AtPrompt {
    prompt: f64,
    fewer: Sample,
    /// Difference of operations between the two numbers of layers.
    amount: Amount,
    /// Difference of seconds.
    seconds: f64,
}

impl AtPrompt {
    /// From the samples with fewest and most layers; with one number of layers only, a run without layers takes no time.
    fn of(samples: &[Sample], prompt: f64) -> Option<AtPrompt> {
        let here = || samples.iter().filter(|sample| (sample.prompt - prompt).abs() < 0.5);
        let most = here().max_by_key(|sample| sample.layers)?;
        let fewer = here().min_by_key(|sample| sample.layers).filter(|fewer| fewer.layers < most.layers);
        let nothing = Sample { layers: 0, prompt, amount: Amount::default(), seconds: 0.0 };
        let fewer = *fewer.unwrap_or(&nothing);
        let amount = Amount {
            rows_tera: most.amount.rows_tera - fewer.amount.rows_tera,
            pairs_tera: most.amount.pairs_tera - fewer.amount.pairs_tera,
        };
        Some(AtPrompt { prompt, fewer, amount, seconds: most.seconds - fewer.seconds })
    }

    /// Seconds that layers at this pace do not explain.
    fn rest(&self, rows: f64, pairs: f64) -> f64 {
        self.fewer.seconds - rows * self.fewer.amount.rows_tera - pairs * self.fewer.amount.pairs_tera
    }
}

impl Fit {
    /// Seconds of an amount behind so many positions: once with what follows from the positions, rows, pairs.
    pub(super) fn seconds(&self, positions: f64, amount: Amount) -> [f64; 3] {
        [self.once + self.position * positions, self.rows * amount.rows_tera, self.pairs * amount.pairs_tera]
    }

    /// From the shortest and the longest prompt of `samples`; `None` where there is one prompt only. Pairs take at least
    /// `least_pairs` seconds for 10¹² operations.
    fn of(samples: &[Sample], least_pairs: f64) -> Option<Fit> {
        let shortest = samples.iter().map(|sample| sample.prompt).reduce(f64::min)?;
        let longest = samples.iter().map(|sample| sample.prompt).reduce(f64::max)?;
        if shortest >= longest {
            return None;
        }
        let near = AtPrompt::of(samples, shortest)?;
        let far = AtPrompt::of(samples, longest)?;
        let (rows, pairs) = paces(&near, &far, least_pairs);
        let (near_rest, far_rest) = (near.rest(rows, pairs), far.rest(rows, pairs));
        let position = ((far_rest - near_rest) / (far.prompt - near.prompt)).max(0.0);
        let once = (near_rest - position * near.prompt).max(0.0);
        Some(Fit { once, position, rows, pairs })
    }
}

/// Seconds for 10¹² operations of rows and of pairs, neither below 0, that explain both differences. Where pairs grow as rows
/// do (windows, delta rules), all is counted by rows, at the pace of the longer prompt. Where the pairs would be quicker than
/// `least`, a short prompt that waited for its launches has set their pace: they take `least`, and the longer prompt sets the
/// pace of rows.
fn paces(near: &AtPrompt, far: &AtPrompt, least: f64) -> (f64, f64) {
    let ratio = |seconds: f64, amount: f64| if amount > 0.0 { (seconds / amount).max(0.0) } else { 0.0 };
    let crossed = near.amount.pairs_tera * far.amount.rows_tera;
    let determinant = near.amount.rows_tera * far.amount.pairs_tera - crossed;
    if far.amount.pairs_tera <= 0.0 || determinant <= 0.1 * crossed {
        return (ratio(far.seconds, far.amount.rows_tera), 0.0);
    }
    let rows = (near.seconds * far.amount.pairs_tera - far.seconds * near.amount.pairs_tera) / determinant;
    let pairs = (far.seconds * near.amount.rows_tera - near.seconds * far.amount.rows_tera) / determinant;
    let most = ratio(far.seconds, far.amount.pairs_tera);
    if pairs < least {
        let pairs = least.min(most);
        return (ratio(far.seconds - pairs * far.amount.pairs_tera, far.amount.rows_tera), pairs);
    }
    if rows < 0.0 { (0.0, most) } else { (rows, pairs) }
}

/// Seconds for 10¹² operations of a forward over pairs, at the kernels' own rates; 0 where they are not known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct LeastPairs {
    pub(super) forward: f64,
    /// Of the backward that belongs to it.
    pub(super) backward: f64,
}

impl LeastPairs {
    /// From the quickest rectangles that were measured, of a model whose layers are all alike.
    pub(super) fn of(rates: &[AttentionRate]) -> LeastPairs {
        let least = |operations: f64, rate: fn(&AttentionRate) -> f64| {
            let most = rates.iter().map(rate).fold(0.0, f64::max);
            if most > 0.0 { operations / most } else { 0.0 }
        };
        LeastPairs { forward: least(1.0, |rate| rate.forward), backward: least(BACKWARD, |rate| rate.backward) }
    }
}

/// Operations of attention's backward for one of its forward.
const BACKWARD: f64 = 2.5;

/// Fits of the phases of updates of one gradient mode.
#[derive(Clone, Copy, Debug)]
pub(super) struct UpdateFit {
    pub(super) capture: Fit,
    /// Of one answer.
    pub(super) score: Fit,
    /// Of one answer, forward and backward.
    pub(super) answer: Fit,
    pub(super) tail: Fit,
}

impl UpdateFit {
    /// `None` where updates of this gradient mode were not measured at two prompts. `again`: attention runs forward once more
    /// before its backward.
    pub(super) fn of(
        points: &[UpdatePoint],
        gradient: MeasuredGradient,
        least: LeastPairs,
        again: bool,
    ) -> Option<UpdateFit> {
        let here: Vec<&UpdatePoint> = points.iter().filter(|point| point.gradient == gradient).collect();
        let of = |seconds: fn(&UpdatePoint) -> f64, amount: fn(&UpdatePoint) -> Amount, least: f64| {
            let sample = |point: &&UpdatePoint| Sample {
                layers: point.layers,
                prompt: float(point.prompt.0),
                amount: amount(point),
                seconds: seconds(point),
            };
            Fit::of(&here.iter().map(sample).collect::<Vec<_>>(), least)
        };
        let back = least.backward + if again { least.forward } else { 0.0 };
        let of_tail: fn(&UpdatePoint) -> Amount = match gradient {
            MeasuredGradient::Exact => |point| point.of_prompt,
            MeasuredGradient::Response => |point| point.of_last_row,
        };
        Some(UpdateFit {
            capture: of(|point| point.capture_seconds, |point| point.of_prompt, least.forward)?,
            score: of(|point| point.score_seconds, |point| point.of_answer, least.forward)?,
            answer: of(|point| point.answer_seconds, |point| point.of_answer, back)?,
            tail: of(|point| point.tail_seconds, of_tail, back)?,
        })
    }
}

/// The prompts that were measured, the shortest first.
pub(super) fn prompts(points: &[UpdatePoint]) -> BTreeSet<Tokens> {
    points.iter().map(|point| point.prompt).collect()
}

/// What sets the pace of a sampled token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Drawing {
    /// Rate at which a token reads the device's memory, GB/s.
    pub(super) memory: f64,
    /// Microseconds that a layer takes besides, the head as one layer.
    pub(super) layer_us: f64,
}

impl Drawing {
    /// From the shortest and the longest prompt of tokens that `drawer` drew: the further bytes of the longer one at the memory's rate, but not above that of
    /// a `copy`, GB/s; what is left of its time goes to the layers.
    pub(super) fn of(points: &[DrawPoint], copy: f64, drawer: Drawer) -> Option<Drawing> {
        let points = || points.iter().filter(|point| point.drawn_by == drawer.name());
        let far = points().max_by_key(|point| point.prompt)?;
        let near = points().min_by_key(|point| point.prompt)?;
        let most = if copy > 0.0 { copy * 1e9 } else { f64::INFINITY };
        let further = (far.token_bytes - near.token_bytes) / (far.token_seconds - near.token_seconds);
        let whole = far.token_bytes / far.token_seconds;
        let rate = if further.is_finite() && further > 0.0 { further.min(most) } else { most };
        let rate = if rate.is_finite() { rate.max(whole) } else { whole };
        let left = far.token_seconds - far.token_bytes / rate;
        Some(Drawing { memory: rate / 1e9, layer_us: 1e6 * left.max(0.0) / float(far.layers + 1) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::token::Reason;

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() <= 1e-9 * expected.abs().max(1e-3), "{found}, expected {expected}");
    }

    /// Seconds of a known law: 0.2 s once, 3 µs a position, and per layer 0.01 s for 10¹² operations of rows, 0.002 of pairs.
    fn sample(layers: u64, prompt: f64) -> Sample {
        let amount = Amount { rows_tera: 1e-3 * prompt, pairs_tera: 1e-7 * prompt * prompt }.times(float(layers));
        let seconds = 0.2 + 3e-6 * prompt + 0.01 * amount.rows_tera + 0.002 * amount.pairs_tera;
        Sample { layers, prompt, amount, seconds }
    }

    #[test]
    fn a_fit_finds_the_law_that_its_samples_follow() {
        let samples = [(2, 1e4), (6, 1e4), (2, 4e4), (6, 4e4)].map(|(layers, prompt)| sample(layers, prompt));
        let Fit { once, position, rows, pairs } = Fit::of(&samples, 0.0).unwrap();
        for (found, expected) in [(once, 0.2), (position, 3e-6), (rows, 0.01), (pairs, 0.002)] {
            near(found, expected);
        }
        let long = sample(36, 3e5);
        let seconds = Fit::of(&samples, 0.0).unwrap().seconds(3e5, long.amount).iter().sum::<f64>();
        near(seconds, long.seconds);
        assert_eq!(Fit::of(&samples[..2], 0.0), None, "one prompt says nothing of another");
    }

    #[test]
    fn layers_whose_pairs_grow_as_rows_do_are_counted_by_rows() {
        let windowed = |layers: u64, prompt: f64| {
            let amount = Amount { rows_tera: 1e-3 * prompt, pairs_tera: 1e-3 * prompt }.times(float(layers));
            Sample { layers, prompt, amount, seconds: 0.05 * amount.rows_tera }
        };
        let samples = [(2, 1e4), (6, 1e4), (2, 4e4), (6, 4e4)].map(|(layers, prompt)| windowed(layers, prompt));
        let Fit { once, rows, pairs, .. } = Fit::of(&samples, 0.0).unwrap();
        near(rows, 0.05);
        near(pairs, 0.0);
        near(once, 0.0);
    }

    #[test]
    fn noise_gives_no_negative_pace() {
        let mut samples = [(2, 1e4), (6, 1e4), (2, 4e4), (6, 4e4)].map(|(layers, prompt)| sample(layers, prompt));
        // A run that took far too long at the shorter prompt: more pairs seem to cost less.
        samples[1].seconds *= 10.0;
        let Fit { once, position, rows, pairs } = Fit::of(&samples, 0.0).unwrap();
        assert!([once, position, rows, pairs].into_iter().all(|part| part >= 0.0));
    }

    #[test]
    fn pairs_are_no_quicker_than_their_kernel_where_a_short_prompt_waited_for_launches() {
        let mut samples = [(2, 1e4), (6, 1e4), (2, 4e4), (6, 4e4)].map(|(layers, prompt)| sample(layers, prompt));
        for short in &mut samples[..2] {
            short.seconds += 0.2 * float(short.layers);
        }
        let quick = Fit::of(&samples, 0.0).unwrap();
        assert!(quick.pairs < 0.001, "{quick:?}");
        let Fit { rows, pairs, .. } = Fit::of(&samples, 0.002).unwrap();
        near(pairs, 0.002);
        near(rows, 0.01);
        // Not more than the longer prompt took.
        let far = sample(4, 4e4);
        let Fit { rows, pairs, .. } = Fit::of(&samples, 1e3).unwrap();
        near(rows, 0.0);
        near(pairs, (far.seconds - 0.2 - 3e-6 * 4e4) / far.amount.pairs_tera);
    }

    #[test]
    fn the_quickest_rectangle_sets_the_least_seconds_of_pairs() {
        let rate = |forward: f64, backward: f64| AttentionRate {
            head_dim: 64,
            queries: 1,
            keys: 1,
            causal: false,
            forward,
            backward,
        };
        let least = LeastPairs::of(&[rate(400.0, 250.0), rate(500.0, 200.0)]);
        near(least.forward, 1.0 / 500.0);
        near(least.backward, 2.5 / 250.0);
        assert_eq!(LeastPairs::of(&[]), LeastPairs::default());
    }

    #[test]
    fn a_token_reads_at_the_rate_of_its_further_bytes_and_layers_take_the_rest() {
        let point = |prompt: u64, token_bytes: f64, token_seconds: f64| DrawPoint {
            drawn_by: Drawer::Kernels.name().to_owned(),
            layers: 9,
            prompt: Tokens(prompt),
            answers: 8,
            token_seconds,
            token_bytes,
        };
        // 1 GB of weights and 4 GB of state at 4 TB/s, and 50 µs for each of nine layers and the head.
        let points = [point(1000, 2e9, 0.5e-3 + 0.5e-3), point(4000, 5e9, 1.25e-3 + 0.5e-3)];
        let Drawing { memory, layer_us } = Drawing::of(&points, 4300.0, Drawer::Kernels).unwrap();
        near(memory, 4000.0);
        near(layer_us, 50.0);
        // No faster than a copy.
        near(Drawing::of(&points, 3000.0, Drawer::Kernels).unwrap().memory, 3000.0);
        assert_eq!(Drawing::of(&[], 3000.0, Drawer::Kernels), None);
        let operations = Drawer::Operations(Reason::Answers(65));
        assert_eq!(Drawing::of(&points, 3000.0, operations), None, "others drew when it was measured");
    }
}
