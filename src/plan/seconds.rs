//! Predicted seconds of a step on one group: operations divided by rates, bytes divided by the bus's rate, and of the two
//! the larger, phase by phase.
//!
//! Rates are inputs. What stands here was measured on one NVIDIA H200 (docs/benchmarks.md), or is an assumption where its
//! comment says so; for another device rates are given on the command line. Launches are counted where a token is drawn and
//! nowhere else: where each operation of another phase is small, the host that asks for them sets the pace, and the
//! prediction is too short.

use serde::Serialize;

use super::Plan;
use super::work::{Asked, Work};
use crate::config::RunConfig;
use crate::model::shape::{Mix, Shape};
use crate::runtime::failure::Phase;
use crate::runtime::units::float;

/// What a device does in a second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// Matrix products, TFLOP/s.
    pub matmul: f64,
    /// Causal attention, forward, TFLOP/s.
    pub attention_forward: f64,
    /// Its backward, TFLOP/s, counted as 2.5 forwards.
    pub attention_backward: f64,
    /// Index scores among which the largest are chosen, 10⁹ a second.
    pub choosing: f64,
    /// Between host and device, each way, GB/s for each rank.
    pub host: f64,
    /// The device's own memory, GB/s.
    pub memory: f64,
    /// From device to device, each way, GB/s.
    pub between: f64,
    /// From the launch of one small operation to that of the next, microseconds.
    pub launch: f64,
    /// A message from one rank to another that nothing runs beside, microseconds.
    pub message: f64,
    /// The share of the kernels' and the memory's rates that a phase reaches.
    pub efficiency: f64,
}

/// Attention of an H200 by head width: forward and backward, TFLOP/s.
const H200_ATTENTION: [(u64, f64, f64); 3] = [(64, 482.0, 467.0), (128, 658.0, 536.0), (256, 654.0, 369.0)];

impl Rates {
    /// An H200's, bfloat16, for the heads of `shape`: those of the nearest width that was measured.
    #[must_use]
    pub fn h200(shape: &Shape) -> Rates {
        let width = shape.most(|layer| match layer.mix {
            Mix::Grouped { head_dim, .. } => head_dim,
            Mix::Latent { latent, .. } => latent,
            Mix::Delta { .. } => 0,
        });
        let [narrowest, .., widest] = H200_ATTENTION;
        let nearest = H200_ATTENTION.into_iter().min_by_key(|&(measured, ..)| measured.abs_diff(width));
        let nearest = if width > widest.0 { widest } else { nearest.unwrap_or(narrowest) };
        Rates {
            matmul: 696.0,
            attention_forward: nearest.1,
            attention_backward: nearest.2,
            choosing: 74.6,
            host: 54.6,
            // Nominal: HBM3e of an H200, and half of its NVLink's 900 GB/s both ways. Neither is measured yet.
            memory: 4800.0,
            between: 450.0,
            // As measured of drawn tokens, 2 ms a layer (docs/benchmarks.md).
            launch: 20.0,
            // An assumption: a gather among eight ranks takes about 30 µs.
            message: 4.0,
            efficiency: 0.8,
        }
    }
}

/// One phase.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PhaseSeconds {
    /// Which.
    pub phase: Phase,
    /// Matrix products of a rank, 10¹² operations.
    pub products_tera: f64,
    /// Attention of a rank, both ways, 10¹² operations.
    pub attention_tera: f64,
    /// Bytes between host and device, in the direction that has more.
    pub copied_bytes: f64,
    /// Seconds of the computation; of a rollout, with launches and messages.
    pub compute: f64,
    /// Seconds of the copies, which run beside it.
    pub copies: f64,
    /// The larger of the two.
    pub seconds: f64,
}

