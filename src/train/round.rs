//! A round: the groups of `grpo.updates_per_group` updates, with the answers and scores that stay the same in all of them.
//!
//! ```text
//!   update 1    each group: capture, answers, rewards, scores (frozen), replay      update k > 1    each group: capture, replay
//! ```
//!
//! What is frozen is saved with a checkpoint that falls between two updates of a round, whole and not by rank, so that the
//! run may go on with another number of ranks.

use std::collections::BTreeMap;
use std::rc::Rc;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::Session;
use super::rewards::{self, Absence, Told};
use crate::checkpoint;
use crate::data;
use crate::prompt::handoff::{Logprobs, PlacedGroup, Scores};
use crate::report::Step;
use crate::runtime::failure::Failure;
use crate::runtime::units::{Rank, as_index, float, from_index};
use crate::step::objective::{self, Aggregation, Counted};
use crate::step::replay::{FrozenScores, TrainedAnswer};
use crate::step::rollout;
use crate::tensor::accumulation;
use crate::world::World;
use crate::world::exchange::gather_rows;

/// How many updates to come are looked at for how long they take; those behind them are as these.
const UPDATES_AHEAD_MAX: u64 = 1000;

/// One group's place in the data.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct Place {
    /// Which group of the data set.
    pub(super) index: usize,
    /// The how manieth group of the run it is: what its noise follows from.
    pub(super) number: u64,
}

/// One answer, wherever it comes from.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct Answer {
    /// Its tokens.
    pub(super) ids: Vec<i64>,
    /// Which of them are trained; `None`: all.
    pub(super) mask: Option<Vec<bool>>,
    /// The data set's reward of it.
    pub(super) given: Option<f64>,
    /// Whether it was cut off at its longest length.
    pub(super) truncated: bool,
    /// Sum of its tokens' log-probabilities when they were drawn.
    pub(super) logprob: Option<f64>,
}

impl Answer {
    /// One that the policy has given.
    pub(super) fn sampled(sampled: rollout::SampledAnswer) -> Answer {
        let logprob = Some(sampled.logprobs.iter().sum());
        Answer { ids: sampled.ids, mask: None, given: None, truncated: sampled.truncated, logprob }
    }

    /// One that stands in the data.
    pub(super) fn supplied(answer: &data::Answer) -> Answer {
        let (ids, mask) = (answer.ids.clone(), answer.mask.clone());
        Answer { ids, mask, given: answer.reward, truncated: false, logprob: None }
    }

    /// Tokens that are trained.
    pub(super) fn trained(&self) -> u64 {
        let all = from_index(self.ids.len());
        self.mask.as_ref().map_or(all, |mask| from_index(mask.iter().filter(|&&trained| trained).count()))
    }
}

/// One group as it stays through a round.
#[derive(Debug)]
pub(super) struct Frozen {
    /// Where it stands in the data.
    pub(super) place: Place,
    /// Its answers.
    pub(super) answers: Vec<Answer>,
    /// Reward of each, where it has one.
    pub(super) rewards: Vec<Option<f64>>,
    /// Advantage of each.
    pub(super) advantages: Vec<Option<f64>>,
    /// Scores that the round's updates share; `None` where the group takes no part, since nothing of it would be left.
    pub(super) scores: Option<Rc<FrozenScores>>,
}

impl Frozen {
    /// The answers' tokens.
    pub(super) fn ids(&self) -> Vec<Vec<i64>> {
        self.answers.iter().map(|answer| answer.ids.clone()).collect()
    }

    /// The answers as they are trained, each token weighing its share.
    pub(super) fn trained(&self, aggregation: Aggregation) -> Vec<TrainedAnswer> {
        let trained = |(answer, advantage): (&Answer, &Option<f64>)| TrainedAnswer {
            ids: answer.ids.clone(),
            mask: answer.mask.clone(),
            advantage: *advantage,
            weight: aggregation.share(answer.trained()),
        };
        self.answers.iter().zip(&self.advantages).map(trained).collect()
    }
}

/// What all ranks know of a group of the round, whichever ranks work on it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct Known {
    /// Reward of each answer.
    pub(super) rewards: Vec<Option<f64>>,
    /// Tokens of each answer.
    pub(super) tokens: Vec<u64>,
    /// Answers that were cut off.
    pub(super) truncated: u64,
    /// Parts of each answer's reward, by name.
    pub(super) parts: Vec<BTreeMap<String, f64>>,
    /// Why rewards are missing.
    pub(super) absent: Vec<Absence>,
    /// Whether it takes no part.
    pub(super) skipped: bool,
}

/// The groups of one or several updates.
#[derive(Debug)]
pub(super) struct Round {
    /// All of them, in order; each prompt group of ranks takes its own share.
    pub(super) places: Vec<Place>,
    /// Updates made of it.
    pub(super) made: u64,
    /// This prompt group's, once they are frozen.
    pub(super) mine: Vec<Frozen>,
    /// All groups', once they are known.
    pub(super) known: Vec<Known>,
    /// All answers that take part.
    pub(super) counts: objective::Batch,
}

