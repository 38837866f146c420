//! What one rank knows and sends to the others.

use serde::{Deserialize, Serialize};

use super::finding::Finding;

/// The facts of one rank.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Facts {
    pub(super) host: String,
    /// Milliseconds since 1970, read by all ranks at the same moment.
    pub(super) clock_ms: u64,
    /// Name and version of the MPI library.
    pub(super) library: String,
    /// The launcher's variable and the number of ranks that it names.
    pub(super) launcher: Option<(String, u64)>,
    pub(super) cores: Cores,
    /// Threads of a computation on this rank.
    pub(super) threads: u64,
    /// Digest of the configuration, if this rank could read one.
    pub(super) digest: Option<String>,
    /// Bus address of the GPU that this rank would use.
    pub(super) gpu: Option<String>,
    pub(super) share_device: bool,
    /// Absent where the configuration is refused.
    pub(super) transport: Option<Transport>,
    pub(super) findings: Vec<Finding>,
}

/// The cores that a rank may use.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Cores {
    /// As the system lists them, for example "0-3,8".
    pub(super) list: String,
    pub(super) count: u64,
}

/// What one rank knows about the transport between ranks.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Transport {
    /// `run.direct`; `None` stands for "auto".
    pub(super) direct: Option<bool>,
    /// Ranks that share a prompt.
    pub(super) cp_size: usize,
    /// Whether NCCL is available; false without a GPU.
    pub(super) nccl: bool,
}

/// How many ranks a rank shares something with, itself included.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankCounts {
    /// In the world.
    pub(super) world: u64,
    /// On this machine.
    pub(super) machine: u64,
    /// On this rank's GPU; 1 without a GPU.
    pub(super) gpu: u64,
}
