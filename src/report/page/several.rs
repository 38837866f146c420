//! Figures of several runs: their curves in one plot, and peak memory over their receipts.

use std::collections::BTreeMap;

use super::boxes::{Bars, bars};
use super::dots::{Dot, dots};
use super::facts::Facts;
use super::figures::{byte_unit, curve, series};
use super::lines::{Besides, Series};
use super::numbers::{count, short};
use super::plot::{About, Figure};
use super::read::Run;
use super::view::View;
use crate::report::evaluation::HeldOut;
use crate::report::step::Step;
use crate::runtime::units::float;

/// Curves of all runs, and their held-out numbers before the first and after the last update.
pub(super) fn curves(runs: &[Run], views: &[View<'_>]) -> Vec<Figure> {
    let each = |title: &str, number: fn(&Step) -> Option<f64>| {
        let all: Vec<Series> =
            runs.iter().zip(views).map(|(run, view)| series(view.name, &run.steps, number)).collect();
        curve(title, "", "", &all, &Besides::default())
    };
    let figures = [
        each("Mean reward", |step| step.reward_mean),
        each("Loss", |step| Some(step.loss)),
        each("Gradient norm", |step| Some(step.grad_norm)),
        each("Seconds of an update", |step| Some(step.seconds.total)),
        held_out(views, "Held-out reward", "Mean reward of sampled answers.", "", |held_out| held_out.reward),
        held_out(views, "Held-out greedy reward", "Mean reward of greedy answers.", "", |held_out| held_out.greedy),
        held_out(
            views,
            "Held-out margin",
            "How much more probable right answers are than wrong ones.",
            " nats",
            |held_out| held_out.margin,
        ),
    ];
    figures.into_iter().flatten().collect()
}

fn held_out(
    views: &[View<'_>],
    title: &str,
    reading: &str,
    unit: &'static str,
    number: fn(&HeldOut) -> Option<f64>,
) -> Option<Figure> {
    let measured = |name: String, [before, after]: &[Option<HeldOut>; 2]| {
        Some(Bars { name, heights: vec![number(before.as_ref()?)?, number(after.as_ref()?)?] })
    };
    let all = |view: &View<'_>| {
        let Some(receipt) = view.receipt else { return Vec::new() };
        let sets = view
            .sets
            .iter()
            .filter_map(|&set| Some((format!("{}, {set}", view.name), receipt.held_out_sets.get(set)?)));
        let ends = std::iter::once((view.name.to_owned(), &receipt.held_out)).chain(sets);
        ends.filter_map(|(name, ends)| measured(name, ends)).collect::<Vec<_>>()
    };
    let found: Vec<Bars> = views.iter().flat_map(all).collect();
    let more: usize = views.iter().map(|view| view.more_sets).sum();
    let reading = if more > 0 { format!("{reading} {more} more sets are left out.") } else { reading.to_owned() };
    let about = About { title: title.into(), reading, x_name: "run", unit, wide: false };
    bars(about, &["before".to_owned(), "after".to_owned()], &found, None)
}

/// A receipt with a device peak.
struct Peak<'a> {
    name: String,
    receipt: &'a Facts,
    bytes: u64,
}

/// Largest device peak of all ranks against context and against group size, from the receipts of runs and gates.
pub(super) fn peaks(views: &[View<'_>]) -> Vec<Figure> {
    let mut found: Vec<Peak<'_>> = Vec::new();
    for view in views {
        let own = view.receipt.filter(|receipt| receipt.gate.is_none()).map(|receipt| (view.name.to_owned(), receipt));
        let gate = |gate: &'_ Facts| format!("{}, {}", view.name, gate.gate.as_deref().unwrap_or_default());
        let receipts = own.into_iter().chain(view.gates.iter().map(|receipt| (gate(receipt), receipt)));
        found
            .extend(receipts.filter_map(|(name, receipt)| Some(Peak { name, receipt, bytes: receipt.device_peak()? })));
    }
    if found.len() < 2 {
        return Vec::new();
    }
    let (unit, size) = byte_unit(found.iter().map(|peak| peak.bytes).max().unwrap_or(0));
    let about = |title: &str, x_name| About {
        title: title.to_owned(),
        reading: "The most of all ranks and phases; a line joins runs that are equal in all else.".into(),
        x_name,
        unit,
        wide: false,
    };
    let by_context = lines(
        &found,
        size,
        |receipt| receipt.positions,
        |receipt| format!("group of {}, {}, {} ranks", receipt.group_size, receipt.gradient, receipt.ranks),
    );
    let by_group = lines(
        &found,
        size,
        |receipt| receipt.group_size,
        |receipt| format!("{} positions, {}, {} ranks", count(receipt.positions), receipt.gradient, receipt.ranks),
    );
    let figures = [
        dots(about("Device peak against context", "positions"), &by_context, positions),
        dots(about("Device peak against group size", "answers of a group"), &by_group, short),
    ];
    figures.into_iter().flatten().collect()
}

/// Peaks over `x`, in units of `size` bytes; one line for receipts with the same `fixed` text.
fn lines(found: &[Peak<'_>], size: f64, x: fn(&Facts) -> u64, fixed: fn(&Facts) -> String) -> Vec<(String, Vec<Dot>)> {
    let mut series: BTreeMap<String, Vec<Dot>> = BTreeMap::new();
    for Peak { name, receipt, bytes } in found.iter().filter(|peak| x(peak.receipt) > 0) {
        let dot = Dot { x: float(x(receipt)), y: float(*bytes) / size, name: name.clone() };
        series.entry(fixed(receipt)).or_default().push(dot);
    }
    for dots in series.values_mut() {
        dots.sort_by(|one, other| one.x.total_cmp(&other.x));
    }
    // A line with one x value says nothing where others have several.
    let spread = |dots: &[Dot]| dots.first().zip(dots.last()).is_some_and(|(first, last)| first.x < last.x);
    let any = series.values().any(|dots| spread(dots));
    series.into_iter().filter(|(_, dots)| !any || spread(dots)).collect()
}

/// Positions in units of 1,024 where they are whole.
fn positions(value: f64) -> String {
    let (kibi, mebi) = (value / 1024.0, value / 1024.0 / 1024.0);
    match value {
        1_048_576.0.. if mebi.fract() == 0.0 => format!("{mebi} Mi"),
        1024.0.. if kibi.fract() == 0.0 => format!("{kibi} Ki"),
        _ => short(value),
    }
}
