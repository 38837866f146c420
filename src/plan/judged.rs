//! What judges are sent, what it costs and how long it is waited for, as far as the configuration tells.

use std::fs;

use serde::Serialize;

use crate::config::RunConfig;
use crate::endpoint::cost_of;
use crate::runtime::units::{float, from_index};

/// Characters of a token, an assumption.
const TOKEN_CHARS: u64 = 4;
/// Characters of what longstraw itself says in a message, about.
const RULES_CHARS: u64 = 900;
/// The same of the general rubric.
const RUBRIC_CHARS: u64 = 500;

/// Tokens of the requests to all judges, and their cost.
pub(super) struct Judged {
    /// About, without questions and expected answers of the records. Other scripts than Latin have more tokens.
    pub(super) tokens_in: u64,
    /// The same of replies at their longest, one for each answer.
    pub(super) tokens_out: u64,
    /// Of both, about; absent without prices.
    pub(super) cost: Option<f64>,
}

impl Judged {
    /// Each of `answers` answers goes to each judge; they have at most `answer_tokens` tokens.
    pub(super) fn of(config: &RunConfig, answers: u64) -> Judged {
        let answer_tokens = if config.rollout.sample { config.sampled_len().0 } else { config.context.answer_len.0 };
        let mut of_one_in: u64 = 0;
        let mut of_one_out: u64 = 0;
        for (_, judge) in config.named_judges() {
            let rubric = judge.rubric.and_then(|file| fs::metadata(file).ok()).map_or(RUBRIC_CHARS, |file| file.len());
            // A short prompt has fewer characters than the excerpt may have.
            let prompt = judge.prompt_chars.min(config.context.prompt_len.0.saturating_mul(TOKEN_CHARS));
            let chars = RULES_CHARS.saturating_add(rubric).saturating_add(prompt);
            of_one_in = of_one_in.saturating_add(chars.div_ceil(TOKEN_CHARS)).saturating_add(answer_tokens);
            of_one_out = of_one_out.saturating_add(config.reward.judge_tokens);
        }
        let (tokens_in, tokens_out) = (answers.saturating_mul(of_one_in), answers.saturating_mul(of_one_out));
        Judged { tokens_in, tokens_out, cost: cost_of(&config.endpoint, tokens_in, tokens_out) }
    }
}

/// Rounds of replies: a judge replies to `parallel` answers at one time, judges come one after another, and so do turns.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Waits {
    judges: u64,
    /// Turns of an update, each of the groups side by side.
    turns: u64,
    /// Answers of a turn.
    answers: u64,
    parallel: u64,
    /// Times the seconds of a reply that an update waits.
    rounds: u64,
    /// The same of held-out prompts side by side.
    held_out_rounds: u64,
    /// Updates of the same answers: only the first of them waits.
    updates: u64,
    /// Seconds of a reply, where they were given.
    #[serde(skip_serializing_if = "Option::is_none")]
    reply_sec: Option<f64>,
}

impl Waits {
    /// `None` where no judge is named.
    pub(super) fn of(config: &RunConfig, ranks: u64, reply_sec: Option<f64>) -> Option<Waits> {
        let judges = Some(from_index(config.named_judges().len())).filter(|&judges| judges > 0)?;
        let side_by_side = config.dp_size(ranks).max(1);
        let turns = config.groups_per_update(ranks).div_ceil(side_by_side);
        let parallel = config.reward.judge_parallel.max(1);
        let answers = side_by_side.saturating_mul(config.grpo.group_size);
        let held_out = side_by_side.saturating_mul(config.eval_answers());
        let rounds = |answers: u64| answers.div_ceil(parallel).saturating_mul(judges);
        Some(Waits {
            judges,
            turns,
            answers,
            parallel,
            rounds: rounds(answers).saturating_mul(turns),
            held_out_rounds: rounds(held_out),
            updates: config.grpo.updates_per_group.max(1),
            reply_sec,
        })
    }

    pub(super) fn is_timed(&self) -> bool {
        self.reply_sec.is_some()
    }

    /// Seconds that an update waits, on average; 0 where those of a reply are not known.
    pub(super) fn update_seconds(&self) -> f64 {
        float(self.rounds) * self.reply_sec.unwrap_or(0.0) / float(self.updates)
    }

    /// The same of held-out prompts side by side.
    pub(super) fn held_out_seconds(&self) -> f64 {
        float(self.held_out_rounds) * self.reply_sec.unwrap_or(0.0)
    }

