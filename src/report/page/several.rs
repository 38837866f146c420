//! Several runs beside one another.

use std::collections::BTreeMap;

use super::html::{count, duration, escape, grid, section, short, table};
use super::plot::{About, Dot, Series, dots, groups, lines};
use super::read::{Facts, Run};
use super::single::{reward_ends, series, state, unit_of};
use crate::report::{HeldOut, Step};
use crate::runtime::units::{Bytes, float};

/// What is said of several runs together; of one run, what its receipts say together.
pub(super) fn sections(runs: &[Run], names: &[String]) -> String {
    let mut html = String::new();
    if runs.len() > 1 {
        html += &section("Runs", &overview(runs, names));
        html += &section("Curves of all runs", &grid(&(curves(runs, names) + &held_out(runs, names))));
    }
    html + &section("Peak memory over receipts", &grid(&peaks(runs, names)))
}

fn overview(runs: &[Run], names: &[String]) -> String {
    let heads =
        ["run", "state", "updates", "reward, first and last tenth", "loss", "gradient", "group", "device peak", "time"];
    let row = |(run, name): (&Run, &String)| {
        let receipt = run.receipt.clone().unwrap_or_default();
        let ends = reward_ends(&run.steps).map(|mean| mean.map_or("–".into(), short));
        let last = run.steps.last();
        let gradient =
            if receipt.gradient.is_empty() { last.map_or("", |step| &step.gradient) } else { &receipt.gradient };
        let spent: f64 = run.steps.iter().map(|step| step.seconds.total).sum();
        vec![
            escape(name),
            state(run).to_owned(),
            last.map_or("–".into(), |step| count(step.step)),
            ends.join(" → "),
            last.map_or("–".into(), |step| short(step.loss)),
            escape(gradient),
            if receipt.group_size > 0 { count(receipt.group_size) } else { "–".into() },
            receipt.device_peak().map_or("–".into(), |bytes| Bytes(bytes).to_string()),
            if spent > 0.0 { duration(spent) } else { "–".into() },
        ]
    };
    table(&heads, &runs.iter().zip(names).map(row).collect::<Vec<_>>())
}

fn curves(runs: &[Run], names: &[String]) -> String {
    let of = |title: &str, of: fn(&Step) -> Option<f64>| {
        let all: Vec<Series> = runs.iter().zip(names).map(|(run, name)| series(name, &run.steps, of)).collect();
        lines(&About { title: title.into(), x_name: "update", ..About::default() }, &all)
    };
    [
        of("Mean reward", |step| step.reward_mean),
        of("Loss", |step| Some(step.loss)),
        of("Gradient norm", |step| Some(step.grad_norm)),
        of("Seconds of an update", |step| Some(step.seconds.total)),
    ]
    .concat()
}

/// What was measured on held-out prompts, before the first and after the last update.
fn held_out(runs: &[Run], names: &[String]) -> String {
    let margin = ("Held-out margin", "How much more probable right answers are than wrong ones.", " nats");
    let reward = ("Held-out reward", "Mean reward of answers that the policy draws.", "");
    before_and_after(runs, names, reward, |held_out| held_out.reward)
        + &before_and_after(runs, names, margin, |held_out| held_out.margin)
}

fn before_and_after(
    runs: &[Run],
    names: &[String],
    (title, reading, unit): (&str, &str, &'static str),
    of: fn(&HeldOut) -> Option<f64>,
) -> String {
    let measured = |run: &Run| match &run.receipt.as_ref()?.held_out {
        [Some(before), Some(after)] => Some(vec![of(before)?, of(after)?]),
        _ => None,
    };
    let found: Vec<(String, Vec<f64>)> =
        runs.iter().zip(names).filter_map(|(run, name)| Some((name.clone(), measured(run)?))).collect();
    let about = About { title: title.into(), reading: reading.into(), x_name: "run", unit, wide: false };
    groups(&about, &["before".to_owned(), "after".to_owned()], &found, None)
}

/// The most of any rank's device, by context and by group size; from receipts of runs and gates.
fn peaks(runs: &[Run], names: &[String]) -> String {
    let mut found: Vec<(String, &Facts, u64)> = Vec::new();
    for (run, name) in runs.iter().zip(names) {
        let own = run.receipt.iter().filter(|receipt| receipt.gate.is_none()).map(|receipt| (name.clone(), receipt));
        let gates =
            run.gates.iter().map(|gate| (format!("{name}, {}", gate.gate.as_deref().unwrap_or_default()), gate));
        found.extend(own.chain(gates).filter_map(|(name, receipt)| Some((name, receipt, receipt.device_peak()?))));
    }
    if found.len() < 2 {
        return String::new();
    }
    let (unit, size) = unit_of(float(found.iter().map(|(.., peak)| *peak).max().unwrap_or(0)));
    let by = |x: fn(&Facts) -> u64, fixed: &dyn Fn(&Facts) -> String| -> Vec<(String, Vec<Dot>)> {
        let mut series: BTreeMap<String, Vec<Dot>> = BTreeMap::new();
        for (name, receipt, peak) in found.iter().filter(|(_, receipt, _)| x(receipt) > 0) {
            let dot = Dot { x: float(x(receipt)), y: float(*peak) / size, name: name.clone() };
            series.entry(fixed(receipt)).or_default().push(dot);
        }
        for dots in series.values_mut() {
            dots.sort_by(|one, other| one.x.total_cmp(&other.x));
        }
        // A line of one place says nothing where there are others.
        let apart = |dots: &[Dot]| dots.first().zip(dots.last()).is_some_and(|(first, last)| first.x < last.x);
        let any = series.values().any(|dots| apart(dots));
        series.into_iter().filter(|(_, dots)| !any || apart(dots)).collect()
    };
    let about = |title: &str, x_name| About {
        title: title.to_owned(),
        reading: "The most of all ranks and phases; one line for runs that are alike but for this.".into(),
        x_name,
        unit,
        wide: false,
    };
    let context = by(|receipt| receipt.positions, &|receipt| {
        format!("group of {}, {}, {} ranks", receipt.group_size, receipt.gradient, receipt.ranks)
    });
    let group = by(|receipt| receipt.group_size, &|receipt| {
        format!("{} positions, {}, {} ranks", count(receipt.positions), receipt.gradient, receipt.ranks)
    });
    dots(&about("Device peak against context", "positions"), &context, positions)
        + &dots(&about("Device peak against group size", "answers of a group"), &group, short)
}

/// Positions as people name them.
fn positions(value: f64) -> String {
    let (kibi, mebi) = (value / 1024.0, value / 1024.0 / 1024.0);
    match value {
        1_048_576.0.. if mebi.fract() == 0.0 => format!("{mebi} Mi"),
        1024.0.. if kibi.fract() == 0.0 => format!("{kibi} Ki"),
        _ => short(value),
    }
}
