//! Plots as data: the template writes them as SVG. Nothing depends on a script; a pointer that rests on a point or a box
//! shows its words.

use serde::Serialize;

use super::axes::{Axes, Axis, Frame, Tick};
use super::numbers::short;
use crate::report::averages::{ends, mean};
use crate::runtime::units::{float, from_index};

/// Colours of the page; further series begin again, with another dash.
const COLOURS: usize = 8;
/// Most points of a line: of longer runs, means of neighbours.
const POINTS_MAX: usize = 240;
/// Most columns of stacked boxes, likewise.
const COLUMNS_MAX: usize = 120;
/// Each point of a line with at most this many has a visible mark.
const MARKS_MAX: usize = 30;

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
    about: About,
    /// The drawing for readers who do not see it.
    words: String,
    legend: Vec<Key>,
    axes: Axes,
    marks: Vec<Mark>,
}

/// An entry of a legend: a line or a box, in the colour of a style class.
#[derive(Clone, Debug, Serialize)]
struct Key {
    name: String,
    class: String,
    line: bool,
}

/// What is drawn, in pixels, in the colour of a style class.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Mark {
    Line { class: String, points: String },
    Band { class: String, points: String },
    Dot { class: String, x: f64, y: f64, radius: f64, words: String },
    Box { class: String, x: f64, y: f64, width: f64, height: f64, words: String },
    Limit { left: f64, right: f64, y: f64, words: String },
}

/// A line over updates, with the lower and upper edge of a band around each point, or no band.
#[derive(Clone, Debug, Default)]
pub(super) struct Series {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
    pub(super) band: Vec<[f64; 2]>,
}

/// Line style of a series.
fn stroke(index: usize) -> String {
    format!("l{} d{}", index % COLOURS, index / COLOURS % 4)
}

/// Fill colour of a series.
fn fill(index: usize) -> String {
    format!("f{}", index % COLOURS)
}

fn line_key((index, name): (usize, &str)) -> Key {
    Key { name: name.to_owned(), class: stroke(index), line: true }
}

fn box_key((index, name): (usize, &str)) -> Key {
    Key { name: name.to_owned(), class: fill(index), line: false }
}

/// At most `most` groups of neighbours.
pub(super) fn neighbours<T>(items: &[T], most: usize) -> Vec<&[T]> {
    items.chunks(items.len().div_ceil(most).max(1)).collect()
}

/// Mean of one number of each item; items are never empty here.
fn mean_of<T>(items: &[T], number: impl Fn(&T) -> f64) -> f64 {
    mean(&items.iter().map(number).collect::<Vec<f64>>()).unwrap_or(0.0)
}

impl Series {
    fn thinned(&self) -> Series {
        let point = |group: &[(f64, f64)]| (mean_of(group, |point| point.0), mean_of(group, |point| point.1));
        let edges = |group: &[[f64; 2]]| [0, 1].map(|edge| mean_of(group, |edges| edges[edge]));
        Series {
            name: self.name.clone(),
            points: neighbours(&self.points, POINTS_MAX).into_iter().map(point).collect(),
            band: neighbours(&self.band, POINTS_MAX).into_iter().map(edges).collect(),
        }
    }

    fn heights(&self) -> impl Iterator<Item = f64> {
        self.points.iter().map(|point| point.1).chain(self.band.iter().flatten().copied())
    }

    fn finite(&self) -> bool {
        self.points.iter().all(|point| point.0.is_finite()) && self.heights().all(f64::is_finite)
    }

