//! One run as the template needs it: its files, its figures, and what a reader should not overlook.

use std::collections::BTreeMap;

use serde::Serialize;

use super::figures;
use super::numbers::{count, short};
use super::plot::{Figure, neighbours};
use super::read::{Extremes, Facts, Run};
use crate::report::averages::mean;
use crate::report::step::Step;
use crate::runtime::units::Bytes;

/// Most rows in the table of numbers.
const ROWS_MAX: usize = 200;
/// A sampled token's log-probability and its frozen score may differ by this many nats without a note: then the ratio is
/// off by a tenth.
const GAP_NOTED: f64 = 0.1;

/// One run of the page.
#[derive(Debug, Serialize)]
pub(super) struct View<'a> {
    /// The folder's name, or its path where two runs have one name.
    pub(super) name: &'a str,
    folder: String,
    pub(super) state: &'static str,
    config: &'a toml::Table,
    pub(super) receipt: Option<&'a Facts>,
    pub(super) last: Option<&'a Step>,
    gradient: Option<&'a str>,
    pub(super) reward_ends: [Option<f64>; 2],
    /// Seconds of all updates.
    seconds: f64,
    pub(super) notes: Vec<String>,
    curves: Vec<Figure>,
    /// Curves of held-out prompts.
    evaluations: Vec<Figure>,
    time: Vec<Figure>,
    memory: Vec<Figure>,
    pub(super) gates: &'a [Facts],
    answers: &'a [Extremes],
    /// Updates with metrics, and those in the table: of a long run every so many.
    updates: usize,
    rows: Vec<&'a Step>,
}

impl<'a> View<'a> {
    pub(super) fn of(run: &'a Run, name: &'a str) -> View<'a> {
        let last = run.steps.last();
        let receipt = run.receipt.as_ref();
        View {
            name,
            folder: run.folder.display().to_string(),
            state: state(run),
            config: &run.config,
            receipt,
            last,
            gradient: receipt.map(|receipt| receipt.gradient.as_str()).or(last.map(|step| step.gradient.as_str())),
            reward_ends: reward_ends(&run.steps),
            seconds: run.steps.iter().map(|step| step.seconds.total).sum(),
            notes: run.notes.iter().cloned().chain(warnings(run)).collect(),
            curves: figures::curves(&run.steps),
            evaluations: figures::evaluations(&run.evaluations),
            time: figures::time(&run.steps),
            memory: figures::memory(run),
            gates: &run.gates,
            answers: &run.answers,
            updates: run.steps.len(),
            rows: neighbours(&run.steps, ROWS_MAX).into_iter().filter_map(<[Step]>::last).collect(),
        }
    }
}

fn state(run: &Run) -> &'static str {
    match &run.receipt {
        Some(receipt) if receipt.stopped_by_alarm => "stopped by an alarm",
        Some(receipt) if receipt.stopped => "stopped before its end",
        Some(receipt) if receipt.passed => "ended well",
        Some(_) => "ended, not passed",
        None if run.steps.is_empty() && !run.gates.is_empty() => "a folder of gates",
        None => "goes on, or was interrupted",
    }
}

/// Mean reward of the first and of the last tenth of the updates.
fn reward_ends(steps: &[Step]) -> [Option<f64>; 2] {
    let known: Vec<f64> = steps.iter().filter_map(|step| step.reward_mean).collect();
    let tenth = known.len().div_ceil(10);
    [mean(&known[..tenth]), mean(&known[known.len() - tenth..])]
}

/// What a reader should not overlook.
fn warnings(run: &Run) -> Vec<String> {
    let mut warnings = Vec::new();
    if run.steps.is_empty() && run.gates.is_empty() {
        warnings.push("metrics.jsonl has no update yet".to_owned());
    }
    match &run.receipt {
        None if run.gates.is_empty() => warnings.push(
            "there is no receipt.json: the run goes on, or it failed or was killed, and then logs/ says where; `longstraw \
             train --resume` continues from its newest checkpoint"
                .to_owned(),
        ),
        Some(receipt) if receipt.stopped_by_alarm => warnings.push(format!(
            "an alarm has ended the run after update {}: [alarm] in config.resolved.toml has the limits",
            receipt.steps
        )),
        Some(receipt) if receipt.stopped => warnings.push(format!(
            "stopped after update {}, as requested; `longstraw train --resume` continues",
            receipt.steps
        )),
        _ => {}
    }
    warnings.extend(alarms(&run.steps));
    warnings.extend(missing_rewards(&run.steps));
    warnings.extend(equal_rewards(&run.steps));
    warnings.extend(sampling_gap(&run.steps));
    warnings.extend(first_ratio(&run.steps));
    warnings.extend(run.receipt.iter().flat_map(beyond_plan));
    warnings
}

