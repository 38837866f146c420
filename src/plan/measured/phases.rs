//! Seconds of a plan's phases by what was measured.

use super::fit::{Fit, UpdateFit};
use super::rates::MeasuredRates;
use crate::plan::operations::{Amount, Rows};
use crate::plan::seconds::{PhaseSeconds, Terms};
use crate::plan::work::{Repeats, StepWork};
use crate::runtime::failure::Phase;

/// The seconds of one phase by what was measured. `at_rates` has the copies and messages, and the whole of phases that were not
/// measured; `repeats` tells how often phases run.
pub(in crate::plan) fn phase_seconds(
    measured: &MeasuredRates,
    step: &StepWork<'_>,
    phase: Phase,
    at_rates: PhaseSeconds,
    repeats: Repeats,
) -> PhaseSeconds {
    let Some(updates) = measured.updates(step.travels()) else { return at_rates };
    let positions = step.prompt_rows;
    let share = |rows: Rows| Amount::of_rows(&step.shape.layers, rows).times(1.0 / step.sharers);
    let of_answers = |fit: &Fit| {
        let [once, rows, pairs] = fit.seconds(positions, share(step.answer()));
        let length = step.answer().count / measured.answer_rows.max(1.0);
        [once * length, rows, pairs].map(|seconds| seconds * step.group())
    };
    let ([once, rows, pairs], backward) = match phase {
        Phase::Capture => {
            let once = updates.capture.seconds(positions, share(step.prompt()));
            (once.map(|part| part * repeats.captures), false)
        }
        Phase::Score => (of_answers(&updates.score).map(|part| part * repeats.scores), false),
        Phase::Replay => {
            let [once, rows, pairs] = of_answers(&updates.answer);
            let [_, forward, again] = of_answers(&updates.score);
            let pairs = match (measured.attention_kept, step.choice.keeping.answer_attention) {
                (true, false) => pairs + again,
                (false, true) => (pairs - again).max(0.0),
                _ => pairs,
            };
            // Answers that no score pass has left go up first.
            ([once, rows + repeats.ups * forward, pairs + repeats.ups * again], true)
        }
        Phase::Sweep => (sweep(measured, step, updates), true),
        _ => return at_rates,
    };
    let waiting = at_rates.terms.waiting;
    let terms = Terms {
        products: rows,
        attention: if backward { 0.0 } else { pairs },
        attention_backward: if backward { pairs } else { 0.0 },
        delta: 0.0,
        delta_backward: 0.0,
        moved: 0.0,
        waiting: waiting + once,
    };
    let compute = rows + pairs + once + waiting;
    PhaseSeconds { terms, compute, seconds: compute.max(at_rates.copies), ..at_rates }
}

/// Seconds of the tail's turns: once, rows, pairs.
fn sweep(measured: &MeasuredRates, step: &StepWork<'_>, updates: &UpdateFit) -> [f64; 3] {
    let tail = step.tail();
    let positions = step.prompt_rows;
    let amount = Amount::of_rows(&step.shape.layers, tail).times(1.0 / step.sharers);
    if tail.count <= 0.0 {
        return [0.0; 3];
    }
    if !step.travels() {
        // One row is measured as it is; more rows are those of an answer.
        let is_one = tail.count < 1.5;
        let [once, rows, pairs] = (if is_one { &updates.tail } else { &updates.answer }).seconds(positions, amount);
        return if is_one { [once, rows, pairs] } else { [0.0, rows, pairs] };
    }
    let [once, mut rows, mut pairs] = updates.tail.seconds(positions, amount);
    let [_, forward_rows, forward_pairs] = updates.capture.seconds(0.0, amount);
    // Layers whose input is computed again run forward once more.
    rows += step.again() * forward_rows;
    pairs += step.again() * forward_pairs;
    match (measured.attention_kept, step.choice.keeping.attention) {
        (true, false) => pairs += forward_pairs,
        (false, true) => pairs = (pairs - forward_pairs).max(0.0),
        _ => {}
    }
    [once, rows, pairs]
}
