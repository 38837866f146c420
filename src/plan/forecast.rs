//! What a whole run takes: hours, tokens, requests to a judge, and bytes on disk.

use serde::Serialize;

use super::budget::Plan;
use super::judged::{self, Judged, Waits};
use super::predict::{Pace, predict};
use super::sizes::{adapter_elements, element_bytes};
use crate::config::{Gradient, RunConfig};
use crate::model::shape::Shape;
use crate::runtime::failure::Phase;
use crate::runtime::units::{Bytes, Tokens, float, from_index};

/// Bytes that a disk takes in a second, an assumption.
const DISK_RATE: f64 = 5e8;
/// Bytes of a line of metrics.jsonl with its share of the curves, about.
const METRICS_BYTES: u64 = 6 << 10;
/// Bytes of a sampled token in answers.jsonl, its text and its id, about, and of a line besides.
const TEXT_BYTES: u64 = 11;
const LINE_BYTES: u64 = 400;
/// Evaluations on held-out prompts in any run: before the first update and after the last.
const EVALUATIONS: u64 = 2;

/// A run from its first update to its last.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Forecast {
    pub updates: u64,
    pub groups_per_update: u64,
    /// Answers of an update.
    pub answers_per_update: u64,
    /// Seconds of an update; absent without rates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub update_seconds: Option<f64>,
    pub evaluations: u64,
    /// Held-out prompts; absent where nobody has counted them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out_prompts: Option<u64>,
    /// Seconds of one evaluation; absent without rates or a count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluation_seconds: Option<f64>,
    pub saves: u64,
    pub checkpoint_bytes: Bytes,
    /// All of it, with the judges' time only where the seconds of a reply were given; absent without rates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hours: Option<f64>,
    /// Requests to the judge for training; 0 without one.
    pub judge_requests: u64,
    /// The same for held-out answers, where their prompts are counted.
    pub held_out_requests: u64,
    /// Rounds of replies that an update and an evaluation wait for; absent without a judge.
    #[serde(rename = "judge_waits", skip_serializing_if = "Option::is_none")]
    waits: Option<Waits>,
    /// Tokens of all these requests, about; 0 without a judge.
    pub judge_tokens_in: u64,
    /// Tokens of the replies, about.
    pub judge_tokens_out: u64,
    /// Cost of both, about; absent without prices or a judge.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub judge_cost: Option<f64>,
    /// Tokens drawn, at most.
    pub tokens_drawn: u64,
    /// Bytes in the run directory at its end, and once more a checkpoint while it is written.
    pub disk_bytes: Bytes,
    pub log_bytes: Bytes,
    #[serde(skip)]
    checkpoints_kept: u64,
    #[serde(skip)]
    has_held_out: bool,
}

/// What is known of the data.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counted {
    /// Seconds of an update at the lengths of the data; absent: of the longest prompt.
    pub update_seconds: Option<f64>,
    /// Held-out prompts, where their file was read.
    pub held_out: Option<u64>,
    /// Seconds of one reply of a judge, as the user expects them.
    pub judge_sec: Option<f64>,
}

