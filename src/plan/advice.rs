//! A plan with what it advises.

use serde::Serialize;

use super::budget::Plan;
use super::forecast::Forecast;
use super::lengths::Lengths;
use super::split::Splits;
use crate::config::RunConfig;
use crate::runtime::units::float;

/// A plan, and what follows from it for the whole run.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// Of one group on one rank.
    #[serde(flatten)]
    pub plan: Plan,
    /// Ways to share the world out; absent where there is one rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub splits: Option<Splits>,
    /// Real lengths of the data, by key, where they were read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lengths: Vec<(String, Lengths)>,
    /// Hours, requests, tokens and disk.
    pub forecast: Forecast,
}

impl Advice {
    /// The lines that the command prints.
    #[must_use]
    pub fn text(&self, config: &RunConfig) -> String {
        let groups = float(config.groups_per_update(self.plan.ranks));
        let mut lines = vec![self.plan.text(config)];
        lines.extend(self.splits.as_ref().map(Splits::text).filter(|text| !text.is_empty()));
        let share = |key: &str| if key == config.data.train_key() { Some(1.0) } else { config.data.share(key) };
        let trained = |key: &str| share(key).map(|share| share * groups);
        lines.extend(self.lengths.iter().map(|(key, lengths)| lengths.text(key, trained(key))));
        lines.push(self.forecast.text(self.plan.rollout.map(|rollout| rollout.tokens)));
        lines.join("\n")
    }
}
