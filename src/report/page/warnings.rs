//! What a reader of a run's page should not overlook.

use std::collections::BTreeMap;

use super::alarms;
use super::facts::Facts;
use super::log::Logged;
use super::numbers::{count, short};
use super::read::Run;
use crate::report::averages::mean;
use crate::report::receipt::AlarmSpan;
use crate::report::step::Step;
use crate::runtime::units::Bytes;

/// A sampled token's log-probability and its frozen score may differ by this many nats without a note: then the ratio is
/// off by a tenth.
const GAP_NOTED: f64 = 0.1;
/// Share of the newest answers that may be cut off without a note.
const TRUNCATED_NOTED: f64 = 0.1;

/// One line for each thing; alarms first.
pub(super) fn warnings(run: &Run, raised: &BTreeMap<String, AlarmSpan>) -> Vec<String> {
    let mut warnings = run.notes.clone();
    if run.steps.is_empty() && run.gates.is_empty() {
        warnings.push("metrics.jsonl has no update yet".to_owned());
    }
    warnings.extend(later_failure(run));
    warnings.extend(alarms::warnings(raised));
    warnings.extend(truncation(&run.steps).filter(|_| !raised.contains_key("truncated")));
    warnings.extend(missing_rewards(&run.steps));
    warnings.extend(equal_rewards(&run.steps));
    warnings.extend(sampling_gap(&run.steps).filter(|_| !raised.contains_key("sampled_gap")));
    warnings.extend(first_ratio(&run.steps));
    warnings.extend(not_finite(&run.steps));
    warnings.extend(run.receipt.iter().flat_map(beyond_plan));
    warnings
}

/// A start after the one whose receipt is shown, that has failed.
fn later_failure(run: &Run) -> Option<String> {
    let receipt = run.receipt.as_ref()?;
    // The start that wrote the receipt may have failed after it: where nothing was trained, or a check did not hold.
    let is_later = |failure: &&Logged| {
        let since = if run.began.is_empty() { &failure.time } else { &run.began };
        *since > receipt.finished
    };
    let failure = run.failures.iter().find(is_later)?;
    let exit = failure.exit.map_or(String::new(), |code| format!(" (exit {code})"));
    let first = failure.message.lines().next().unwrap_or_default();
    Some(format!("a later start has failed{exit}, and this page is about the run before it: {first}"))
}

/// Answers of the last tenth of the updates that were cut off.
fn truncation(steps: &[Step]) -> Option<String> {
    let known: Vec<f64> = steps.iter().filter_map(|step| step.truncated_share).collect();
    let newest = &known[known.len() - known.len().div_ceil(10)..];
    let share = mean(newest).filter(|&share| share >= TRUNCATED_NOTED)?;
    let updates = if newest.len() > 1 { format!("{} updates", newest.len()) } else { "update".to_owned() };
    Some(format!(
        "{:.0} % of the sampled answers of the last {updates} were cut off at the greatest length: raise \
         context.answer_len, or reward answers that end",
        100.0 * share
    ))
}

fn not_finite(steps: &[Step]) -> Option<String> {
    let mut broken = steps.iter().filter(|step| !step.loss.is_finite() || !step.grad_norm.is_finite());
    let first = broken.next()?.step;
    Some(format!("loss or gradient norm is not finite in {} updates, the first is update {first}", 1 + broken.count()))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::units::Rank;

    fn of(run: &Run) -> String {
        warnings(run, &alarms::spans(run)).join("\n")
    }

    #[test]
    fn cut_answers_and_memory_past_the_plan_are_warnings_without_an_alarm_too() {
        let step = |step| Step { step, truncated_share: Some(0.5), ..Step::default() };
        let receipt = Facts {
            plan_device_bytes: 1 << 30,
            peak_device_bytes: vec![2 << 30],
            finished: "2026-01-01T00:00:00Z".into(),
            ..Facts::default()
        };
        let mut run = Run { steps: (1..=20).map(step).collect(), receipt: Some(receipt), ..Run::default() };
        let lines = of(&run);
        assert!(lines.contains("50 % of the sampled answers of the last 2 updates were cut off"), "{lines}");
        assert!(lines.contains("device memory: 2.00 GiB measured, 1.00 GiB planned"), "{lines}");
        assert!(!lines.contains("later start"));
        run.steps[19].alarms = [("truncated".to_owned(), Some(0.5))].into();
        let message = "refused\nand more".to_owned();
        run.failures = vec![Logged { time: "2026-01-02T00:00:00Z".into(), rank: Rank(0), exit: Some(2), message }];
        run.began = "2025-12-31T00:00:00Z".into();
        assert!(!of(&run).contains("a later start"), "the failure is of the start that wrote the receipt");
        run.began = "2026-01-01T12:00:00Z".into();
        run.steps[3].loss = f64::NAN;
        let lines = of(&run);
        assert_eq!(lines.matches("cut off").count(), 1, "the alarm says it: {lines}");
        assert!(
            lines.contains("a later start has failed (exit 2), and this page is about the run before it: refused\n")
        );
        assert!(lines.contains("not finite in 1 updates, the first is update 4"), "{lines}");
    }
}
