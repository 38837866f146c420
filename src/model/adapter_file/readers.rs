//! What other programs make of a saved adapter.

use crate::model::spec::{Linear, Spec};

/// Families of which PEFT 0.21.2 with transformers 5.24 turns targets called `gate_proj`, `up_proj` and `down_proj` into
/// adapters of fused experts, and forgets those of the feed-forwards that every row passes.
const FUSED_IN_PEFT: [&str; 3] = ["qwen3_next", "qwen3_moe", "glm_moe_dsa"];

/// A sentence for the user when PEFT would leave out a part of the adapter in silence, else nothing. `adapted` are the linear
/// layers that carry a pair.
#[must_use]
pub fn note(spec: &Spec, adapted: &[Linear]) -> Option<String> {
    let every_row = |linear: &Linear| linear.module.contains(".mlp.") && !linear.module.contains(".mlp.experts.");
    let lost = adapted.iter().filter(|linear| every_row(linear)).count();
    (lost > 0 && FUSED_IN_PEFT.contains(&spec.model_type)).then(|| {
        format!(
            "PEFT 0.21.2 with transformers 5.24 leaves out {lost} adapters of feed-forwards that are no experts when it loads an \
             adapter of {}, with no more than a warning; for use there set lora.targets to projections of attention \
             (longstraw reads all of them)",
            spec.model_type
        )
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn of(case: &str, targets: Option<&[String]>) -> Option<String> {
        let spec = Spec::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases").join(case), None).unwrap();
        note(&spec, &spec.adapted(targets).unwrap())
    }

    #[test]
    fn adapters_that_peft_forgets_are_counted_and_others_say_nothing() {
        assert!(of("qwen3_next/base", None).unwrap().contains("leaves out 12 adapters"));
        assert_eq!(of("qwen3_next/base", Some(&["q_proj".to_owned(), "out_proj".to_owned()])), None);
        assert_eq!(of("qwen3_5/base", None), None);
        assert_eq!(of("qwen3_5_moe/base", None), None);
        assert_eq!(of("qwen3_moe/base", None), None);
    }
}
