//! Real lengths of the data: what a record would be refused for, and the seconds of updates at these lengths.

use std::path::Path;

use serde::Serialize;

use super::budget::Plan;
use super::predict::{Pace, predict};
use super::record_counts::RecordCounts;
use crate::config::{RunConfig, TooLong};
use crate::data::{self, Answers, Dataset, GroupOrder, Limits, Tokenizer};
use crate::model::shape::Shape;
use crate::runtime::units::{Tokens, as_index, float, from_index};

/// No record is refused for its length when lengths are read.
const NO_LIMIT: Tokens = Tokens(1 << 40);
/// Lengths at which a group is timed; between them seconds are a straight line.
const KNOTS: u64 = 8;
/// Updates whose prompts are looked up.
const UPDATES_MAX: u64 = 1000;
/// Records that are named.
const NAMED_MAX: usize = 5;

/// Lengths of a data set.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Lengths {
    pub records: usize,
    /// Longest prompt of the file, as it stands there.
    pub longest: Tokens,
    pub mean: f64,
    /// Prompts above `context.prompt_len`, or answers above `context.answer_len`, which the run refuses or cuts.
    pub too_long: usize,
    /// Some of them, each with its tokens.
    pub named: Vec<String>,
    /// Whether they are cut.
    pub cuts: bool,
    /// What records lack that rewards read.
    #[serde(flatten)]
    counts: RecordCounts,
    /// Longest prompt as a run takes it: at most `context.prompt_len`.
    pub taken_longest: Tokens,
    pub taken_mean: f64,
    /// Prompts in the order of the file, as a run takes them: at most `context.prompt_len`.
    #[serde(skip)]
    prompts: Vec<Tokens>,
    /// Weight and prompts of each file of a mix; empty for one file.
    #[serde(skip)]
    sources: Vec<(u64, usize)>,
}

impl Lengths {
    /// Reads a data set as a run does, but for its limits of length. `folder` is the model's.
    ///
    /// # Errors
    /// As a run: the first record that is none.
    pub fn read(config: &RunConfig, shape: &Shape, path: &Path, folder: &Path) -> Result<Lengths, data::Error> {
        let has_tokenizer = folder.join("tokenizer.json").is_file();
        let tokenizer = has_tokenizer.then(|| Tokenizer::open(folder)).transpose()?;
        let group_size = as_index(config.grpo.group_size);
        let limits = Limits {
            prompt_len_max: NO_LIMIT,
            answer_len_max: NO_LIMIT,
            vocab_size: shape.vocabulary,
            answers: if config.rollout.sample { Answers::Sampled } else { Answers::Given(group_size) },
            too_long: TooLong::Refuse,
        };
        let data = Dataset::open(path, tokenizer.as_ref(), &limits)?;
        let (most, answer_most) = (config.context.prompt_len, config.context.answer_len);
        let groups = || (0..data.len()).map(|index| data.group(index));
        let mut named = Vec::new();
        for group in groups() {
            let answer = group.answers.iter().map(|answer| Tokens(from_index(answer.ids.len()))).max();
            if group.prompt_tokens > most {
                named.push(format!("{}: prompt of {} tokens", group.name, group.prompt_tokens));
            } else if let Some(answer) = answer.filter(|&answer| answer > answer_most) {
                named.push(format!("{}: answer of {answer} tokens", group.name));
            }
        }
        let whole: Vec<Tokens> = groups().map(|group| group.prompt_tokens).collect();
        let prompts: Vec<Tokens> = whole.iter().map(|&tokens| tokens.min(most)).collect();
        let too_long = named.len();
        named.truncate(NAMED_MAX);
        Ok(Lengths {
            records: data.len(),
            longest: whole.iter().copied().max().unwrap_or_default(),
            mean: mean(&whole),
            taken_longest: prompts.iter().copied().max().unwrap_or_default(),
            taken_mean: mean(&prompts),
            too_long,
            named,
            cuts: config.data.too_long != TooLong::Refuse,
            counts: RecordCounts::of(config, tokenizer.as_ref(), &data)?,
            prompts,
            sources: Vec::new(),
        })
    }

    /// Of several files, each with its weight and its lengths; the mean is that of the groups of a run.
    #[must_use]
    pub fn joined(sets: &[(u64, &Lengths)]) -> Lengths {
        let weights: u64 = sets.iter().map(|(weight, _)| weight).sum();
        let share = |weight: u64| float(weight) / float(weights.max(1));
        let mut named: Vec<String> = sets.iter().flat_map(|(_, set)| set.named.clone()).collect();
        named.truncate(NAMED_MAX);
        Lengths {
            records: sets.iter().map(|(_, set)| set.records).sum(),
            longest: sets.iter().map(|(_, set)| set.longest).max().unwrap_or_default(),
            mean: sets.iter().map(|(weight, set)| share(*weight) * set.mean).sum(),
            taken_longest: sets.iter().map(|(_, set)| set.taken_longest).max().unwrap_or_default(),
            taken_mean: sets.iter().map(|(weight, set)| share(*weight) * set.taken_mean).sum(),
            too_long: sets.iter().map(|(_, set)| set.too_long).sum(),
            named,
            cuts: sets.iter().any(|(_, set)| set.cuts),
            counts: RecordCounts::sum(sets.iter().map(|(_, set)| &set.counts)),
            prompts: sets.iter().flat_map(|(_, set)| set.prompts.iter().copied()).collect(),
            sources: sets.iter().map(|(weight, set)| (*weight, set.records)).collect(),
        }
    }

