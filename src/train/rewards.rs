//! Rewards of the groups that prompt groups of ranks have answered side by side. Rank 0 scores all of them while the other
//! ranks sleep; then every rank gets the rewards.

use std::path::PathBuf;

use super::answer::{Answer, AnswerReward, MissingReward, RewardedGroup};
use super::outcome::Interruption;
use super::session::{Session, TrainingData};
use super::stop_policy::StopPolicy;
use crate::config::{Environment, RewardName, RunConfig};
use crate::data::{Dataset, Group};
use crate::report::AnswerLine;
use crate::reward::{Candidate, Rewarded, Scorer};
use crate::runtime::failure::{Classified, Exit, Failure};
use crate::runtime::units::{Rank, from_index};
use crate::world::{World, stop_requested};

/// Rewards judge texts, and nothing makes texts of tokens.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: there is no tokenizer.json, and {reward} judges what answers say; take a model folder with its tokenizer",
    folder.display()
)]
struct NoTokenizer {
    /// The model's folder.
    folder: PathBuf,
    reward: &'static str,
}

impl Classified for NoTokenizer {
    fn exit(&self) -> Exit {
        Exit::Data
    }
}

/// A group of a data set.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) data: &'a Dataset,
    pub(super) index: usize,
}

impl<'a> Asked<'a> {
    pub(super) fn group(self) -> &'a Group {
        self.data.group(self.index)
    }
}