/// One line for each alarm that was raised.
fn alarms(steps: &[Step]) -> Vec<String> {
    let mut raised: BTreeMap<&str, Vec<(u64, Option<f64>)>> = BTreeMap::new();
    for step in steps {
        for (name, &value) in &step.alarms {
            raised.entry(name).or_default().push((step.step, value));
        }
    }
    let shown = |value: Option<f64>| value.map_or_else(|| "not finite".to_owned(), short);
    let line = |(name, found): (&str, Vec<(u64, Option<f64>)>)| {
        let [(first, _), .., (last, value)] = found[..] else {
            let (step, value) = found[0];
            return format!("alarm {name}: {} in update {step}", shown(value));
        };
        let updates = found.len();
        format!("alarm {name}: in {updates} updates from {first} to {last}, {} in the last of them", shown(value))
    };
    raised.into_iter().map(line).collect()
}

fn missing_rewards(steps: &[Step]) -> Option<String> {
    let missing: u64 = steps.iter().map(|step| step.reward_missing).sum();
    let mut failures: BTreeMap<&str, u64> = BTreeMap::new();
    for (kind, count) in steps.iter().flat_map(|step| &step.reward_failures) {
        *failures.entry(kind).or_default() += count;
    }
    let failures: Vec<String> = failures.iter().map(|(kind, count)| format!("{kind}: {count}")).collect();
    let why = if failures.is_empty() { String::new() } else { format!(" ({})", failures.join(", ")) };
    (missing > 0).then(|| format!("answers without a reward, which took no part: {}{why}", count(missing)))
}

fn equal_rewards(steps: &[Step]) -> Option<String> {
    let equal = steps.iter().filter(|step| step.frac_groups_zero_std >= 1.0).count();
    (equal > 0).then(|| {
        let all = steps.len();
        format!("in {equal} of {all} updates the rewards of every group are equal: they give no gradient from rewards")
    })
}

fn sampling_gap(steps: &[Step]) -> Option<String> {
    let gaps = steps.iter().filter_map(|step| Some((step.sampled_gap?, step.step)));
    let (gap, step) = gaps.max_by(|one, other| one.0.total_cmp(&other.0)).filter(|(gap, _)| *gap > GAP_NOTED)?;
    let gap = short(gap);
    Some(format!("update {step}: a sampled token's log-probability and its frozen score differ by {gap} nats"))
}

/// The first update on a group must have the ratio 1.
fn first_ratio(steps: &[Step]) -> Option<String> {
    let off = |end: f64| (end - 1.0).abs() > 1e-6;
    let mut first =
        steps.iter().filter(|step| step.group_update == 0).filter_map(|step| Some((step.step, step.ratio?)));
    let (step, [least, most]) = first.find(|(_, ratio)| ratio.iter().any(|&end| off(end)))?;
    Some(format!("update {step}: the first replay's ratio is {} to {} and not 1", short(least), short(most)))
}

/// Peaks more than a twentieth beyond the plan, as in the gates' check.
fn beyond_plan(receipt: &Facts) -> Vec<String> {
    let places = [
        ("device", receipt.device_peak(), receipt.plan_device_bytes),
        ("host", receipt.peak_host_bytes.iter().copied().max(), receipt.plan_host_bytes),
    ];
    let beyond = places.into_iter().filter_map(|(place, measured, plan)| {
        let measured = measured.filter(|&measured| plan > 0 && measured > plan + plan / 20)?;
        Some(format!("{place} memory: {} measured, {} planned", Bytes(measured), Bytes(plan)))
    });
    beyond.collect()
}