    /// What a run would end with for these records, which `key` names; none where it takes all of them.
    #[must_use]
    pub fn refusals(&self, config: &RunConfig, key: &str) -> Vec<String> {
        // Of several files together each one says it for itself.
        if !self.sources.is_empty() {
            return Vec::new();
        }
        let too_long = (self.too_long > 0 && !self.cuts).then(|| {
            format!(
                "{key}: {} of {} records are too long, and with data.too_long = \"refuse\" `longstraw train` ends with exit 3 there; \
                 raise context.prompt_len or context.answer_len, or let data.too_long cut prompts",
                self.too_long, self.records
            )
        });
        too_long.into_iter().chain(self.counts.refusals(config, key, self.records)).collect()
    }

    /// The order of the groups of a run.
    fn order(&self, config: &RunConfig) -> GroupOrder {
        let seed = config.data.shuffle.then_some(config.run.seed);
        if self.sources.is_empty() {
            GroupOrder::new(seed, self.prompts.len())
        } else {
            GroupOrder::mixed(seed, &self.sources)
        }
    }

    /// Mean seconds of the first updates of a run, whose turns wait for their longest prompt.
    #[must_use]
    pub fn update_seconds(&self, config: &RunConfig, plan: &Plan, shape: &Shape, pace: &Pace) -> Option<f64> {
        let shortest = self.prompts.iter().copied().min()?;
        let knots = self.knots(shortest);
        let timed = knots.iter().map(|&tokens| {
            let mut config = config.clone();
            config.context.prompt_len = tokens;
            config.context.max_seq_len = Tokens(tokens.0.saturating_add(config.context.answer_len.0));
            Some(predict(&config, plan.ranks, shape, plan.chosen(), pace)?.of_update(1))
        });
        let timed: Vec<f64> = timed.collect::<Option<_>>()?;
        let seconds = |tokens: Tokens| between(&knots, &timed, tokens);
        let mut order = self.order(config);
        let side_by_side = as_index(config.dp_size(plan.ranks)).max(1);
        let groups = as_index(config.groups_per_update(plan.ranks)).max(1);
        let updates = config.run.steps.clamp(1, UPDATES_MAX);
        let mut sum = 0.0;
        for _ in 0..updates {
            let taken = order.take(groups);
            let turns = taken.chunks(side_by_side);
            sum += turns
                .map(|turn| turn.iter().map(|&index| seconds(self.prompts[index])).fold(0.0, f64::max))
                .sum::<f64>();
        }
        Some(sum / float(updates))
    }

    /// Lengths from the shortest to the longest prompt, evenly apart.
    fn knots(&self, shortest: Tokens) -> Vec<Tokens> {
        let range = self.taken_longest.0 - shortest.0;
        let mut knots: Vec<Tokens> = (0..=KNOTS).map(|at| Tokens(shortest.0 + range * at / KNOTS)).collect();
        knots.dedup();
        knots
    }

    /// The lines that the command prints; `groups` of an update that are made of these prompts, for what updates are made of.
    #[must_use]
    pub fn text(&self, key: &str, groups: Option<f64>) -> String {
        let Lengths { records, longest, mean, taken_mean, too_long, .. } = self;
        let update = groups.map(|groups| format!("; {:.0} prompt tokens an update", taken_mean * groups));
        let mut lines = vec![format!(
            "{key}: {records} prompts, the longest {longest} tokens, {mean:.0} on average{}",
            update.unwrap_or_default()
        )];
        if *too_long > 0 {
            let what = if self.cuts { "cut as data.too_long says" } else { "refused as too long" };
            let more = if *too_long > self.named.len() { ", …" } else { "" };
            lines.push(format!("  {too_long} of them would be {what}: {}{more}", self.named.join("; ")));
        }
        lines.extend(self.counts.lines());
        lines.join("\n")
    }
}

fn mean(tokens: &[Tokens]) -> f64 {
    let sum: u64 = tokens.iter().map(|tokens| tokens.0).sum();
    float(sum) / float(from_index(tokens.len().max(1)))
}

/// A straight line between the knots around `tokens`.
fn between(knots: &[Tokens], values: &[f64], tokens: Tokens) -> f64 {
    let at = knots.partition_point(|&knot| knot < tokens).min(knots.len().saturating_sub(1));
    let Some(before) = at.checked_sub(1) else { return values[at] };
    let (low, high) = (float(knots[before].0), float(knots[at].0));
    let share = (float(tokens.0) - low) / (high - low).max(1.0);
    values[before] + share * (values[at] - values[before])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_between_knots_lie_on_a_line() {
        let knots = [10, 20, 40].map(Tokens);
        for (tokens, expected) in [(10, 1.0), (15, 2.0), (20, 3.0), (30, 8.0), (40, 13.0)] {
            assert!((between(&knots, &[1.0, 3.0, 13.0], Tokens(tokens)) - expected).abs() < 1e-12, "{tokens}");
        }
        assert!((between(&[Tokens(7)], &[4.0], Tokens(7)) - 4.0).abs() < 1e-12);
    }
}
