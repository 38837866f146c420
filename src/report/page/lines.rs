//! Lines over updates, with bands, limits and the updates that raised an alarm.

use super::axes::{Axis, Frame};
use super::numbers::{count, short};
use super::plot::{About, Figure, Key, Mark, fill, mean_of, neighbours, stroke};
use super::scale::Scale;
use crate::report::averages::ends;
use crate::runtime::units::from_index;

/// Most points of a line: of longer runs, means of neighbours.
const POINTS_MAX: usize = 240;
/// Most of them with words for a pointer.
const HITS_MAX: usize = 80;
/// Each point of a line with at most this many has a visible mark.
const MARKS_MAX: usize = 30;
/// Lines of one figure whose extremes are drawn where points are means; those of more lines would hide each other.
const ENVELOPES_MAX: usize = 3;
/// Most updates of a figure that are marked for an alarm.
const ALARMS_MAX: usize = 60;

/// What lies between the edges of a band.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum Edges {
    /// A distance around the line: of several updates the mean.
    #[default]
    Around,
    /// The least and the largest of something: of several updates the extremes.
    Extremes,
}

/// A line over updates, with the lower and upper edge of a band around each point, or no band. A value may not be finite; it is
/// counted and not drawn.
#[derive(Clone, Debug, Default)]
pub(super) struct Series {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
    pub(super) band: Vec<[f64; 2]>,
    pub(super) edges: Edges,
}

/// What is drawn besides the lines.
#[derive(Clone, Debug, Default)]
pub(super) struct Besides {
    /// Named values; each is drawn where the lines come as far.
    pub(super) limits: Vec<(String, f64)>,
    /// Updates with words, each marked on the first line that has it.
    pub(super) marked: Vec<(f64, String)>,
}

/// A line as it is drawn: points, and stretches of them without a gap.
struct Drawn {
    series: Series,
    /// Updates of a point.
    group: usize,
    not_finite: Vec<f64>,
    /// Whether the band was added here, since points are means.
    has_envelope: bool,
}

impl Drawn {
    fn of(series: &Series, with_envelope: bool) -> Drawn {
        let is_finite = |at: usize| {
            let (x, y) = series.points[at];
            x.is_finite()
                && y.is_finite()
                && series.band.get(at).is_none_or(|edges| edges.iter().all(|e| e.is_finite()))
        };
        let (kept, broken): (Vec<usize>, Vec<usize>) = (0..series.points.len()).partition(|&at| is_finite(at));
        let groups = neighbours(&kept, POINTS_MAX);
        let group = groups.first().map_or(1, |group| group.len());
        let has_envelope = with_envelope && group > 1 && series.band.is_empty();
        let y = |at: &usize| series.points[*at].1;
        let extremes = |values: Vec<f64>| ends(&values).unwrap_or_default();
        let point = |group: &&[usize]| (mean_of(group, |&at| series.points[at].0), mean_of(group, y));
        let band = |group: &&[usize]| {
            if has_envelope {
                return extremes(group.iter().map(y).collect());
            }
            if series.edges == Edges::Extremes {
                return extremes(group.iter().flat_map(|&at| series.band[at]).collect());
            }
            [0, 1].map(|edge| mean_of(group, |&at| series.band[at][edge]))
        };
        let has_band = has_envelope || !series.band.is_empty();
        Drawn {
            series: Series {
                name: series.name.clone(),
                points: groups.iter().map(point).collect(),
                band: if has_band { groups.iter().map(band).collect() } else { Vec::new() },
                edges: series.edges,
            },
            group,
            not_finite: broken.into_iter().map(|at| series.points[at].0).collect(),
            has_envelope,
        }
    }

    fn heights(&self) -> impl Iterator<Item = f64> {
        self.series.points.iter().map(|point| point.1).chain(self.series.band.iter().flatten().copied())
    }

    fn marks(&self, index: usize, frame: &Frame, about: &About) -> Vec<Mark> {
        let Series { name, points, band, .. } = &self.series;
        let mut marks = Vec::new();
        let edge = |edge: usize| points.iter().zip(band).map(move |(point, edges)| (point.0, edges[edge]));
        if !band.is_empty() {
            let back: Vec<(f64, f64)> = edge(1).collect();
            marks.push(Mark::Band { class: fill(index), points: frame.path(edge(0).chain(back.into_iter().rev())) });
        }
        // A gap is where an update between two points has no finite value.
        let is_gap = |one: f64, two: f64| self.not_finite.iter().any(|&at| one < at && at < two);
        for stretch in points.chunk_by(|one, two| self.group > 1 || !is_gap(one.0, two.0)) {
            marks.push(Mark::Line { class: stroke(index), points: frame.path(stretch.iter().copied()) });
            // A line through one point cannot be seen.
            if let ([(x, y)], true) = (stretch, points.len() > MARKS_MAX) {
                let (x, y) = (frame.x(*x), frame.y(*y));
                marks.push(Mark::Dot { class: fill(index), x, y, radius: 2.0, words: String::new() });
            }
        }
        let every = points.len().div_ceil(HITS_MAX).max(1);
        for (at, &(x, y)) in points.iter().enumerate() {
            let edges = band.get(at).map(|[low, high]| format!(" ({} … {})", short(*low), short(*high)));
            let edges = edges.unwrap_or_default();
            let words = format!("{} {}: {name} {}{}{edges}", about.x_name, short(x), short(y), about.unit);
            let (x, y) = (frame.x(x), frame.y(y));
            if points.len() <= MARKS_MAX {
                marks.push(Mark::Dot { class: fill(index), x, y, radius: 2.5, words: String::new() });
            }
            if at % every == 0 || at + 1 == points.len() {
                marks.push(Mark::Dot { class: "hit".into(), x, y, radius: 6.0, words });
            }
        }
        marks
    }

