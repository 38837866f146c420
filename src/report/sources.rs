//! The numbers of each source of a mix (`data.sources`).

use serde::{Deserialize, Serialize};

use crate::runtime::units::float;

/// A source in one update.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "the fields are those of a step, over the groups of the source")]
pub struct SourceStep {
    /// Groups of the update from this source.
    pub groups: u64,
    /// Passes over the prompts of the source so far, parts of one included.
    pub epoch: f64,
    pub reward_mean: Option<f64>,
    pub reward_std: Option<f64>,
    pub group_std: Option<f64>,
    pub frac_groups_zero_std: f64,
    pub reward_missing: u64,
    pub prompt_tokens: u64,
    pub answer_tokens: Option<[f64; 3]>,
    pub truncated_share: Option<f64>,
}

impl SourceStep {
    /// Every number with the last part of its tag.
    pub(super) fn numbers(&self) -> [(&'static str, Option<f64>); 10] {
        [
            ("groups", Some(float(self.groups))),
            ("epoch", Some(self.epoch)),
            ("reward/mean", self.reward_mean),
            ("reward/std", self.reward_std),
            ("reward/group_std", self.group_std),
            ("reward/groups_zero_std_share", self.reward_mean.map(|_| self.frac_groups_zero_std)),
            ("reward/missing", Some(float(self.reward_missing))),
            ("prompts/tokens", Some(float(self.prompt_tokens))),
            ("answers/tokens_mean", self.answer_tokens.map(|[mean, ..]| mean)),
            ("answers/truncated_share", self.truncated_share),
        ]
    }
}

/// A source over a whole run.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct SourceTotal {
    /// Groups of all updates; those of several updates count once.
    pub groups: u64,
    pub epoch: f64,
    /// Mean reward in the first update with groups of this source.
    pub reward_first: Option<f64>,
    /// The same in the last one.
    pub reward: Option<f64>,
    /// Of the last update with groups of this source.
    pub answer_tokens: Option<[f64; 3]>,
    pub truncated_share: Option<f64>,
}

impl SourceTotal {
    /// Adds an update; `is_new`: its groups are in no earlier one.
    pub fn add(&mut self, step: &SourceStep, is_new: bool) {
        self.groups += if is_new { step.groups } else { 0 };
        self.epoch = step.epoch;
        if step.groups == 0 {
            return;
        }
        self.reward_first = self.reward_first.or(step.reward_mean);
        self.reward = step.reward_mean.or(self.reward);
        self.answer_tokens = step.answer_tokens.or(self.answer_tokens);
        self.truncated_share = step.truncated_share.or(self.truncated_share);
    }

    /// The value of the row in the table at the end of a run.
    pub(super) fn text(&self) -> String {
        let rewards = match (self.reward_first, self.reward) {
            (Some(first), Some(last)) => format!(", reward {first:.3} -> {last:.3}"),
            _ => String::new(),
        };
        format!("{} groups, {:.2} epochs{rewards}", self.groups, self.epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::super::step::Step;
    use super::*;

    #[test]
    fn a_source_has_the_numbers_of_its_own_groups_and_a_run_adds_them_up() {
        let rewards = [vec![Some(0.0), Some(1.0)], vec![Some(1.0), None]];
        let step = SourceStep { epoch: 0.5, ..Step::of_source(&rewards, &[10, 20], &[3, 5, 4, 8], Some(1)) };
        assert_eq!((step.groups, step.reward_missing, step.prompt_tokens), (2, 1, 30));
        assert_eq!((step.answer_tokens, step.truncated_share), (Some([5.0, 3.0, 8.0]), Some(0.25)));
        assert!((step.reward_mean.unwrap() - 2.0 / 3.0).abs() < 1e-15);
        let none = Step::of_source(&[], &[], &[], Some(0));
        assert_eq!((none.groups, none.reward_mean, none.truncated_share), (0, None, Some(0.0)));
        let mut total = SourceTotal::default();
        total.add(&step, true);
        total.add(&step, false);
        total.add(&SourceStep { epoch: 0.75, reward_mean: Some(1.0), ..step }, true);
        total.add(&SourceStep { epoch: 0.75, ..none }, true);
        assert_eq!((total.groups, total.reward), (4, Some(1.0)));
        assert_eq!(total.text(), "4 groups, 0.75 epochs, reward 0.667 -> 1.000");
    }
}
