//! Boxes: stacked ones over updates, bars side by side, and the updates that raised an alarm in a row for each.

use super::axes::{Axis, Frame};
use super::numbers::short;
use super::plot::{About, Figure, Key, Mark, fill, mean_of, neighbours};
use crate::report::averages::ends;
use crate::runtime::units::{float, from_index};

/// Most columns of stacked boxes: of longer runs, means of neighbours.
const COLUMNS_MAX: usize = 120;
/// Largest share of the width that a bar takes.
const BAR_SHARE_MAX: f64 = 0.08;
/// Most boxes of a row; closer ones are joined.
const SPANS_MAX: f64 = 150.0;

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
        // Percent of the width; many columns have no gaps.
        let gap = if width > 0.6 { (width * 0.15).clamp(0.1, 1.2) } else { 0.0 };
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
    let each = columns.len().div_ceil(COLUMNS_MAX);
    let columns: Vec<Column> = neighbours(columns, COLUMNS_MAX).into_iter().map(Column::mean).collect();
    let sums: Vec<f64> = columns.iter().map(Column::sum).collect();
    let [_, most] = ends(&sums).filter(|[_, most]| *most > 0.0 && most.is_finite())?;
    let x = Axis::counts(columns.first()?.first, columns.last()?.last, 12, 0.5);
    let frame = Frame { wide: about.wide, x, y: Axis::padded(0.0, most, 4), rows: None };
    let all: f64 = sums.iter().sum();
    let share = |part: usize| columns.iter().map(|column| column.heights[part]).sum::<f64>() / all;
    let name = |part: usize| format!("{} ({:.0} %)", parts[part], 100.0 * share(part));
    let legend: Vec<Key> =
        (0..parts.len()).filter(|&part| share(part) > 0.0).map(|part| Key::filled((part, &name(part)))).collect();
    let names: Vec<&str> = legend.iter().map(|key| key.name.as_str()).collect();
    let note = if each > 1 { format!(" Each column is the mean of up to {each} updates.") } else { String::new() };
    Some(Figure {
        words: format!("{}: {}", about.title, names.join(", ")),
        axes: frame.axes(),
        marks: columns.iter().flat_map(|column| column.marks(&frame, &about, parts)).collect(),
        legend,
        about: About { reading: about.reading.clone() + &note, ..about },
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
    let frame = Frame { wide: about.wide, x, y: Axis::padded(least.min(0.0), most.max(0.0), 4), rows: None };
    let mut marks = Vec::new();
    for (at, bars) in all.iter().enumerate() {
        let members_of_name = float(from_index(bars.heights.len().max(1)));
        let share = (0.84 / members_of_name).min(BAR_SHARE_MAX * float(from_index(all.len())));
        for (member, &height) in bars.heights.iter().enumerate() {
            let place = float(from_index(member)) - members_of_name / 2.0;
            let from = float(from_index(at)) + 0.5 + share * place;
            let (x, right) = (frame.x(from), frame.x(from + share));
            let (top, floor) = (frame.y(height), frame.y(0.0));
            marks.push(Mark::Box {
                class: fill(member),
                x,
                y: top.min(floor),
                width: (right - x) * 0.94,
                height: (top - floor).abs(),
                words: format!("{}, {}: {}{}", bars.name, members[member], short(height), about.unit),
            });
        }
    }
    marks.extend(limit.map(|(name, value)| Mark::Limit {
        y: frame.y(value),
        words: format!("{name} {}{}", short(value), about.unit),
    }));
    let words = all.iter().map(|bars| {
        let heights: Vec<String> = bars.heights.iter().map(|&height| short(height)).collect();
        format!("{}: {}{}", bars.name, heights.join(", "), about.unit)
    });
    Some(Figure {
        words: format!("{}. {}", about.title, words.collect::<Vec<_>>().join("; ")),
        legend: members.iter().map(String::as_str).enumerate().map(Key::filled).collect(),
        axes: frame.axes(),
        marks,
        about,
    })
}

/// Updates of one kind, in rising order, each with words.
#[derive(Clone, Debug, Default)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) updates: Vec<(f64, String)>,
}

impl Row {
    /// First and last update, number and words of each stretch of updates that lie no further apart than `gap`.
    fn stretches(&self, gap: f64) -> Vec<(f64, f64, String)> {
        let stretches = self.updates.chunk_by(|one, two| two.0 - one.0 <= gap);
        let stretch = |updates: &[(f64, String)]| {
            let ((first, _), (last, words)) = (updates.first()?, updates.last()?);
            let many = format!("{} updates from {first} to {last}; {words}", updates.len());
            Some((*first, *last, if updates.len() > 1 { many } else { words.clone() }))
        };
        stretches.filter_map(stretch).collect()
    }
}

