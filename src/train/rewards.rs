//! Rewards of the groups that prompt groups of ranks have answered side by side. Rank 0 scores all of them; the others sleep
//! meanwhile and hear what came out.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Session;
use super::patience::Patience;
use super::round::Answer;
use crate::config::{Environment, RewardName, RunConfig};
use crate::data::{Dataset, Group};
use crate::report::AnswerLine;
use crate::reward::{Candidate, Rewarded, Scorer};
use crate::runtime::failure::{Classified, Exit, Failure};
use crate::runtime::units::{Rank, float, from_index};
use crate::world::{World, stop_requested};

/// Why rewards end a run.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// Too many could not be had.
    #[error(
        "{missing} of the {answers} answers of update {step} have no reward, more than reward.missing_share_max = {most} \
         allows; most often ({times} of them): {kind}: {words}"
    )]
    Missing {
        missing: usize,
        answers: usize,
        step: u64,
        most: f64,
        times: usize,
        kind: String,
        words: String,
        /// Whether the service is what they are missed from.
        service: bool,
    },
    /// Rewards judge texts, and there is nothing to make texts of tokens.
    #[error(
        "{}: there is no tokenizer.json, and {} judges what answers say; take a model folder with its tokenizer", 
        folder.display(), reward
    )]
    NoTokenizer {
        /// The model's folder.
        folder: std::path::PathBuf,
        /// The reward.
        reward: &'static str,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Missing { service: true, .. } => Exit::Endpoint,
            _ => Exit::Data,
        }
    }
}

/// A group's answers and what was said of each; the same on every rank.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Told {
    pub(super) answers: Vec<Answer>,
    pub(super) verdicts: Vec<Verdict>,
}

/// What was said of an answer.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct Verdict {
    /// What it says, without special tokens; empty where there is no tokenizer.
    pub(super) text: String,
    /// The weighted sum; `None`: missing.
    pub(super) value: Option<f64>,
    /// Its parts, by the names of rewards.
    pub(super) parts: BTreeMap<String, f64>,
    /// Why it is missing.
    pub(super) failure: Option<Absence>,
}

/// Why a reward is missing.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Absence {
    /// One word, for counting.
    pub(super) kind: String,
    pub(super) words: String,
    /// Whether the judge is what it is missed from.
    pub(super) service: bool,
    /// Whether it should have been there: a data set may leave one out.
    pub(super) counts: bool,
}

impl Told {
    pub(super) fn rewards(&self) -> Vec<Option<f64>> {
        self.verdicts.iter().map(|verdict| verdict.value).collect()
    }
}

/// Scores the answers to `groups`, of which `own` are this prompt group's; every rank takes part. There may be fewer groups
/// than prompt groups of ranks; who has none brings no answers.
///
/// # Errors
/// When nothing further could be scored, or a stop was asked for meanwhile and answers are left; alike on all ranks.
pub(super) fn told(
    session: &Session,
    world: &World,
    patience: &Patience,
    groups: &[&Group],
    own: &[Answer],
) -> Result<Vec<Told>, Failure> {
    let text = if world.cp.rank() == Rank(0) { serde_json::json!(own).to_string() } else { String::new() };
    let texts = world.all.gather_texts(&text);
    let read = |text: &String| serde_json::from_str(text).expect("answers come back as they were written");
    let answers: Vec<Vec<Answer>> = texts.iter().filter(|text| !text.is_empty()).take(groups.len()).map(read).collect();
    let said = world.on_root_long(|| session.verdicts(groups, &answers, world))?;
    let text = if world.all.rank() == Rank(0) { serde_json::json!(said).to_string() } else { String::new() };
    let texts = world.all.gather_texts(&text);
    let verdicts: Option<Vec<Vec<Verdict>>> =
        serde_json::from_str(&texts[0]).expect("verdicts come back as they were written");
    let Some(verdicts) = verdicts else { return Err(patience.given_up("answers were being scored")) };
    Ok(answers.into_iter().zip(verdicts).map(|(answers, verdicts)| Told { answers, verdicts }).collect())
}

impl Session {
    /// What rank 0 says of the answers; `None` where some are left because a stop was asked for.
    fn verdicts(
        &self,
        groups: &[&Group],
        answers: &[Vec<Answer>],
        world: &World,
    ) -> Result<Option<Vec<Vec<Verdict>>>, Failure> {
        let text = |answer: &Answer| self.tokenizer.as_ref().map_or(Ok(String::new()), |known| known.text(&answer.ids));
        let texts: Vec<Vec<String>> =
            answers.iter().map(|group| group.iter().map(text).collect::<Result<_, _>>()).collect::<Result<_, _>>()?;
        let mut asked = Vec::new();
        for ((group, answers), texts) in groups.iter().zip(answers).zip(&texts) {
            asked.extend(answers.iter().zip(texts).enumerate().map(|(index, (answer, text))| Candidate {
                prompt: &group.name,
                answer: index,
                text,
                tokens: from_index(answer.ids.len()),
                tokens_max: self.answer_len.0,
                truncated: answer.truncated,
                reward_data: &group.reward_data,
                given: answer.given,
            }));
        }
        let scorer = self.scorer.as_ref().expect("rank 0 has opened what it scores with");
        let rewarded = scorer.score(&asked, &mut || world.report_alive())?;
        if stop_requested() && rewarded.iter().any(|rewarded| rewarded.failure().is_some()) {
            return Ok(None);
        }
        let mut rewarded = rewarded.into_iter();
        let mut of = |text: String| verdict(text, &rewarded.next().expect("every answer is scored"));
        Ok(Some(texts.into_iter().map(|group| group.into_iter().map(&mut of).collect()).collect()))
    }
}