/// Rewards the answers to `groups`, one group for each prompt group of ranks that has one; `own` are this prompt group's
/// answers, none where it has no group. Every rank takes part.
pub(super) fn reward_groups(
    session: &Session,
    world: &World,
    stop: &StopPolicy,
    groups: &[Asked<'_>],
    own: &[Answer],
) -> Result<Vec<RewardedGroup>, Interruption> {
    // Every rank of a prompt has the same answers; the first one tells them.
    let sent = (world.cp.rank() == Rank(0)).then_some(own);
    let answers: Vec<Vec<Answer>> = world.gather(&sent.map(<[Answer]>::to_vec)).into_iter().flatten().collect();
    let answers = &answers[..groups.len()];
    let rewards = world
        .from_root_while_others_sleep(|| reward_answers(session, groups, answers, world))
        .map_err(|failure| Interruption::NoRewards { failure })?;
    let Some(rewards) = rewards else { return Err(stop.drop_everywhere("answers were being scored")) };
    let rewarded = answers.iter().cloned().zip(rewards);
    Ok(rewarded.map(|(answers, rewards)| RewardedGroup { answers, rewards }).collect())
}

/// Rank 0's rewards of each group's answers; `None` where a stop was requested while some were left.
fn reward_answers(
    session: &Session,
    groups: &[Asked<'_>],
    answers: &[Vec<Answer>],
    world: &World,
) -> Result<Option<Vec<Vec<AnswerReward>>>, Failure> {
    let TrainingData { tokenizer, end_ids, scorer, .. } = &session.data;
    let text = |answer: &Answer| match tokenizer {
        Some(tokenizer) => tokenizer.answer_text(&answer.ids, end_ids),
        None => Ok(String::new()),
    };
    let mut texts: Vec<Vec<String>> = Vec::new();
    for group in answers {
        texts.push(group.iter().map(text).collect::<Result<_, _>>()?);
    }
    let scorer = scorer.as_ref().expect("rank 0 has opened its scorer");
    let prompt_text = |asked: &Asked<'_>| match tokenizer {
        Some(tokenizer) if scorer.reads_prompts() => {
            Ok(tokenizer.answer_text(&asked.data.prompt_ids(asked.index)?, &[])?)
        }
        _ => Ok::<_, Failure>(String::new()),
    };
    let prompts: Vec<String> = groups.iter().map(prompt_text).collect::<Result<_, _>>()?;
    let mut requests = Vec::new();
    for (((asked, prompt_text), answers), texts) in groups.iter().zip(&prompts).zip(answers).zip(&texts) {
        let group = asked.group();
        requests.extend(answers.iter().zip(texts).enumerate().map(|(index, (answer, text))| Candidate {
            prompt: &group.name,
            answer: index,
            text,
            tokens: answer.written_tokens(),
            tokens_max: session.answer_tokens_max().0,
            truncated: answer.truncated,
            reward_data: &group.reward_data,
            given: answer.given,
            prompt_text,
        }));
    }
    let rewarded = scorer.score(&requests, &mut || world.report_alive())?;
    if stop_requested() && rewarded.iter().any(|rewarded| rewarded.failure().is_some()) {
        return Ok(None);
    }
    let mut rewarded = rewarded.into_iter();
    let mut next = |text| answer_reward(text, &rewarded.next().expect("every answer is scored"));
    Ok(Some(texts.into_iter().map(|group| group.into_iter().map(&mut next).collect()).collect()))
}

fn answer_reward(text: String, rewarded: &Rewarded) -> AnswerReward {
    let mut missing = rewarded.parts.iter().filter_map(|part| Some((part.name, part.failure.as_ref()?)));
    // A data set may leave its own reward out, so a missing part of another kind is named first.
    let missing = missing.clone().find(|(name, _)| *name != RewardName::Data).or_else(|| missing.next());
    let missing = missing.map(|(name, missing)| MissingReward {
        kind: missing.kind().to_owned(),
        words: missing.to_string(),
        service: name == RewardName::Judge,
        counts: name != RewardName::Data,
    });
    let parts = rewarded.parts.iter().filter_map(|part| Some((part.word.clone(), part.value?)));
    AnswerReward { text, value: rewarded.value, parts: parts.collect(), missing }
}

/// The first reward that judges texts, if there is one.
pub(super) fn judge_of_texts(config: &RunConfig) -> Option<RewardName> {
    let mut names = config.grpo.rewards().iter().map(|part| part.name);
    names.find(|name| name.reads_text())
}

/// Opens rank 0's scorer, and checks before the first step that every reward has what it needs. `has_tokenizer`: whether
/// tokens can be made into text.
pub(super) fn open_scorer(config: &RunConfig, sets: &[&Dataset], has_tokenizer: bool) -> Result<Scorer, Failure> {
    let scorer = Scorer::open(config, &Environment::process())?;
    if let Some(name) = judge_of_texts(config).filter(|_| !has_tokenizer) {
        return Err(NoTokenizer { folder: config.model_path()?.to_owned(), reward: name.word() }.into());
    }
    scorer.probe()?;
    for data in sets {
        let groups = (0..data.len()).map(|index| data.group(index));
        scorer.check(groups.map(|group| (group.name.as_str(), &group.reward_data)))?;
    }
    Ok(scorer)
}

/// A group's lines of answers.jsonl; none where answers are neither sampled nor judged by their text.
pub(super) fn answer_lines(session: &Session, step: u64, group: &Group, rewarded: &RewardedGroup) -> Vec<AnswerLine> {
    if !session.config().rollout.sample && judge_of_texts(session.config()).is_none() {
        return Vec::new();
    }
    let advantages = session.advantages(rewarded);
    let answers = rewarded.answers.iter().zip(&rewarded.rewards).zip(advantages).enumerate();
    let lines = answers.map(|(index, ((answer, reward), advantage))| AnswerLine {
        step,
        prompt: group.name.clone(),
        answer: from_index(index),
        text: reward.text.clone(),
        tokens: answer.tokens(),
        ids: if answer.logprob.is_some() { answer.ids.clone() } else { Vec::new() },
        logprob: answer.logprob,
        reward: reward.value,
        parts: reward.parts.clone(),
        advantage,
        truncated: answer.truncated,
        reward_data: group.reward_data.clone(),
        failure: reward.missing.as_ref().map(|missing| format!("{}: {}", missing.kind, missing.words)),
        calls: answer.calls.clone(),
        mask: if answer.calls.is_some() { answer.mask.clone() } else { None },
    });
    lines.collect()
}
