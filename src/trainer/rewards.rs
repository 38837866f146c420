//! Rewards of the groups that prompt groups of ranks have answered side by side. Rank 0 scores all of them; the others sleep
//! meanwhile and hear what came out.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Session;
use super::round::{Answer, Place, Round};
use crate::failure::Failure;
use crate::objective;
use crate::report::Step;
use crate::units::{Rank, float, from_index};
use crate::world::World;

/// A group's answers and what was said of each; the same on every rank.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Told {
    pub(super) answers: Vec<Answer>,
    pub(super) verdicts: Vec<Verdict>,
}

/// What was said of an answer.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct Verdict {
    /// The weighted sum; `None`: missing.
    pub(super) value: Option<f64>,
    /// By the name of the reward.
    pub(super) parts: BTreeMap<String, Option<f64>>,
    /// Why it is missing: kind and words; `None` also where the data set has none.
    pub(super) failure: Option<[String; 2]>,
}

impl Told {
    pub(super) fn rewards(&self) -> Vec<Option<f64>> {
        self.verdicts.iter().map(|verdict| verdict.value).collect()
    }
}

/// Scores the answers of `places`, of which `own` are this prompt group's.
pub(super) fn told(session: &Session, world: &World, places: &[Place], own: &[Answer]) -> Result<Vec<Told>, Failure> {
    let speaks = world.cp.rank() == Rank(0);
    let text = if speaks { serde_json::json!(own).to_string() } else { String::new() };
    let texts = world.all.gather_texts(&text);
    let answers: Vec<Vec<Answer>> = texts
        .iter()
        .filter(|text| !text.is_empty())
        .map(|text| serde_json::from_str(text).expect("answers come back as they were written"))
        .collect();
    assert_eq!(answers.len(), places.len(), "each prompt group of ranks answers one group");
    let verdicts = session.verdicts(places, &answers);
    Ok(answers.into_iter().zip(verdicts).map(|(answers, verdicts)| Told { answers, verdicts }).collect())
}

impl Session {
    fn verdicts(&self, places: &[Place], answers: &[Vec<Answer>]) -> Vec<Vec<Verdict>> {
        let _ = places;
        let one = |index: usize, answer: &Answer| {
            let value = if self.reward_fn == crate::config::RewardFn::only(crate::config::RewardName::Synthetic) {
                Some(if index % 2 == 0 { 0.0 } else { 1.0 })
            } else if self.reward_fn == crate::config::RewardFn::only(crate::config::RewardName::One) {
                Some(1.0)
            } else {
                answer.given
            };
            Verdict { value, ..Verdict::default() }
        };
        answers
            .iter()
            .map(|group| group.iter().enumerate().map(|(index, answer)| one(index, answer)).collect())
            .collect()
    }
}

/// An update's numbers that follow from what all ranks know of its groups.
pub(super) fn numbers(round: &Round) -> Step {
    let known: Vec<f64> = round.known.iter().flat_map(|group| &group.rewards).filter_map(|&reward| reward).collect();
    let mean = (!known.is_empty()).then(|| known.iter().sum::<f64>() / float(from_index(known.len())));
    let equal = round.known.iter().filter(|group| objective::spread(&group.rewards).is_none()).count();
    Step {
        reward_mean: mean,
        frac_groups_zero_std: float(from_index(equal)) / float(from_index(round.known.len().max(1))),
        ..Step::default()
    }
}
