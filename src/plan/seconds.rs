//! Predicts the seconds of a step on one group. Each phase takes the larger of two times: operations divided by the
//! device's rates, and copied bytes divided by the bus's rate.
//!
//! Rates are inputs. The ones here were measured on one NVIDIA H200 (docs/benchmarks.md), or are assumptions where a comment
//! says so; the command line takes others. Launches are counted in rollout only: where another phase has small operations,
//! launches set its pace and the prediction is too short. With the machine's own rates ([`super::measured`]) whole layers were
//! measured, launches among them.

use serde::Serialize;

use super::drawing::drawer;
use super::offload_choice::OffloadChoice;
use super::operations::Work;
use super::work::StepWork;
use crate::config::RunConfig;
use crate::model::shape::{Mix, Shape};
use crate::model::token::Drawer;
use crate::runtime::failure::Phase;
use crate::runtime::units::float;

/// What a device does in one second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// Matrix products, TFLOP/s.
    pub matmul: f64,
    /// Causal attention, forward, TFLOP/s.
    pub attention_forward: f64,
    /// Its backward, TFLOP/s, counted as 2.5 forwards.
    pub attention_backward: f64,
    /// Attention over gathered keys, forward, TFLOP/s: reading and writing keys and scores sets its pace.
    pub gathered_forward: f64,
    /// Its backward, TFLOP/s, counted as 2.5 forwards.
    pub gathered_backward: f64,
    /// Index scores with the choice of the largest, TFLOP/s.
    pub choosing: f64,
    /// Grouped products of experts, TFLOP/s.
    pub experts: f64,
    /// Gated delta rules, forward, TFLOP/s.
    pub delta_forward: f64,
    /// Their backward, TFLOP/s, counted as 2.5 forwards.
    pub delta_backward: f64,
    /// Copies between host and device, each way, GB/s for each rank.
    pub host: f64,
    /// Reads of the device's own memory, GB/s.
    pub memory: f64,
    /// From device to device, each way, GB/s.
    pub between: f64,
    /// What a layer of a sampled token takes besides reading the device's memory, microseconds.
    pub layer: f64,
    /// A message between ranks that overlaps no computation, microseconds.
    pub message: f64,
    /// Share of the kernels' and the memory's rates that a phase reaches.
    pub efficiency: f64,
}

/// Attention of an H200 at one head width, in TFLOP/s.
struct HeadRates {
    head_dim: u64,
    forward: f64,
    backward: f64,
}

/// As measured, the narrowest first.
const H200_ATTENTION: [HeadRates; 3] = [
    HeadRates { head_dim: 64, forward: 482.0, backward: 467.0 },
    HeadRates { head_dim: 128, forward: 658.0, backward: 536.0 },
    HeadRates { head_dim: 256, forward: 654.0, backward: 369.0 },
];

impl Rates {
    /// Those of an H200 in bfloat16, with attention at the measured head width that is nearest to the widest of `shape`, and
    /// tokens by what draws the answers of `config`.
    #[must_use]
    pub fn h200(config: &RunConfig, shape: &Shape) -> Rates {
        let width = shape.most(|layer| match layer.mix {
            Mix::Grouped { head_dim, .. } => head_dim,
            Mix::Latent { latent, .. } => latent,
            Mix::Delta { .. } => 0,
        });
        let [first, others @ ..] = &H200_ATTENTION;
        let distance = |rates: &HeadRates| rates.head_dim.abs_diff(width);
        let attention =
            others.iter().fold(first, |near, next| if distance(next) < distance(near) { next } else { near });
        Rates {
            matmul: 696.0,
            attention_forward: attention.forward,
            attention_backward: attention.backward,
            // 113 rows of 64 heads over 2,048 keys of 576 in 0.7 ms, and 1.9 ms in backward.
            gathered_forward: 46.0,
            gathered_backward: 42.0,
            // The compiled kernel over 1,048,576 keys (decision 0036).
            choosing: 511.0,
            // 4,096 rows, 8 of 128 experts each.
            experts: 300.0,
            // The compiled kernel, 131,072 rows of 16 key and 48 value heads of 128: 4.08 ms, and 16.7 ms back (decision 0040).
            delta_forward: 253.0,
            delta_backward: 154.0,
            host: 54.6,
            // Nominal: HBM3e of an H200, and half of NVLink's 900 GB/s for both ways. Neither is measured yet.
            memory: 4800.0,
            between: 450.0,
            // Measured on sampled tokens: with kernels of a decode step, and with some 100 launches of 20 µs (docs/benchmarks.md).
            layer: if drawer(config, shape, config.grpo.group_size) == Drawer::Kernels { 40.0 } else { 2000.0 },
            // An assumption: a gather among eight ranks takes about 30 µs.
            message: 4.0,
            efficiency: 0.8,
        }
    }
}

