//! What a bench has measured, and the table of it.

use serde::Serialize;
use tch::Tensor;

use super::draw::Draw;
use super::rates::{self, Rates};
use super::scaling::{self, Row};
use crate::prompt::handoff::Keeping;
use crate::runtime::units::{Bytes, Tokens};
use crate::tensor::kernels::Kernel;

/// One schedule at one group size, on this rank.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Run {
    /// `paged` or `conventional`.
    pub schedule: &'static str,
    pub gradient: String,
    pub group: u64,
    /// The prompt without a graph.
    pub capture_seconds: f64,
    pub score_seconds: f64,
    /// Answers, forward and backward.
    pub answers_seconds: f64,
    /// Prompt rows that carry gradient, backward.
    pub tail_seconds: f64,
    pub total_seconds: f64,
    /// Of these: the computation stood still for copies between host and device.
    pub stage_wait_seconds: f64,
    /// Before the clock started: host memory was pinned.
    pub pinning_seconds: f64,
    /// Copied to the device.
    pub bytes_in: Bytes,
    /// Copied from it to host memory.
    pub bytes_out: Bytes,
    /// Matrix products, attention and delta rules of the capture, TFLOP/s; 0 without one.
    pub capture_rate: f64,
    /// Peak of graphs, scratch and stages above what lay there before the run.
    pub device_bytes: Bytes,
    /// Peak of everything that lay on the device.
    pub peak_device_bytes: Bytes,
    /// Peak of host pools.
    pub host_bytes: Bytes,
    /// The group's loss on this rank.
    pub loss: f64,
    #[serde(skip)]
    pub(super) gradients: Vec<Tensor>,
}

/// What was measured on all ranks, one run for each group size and gradient mode.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Report {
    /// Parameters of the model.
    pub parameters: u64,
    /// The model's dtype.
    pub dtype: &'static str,
    pub ranks: usize,
    /// Threads of a rank.
    pub threads: i32,
    pub prompt: Tokens,
    /// Tokens of an answer.
    pub answer: Tokens,
    /// Where the model computed.
    pub device: String,
    /// Whether tensors went from GPU to GPU between ranks; else through host memory.
    pub direct: bool,
    /// What was kept where for the way back.
    pub keeping: Keeping,
    /// Rows of a segment.
    pub micro_block: Tokens,
    /// What the device can do.
    pub rates: Rates,
    /// Name of what computed attention.
    pub attention_kernel: &'static str,
    /// Name of what computed index scores; absent where no layer has an index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index_scores: Option<&'static str>,
    /// Name of what computed gated delta rules; absent where no layer has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta_rule: Option<&'static str>,
    /// What one pass over the prompt asks of it, all ranks together.
    pub work: rates::Work,
    /// The source it was built from.
    pub commit: &'static str,
    pub runs: Vec<Run>,
    /// Sampled tokens, where they were asked for; then no update runs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub draws: Vec<Draw>,
    /// Largest relative L2 distance of an adapter gradient, exact against conventional, by group size.
    pub apart: Vec<(u64, f64)>,
    /// Updates on parts of the ranks, where they were asked for; then none runs on all of them alone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub scaling: Vec<Row>,
}

impl Report {
    /// The report as a table.
    #[must_use]
    pub fn text(&self) -> String {
        let mut lines = vec![
            format!(
                "{} parameters, {}, {} ranks × {} threads on {}, prompt {}, answer {}",
                self.parameters, self.dtype, self.ranks, self.threads, self.device, self.prompt, self.answer
            ),
            format!(
                "attention {:?}: {:.3} TFLOP/s forward, {:.3} backward; matrix products {:.3}; copies {:.1} GB/s in, {:.1} out, {:.0} on the device; {:.1} us a launch",
                self.rates.kernel,
                self.rates.attention_forward,
                self.rates.attention_backward,
                self.rates.matrix,
                self.rates.copy_in,
                self.rates.copy_out,
                self.rates.copy_device,
                self.rates.launch_us
            ),
        ];
        lines.extend(self.draws.iter().map(Draw::text));
        if !self.scaling.is_empty() {
            lines.extend(scaling::table(&self.scaling));
        }
        lines.extend((!self.runs.is_empty()).then(|| {
            format!(
                "{:<13} {:<9} {:>5} {:>9} {:>8} {:>9} {:>8} {:>9} {:>8} {:>12} {:>12}",
                "schedule",
                "gradient",
                "group",
                "capture",
                "score",
                "answers",
                "tail",
                "total s",
                "waits s",
                "device",
                "host"
            )
        }));
        lines.extend(self.runs.iter().map(|run| {
            format!(
                "{:<13} {:<9} {:>5} {:>9.2} {:>8.2} {:>9.2} {:>8.2} {:>9.2} {:>8.2} {:>12} {:>12}",
                run.schedule,
                run.gradient,
                run.group,
                run.capture_seconds,
                run.score_seconds,
                run.answers_seconds,
                run.tail_seconds,
                run.total_seconds,
                run.stage_wait_seconds,
                run.peak_device_bytes.to_string(),
                run.host_bytes.to_string()
            )
        }));
        let share = |run: &Run| 100.0 * run.capture_rate / self.rates.attention_forward;
        // On a CPU matrix products are as much work as attention, and slower: a share of its rate would say nothing.
        let has_rate = |run: &&Run| run.capture_rate > 0.0 && self.rates.kernel != Kernel::Cpu;
        lines.extend(self.runs.iter().filter(has_rate).map(|run| {
            format!(
                "capture for {} at group {}: {:.3} TFLOP/s, {:.0} % of the attention kernel's rate",
                run.gradient,
                run.group,
                run.capture_rate,
                share(run)
            )
        }));
        lines.extend(
            self.apart
                .iter()
                .map(|(group, apart)| format!("group {group}: exact and conventional gradients are {apart:.1e} apart")),
        );
        lines.join("\n")
    }
}
