//! The receipt: what a run was and what came out, for machines.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::HeldOut;
use crate::prompt::handoff::Keeping;
use crate::runtime::units::{Bytes, Pages, Tokens};

/// Seconds by phase.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct Seconds {
    /// The prompt without a graph.
    pub capture: f64,
    /// Answers drawn from the pages.
    pub rollout: f64,
    /// Answers scored by what they say.
    pub reward: f64,
    /// Frozen log-probabilities.
    pub score: f64,
    /// Answers up to the top layer.
    pub replay: f64,
    /// From the top layer down.
    pub sweep: f64,
    /// The sum over ranks.
    pub finalize: f64,
    /// The optimizer's step.
    pub update: f64,
    /// All of it.
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

    /// The phases, and all of it.
    #[must_use]
    pub fn by_phase(&self) -> [(&'static str, f64); 9] {
        let [a, b, c, d, e, f, g, h] = self.phases();
        [a, b, c, d, e, f, g, h, ("all updates", self.total)]
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

/// Bytes of one kind by rank, in each memory space.
#[derive(Clone, Debug, Default, Serialize)]
pub struct KindBytes {
    /// On the device.
    pub device: Vec<Bytes>,
    /// In host memory.
    pub host: Vec<Bytes>,
}

/// The most memory that one phase held, over all its turns, by rank. Peaks of kinds need not come at one moment.
#[derive(Clone, Debug, Serialize)]
pub struct PhaseMemory {
    /// The phase.
    pub phase: &'static str,
    /// Peak of the device's allocator.
    pub device_peak: Vec<Bytes>,
    /// Peak of what waits in host memory.
    pub host_peak: Vec<Bytes>,
    /// Peaks of the ledger's kinds.
    pub kinds: BTreeMap<&'static str, KindBytes>,
    /// Peak of the device's allocator minus the ledger's: graphs and intermediates, at the least.
    pub scratch: Vec<Bytes>,
}

/// What a gate looked at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// Its name; one gate has each once.
    pub name: String,
    /// What was found.
    pub value: serde_json::Value,
    /// What it is held to, in words.
    pub limit: String,
    /// Whether it held.
    pub passed: bool,
    /// What it means where it did not.
    pub means: String,
}

/// What all adapter pairs of a run have in common; runs that train others are not compared.
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
pub struct Receipt {
    /// The gate that it is of; none for a training run.
    pub gate: Option<&'static str>,
    /// Whether the run came to its end, and for a gate, whether every check held.
    pub passed: bool,
    /// What the gate looked at; empty for a training run.
    pub checks: Vec<Check>,
    /// What the gate could not look at, with the reason.
    pub not_checked: Vec<String>,
    /// Whether the gate ran although the one below it had not passed.
    pub forced: bool,
    /// What the gate's lengths and page size were divided by.
    pub scale: u64,
    /// Whether it was asked to stop before its end, and stands in a checkpoint; absent where it was not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub stopped: bool,
    /// When it was written, UTC, RFC 3339.
    pub finished: String,
    /// The source it was built from.
    pub commit: &'static str,
    /// SHA-256 of the configuration that all ranks share.
    pub config_digest: String,
    /// Digest of the checkpoint.
    pub model_digest: String,
    /// What was trained.
    pub adapter: AdapterForm,
    /// Gradient mode.
    pub gradient: String,
    /// Number format of weights and activations.
    pub dtype: String,
    /// Ranks of the world.
    pub ranks: usize,
    /// Ranks that share a prompt.
    pub cp_size: usize,
    /// Longest prompt and answer together.
    pub positions: Tokens,
    /// Longest prompt.
    pub prompt_len: Tokens,
    /// Longest answer.
    pub answer_len: Tokens,
    /// Answers of a group.
    pub group_size: u64,
    /// Updates made, those before a resume included.
    pub steps: u64,
    /// Calls of the optimizer, those before a resume included.
    pub optimizer_calls: u64,
    /// Layers of the model.
    pub layers: usize,
    /// How many different layers each phase went through, on the rank with the fewest.
    pub layers_by_phase: BTreeMap<&'static str, u64>,
    /// Adapter tensors B that this run has left as they were.
    pub lora_b_unmoved: Vec<String>,
    /// Pages of the last prompt by rank.
    pub pages_per_rank: Vec<Pages>,
    /// Storage of those pages by rank.
    pub page_bytes_per_rank: Vec<Bytes>,
    /// Seconds of all updates on rank 0.
    pub seconds: Seconds,
    /// Seconds in which rank 0 pinned host memory before capture.
    pub pinning_seconds: f64,
    /// Seconds in which the computation stood still for copies, over all updates, by rank.
    pub stage_wait_seconds: Vec<f64>,
    /// Where rank 0 computes.
    pub device: String,
    /// Peak of the device's allocator by rank, the most of all phases: graphs, scratch, stages and weights.
    pub peak_device_bytes: Vec<Bytes>,
    /// Peak of host pools by rank, the most of all phases: pages and saved hidden states.
    pub peak_host_bytes: Vec<Bytes>,
    /// The most that libtorch's allocator had taken from the GPU, by rank; 0 without one.
    pub reserved_device_bytes: Vec<Bytes>,
    /// Rank 0's sum in the plan, on the device.
    pub plan_device_bytes: Bytes,
    /// Rank 0's sum in the plan, in host memory.
    pub plan_host_bytes: Bytes,
    /// The most memory of each phase.
    pub memory: Vec<PhaseMemory>,
    /// What was kept where for the way back.
    pub keeping: Keeping,
    /// What computed attention.
    pub attention_kernel: &'static str,
    /// Whether tensors went from GPU to GPU between ranks; else through host memory.
    pub direct: bool,
    /// Rows of a segment and of a log-probability chunk.
    pub micro_blocks: [Tokens; 2],
    /// Share of capture in the updates' seconds.
    pub capture_share: f64,
    /// Seconds that a further answer takes, from this gate and the one with fewer answers; absent elsewhere.
    pub seconds_per_further_answer: Option<f64>,
    /// Bytes that a further answer adds to the device's peak, likewise; may be negative.
    pub device_bytes_per_further_answer: Option<f64>,
    /// Loss of the first update.
    pub loss_first: f64,
    /// Loss of the last update.
    pub loss: f64,
    /// Rewards of the last group that rank 0 trained on.
    pub rewards: Vec<Option<f64>>,
    /// Their advantages.
    pub advantages: Vec<Option<f64>>,
    /// Smallest and largest ratio of the first replay; absent where there was no token.
    pub ratio_first: Option<[f64; 2]>,
    /// Largest distance of a drawn token's log-probability from its score, over all updates; absent where none was drawn.
    pub sampled_gap: Option<f64>,
    /// Beyond it a user is warned.
    pub gap_warn: f64,
    /// Norm of the last update's gradient before clipping.
    pub grad_norm: f64,
    /// Held-out margin before the first and after the last update.
    pub held_out: [Option<HeldOut>; 2],
    /// SHA-256 of the adapters by rank.
    pub adapter_digest: Vec<String>,
}