    fn marks(&self, index: usize, frame: &Frame, about: &About) -> Vec<Mark> {
        let mut marks = Vec::new();
        let edge = |edge: usize| self.points.iter().zip(&self.band).map(move |(point, edges)| (point.0, edges[edge]));
        if !self.band.is_empty() {
            let back: Vec<(f64, f64)> = edge(1).collect();
            let points = frame.path(edge(0).chain(back.into_iter().rev()));
            marks.push(Mark::Band { class: fill(index), points });
        }
        marks.push(Mark::Line { class: stroke(index), points: frame.path(self.points.iter().copied()) });
        for (at, &(x, y)) in self.points.iter().enumerate() {
            let edges = self.band.get(at).map(|[low, high]| format!(" ({} … {})", short(*low), short(*high)));
            let edges = edges.unwrap_or_default();
            let words = format!("{} {}: {} {}{}{edges}", about.x_name, short(x), self.name, short(y), about.unit);
            let (x, y) = (frame.x(x), frame.y(y));
            if self.points.len() <= MARKS_MAX {
                marks.push(Mark::Dot { class: fill(index), x, y, radius: 2.5, words: String::new() });
            }
            marks.push(Mark::Dot { class: "hit".into(), x, y, radius: 6.0, words });
        }
        marks
    }

    fn words(&self, unit: &str) -> Option<String> {
        let ((_, first), (x, last)) = (self.points.first()?, self.points.last()?);
        Some(format!("{}: from {}{unit} to {}{unit} at {}", self.name, short(*first), short(*last), short(*x)))
    }
}

/// Lines over updates; nothing where no series has a point.
pub(super) fn lines(about: About, series: &[Series]) -> Option<Figure> {
    let drawn = series.iter().filter(|one| !one.points.is_empty() && one.finite());
    let series: Vec<Series> = drawn.map(Series::thinned).collect();
    let xs: Vec<f64> = series.iter().flat_map(|one| one.points.iter().map(|point| point.0)).collect();
    let ys: Vec<f64> = series.iter().flat_map(Series::heights).collect();
    let [left, right] = ends(&xs)?;
    let [least, most] = ends(&ys)?;
    let frame = Frame { wide: about.wide, x: Axis::counts(left, right, 8, 0.0), y: Axis::padded(least, most, 4) };
    let words: Vec<String> = series.iter().filter_map(|one| one.words(about.unit)).collect();
    Some(Figure {
        words: format!("{}. {}", about.title, words.join("; ")),
        legend: series.iter().map(|one| one.name.as_str()).enumerate().map(line_key).collect(),
        axes: frame.axes(),
        marks: series.iter().enumerate().flat_map(|(index, one)| one.marks(index, &frame, &about)).collect(),
        about,
    })
}

/// One column of stacked boxes: the updates that it stands for, and a height for each part.
#[derive(Clone, Debug)]
pub(super) struct Column {
    pub(super) first: f64,
    pub(super) last: f64,
    pub(super) heights: Vec<f64>,
}

impl Column {
    fn mean(columns: &[Column]) -> Column {
        let parts = columns[0].heights.len();
        Column {
            first: columns[0].first,
            last: columns[columns.len() - 1].last,
            heights: (0..parts).map(|part| mean_of(columns, |column| column.heights[part])).collect(),
        }
    }

    fn sum(&self) -> f64 {
        self.heights.iter().sum()
    }

    fn marks(&self, frame: &Frame, about: &About, parts: &[&str]) -> Vec<Mark> {
        let left = frame.x(self.first - 0.5);
        let width = frame.x(self.last + 0.5) - left;
        let gap = if width > 6.0 { (width * 0.15).clamp(1.0, 12.0) } else { 0.0 };
        let when = if self.first < self.last {
            format!("{} to {}, mean", self.first, self.last)
        } else {
            self.first.to_string()
        };
        let mut below = 0.0;
        let drawn = self.heights.iter().zip(parts).enumerate().filter(|(_, (height, _))| **height > 0.0);
        let draw = |(part, (&height, name)): (usize, (&f64, &&str))| {
            let (y, bottom) = (frame.y(below + height), frame.y(below));
            below += height;
            let share = 100.0 * height / self.sum();
            let words = format!("{} {when}: {name} {}{} ({share:.0} %)", about.x_name, short(height), about.unit);
            Mark::Box { class: fill(part), x: left + gap / 2.0, y, width: width - gap, height: bottom - y, words }
        };
        drawn.map(draw).collect()
    }
}

