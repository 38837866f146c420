//! The configuration: its keys, its sources, and its rules.
//!
//! Sources in order: compiled-in defaults, config.toml (for `train` without one the compiled-in laptop run), settings.json, the gate's own file
//! where a gate is run, environment, flags. Later sources override earlier ones. Each source is compared with the list of
//! keys, then all are merged and the whole is checked, so that a refusal lists every problem at once. The result is a
//! [`RunConfig`], which must be equal on all ranks and has a digest, and a [`RankConfig`], which may differ. Nothing else in
//! the project reads the environment.

mod address;
mod check;
mod choices;
mod data_source;
mod document;
mod environment;
mod gates;
mod held_out;
mod json;
mod judges;
mod objective;
mod online;
mod other_names;
mod precedence;
mod problem;
mod rewards;
mod schema;
mod set_name;
mod source;
mod sources;
mod supported;
mod tables;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::runtime::digest::sha256_hex;
use crate::runtime::units::{Pages, Tokens};

pub use choices::{
    ActivationCkpt, Aggregation, Deviation, DeviceChoice, Dtype, EndpointStyle, Gradient, ImportanceWeights,
    KlEstimator, Loss, OptimizerName, ScaleRewards, Schedule, SentTemperature, TooLong, Weights, When,
};
pub use data_source::DataSource;
pub use document::document;
pub use environment::{Environment, LauncherTasks, OTHER_VARIABLES, ProxyAddress, Secret};
pub use gates::{Gate, Growth, Own, Runs};
pub use held_out::HeldOutFiles;
pub use judges::{JudgeConfig, JudgeSettings, Judges};
pub use precedence::{DEFAULT_TOML, LAPTOP_TOML, Overrides, WithoutFile, load, load_gate, load_gate_in, load_in};
pub use problem::{Error, Fault, Problem, Source, variable_of};
pub use rewards::{RewardFn, RewardName, WeightedReward};
pub use sources::source_key;
pub use supported::{SUPPORTED, Supported};
pub use tables::{
    AlarmConfig, CheckpointConfig, ContextConfig, DataConfig, EndpointConfig, EndpointPaths, EndpointUsage, EvalConfig,
    GateConfig, GrpoConfig, LoraConfig, MICRO_BLOCK_DEFAULT, MemoryConfig, ModelConfig, OptimizerConfig,
    ParallelConfig, RewardConfig, RolloutConfig, RunTable, ToolsConfig,
};

/// The values that must be equal on all ranks. Their digest is compared at the start and stored in what a run writes.
#[expect(missing_docs, reason = "each field is the table of its name, and the table's own type says what it holds")]
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    pub parallel: ParallelConfig,
    pub context: ContextConfig,
    pub memory: MemoryConfig,
    pub optimizer: OptimizerConfig,
    pub grpo: GrpoConfig,
    pub lora: LoraConfig,
    pub model: ModelConfig,
    pub data: DataConfig,
    pub run: RunTable,
    pub rollout: RolloutConfig,
    pub reward: RewardConfig,
    pub tools: ToolsConfig,
    pub eval: EvalConfig,
    pub checkpoint: CheckpointConfig,
    pub alarm: AlarmConfig,
    pub gate: GateConfig,
    pub endpoint: EndpointConfig,
}

/// The values that may differ between ranks. They change no number, so they are no part of the digest.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RankConfig {
    /// Folder for everything a run writes (`run.dir`, `--run-dir`).
    pub dir: PathBuf,
    /// Whether several ranks may use one device (`run.share_device`).
    pub share_device: bool,
    /// Seconds between a signal that asks for a stop and the end of the process (`run.grace_sec`).
    pub grace_sec: u64,
    /// Seconds that a rank may stay in one place; 0: computed (`run.stall_sec`).
    pub stall_sec: u64,
    /// Level or filters of the logs (`run.log_level`, `LONGSTRAW_LOG`).
    pub log: String,
}

/// A configuration that has passed every check that needs no world.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The values that all ranks share.
    pub run: RunConfig,
    /// The values of this rank.
    pub rank: RankConfig,
    /// The sources in the order in which they were read; later sources override earlier ones.
    pub sources: Vec<Source>,
    /// Keys without a default that no source gives; empty but for [`WithoutFile::DefaultsInPart`]. Their values mean nothing.
    pub unset: Vec<String>,
}

