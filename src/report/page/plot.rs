//! Plots as SVG in a figure: what is seen is drawn, what is not drawn does not depend on a script. A pointer that rests on
//! a point or a box is told its numbers.

use std::fmt::Write as _;

use super::axes::{Axis, Frame, HALF, Size, WIDE};
use super::html::{escape, short};
use crate::report::step::{ends, mean};
use crate::runtime::units::{float, from_index};

/// Colours that the page knows; further series begin again, with another dash.
const COLOURS: usize = 8;
/// Points of a line at most: of longer runs, means of neighbours.
pub(super) const POINTS_MAX: usize = 240;
/// Boxes side by side at most, likewise.
pub(super) const BOXES_MAX: usize = 120;
/// Up to so many points each has a mark of its own.
const MARKS_MAX: usize = 30;

/// What a figure is of.
#[derive(Clone, Debug, Default)]
pub(super) struct About {
    pub(super) title: String,
    /// A sentence that tells how to read it; may be empty.
    pub(super) reading: String,
    pub(super) x_name: &'static str,
    /// Stands behind a number.
    pub(super) unit: &'static str,
    pub(super) wide: bool,
}

impl About {
    fn size(&self) -> Size {
        if self.wide { WIDE } else { HALF }
    }
}

/// A line.
#[derive(Clone, Debug, Default)]
pub(super) struct Series {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
    /// Lower and upper edge around the line, by point; empty without.
    pub(super) band: Vec<[f64; 2]>,
}

fn colour(index: usize) -> String {
    format!("l{} d{}", index % COLOURS, index / COLOURS % 4)
}

/// Means over neighbours where there are more than `most`.
pub(super) fn thinned<T>(items: &[T], most: usize) -> Vec<&[T]> {
    items.chunks(items.len().div_ceil(most).max(1)).collect()
}

impl Series {
    fn thinned(&self) -> Series {
        let of = |numbers: Vec<f64>| mean(&numbers).unwrap_or(0.0);
        let points = thinned(&self.points, POINTS_MAX);
        let points = points.iter().map(|chunk| {
            (of(chunk.iter().map(|point| point.0).collect()), of(chunk.iter().map(|point| point.1).collect()))
        });
        let band = thinned(&self.band, POINTS_MAX);
        let band = band.iter().map(|chunk| [0, 1].map(|edge| of(chunk.iter().map(|edges| edges[edge]).collect())));
        Series { name: self.name.clone(), points: points.collect(), band: band.collect() }
    }

    fn finite(&self) -> bool {
        let numbers = self.points.iter().flat_map(|&(x, y)| [x, y]).chain(self.band.iter().flatten().copied());
        numbers.into_iter().all(f64::is_finite)
    }
}

/// A figure around drawings.
fn figure(about: &About, legend: &[(String, String)], drawing: &str) -> String {
    let wide = if about.wide { " class=\"wide\"" } else { "" };
    // The numbers beside the lines have no room for their unit.
    let unit = if about.unit.is_empty() { String::new() } else { format!(" ({})", about.unit.trim()) };
    let mut html = format!("<figure{wide}>\n<figcaption><h3>{}{unit}</h3>", escape(&about.title));
    if !about.reading.is_empty() {
        let _ = write!(html, "<p>{}</p>", escape(&about.reading));
    }
    if legend.len() > 1 {
        html += "<ul class=\"legend\">";
        for (name, mark) in legend {
            let _ =
                write!(html, "<li><svg viewBox=\"0 0 14 10\" aria-hidden=\"true\">{mark}</svg>{}</li>", escape(name));
        }
        html += "</ul>";
    }
    html + "</figcaption>\n" + drawing + "</figure>\n"
}

fn line_mark(index: usize) -> String {
    format!("<line class=\"line {}\" x1=\"0\" x2=\"14\" y1=\"5\" y2=\"5\"/>", colour(index))
}

fn box_mark(index: usize) -> String {
    format!("<rect class=\"f{}\" width=\"14\" height=\"10\" rx=\"2\"/>", index % COLOURS)
}