    fn words(&self, unit: &str) -> Option<String> {
        let ((_, first), (x, last)) = (self.series.points.first()?, self.series.points.last()?);
        let [least, most] = ends(&self.heights().collect::<Vec<_>>())?.map(short);
        let (name, first, last, x) = (&self.series.name, short(*first), short(*last), short(*x));
        Some(format!("{name}: from {first}{unit} to {last}{unit} at {x}, between {least} and {most}"))
    }
}

/// What a reader must know of how points were made.
fn notes(drawn: &[Drawn]) -> Vec<String> {
    let mut notes = Vec::new();
    let group = drawn.iter().map(|one| one.group).max().unwrap_or(1);
    if group > 1 {
        let envelope = drawn.iter().any(|one| one.has_envelope);
        let shown = if envelope { "; the pale area goes from their least to their largest value" } else { "" };
        notes.push(format!("Each point is the mean of up to {} updates{shown}.", count(from_index(group))));
    }
    let broken: Vec<f64> = drawn.iter().flat_map(|one| one.not_finite.iter().copied()).collect();
    if let Some([first, _]) = ends(&broken) {
        let first = short(first);
        notes.push(match broken.len() {
            1 => format!("One value is not finite and not drawn, in update {first}."),
            many => format!("{many} values are not finite and not drawn, the first in update {first}."),
        });
    }
    notes
}

/// Updates that are marked, at the height of the first line that has them.
fn alarm_marks(besides: &Besides, series: &[Series], frame: &Frame) -> Vec<Mark> {
    let height = |x: f64| {
        let found = |one: &Series| one.points.iter().find(|point| (point.0 - x).abs() < 0.5).map(|point| point.1);
        series.iter().find_map(found).filter(|height| height.is_finite())
    };
    let kept = neighbours(&besides.marked, ALARMS_MAX).into_iter().filter_map(|group| group.last());
    let radius = if besides.marked.len() > MARKS_MAX / 2 { 2.5 } else { 4.5 };
    let marks = kept.filter_map(|(x, words)| {
        let y = height(*x)?;
        Some(Mark::Dot { class: "alarm".into(), x: frame.x(*x), y: frame.y(y), radius, words: words.clone() })
    });
    marks.collect()
}

/// Lines over updates; nothing where no series has a point.
pub(super) fn lines(about: About, series: &[Series], besides: &Besides) -> Option<Figure> {
    let given = series.iter().filter(|one| !one.points.is_empty());
    let with_envelope = given.clone().count() <= ENVELOPES_MAX;
    let drawn: Vec<Drawn> = given.map(|one| Drawn::of(one, with_envelope)).collect();
    let xs: Vec<f64> = drawn.iter().flat_map(|one| one.series.points.iter().map(|point| point.0)).collect();
    let all: Vec<f64> = series.iter().flat_map(|one| one.points.iter().map(|point| point.1)).collect();
    let mut ys: Vec<f64> = drawn.iter().flat_map(Drawn::heights).collect();
    let [left, right] = ends(&xs)?;
    // Marked updates are single ones, so they may lie outside of the means.
    ys.extend(all.iter().copied().filter(|y| y.is_finite() && !besides.marked.is_empty()));
    let [least, most] = ends(&ys)?;
    let scale = Scale::of(&all).reaching(least);
    let (x, y) = (Axis::counts(left, right, 8, 0.0), Axis::scaled(least, most, 5, scale));
    let frame = Frame { wide: about.wide, x, y, rows: None };
    let mut words: Vec<String> = drawn.iter().filter_map(|one| one.words(about.unit)).collect();
    let mut marks: Vec<Mark> =
        drawn.iter().enumerate().flat_map(|(index, one)| one.marks(index, &frame, &about)).collect();
    if !besides.marked.is_empty() {
        words.push(format!("{} updates raised an alarm", besides.marked.len()));
        marks.extend(alarm_marks(besides, series, &frame));
    }
    for (name, value) in besides.limits.iter().filter(|(_, value)| (least..=most).contains(value)) {
        let name = format!("{name} {}{}", short(*value), about.unit);
        words.push(name.clone());
        marks.push(Mark::Limit { y: frame.y(*value), words: name });
    }
    let notes = notes(&drawn);
    let reading: Vec<&str> = std::iter::once(about.reading.as_str())
        .chain(notes.iter().map(String::as_str))
        .filter(|part| !part.is_empty())
        .collect();
    Some(Figure {
        words: format!("{}. {}", about.title, words.join("; ")),
        legend: drawn.iter().map(|one| one.series.name.as_str()).enumerate().map(Key::line).collect(),
        axes: frame.axes(),
        marks,
        about: About { reading: reading.join(" "), ..about },
    })
}