/// A column of stacked boxes for each update; nothing where all heights are zero.
pub(super) fn stacks(about: About, parts: &[&str], columns: &[Column]) -> Option<Figure> {
    let columns: Vec<Column> = neighbours(columns, COLUMNS_MAX).into_iter().map(Column::mean).collect();
    let sums: Vec<f64> = columns.iter().map(Column::sum).collect();
    let [_, most] = ends(&sums).filter(|[_, most]| *most > 0.0 && most.is_finite())?;
    let x = Axis::counts(columns.first()?.first, columns.last()?.last, 12, 0.5);
    let frame = Frame { wide: about.wide, x, y: Axis::padded(0.0, most, 4) };
    let all: f64 = sums.iter().sum();
    let share = |part: usize| columns.iter().map(|column| column.heights[part]).sum::<f64>() / all;
    let name = |part: usize| format!("{} ({:.0} %)", parts[part], 100.0 * share(part));
    let legend: Vec<Key> =
        (0..parts.len()).filter(|&part| share(part) > 0.0).map(|part| box_key((part, &name(part)))).collect();
    let names: Vec<&str> = legend.iter().map(|key| key.name.as_str()).collect();
    Some(Figure {
        words: format!("{}: {}", about.title, names.join(", ")),
        axes: frame.axes(),
        marks: columns.iter().flat_map(|column| column.marks(&frame, &about, parts)).collect(),
        legend,
        about,
    })
}

/// Boxes of one name side by side, one for each member.
#[derive(Clone, Debug)]
pub(super) struct Bars {
    pub(super) name: String,
    pub(super) heights: Vec<f64>,
}