/// The prediction of one phase on one rank.
#[derive(Clone, Copy, Debug, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct PhaseSeconds {
    pub phase: Phase,
    /// Matrix products, those of experts among them, 10¹² operations.
    pub products_tera: f64,
    /// Attention, forward and backward, 10¹² operations.
    pub attention_tera: f64,
    /// Attention over gathered keys, forward and backward, 10¹² operations.
    pub gathered_tera: f64,
    /// Index scores, 10¹² operations.
    pub choosing_tera: f64,
    /// Gated delta rules, forward and backward, 10¹² operations.
    pub delta_tera: f64,
    /// Seconds behind `compute`, each term by itself.
    pub terms: Terms,
    /// Bytes between host and device, in the direction that has more.
    pub copied_bytes: f64,
    /// Seconds of computing; in rollout with launches and messages.
    pub compute: f64,
    /// Seconds of the copies, which overlap the computation.
    pub copies: f64,
    /// The larger of `compute` and `copies`.
    pub seconds: f64,
}

/// Seconds of the parts of one phase, at the share of the rates that a phase reaches. In rollout the device's memory may set the
/// pace instead. With measured rates `products` are all that rows do by themselves, elementwise work and launches among it,
/// `attention` and `attention_backward` what they do with the rows before them in capture and score, and in replay and sweep, and
/// `waiting` has what a phase takes once.
#[derive(Clone, Copy, Debug, Serialize)]
#[expect(missing_docs, reason = "names say what is not described")]
pub struct Terms {
    /// Matrix products, those of experts among them.
    pub products: f64,
    /// Attention and index scores, forward.
    pub attention: f64,
    /// Backward of attention.
    pub attention_backward: f64,
    /// Gated delta rules, forward, and maps of the state.
    pub delta: f64,
    pub delta_backward: f64,
    /// Convolutions, norms and gates around delta rules, at the memory's pace.
    pub moved: f64,
    /// Launches, and messages that no computation hides.
    pub waiting: f64,
}

/// The prediction of a step on one group.
#[derive(Clone, Debug, Serialize)]
pub struct Seconds {
    /// Rates behind the prediction.
    pub rates: Rates,
    /// Where measured rates come from; absent with published ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<String>,
    /// Values behind the prediction that the measurements lack, so that published ones stand in, in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub published: Vec<String>,
    /// How far the plan lies outside of what was measured, in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub outside: Vec<String>,
    /// The phases in their order.
    pub phases: Vec<PhaseSeconds>,
    /// Sum over the phases.
    pub total: f64,
    /// Updates on the group.
    pub updates: u64,
    /// Seconds of all updates: each later update has a capture, a replay and a sweep of its own.
    pub round: f64,
}

/// Predicts the rollout alone, in seconds, with answers of the greatest length.
pub(super) fn rollout(config: &RunConfig, ranks: u64, shape: &Shape, choice: OffloadChoice, rates: &Rates) -> f64 {
    phase_seconds(Phase::Rollout, &StepWork::new(config, ranks, shape, choice).rollout(), rates).seconds
}

pub(super) fn phase_seconds(phase: Phase, work: &Work, rates: &Rates) -> PhaseSeconds {
    const TERA: f64 = 1e12;
    const GIGA: f64 = 1e9;
    const MICRO: f64 = 1e-6;
    let reached = |amount: f64, rate: f64| amount / (rate * rates.efficiency);
    let terms = Terms {
        products: reached(work.products, rates.matmul * TERA) + reached(work.experts, rates.experts * TERA),
        attention: reached(work.attention_forward, rates.attention_forward * TERA)
            + reached(work.gathered_forward, rates.gathered_forward * TERA)
            + reached(work.choosing, rates.choosing * TERA),
        attention_backward: reached(work.attention_backward, rates.attention_backward * TERA)
            + reached(work.gathered_backward, rates.gathered_backward * TERA),
        delta: reached(work.delta_forward, rates.delta_forward * TERA),
        delta_backward: reached(work.delta_backward, rates.delta_backward * TERA),
        moved: reached(work.moved, rates.memory * GIGA),
        waiting: (work.layer_steps * rates.layer + work.messages * rates.message) * MICRO
            + work.message_bytes / (rates.between * GIGA),
    };
    let Terms { products, attention, attention_backward, delta, delta_backward, moved, waiting } = terms;
    let at_rates = products + attention + attention_backward + delta + delta_backward + moved;
    let reading = reached(work.reads, rates.memory * GIGA);
    let compute = at_rates.max(reading) + waiting;
    let copied_bytes = work.bytes_in.max(work.bytes_out);
    let copies = copied_bytes / (rates.host * GIGA);
    PhaseSeconds {
        phase,
        products_tera: (work.products + work.experts) / TERA,
        attention_tera: (work.attention_forward + work.attention_backward) / TERA,
        gathered_tera: (work.gathered_forward + work.gathered_backward) / TERA,
        choosing_tera: work.choosing / TERA,
        delta_tera: (work.delta_forward + work.delta_backward) / TERA,
        terms,
        copied_bytes,
        compute,
        copies,
        seconds: compute.max(copies),
    }
}

