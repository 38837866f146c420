//! Alarms of a run, from its metrics and its receipt, and what each of them means.

use std::collections::BTreeMap;

use super::boxes::{Row, rows};
use super::lines::Besides;
use super::numbers::short;
use super::plot::{About, Figure};
use super::read::Run;
use crate::report::receipt::AlarmSpan;
use crate::report::step::Step;
use crate::runtime::units::float;

/// An alarm by the name that metrics and receipts have for it.
struct Kind {
    name: &'static str,
    /// What is watched.
    title: &'static str,
    /// What it means and what to do.
    advice: &'static str,
}

const KINDS: [Kind; 12] = [
    Kind {
        name: "kl",
        title: "divergence from the starting policy, nats a token",
        advice: "the policy moves away from where it began: lower optimizer.lr or raise grpo.kl_coef",
    },
    Kind {
        name: "grad_norm",
        title: "gradient norm over the median of the updates before",
        advice: "single updates change far more than the others: lower optimizer.lr or optimizer.max_grad_norm",
    },
    Kind {
        name: "entropy_low",
        title: "entropy of the sampled tokens, nats",
        advice: "answers of a group no longer differ, so that nothing is learnt from them: lower optimizer.lr",
    },
    Kind {
        name: "entropy_high",
        title: "entropy of the sampled tokens, nats",
        advice: "tokens are drawn nearly at random: lower optimizer.lr",
    },
    Kind {
        name: "truncated",
        title: "share of the sampled answers that were cut off",
        advice: "raise context.answer_len, or reward answers that end",
    },
    Kind {
        name: "equal_rewards",
        title: "share of the groups whose rewards are all equal",
        advice: "such groups teach nothing: take harder or easier prompts, larger groups, or a reward with more steps",
    },
    Kind {
        name: "reward_flat",
        title: "mean reward that has not risen measurably",
        advice: "nothing is learnt, or all is: look at the curve of the reward",
    },
    Kind {
        name: "missing_rewards",
        title: "share of the answers without a reward",
        advice: "reward_failures in metrics.jsonl says why",
    },
    Kind {
        name: "reward_sec",
        title: "wait for rewards over the median of the updates before",
        advice: "what scores answers has become slow: longstraw ping times a judge",
    },
    Kind {
        name: "sampled_gap",
        title: "sampling against score, nats",
        advice: "sampling and scoring do not compute the same policy: see sampled_gap in docs/troubleshooting.md",
    },
    Kind {
        name: "device_memory",
        title: "peak of device memory over what the plan says",
        advice: "longstraw plan names the addends",
    },
    Kind {
        name: "zero_gradient",
        title: "updates in a row without a gradient",
        advice: "the rewards of every group were equal, or its answers were left out (grpo.mask_truncated)",
    },
];

fn kind(name: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.name == name)
}

fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "not finite".to_owned(), short)
}

/// Spans of all alarms of a run by name. The metrics have every update; the receipt knows alarms of updates that they lack.
pub(super) fn spans(run: &Run) -> BTreeMap<String, AlarmSpan> {
    let mut spans: BTreeMap<String, AlarmSpan> =
        run.receipt.iter().flat_map(|receipt| receipt.alarms.clone()).collect();
    let mut found: BTreeMap<&str, AlarmSpan> = BTreeMap::new();
    for step in &run.steps {
        for (name, &value) in &step.alarms {
            let span = found.entry(name).or_insert(AlarmSpan { first_update: step.step, ..AlarmSpan::default() });
            *span = AlarmSpan { last_update: step.step, updates: span.updates + 1, last_value: value, ..*span };
        }
    }
    for (name, span) in found {
        let known = spans.entry(name.to_owned()).or_insert(span);
        if known.updates < span.updates {
            *known = span;
        }
    }
    spans
}

/// One line for each alarm that was raised.
pub(super) fn warnings(spans: &BTreeMap<String, AlarmSpan>) -> Vec<String> {
    let line = |(name, span): (&String, &AlarmSpan)| {
        let AlarmSpan { first_update, last_update, updates, last_value } = *span;
        let value = number(last_value);
        let when = if updates > 1 {
            format!("in {updates} updates from {first_update} to {last_update}, {value} in the last of them")
        } else {
            format!("{value} in update {first_update}")
        };
        let meaning = kind(name).map_or(String::new(), |kind| format!(" ({}): {}", kind.title, kind.advice));
        format!("alarm {name}: {when}{meaning}")
    };
    spans.iter().map(line).collect()
}

