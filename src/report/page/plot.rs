//! Plots as data: the template writes them as SVG. Nothing depends on a script; a pointer that rests on a point or a box
//! shows its words.

use serde::Serialize;

use super::axes::Axes;
use crate::report::averages::mean;

/// Colours of the page; further series begin again, with another dash.
const COLOURS: usize = 8;
/// Most letters of a name in a legend.
const NAME_CHARS_MAX: usize = 60;

/// What a figure is about. `reading` may be empty; `unit` follows a number, with its space.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct About {
    pub(super) title: String,
    pub(super) reading: String,
    pub(super) x_name: &'static str,
    pub(super) unit: &'static str,
    pub(super) wide: bool,
}

/// One figure of the page.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Figure {
    pub(super) about: About,
    /// The drawing for readers who do not see it.
    pub(super) words: String,
    pub(super) legend: Vec<Key>,
    pub(super) axes: Axes,
    pub(super) marks: Vec<Mark>,
}

/// An entry of a legend: a line or a box, in the colour of a style class.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Key {
    pub(super) name: String,
    class: String,
    line: bool,
}

impl Key {
    pub(super) fn line((index, name): (usize, &str)) -> Key {
        Key { name: cut(name), class: stroke(index), line: true }
    }

    pub(super) fn filled((index, name): (usize, &str)) -> Key {
        Key { name: cut(name), class: fill(index), line: false }
    }
}

/// What is drawn, in the colour of a style class: percentages along the width, pixels in height; the points of lines and bands
/// in a thousandth of the width and in pixels.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum Mark {
    Line { class: String, points: String },
    Band { class: String, points: String },
    Dot { class: String, x: f64, y: f64, radius: f64, words: String },
    Box { class: String, x: f64, y: f64, width: f64, height: f64, words: String },
    Limit { y: f64, words: String },
    Label { x: f64, y: f64, words: String },
}

/// A name that leaves room for others.
fn cut(name: &str) -> String {
    if name.chars().count() <= NAME_CHARS_MAX {
        return name.to_owned();
    }
    name.chars().take(NAME_CHARS_MAX - 1).chain("…".chars()).collect()
}

/// Line style of a series.
pub(super) fn stroke(index: usize) -> String {
    format!("l{} d{}", index % COLOURS, index / COLOURS % 4)
}

/// Fill colour of a series.
pub(super) fn fill(index: usize) -> String {
    format!("f{}", index % COLOURS)
}

/// At most `most` groups of neighbours.
pub(super) fn neighbours<T>(items: &[T], most: usize) -> Vec<&[T]> {
    items.chunks(items.len().div_ceil(most).max(1)).collect()
}

/// Mean of one number of each item; items are never empty here.
pub(super) fn mean_of<T>(items: &[T], number: impl Fn(&T) -> f64) -> f64 {
    mean(&items.iter().map(number).collect::<Vec<f64>>()).unwrap_or(0.0)
}

/// Words of the dots of one radius, of the boxes and of the limits.
#[cfg(test)]
pub(super) fn words_of(figure: &Figure, wanted: f64) -> Vec<&str> {
    let words = |mark| match mark {
        &Mark::Dot { radius, ref words, .. } => (radius - wanted).abs().lt(&0.1).then_some(words.as_str()),
        Mark::Box { words, .. } => Some(words.as_str()),
        _ => None,
    };
    figure.marks.iter().filter_map(words).collect()
}
