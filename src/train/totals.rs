//! What the updates of a run add up to, and the receipt made of it.

use std::collections::BTreeMap;

use super::metrics::largest;
use super::records::RunRecords;
use super::round::FrozenGroup;
use super::session::{Model, Session};
use crate::config::HeldOutFiles;
use crate::endpoint::Spent;
use crate::plan::Place;
use crate::report::{AlarmSpan, Best, Evaluation, HeldOut, Receipt, Seconds, SourceTotal, Step, ToolNumbers};
use crate::runtime::units::{Bytes, Pages, from_index};
use crate::step::observer::OwnPages;
use crate::world::World;

/// All updates so far, those before a resume included as far as rank 0's metrics.jsonl has them.
#[derive(Debug, Default)]
pub(super) struct RunTotals {
    pub(super) updates: u64,
    /// Updates whose gradient was not 0.
    updates_with_gradient: u64,
    /// Those of them whose learning rate was not 0 either: they have changed the adapters.
    updates_trained: u64,
    seconds: Seconds,
    pinning_s: f64,
    /// Largest distance between sampling and scoring, nats; `None` where none was compared.
    sampled_gap: Option<f64>,
    tools: Option<ToolNumbers>,
    alarms: BTreeMap<String, AlarmSpan>,
    sources: BTreeMap<String, SourceTotal>,
    /// What the judges were sent.
    spent: Spent,
    first: Option<Step>,
    /// `None` before the second update.
    last: Option<Step>,
    /// Rewards of the last group that this rank trained on, and their advantages.
    rewards: Vec<Option<f64>>,
    advantages: Vec<Option<f64>>,
}

/// What the receipt holds besides the totals.
pub(super) struct RunEnd {
    /// Each held-out set before the first and after the last update, by its name.
    pub(super) held_out: BTreeMap<String, [Option<HeldOut>; 2]>,
    pub(super) best: Option<Best>,
    pub(super) stopped: bool,
    /// Whether it was an alarm that stopped the run.
    pub(super) by_alarm: bool,
    pub(super) records: RunRecords,
    /// Pages of the last prompt on this rank.
    pub(super) pages: OwnPages,
}

impl RunTotals {
    /// Totals after `updates` updates of an earlier run; `steps` are the lines of its metrics.jsonl, on rank 0 only. An update
    /// whose line is lost counts as one that trained: nothing says otherwise.
    pub(super) fn resume(updates: u64, steps: Option<Vec<Step>>, evaluations: &[Evaluation]) -> RunTotals {
        let Some(steps) = steps else { return RunTotals { updates, ..RunTotals::default() } };
        let lost = updates.saturating_sub(from_index(steps.len()));
        let mut totals = RunTotals { updates_with_gradient: lost, updates_trained: lost, ..RunTotals::default() };
        for step in steps {
            totals.add_step(step);
        }
        for evaluation in evaluations {
            totals.add_spent(evaluation.judge.as_ref());
        }
        RunTotals { updates, ..totals }
    }

    /// Adds an update. `group`: the last group of this rank; `pinning_s`: seconds in which host memory was pinned.
    pub(super) fn add_update(&mut self, step: Step, pinning_s: f64, group: Option<&FrozenGroup>) {
        let scale = step.advantage_scale.unwrap_or(1.0);
        self.add_step(step);
        self.pinning_s += pinning_s;
        self.note_group(group);
        if group.is_some() {
            self.advantages.iter_mut().flatten().for_each(|advantage| *advantage /= scale);
        }
    }

    /// Notes the last group of this rank that was rewarded, also in an update that is dropped.
    pub(super) fn note_group(&mut self, group: Option<&FrozenGroup>) {
        if let Some(group) = group {
            self.rewards.clone_from(&group.rewards);
            self.advantages.clone_from(&group.advantages);
        }
    }

    /// Adds what the judges were sent for something else than an update.
    pub(super) fn add_spent(&mut self, spent: Option<&Spent>) {
        self.spent.add(&spent.copied().unwrap_or_default());
    }

    /// What the judges were sent; `None` where nothing was, and on ranks that do not know.
    pub(super) fn spent(&self) -> Option<Spent> {
        self.spent.if_any()
    }

