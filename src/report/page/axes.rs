//! Axes of a plot: where a value is drawn, and the round numbers along the edge.

use serde::Serialize;

use super::numbers::short;
use crate::report::averages::ends;
use crate::runtime::units::{float, from_index};

/// Margins around the plot, in pixels: numbers on the left, numbers and the axis name below.
const LEFT: f64 = 62.0;
const RIGHT: f64 = 18.0;
const ABOVE: f64 = 10.0;
const BELOW: f64 = 38.0;

/// Width and height of a drawing, in pixels at the page's full width.
const HALF: [f64; 2] = [540.0, 225.0];
const WIDE: [f64; 2] = [1120.0, 270.0];

/// A number at a place: a value of an axis, or a pixel once the axis is drawn.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Tick {
    pub(super) at: f64,
    pub(super) text: String,
}

/// One direction of a plot.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    from: f64,
    to: f64,
    log2: bool,
    ticks: Vec<Tick>,
}

impl Axis {
    /// From `least` to `most`, with about `count` round numbers.
    pub(super) fn tight(least: f64, most: f64, count: u32) -> Axis {
        let (mut from, mut to) = (least, most);
        if to <= from {
            // One value has no range of its own.
            let around = if from == 0.0 { 1.0 } else { from.abs() * 0.5 };
            (from, to) = (from - around, to + around);
        }
        Axis::ticked(from, to, round_step((to - from) / f64::from(count)))
    }

    fn ticked(from: f64, to: f64, step: f64) -> Axis {
        let first = (from / step).ceil();
        let last = (to / step).floor();
        let places = (0..=100).map(|index| first + f64::from(index)).take_while(|&at| at <= last);
        // Adding zero takes the sign from a negative zero.
        let ticks = places.map(|at| Tick { at: at * step, text: short(at * step + 0.0) }).collect();
        Axis { from, to, log2: false, ticks }
    }

    /// As [`Axis::tight`], widened to round numbers, so that no line touches the edge.
    pub(super) fn padded(least: f64, most: f64, count: u32) -> Axis {
        let tight = Axis::tight(least, most, count);
        let step = round_step((tight.to - tight.from) / f64::from(count));
        Axis::tight((tight.from / step).floor() * step, (tight.to / step).ceil() * step, count)
    }

    /// Over counts, with numbers at whole ones only and `margin` on both sides.
    pub(super) fn counts(least: f64, most: f64, count: u32, margin: f64) -> Axis {
        let most = most.max(least);
        let margin = if most > least { margin } else { 0.5 + margin };
        let axis = Axis::ticked(least, most, round_step((most - least) / f64::from(count)).max(1.0));
        Axis { from: least - margin, to: most + margin, ..axis }
    }

    /// With numbers at these places, which are drawn by their logarithm.
    pub(super) fn log2(ticks: Vec<Tick>) -> Axis {
        let values: Vec<f64> = ticks.iter().map(|tick| tick.at).collect();
        let [least, most] = ends(&values).unwrap_or([1.0, 2.0]);
        Axis { from: least / 1.3, to: most * 1.3, log2: true, ticks }
    }

    /// One place of width 1 for each name.
    pub(super) fn names<'a>(names: impl Iterator<Item = &'a str>) -> Axis {
        let tick = |(at, name): (usize, &str)| Tick { at: float(from_index(at)) + 0.5, text: name.to_owned() };
        let ticks: Vec<Tick> = names.enumerate().map(tick).collect();
        Axis { from: 0.0, to: float(from_index(ticks.len())), log2: false, ticks }
    }

    /// From 0 to 1 along the axis.
    fn share(&self, value: f64) -> f64 {
        if self.log2 {
            return (value / self.from).log2() / (self.to / self.from).log2();
        }
        (value - self.from) / (self.to - self.from)
    }
}