/// A step on one group.
#[derive(Clone, Debug, Serialize)]
pub struct Seconds {
    /// What was counted with.
    pub rates: Rates,
    /// Its phases.
    pub phases: Vec<PhaseSeconds>,
    /// All of them, one after another.
    pub total: f64,
    /// Updates on the group.
    pub updates: u64,
    /// All updates: further ones have a capture, a replay and a sweep of their own.
    pub round: f64,
}

/// The seconds of a step on one group under `plan`; none for the conventional schedule, which is not counted.
#[must_use]
pub fn predict(config: &RunConfig, plan: &Plan, shape: &Shape, rates: Rates) -> Option<Seconds> {
    if !config.memory.prompt_no_grad {
        return None;
    }
    let work = Work::of(config, plan, shape);
    let timed = |(phase, asked): (Phase, Asked)| phase_seconds(phase, &asked, &rates);
    let phases: Vec<PhaseSeconds> = work.phases().into_iter().map(timed).collect();
    let total = phases.iter().map(|phase| phase.seconds).sum();
    let further: f64 = work.further().into_iter().map(timed).map(|phase| phase.seconds).sum();
    let updates = config.grpo.updates_per_group;
    let round = total + float(updates.saturating_sub(1)) * further;
    Some(Seconds { rates, phases, total, updates, round })
}

pub(super) fn phase_seconds(phase: Phase, asked: &Asked, rates: &Rates) -> PhaseSeconds {
    const TERA: f64 = 1e12;
    const GIGA: f64 = 1e9;
    const MICRO: f64 = 1e-6;
    let at_rates = asked.products / (rates.matmul * TERA)
        + asked.attention_forward / (rates.attention_forward * TERA)
        + asked.attention_backward / (rates.attention_backward * TERA)
        + asked.choosing / (rates.choosing * GIGA);
    let reading = asked.reads / (rates.memory * GIGA);
    let waiting = (asked.launches * rates.launch + asked.messages * rates.message) * MICRO
        + asked.message_bytes / (rates.between * GIGA);
    let compute = at_rates.max(reading) / rates.efficiency + waiting;
    let copied_bytes = asked.bytes_in.max(asked.bytes_out);
    let copies = copied_bytes / (rates.host * GIGA);
    PhaseSeconds {
        phase,
        products_tera: asked.products / TERA,
        attention_tera: (asked.attention_forward + asked.attention_backward) / TERA,
        copied_bytes,
        compute,
        copies,
        seconds: compute.max(copies),
    }
}

impl Seconds {
    /// In words, a line a phase.
    #[must_use]
    pub fn text(&self) -> String {
        let Rates { matmul, attention_forward, attention_backward, host, efficiency, .. } = self.rates;
        let mut lines = vec![format!(
            "predicted seconds of a group: {:.1}, at {:.0} % of {matmul} TFLOP/s of matrix products, {attention_forward} of \
             attention, {attention_backward} of its backward; {host} GB/s between host and device",
            self.total,
            efficiency * 100.0
        )];
        for phase in &self.phases {
            lines.push(format!(
                "  {:>12.1}  {:<9} compute {:.1} ({:.0} TFLOP of products, {:.0} of attention), copies {:.1} ({:.0} GB)",
                phase.seconds,
                phase.phase.to_string(),
                phase.compute,
                phase.products_tera,
                phase.attention_tera,
                phase.copies,
                phase.copied_bytes / 1e9
            ));
        }
        if self.phases.iter().any(|phase| phase.phase == Phase::Rollout) {
            let Rates { memory, launch, message, .. } = self.rates;
            lines.push(format!(
                "  rollout: answers as long as may be, at {:.0} % of {memory} GB/s of device memory, {launch} µs an \
                 operation, {message} µs a message",
                efficiency * 100.0
            ));
        }
        if self.updates > 1 {
            lines.push(format!(
                "predicted seconds of a group's {} updates: {:.1}; a further one captures, replays and sweeps, {:.1}",
                self.updates,
                self.round,
                (self.round - self.total) / float(self.updates - 1)
            ));
        }
        lines.join("\n")
    }
}
