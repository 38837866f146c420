//! Which groups an update is made of, and what the whole batch knows before its first backward.

use super::{Session, advantages};
use crate::config::{RewardFn, RewardName};
use crate::objective::{self, Counted, Terms};
use crate::report::Step;
use crate::units::from_index;
use crate::world::World;

/// How many updates to come are looked at for how long they take; those behind them are as these.
const UPDATES_AHEAD_MAX: u64 = 1000;

/// One group with its rewards and advantages.
#[derive(Clone, Debug)]
pub(super) struct Scored {
    /// The record's name.
    pub(super) name: String,
    /// The prompt.
    pub(super) prompt_ids: Vec<i64>,
    /// The answers.
    pub(super) answers: Vec<Vec<i64>>,
    /// Reward of each answer, where it has one.
    pub(super) rewards: Vec<Option<f64>>,
    /// Advantage of each answer.
    pub(super) advantages: Vec<Option<f64>>,
}

/// The groups of one update.
#[derive(Debug)]
pub(super) struct Batch {
    /// Those that this rank's prompt group works on.
    pub(super) mine: Vec<Scored>,
    /// All names, in order.
    pub(super) names: Vec<String>,
    counts: objective::Batch,
    rewards: Vec<Vec<Option<f64>>>,
    /// Of all prompts and all answers.
    lengths: [Vec<u64>; 2],
}

impl Batch {
    /// Weight of each token of an answer of `length` tokens: its denominator is the whole batch's.
    pub(super) fn weight(&self, terms: &Terms, length: usize) -> f64 {
        self.counts.weight(terms.aggregation, from_index(length))
    }

    /// A step with what the batch knows of it; its seconds must be known.
    pub(super) fn told(&self, step: Step) -> Step {
        let [prompts, answers] = &self.lengths;
        step.with_rewards(&self.rewards).with_lengths(prompts, answers)
    }
}

impl Session {
    /// The next `dp_size × grad_accum` groups. Every rank knows all of them, so denominators need no message; each
    /// prompt group works on its own share.
    pub(super) fn next_batch(&mut self, world: &World) -> Batch {
        let indices = self.cursor.take(world.dp_size * self.grad_accum);
        let all: Vec<Scored> = indices.into_iter().map(|index| self.scored(index)).collect();
        let counts = objective::Batch::of(all.iter().flat_map(|group| {
            group
                .answers
                .iter()
                .zip(&group.rewards)
                .map(|(answer, reward)| Counted { tokens: from_index(answer.len()), scored: reward.is_some() })
        }));
        Batch {
            names: all.iter().map(|group| group.name.clone()).collect(),
            rewards: all.iter().map(|group| group.rewards.clone()).collect(),
            lengths: [
                all.iter().map(|group| from_index(group.prompt_ids.len())).collect(),
                all.iter().flat_map(|group| &group.answers).map(|answer| from_index(answer.len())).collect(),
            ],
            mine: all.into_iter().skip(world.dp_index).step_by(world.dp_size).collect(),
            counts,
        }
    }

    /// Prompt lengths of the next `updates` updates, one entry each; nothing is taken.
    pub(super) fn lengths_ahead(&self, world: &World, updates: u64) -> Vec<Vec<u64>> {
        let mut cursor = self.cursor.clone();
        let length = |index: usize| from_index(self.data.group(index).prompt_ids.len());
        let mut next = || cursor.take(world.dp_size * self.grad_accum).into_iter().map(length).collect();
        (0..updates.min(UPDATES_AHEAD_MAX)).map(|_| next()).collect()
    }

    fn scored(&self, index: usize) -> Scored {
        let group = self.data.group(index);
        let rewards: Vec<Option<f64>> = if self.reward_fn == RewardFn::only(RewardName::Synthetic) {
            (0..group.answers.len()).map(|answer| Some(if answer % 2 == 0 { 0.0 } else { 1.0 })).collect()
        } else if self.reward_fn == RewardFn::only(RewardName::One) {
            vec![Some(1.0); group.answers.len()]
        } else {
            group.answers.iter().map(|answer| answer.reward).collect()
        };
        let advantages = if self.reward_fn == RewardFn::only(RewardName::One) {
            rewards.clone()
        } else {
            advantages(self, &rewards)
        };
        Scored {
            name: group.name.clone(),
            prompt_ids: group.prompt_ids.clone(),
            answers: group.answers.iter().map(|answer| answer.ids.clone()).collect(),
            advantages,
            rewards,
        }
    }
}