    fn add_step(&mut self, step: Step) {
        self.add_spent(step.judge.as_ref());
        for (name, source) in &step.sources {
            self.sources.entry(name.clone()).or_default().add(source, step.group_update == 0);
        }
        self.seconds.add(&step.seconds);
        self.sampled_gap = largest(self.sampled_gap, step.sampled_gap);
        // Further updates of a group are made of the same answers.
        if let Some(tools) = step.tools.as_ref().filter(|_| step.group_update == 0) {
            self.tools.get_or_insert_default().add(tools);
        }
        self.updates = step.step;
        let has_gradient = step.grad_norm > 0.0;
        for (name, &value) in &step.alarms {
            let first = AlarmSpan { first_update: step.step, ..AlarmSpan::default() };
            let span = self.alarms.entry(name.clone()).or_insert(first);
            *span = AlarmSpan { last_update: step.step, updates: span.updates + 1, last_value: value, ..*span };
        }
        self.updates_with_gradient += u64::from(has_gradient);
        self.updates_trained += u64::from(has_gradient && step.learning_rate > 0.0);
        if self.first.is_none() {
            self.first = Some(step);
        } else {
            self.last = Some(step);
        }
    }

    fn last(&self) -> Option<&Step> {
        self.last.as_ref().or(self.first.as_ref())
    }

    /// Seconds of the last update, if one was made.
    pub(super) fn last_update_s(&self) -> Option<f64> {
        self.last().map(|step| step.seconds.total)
    }

    /// The receipt; every rank takes part, for only rank 0 has read the updates of an earlier run.
    pub(super) fn receipt(self, session: &Session, world: &World, end: RunEnd) -> Receipt {
        let config = session.config();
        let Session { model: Model { decoder, .. }, plan, .. } = session;
        let RunEnd { mut held_out, best, stopped, by_alarm, records, pages } = end;
        let names_sets = config.data.held_out.as_ref().is_some_and(HeldOutFiles::is_named);
        let held_out_only = if names_sets { None } else { held_out.pop_first() };
        let by_rank = |value: u64| world.all.gather_numbers(value);
        let most = |count: u64| by_rank(count).into_iter().max().unwrap_or(0);
        let last = self.last();
        Receipt {
            passed: most(self.updates_trained) > 0 && !stopped,
            stopped,
            stopped_by_alarm: by_alarm,
            alarms: self.alarms.clone(),
            finished: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
            scale: config.gate.scale,
            commit: option_env!("LONGSTRAW_COMMIT").unwrap_or("unknown"),
            config_digest: config.digest(),
            model_digest: session.model.digest.clone(),
            adapter: session.adapter_form(),
            gradient: config.grpo.gradient.to_string(),
            dtype: config.model.dtype.to_string(),
            ranks: world.all.size(),
            cp_size: world.cp.size(),
            cp_size_because: plan.split_note.clone(),
            positions: config.context.max_seq_len,
            prompt_len: config.context.prompt_len,
            answer_len: config.context.answer_len,
            group_size: config.grpo.group_size,
            layers: session.model.spec.layers,
            device: format!("{:?}", decoder.device()),
            attention_kernel: decoder.attention_name(),
            index_scores: decoder.index_scores_name(),
            delta_rule: decoder.delta_rule_name(),
            direct: plan.direct,
            keeping: plan.keeping,
            micro_blocks: [config.memory.micro_block, config.memory.head_block],
            gap_warn: session.gap_warn(),
            capture_share: if self.seconds.total > 0.0 { self.seconds.capture / self.seconds.total } else { 0.0 },
            seconds: self.seconds,
            pinning_seconds: self.pinning_s,
            stage_wait_seconds: records.stage_wait_seconds,
            plan_device_bytes: plan.plan.sum(Place::Device),
            plan_host_bytes: plan.plan.sum(Place::Host),
            peak_device_bytes: records.memory.largest(|phase| &phase.device_peak),
            peak_host_bytes: records.memory.largest(|phase| &phase.host_peak),
            reserved_device_bytes: records.memory.reserved,
            memory: records.memory.phases,
            pages_per_rank: by_rank(pages.pages.0).into_iter().map(Pages).collect(),
            page_bytes_per_rank: by_rank(pages.bytes.0).into_iter().map(Bytes).collect(),
            layers_by_phase: records.layers_by_phase,
            // What came out.
            steps: self.updates,
            updates_with_gradient: most(self.updates_with_gradient),
            optimizer_calls: session.policy.optimizer.steps().into(),
            loss_first: self.first.as_ref().map_or(0.0, |step| step.loss),
            loss: last.map_or(0.0, |step| step.loss),
            ratio_first: self.first.as_ref().and_then(|step| step.ratio),
            grad_norm: last.map_or(0.0, |step| step.grad_norm),
            sampled_gap: self.sampled_gap,
            tools: self.tools,
            rewards: self.rewards,
            advantages: self.advantages,
            held_out: held_out_only.map(|(_, ends)| ends).unwrap_or_default(),
            held_out_sets: held_out,
            best,
            judge: self.spent.if_any(),
            sources: self.sources,
            lora_b_unmoved: records.unmoved,
            adapter_digest: world.all.gather_texts(&session.policy.digest(world)),
            // The other fields are a gate's.
            ..Receipt::default()
        }
    }
}
