//! Measured points over an axis of powers.

use super::axes::{Axis, Frame, Tick};
use super::numbers::short;
use super::plot::{About, Figure, Key, Mark, fill, stroke};
use crate::report::averages::ends;

/// A measured point.
#[derive(Clone, Debug)]
pub(super) struct Dot {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) name: String,
}

/// Dots joined by lines, over x values by their logarithm; `place` names an x value.
pub(super) fn dots(about: About, series: &[(String, Vec<Dot>)], place: fn(f64) -> String) -> Option<Figure> {
    let all = || series.iter().flat_map(|(_, dots)| dots);
    let mut places: Vec<f64> = all().map(|dot| dot.x).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let [_, most] = ends(&all().map(|dot| dot.y).collect::<Vec<f64>>())?;
    let ticks = places.into_iter().map(|at| Tick::new(at, place(at))).collect();
    let frame = Frame { wide: about.wide, x: Axis::log(ticks), y: Axis::padded(0.0, most, 4), rows: None };
    let measured = |dot: &Dot| format!("{}{} at {}", short(dot.y), about.unit, place(dot.x));
    let mut marks = Vec::new();
    for (index, (name, dots)) in series.iter().enumerate() {
        let points = frame.path(dots.iter().map(|dot| (dot.x, dot.y)));
        marks.push(Mark::Line { class: stroke(index), points });
        marks.extend(dots.iter().map(|dot| Mark::Dot {
            class: format!("box {}", fill(index)),
            x: frame.x(dot.x),
            y: frame.y(dot.y),
            radius: 5.0,
            words: format!("{}, {name}: {}", dot.name, measured(dot)),
        }));
    }
    let words: Vec<String> = all().map(|dot| format!("{}: {}", dot.name, measured(dot))).collect();
    // A legend of one entry is not shown, and its name says what was held fixed.
    let reading = if let [(name, _)] = series { name.clone() } else { about.reading.clone() };
    Some(Figure {
        words: format!("{}. {}", about.title, words.join("; ")),
        legend: series.iter().map(|(name, _)| name.as_str()).enumerate().map(Key::line).collect(),
        axes: frame.axes(),
        marks,
        about: About { reading, ..about },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_dot_there_is_no_figure() {
        assert!(dots(About::default(), &[], short).is_none());
        assert!(dots(About::default(), &[("none".into(), Vec::new())], short).is_none());
    }
}
