//! The tables of the configuration as plain structs, for the rest of the program.
//!
//! Every field is set: defaults come from `configs/default.toml`, never from Rust code. That file and
//! `docs/configuration.md` explain the keys; these structs give types and units.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::choices::{
    ActivationCkpt, Aggregation, DeviceChoice, Dtype, Gradient, OptimizerName, Schedule, TooLong, Weights, When,
};
use super::rewards::RewardFn;
use crate::runtime::units::{Pages, Tokens};

/// `[parallel]`: how ranks share the work.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ParallelConfig {
    /// Tensor parallelism; checked to be 1.
    pub tp_size: u64,
    /// Ranks that share one prompt; absent: all ranks. Read it through [`super::RunConfig::cp_size`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cp_size: Option<u64>,
    /// Ranks over which experts are spread; divides the cp size.
    pub ep_size: u64,
    /// Pipeline parallelism; checked to be 1.
    pub pp_size: u64,
}

/// `[context]`: lengths in positions.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ContextConfig {
    /// Positions of a prompt and one answer; checked to be `prompt_len + answer_len`.
    pub max_seq_len: Tokens,
    /// Positions of the longest prompt.
    pub prompt_len: Tokens,
    /// Positions of the longest answer.
    pub answer_len: Tokens,
    /// Positions in a page; checked to be at least 1.
    pub page_size: Tokens,
    /// Pages on the rank that holds most, as the file claims; [`super::RunConfig::pages_per_rank`] computes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cp_pages_per_gpu: Option<Pages>,
}

/// `[memory]`: how long tensors live, and where.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryConfig {
    /// The prompt runs once, without autograd.
    pub prompt_no_grad: bool,
    /// Whether pages live in host memory.
    pub cpu_offload_pages: When,
    /// Whether the tail's block inputs wait in host memory.
    pub cpu_offload_inputs: When,
    /// The tail's block inputs are kept for every so many layers; 0 leaves it to the plan.
    pub inputs_every: u64,
    /// Whether the tail's attention output and log-sum-exp are kept.
    pub keep_attention: When,
    /// One layer's pages are staged at a time, not all layers' at once.
    pub layer_wise_transfer: bool,
    /// What the backward pass starts from.
    pub activation_ckpt: ActivationCkpt,
    /// Rows of a micro-block.
    pub micro_block: Tokens,
    /// Rows of a chunk of log-probabilities.
    pub head_block: Tokens,
}

/// `[optimizer]`: the update.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerConfig {
    /// The update rule.
    pub name: OptimizerName,
    /// Learning rate at the top of the schedule.
    pub lr: f64,
    /// Groups per update on each data-parallel replica.
    pub grad_accum: u64,
    /// Decay of the first and second moment, both in [0, 1).
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// L2 norm to which a longer gradient is scaled down; infinity never scales.
    pub max_grad_norm: f64,
    /// Learning rate after the warm-up.
    pub schedule: Schedule,
    /// Updates of the warm-up.
    pub warmup_steps: u64,
}

/// `[grpo]`: the objective.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct GrpoConfig {
    /// Answers of one prompt.
    pub group_size: u64,
    /// Where rewards come from.
    pub reward_fn: RewardFn,
    /// Advantages are divided by the group's population standard deviation.
    pub normalize_adv: bool,
    /// Which prompt positions carry gradient.
    pub gradient: Gradient,
    /// The ratio is at least 1 minus this.
    pub clip_low: f64,
    /// The ratio is at most 1 plus this.
    pub clip_high: f64,
    /// Weight of the k3 divergence from the starting policy; 0: none.
    pub kl_coef: f64,
    /// How token losses become one number.
    pub aggregation: Aggregation,
    /// Divisor of [`Aggregation::Constant`]; checked to stand with it and only with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub constant_divisor: Option<f64>,
    /// Divides logits before every softmax.
    pub temperature: f64,
    /// Updates from one set of frozen scores.
    pub updates_per_group: u64,
}

/// `[lora]`: the trained adapters.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LoraConfig {
    /// Inner width of an adapter pair.
    pub rank: u64,
    /// The adapter's output is scaled by `alpha / rank`.
    pub alpha: f64,
    /// Names of the projections that carry an adapter; absent: all linear layers of the family.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub targets: Option<Vec<String>>,
    /// Folder of a PEFT adapter to start from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_from: Option<PathBuf>,
}

/// `[model]`: the model that is trained.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Checkpoint folder; [`super::RunConfig::model_path`] says how to set it where it is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Number format of weights and activations.
    pub dtype: Dtype,
    /// How the frozen weights are held.
    pub weights: Weights,
    /// Random weights instead of the checkpoint's.
    pub random_init: bool,
    /// Rotary scaling instead of the checkpoint's, with the keys of its config.json.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<BTreeMap<String, serde_json::Value>>,
}