/// A round as a checkpoint holds it.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    made: u64,
    known: Vec<Known>,
    counts: objective::Batch,
    groups: Vec<SavedGroup>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct SavedGroup {
    place: Place,
    answers: Vec<Answer>,
    advantages: Vec<Option<f64>>,
    /// Log-probabilities of each answer's tokens.
    old: Option<Vec<Vec<f64>>>,
    reference: Option<Vec<Vec<f64>>>,
}

impl Round {
    /// A round over these groups, of which nothing is known yet.
    pub(super) fn of(places: Vec<Place>) -> Round {
        Round { places, made: 0, mine: Vec::new(), known: Vec::new(), counts: objective::Batch::default() }
    }

    /// Adds what all ranks know of a group.
    pub(super) fn know(&mut self, told: &Told, skipped: bool) {
        let rewards = told.rewards();
        for (answer, reward) in told.answers.iter().zip(&rewards) {
            self.counts.add(Counted { tokens: answer.trained(), scored: reward.is_some() });
        }
        self.known.push(Known {
            rewards,
            tokens: told.answers.iter().map(|answer| from_index(answer.ids.len())).collect(),
            truncated: from_index(told.answers.iter().filter(|answer| answer.truncated).count()),
            parts: told.verdicts.iter().map(|verdict| verdict.parts.clone()).collect(),
            absent: told.verdicts.iter().filter_map(|verdict| verdict.failure.clone()).collect(),
            skipped,
        });
    }

    /// Whether enough answers have a reward.
    pub(super) fn enough(&self, most: f64, step: u64) -> Result<(), rewards::Error> {
        let answers = self.known.iter().map(|group| group.rewards.len()).sum();
        rewards::enough(self.known.iter().flat_map(|group| &group.absent), answers, most, step)
    }

    /// An update's numbers that follow from what all ranks know of its groups.
    pub(super) fn numbers(&self, step: Step, prompts: &[u64], draws: bool) -> Step {
        let groups: Vec<Vec<Option<f64>>> = self.known.iter().map(|group| group.rewards.clone()).collect();
        let answers: Vec<u64> = self.known.iter().flat_map(|group| group.tokens.iter().copied()).collect();
        let mut failures: BTreeMap<String, u64> = BTreeMap::new();
        for absence in self.known.iter().flat_map(|group| &group.absent) {
            *failures.entry(absence.kind.clone()).or_default() += 1;
        }
        let mut parts: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for (name, value) in self.known.iter().flat_map(|group| &group.parts).flatten() {
            parts.entry(name.clone()).or_default().push(*value);
        }
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / float(from_index(values.len().max(1)));
        let truncated = self.known.iter().map(|group| group.truncated).sum();
        let step = Step {
            group_update: self.made,
            groups_skipped: from_index(self.known.iter().filter(|group| group.skipped).count()),
            reward_failures: failures,
            reward_parts: parts.into_iter().map(|(name, values)| (name, mean(values))).collect(),
            truncated_share: draws.then(|| float(truncated) / float(from_index(answers.len().max(1)))),
            ..step
        };
        step.with_rewards(&groups).with_lengths(prompts, &answers)
    }

    /// The round in a checkpoint's words; every rank takes part, and all get the same. Nothing where no update was made of it.
    pub(super) fn save(&self, session: &Session, world: &World) -> serde_json::Value {
        if self.made == 0 {
            return serde_json::Value::Null;
        }
        let groups: Vec<SavedGroup> = self.mine.iter().map(|frozen| saved(frozen, session, world)).collect();
        let own = if world.cp.rank() == Rank(0) { groups } else { Vec::new() };
        let texts = world.all.gather_texts(&serde_json::json!(own).to_string());
        let read =
            |text: &String| serde_json::from_str::<Vec<SavedGroup>>(text).expect("finite scores come back as written");
        let mut groups: Vec<SavedGroup> = texts.iter().flat_map(read).collect();
        groups.sort_by_key(|group| group.place.number);
        serde_json::json!(Saved { made: self.made, known: self.known.clone(), counts: self.counts, groups })
    }

    /// The round that a checkpoint holds, dealt to these ranks; `None` where it holds none.
    ///
    /// # Errors
    /// When what it holds is no round.
    pub(super) fn restore(
        value: serde_json::Value,
        session: &Session,
        world: &World,
    ) -> Result<Option<Round>, checkpoint::Error> {
        if value.is_null() {
            return Ok(None);
        }
        let Saved { made, known, counts, groups } =
            serde_json::from_value(value).map_err(|source| checkpoint::Error::Round { reason: source.to_string() })?;
        let (held, side_by_side) = (groups.len(), world.dp_size);
        if held != known.len() || held == 0 || !held.is_multiple_of(side_by_side) {
            return Err(checkpoint::Error::OtherRanks { groups: held, side_by_side });
        }
        let places: Vec<Place> = groups.iter().map(|group| group.place).collect();
        let own = groups.into_iter().zip(&known).skip(world.dp_index).step_by(world.dp_size);
        let mine = own.map(|(group, known)| restored(group, known.rewards.clone(), session, world)).collect();
        Ok(Some(Round { places, made, mine, known, counts }))
    }
}