/// Lines over steps; nothing where no series has a point.
pub(super) fn lines(about: &About, series: &[Series]) -> String {
    let series: Vec<Series> =
        series.iter().filter(|one| !one.points.is_empty() && one.finite()).map(Series::thinned).collect();
    let xs: Vec<f64> = series.iter().flat_map(|one| one.points.iter().map(|point| point.0)).collect();
    let ys =
        series.iter().flat_map(|one| one.points.iter().map(|point| point.1).chain(one.band.iter().flatten().copied()));
    let ys: Vec<f64> = ys.collect();
    let (Some([left, right]), Some([least, most])) = (ends(&xs), ends(&ys)) else { return String::new() };
    let frame = Frame { size: about.size(), x: Axis::whole(left, right, 8), y: Axis::around(least, most, 4) };
    let mut inner = String::new();
    for (index, one) in series.iter().enumerate() {
        inner += &band(&frame, index, one);
        let path: Vec<String> =
            one.points.iter().map(|&(x, y)| format!("{:.1},{:.1}", frame.x(x), frame.y(y))).collect();
        let _ = writeln!(inner, "<polyline class=\"line {}\" points=\"{}\"/>", colour(index), path.join(" "));
    }
    for (index, one) in series.iter().enumerate() {
        for (at, &(x, y)) in one.points.iter().enumerate() {
            let (cx, cy) = (frame.x(x), frame.y(y));
            if one.points.len() <= MARKS_MAX {
                let _ =
                    writeln!(inner, "<circle class=\"f{}\" cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"2.5\"/>", index % COLOURS);
            }
            let edges =
                one.band.get(at).map_or(String::new(), |[low, high]| format!(" ({} … {})", short(*low), short(*high)));
            let told = format!("{} {}: {} {}{}{edges}", about.x_name, short(x), one.name, short(y), about.unit);
            let told = escape(&told);
            let _ = writeln!(
                inner,
                "<circle class=\"hit\" cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"6\"><title>{told}</title></circle>"
            );
        }
    }
    let words: Vec<String> = series.iter().filter_map(|one| said(one, about.unit)).collect();
    let drawing = frame.drawing(&format!("{}. {}", about.title, words.join("; ")), about.x_name, &inner);
    let legend: Vec<(String, String)> =
        series.iter().enumerate().map(|(index, one)| (one.name.clone(), line_mark(index))).collect();
    figure(about, &legend, &drawing)
}

/// A line in words, for those who do not see it.
fn said(one: &Series, unit: &str) -> Option<String> {
    let ((_, first), (x, last)) = (one.points.first()?, one.points.last()?);
    Some(format!("{}: from {}{unit} to {}{unit} at {}", one.name, short(*first), short(*last), short(*x)))
}

fn band(frame: &Frame, index: usize, one: &Series) -> String {
    if one.band.is_empty() {
        return String::new();
    }
    let edge = |at: usize, edge: usize| format!("{:.1},{:.1}", frame.x(one.points[at].0), frame.y(one.band[at][edge]));
    let count = one.points.len().min(one.band.len());
    let around: Vec<String> = (0..count).map(|at| edge(at, 0)).chain((0..count).rev().map(|at| edge(at, 1))).collect();
    format!("<polygon class=\"band f{}\" points=\"{}\"/>\n", index % COLOURS, around.join(" "))
}

/// Boxes on one another for each step.
pub(super) fn stacks(about: &About, parts: &[&str], columns: &[(f64, Vec<f64>)]) -> String {
    let seen: Vec<usize> =
        (0..parts.len()).filter(|&part| columns.iter().any(|(_, heights)| heights[part] > 0.0)).collect();
    let columns: Vec<(f64, f64, Vec<f64>)> = thinned(columns, BOXES_MAX)
        .into_iter()
        .map(|chunk| {
            let of = |part: usize| {
                mean(&chunk.iter().map(|(_, heights)| heights[part]).collect::<Vec<f64>>()).unwrap_or(0.0)
            };
            (chunk[0].0, chunk[chunk.len() - 1].0, (0..parts.len()).map(of).collect())
        })
        .collect();
    let sums: Vec<f64> = columns.iter().map(|(.., heights)| heights.iter().sum()).collect();
    let (Some(first), Some(last), Some([_, most])) = (columns.first(), columns.last(), ends(&sums)) else {
        return String::new();
    };
    if seen.is_empty() || !most.is_finite() {
        return String::new();
    }
    let x = Axis::whole(first.0, last.1.max(first.0), 12);
    let mut frame = Frame { size: about.size(), x, y: Axis::around(0.0, most, 4) };
    frame.x = frame.x.with_margin(0.5);
    let mut inner = String::new();
    for ((from, to, heights), sum) in columns.iter().zip(&sums) {
        let (left, right) = (frame.x(from - 0.5), frame.x(to + 0.5));
        let gap = if right - left > 6.0 { 1.0_f64.max((right - left) * 0.15).min(12.0) } else { 0.0 };
        let mut below = 0.0;
        for &part in &seen {
            let above = below + heights[part];
            let (top, height) = (frame.y(above), frame.y(below) - frame.y(above));
            let when = if from < to { format!("{from} to {to}, mean") } else { from.to_string() };
            let share = 100.0 * heights[part] / sum.max(f64::MIN_POSITIVE);
            let told = format!(
                "{} {when}: {} {}{} ({share:.0} %)",
                about.x_name,
                parts[part],
                short(heights[part]),
                about.unit
            );
            let _ = writeln!(
                inner,
                "<rect class=\"box f{}\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{height:.1}\"><title>{}</title></rect>",
                part % COLOURS,
                left + gap / 2.0,
                right - left - gap,
                escape(&told)
            );
            below = above;
        }
    }
    let all: f64 = sums.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let share = |part: usize| 100.0 * columns.iter().map(|(.., heights)| heights[part]).sum::<f64>() / all;
    let legend: Vec<(String, String)> =
        seen.iter().map(|&part| (format!("{} ({:.0} %)", parts[part], share(part)), box_mark(part))).collect();
    let names: Vec<&str> = legend.iter().map(|(name, _)| name.as_str()).collect();
    let drawing = frame.drawing(&format!("{}: {}", about.title, names.join(", ")), about.x_name, &inner);
    figure(about, &legend, &drawing)
}

