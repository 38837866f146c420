//! The tables of the configuration as plain structs, for the rest of the program.
//!
//! Every field is set: defaults come from `configs/default.toml`, never from Rust code. That file explains every key; the
//! comments here say only what a reader of the field must know besides.

#![expect(missing_docs, reason = "configs/default.toml explains every key, and a test compares the two lists")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::choices::{
    ActivationCkpt, Aggregation, Deviation, DeviceChoice, Dtype, EndpointStyle, Gradient, ImportanceWeights,
    KlEstimator, Loss, OptimizerName, ScaleRewards, Schedule, SentTemperature, TooLong, Weights, When,
};
use super::data_source::DataSource;
use super::held_out::HeldOutFiles;
use super::judges::Judges;
use super::rewards::{RewardFn, RewardName, WeightedReward};
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
    pub prompt_len: Tokens,
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
    pub prompt_no_grad: bool,
    pub cpu_offload_pages: When,
    pub cpu_offload_inputs: When,
    pub inputs_every: u64,
    pub keep_attention: When,
    pub layer_wise_transfer: bool,
    pub activation_ckpt: ActivationCkpt,
    /// 0: chosen for the device ([`MemoryConfig::micro_rows`] without one).
    pub micro_block: Tokens,
    pub head_block: Tokens,
}

/// Rows of a micro-block where neither the configuration nor a device says how many.
pub const MICRO_BLOCK_DEFAULT: Tokens = Tokens(2048);

impl MemoryConfig {
    /// Rows of a micro-block as configured, else the default.
    #[must_use]
    pub fn micro_rows(&self) -> Tokens {
        if self.micro_block == Tokens(0) { MICRO_BLOCK_DEFAULT } else { self.micro_block }
    }
}

/// `[optimizer]`: the update.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerConfig {
    pub name: OptimizerName,
    pub lr: f64,
    pub grad_accum: u64,
    /// Decay of the first and second moment, both in [0, 1).
    pub betas: [f64; 2],
    pub eps: f64,
    pub weight_decay: f64,
    pub max_grad_norm: f64,
    pub schedule: Schedule,
    /// Updates of the decay; absent: `run.steps`. Read it through [`super::RunConfig::schedule_steps`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule_steps: Option<u64>,
    pub warmup_steps: u64,
}

/// `[grpo]`: the objective.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct GrpoConfig {
    pub group_size: u64,
    /// Absent: [`crate::train`] decides by the data, or refuses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_fn: Option<RewardFn>,
    pub scale_rewards: ScaleRewards,
    pub deviation: Deviation,
    /// Floor of the deviation that advantages are divided by, in units of the reward; 0: none.
    pub std_min: f64,
    pub gradient: Gradient,
    pub loss: Loss,
    pub clip_low: f64,
    pub clip_high: f64,
    /// The largest ratio that counts for a negative advantage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_dual: Option<f64>,
    pub kl_coef: f64,
    pub kl_estimator: KlEstimator,
    pub mask_truncated: bool,
    pub aggregation: Aggregation,
    /// Divisor of [`Aggregation::Constant`]; checked to stand with it and only with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub constant_divisor: Option<f64>,
    pub temperature: f64,
    pub updates_per_group: u64,
    /// The largest drift of reused pages; checked to stand with [`RunTable::reuse_capture`] above 1 and only with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reuse_drift_max: Option<f64>,
    pub importance: ImportanceWeights,
    /// The least importance weight of a mask; absent: 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub importance_min: Option<f64>,
    /// The largest importance weight; checked to stand with weights and only with them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub importance_max: Option<f64>,
}

impl GrpoConfig {
    /// The addends of the reward; none where no source names a reward.
    #[must_use]
    pub fn rewards(&self) -> &[WeightedReward] {
        self.reward_fn.as_ref().map_or(&[], RewardFn::parts)
    }

    /// Whether the reward is this one alone.
    #[must_use]
    pub fn has_only(&self, name: RewardName) -> bool {
        self.reward_fn.as_ref().is_some_and(|reward| reward.is_only(name))
    }
}

/// `[lora]`: the trained adapters.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LoraConfig {
    pub rank: u64,
    pub alpha: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub targets: Option<Vec<String>>,
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
    pub dtype: Dtype,
    pub weights: Weights,
    pub random_init: bool,
    pub allow_zero_weights: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<BTreeMap<String, serde_json::Value>>,
}

/// `[data]`: the data sets.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// At least one; checked to stand without `path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sources: Option<Vec<DataSource>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out: Option<HeldOutFiles>,
    pub shuffle: bool,
    pub too_long: TooLong,
}

/// `[run]`: the part that must be equal on all ranks; the rest is [`super::RankConfig`].
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RunTable {
    pub seed: u64,
    pub steps: u64,
    /// Updates that one capture serves.
    pub reuse_capture: u64,
    pub device: DeviceChoice,
    pub direct: When,
    pub deterministic: bool,
    pub trace: bool,
}

