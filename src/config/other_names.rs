//! What people type who come from another trainer (TRL, verl and others), and short names of number formats.
//! `docs/other-trainers.md` compares them.

/// A name of other trainers, the dotted paths of what it is here, and what differs.
type Row = (&'static str, &'static [&'static str], &'static str);

/// Names that are no key of this project, in the order of the keys that they are here.
const ROWS: &[Row] = &[
    ("model_name_or_path", &["model.path"], "a folder"),
    ("pretrain", &["model.path"], "a folder"),
    ("torch_dtype", &["model.dtype"], ""),
    ("bf16", &["model.dtype"], "\"bfloat16\""),
    ("fp16", &["model.dtype"], "\"bfloat16\"; fp16 is not supported"),
    ("fp32", &["model.dtype"], "\"float32\""),
    ("max_prompt_length", &["context.prompt_len"], "in positions"),
    ("prompt_max_len", &["context.prompt_len"], "in positions"),
    ("max_completion_length", &["context.answer_len"], "in positions"),
    ("max_response_length", &["context.answer_len"], "in positions"),
    ("generate_max_len", &["context.answer_len"], "in positions"),
    ("max_new_tokens", &["rollout.max_tokens"], ""),
    ("max_length", &["context.max_seq_len"], "prompt and answer"),
    ("max_len", &["context.max_seq_len"], "prompt and answer"),
    ("learning_rate", &["optimizer.lr"], ""),
    ("actor_learning_rate", &["optimizer.lr"], ""),
    ("gradient_accumulation_steps", &["optimizer.grad_accum"], "in groups of grpo.group_size answers"),
    ("per_device_train_batch_size", &["optimizer.grad_accum"], "in groups of grpo.group_size answers"),
    ("train_batch_size", &["optimizer.grad_accum"], "in groups of grpo.group_size answers, on each replica"),
    ("adam_beta1", &["optimizer.betas"], "the first of two numbers"),
    ("adam_beta2", &["optimizer.betas"], "the second of two numbers"),
    ("adam_betas", &["optimizer.betas"], ""),
    ("adam_epsilon", &["optimizer.eps"], ""),
    ("max_norm", &["optimizer.max_grad_norm"], ""),
    ("grad_clip", &["optimizer.max_grad_norm"], ""),
    ("clip_grad", &["optimizer.max_grad_norm"], ""),
    ("lr_scheduler_type", &["optimizer.schedule"], ""),
    ("lr_scheduler", &["optimizer.schedule"], ""),
    ("lr_warmup_steps", &["optimizer.warmup_steps"], ""),
    ("warmup_ratio", &["optimizer.warmup_steps"], "in updates"),
    ("lr_warmup_ratio", &["optimizer.warmup_steps"], "in updates"),
    ("num_generations", &["grpo.group_size"], ""),
    ("n_samples_per_prompt", &["grpo.group_size"], ""),
    ("reward_funcs", &["grpo.reward_fn"], ""),
    ("reward_weights", &["grpo.reward_fn"], "a list of { name, weight }"),
    ("beta", &["grpo.kl_coef"], ""),
    ("kl_loss_coef", &["grpo.kl_coef"], ""),
    ("init_kl_coef", &["grpo.kl_coef"], ""),
    ("use_kl_loss", &["grpo.kl_coef"], "0 leaves it out"),
    ("kl_loss_type", &["grpo.kl_estimator"], "\"k1\", \"k2\", \"k3\" or \"k3_ratio\""),
    ("use_bias_correction_kl", &["grpo.kl_estimator"], "true is \"k3_ratio\", false is \"k3\""),
    ("epsilon", &["grpo.clip_low", "grpo.clip_high"], "optimizer.eps is AdamW's"),
    ("clip_ratio", &["grpo.clip_low", "grpo.clip_high"], ""),
    ("eps_clip", &["grpo.clip_low", "grpo.clip_high"], ""),
    ("epsilon_low", &["grpo.clip_low"], ""),
    ("epsilon_high", &["grpo.clip_high"], "with CISPO epsilon_high is 1 + clip_high"),
    ("clip_ratio_low", &["grpo.clip_low"], ""),
    ("clip_ratio_high", &["grpo.clip_high"], ""),
    ("eps_clip_low_high", &["grpo.clip_low", "grpo.clip_high"], ""),
    ("delta", &["grpo.clip_dual"], ""),
    ("dual_clip", &["grpo.clip_dual"], ""),
    ("clip_ratio_c", &["grpo.clip_dual"], ""),
    ("loss_type", &["grpo.loss", "grpo.aggregation"], "docs/other-trainers.md has each value"),
    ("loss_mode", &["grpo.loss"], ""),
    ("policy_loss_type", &["grpo.loss"], ""),
    ("loss_agg_mode", &["grpo.aggregation"], ""),
    ("importance_sampling_level", &["grpo.loss"], "\"sequence\" is \"gspo\""),
    ("rollout_is", &["grpo.importance"], ""),
    ("rollout_is_threshold", &["grpo.importance_max"], ""),
    ("tis_imp_ratio_cap", &["grpo.importance_max"], ""),
    ("vllm_importance_sampling_mode", &["grpo.importance"], ""),
    ("vllm_importance_sampling_clip_min", &["grpo.importance_min"], "for the masks"),
    ("vllm_importance_sampling_clip_max", &["grpo.importance_max"], ""),
    ("vllm_importance_sampling_cap", &["grpo.importance_max"], ""),
    ("norm_adv_by_std_in_grpo", &["grpo.scale_rewards"], "true is \"group\", false is \"none\""),
    ("no_advantage_std_norm", &["grpo.scale_rewards"], "true is \"none\""),
    ("mask_truncated_completions", &["grpo.mask_truncated"], ""),
    ("apply_overlong_filtering", &["grpo.mask_truncated"], ""),
    ("num_iterations", &["grpo.updates_per_group"], ""),
    ("ppo_epochs", &["grpo.updates_per_group"], ""),
    ("lora_r", &["lora.rank"], ""),
    ("lora_rank", &["lora.rank"], ""),
    ("lora_alpha", &["lora.alpha"], ""),
    ("lora_target_modules", &["lora.targets"], ""),
    ("target_modules", &["lora.targets"], ""),
    ("dataset_name", &["data.path"], "a file of JSON lines"),
    ("train_files", &["data.path"], "a file of JSON lines"),
    ("prompt_data", &["data.path"], "a file of JSON lines"),
    ("eval_dataset", &["data.held_out"], "a file of JSON lines"),
    ("val_files", &["data.held_out"], "a file of JSON lines"),
    ("output_dir", &["run.dir"], ""),
    ("save_path", &["run.dir"], ""),
    ("default_local_dir", &["run.dir"], ""),
    ("max_steps", &["run.steps"], "in updates"),
    ("total_training_steps", &["run.steps"], "in updates"),
    ("num_train_epochs", &["run.steps"], "in updates"),
    ("num_episodes", &["run.steps"], "in updates"),
    ("total_epochs", &["run.steps"], "in updates"),
    ("save_steps", &["checkpoint.every"], "in updates"),
    ("save_freq", &["checkpoint.every"], "in updates"),
    ("save_total_limit", &["checkpoint.keep"], ""),
    ("max_ckpt_num", &["checkpoint.keep"], ""),
];

/// What a key that other trainers have is here: dotted paths, and what differs.
pub(super) fn of(name: &str) -> Option<(&'static [&'static str], &'static str)> {
    let name = name.to_ascii_lowercase().replace('-', "_");
    ROWS.iter().find(|(other, ..)| *other == name).map(|(_, here, note)| (*here, *note))
}