impl Forecast {
    /// Of `config`, which the plan is of.
    #[must_use]
    pub fn new(config: &RunConfig, plan: &Plan, shape: &Shape, pace: Option<&Pace>, counted: Counted) -> Forecast {
        let ranks = plan.ranks;
        let updates = config.run.steps;
        let groups = config.groups_per_update(ranks);
        let answers = groups.saturating_mul(config.grpo.group_size);
        let of_longest = plan.seconds.as_ref().map(|seconds| seconds.of_update(config.optimizer.grad_accum));
        let waits = Waits::of(config, ranks, counted.judge_sec);
        let waited = |seconds: f64| seconds + waits.as_ref().map_or(0.0, Waits::update_seconds);
        let update_seconds = counted.update_seconds.or(of_longest).map(waited);
        let has_held_out = config.data.held_out.is_some();
        // The one after the last update is not one on the way.
        let on_the_way = updates.saturating_sub(1).checked_div(config.eval.every).unwrap_or(0);
        let evaluations = if has_held_out { on_the_way.saturating_add(EVALUATIONS) } else { 0 };
        let held_out_prompts = counted.held_out.filter(|_| has_held_out);
        let waited = |seconds: f64| seconds + waits.as_ref().map_or(0.0, Waits::held_out_seconds);
        let prompt_seconds = pace.and_then(|pace| held_out_seconds(config, plan, shape, pace)).map(waited);
        let turns = held_out_prompts.map(|prompts| prompts.div_ceil(config.dp_size(ranks).max(1)));
        let evaluation_seconds = turns.zip(prompt_seconds).map(|(turns, seconds)| float(turns) * seconds);
        let checkpoint_bytes = checkpoint_bytes(config, shape);
        let of_updates = update_seconds.map(|seconds| seconds * float(updates));
        let saves = saves(config, of_updates).saturating_add(saves_of_best(config, on_the_way));
        let save_seconds = float(saves) * float(checkpoint_bytes.0) / DISK_RATE;
        let evaluated = float(evaluations) * evaluation_seconds.unwrap_or(0.0);
        let hours = of_updates.map(|seconds| (seconds + evaluated + save_seconds) / 3600.0);
        // Answers are drawn once for all updates of a group.
        let drawn = updates.div_ceil(config.grpo.updates_per_group.max(1)).saturating_mul(answers);
        let evaluated_answers = config.eval_samples().saturating_add(config.eval_greedy());
        let held_out_answers =
            held_out_prompts.unwrap_or(0).saturating_mul(evaluations).saturating_mul(evaluated_answers);
        let samples = config.rollout.sample;
        let judges = from_index(config.named_judges().len());
        let judged = Judged::of(config, drawn.saturating_add(if samples { held_out_answers } else { 0 }));
        let tokens_drawn =
            if samples { drawn.saturating_add(held_out_answers).saturating_mul(config.sampled_len().0) } else { 0 };
        let lines = if samples { drawn.saturating_mul(LINE_BYTES) } else { 0 };
        let text = if samples { drawn.saturating_mul(config.sampled_len().0.saturating_mul(TEXT_BYTES)) } else { 0 };
        let log_bytes = Bytes(updates.saturating_mul(METRICS_BYTES).saturating_add(lines).saturating_add(text));
        let best = u64::from(config.checkpoint.keep_best.is_some());
        let kept = (config.checkpoint.keep.saturating_add(best)).min(saves);
        let adapter = all_elements(config, shape).saturating_mul(4);
        Forecast {
            updates,
            groups_per_update: groups,
            answers_per_update: answers,
            update_seconds,
            evaluations,
            held_out_prompts,
            evaluation_seconds,
            saves,
            checkpoint_bytes,
            hours,
            judge_requests: judges.saturating_mul(drawn),
            held_out_requests: if samples { judges.saturating_mul(held_out_answers) } else { 0 },
            waits,
            judge_tokens_in: judged.tokens_in,
            judge_tokens_out: judged.tokens_out,
            judge_cost: judged.cost.filter(|_| judges > 0),
            tokens_drawn,
            disk_bytes: Bytes(
                kept.saturating_add(1)
                    .saturating_mul(checkpoint_bytes.0)
                    .saturating_add(adapter)
                    .saturating_add(log_bytes.0),
            ),
            log_bytes,
            checkpoints_kept: kept,
            has_held_out,
        }
    }

    /// The lines that the command prints.
    #[must_use]
    pub fn text(&self, sampled: Option<Tokens>) -> String {
        let Forecast { updates, groups_per_update, answers_per_update, saves, .. } = self;
        let mut lines = Vec::new();
        let what =
            format!("an update of {}, {}", many(*groups_per_update, "group"), many(*answers_per_update, "answer"));
        if let (Some(seconds), Some(hours)) = (self.update_seconds, self.hours) {
            let evaluations = match (self.evaluation_seconds, self.held_out_prompts) {
                (Some(seconds), Some(prompts)) => {
                    let prompts = many(prompts, "held-out prompt");
                    format!(", {} of {prompts}, {seconds:.0} s each", many(self.evaluations, "evaluation"))
                }
                _ if self.has_held_out => ", without held-out prompts (plan --data counts them)".to_owned(),
                _ => String::new(),
            };
            lines.push(format!(
                "{what}: {seconds:.1} s; the run of {}: {hours:.1} hours, {} of {} among them (at 0.5 GB/s, an \
                 assumption){evaluations}; {} comes on top",
                many(*updates, "update"),
                many(*saves, "save"),
                self.checkpoint_bytes,
                if self.waits.as_ref().is_some_and(Waits::is_timed) {
                    "the judges' time is in it, a program's own"
                } else {
                    "a judge's or a program's own time"
                }
            ));
        } else {
            let updates = many(*updates, "update");
            lines.push(format!("{what}; the run has {updates}; without rates no seconds are predicted"));
        }
        if let Some(longest) = sampled {
            lines.push(format!("tokens drawn in the run: up to {} (answers of at most {longest})", self.tokens_drawn));
        }
        if self.judge_requests > 0 {
            let held_out = match (self.held_out_requests, self.has_held_out) {
                (0, true) => ", and one for each held-out answer (plan --data counts them)".to_owned(),
                (0, false) => String::new(),
                (requests, _) => format!(", {requests} for held-out answers"),
            };
            lines.push(format!(
                "judge requests of the run: {} for training{held_out}; what fails and is sent again comes on top",
                self.judge_requests
            ));
            lines.extend(self.waits.as_ref().map(Waits::text));
            lines.push(judged::text(self.judge_tokens_in, self.judge_tokens_out, self.judge_cost));
        }
        lines.push(format!(
            "disk at the end of the run: {}: {} of {} and one that is being written, the adapter, about {} of logs",
            self.disk_bytes,
            many(self.checkpoints_kept, "checkpoint"),
            self.checkpoint_bytes,
            self.log_bytes
        ));
        lines.join("\n")
    }
}

