//! Updates, checks and receipts as lines of text.

use std::path::Path;

use super::evaluation::{Best, HeldOut};
use super::receipt::{Check, Receipt};
use super::step::Step;

/// Most characters of a check's value.
const VALUE_CHARS_MAX: usize = 120;

/// The line about an update.
pub(super) fn step(step: &Step, steps: u64) -> String {
    let reward = step.reward_mean.map_or_else(|| "none".into(), |mean| format!("{mean:.3}"));
    let ratio = step.ratio.map_or_else(|| "none".into(), |[least, most]| format!("{least:.6}..{most:.6}"));
    format!(
        "step {:>3}/{steps}  loss {:>10.6}  reward {reward}  grad norm {:>9.3e}  ratio {ratio}  {:.1} s",
        step.step,
        // Adding zero takes the sign from a negative zero.
        step.loss + 0.0,
        step.grad_norm,
        step.seconds.total
    )
}

/// What a reader should not overlook in an update.
pub(super) fn step_notes(step: &Step) -> Vec<String> {
    let mut notes = Vec::new();
    if step.reward_missing > 0 {
        let failures: Vec<String> =
            step.reward_failures.iter().map(|(kind, count)| format!("{kind}: {count}")).collect();
        let why = if failures.is_empty() { String::new() } else { format!(" ({})", failures.join(", ")) };
        let missing = step.reward_missing;
        notes.push(format!("  answers without a reward, which take no part in the update: {missing}{why}"));
    }
    if step.frac_groups_zero_std >= 1.0 && step.grad_norm == 0.0 && step.reward_mean.is_some() {
        notes.push("  every group's rewards are equal, so this update has no gradient from rewards".to_owned());
    }
    notes
}

/// A gate's checks, one a line, and what could not be checked.
#[must_use]
pub fn checks(receipt: &Receipt) -> String {
    let mut lines = Vec::new();
    for Check { name, value, limit, passed, means } in &receipt.checks {
        let verdict = if *passed { "ok    " } else { "FAILED" };
        let value = value.to_string();
        // A list with an entry for each layer would hide the other lines; the receipt has all of it.
        let short: String = if value.chars().count() > VALUE_CHARS_MAX {
            value.chars().take(VALUE_CHARS_MAX).chain("…".chars()).collect()
        } else {
            value
        };
        lines.push(format!("  {verdict}  {name}: {short} ({limit})"));
        if !passed {
            lines.push(format!("          {means}"));
        }
    }
    lines.extend(receipt.not_checked.iter().map(|what| format!("  not checked: {what}")));
    lines.join("\n")
}

/// Measurements of a set before the first and after the last update.
fn held_out_rows(set: &str, ends: &[Option<HeldOut>; 2]) -> Vec<(String, String)> {
    let [Some(before), Some(after)] = ends else { return Vec::new() };
    let prompts = after.prompts;
    let row = |what: &str, number: fn(&HeldOut) -> Option<f64>| {
        let (first, last) = (number(before)?, number(after)?);
        Some((format!("{set} {what}"), format!("{first:.3} -> {last:.3} on {prompts} prompts")))
    };
    let rows = [
        row("reward, sampled answers", |held_out| held_out.reward),
        row("reward, greedy answers", |held_out| held_out.greedy),
        row("margin, right over wrong (nats)", |held_out| held_out.margin),
        row("accuracy", |held_out| held_out.accuracy),
        row("tokens, sampled answers", |held_out| held_out.tokens),
        row("tokens, greedy answers", |held_out| held_out.greedy_tokens),
    ];
    rows.into_iter().flatten().collect()
}

/// The table at the end of a run.
pub(super) fn table(receipt: &Receipt, folder: &Path) -> String {
    let mut rows: Vec<(String, String)> = Vec::new();
    let mut row = |name: &str, value: String| rows.push((name.into(), value));
    row("gradient", receipt.gradient.clone());
    row("ranks", format!("{} ({} a prompt)", receipt.ranks, receipt.cp_size));
    row("loss, first and last update", format!("{:.6}, {:.6}", receipt.loss_first, receipt.loss));
    rows.extend(held_out_rows("held-out", &receipt.held_out));
    rows.extend(receipt.held_out_sets.iter().flat_map(|(set, ends)| held_out_rows(&format!("held-out {set}"), ends)));
    let mut row = |name: &str, value: String| rows.push((name.into(), value));
    for (source, total) in &receipt.sources {
        row(&format!("source {source}"), total.text());
    }
    if let Some(Best { metric, value, checkpoint, .. }) = &receipt.best {
        row("best checkpoint", format!("{checkpoint} ({metric} {value:.4})"));
    }
    let total = ("all updates", receipt.seconds.total);
    // Phases that do not occur in this run have no row.
    for (name, seconds) in receipt.seconds.phases().into_iter().chain([total]).filter(|(_, seconds)| *seconds > 0.0) {
        row(&format!("seconds, {name}"), format!("{seconds:.1}"));
    }
    for (rank, (bytes, pages)) in receipt.page_bytes_per_rank.iter().zip(&receipt.pages_per_rank).enumerate() {
        row(&format!("page bytes, rank {rank}"), format!("{bytes} ({} of {pages} pages)", bytes.0));
    }
    for (rank, digest) in receipt.adapter_digest.iter().enumerate() {
        row(&format!("adapter digest, rank {rank}"), digest.chars().take(16).collect());
    }
    row("adapter, receipt, metrics, logs in", folder.display().to_string());
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let line = "-".repeat(width + 42);
    let body: Vec<String> = rows.iter().map(|(name, value)| format!("{name:<width$}  {value}")).collect();
    format!("{line}\n{}\n{line}", body.join("\n"))
}
