//! Tokens that judges are sent, and what they cost, as far as the configuration tells.

use std::fs;

use crate::config::RunConfig;
use crate::endpoint::cost_of;

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