/// `[rollout]`: sampling of answers. Its temperature is `grpo.temperature`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutConfig {
    pub sample: bool,
    /// Tokens of an answer, its end included; absent: `context.answer_len`. Read it through
    /// [`super::RunConfig::sampled_len`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<Tokens>,
    pub top_p: f64,
    pub top_k: u64,
    pub pages_on_device: When,
    pub keep_choices: bool,
    pub token_sec_max: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap_warn: Option<f64>,
}

/// `[reward]`: settings of the rewards that `grpo.reward_fn` names.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RewardConfig {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length_tokens: Option<Tokens>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<Vec<String>>,
    pub command_sec: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rubric: Option<PathBuf>,
    pub judge_scale: [f64; 2],
    pub judge_temperature: SentTemperature,
    pub judge_tokens: u64,
    pub judge_parallel: u64,
    /// Characters of the prompt that the judge gets. Read it through [`super::RunConfig::judge`].
    pub judge_prompt_chars: u64,
    /// Judges with names. Read them through [`super::RunConfig::judge`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub judges: Option<Judges>,
    pub missing_share_max: f64,
}

/// `[tools]`: calls in sampled answers.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ToolsConfig {
    /// Absent: calls are text as any other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<Vec<String>>,
    pub call_start: String,
    pub call_end: String,
    /// Absent, and then `reply_end` too: as the chat template has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reply_start: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reply_end: Option<String>,
    pub turns: u64,
    pub tokens: Tokens,
    pub reply_sec: u64,
    pub failed_share_max: f64,
}

/// `[eval]`: evaluation on held-out prompts.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EvalConfig {
    /// Updates between two evaluations; 0: before the first and after the last update only.
    pub every: u64,
    pub greedy: bool,
    /// Absent: `grpo.group_size`. Read it through [`super::RunConfig::eval_samples`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples: Option<u64>,
}

/// `[checkpoint]`: saved states.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointConfig {
    pub every: u64,
    /// Seconds after the last save; 0: never by time.
    pub every_sec: u64,
    pub keep: u64,
    /// Name of a measurement, checked to be one of [`super::RunConfig::best_metrics`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_best: Option<String>,
}

/// `[alarm]`: what is watched while a run goes on.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AlarmConfig {
    /// Updates; checked to be at least 1.
    pub window: u64,
    pub kl_warn: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl_stop: Option<f64>,
    pub grad_norm_warn: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grad_norm_stop: Option<f64>,
    pub entropy_low_warn: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy_low_stop: Option<f64>,
    pub entropy_high_warn: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy_high_stop: Option<f64>,
    pub truncated_warn: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub truncated_stop: Option<f64>,
    pub equal_rewards_warn: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub equal_rewards_stop: Option<f64>,
    pub reward_flat_warn: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_flat_stop: Option<u64>,
    pub missing_rewards_warn: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing_rewards_stop: Option<f64>,
    pub reward_sec_warn: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_sec_stop: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampled_gap_stop: Option<f64>,
    pub device_memory_warn: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_memory_stop: Option<f64>,
    pub zero_gradient_warn: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zero_gradient_stop: Option<u64>,
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
    pub style: EndpointStyle,
    /// Base address; [`super::RunConfig::api_base`] says how to set it where it is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_base: Option<String>,
    /// Whether a private address may be reached by http://.
    pub allow_http: bool,
    pub api_key_env: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_model: Option<String>,
    pub timeout_sec: u64,
    pub max_retries: u64,
    pub retry_backoff: f64,
    /// Price of a million tokens of messages, in any currency; checked to stand with `price_out`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub price_in: Option<f64>,
    /// The same of replies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub price_out: Option<f64>,
    pub endpoints: EndpointPaths,
    pub usage: EndpointUsage,
}

impl EndpointConfig {
    /// Path of messages under the base address: the one that is set, else that of the interface.
    #[must_use]
    pub fn chat_path(&self) -> &str {
        self.endpoints.chat.as_deref().unwrap_or(match self.style {
            EndpointStyle::Messages => "/v1/messages",
            EndpointStyle::ChatCompletions => "/v1/chat/completions",
        })
    }
}

/// `[endpoint.endpoints]`: paths under the base address.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EndpointPaths {
    /// Read it through [`EndpointConfig::chat_path`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat: Option<String>,
    pub models: String,
}

/// `[endpoint.usage]`: what the service is used for.
#[expect(clippy::struct_excessive_bools, reason = "each stands for itself: what the service may be used for")]
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EndpointUsage {
    pub reward_scoring: bool,
    pub log_summary: bool,
    pub sample_replay: bool,
    pub data_generation: bool,
    pub prompt_text: bool,
}