    /// The line about them.
    pub(super) fn text(&self) -> String {
        let Waits { judges, turns, answers, parallel, rounds, .. } = self;
        let turns = if *turns == 1 { String::new() } else { format!("{turns} turns of ") };
        let judges = if *judges == 1 { "1 judge".to_owned() } else { format!("{judges} judges, one after another") };
        let update = if self.updates == 1 { "each update" } else { "the first update of each group" };
        let known = self.reply_sec.map_or_else(
            || "--judge-sec SECONDS adds them to the hours".to_owned(),
            |seconds| format!("{:.0} s at {seconds} s a reply, in the seconds above", float(*rounds) * seconds),
        );
        format!(
            "judge waits: {turns}{answers} answers by {judges}, {parallel} at a time (reward.judge_parallel): {rounds} times the \
             seconds of a reply in {update}; {known}"
        )
    }
}

/// The line about tokens and cost.
pub(super) fn text(tokens_in: u64, tokens_out: u64, cost: Option<f64>) -> String {
    let cost = cost.map_or_else(
        || "endpoint.price_in and price_out make it a cost".to_owned(),
        |cost| format!("cost about {cost:.2} at endpoint.price_in and price_out"),
    );
    format!(
        "judge tokens of the run: about {tokens_in} in and {tokens_out} out (one request for each answer, four characters a token, answers \
         and replies at their longest, without questions and expected answers of records); {cost}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{JudgeConfig, RewardFn};

    #[test]
    fn an_update_waits_for_each_judge_and_each_turn_in_rounds_of_what_is_sent_at_one_time() {
        let mut config = RunConfig::laptop();
        config.grpo.reward_fn = None;
        assert!(Waits::of(&config, 4, Some(5.0)).is_none());
        let parts = r#"[{"name":"judge","weight":1.0},{"name":"judge:long","weight":1.0}]"#;
        config.grpo.reward_fn = Some(serde_json::from_str::<RewardFn>(parts).unwrap());
        config.reward.judges = Some([("long".to_owned(), JudgeConfig::default())].into());
        (config.grpo.group_size, config.reward.judge_parallel) = (9, 8);
        (config.parallel.cp_size, config.optimizer.grad_accum, config.grpo.updates_per_group) = (Some(2), 3, 1);
        // Two groups side by side have 18 answers: three rounds a judge and turn.
        let waits = Waits::of(&config, 4, Some(5.0)).unwrap();
        assert_eq!((waits.turns, waits.answers, waits.rounds), (3, 18, 3 * 2 * 3));
        assert!((waits.update_seconds() - 90.0).abs() < 1e-12 && waits.text().contains("90 s at 5 s a reply"));
        config.grpo.updates_per_group = 2;
        let waits = Waits::of(&config, 4, Some(5.0)).unwrap();
        assert!((waits.update_seconds() - 45.0).abs() < 1e-12, "half of the updates wait");
        let unknown = Waits::of(&config, 4, None).unwrap();
        assert!(
            unknown.update_seconds() == 0.0 && unknown.text().ends_with("--judge-sec SECONDS adds them to the hours")
        );
    }

    #[test]
    fn each_answer_goes_to_each_judge_and_the_cost_is_of_both_directions() {
        let mut config = RunConfig::laptop();
        config.rollout.sample = false;
        config.context.answer_len.0 = 100;
        config.reward.judge_tokens = 50;
        let parts =
            r#"[{"name":"judge","weight":1.0},{"name":"judge:long","weight":1.0},{"name":"length","weight":1.0}]"#;
        config.grpo.reward_fn = Some(serde_json::from_str::<RewardFn>(parts).unwrap());
        config.context.prompt_len.0 = 1000;
        let long = JudgeConfig { prompt_chars: Some(400), ..JudgeConfig::default() };
        config.reward.judges = Some([("long".to_owned(), long)].into());
        let judged = Judged::of(&config, 10);
        // (900 + 500) / 4 + 100 for the first, 100 more for the second.
        assert_eq!((judged.tokens_in, judged.tokens_out, judged.cost), (10 * (450 + 550), 1000, None));
        (config.endpoint.price_in, config.endpoint.price_out) = (Some(2.0), Some(10.0));
        let cost = Judged::of(&config, 10).cost.unwrap();
        assert!((cost - (10_000.0 * 2.0 + 1000.0 * 10.0) / 1e6).abs() < 1e-12, "{cost}");
        assert!(
            text(10_000, 1000, Some(0.03))
                .ends_with("expected answers of records); cost about 0.03 at endpoint.price_in and price_out")
        );
    }
}
