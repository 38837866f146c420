//! Numbers that a run gathers on its way to the receipt.

use super::Session;
use super::records::Recorded;
use super::round::Frozen;
use crate::config::Loaded;
use crate::plan::Place;
use crate::report::{HeldOut, Receipt, Seconds, Step};
use crate::runtime::failure::Phase;
use crate::runtime::units::{Bytes, Pages, Rank, float, from_index};
use crate::step::extremes::{Range, max_or_nan};
use crate::step::objective::TokenStats;
use crate::step::observer::{OwnPages, PhaseSeconds};
use crate::step::replay::Replayed;
use crate::step::rollout::SampledAnswer;
use crate::world::World;
use crate::world::exchange::sum_number;

/// What has been gathered so far.
#[derive(Debug, Default)]
pub(super) struct Tally {
    loss: f64,
    ratio: Option<Range>,
    stats: TokenStats,
    sampled: Sampled,
    /// The largest distance between drawing and scoring over all updates.
    gap_most: Option<f64>,
    rewards: Vec<Option<f64>>,
    advantages: Vec<Option<f64>>,
    seconds: Seconds,
    pinning_seconds: f64,
    first: Option<Step>,
    last: Option<Step>,
    steps: u64,
}

/// One update's numbers over all ranks.
#[derive(Debug)]
pub(super) struct BatchNumbers {
    pub(super) loss: f64,
    pub(super) ratio: Option<[f64; 2]>,
    /// What trained tokens tell, over all ranks.
    pub(super) told: TokenStats,
    /// What was drawn, if anything was.
    pub(super) sampled: Sampled,
}

/// Numbers of drawn answers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sampled {
    /// Their tokens.
    pub(super) tokens: u64,
    /// Sum of entropies, nats.
    pub(super) entropy: f64,
    /// The largest distance of a token's log-probability from its score; `None` where none was compared.
    pub(super) gap: Option<f64>,
}

impl BatchNumbers {
    /// A step with what they say of it.
    pub(super) fn into_step(self, kl_term: bool) -> Step {
        let TokenStats { tokens, clipped_low, clipped_high, kl } = self.told;
        let share = |count: u64| float(count) / float(tokens.max(1));
        let drawn = self.sampled.tokens > 0;
        Step {
            loss: self.loss,
            // JSON has no word for infinity, and a ratio that has overflowed was clipped.
            ratio: self.ratio.map(|ends| ends.map(|ratio| ratio.clamp(-f64::MAX, f64::MAX))),
            clipped_tokens: clipped_low + clipped_high,
            clip_low_share: share(clipped_low),
            clip_high_share: share(clipped_high),
            kl: (kl_term && tokens > 0).then(|| kl / float(tokens)),
            entropy: drawn.then(|| self.sampled.entropy / float(self.sampled.tokens)),
            sampled_gap: self.sampled.gap,
            ..Step::default()
        }
    }
}

impl Tally {
    /// After `updates` updates of an earlier run, of which rank 0 has the numbers.
    pub(super) fn after(updates: u64, earlier: Vec<Step>) -> Tally {
        let mut tally = Tally::default();
        for step in earlier {
            tally.stepped(step);
        }
        Tally { steps: updates, ..tally }
    }

    /// Seconds of the last update, if one was made.
    pub(super) fn last_step_s(&self) -> Option<f64> {
        self.last.as_ref().or(self.first.as_ref()).map(|step| step.seconds.total)
    }

    /// Updates made.
    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    /// A group's turn has come.
    pub(super) fn group(&mut self, frozen: &Frozen) {
        self.rewards.clone_from(&frozen.rewards);
        self.advantages.clone_from(&frozen.advantages);
    }

    /// A group's answers have been sampled.
    pub(super) fn sampled(&mut self, sampled: &[SampledAnswer]) {
        for answer in sampled {
            self.sampled.tokens += from_index(answer.ids.len());
            self.sampled.entropy += answer.entropy;
        }
    }

    /// A drawn answer has been scored: its tokens' log-probabilities lie this far apart at most.
    pub(super) fn gap(&mut self, gap: f64) {
        self.sampled.gap = Some(self.sampled.gap.map_or(gap, |most| max_or_nan(most, gap)));
    }

    /// A group has been replayed.
    pub(super) fn replayed(&mut self, done: &Replayed) {
        self.loss += done.loss;
        self.stats.add(done.stats);
        self.ratio = Range::cover(self.ratio, done.ratio);
    }

    /// A group has gone through the conventional schedule, which has no pages and no frozen ratio.
    pub(super) fn conventional(&mut self, loss: f64) {
        self.loss += loss;
    }

