//! Keys of the layers with a gated delta rule.

use serde_json::Value;

use super::differences::DeltaInputs;
use crate::model::config_reader::ConfigReader;
use crate::model::parts::DeltaSpec;
use crate::runtime::units::from_index;

/// Most inputs of a convolution: it reaches no further back than one call's rows.
const TAPS_MAX: u64 = 64;

/// The gated delta rules of a config; absent keys have the defaults of the published config classes, which are those of all
/// families with such rules. `mamba_ssm_dtype` is not read: the state has the accumulation dtype.
pub(super) fn read(keys: &mut ConfigReader<'_>, layers: usize, inputs: DeltaInputs) -> DeltaSpec {
    let key_heads = keys.size("linear_num_key_heads", Some(16));
    let value_heads = keys.size("linear_num_value_heads", Some(32));
    if !value_heads.is_multiple_of(key_heads) && keys.problems.is_empty() {
        keys.refuse("linear_num_value_heads", &Value::from(value_heads), "a multiple of `linear_num_key_heads`");
    }
    if !keys.flag("attn_output_gate", true) {
        keys.unsupported("attn_output_gate", &Value::Bool(false), "attention with an output gate (true)");
    }
    let gate = keys.word("output_gate_type", "swish");
    if !["swish", "silu"].contains(&gate) {
        keys.unsupported("output_gate_type", &Value::from(gate), "\"swish\", which is also called \"silu\"");
    }
    let taps = keys.size("linear_conv_kernel_dim", Some(4));
    if taps > TAPS_MAX {
        keys.refuse("linear_conv_kernel_dim", &Value::from(taps), "at most 64");
    }
    DeltaSpec {
        key_heads,
        value_heads,
        key_dim: keys.size("linear_key_head_dim", Some(128)),
        value_dim: keys.size("linear_value_head_dim", Some(128)),
        taps,
        joined: inputs == DeltaInputs::Joined,
        layers: rules(keys, layers),
    }
}

/// Which layers have the rule: as listed, else all but every `full_attention_interval`-th.
fn rules(keys: &mut ConfigReader<'_>, layers: usize) -> Vec<bool> {
    let wanted = "\"linear_attention\" and \"full_attention\" for this family";
    let listed = keys.layer_words("layer_types", layers, &["full_attention", "linear_attention"], wanted);
    let interval = keys.count("full_attention_interval", Some(4));
    let by_interval = |layer: usize| !(from_index(layer) + 1).is_multiple_of(interval);
    match listed {
        Some(kinds) => kinds.into_iter().map(|kind| kind == 1).collect(),
        None => (0..layers).map(by_interval).collect(),
    }
}