/// A row of boxes for each kind over the updates from `first` to `last`; nothing where there is no kind.
pub(super) fn rows(about: About, rows: &[Row], first: f64, last: f64) -> Option<Figure> {
    let kinds = float(from_index(rows.len()));
    let gap = ((last - first) / SPANS_MAX).max(1.0);
    if rows.is_empty() {
        return None;
    }
    let (x, y) = (Axis::counts(first, last, 12, 0.5), Axis::rows(kinds));
    let frame = Frame { wide: about.wide, x, y, rows: Some(kinds) };
    let mut marks = Vec::new();
    for (at, row) in rows.iter().enumerate() {
        let top = kinds - float(from_index(at));
        let (label, y, floor) = (frame.y(top - 0.36), frame.y(top - 0.48), frame.y(top - 0.86));
        let updates = row.updates.len();
        marks.push(Mark::Label { x: 0.0, y: label, words: format!("{} ({updates})", row.name) });
        marks.extend(row.stretches(gap).into_iter().map(|(first, last, words)| {
            let x = frame.x(first - 0.5);
            Mark::Box { class: "alarm-box".into(), x, y, width: frame.x(last + 0.5) - x, height: floor - y, words }
        }));
    }
    let named = |row: &Row| {
        let stretches: Vec<String> = row.stretches(gap).into_iter().map(|(_, _, words)| words).collect();
        format!("{}: {}", row.name, stretches.join(", "))
    };
    Some(Figure {
        words: format!("{}. {}", about.title, rows.iter().map(named).collect::<Vec<_>>().join("; ")),
        legend: Vec::new(),
        axes: frame.axes(),
        marks,
        about,
    })
}

#[cfg(test)]
mod tests {
    use super::super::plot::words_of;
    use super::*;

    fn about() -> About {
        About { title: "Loss".into(), x_name: "update", unit: " s", ..About::default() }
    }

    #[test]
    fn what_has_no_number_is_not_drawn() {
        assert!(stacks(about(), &["a"], &[]).is_none());
        assert!(bars(about(), &[], &[], None).is_none());
        assert!(rows(about(), &[], 1.0, 2.0).is_none());
    }

    #[test]
    fn stacked_boxes_add_up_to_the_column_and_parts_that_never_occur_are_left_out() {
        let column = |at| Column { first: f64::from(at), last: f64::from(at), heights: vec![1.0, 0.0, 3.0] };
        let columns: Vec<Column> = (1..=4).map(column).collect();
        let drawn = stacks(about(), &["capture", "rollout", "score"], &columns).unwrap();
        assert_eq!(words_of(&drawn, 0.0).len(), 8);
        assert_eq!(words_of(&drawn, 0.0)[7], "update 4: score 3 s (75 %)");
        assert_eq!(drawn.words, "Loss: capture (25 %), score (75 %)");
    }

    #[test]
    fn bars_of_a_name_stand_side_by_side_with_the_limit() {
        let ranks = ["rank 0".to_owned(), "rank 1".to_owned()];
        let phase = |name: &str, heights: [f64; 2]| Bars { name: name.into(), heights: heights.into() };
        let phases = [phase("capture", [1.0, 2.0]), phase("score", [3.0, 1.0])];
        let drawn = bars(about(), &ranks, &phases, Some(("plan", 4.0))).unwrap();
        assert_eq!(words_of(&drawn, 0.0)[1], "capture, rank 1: 2 s");
        assert!(matches!(drawn.marks.last(), Some(Mark::Limit { words, .. }) if words == "plan 4 s"));
        assert_eq!(drawn.words, "Loss. capture: 1, 2 s; score: 3, 1 s");
    }

    #[test]
    fn updates_of_a_row_that_follow_each_other_are_one_box() {
        let row = |name: &str, updates: &[u32]| Row {
            name: name.into(),
            updates: updates.iter().map(|&at| (f64::from(at), format!("update {at}"))).collect(),
        };
        let all = [row("kl", &[3, 4, 5, 9]), row("entropy", &[1])];
        let drawn = rows(about(), &all, 1.0, 10.0).unwrap();
        assert_eq!(words_of(&drawn, 0.0), ["3 updates from 3 to 5; update 5", "update 9", "update 1"]);
        let every: Vec<u32> = (0..10_000).step_by(2).collect();
        let many = rows(about(), &[row("kl", &every)], 1.0, 10_000.0).unwrap();
        assert_eq!(words_of(&many, 0.0).len(), 1, "a box stands for no less than what can be seen");
    }
}
