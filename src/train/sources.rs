//! The files to train on: one, or a mix of several with weights. What a user is told of them, the order of their groups, and
//! the numbers of each in an update.

use std::collections::BTreeMap;
use std::path::Path;

use super::round::Round;
use crate::config::{DataConfig, RunConfig, source_key};
use crate::data::{Dataset, GroupOrder};
use crate::report::{SourceStep, Step};
use crate::runtime::failure::Failure;
use crate::runtime::units::float;

/// One file of a mix.
#[derive(Debug)]
pub(super) struct TrainSource {
    name: String,
    weight_parts: u64,
    /// Index of its first group, and how many there are.
    first: usize,
    groups: usize,
    /// What a user should know of the file.
    notes: Vec<String>,
}

/// Opens the files of a mix one after another, and joins them.
pub(super) fn open(
    config: &DataConfig,
    open: impl Fn(&Path) -> Result<Dataset, Failure>,
) -> Result<(Dataset, Vec<TrainSource>), Failure> {
    let mut sets = Vec::new();
    let mut sources = Vec::new();
    let mut first = 0;
    for source in config.sources() {
        let data = open(&source.path)?;
        let groups = data.len();
        let notes = file_notes(&source_key(&source.name), &data);
        sources.push(TrainSource {
            name: source.name.clone(),
            weight_parts: source.weight_parts(),
            first,
            groups,
            notes,
        });
        sets.push((source.name.clone(), data));
        first += groups;
    }
    Ok((Dataset::joined(sets), sources))
}

/// The order of the groups from its start.
pub(super) fn start_of_order(config: &RunConfig, train: &Dataset, sources: &[TrainSource]) -> GroupOrder {
    let seed = config.data.shuffle.then_some(config.run.seed);
    if sources.is_empty() {
        return GroupOrder::new(seed, train.len().max(1));
    }
    let mix: Vec<(u64, usize)> = sources.iter().map(|source| (source.weight_parts, source.groups)).collect();
    GroupOrder::mixed(seed, &mix)
}

/// What a user should know of the files to train on.
pub(super) fn notes(train: &Dataset, sources: &[TrainSource]) -> Vec<String> {
    if sources.is_empty() {
        return file_notes("data.path", train);
    }
    let parts: u64 = sources.iter().map(|source| source.weight_parts).sum();
    let share = |source: &TrainSource| {
        let percent = 100.0 * float(source.weight_parts) / float(parts);
        format!("{} {percent:.1} % ({} prompts)", source.name, source.groups)
    };
    let mix =
        format!("data.sources, shares of the groups: {}", sources.iter().map(share).collect::<Vec<_>>().join(", "));
    [mix].into_iter().chain(sources.iter().flat_map(|source| source.notes.iter().cloned())).collect()
}

/// What a user should know of a data file: where its tokens are, and what was cut.
pub(super) fn file_notes(key: &str, data: &Dataset) -> Vec<String> {
    let kept = data.kept_in().map(|(file, bytes)| {
        format!("{key}: the ranks of a machine read the token ids from {} ({bytes})", file.display())
    });
    kept.into_iter().chain(data.cuts().map(|cuts| format!("{key}: {cuts}"))).collect()
}

/// The numbers of each source in the update that `round` was made of, by its name; empty where there is one file. `passes`:
/// over each source; `sampled`: whether the policy gave the answers.
pub(super) fn describe(
    train: &Dataset,
    sources: &[TrainSource],
    passes: &[f64],
    round: &Round,
    sampled: bool,
) -> BTreeMap<String, SourceStep> {
    let of_source = |(source, &epoch): (&TrainSource, &f64)| {
        let range = source.first..source.first + source.groups;
        let own = || round.places.iter().zip(&round.groups).filter(|(place, _)| range.contains(&place.index));
        let rewards: Vec<_> = own().map(|(_, group)| group.rewards.clone()).collect();
        let prompts: Vec<u64> = own().map(|(place, _)| train.group(place.index).prompt_tokens.0).collect();
        let answers: Vec<u64> = own().flat_map(|(_, group)| group.tokens.iter().copied()).collect();
        let truncated = sampled.then(|| own().map(|(_, group)| group.truncated).sum());
        (source.name.clone(), SourceStep { epoch, ..Step::of_source(&rewards, &prompts, &answers, truncated) })
    };
    sources.iter().zip(passes).map(of_source).collect()
}
