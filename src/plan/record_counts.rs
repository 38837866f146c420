//! What the records of a data set lack that rewards read, and whether answers will begin with thinking: counted before a run, which
//! would score answers for hours without it.

use serde::Serialize;

use crate::config::{RewardName, RunConfig};
use crate::data::{self, Dataset, Group, Tokenizer};

/// Tokens at the end of a prompt that are looked at: the template's beginning of an answer is shorter.
const TAIL_TOKENS: usize = 64;

/// Records that the rewards of a configuration read with less than they may need.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct RecordCounts {
    /// Records without `reward_data.question` that a judge scores; 0 without a judge.
    without_question: usize,
    /// Records without `reward_data.expected`; 0 where no reward reads it.
    without_expected: usize,
    /// Prompts that hold `reward.after` as their end, so that answers lack it.
    after_in_prompt: usize,
    /// Prompts whose answers begin with thinking that `reward.after` does not leave out.
    thinking: usize,
    /// Records with better and worse answers, which alone have a margin.
    #[serde(skip)]
    with_margin: usize,
    /// The reward that refuses a record without `expected`; absent where only a judge reads it.
    #[serde(skip)]
    refuses: Option<&'static str>,
    /// The text of `reward.after`.
    #[serde(skip)]
    after: Option<String>,
}

impl RecordCounts {
    /// Reads all records of `data`.
    pub(super) fn of(
        config: &RunConfig,
        tokenizer: Option<&Tokenizer>,
        data: &Dataset,
    ) -> Result<RecordCounts, data::Error> {
        let is_judged = !config.named_judges().is_empty();
        let rewards = config.grpo.rewards();
        let refuses = rewards.iter().map(|part| part.name).find(|name| name.reads_expected()).map(RewardName::word);
        let lacks = |key: &str| {
            let has = |group: &Group| group.reward_data.get(key).is_some_and(|value| !value.is_null());
            (0..data.len()).filter(|&index| !has(data.group(index))).count()
        };
        let mut counts = RecordCounts {
            without_question: if is_judged { lacks("question") } else { 0 },
            without_expected: if is_judged || refuses.is_some() { lacks("expected") } else { 0 },
            with_margin: (0..data.len()).filter(|&index| has_margin(data.group(index))).count(),
            refuses,
            after: config.reward.after.clone(),
            ..RecordCounts::default()
        };
        let reads_text = rewards.iter().any(|part| part.name.reads_text());
        if let Some(tokenizer) = tokenizer.filter(|_| config.rollout.sample && reads_text) {
            counts.count_ends(tokenizer, data)?;
        }
        Ok(counts)
    }

    /// Counts prompts by what they end with.
    fn count_ends(&mut self, tokenizer: &Tokenizer, data: &Dataset) -> Result<(), data::Error> {
        let thinking_end = tokenizer.thinking_prompt_end();
        let after = self.after.as_deref().map(str::trim_end).filter(|after| !after.is_empty());
        if thinking_end.is_none() && after.is_none() {
            return Ok(());
        }
        for index in 0..data.len() {
            let ids = data.prompt_ids(index)?;
            let tail = tokenizer.answer_text(&ids[ids.len().saturating_sub(TAIL_TOKENS)..], &[])?;
            match (after, &thinking_end) {
                (Some(after), _) => self.after_in_prompt += usize::from(tail.trim_end().ends_with(after)),
                (None, Some(end)) => self.thinking += usize::from(tail.ends_with(end.as_str())),
                (None, None) => {}
            }
        }
        Ok(())
    }

    /// Of several files together.
    pub(super) fn sum<'a>(counts: impl Iterator<Item = &'a RecordCounts>) -> RecordCounts {
        counts.fold(RecordCounts::default(), |sum, one| RecordCounts {
            without_question: sum.without_question + one.without_question,
            without_expected: sum.without_expected + one.without_expected,
            after_in_prompt: sum.after_in_prompt + one.after_in_prompt,
            thinking: sum.thinking + one.thinking,
            with_margin: sum.with_margin + one.with_margin,
            refuses: sum.refuses.or(one.refuses),
            after: sum.after.or_else(|| one.after.clone()),
        })
    }

    /// What a run would end with for these `records`, which `key` names.
    pub(super) fn refusals(&self, config: &RunConfig, key: &str, records: usize) -> Vec<String> {
        let lacks = self.refuses.filter(|_| self.without_expected > 0).map(|name| format!(
            "{key}: {} of {records} records have no reward_data.expected, which the reward {name} compares answers with, and \
             `longstraw train` ends with exit 3 there; give it, under that name",
            self.without_expected
        ));
        let set = key.strip_prefix("data.").map(|set| set.strip_prefix("held_out.").unwrap_or(set));
        let best = config.checkpoint.keep_best.as_deref().filter(|_| self.with_margin == 0);
        let best = best.filter(|best| {
            ["margin", "accuracy"]
                .iter()
                .any(|kind| Some(*best) == set.map(|set| format!("eval/{set}/{kind}")).as_deref())
        });
        let no_margin = best.map(|best| {
            format!(
                "{key}: no record has a better and a worse answer, so there is no {best}, which checkpoint.keep_best names, and \
                 `longstraw train` ends with exit 3 there"
            )
        });
        lacks.into_iter().chain(no_margin).collect()
    }

    /// The lines that the command prints.
    pub(super) fn lines(&self) -> Vec<String> {
        let RecordCounts { without_question, without_expected, after_in_prompt, thinking, refuses, after, .. } = self;
        let mut lines = Vec::new();
        if *without_question > 0 {
            lines.push(format!(
                "  {without_question} of them have no reward_data.question: a judge gets their answers without one"
            ));
        }
        if *without_expected > 0 {
            let what = match refuses {
                Some(name) => format!("the reward {name} refuses them"),
                None => "a judge has nothing to compare their answers with".to_owned(),
            };
            lines.push(format!("  {without_expected} of them have no reward_data.expected: {what}"));
        }
        if let Some(after) = after.as_ref().filter(|_| *after_in_prompt > 0) {
            lines.push(format!(
                "  {after_in_prompt} of them end with {after:?}, so their answers lack it, and with reward.after = {after:?} an answer \
                 without it is scored as empty: leave reward.after out where thinking is switched off, or do not switch it off"
            ));
        }
        if *thinking > 0 {
            lines.push(format!(
                "  {thinking} of them let the model think before it answers, and rewards read the thinking too: set \
                 reward.after = \"</think>\", or {{\"enable_thinking\": false}} as \"chat_template_kwargs\" of the records"
            ));
        }
        lines
    }
}

/// Whether two answers of the data have rewards that differ.
fn has_margin(group: &Group) -> bool {
    let mut rewards = group.answers.iter().filter_map(|answer| answer.reward);
    let first = rewards.next();
    first.is_some_and(|first| rewards.any(|reward| reward.to_bits() != first.to_bits()))
}
