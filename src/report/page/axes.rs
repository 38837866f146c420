//! Axes of a plot: where a value is drawn, and the round numbers along the edge.
//!
//! A plot is as wide as its place on the page, so places along it are shares of its width in percent; heights are pixels. Letters
//! keep their size then, on a narrow screen too.

use serde::Serialize;

use super::numbers::short;
use super::scale::Scale;
use crate::report::averages::ends;
use crate::runtime::units::{float, from_index};

/// Height of a plot without the numbers below, in pixels.
const HEIGHT: f64 = 180.0;
const HEIGHT_WIDE: f64 = 220.0;
const ROW_HEIGHT: f64 = 40.0;
/// Pixels below it, for numbers and the name of the axis.
const BELOW: f64 = 38.0;
/// Widths for which numbers along the axis are chosen, in pixels: on a narrow screen, in one of two columns, in the whole page.
const NARROW: f64 = 290.0;
const HALF: f64 = 440.0;
const WIDE: f64 = 1000.0;
/// Width of a letter, in pixels, and the gap between two numbers.
const LETTER: f64 = 7.0;
const GAP: f64 = 10.0;
/// Units of the drawing's width in which lines are drawn.
const LINE_UNITS: f64 = 1000.0;
/// Values whose difference is a smaller share of them are one.
const SAME: f64 = 1e-12;
/// Most letters of a name below an axis.
const NAME_CHARS_MAX: usize = 14;

/// A number at a place: a value of an axis, or a percentage or a pixel once the axis is drawn.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Tick {
    pub(super) at: f64,
    pub(super) text: String,
    /// Whether it has room on a wide screen only.
    roomy: bool,
}

impl Tick {
    pub(super) fn new(at: f64, text: String) -> Tick {
        Tick { at, text, roomy: false }
    }
}

/// One direction of a plot.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    /// Places of its ends.
    from: f64,
    to: f64,
    scale: Scale,
    ticks: Vec<Tick>,
    /// Width in pixels that its names need, if it has names.
    names_width: Option<f64>,
}

impl Axis {
    fn even(from: f64, to: f64, ticks: Vec<Tick>) -> Axis {
        Axis { from, to, scale: Scale::Even, ticks, names_width: None }
    }

    /// From `least` to `most`, with about `count` round numbers.
    pub(super) fn tight(least: f64, most: f64, count: u32) -> Axis {
        let (mut from, mut to) = (least, most);
        // Means of equal numbers may differ in their last bits.
        if to - from <= SAME * from.abs().max(to.abs()) {
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
        Axis::even(from, to, places.map(|at| Tick::new(at * step, short(at * step + 0.0))).collect())
    }

    /// As [`Axis::tight`], widened to round numbers, so that no line touches the edge.
    pub(super) fn padded(least: f64, most: f64, count: u32) -> Axis {
        let tight = Axis::tight(least, most, count);
        let step = round_step((tight.to - tight.from) / f64::from(count));
        Axis::tight((tight.from / step).floor() * step, (tight.to / step).ceil() * step, count)
    }

    /// By `scale`; [`Axis::padded`] where that is even.
    pub(super) fn scaled(least: f64, most: f64, count: u32, scale: Scale) -> Axis {
        if scale == Scale::Even || most <= least {
            return Axis::padded(least, most, count);
        }
        let [from, to] = [least, most].map(|end| scale.place(end));
        let margin = 0.04 * (to - from);
        let ticks = scale.round_values(least, most, count).into_iter();
        let ticks = ticks.map(|at| Tick::new(at, short(at + 0.0))).collect();
        Axis { from: from - margin, to: to + margin, scale, ticks, names_width: None }
    }

    /// Over counts, with numbers at whole ones only and `margin` on both sides.
    pub(super) fn counts(least: f64, most: f64, count: u32, margin: f64) -> Axis {
        let most = most.max(least);
        let margin = if most > least { margin } else { 0.5 + margin };
        let axis = Axis::ticked(least, most, round_step((most - least) / f64::from(count)).max(1.0));
        Axis { from: least - margin, to: most + margin, ..axis }
    }

    /// With numbers at these places, which are drawn by their logarithm.
    pub(super) fn log(ticks: Vec<Tick>) -> Axis {
        let values: Vec<f64> = ticks.iter().map(|tick| tick.at).collect();
        let [least, most] = ends(&values).unwrap_or([1.0, 2.0]);
        let [from, to] = [least / 1.3, most * 1.3].map(|end| Scale::Log.place(end));
        Axis { from, to, scale: Scale::Log, ticks, names_width: None }
    }

    /// One place of width 1 for each name.
    pub(super) fn names<'a>(names: impl Iterator<Item = &'a str>) -> Axis {
        let tick = |(at, name): (usize, &str)| Tick::new(float(from_index(at)) + 0.5, cut(name));
        let ticks: Vec<Tick> = names.enumerate().map(tick).collect();
        let longest = ticks.iter().map(|tick| text_width(&tick.text)).fold(0.0, f64::max);
        let count = float(from_index(ticks.len()));
        Axis { names_width: Some(count * (longest + GAP)), ..Axis::even(0.0, count, ticks) }
    }

    /// `count` rows of height 1 without numbers.
    pub(super) fn rows(count: f64) -> Axis {
        Axis::even(0.0, count, Vec::new())
    }

    /// From 0 to 1 along the axis.
    fn share(&self, value: f64) -> f64 {
        (self.scale.place(value) - self.from) / (self.to - self.from)
    }
}

fn text_width(text: &str) -> f64 {
    LETTER * float(from_index(text.chars().count()))
}