/// Bars of each name, with a line at `limit`, for example the plan's sum.
pub(super) fn bars(about: About, members: &[String], all: &[Bars], limit: Option<(&str, f64)>) -> Option<Figure> {
    let heights = all.iter().flat_map(|bars| bars.heights.iter().copied()).chain(limit.map(|(_, at)| at));
    let heights: Vec<f64> = heights.collect();
    let [least, most] = ends(&heights).filter(|ends| ends.iter().all(|end| end.is_finite()))?;
    let x = Axis::names(all.iter().map(|bars| bars.name.as_str()));
    let frame = Frame { wide: about.wide, x, y: Axis::padded(least.min(0.0), most.max(0.0), 4) };
    let mut marks = Vec::new();
    for (at, bars) in all.iter().enumerate() {
        let share = 0.84 / float(from_index(bars.heights.len().max(1)));
        for (member, &height) in bars.heights.iter().enumerate() {
            let from = float(from_index(at)) + 0.08 + share * float(from_index(member));
            let (x, right) = (frame.x(from), frame.x(from + share));
            let (top, floor) = (frame.y(height), frame.y(0.0));
            marks.push(Mark::Box {
                class: fill(member),
                x,
                y: top.min(floor),
                width: (right - x - 1.0).clamp(0.5, 60.0),
                height: (top - floor).abs(),
                words: format!("{}, {}: {}{}", bars.name, members[member], short(height), about.unit),
            });
        }
    }
    marks.extend(limit.map(|(name, value)| Mark::Limit {
        left: frame.x(0.0),
        right: frame.x(float(from_index(all.len()))),
        y: frame.y(value),
        words: format!("{name} {}{}", short(value), about.unit),
    }));
    let words = all.iter().map(|bars| {
        let heights: Vec<String> = bars.heights.iter().map(|&height| short(height)).collect();
        format!("{}: {}{}", bars.name, heights.join(", "), about.unit)
    });
    Some(Figure {
        words: format!("{}. {}", about.title, words.collect::<Vec<_>>().join("; ")),
        legend: members.iter().map(String::as_str).enumerate().map(box_key).collect(),
        axes: frame.axes(),
        marks,
        about,
    })
}

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
    let ticks = places.into_iter().map(|at| Tick { at, text: place(at) }).collect();
    let frame = Frame { wide: about.wide, x: Axis::log2(ticks), y: Axis::padded(0.0, most, 4) };
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
        legend: series.iter().map(|(name, _)| name.as_str()).enumerate().map(line_key).collect(),
        axes: frame.axes(),
        marks,
        about: About { reading, ..about },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about() -> About {
        About { title: "Loss".into(), x_name: "update", unit: " s", ..About::default() }
    }

    fn series(count: u32) -> Series {
        let points = (0..count).map(|at| (f64::from(at), f64::from(at % 7))).collect();
        Series { name: "a".into(), points, band: Vec::new() }
    }

    /// Words of the dots of one radius, and of the boxes.
    fn words(figure: &Figure, wanted: f64) -> Vec<&str> {
        let words = |mark| match mark {
            &Mark::Dot { radius, ref words, .. } => (radius - wanted).abs().lt(&0.1).then_some(words.as_str()),
            Mark::Box { words, .. } => Some(words.as_str()),
            _ => None,
        };
        figure.marks.iter().filter_map(words).collect()
    }

    #[test]
    fn a_long_run_is_drawn_by_means_and_a_short_one_by_points() {
        let long = lines(about(), &[series(100_000)]).unwrap();
        let hits = words(&long, 6.0).len();
        assert!(hits <= POINTS_MAX && hits > POINTS_MAX / 2, "{hits}");
        assert!(words(&long, 2.5).is_empty());
        let short = lines(about(), &[series(3)]).unwrap();
        assert_eq!((words(&short, 6.0).len(), words(&short, 2.5).len()), (3, 3));
        assert_eq!(words(&short, 6.0)[2], "update 2: a 2 s");
    }

    #[test]
    fn what_has_no_point_or_no_number_is_not_drawn() {
        assert!(lines(about(), &[series(0)]).is_none());
        let broken = Series { points: vec![(1.0, f64::NAN)], ..Series::default() };
        assert!(lines(about(), &[broken]).is_none());
        assert!(stacks(about(), &["a"], &[]).is_none());
        assert!(bars(about(), &[], &[], None).is_none());
        assert!(dots(about(), &[], short).is_none());
        for count in [1, 2] {
            let drawn = format!("{:?}", lines(about(), &[series(count)]).unwrap());
            assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
        }
    }

    #[test]
    fn stacked_boxes_add_up_to_the_column_and_parts_that_never_occur_are_left_out() {
        let column = |at| Column { first: f64::from(at), last: f64::from(at), heights: vec![1.0, 0.0, 3.0] };
        let columns: Vec<Column> = (1..=4).map(column).collect();
        let drawn = stacks(about(), &["capture", "rollout", "score"], &columns).unwrap();
        assert_eq!(words(&drawn, 0.0).len(), 8);
        assert_eq!(words(&drawn, 0.0)[7], "update 4: score 3 s (75 %)");
        assert_eq!(drawn.words, "Loss: capture (25 %), score (75 %)");
    }

    #[test]
    fn bars_of_a_name_stand_side_by_side_with_the_limit() {
        let ranks = ["rank 0".to_owned(), "rank 1".to_owned()];
        let phase = |name: &str, heights: [f64; 2]| Bars { name: name.into(), heights: heights.into() };
        let phases = [phase("capture", [1.0, 2.0]), phase("score", [3.0, 1.0])];
        let drawn = bars(about(), &ranks, &phases, Some(("plan", 4.0))).unwrap();
        assert_eq!(words(&drawn, 0.0)[1], "capture, rank 1: 2 s");
        assert!(matches!(drawn.marks.last(), Some(Mark::Limit { words, .. }) if words == "plan 4 s"));
        assert_eq!(drawn.words, "Loss. capture: 1, 2 s; score: 3, 1 s");
    }
}