/// Groups of boxes side by side, each group under its name, with a line where a limit lies.
pub(super) fn groups(
    about: &About,
    members: &[String],
    groups: &[(String, Vec<f64>)],
    limit: Option<(&str, f64)>,
) -> String {
    let heights: Vec<f64> =
        groups.iter().flat_map(|(_, heights)| heights).copied().chain(limit.map(|(_, at)| at)).collect();
    let Some([least, most]) = ends(&heights).filter(|[least, most]| least.is_finite() && most.is_finite()) else {
        return String::new();
    };
    let places = float(from_index(groups.len()));
    let mut frame =
        Frame { size: about.size(), x: Axis::over(0.0, places, 1), y: Axis::around(least.min(0.0), most.max(0.0), 4) };
    frame.x =
        frame.x.named(groups.iter().enumerate().map(|(at, (name, _))| (float(from_index(at)) + 0.5, name.clone())));
    let mut inner = String::new();
    for (at, (name, heights)) in groups.iter().enumerate() {
        let wide = 0.84 / float(from_index(heights.len().max(1)));
        for (member, &height) in heights.iter().enumerate() {
            let from = float(from_index(at)) + 0.08 + wide * float(from_index(member));
            let (left, right) = (frame.x(from), frame.x(from + wide));
            let (one, other) = (frame.y(height), frame.y(0.0));
            let told = format!("{name}, {}: {}{}", members[member], short(height), about.unit);
            let _ = writeln!(
                inner,
                "<rect class=\"box f{}\" x=\"{left:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\"><title>{}</title></rect>",
                member % COLOURS,
                one.min(other),
                (right - left - 1.0).clamp(0.5, 60.0),
                (one - other).abs(),
                escape(&told)
            );
        }
    }
    if let Some((name, value)) = limit {
        let (y, from, to) = (frame.y(value), frame.x(0.0), frame.x(places));
        let _ = writeln!(inner, "<line class=\"plan\" x1=\"{from:.1}\" x2=\"{to:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>");
        // Above the line, unless the edge is there.
        let above = if y > 24.0 { y - 5.0 } else { y + 14.0 };
        let text = escape(&format!("{name} {}{}", short(value), about.unit));
        let _ = writeln!(
            inner,
            "<text class=\"plan-name\" x=\"{to:.1}\" y=\"{above:.1}\" text-anchor=\"end\">{text}</text>"
        );
    }
    let legend: Vec<(String, String)> =
        members.iter().enumerate().map(|(member, name)| (name.clone(), box_mark(member))).collect();
    let words: Vec<String> = groups
        .iter()
        .map(|(name, heights)| {
            format!(
                "{name}: {}{}",
                heights.iter().map(|&height| short(height)).collect::<Vec<_>>().join(", "),
                about.unit
            )
        })
        .collect();
    let drawing = frame.drawing(&format!("{}. {}", about.title, words.join("; ")), about.x_name, &inner);
    figure(about, &legend, &drawing)
}

/// A measured point.
#[derive(Clone, Debug)]
pub(super) struct Dot {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) name: String,
}

