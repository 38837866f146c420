//! Where a value lies in a plot, and the lines and numbers that say so.

use std::fmt::Write as _;

use super::html::{escape, short};
use crate::runtime::units::{float, from_index};

/// Room around the drawing: left for numbers, right for the last number's end, above, and below for numbers and name.
const LEFT: f64 = 62.0;
const RIGHT: f64 = 18.0;
const ABOVE: f64 = 10.0;
const BELOW: f64 = 38.0;

/// A drawing's size in its own units, which are pixels at the page's full width.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) width: f64,
    pub(super) height: f64,
}

/// Half of the page, and all of it.
pub(super) const HALF: Size = Size { width: 540.0, height: 225.0 };
pub(super) const WIDE: Size = Size { width: 1120.0, height: 270.0 };

/// A direction of a plot.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    from: f64,
    to: f64,
    /// In the direction of powers of two.
    doubling: bool,
    /// Places with their numbers.
    ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Over a range of values, with about so many round numbers on it.
    pub(super) fn over(least: f64, most: f64, count: u32) -> Axis {
        let (mut from, mut to) = (least, most);
        if to <= from {
            // One value has no range of its own.
            let around = if from == 0.0 { 1.0 } else { from.abs() * 0.5 };
            (from, to) = (from - around, to + around);
        }
        Axis::ticked(from, to, round_step((to - from) / f64::from(count)))
    }

    fn ticked(from: f64, to: f64, step: f64) -> Axis {
        let mut ticks = Vec::new();
        let (first, last) = ((from / step).ceil(), (to / step).floor());
        for index in 0..=100 {
            let at = first + f64::from(index);
            if at > last {
                break;
            }
            // Adding zero takes the sign from a negative one.
            ticks.push((at * step + 0.0, short(at * step + 0.0)));
        }
        Axis { from, to, doubling: false, ticks }
    }

    /// As [`Axis::over`], widened to round numbers, so that no line touches the edge.
    pub(super) fn around(least: f64, most: f64, count: u32) -> Axis {
        let tight = Axis::over(least, most, count);
        let step = round_step((tight.to - tight.from) / f64::from(count));
        Axis::over((tight.from / step).floor() * step, (tight.to / step).ceil() * step, count)
    }

    /// Over a range of counts, with numbers at whole ones only.
    pub(super) fn whole(least: f64, most: f64, count: u32) -> Axis {
        if most <= least {
            return Axis::ticked(least - 0.5, least + 0.5, 1.0);
        }
        Axis::ticked(least, most, round_step((most - least) / f64::from(count)).max(1.0))
    }

    /// With numbers at these places, the distance between them by powers of two.
    pub(super) fn doubling(places: &[(f64, String)]) -> Axis {
        let values: Vec<f64> = places.iter().map(|(at, _)| *at).collect();
        let [least, most] = crate::report::step::ends(&values).unwrap_or([1.0, 2.0]);
        Axis { from: least / 1.3, to: most * 1.3, doubling: true, ticks: places.to_vec() }
    }

    /// With room before the first place and behind the last.
    pub(super) fn with_margin(mut self, room: f64) -> Axis {
        (self.from, self.to) = (self.from - room, self.to + room);
        self
    }

    /// With these names in place of numbers.
    pub(super) fn named(mut self, names: impl Iterator<Item = (f64, String)>) -> Axis {
        self.ticks = names.collect();
        self
    }

    /// From 0 to 1 along the axis.
    fn share(&self, value: f64) -> f64 {
        if self.doubling {
            return (value / self.from).log2() / (self.to / self.from).log2();
        }
        (value - self.from) / (self.to - self.from)
    }
}

/// 1, 2 or 5 times a power of ten, not below `least`.
fn round_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|times| times * power).find(|step| *step >= least * 0.999).unwrap_or(power)
}

/// Two axes on a drawing.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub(super) size: Size,
    pub(super) x: Axis,
    pub(super) y: Axis,
}

impl Frame {
    /// Where `x` lies.
    pub(super) fn x(&self, value: f64) -> f64 {
        LEFT + self.x.share(value) * (self.size.width - LEFT - RIGHT)
    }

    /// Where `y` lies: upwards, while a drawing's own numbers go down.
    pub(super) fn y(&self, value: f64) -> f64 {
        let height = self.size.height - ABOVE - BELOW;
        ABOVE + height - self.y.share(value).clamp(-0.01, 1.01) * height
    }

    /// The drawing: `inner` behind its axes; `about` says in words what is seen. `x_name` stands below.
    pub(super) fn drawing(&self, about: &str, x_name: &str, inner: &str) -> String {
        let Size { width, height } = self.size;
        let (floor, end) = (height - BELOW, width - RIGHT);
        let mut svg = format!("<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">\n", escape(about));
        // Writing to a text cannot fail.
        for (value, number) in &self.y.ticks {
            let at = self.y(*value);
            let _ =
                writeln!(svg, "<line class=\"grid-line\" x1=\"{LEFT}\" x2=\"{end}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>");
            let (x, y) = (LEFT - 7.0, at + 4.0);
            let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{}</text>", escape(number));
        }
        let mut free_from = f64::NEG_INFINITY;
        for (value, number) in &self.x.ticks {
            let at = self.x(*value);
            let half = 3.5 * float(from_index(number.chars().count()));
            // Numbers that would lie on one another are left out.
            if at - half < free_from {
                continue;
            }
            free_from = at + half + 8.0;
            let y = floor + 16.0;
            let _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{y}\" text-anchor=\"middle\">{}</text>", escape(number));
        }
        let (middle, below) = (f64::midpoint(LEFT, end), height - 5.0);
        let _ = writeln!(svg, "<text x=\"{middle:.1}\" y=\"{below}\" text-anchor=\"middle\">{}</text>", escape(x_name));
        let _ = writeln!(svg, "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{end}\" y1=\"{floor}\" y2=\"{floor}\"/>");
        svg + inner + "</svg>\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within_the_range() {
        let numbers = |axis: Axis| axis.ticks.into_iter().map(|(_, number)| number).collect::<Vec<_>>();
        assert_eq!(numbers(Axis::over(0.0, 10.0, 5)), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(numbers(Axis::over(-0.3, 0.3, 4)), ["-0.2", "0", "0.2"]);
        assert_eq!(numbers(Axis::over(5.0, 5.0, 4)), ["4", "6"]);
        assert_eq!(numbers(Axis::whole(1.0, 3.0, 8)), ["1", "2", "3"]);
        assert_eq!(numbers(Axis::whole(1.0, 1.0, 8)), ["1"]);
        let around = Axis::around(0.01, 0.93, 4);
        assert!(around.from <= 0.0 && around.to >= 1.0);
    }

    #[test]
    fn upwards_is_more_and_doubling_is_even() {
        let x = Axis::doubling(&[(1024.0, "1k".into()), (2048.0, "2k".into()), (4096.0, "4k".into())]);
        let frame = Frame { size: HALF, x, y: Axis::over(0.0, 1.0, 4) };
        assert!(frame.y(1.0) < frame.y(0.0));
        let gap = frame.x(2048.0) - frame.x(1024.0);
        assert!((frame.x(4096.0) - frame.x(2048.0) - gap).abs() < 1e-9 && gap > 0.0);
    }
}
