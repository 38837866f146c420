//! The receipt: a run's configuration and results for machines.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::Error;
use super::evaluation::{Best, HeldOut};
use super::sources::SourceTotal;
use super::tool_numbers::ToolNumbers;
use crate::endpoint::Spent;
use crate::prompt::handoff::Keeping;
use crate::runtime::units::{Bytes, Pages, Tokens};

/// Seconds of an update by phase, and the total.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "one field for each phase")]
pub struct Seconds {
    pub capture: f64,
    pub rollout: f64,
    pub reward: f64,
    pub score: f64,
    pub replay: f64,
    pub sweep: f64,
    pub finalize: f64,
    pub update: f64,
    pub total: f64,
}

impl Seconds {
    /// Names and values of the phases, in the order of a step.
    #[must_use]
    pub fn phases(&self) -> [(&'static str, f64); 8] {
        [
            ("capture", self.capture),
            ("rollout", self.rollout),
            ("reward", self.reward),
            ("score", self.score),
            ("replay", self.replay),
            ("sweep", self.sweep),
            ("finalize", self.finalize),
            ("update", self.update),
        ]
    }

    /// Adds another update's seconds.
    pub fn add(&mut self, other: &Seconds) {
        self.capture += other.capture;
        self.rollout += other.rollout;
        self.reward += other.reward;
        self.score += other.score;
        self.replay += other.replay;
        self.sweep += other.sweep;
        self.finalize += other.finalize;
        self.update += other.update;
        self.total += other.total;
    }
}

/// Updates of a run that raised one alarm.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "names say everything")]
pub struct AlarmSpan {
    pub first_update: u64,
    pub last_update: u64,
    /// Updates that raised it.
    pub updates: u64,
    /// The watched number in the last of them; absent where it was not finite.
    pub last_value: Option<f64>,
}

/// Bytes of one kind by rank, in each memory space.
#[derive(Clone, Debug, Default, Serialize)]
#[expect(missing_docs, reason = "one field for each memory space")]
pub struct KindBytes {
    pub device: Vec<Bytes>,
    pub host: Vec<Bytes>,
}

/// Peak memory of one phase by rank, over all its runs. Kinds need not peak at one moment.
#[derive(Clone, Debug, Serialize)]
pub struct PhaseMemory {
    /// Name of the phase.
    pub phase: &'static str,
    /// Peak of the device's allocator.
    pub device_peak: Vec<Bytes>,
    /// Peak of the pools in host memory.
    pub host_peak: Vec<Bytes>,
    /// Peaks of the ledger's kinds.
    pub kinds: BTreeMap<&'static str, KindBytes>,
    /// Peak of the device's allocator minus the ledger's peak: a lower bound of graphs and intermediates.
    pub scratch: Vec<Bytes>,
}

/// One check of a gate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// Unique within the gate.
    pub name: String,
    /// The measured value.
    pub value: serde_json::Value,
    /// The limit in words.
    pub limit: String,
    /// Whether the value is within the limit.
    pub passed: bool,
    /// What a failure means.
    pub means: String,
}

/// What all adapter pairs of a run have in common. Only runs with equal forms are compared.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct AdapterForm {
    /// Inner width of a pair.
    pub rank: u64,
    /// Numerator of the scale alpha / rank.
    pub alpha: f64,
    /// Projections that carry a pair, in the family's order.
    pub targets: Vec<String>,
}