/// A name that fits below an axis.
fn cut(name: &str) -> String {
    if name.chars().count() <= NAME_CHARS_MAX {
        return name.to_owned();
    }
    name.chars().take(NAME_CHARS_MAX - 1).chain("…".chars()).collect()
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
    /// Rows that the height is shared among; absent for values.
    pub(super) rows: Option<f64>,
}

/// A frame for the template: heights in pixels, places along the width in percent.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Axes {
    /// Of the plot alone, and with the numbers below.
    floor: f64,
    height: f64,
    /// Least width, so that names have room; the drawing scrolls where there is less.
    width_min: Option<f64>,
    /// What stands at the y axis; empty where it is even.
    scale: String,
    x_ticks: Vec<Tick>,
    y_ticks: Vec<Tick>,
}

impl Frame {
    fn height(&self) -> f64 {
        match self.rows {
            Some(rows) => rows * ROW_HEIGHT,
            None if self.wide => HEIGHT_WIDE,
            None => HEIGHT,
        }
    }

    /// Place of an x value, in percent of the width.
    pub(super) fn x(&self, value: f64) -> f64 {
        100.0 * self.x.share(value)
    }

    /// Pixel of a y value: values grow upwards, pixels downwards.
    pub(super) fn y(&self, value: f64) -> f64 {
        let height = self.height();
        height - self.y.share(value).clamp(-0.01, 1.01) * height
    }

    /// The pixels of a line through these values, as SVG reads them.
    pub(super) fn path(&self, points: impl Iterator<Item = (f64, f64)>) -> String {
        let along = |x: f64| self.x(x) * LINE_UNITS / 100.0;
        let points: Vec<String> = points.map(|(x, y)| format!("{:.1},{:.1}", along(x), self.y(y))).collect();
        points.join(" ")
    }

    /// The axes with their numbers. A number that would cover the one before is left out.
    pub(super) fn axes(&self) -> Axes {
        let has_names = self.x.names_width.is_some();
        let width = if self.wide { WIDE } else { HALF };
        // Names keep all their room.
        let kept = if has_names { vec![true; self.x.ticks.len()] } else { self.fitting(width) };
        let narrow = if has_names { kept.clone() } else { self.fitting(NARROW) };
        let x_ticks =
            self.x.ticks.iter().zip(kept.iter().zip(&narrow)).filter(|(_, (kept, narrow))| **kept || **narrow);
        let x_tick = |(tick, (_, narrow)): (&Tick, (&bool, &bool))| Tick {
            at: self.x(tick.at),
            text: tick.text.clone(),
            roomy: !narrow,
        };
        let y_tick = |tick: &Tick| Tick::new(self.y(tick.at), tick.text.clone());
        Axes {
            floor: self.height(),
            height: self.height() + BELOW,
            width_min: self.x.names_width,
            scale: self.y.scale.words(),
            x_ticks: x_ticks.map(x_tick).collect(),
            y_ticks: self.y.ticks.iter().map(y_tick).collect(),
        }
    }

    /// Which numbers along the x axis fit side by side into this many pixels.
    fn fitting(&self, width: f64) -> Vec<bool> {
        let mut free_from = f64::NEG_INFINITY;
        let fits = self.x.ticks.iter().map(|tick| {
            let (at, half) = (self.x(tick.at) * width / 100.0, text_width(&tick.text) / 2.0);
            let fits = at - half >= free_from;
            if fits {
                free_from = at + half + GAP;
            }
            fits
        });
        fits.collect()
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
        assert_eq!(numbers(Axis::tight(5.0, 5.0 + 1e-14, 4)), ["4", "6"]);
        assert_eq!(numbers(Axis::counts(1.0, 3.0, 8, 0.0)), ["1", "2", "3"]);
        assert_eq!(numbers(Axis::counts(1.0, 1.0, 8, 0.0)), ["1"]);
        assert_eq!(numbers(Axis::scaled(0.01, 40.0, 5, Scale::Log)), ["0.01", "0.1", "1", "10"]);
        let padded = Axis::padded(0.01, 0.93, 4);
        assert!(padded.from <= 0.0 && padded.to >= 1.0);
    }

    #[test]
    fn larger_values_are_drawn_higher_and_doublings_at_equal_distances() {
        let x = Axis::log([1024.0, 2048.0, 4096.0].map(|at: f64| Tick::new(at, at.to_string())).into());
        let frame = Frame { wide: false, x, y: Axis::tight(0.0, 1.0, 4), rows: None };
        assert!(frame.y(1.0) < frame.y(0.0));
        let gap = frame.x(2048.0) - frame.x(1024.0);
        assert!((frame.x(4096.0) - frame.x(2048.0) - gap).abs() < 1e-9 && gap > 0.0);
    }

    #[test]
    fn a_narrow_screen_has_fewer_numbers_and_every_name() {
        let y = Axis::tight(0.0, 1.0, 4);
        let wide = Frame { wide: true, x: Axis::counts(1_000_000.0, 1_000_012.0, 12, 0.5), y: y.clone(), rows: None };
        let ticks = wide.axes().x_ticks;
        assert!(ticks.iter().any(|tick| tick.roomy) && ticks.iter().any(|tick| !tick.roomy), "{ticks:?}");
        let names = ["a name of far too many letters", "b", "c"];
        let named = Frame { wide: true, x: Axis::names(names.into_iter()), y, rows: None }.axes();
        assert!(named.x_ticks.iter().all(|tick| !tick.roomy) && named.x_ticks.len() == 3);
        assert_eq!(named.x_ticks[0].text.chars().count(), NAME_CHARS_MAX);
        assert!(named.width_min > Some(300.0));
    }
}