fn verdict(text: String, rewarded: &Rewarded) -> Verdict {
    let mut missing = rewarded.parts.iter().filter_map(|part| Some((part.name, part.failure.as_ref()?)));
    // One that should have been there, if there is such a one.
    let missing = missing.clone().find(|(name, _)| *name != RewardName::Data).or_else(|| missing.next());
    let failure = missing.map(|(name, missing)| Absence {
        kind: missing.kind().to_owned(),
        words: missing.to_string(),
        service: name == RewardName::Judge,
        counts: name != RewardName::Data,
    });
    let parts = rewarded.parts.iter().filter_map(|part| Some((part.name.word().to_owned(), part.value?)));
    Verdict { text, value: rewarded.value, parts: parts.collect(), failure }
}

/// Whether no more rewards of an update's answers are missing than the configuration allows.
pub(super) fn enough<'a>(
    absent: impl Iterator<Item = &'a Absence>,
    answers: usize,
    most: f64,
    step: u64,
) -> Result<(), Error> {
    let absent: Vec<&Absence> = absent.filter(|why| why.counts).collect();
    let share = float(from_index(absent.len())) / float(from_index(answers.max(1)));
    let times = |kind: &str| absent.iter().filter(|why| why.kind == kind).count();
    let Some(worst) = absent.iter().max_by_key(|why| times(&why.kind)).filter(|_| share > most) else { return Ok(()) };
    Err(Error::Missing {
        missing: absent.len(),
        answers,
        step,
        most,
        times: times(&worst.kind),
        kind: worst.kind.clone(),
        words: worst.words.clone(),
        service: absent.iter().any(|why| why.service),
    })
}

/// The first reward that judges what answers say, if there is one.
pub(super) fn judges(config: &RunConfig) -> Option<RewardName> {
    let judges = |name: &RewardName| {
        !matches!(name, RewardName::Synthetic | RewardName::Data | RewardName::One | RewardName::Length)
    };
    config.grpo.reward_fn.parts().iter().map(|part| part.name).find(judges)
}

/// What rank 0 scores with; it checks that every reward has what it needs, before the first step.
pub(super) fn open(config: &RunConfig, sets: &[&Dataset], texts: bool) -> Result<Scorer, Failure> {
    let scorer = Scorer::open(config, &Environment::process())?;
    if let Some(name) = judges(config).filter(|_| !texts) {
        return Err(Error::NoTokenizer { folder: config.model_path()?.to_owned(), reward: name.word() }.into());
    }
    scorer.probe()?;
    for data in sets {
        let groups = (0..data.len()).map(|index| data.group(index));
        scorer.check(groups.map(|group| (group.name.as_str(), &group.reward_data)))?;
    }
    Ok(scorer)
}

/// The lines of answers.jsonl of one group.
pub(super) fn lines(step: u64, group: &Group, told: &Told, advantages: &[Option<f64>]) -> Vec<AnswerLine> {
    let line = |(index, ((answer, verdict), advantage)): (usize, ((&Answer, &Verdict), &Option<f64>))| AnswerLine {
        step,
        prompt: group.name.clone(),
        answer: from_index(index),
        text: verdict.text.clone(),
        tokens: from_index(answer.ids.len()),
        ids: if answer.logprob.is_some() { answer.ids.clone() } else { Vec::new() },
        logprob: answer.logprob,
        reward: verdict.value,
        parts: verdict.parts.clone(),
        advantage: *advantage,
        truncated: answer.truncated,
        reward_data: group.reward_data.clone(),
        failure: verdict.failure.as_ref().map(|why| format!("{}: {}", why.kind, why.words)),
    };
    told.answers.iter().zip(&told.verdicts).zip(advantages).enumerate().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn absent(count: usize, counts: bool) -> Vec<Absence> {
        let kind = |index: usize| if index == 0 { "status_429" } else { "time_out" };
        let absence = |index| Absence { kind: kind(index).into(), words: "no answer".into(), service: true, counts };
        (0..count).map(absence).collect()
    }

    #[test]
    fn more_missing_rewards_than_allowed_end_the_run_and_the_commonest_reason_is_named() {
        assert!(enough(absent(2, true).iter(), 8, 0.25, 3).is_ok());
        assert!(enough(absent(8, false).iter(), 8, 0.25, 3).is_ok(), "a data set may leave rewards out");
        assert!(enough([].iter(), 0, 0.0, 1).is_ok());
        let error = enough(absent(3, true).iter(), 8, 0.25, 3).unwrap_err();
        assert_eq!(error.exit(), Exit::Endpoint);
        let words = error.to_string();
        assert!(words.starts_with("3 of the 8 answers of update 3 have no reward"), "{words}");
        assert!(words.ends_with("most often (2 of them): time_out: no answer"), "{words}");
    }
}