/// One run, or one gate.
#[derive(Debug, Default, Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "separate facts of a record, not states")]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Receipt {
    /// Name of the gate; `None` for a training run.
    pub gate: Option<&'static str>,
    /// Whether the run came to its end and something was trained, and for a gate, whether every check held.
    pub passed: bool,
    /// Checks of the gate; empty for a training run.
    pub checks: Vec<Check>,
    /// What the gate could not check, with the reason.
    pub not_checked: Vec<String>,
    /// Whether the gate ran although the one below it had not passed.
    pub forced: bool,
    /// Divisor of the gate's lengths and page size.
    pub scale: u64,
    /// Whether the run stopped before its end on request, with a checkpoint; absent otherwise.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub stopped: bool,
    /// Whether it was an alarm of `[alarm]` that stopped the run; absent otherwise.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub stopped_by_alarm: bool,
    /// Alarms that were raised, by name; absent where there were none.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub alarms: BTreeMap<String, AlarmSpan>,
    /// Time of writing, UTC, RFC 3339.
    pub finished: String,
    /// Commit that the binary was built from.
    pub commit: &'static str,
    /// SHA-256 of the configuration that all ranks share.
    pub config_digest: String,
    /// Digest of the checkpoint.
    pub model_digest: String,
    /// Form of the trained adapters.
    pub adapter: AdapterForm,
    pub gradient: String,
    /// Number format of weights and activations.
    pub dtype: String,
    /// Ranks of the world.
    pub ranks: usize,
    /// Ranks that share a prompt.
    pub cp_size: usize,
    /// Why so many, where the configuration leaves it open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cp_size_because: Option<String>,
    /// Longest prompt and answer together.
    pub positions: Tokens,
    pub prompt_len: Tokens,
    pub answer_len: Tokens,
    /// Answers of a group.
    pub group_size: u64,
    /// Updates made, those before a resume included.
    pub steps: u64,
    /// Calls of the optimizer, those before a resume included.
    pub optimizer_calls: u64,
    /// Updates whose gradient was not 0, those before a resume included.
    pub updates_with_gradient: u64,
    /// Layers of the model.
    pub layers: usize,
    /// How many different layers each phase went through, on the rank with the fewest.
    pub layers_by_phase: BTreeMap<&'static str, u64>,
    /// Names of adapter tensors B that this run did not change.
    pub lora_b_unmoved: Vec<String>,
    /// Pages of the last prompt by rank.
    pub pages_per_rank: Vec<Pages>,
    /// Storage of those pages by rank.
    pub page_bytes_per_rank: Vec<Bytes>,
    /// Seconds of all updates on rank 0.
    pub seconds: Seconds,
    /// Seconds in which rank 0 pinned host memory before capture.
    pub pinning_seconds: f64,
    /// Seconds in which the computation waited for copies, over all updates, by rank.
    pub stage_wait_seconds: Vec<f64>,
    /// Device of rank 0.
    pub device: String,
    /// Peak of the device's allocator by rank, over all phases: weights, stages, graphs and scratch.
    pub peak_device_bytes: Vec<Bytes>,
    /// Peak of the host pools by rank, over all phases: pages and saved hidden states.
    pub peak_host_bytes: Vec<Bytes>,
    /// Most memory that libtorch's allocator had reserved on the GPU, by rank; 0 without a GPU.
    pub reserved_device_bytes: Vec<Bytes>,
    /// Rank 0's sum in the plan, on the device.
    pub plan_device_bytes: Bytes,
    /// Rank 0's sum in the plan, in host memory.
    pub plan_host_bytes: Bytes,
    /// Peak memory by phase.
    pub memory: Vec<PhaseMemory>,
    /// Where pages and tail inputs waited for the sweep.
    pub keeping: Keeping,
    /// Name of the attention kernel.
    pub attention_kernel: &'static str,
    /// Name of what computed index scores; absent where no layer has an index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index_scores: Option<&'static str>,
    /// Name of what computed gated delta rules; absent where no layer has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta_rule: Option<&'static str>,
    /// Whether ranks exchanged tensors from GPU to GPU; otherwise through host memory.
    pub direct: bool,
    /// Rows of a segment and of a log-probability chunk.
    pub micro_blocks: [Tokens; 2],
    /// Share of capture in the updates' seconds.
    pub capture_share: f64,
    /// Seconds that one more answer adds, from this gate and the one with fewer answers; absent elsewhere.
    pub seconds_per_further_answer: Option<f64>,
    /// Bytes that one more answer adds to the device's peak, likewise; may be negative.
    pub device_bytes_per_further_answer: Option<f64>,
    /// Loss of the first update.
    pub loss_first: f64,
    /// Loss of the last update.
    pub loss: f64,
    /// Rewards of the last group that rank 0 trained on.
    pub rewards: Vec<Option<f64>>,
    pub advantages: Vec<Option<f64>>,
    /// Smallest and largest ratio of the first replay; absent where there was no token.
    pub ratio_first: Option<[f64; 2]>,
    /// Largest difference between a token's log-probability at sampling and its score, over all updates; absent where no
    /// token was sampled.
    pub sampled_gap: Option<f64>,
    /// Calls in the sampled answers of all updates; absent where nobody answers them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<ToolNumbers>,
    /// Above this `sampled_gap` the user is warned.
    pub gap_warn: f64,
    /// Norm of the last update's gradient before clipping.
    pub grad_norm: f64,
    /// What held-out prompts have shown before the first and after the last update; null twice where the sets have names.
    pub held_out: [Option<HeldOut>; 2],
    /// The same by the name of the set, where the sets have names.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub held_out_sets: BTreeMap<String, [Option<HeldOut>; 2]>,
    /// What each source of the data has given, by its name; absent where there is one file.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, SourceTotal>,
    /// What was sent to the judges, those of earlier starts included; absent where nothing was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub judge: Option<Spent>,
    /// The best checkpoint that is kept; absent without `checkpoint.keep_best`, or before its first evaluation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
    /// SHA-256 of the adapters by rank.
    pub adapter_digest: Vec<String>,
}

/// Writes `receipt.json` into `folder` by a rename, so that no reader sees half of it; makes the folder if it is absent.
///
/// # Errors
/// When it cannot be written.
pub fn write_receipt(folder: &Path, receipt: &Receipt) -> Result<(), Error> {
    let file = folder.join("receipt.json");
    let new = folder.join("receipt.json.new");
    let text = serde_json::to_string_pretty(receipt).map_err(std::io::Error::from);
    let written = text.and_then(|text| {
        fs::create_dir_all(folder)?;
        fs::write(&new, text + "\n")?;
        fs::rename(&new, &file)
    });
    written.map_err(|source| Error::Write { file, source })
}