/// `[data]`: the data sets.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// JSON lines to train on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// JSON lines that are only evaluated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out: Option<PathBuf>,
    /// Prompts are shuffled with the seed in each epoch.
    pub shuffle: bool,
    /// What to do with a prompt that is longer than the plan's.
    pub too_long: TooLong,
}

/// `[run]`: the part that must be equal on all ranks; the rest is [`super::RankConfig`].
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RunTable {
    /// Seed of all random numbers.
    pub seed: u64,
    /// Updates of the run.
    pub steps: u64,
    /// Where the model computes.
    pub device: DeviceChoice,
    /// Whether tensors go from GPU to GPU without passing through the host.
    pub direct: When,
    /// Kernels that repeat bit for bit on a GPU.
    pub deterministic: bool,
    /// A trace of phases and layers is written.
    pub trace: bool,
}

/// `[rollout]`: sampling of answers. Its temperature is `grpo.temperature`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutConfig {
    /// The policy samples the answers; otherwise they come with the data.
    pub sample: bool,
    /// Tokens of an answer, its end included; absent: `context.answer_len`. Read it through
    /// [`super::RunConfig::sampled_len`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<Tokens>,
    /// Tokens are sampled from the most probable ones that together have this probability; 1: from all.
    pub top_p: f64,
    /// Tokens are sampled from this many of the most probable ones; 0: from all.
    pub top_k: u64,
    /// Whether the pages of all layers are on the device while answers are sampled.
    pub pages_on_device: When,
    /// The longest predicted time of a token, in seconds.
    pub token_sec_max: f64,
    /// Largest difference between the log-probability of a sampled token and its score without a warning; absent: by the
    /// model's dtype.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap_warn: Option<f64>,
}

/// `[reward]`: settings of the rewards that `grpo.reward_fn` names.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RewardConfig {
    /// Only the part of an answer after the last occurrence of this text is scored; absent: all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// Pattern of the reward `regex`, where a record has none of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// Field of the reward `json_field`, dotted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// Tokens up to which the reward `length` is 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length_tokens: Option<Tokens>,
    /// Program and arguments of the reward `command`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<Vec<String>>,
    /// Seconds that the program may take.
    pub command_sec: u64,
    /// File with the rubric of the reward `judge`; absent: a general one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rubric: Option<PathBuf>,
    /// Lowest and highest score that the judge may give; they become the rewards 0 and 1.
    pub judge_scale: [f64; 2],
    /// Tokens of a judge's reply, at most.
    pub judge_tokens: u64,
    /// Requests at one time.
    pub judge_parallel: u64,
    /// The largest share of an update's answers without a reward that does not stop the run.
    pub missing_share_max: f64,
}

/// `[checkpoint]`: saved states.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Updates between two checkpoints; 0: only when a run is asked to stop.
    pub every: u64,
    /// Complete checkpoints that are kept.
    pub keep: u64,
}

/// `[gate]`: staged validation.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct GateConfig {
    /// Divides a gate's lengths and the page size, so that the counts of pages stay; checked to be at least 1.
    pub scale: u64,
}

/// `[endpoint]`, the keys of settings.json: the service that judges answers. The secret key is not here: see
/// [`super::Environment::api_key`].
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EndpointConfig {
    /// Base address; [`super::RunConfig::api_base`] says how to set it where it is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_base: Option<String>,
    /// Name of the environment variable that holds the key.
    pub api_key_env: String,
    /// The model that replies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_model: Option<String>,
    /// Seconds one request may take.
    pub timeout_sec: u64,
    /// Further attempts after a failed one.
    pub max_retries: u64,
    /// Attempt n waits this to the power n seconds.
    pub retry_backoff: f64,
    /// Paths under the base address.
    pub endpoints: EndpointPaths,
    /// What the service is used for.
    pub usage: EndpointUsage,
}

/// `[endpoint.endpoints]`: paths under the base address.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EndpointPaths {
    /// Path of messages.
    pub chat: String,
    /// Path of the list of models.
    pub models: String,
}

/// `[endpoint.usage]`: what the service is used for.
#[expect(clippy::struct_excessive_bools, reason = "each stands for itself: what the service may be used for")]
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EndpointUsage {
    /// Scores for answers.
    pub reward_scoring: bool,
    /// A summary of the logs.
    pub log_summary: bool,
    /// A diagnosis of the worst answers.
    pub sample_replay: bool,
    /// Questions and answers for a data set.
    pub data_generation: bool,
    /// Questions of records may be sent for a diagnosis.
    pub prompt_text: bool,
}