#[cfg(test)]
mod tests {
    use super::super::plot::words_of;
    use super::*;

    fn about() -> About {
        About { title: "Loss".into(), x_name: "update", unit: " s", ..About::default() }
    }

    fn of(points: Vec<(f64, f64)>) -> Series {
        Series { name: "a".into(), points, ..Series::default() }
    }

    fn series(count: u32) -> Series {
        of((0..count).map(|at| (f64::from(at), f64::from(at % 7))).collect())
    }

    fn drawn(series: Series) -> Figure {
        lines(about(), &[series], &Besides::default()).unwrap()
    }

    #[test]
    fn a_long_run_is_drawn_by_means_within_their_extremes_and_a_short_one_by_points() {
        let long = drawn(series(100_000));
        let hits = words_of(&long, 6.0).len();
        assert!(hits <= HITS_MAX + 1 && hits > HITS_MAX / 2, "{hits}");
        assert!(words_of(&long, 2.5).is_empty());
        assert!(
            long.about.reading.starts_with("Each point is the mean of up to 417 updates; the pale area"),
            "{long:?}"
        );
        assert!(matches!(&long.marks[0], Mark::Band { points, .. } if points.split(' ').count() == 2 * 240));
        let short = drawn(series(3));
        assert_eq!((words_of(&short, 6.0).len(), words_of(&short, 2.5).len()), (3, 3));
        assert_eq!(words_of(&short, 6.0)[2], "update 2: a 2 s");
        assert_eq!(short.about.reading, "");
    }

    #[test]
    fn what_has_no_point_or_no_number_is_not_drawn() {
        assert!(lines(about(), &[series(0)], &Besides::default()).is_none());
        assert!(lines(about(), &[of(vec![(1.0, f64::NAN)])], &Besides::default()).is_none());
        for count in [1, 2] {
            let drawn = format!("{:?}", drawn(series(count)));
            assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
        }
    }

    #[test]
    fn a_value_that_is_not_finite_leaves_a_gap_and_is_said() {
        let mut broken = series(9);
        broken.points[4].1 = f64::NAN;
        broken.points[7].1 = f64::INFINITY;
        let drawn = drawn(broken);
        let stretches = drawn.marks.iter().filter(|mark| matches!(mark, Mark::Line { .. })).count();
        assert_eq!(stretches, 3);
        assert_eq!(drawn.about.reading, "2 values are not finite and not drawn, the first in update 4.");
        assert!(!format!("{:?}", drawn.marks).contains("NaN"));
    }

    #[test]
    fn an_outlier_is_drawn_by_its_logarithm_and_the_axis_says_so() {
        let mut spiked = series(40);
        spiked.points.iter_mut().for_each(|point| point.1 += 1.0);
        let even = serde_json::to_value(drawn(spiked.clone())).unwrap();
        assert_eq!(even["axes"]["scale"], "");
        spiked.points[20].1 = 5000.0;
        let drawn = serde_json::to_value(drawn(spiked)).unwrap();
        assert_eq!(drawn["axes"]["scale"], "logarithmic axis");
        let ticks: Vec<&str> =
            drawn["axes"]["y_ticks"].as_array().unwrap().iter().map(|tick| tick["text"].as_str().unwrap()).collect();
        assert_eq!(ticks, ["1", "10", "100", "1000"]);
    }

    #[test]
    fn an_alarm_is_marked_at_its_update_and_a_limit_where_the_line_reaches_it() {
        let marked = vec![(2.0, "update 2: alarm kl".to_owned()), (77.0, "no such update".to_owned())];
        let limits = vec![("warns above".to_owned(), 4.0), ("far".to_owned(), 400.0)];
        let drawn = lines(about(), &[series(6)], &Besides { limits, marked }).unwrap();
        assert_eq!(words_of(&drawn, 4.5), ["update 2: alarm kl"]);
        let limits: Vec<&Mark> = drawn.marks.iter().filter(|mark| matches!(mark, Mark::Limit { .. })).collect();
        assert!(matches!(limits[..], [Mark::Limit { words, .. }] if words == "warns above 4 s"), "{limits:?}");
    }
}