impl Loaded {
    /// Whether the built-in laptop run stands in for a configuration file.
    #[must_use]
    pub fn is_laptop_run(&self) -> bool {
        self.sources.contains(&Source::Builtin(precedence::LAPTOP_RUN))
    }

    /// Checks that the model of the built-in laptop run is there, unless another source names one.
    ///
    /// # Errors
    /// [`Error::NoLaptopModel`] where it is missing, with how to get it.
    pub fn check_laptop_model(&self) -> Result<(), Error> {
        match &self.run.model.path {
            Some(path)
                if self.is_laptop_run()
                    && !path.exists()
                    && *path == RunConfig::laptop().model.path.unwrap_or_default() =>
            {
                Err(Error::NoLaptopModel { path: path.clone() })
            }
            _ => Ok(()),
        }
    }
}

/// Keys and tables that a resumed run may change: those that change no number of an update but by the order of sums, and
/// those whose content is compared by digest instead of by name. docs/command.md lists them for users.
const OPERATIONAL: [&str; 40] = [
    // Compared by what they lead to: digests, groups of an update, the end of the decay.
    "model.path",
    "data.path",
    "data.held_out",
    "lora.init_from",
    "reward.rubric",
    "parallel",
    "optimizer.grad_accum",
    "optimizer.schedule_steps",
    "run.steps",
    // Where and how the same numbers are computed.
    "context.cp_pages_per_gpu",
    "memory.cpu_offload_pages",
    "memory.cpu_offload_inputs",
    "memory.inputs_every",
    "memory.keep_attention",
    "rollout.pages_on_device",
    "run.device",
    "run.direct",
    // What is saved, shown and waited for.
    "run.trace",
    "eval",
    "checkpoint",
    "alarm",
    "rollout.token_sec_max",
    "rollout.gap_warn",
    "reward.command_sec",
    "reward.judge_parallel",
    "reward.missing_share_max",
    "grpo.reuse_drift_max",
    "tools.reply_sec",
    "tools.failed_share_max",
    "endpoint.style",
    "endpoint.api_base",
    "endpoint.allow_http",
    "endpoint.api_key_env",
    "endpoint.timeout_sec",
    "endpoint.max_retries",
    "endpoint.retry_backoff",
    "endpoint.price_in",
    "endpoint.price_out",
    "endpoint.endpoints",
    "endpoint.usage",
];

/// Leaves out of a configuration, which may be that of a checkpoint, what a resumed run may change.
#[must_use]
pub fn compared(mut values: serde_json::Value) -> serde_json::Value {
    for path in OPERATIONAL {
        let mut at = Some(&mut values);
        let (tables, key) = path.rsplit_once('.').unwrap_or(("", path));
        for table in tables.split('.').filter(|table| !table.is_empty()) {
            at = at.and_then(|at| at.get_mut(table));
        }
        if let Some(table) = at.and_then(serde_json::Value::as_object_mut) {
            let _ = table.shift_remove(key);
        }
    }
    leave_out_files(&mut values);
    values
}

/// Leaves out the files that lists and tables name: their content is compared by digest.
fn leave_out_files(values: &mut serde_json::Value) {
    use serde_json::Value;
    let leave_out = |value: &mut Value, key: &str| {
        let _ = value.as_object_mut().and_then(|table| table.shift_remove(key));
    };
    let sources = values.pointer_mut("/data/sources").and_then(Value::as_array_mut);
    sources.into_iter().flatten().for_each(|source| leave_out(source, "path"));
    let judges = values.pointer_mut("/reward/judges").and_then(Value::as_object_mut);
    judges.into_iter().flatten().for_each(|(_, judge)| leave_out(judge, "rubric"));
}

impl RunConfig {
    /// The compiled-in laptop run, whatever files and variables there are.
    ///
    /// # Panics
    /// Never: a test loads it.
    #[must_use]
    pub fn laptop() -> Self {
        precedence::laptop().expect("the compiled-in files pass every check").run
    }