/// 1, 2 or 5 times a power of ten, not below `least`.
fn round_step(least: f64) -> f64 {
    if least <= 0.0 {
        return 0.0;
    }
    let power = 10_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|times| times * power).find(|step| *step >= least * 0.999).unwrap_or(power)
}

/// Two axes of one drawing.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub(super) wide: bool,
    pub(super) x: Axis,
    pub(super) y: Axis,
}

/// A frame in pixels, for the template.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Axes {
    width: f64,
    height: f64,
    left: f64,
    right: f64,
    floor: f64,
    x_ticks: Vec<Tick>,
    y_ticks: Vec<Tick>,
}

impl Frame {
    fn size(&self) -> [f64; 2] {
        if self.wide { WIDE } else { HALF }
    }

    /// Pixel of an x value.
    pub(super) fn x(&self, value: f64) -> f64 {
        let [width, _] = self.size();
        LEFT + self.x.share(value) * (width - LEFT - RIGHT)
    }

    /// Pixel of a y value: values grow upwards, pixels downwards.
    pub(super) fn y(&self, value: f64) -> f64 {
        let [_, height] = self.size();
        let inner = height - ABOVE - BELOW;
        ABOVE + inner - self.y.share(value).clamp(-0.01, 1.01) * inner
    }

    /// The pixels of a line through these values, as SVG reads them.
    pub(super) fn path(&self, points: impl Iterator<Item = (f64, f64)>) -> String {
        let points: Vec<String> = points.map(|(x, y)| format!("{:.1},{:.1}", self.x(x), self.y(y))).collect();
        points.join(" ")
    }

    /// The axes with their numbers. A number that would cover the one before is left out.
    pub(super) fn axes(&self) -> Axes {
        let [width, height] = self.size();
        let mut free_from = f64::NEG_INFINITY;
        let x_ticks = self.x.ticks.iter().filter_map(|tick| {
            let at = self.x(tick.at);
            let half = 3.5 * float(from_index(tick.text.chars().count()));
            let fits = at - half >= free_from;
            if fits {
                free_from = at + half + 8.0;
            }
            fits.then(|| Tick { at, text: tick.text.clone() })
        });
        let y_tick = |tick: &Tick| Tick { at: self.y(tick.at), text: tick.text.clone() };
        Axes {
            width,
            height,
            left: LEFT,
            right: width - RIGHT,
            floor: height - BELOW,
            x_ticks: x_ticks.collect(),
            y_ticks: self.y.ticks.iter().map(y_tick).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within_the_range() {
        let numbers = |axis: Axis| axis.ticks.into_iter().map(|tick| tick.text).collect::<Vec<_>>();
        assert_eq!(numbers(Axis::tight(0.0, 10.0, 5)), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(numbers(Axis::tight(-0.3, 0.3, 4)), ["-0.2", "0", "0.2"]);
        assert_eq!(numbers(Axis::tight(5.0, 5.0, 4)), ["4", "6"]);
        assert_eq!(numbers(Axis::counts(1.0, 3.0, 8, 0.0)), ["1", "2", "3"]);
        assert_eq!(numbers(Axis::counts(1.0, 1.0, 8, 0.0)), ["1"]);
        let padded = Axis::padded(0.01, 0.93, 4);
        assert!(padded.from <= 0.0 && padded.to >= 1.0);
    }

    #[test]
    fn larger_values_are_drawn_higher_and_doublings_at_equal_distances() {
        let tick = |at: f64| Tick { at, text: at.to_string() };
        let x = Axis::log2([1024.0, 2048.0, 4096.0].map(tick).into());
        let frame = Frame { wide: false, x, y: Axis::tight(0.0, 1.0, 4) };
        assert!(frame.y(1.0) < frame.y(0.0));
        let gap = frame.x(2048.0) - frame.x(1024.0);
        assert!((frame.x(4096.0) - frame.x(2048.0) - gap).abs() < 1e-9 && gap > 0.0);
    }
}