/// A row for each alarm over the updates that raised it.
pub(super) fn figure(steps: &[Step]) -> Option<Figure> {
    let mut found: BTreeMap<&str, Vec<(f64, String)>> = BTreeMap::new();
    for step in steps {
        for (name, &value) in &step.alarms {
            let words = format!("update {}: {}", step.step, number(value));
            found.entry(name).or_default().push((float(step.step), words));
        }
    }
    let row = |(name, updates): (&str, Vec<(f64, String)>)| Row { name: name.to_owned(), updates };
    let about = About {
        title: "Updates with an alarm".into(),
        reading: "A number was beyond the limit that [alarm] gives it; after each name the number of updates.".into(),
        x_name: "update",
        unit: "",
        wide: true,
    };
    let (first, last) = (float(steps.first()?.step), float(steps.last()?.step));
    rows(about, &found.into_iter().map(row).collect::<Vec<_>>(), first, last)
}

/// The updates in which one of `names` was raised, and the limits of `watched`, a number that [alarm] bounds as it is.
pub(super) fn besides(run: &Run, names: &[&str], watched: &[&str]) -> Besides {
    let mut marked = Vec::new();
    for step in &run.steps {
        let raised: Vec<&str> = names.iter().copied().filter(|name| step.alarms.contains_key(*name)).collect();
        if !raised.is_empty() {
            marked.push((float(step.step), format!("update {}: alarm {}", step.step, raised.join(", "))));
        }
    }
    let of = |name: &str, end: &str| run.config.get("alarm")?.get(format!("{name}_{end}"))?.as_float();
    let limits = watched.iter().flat_map(|name| {
        let known = [("warns", of(name, "warn")), ("stops", of(name, "stop"))];
        known.into_iter().filter_map(|(word, limit)| Some((format!("alarm {word} at"), limit?))).collect::<Vec<_>>()
    });
    Besides { limits: limits.filter(|(_, limit)| limit.is_finite()).collect(), marked }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::page::facts::Facts;

    fn step(step: u64, alarms: &[(&str, Option<f64>)]) -> Step {
        let alarms = alarms.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        Step { step, alarms, ..Step::default() }
    }

    #[test]
    fn metrics_and_receipt_together_have_every_alarm_with_what_to_do() {
        let steps = vec![step(1, &[]), step(2, &[("kl", Some(1.5))]), step(3, &[("kl", Some(2.5)), ("new", None)])];
        let before = AlarmSpan { first_update: 1, last_update: 1, updates: 1, last_value: Some(0.75) };
        let receipt = Facts { alarms: [("truncated".to_owned(), before)].into(), ..Facts::default() };
        let run = Run { steps, receipt: Some(receipt), ..Run::default() };
        let lines = warnings(&spans(&run));
        assert_eq!(lines.len(), 3);
        assert!(lines[0].starts_with("alarm kl: in 2 updates from 2 to 3, 2.5 in the last of them ("), "{lines:?}");
        assert_eq!(lines[1], "alarm new: not finite in update 3");
        assert!(lines[2].starts_with("alarm truncated: 0.75 in update 1 (share") && lines[2].contains("answer_len"));
        let drawn = figure(&run.steps).unwrap();
        assert!(
            drawn.words.contains("kl: 2 updates from 2 to 3; update 3: 2.5; new: update 3: not finite"),
            "{drawn:?}"
        );
    }

    #[test]
    fn limits_are_those_of_the_runs_own_configuration() {
        let config = "[alarm]\nkl_warn = 1.0\nkl_stop = inf\n".parse().unwrap();
        let run = Run { steps: vec![step(4, &[("kl", None)])], config, ..Run::default() };
        let Besides { limits, marked } = besides(&run, &["kl"], &["kl"]);
        assert_eq!(limits, [("alarm warns at".to_owned(), 1.0)]);
        assert_eq!(marked, [(4.0, "update 4: alarm kl".to_owned())]);
    }
}
