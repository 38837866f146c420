//! Qwen3-Next: as Qwen3.5 with experts, which some layers may lack, and with the inputs of a delta rule in two projections.

use super::differences::{Defaults, DeltaInputs, Differences, ExpertDefaults, Normalised};
use super::qwen3_5::QWEN3_5;

pub(super) const QWEN3_NEXT: Differences = Differences {
    model_type: "qwen3_next",
    wrapper: None,
    delta: Some(DeltaInputs::Joined),
    experts: Some(ExpertDefaults {
        count: 512,
        chosen: 10,
        width: 512,
        shared_width: Some(512),
        normalised: Normalised::Stated(true),
        everywhere: false,
    }),
    defaults: Defaults {
        vocabulary: Some(151_936),
        ffn_width: Some(5632),
        kv_heads: Some(2),
        eos_of_wrapper: false,
        ..QWEN3_5.defaults
    },
    ..QWEN3_5
};