/// What a number format is here that is not named as here.
#[derive(Debug, PartialEq)]
pub(super) enum OtherDtype {
    /// Another name of a format.
    Is(&'static str),
    /// A format that no run takes.
    Refused { be: &'static str, why: &'static str },
}

/// A number format by a name that others use; `None` for the names of `model.dtype` itself and for what is no format.
pub(super) fn dtype(name: &str) -> Option<OtherDtype> {
    match name.to_ascii_lowercase().trim_start_matches("torch.") {
        "bf16" => Some(OtherDtype::Is("bfloat16")),
        "fp32" | "f32" => Some(OtherDtype::Is("float32")),
        "fp64" | "f64" => Some(OtherDtype::Is("float64")),
        "fp16" | "f16" | "float16" | "half" => Some(OtherDtype::Refused {
            be: "\"bfloat16\" or \"float32\"",
            why: "fp16 ends at 65504 and small gradients become 0 in it, which needs a loss scale that this build does not have",
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::schema::{self, Kind};
    use super::*;

    #[test]
    fn every_row_leads_to_keys_that_exist_from_a_name_that_is_none() {
        for (index, (name, here, note)) in ROWS.iter().enumerate() {
            assert!(!here.is_empty(), "{name}");
            for path in *here {
                assert!(schema::key_at(path).is_some(), "{name}: {path}");
            }
            assert_eq!(schema::homes(name), Vec::<String>::new(), "{name} would never be asked for");
            assert!(ROWS[..index].iter().all(|(other, ..)| other != name), "{name} is in it twice");
            assert!(!note.ends_with('.'), "{name}: the note stands within a sentence");
            assert_eq!(of(name), Some((*here, *note)));
        }
        assert_eq!(of("Num-Generations"), of("num_generations"));
        assert_eq!(of("groupsize"), None);
    }

    #[test]
    fn short_names_of_formats_are_those_of_the_key_and_fp16_has_a_reason() {
        let words = Kind::Choice(&["bfloat16", "float32", "float64"]);
        assert_eq!(schema::key_at("model.dtype").map(|key| key.kind), Some(words));
        for (short, long) in [("bf16", "bfloat16"), ("FP32", "float32"), ("fp64", "float64")] {
            assert_eq!(dtype(short), Some(OtherDtype::Is(long)));
        }
        assert!(matches!(dtype("torch.float16"), Some(OtherDtype::Refused { .. })));
        for name in ["bfloat16", "float32", "float64", "int8", ""] {
            assert_eq!(dtype(name), None, "{name}");
        }
    }
}