    /// Sums over ranks; starts anew for the next update. The loss is divided by the batch's divisor.
    pub(super) fn batch_numbers(&mut self, world: &World, divisor: f64) -> BatchNumbers {
        let own = self.ratio.take();
        let has = world.all.gather_numbers(u64::from(own.is_some()));
        let Range { least, most } = own.unwrap_or(Range::at(0.0));
        let (least, most) = (world.all.gather_floats(least), world.all.gather_floats(most));
        let ratio = has
            .iter()
            .zip(least.into_iter().zip(most))
            .filter(|(has, _)| **has == 1)
            .fold(None, |range, (_, (least, most))| Range::cover(range, Some(Range { least, most })));
        let count = |own: u64| world.all.gather_numbers(own).iter().sum();
        let own = std::mem::take(&mut self.stats);
        let told = TokenStats {
            tokens: count(own.tokens),
            clipped_low: count(own.clipped_low),
            clipped_high: count(own.clipped_high),
            kl: sum_number(&world.all, own.kl),
        };
        let sampled = std::mem::take(&mut self.sampled);
        // Every rank of a prompt has drawn the same; the first one's numbers count.
        let first = world.cp.rank() == Rank(0);
        let compared = world.all.gather_numbers(u64::from(sampled.gap.is_some()));
        let gaps = world.all.gather_floats(sampled.gap.unwrap_or_default());
        let gaps = gaps.into_iter().zip(compared).filter(|(_, compared)| *compared == 1).map(|(gap, _)| gap);
        let sampled = Sampled {
            tokens: count(if first { sampled.tokens } else { 0 }),
            entropy: sum_number(&world.all, if first { sampled.entropy } else { 0.0 }),
            gap: gaps.reduce(max_or_nan),
        };
        BatchNumbers {
            loss: sum_number(&world.all, std::mem::take(&mut self.loss)) / divisor,
            ratio: ratio.map(|range| [range.least, range.most]),
            told,
            sampled,
        }
    }

    /// Seconds of the update that has just ended.
    pub(super) fn step_seconds(&mut self, spent: &PhaseSeconds) -> Seconds {
        self.pinning_seconds += spent.pinning;
        Seconds {
            capture: spent[Phase::Capture],
            rollout: spent[Phase::Rollout],
            reward: spent[Phase::Reward],
            score: spent[Phase::Score],
            replay: spent[Phase::Replay],
            sweep: spent[Phase::Sweep],
            finalize: spent[Phase::Finalize],
            update: spent[Phase::Update],
            total: 0.0,
        }
    }

    /// An update has ended.
    pub(super) fn stepped(&mut self, step: Step) {
        self.seconds.add(&step.seconds);
        if let Some(gap) = step.sampled_gap {
            self.gap_most = Some(self.gap_most.map_or(gap, |most| max_or_nan(most, gap)));
        }
        self.steps = step.step;
        if self.first.is_none() {
            self.first = Some(step);
        } else {
            self.last = Some(step);
        }
    }

    /// The receipt; every rank takes part in gathering it.
    pub(super) fn receipt(
        self,
        session: &Session,
        loaded: &Loaded,
        world: &World,
        held_out: [Option<HeldOut>; 2],
        recorded: Recorded,
        own_pages: OwnPages,
        stopped: bool,
    ) -> Receipt {
        let config = &loaded.run;
        let numbers = |value: u64| world.all.gather_numbers(value);
        let last = self.last.as_ref().or(self.first.as_ref());
        let (device, host) = (recorded.most(|phase| &phase.device_peak), recorded.most(|phase| &phase.host_peak));
        let capture_share = if self.seconds.total > 0.0 { self.seconds.capture / self.seconds.total } else { 0.0 };
        Receipt {
            scale: config.gate.scale,
            adapter: session.adapter_form(),
            optimizer_calls: session.optimizer.steps().into(),
            layers: session.spec.layers,
            layers_by_phase: recorded.layers,
            lora_b_unmoved: recorded.unmoved,
            passed: !stopped,
            stopped,
            finished: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
            commit: option_env!("LONGSTRAW_COMMIT").unwrap_or("unknown"),
            config_digest: config.digest(),
            model_digest: session.model_digest.clone(),
            gradient: session.gradient.to_string(),
            dtype: config.model.dtype.to_string(),
            ranks: world.all.size(),
            cp_size: world.cp.size(),
            positions: config.context.max_seq_len,
            prompt_len: config.context.prompt_len,
            answer_len: config.context.answer_len,
            group_size: config.grpo.group_size,
            steps: self.steps,
            pages_per_rank: numbers(own_pages.pages.0).into_iter().map(Pages).collect(),
            page_bytes_per_rank: numbers(own_pages.bytes.0).into_iter().map(Bytes).collect(),
            seconds: self.seconds,
            pinning_seconds: self.pinning_seconds,
            device: format!("{:?}", session.decoder.device()),
            peak_device_bytes: device,
            peak_host_bytes: host,
            stage_wait_seconds: recorded.stage_wait_seconds,
            reserved_device_bytes: recorded.reserved,
            plan_device_bytes: session.plan.sum(Place::Device),
            plan_host_bytes: session.plan.sum(Place::Host),
            memory: recorded.phases,
            keeping: session.keeping,
            direct: session.direct,
            attention_kernel: session.decoder.kernel().name(),
            micro_blocks: [config.memory.micro_block, config.memory.head_block],
            capture_share,
            loss_first: self.first.as_ref().map_or(0.0, |step| step.loss),
            loss: last.map_or(0.0, |step| step.loss),
            rewards: self.rewards,
            advantages: self.advantages,
            ratio_first: self.first.as_ref().and_then(|step| step.ratio),
            sampled_gap: self.gap_most,
            gap_warn: session.gap_warn,
            grad_norm: last.map_or(0.0, |step| step.grad_norm),
            held_out,
            adapter_digest: world.all.gather_texts(&session.adapters.digest()),
            // What only a gate fills in.
            ..Receipt::default()
        }
    }
}
