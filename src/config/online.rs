//! The rules of sampled answers and of rewards.

use super::check::Check;
use super::choices::{ImportanceWeights, SentTemperature};
use super::rewards::{RewardName, WeightedReward};

/// The most requests at one time; services allow far fewer.
const PARALLEL_MAX: u64 = 64;

/// The most updates that an alarm looks back over.
const ALARM_UPDATES_MAX: u64 = 100_000;

impl Check<'_> {
    pub(super) fn rollout(&mut self) {
        let (run, rollout) = (self.run, &self.run.rollout);
        let inside = rollout.top_p > 0.0 && rollout.top_p <= 1.0;
        self.range("rollout.top_p", rollout.top_p, inside, "above 0 and at most 1");
        self.range("rollout.token_sec_max", rollout.token_sec_max, rollout.token_sec_max > 0.0, "above 0, or inf");
        if let Some(gap) = rollout.gap_warn {
            self.range("rollout.gap_warn", gap, gap > 0.0, "above 0, or inf");
        }
        if let Some(tokens) = rollout.max_tokens {
            self.at_least_one("rollout.max_tokens", tokens.0, "an answer has a token");
            // A gate that is scaled down has shorter answers than the configuration it is given.
            if run.gate.scale <= 1 {
                let most = run.context.answer_len.0;
                self.at_most("rollout.max_tokens", tokens.0, most, "an answer has context.answer_len positions");
            }
        }
        if run.memory.prompt_no_grad {
            return;
        }
        let why = "answers are sampled, and further updates of a group are made, from pages, and memory.prompt_no_grad = false has none";
        if rollout.sample {
            self.should("rollout.sample", &["memory.prompt_no_grad"], "false", why);
        }
        if run.grpo.updates_per_group > 1 {
            self.should("grpo.updates_per_group", &["memory.prompt_no_grad"], "1", why);
        }
    }

    pub(super) fn alarm(&mut self) {
        let alarm = &self.run.alarm;
        self.at_least_one("alarm.window", alarm.window, "shares are averaged over the last updates");
        self.at_most("alarm.window", alarm.window, ALARM_UPDATES_MAX, "all of them are remembered");
        let counts = [
            ("alarm.reward_flat_warn", Some(alarm.reward_flat_warn)),
            ("alarm.reward_flat_stop", alarm.reward_flat_stop),
            ("alarm.zero_gradient_warn", Some(alarm.zero_gradient_warn)),
            ("alarm.zero_gradient_stop", alarm.zero_gradient_stop),
        ];
        for (key, count) in counts {
            self.at_most(key, count.unwrap_or(0), ALARM_UPDATES_MAX, "all of them are remembered");
        }
        let limits = [
            ("alarm.kl_warn", Some(alarm.kl_warn)),
            ("alarm.kl_stop", alarm.kl_stop),
            ("alarm.grad_norm_warn", Some(alarm.grad_norm_warn)),
            ("alarm.grad_norm_stop", alarm.grad_norm_stop),
            ("alarm.entropy_low_warn", Some(alarm.entropy_low_warn)),
            ("alarm.entropy_low_stop", alarm.entropy_low_stop),
            ("alarm.entropy_high_warn", Some(alarm.entropy_high_warn)),
            ("alarm.entropy_high_stop", alarm.entropy_high_stop),
            ("alarm.truncated_warn", Some(alarm.truncated_warn)),
            ("alarm.truncated_stop", alarm.truncated_stop),
            ("alarm.equal_rewards_warn", Some(alarm.equal_rewards_warn)),
            ("alarm.equal_rewards_stop", alarm.equal_rewards_stop),
            ("alarm.missing_rewards_warn", Some(alarm.missing_rewards_warn)),
            ("alarm.missing_rewards_stop", alarm.missing_rewards_stop),
            ("alarm.reward_sec_warn", Some(alarm.reward_sec_warn)),
            ("alarm.reward_sec_stop", alarm.reward_sec_stop),
            ("alarm.sampled_gap_stop", alarm.sampled_gap_stop),
            ("alarm.device_memory_warn", Some(alarm.device_memory_warn)),
            ("alarm.device_memory_stop", alarm.device_memory_stop),
        ];
        if alarm.kl_stop.is_some_and(f64::is_finite) && self.run.grpo.kl_coef <= 0.0 {
            let why = "no divergence is measured without grpo.kl_coef, so this alarm would never be raised";
            self.should("alarm.kl_stop", &["grpo.kl_coef"], "left out, or grpo.kl_coef above 0", why);
        }
        for (key, limit) in limits {
            if let Some(limit) = limit {
                self.range(key, limit, limit >= 0.0, "at least 0, or inf");
            }
        }
    }

    pub(super) fn rewards(&mut self) {
        const KEY: &str = "grpo.reward_fn";
        let (run, reward) = (self.run, &self.run.reward);
        let parts = run.grpo.rewards();
        for (index, part) in parts.iter().enumerate() {
            let word = part.word();
            if !(part.weight.is_finite() && part.weight != 0.0) {
                let why = format!("the weight of {word} is {:?}", part.weight);
                self.should(KEY, &[], "of finite weights that are not 0", why);
            }
            if parts[..index].iter().any(|other| other.word() == word) {
                self.should(KEY, &[], "without repetition", format!("{word} is in it twice"));
            }
            if part.name.is_for_validation() && parts.len() > 1 {
                self.should(KEY, &[], "without it", format!("{word} is for validation runs and stands alone"));
            }
            self.reward(part);
        }
        if !run.data.names_files()
            && let Some(part) = parts.iter().find(|part| !part.name.is_for_validation())
        {
            let why = format!("grpo.reward_fn = \"{}\" reads its records", part.word());
            self.should("data.path", &[KEY], "set to a file of JSON lines", why);
        }
        self.at_least_one("reward.command_sec", reward.command_sec, "a program takes time; 60 is the default");
        if let SentTemperature::Sent(temperature) = reward.judge_temperature {
            let inside = temperature.is_finite() && temperature >= 0.0;
            self.range("reward.judge_temperature", temperature, inside, "a finite number from 0, or \"none\"");
        }
        self.at_least_one("reward.judge_tokens", reward.judge_tokens, "a verdict has a token; 512 is the default");
        self.at_least_one("reward.judge_parallel", reward.judge_parallel, "1 sends one after another");
        self.at_most("reward.judge_parallel", reward.judge_parallel, PARALLEL_MAX, "no service wants more at one time");
        let share = reward.missing_share_max;
        self.range("reward.missing_share_max", share, (0.0..=1.0).contains(&share), "from 0 to 1");
        let [least, most] = reward.judge_scale;
        if !(least.is_finite() && most.is_finite() && least < most) {
            let why = format!("it is {:?}", reward.judge_scale);
            self.should("reward.judge_scale", &[], "two finite numbers, the lower first", why);
        }
    }

    pub(super) fn tools(&mut self) {
        let (run, tools) = (self.run, &self.run.tools);
        match &tools.command {
            Some(command) if command.is_empty() => {
                let why = "it names the program that answers calls";
                self.should("tools.command", &[], "a program with its arguments, or left out", why);
            }
            Some(_) if !run.rollout.sample => {
                let why =
                    "tools answer calls in sampled answers; turns of tools in given answers are masked parts of them";
                self.should("tools.command", &["rollout.sample"], "left out without rollout.sample = true", why);
            }
            _ => {}
        }
        for (key, other, this) in [
            ("tools.reply_start", "tools.reply_end", tools.reply_start.is_none() && tools.reply_end.is_some()),
            ("tools.reply_end", "tools.reply_start", tools.reply_end.is_none() && tools.reply_start.is_some()),
        ] {
            if this {
                self.should(key, &[], "set", format!("{other} is, and the chat template gives both or none"));
            }
        }
        self.at_least_one("tools.turns", tools.turns, "leave tools.command out for answers without calls");
        self.at_least_one("tools.tokens", tools.tokens.0, "a reply has a token; 256 is the default");
        self.at_least_one("tools.reply_sec", tools.reply_sec, "a program takes time; 10 is the default");
        let share = tools.failed_share_max;
        self.range("tools.failed_share_max", share, (0.0..=1.0).contains(&share), "from 0 to 1");
    }

    pub(super) fn importance(&mut self) {
        const WITH: &[&str] = &["grpo.importance"];
        let (run, grpo) = (self.run, &self.run.grpo);
        let weighs = grpo.importance != ImportanceWeights::None;
        match grpo.importance_max {
            None if weighs => {
                let why = "importance weights of a long answer have no bound; others take 2 to 10";
                self.should("grpo.importance_max", WITH, "set to the largest weight, a number from 1", why);
            }
            Some(_) if !weighs => {
                self.should("grpo.importance_max", WITH, "left out", "grpo.importance = \"none\" has no weights");
            }
            Some(most) => {
                self.range("grpo.importance_max", most, most >= 1.0 && most.is_finite(), "a finite number from 1");
            }
            None => {}
        }
        if let Some(least) = grpo.importance_min {
            if grpo.importance.is_mask() {
                let most = grpo.importance_max.unwrap_or(f64::INFINITY);
                let inside = (0.0..=1.0).contains(&least) && least <= most;
                self.range("grpo.importance_min", least, inside, "a number from 0 to 1");
            } else {
                let why = "only grpo.importance = \"token_mask\" and \"sequence_mask\" have a lower bound";
                self.should("grpo.importance_min", WITH, "left out", why);
            }
        }
        if weighs && (run.rollout.sample || !run.data.names_files()) {
            let why = "importance weights are of answers that come with the data and their log-probabilities";
            self.should("grpo.importance", &["rollout.sample", "data.path"], "\"none\"", why);
        }
    }

    /// What one reward needs.
    fn reward(&mut self, part: &WeightedReward) {
        const WITH: &[&str] = &["grpo.reward_fn"];
        let (run, reward) = (self.run, &self.run.reward);
        let why = format!("grpo.reward_fn = \"{}\" needs it", part.word());
        match part.name {
            RewardName::Data if run.rollout.sample => {
                let why = "sampled answers have no rewards in the data; judge them, or set rollout.sample = false";
                self.should("grpo.reward_fn", &["rollout.sample"], "another one", why);
            }
            RewardName::JsonField if reward.field.is_none() => {
                self.should("reward.field", WITH, "set to a field, as \"result.value\"", why);
            }
            RewardName::Length if reward.length_tokens.is_none() => {
                self.should("reward.length_tokens", WITH, "set to a number of tokens", why);
            }
            RewardName::Command if reward.command.as_ref().is_none_or(Vec::is_empty) => {
                self.should("reward.command", WITH, "set to a program with its arguments", why);
            }
            RewardName::Judge => self.judge(part),
            _ => {}
        }
    }
}