    /// Pages of the longest prompt; the last may be partly filled.
    #[must_use]
    pub fn prompt_pages(&self) -> Pages {
        self.context.prompt_len.pages(self.context.page_size)
    }

    /// Ranks that share one prompt, in a job of `world` ranks.
    #[must_use]
    pub fn cp_size(&self, world: u64) -> u64 {
        self.parallel.cp_size.unwrap_or(world)
    }

    /// Data-parallel replicas in a job of `world` ranks. Like the counts of pages, it needs a configuration that has passed
    /// [`RunConfig::check`]: there `page_size` and `cp_size` are not 0.
    #[must_use]
    pub fn dp_size(&self, world: u64) -> u64 {
        world / self.cp_size(world)
    }

    /// Groups of an update in a job of `world` ranks: one turn after another, side by side on all replicas.
    #[must_use]
    pub fn groups_per_update(&self, world: u64) -> u64 {
        self.dp_size(world).saturating_mul(self.optimizer.grad_accum)
    }

    /// Pages of the longest prompt on the rank that holds most, in a job of `world` ranks.
    #[must_use]
    pub fn pages_per_rank(&self, world: u64) -> Pages {
        Pages(self.prompt_pages().0.div_ceil(self.cp_size(world)))
    }

    /// The last N prompt positions carry gradient: N for a prompt of `prompt_len` positions.
    #[must_use]
    pub fn tail(&self, prompt_len: Tokens) -> Tokens {
        self.grpo.gradient.tail(prompt_len)
    }

    /// Tokens of the longest answer that the policy may give.
    #[must_use]
    pub fn sampled_len(&self) -> Tokens {
        let most = self.context.answer_len;
        self.rollout.max_tokens.map_or(most, |tokens| tokens.min(most))
    }

    /// The checkpoint's folder.
    ///
    /// # Errors
    /// [`Error::Unset`] where no source names one, with how to name it.
    pub fn model_path(&self) -> Result<&Path, Error> {
        self.model.path.as_deref().ok_or(Error::Unset {
            key: "model.path",
            how: "name the checkpoint's folder with --set model.path=FOLDER, or as path under [model] in config.toml",
        })
    }

    /// The endpoint's base address.
    ///
    /// # Errors
    /// [`Error::Unset`] where no source names one, with how to name it.
    pub fn api_base(&self) -> Result<&str, Error> {
        self.endpoint.api_base.as_deref().ok_or(Error::Unset {
            key: "endpoint.api_base",
            how: "put api_base into settings.json, or name it with --set endpoint.api_base=https://…",
        })
    }

    /// The endpoint's model.
    ///
    /// # Errors
    /// [`Error::Unset`] where no source names one, with how to name it.
    pub fn default_model(&self) -> Result<&str, Error> {
        self.endpoint.default_model.as_deref().ok_or(Error::Unset {
            key: "endpoint.default_model",
            how: "put default_model into settings.json, or name it with --set endpoint.default_model=MODEL",
        })
    }

    /// SHA-256 in hexadecimal over the values in the order of the tables; equal exactly where the values are.
    ///
    /// # Panics
    /// Never: every value has a JSON form.
    #[must_use]
    pub fn digest(&self) -> String {
        let canonical = serde_json::to_vec(self).expect("keys are texts, so there is a JSON form");
        sha256_hex(canonical)
    }

    /// Updates after which a decaying learning rate has reached 0.
    #[must_use]
    pub fn schedule_steps(&self) -> u64 {
        self.optimizer.schedule_steps.unwrap_or(self.run.steps)
    }

    /// The values that a resumed run must share with its checkpoint by name: all but those in [`OPERATIONAL`].
    ///
    /// # Panics
    /// Never: every value has a JSON form.
    #[must_use]
    pub fn resumable(&self) -> serde_json::Value {
        compared(serde_json::to_value(self).expect("keys are texts, so there is a JSON form"))
    }

    /// The values as a config.toml that loads to the same, but for what is a rank's own.
    ///
    /// # Panics
    /// Never: every value has a TOML form.
    #[must_use]
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("every checked value has a TOML form")
    }
}