/// Dots joined by lines, over places that double.
pub(super) fn dots(about: &About, series: &[(String, Vec<Dot>)], place: impl Fn(f64) -> String) -> String {
    let all = || series.iter().flat_map(|(_, dots)| dots);
    let mut places: Vec<f64> = all().map(|dot| dot.x).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let Some([_, most]) = ends(&all().map(|dot| dot.y).collect::<Vec<f64>>()) else { return String::new() };
    let ticks: Vec<(f64, String)> = places.iter().map(|&at| (at, place(at))).collect();
    let frame = Frame { size: about.size(), x: Axis::doubling(&ticks), y: Axis::around(0.0, most, 4) };
    let mut inner = String::new();
    for (index, (name, dots)) in series.iter().enumerate() {
        let path: Vec<String> = dots.iter().map(|dot| format!("{:.1},{:.1}", frame.x(dot.x), frame.y(dot.y))).collect();
        let _ = writeln!(inner, "<polyline class=\"line {}\" points=\"{}\"/>", colour(index), path.join(" "));
        for dot in dots {
            let told = format!("{}, {name}: {}{} at {}", dot.name, short(dot.y), about.unit, place(dot.x));
            let _ = writeln!(
                inner,
                "<circle class=\"box f{}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"5\"><title>{}</title></circle>",
                index % COLOURS,
                frame.x(dot.x),
                frame.y(dot.y),
                escape(&told)
            );
        }
    }
    let legend: Vec<(String, String)> =
        series.iter().enumerate().map(|(index, (name, _))| (name.clone(), line_mark(index))).collect();
    let words: Vec<String> =
        all().map(|dot| format!("{}: {}{} at {}", dot.name, short(dot.y), about.unit, place(dot.x))).collect();
    let drawing = frame.drawing(&format!("{}. {}", about.title, words.join("; ")), about.x_name, &inner);
    // One series needs its name too: it says what was held fixed.
    let named =
        About { reading: if legend.len() == 1 { legend[0].0.clone() } else { about.reading.clone() }, ..about.clone() };
    figure(&named, &legend, &drawing)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about() -> About {
        About { title: "Loss <1>".into(), x_name: "update", unit: " s", ..About::default() }
    }

    fn series(count: u32) -> Series {
        let points = (0..count).map(|at| (f64::from(at), f64::from(at % 7))).collect();
        Series { name: "a & b".into(), points, band: Vec::new() }
    }

    #[test]
    fn a_long_run_is_drawn_by_means_and_a_short_one_by_points() {
        let long = lines(&about(), &[series(100_000)]);
        let hits = long.matches("class=\"hit\"").count();
        assert!(hits <= POINTS_MAX && hits > POINTS_MAX / 2, "{hits}");
        assert!(!long.contains("r=\"2.5\""));
        let short = lines(&about(), &[series(3)]);
        assert_eq!((short.matches("class=\"hit\"").count(), short.matches("r=\"2.5\"").count()), (3, 3));
        assert!(short.contains("update 2: a &amp; b 2 s") && short.contains("Loss &lt;1&gt;"));
    }

    #[test]
    fn what_has_no_point_or_no_number_is_not_drawn() {
        assert_eq!(lines(&about(), &[series(0)]), "");
        let broken = Series { points: vec![(1.0, f64::NAN)], ..Series::default() };
        assert_eq!(lines(&about(), &[broken]), "");
        assert_eq!(stacks(&about(), &["a"], &[]), "");
        assert_eq!(groups(&about(), &[], &[], None), "");
        assert_eq!(dots(&about(), &[], short), "");
        for count in [1, 2] {
            let drawn = lines(&about(), &[series(count)]);
            assert!(drawn.contains("<svg") && !drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
        }
    }

    #[test]
    fn stacked_boxes_add_up_to_the_column_and_parts_that_never_occur_are_left_out() {
        let columns: Vec<(f64, Vec<f64>)> = (1..=4).map(|at| (f64::from(at), vec![1.0, 0.0, 3.0])).collect();
        let drawn = stacks(&about(), &["capture", "rollout", "score"], &columns);
        assert_eq!(drawn.matches("<rect class=\"box").count(), 8);
        assert!(drawn.contains("capture (25 %)") && drawn.contains("score (75 %)") && !drawn.contains("rollout"));
        assert!(drawn.contains("update 4: score 3 s (75 %)"));
    }

    #[test]
    fn a_group_of_boxes_stands_under_its_name_below_the_limit() {
        let ranks = ["rank 0".to_owned(), "rank 1".to_owned()];
        let phases = [("capture".to_owned(), vec![1.0, 2.0]), ("score".to_owned(), vec![3.0, 1.0])];
        let drawn = groups(&about(), &ranks, &phases, Some(("plan", 4.0)));
        assert!(
            drawn.contains("capture, rank 1: 2 s") && drawn.contains("plan 4 s") && drawn.contains(">score</text>")
        );
    }
}