/// Most updates whose saves are counted one by one.
const UPDATES_COUNTED: u64 = 1 << 20;

/// Saves of evaluations on the way: with `keep_best` each has a checkpoint.
fn saves_of_best(config: &RunConfig, on_the_way: u64) -> u64 {
    if config.checkpoint.keep_best.is_none() {
        return 0;
    }
    let before_last = config.run.steps.saturating_sub(1);
    on_the_way.saturating_sub(both(config.eval.every, config.checkpoint.every, before_last))
}

/// Numbers from 1 to `most` that both divide.
fn both(first: u64, second: u64, most: u64) -> u64 {
    let (mut divisor, mut rest) = (first, second);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    let multiple = first.checked_div(divisor).and_then(|times| times.checked_mul(second)).unwrap_or(0);
    most.checked_div(multiple).unwrap_or(0)
}

/// Saves by number, by the time since the last one, and at the end. `seconds` are those of all updates, which take equally long.
fn saves(config: &RunConfig, seconds: Option<f64>) -> u64 {
    let (steps, number, every) = (config.run.steps, config.checkpoint.every, config.checkpoint.every_sec);
    if steps > UPDATES_COUNTED {
        // The last update is saved whatever its number.
        return if number > 0 { steps.div_ceil(number) } else { 1 };
    }
    let an_update = seconds.map_or(0.0, |seconds| seconds / float(steps.max(1)));
    let (mut saves, mut since) = (0, 0.0);
    for step in 1..=steps {
        since += an_update;
        let by_time = every > 0 && since >= float(every);
        if step == steps || by_time || step.checked_rem(number) == Some(0) {
            saves += 1;
            since = 0.0;
        }
    }
    saves
}

/// Elements of all adapters, those of experts on other ranks among them.
fn all_elements(config: &RunConfig, shape: &Shape) -> u64 {
    let mut config = config.clone();
    config.parallel.ep_size = 1;
    adapter_elements(&config, shape)
}

/// `1 group`, `2 groups`.
fn many(count: u64, one: &str) -> String {
    if count == 1 { format!("1 {one}") } else { format!("{count} {one}s") }
}

/// Masters and both moments in the accumulation dtype, and the adapter in float32.
fn checkpoint_bytes(config: &RunConfig, shape: &Shape) -> Bytes {
    let (_, acc) = element_bytes(config.model.dtype);
    Bytes(all_elements(config, shape).saturating_mul(3 * acc + 4))
}

/// Seconds of one held-out prompt of the greatest length: nothing is trained.
fn held_out_seconds(config: &RunConfig, plan: &Plan, shape: &Shape, pace: &Pace) -> Option<f64> {
    let mut config = config.clone();
    config.grpo.gradient = Gradient::Last(Tokens(0));
    config.grpo.kl_coef = 0.0;
    if config.rollout.sample {
        config.grpo.group_size = config.eval_samples().saturating_add(config.eval_greedy());
    }
    let seconds = predict(&config, plan.ranks, shape, plan.chosen(), pace)?;
    let counts = |phase: Phase| matches!(phase, Phase::Capture | Phase::Rollout | Phase::Score);
    Some(seconds.phases.iter().filter(|phase| counts(phase.phase)).map(|phase| phase.seconds).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_update_is_saved_too() {
        let mut config = RunConfig::laptop();
        (config.run.steps, config.checkpoint.every, config.checkpoint.every_sec) = (25, 10, 0);
        assert_eq!(saves(&config, None), 3);
        config.run.steps = 30;
        assert_eq!(saves(&config, None), 3);
        config.checkpoint.every = 0;
        assert_eq!(saves(&config, Some(100.0)), 1);
        config.checkpoint.every_sec = 40;
        assert_eq!(saves(&config, Some(100.0)), 3, "after 40 and 80 seconds, and at the end");
        (config.checkpoint.every, config.checkpoint.every_sec) = (10, 60);
        // An update takes 20 seconds: after 3, 6, 9, 10 of every ten.
        assert_eq!(saves(&config, Some(600.0)), 12);
    }
}
