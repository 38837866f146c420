//! What the page needs of a receipt.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::report::evaluation::{Best, HeldOut};
use crate::report::receipt::{AlarmSpan, Seconds};

/// Most characters of a check's value on the page.
const VALUE_CHARS_MAX: usize = 200;

/// What the page needs of a receipt; a receipt of an earlier version lacks some of it.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of the receipt")]
pub(super) struct Facts {
    pub(super) gate: Option<String>,
    pub(super) passed: bool,
    pub(super) stopped: bool,
    pub(super) stopped_by_alarm: bool,
    pub(super) alarms: BTreeMap<String, AlarmSpan>,
    pub(super) forced: bool,
    pub(super) checks: Vec<CheckFacts>,
    pub(super) not_checked: Vec<String>,
    pub(super) finished: String,
    pub(super) commit: String,
    pub(super) config_digest: String,
    pub(super) model_digest: String,
    pub(super) gradient: String,
    pub(super) dtype: String,
    pub(super) device: String,
    pub(super) attention_kernel: String,
    pub(super) delta_rule: Option<String>,
    pub(super) ranks: usize,
    pub(super) cp_size: usize,
    pub(super) positions: u64,
    pub(super) prompt_len: u64,
    pub(super) answer_len: u64,
    pub(super) group_size: u64,
    pub(super) steps: u64,
    pub(super) seconds: Seconds,
    pub(super) capture_share: f64,
    pub(super) peak_device_bytes: Vec<u64>,
    pub(super) peak_host_bytes: Vec<u64>,
    pub(super) plan_device_bytes: u64,
    pub(super) plan_host_bytes: u64,
    pub(super) memory: Vec<PhaseFacts>,
    pub(super) loss_first: f64,
    pub(super) loss: f64,
    pub(super) grad_norm: f64,
    pub(super) held_out: [Option<HeldOut>; 2],
    pub(super) held_out_sets: BTreeMap<String, [Option<HeldOut>; 2]>,
    pub(super) best: Option<Best>,
}

impl Facts {
    /// Largest peak of all ranks' devices, in bytes.
    pub(super) fn device_peak(&self) -> Option<u64> {
        self.peak_device_bytes.iter().copied().max().filter(|&bytes| bytes > 0)
    }
}

/// A phase's peaks by rank, in bytes.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct PhaseFacts {
    pub(super) phase: String,
    pub(super) device_peak: Vec<u64>,
    pub(super) host_peak: Vec<u64>,
}

/// One check of a gate.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct CheckFacts {
    pub(super) name: String,
    #[serde(deserialize_with = "text_of_value")]
    pub(super) value: String,
    pub(super) limit: String,
    pub(super) passed: bool,
    pub(super) means: String,
}

fn text_of_value<'de, D: Deserializer<'de>>(value: D) -> Result<String, D::Error> {
    Ok(Value::deserialize(value)?.to_string().chars().take(VALUE_CHARS_MAX).collect())
}
