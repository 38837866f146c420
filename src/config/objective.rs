//! The rules of the objective and of advantages.

use super::RunConfig;
use super::check::Check;
use super::choices::{Aggregation, Deviation, Gradient, KlEstimator, Loss, ScaleRewards};

/// Clips of a sequence's ratio beyond this are most likely meant for tokens.
const SEQUENCE_CLIP_MAX: f64 = 0.05;

impl RunConfig {
    /// Values of the objective that are allowed and yet are most likely a mistake, one sentence each.
    pub(super) fn objective_notes(&self) -> Vec<String> {
        let g = &self.grpo;
        let mut notes = Vec::new();
        let widest = g.clip_low.max(g.clip_high);
        if g.loss == Loss::Gspo && widest > SEQUENCE_CLIP_MAX {
            notes.push(format!(
                "grpo.loss = \"gspo\" with a clip of {widest}: a sequence's ratio is a mean over its tokens and stays within a few \
                 thousandths of 1, so nothing is clipped; its authors take clip_low = 3e-4 and clip_high = 4e-4"
            ));
        }
        if g.kl_coef > 0.0 && g.kl_estimator == KlEstimator::K1 {
            notes.push(
                "grpo.kl_estimator = \"k1\": the mean of its gradient is 0, so it adds noise and holds nothing near the starting \
                 policy; \"k2\" and \"k3_ratio\" have the gradient of the divergence"
                    .to_owned(),
            );
        }
        notes
    }
}

impl Check<'_> {
    pub(super) fn objective(&mut self) {
        let g = &self.run.grpo;
        self.at_least_one("grpo.group_size", g.group_size, "a group has an answer");
        self.range("grpo.clip_low", g.clip_low, g.clip_low > 0.0 && g.clip_low <= 1.0, "above 0 and at most 1");
        self.range("grpo.clip_high", g.clip_high, g.clip_high.is_finite() && g.clip_high > 0.0, "above 0 and finite");
        self.dual();
        match (g.aggregation, g.constant_divisor) {
            (Aggregation::Constant, None) => self.should(
                "grpo.constant_divisor",
                &["grpo.aggregation"],
                "set",
                "grpo.aggregation = \"constant\" divides by it",
            ),
            (Aggregation::Constant, Some(d)) => {
                self.range("grpo.constant_divisor", d, d.is_finite() && d > 0.0, "a finite number above 0");
            }
            (_, Some(_)) => self.should(
                "grpo.constant_divisor",
                &["grpo.aggregation"],
                "left out",
                "only grpo.aggregation = \"constant\" reads it",
            ),
            (_, None) => {}
        }
        self.divergence();
        if let (Gradient::Last(tail), prompt) = (g.gradient, self.run.context.prompt_len)
            && tail > prompt
        {
            let why = format!("the prompt has {prompt} positions, {tail} cannot carry gradient");
            self.should("grpo.gradient", &["context.prompt_len"], format!("{{ last = {prompt} }} at most"), why);
        }
    }

    pub(super) fn advantages(&mut self) {
        let g = &self.run.grpo;
        self.range("grpo.std_min", g.std_min, g.std_min.is_finite() && g.std_min >= 0.0, "a finite number from 0");
        if g.deviation == Deviation::Sample && g.scale_rewards == ScaleRewards::None {
            let why = "grpo.scale_rewards = \"none\" divides by no deviation";
            self.should("grpo.deviation", &["grpo.scale_rewards"], "\"population\"", why);
        }
        if g.std_min > 0.0 && g.scale_rewards == ScaleRewards::None {
            let why = "grpo.scale_rewards = \"none\" divides by no deviation that could have a floor";
            self.should("grpo.std_min", &["grpo.scale_rewards"], "0", why);
        }
        if g.kl_coef > 0.0 && g.scale_rewards == ScaleRewards::Batch {
            let why = "the deviation of a batch is known after its last group and divides the whole gradient, in which a KL \
                       term would be divided too";
            self.should("grpo.kl_coef", &["grpo.scale_rewards"], "0 with grpo.scale_rewards = \"batch\"", why);
        }
    }

    fn dual(&mut self) {
        const KEY: &str = "grpo.clip_dual";
        let g = &self.run.grpo;
        let Some(most) = g.clip_dual else { return };
        if g.loss == Loss::Cispo {
            let why = "grpo.loss = \"cispo\" bounds every ratio by grpo.clip_high already";
            self.should(KEY, &["grpo.loss"], "left out", why);
        }
        self.range(KEY, most, most.is_finite() && most > 1.0, "a finite number above 1");
    }

    fn divergence(&mut self) {
        let g = &self.run.grpo;
        self.range("grpo.kl_coef", g.kl_coef, g.kl_coef.is_finite() && g.kl_coef >= 0.0, "a finite number from 0");
        if g.kl_estimator != KlEstimator::K3 && g.kl_coef <= 0.0 {
            let why = "grpo.kl_coef = 0 leaves out the divergence; set it above 0 for another estimate";
            self.should("grpo.kl_estimator", &["grpo.kl_coef"], "\"k3\"", why);
        }
    }

    /// What may be older than the adapters, and for how long.
    pub(super) fn reuse(&mut self) {
        const KEY: &str = "run.reuse_capture";
        const LIMIT: &str = "grpo.reuse_drift_max";
        let (run, g, reuses) = (self.run, &self.run.grpo, self.run.run.reuse_capture);
        self.at_least_one(KEY, reuses, "1 captures the prompt in every update");
        match g.reuse_drift_max {
            None if reuses > 1 => {
                let why = "pages that are reused drift from the adapters; inf measures the drift and ends nothing";
                self.should(LIMIT, &[KEY], "set to the largest drift, such as 0.05", why);
            }
            Some(_) if reuses <= 1 => {
                self.should(LIMIT, &[KEY], "left out", "run.reuse_capture = 1 captures the prompt in every update");
            }
            Some(most) => self.range(LIMIT, most, most > 0.0, "above 0, or inf"),
            None => {}
        }
        if reuses <= 1 {
            return;
        }
        if reuses > g.updates_per_group {
            let why = format!(
                "only further updates of the same group can reuse its prompt, and grpo.updates_per_group is {} (it is {reuses})",
                g.updates_per_group
            );
            self.should(KEY, &["grpo.updates_per_group"], format!("at most {}", g.updates_per_group), why);
        }
        if g.gradient == Gradient::Exact {
            let why = "an exact gradient goes through every prompt position under the present adapters, so no page may be older: \
                       set run.reuse_capture = 1, or another gradient";
            self.should("grpo.gradient", &[KEY], "\"response\" or { last = N }", why);
        }
        if run.optimizer.grad_accum > 1 {
            let why = "one captured prompt is held from update to update (run.reuse_capture)";
            self.should("optimizer.grad_accum", &[KEY], "1", why);
        }
    }

    /// Only sampled answers are known to be cut off.
    pub(super) fn truncated(&mut self) {
        if self.run.grpo.mask_truncated && !self.run.rollout.sample {
            let why = "answers of the data are taken as whole; only sampled ones (rollout.sample = true) are cut off";
            self.should("grpo.mask_truncated", &["rollout.sample"], "false", why);
        }
    }
}