impl Terms {
    /// The terms that count, in one line.
    fn text(&self, measured: bool) -> String {
        let [products, waiting] =
            if measured { ["the layers' rows", "once, and messages"] } else { ["products", "launches and messages"] };
        let named = [
            (products, self.products),
            ("attention", self.attention),
            ("its backward", self.attention_backward),
            ("delta rules", self.delta),
            ("their backward", self.delta_backward),
            ("convolutions, norms, gates", self.moved),
            (waiting, self.waiting),
        ];
        let counted = named.iter().filter(|(_, seconds)| *seconds >= 0.05);
        let words: Vec<String> = counted.map(|(name, seconds)| format!("{name} {seconds:.1}")).collect();
        format!("                {}", words.join(", "))
    }
}

impl Seconds {
    /// What the prediction follows, in words.
    fn pace(&self) -> String {
        let Rates { matmul, attention_forward, attention_backward, host, efficiency, .. } = self.rates;
        match &self.measured {
            Some(source) => format!("from {source}"),
            None => format!(
                "at published rates: {:.0} % of {matmul} TFLOP/s of matrix products, {attention_forward} of attention, \
                 {attention_backward} of its backward; {host} GB/s between host and device",
                efficiency * 100.0
            ),
        }
    }

    /// The lines that the command prints.
    #[must_use]
    pub fn text(&self) -> String {
        let mut lines = vec![format!("predicted seconds of a group: {:.1}, {}", self.total, self.pace())];
        if !self.published.is_empty() {
            lines.push(format!("  not in that file, so published values stand in: {}", self.published.join("; ")));
        }
        lines.extend(self.outside.iter().map(|note| format!("  warning: {note}")));
        let gathers = self.phases.iter().any(|phase| phase.gathered_tera > 0.0);
        let has_rules = self.phases.iter().any(|phase| phase.delta_tera > 0.0);
        for phase in &self.phases {
            let attention = if gathers {
                format!("{:.0} over gathered keys, {:.0} of index scores", phase.gathered_tera, phase.choosing_tera)
            } else {
                format!("{:.0} of attention", phase.attention_tera)
            };
            let attention =
                if has_rules { format!("{attention}, {:.0} of delta rules", phase.delta_tera) } else { attention };
            lines.push(format!(
                "  {:>12.1}  {:<9} compute {:.1} ({:.0} TFLOP of products, {attention}), copies {:.1} ({:.0} GB)",
                phase.seconds,
                phase.phase.to_string(),
                phase.compute,
                phase.products_tera,
                phase.copies,
                phase.copied_bytes / 1e9
            ));
            let shown = (has_rules || self.measured.is_some()) && phase.compute >= 0.05;
            lines.extend(shown.then(|| phase.terms.text(self.measured.is_some())));
        }
        let published = self.measured.is_none();
        if has_rules && published {
            let Rates { delta_forward, delta_backward, memory, .. } = self.rates;
            lines.push(format!(
                "  delta rules at {delta_forward} TFLOP/s and {delta_backward} of their backward; convolutions, norms and gates \
                 around them at {memory} GB/s of device memory"
            ));
        }
        if gathers && published {
            let Rates { gathered_forward, gathered_backward, choosing, experts, .. } = self.rates;
            lines.push(format!(
                "  attention over gathered keys at {gathered_forward} TFLOP/s and {gathered_backward} of its backward, which is \
                 the memory's pace; index scores at {choosing}; experts at {experts}"
            ));
        }
        if self.phases.iter().any(|phase| phase.phase == Phase::Rollout) {
            let Rates { memory, layer, message, .. } = self.rates;
            lines.push(format!(
                "  rollout: answers as long as may be, at {:.0} % of {memory:.0} GB/s of device memory, {layer:.0} µs a layer, \
                 {message} µs a message",
                self.rates.efficiency * 100.0
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