/// A group with every rank's share of its scores.
fn saved(frozen: &Frozen, session: &Session, world: &World) -> SavedGroup {
    let work = session.frozen_work(frozen, world);
    let whole = |scores: &Scores| -> Vec<Vec<f64>> {
        scores.0.iter().enumerate().map(|(index, own)| whole_answer(own, index, &work, world)).collect()
    };
    SavedGroup {
        place: frozen.place,
        answers: frozen.answers.clone(),
        advantages: frozen.advantages.clone(),
        old: frozen.scores.as_ref().map(|scores| whole(&scores.old)),
        reference: frozen.scores.as_ref().and_then(|scores| scores.reference.as_ref()).map(whole),
    }
}

/// The log-probabilities of all of an answer's tokens, on every rank of the prompt.
pub(super) fn whole_answer(own: &Logprobs, index: usize, work: &PlacedGroup, world: &World) -> Vec<f64> {
    let first = own.first.as_ref().map_or_else(|| own.rows.narrow(0, 0, 0), Tensor::shallow_clone);
    let first = gather_rows(&world.cp, &first, &work.layout.last_row_counts());
    let rows = gather_rows(&world.cp, &own.rows, &work.answers[index].span.counts());
    let all = Tensor::cat(&[first, rows], 0).to_kind(Kind::Double);
    Vec::<f64>::try_from(all).unwrap_or_default()
}

fn restored(group: SavedGroup, rewards: Vec<Option<f64>>, session: &Session, world: &World) -> Frozen {
    let SavedGroup { place, answers, advantages, old, reference } = group;
    let mut frozen = Frozen { place, answers, rewards, advantages, scores: None };
    let work = session.frozen_work(&frozen, world);
    let acc = accumulation(session.decoder.kind());
    let (rank, owner) = (world.cp.rank(), work.layout.last_row_owner());
    let tensor = |values: Vec<f64>| Tensor::from_slice(&values).to_kind(acc).to_device(session.decoder.device());
    let dealt = |scores: Vec<Vec<f64>>| {
        let answer = |(values, answer): (Vec<f64>, &crate::prompt::handoff::Answer)| Logprobs {
            rows: tensor(
                answer.span.of(rank).flat_map(|piece| values[work.layout.labels(piece)].iter().copied()).collect(),
            ),
            first: (rank == owner).then(|| tensor(values[..1].to_vec())),
        };
        Scores(scores.into_iter().zip(&work.answers).map(answer).collect())
    };
    frozen.scores = old.map(|old| Rc::new(FrozenScores { old: dealt(old), reference: reference.map(dealt) }));
    frozen
}

impl Session {
    /// The next `dp_size × grad_accum` groups. Every rank knows where all of them stand.
    pub(super) fn next_round(&mut self, world: &World) -> Round {
        let first = self.cursor.taken();
        let indices = self.cursor.take(world.dp_size * self.grad_accum);
        Round::of((first..).zip(indices).map(|(number, index)| Place { index, number }).collect())
    }

    /// Prompt lengths of the next `updates` updates, one entry each; nothing is taken.
    pub(super) fn lengths_ahead(&self, world: &World, updates: u64) -> Vec<Vec<u64>> {
        let length = |index: usize| from_index(self.data.group(index).prompt_ids.len());
        let (mut cursor, mut ahead) = (self.cursor.clone(), Vec::new());
        if let Some(round) = &self.round {
            let lengths: Vec<u64> = round.places.iter().map(|place| length(place.index)).collect();
            ahead.extend((round.made..self.updates_per_group).map(|_| lengths.clone()));
        }
        let most = updates.min(UPDATES_AHEAD_MAX);
        while from_index(ahead.len()) < most {
            let lengths: Vec<u64> = cursor.take(world.dp_size * self.grad_accum).into_iter().map(length).collect();
            ahead.extend((0..self.updates_per_group).map(|_| lengths.clone()));
        }
        ahead.truncate(as_index(most));
        ahead
    }

    /// A frozen group dealt to the ranks of this prompt group.
    pub(super) fn frozen_work(&self, frozen: &Frozen, world: &World) -> PlacedGroup {
        let prompt_ids = &self.data.group(frozen.place.index).prompt_ids;
        self.transaction(world).placed(prompt_ids, frozen.ids())
    }

    /// Brings back the round in whose middle a checkpoint was written.
    pub(super) fn restore_round(&mut self, saved: serde_json::Value, world: &World) -> Result<(), Failure> {
        self.round = world.agree(Round::restore(saved, self, world).map_err(Failure::from))?;
        Ok(())
    }
}
