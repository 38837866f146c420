//! The verb that shows what a run will draw from its data: files, weights, shares, epochs.

use std::path::PathBuf;

use clap::Args;
use longstraw::config::{self, RunConfig, WithoutFile};
use longstraw::model::shape::Shape;
use longstraw::plan::{self, Lengths};
use longstraw::report::{print_result, say};
use longstraw::runtime::failure::{Exit, Failure};
use longstraw::runtime::units::{Tokens, float, from_index};
use serde::Serialize;

use super::arguments::at_least_one;
use super::output::print_json;
use super::plan::lengths;
use super::start::ConfigFlags;

#[derive(Args, Debug)]
pub(super) struct MixFlags {
    /// Ranks of the world (default: `parallel.cp_size`, else 1); an update has more groups on more replicas
    #[arg(long, value_parser = at_least_one)]
    ranks: Option<u64>,
    /// The HF folder with the tokenizer (default: model.path)
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// One file to train on.
#[derive(Debug, Serialize)]
struct Row {
    source: String,
    file: PathBuf,
    prompts: usize,
    tokens_mean: f64,
    tokens_max: Tokens,
    /// Records that a run refuses or cuts.
    too_long: usize,
    weight: f64,
    /// Of the groups of a run.
    share: f64,
    /// Groups of the run, to less than one.
    groups: f64,
    /// Passes over the file in the run.
    epochs: f64,
}

/// The mix of a run.
#[derive(Debug, Serialize)]
struct Mix {
    updates: u64,
    groups_per_update: u64,
    groups: u64,
    sources: Vec<Row>,
}

pub(super) fn mix(flags: ConfigFlags, mix_flags: &MixFlags) -> Result<Exit, Failure> {
    let loaded = config::load(&flags.overrides(WithoutFile::Defaults))?;
    let config = &loaded.run;
    let ranks = mix_flags.ranks.or(config.parallel.cp_size).unwrap_or(1);
    let problems = config.check(Some(ranks));
    if !problems.is_empty() {
        return Err(config::Error::Refused { problems }.into());
    }
    let model = mix_flags.model.as_deref().map_or_else(|| config.model_path(), Ok)?;
    let shape = Shape::read(model, None)?;
    let read = lengths(config, &shape, plan::model_folder(model))?;
    let mix = Mix::of(config, ranks, &read);
    if mix_flags.json {
        print_json(&mix);
    } else {
        print_result(&mix.text());
    }
    for (key, lengths) in read.iter().filter(|(_, lengths)| lengths.too_long > 0) {
        say(&lengths.text(key, None));
    }
    Ok(Exit::Done)
}

impl Mix {
    fn of(config: &RunConfig, ranks: u64, read: &[(String, Lengths)]) -> Mix {
        let groups_per_update = config.groups_per_update(ranks);
        let rounds = config.run.steps.div_ceil(config.grpo.updates_per_group.max(1));
        let groups = rounds.saturating_mul(groups_per_update);
        let weights: Vec<f64> = match config.data.sources() {
            [] => vec![1.0],
            sources => sources.iter().map(|source| source.weight).collect(),
        };
        let sum: f64 = weights.iter().sum();
        let row = |((key, file), weight): ((String, &std::path::Path), f64)| {
            let (_, lengths) = read.iter().find(|(known, _)| *known == key)?;
            let share = weight / sum;
            let own = share * float(groups);
            Some(Row {
                source: key.trim_start_matches("data.sources.").to_owned(),
                file: file.to_owned(),
                prompts: lengths.records,
                tokens_mean: lengths.mean,
                tokens_max: lengths.longest,
                too_long: lengths.too_long,
                weight,
                share,
                groups: own,
                epochs: own / float(from_index(lengths.records.max(1))),
            })
        };
        let sources = config.data.train_files().into_iter().zip(weights).filter_map(row).collect();
        Mix { updates: config.run.steps, groups_per_update, groups, sources }
    }

    fn text(&self) -> String {
        let Mix { updates, groups_per_update, groups, sources } = self;
        let mut lines = vec![
            format!("{groups} groups in {updates} updates of {groups_per_update}"),
            format!(
                "{:<20}  {:>9}  {:>13}  {:>10}  {:>8}  {:>7}  {:>10}  {:>7}",
                "source", "prompts", "tokens (mean)", "(most)", "weight", "share", "groups", "epochs"
            ),
        ];
        for Row { source, prompts, tokens_mean, tokens_max, weight, share, groups, epochs, .. } in sources {
            lines.push(format!(
                "{source:<20}  {prompts:>9}  {tokens_mean:>13.0}  {:>10}  {weight:>8}  {:>5.1} %  {groups:>10.1}  {epochs:>7.2}",
                tokens_max.0,
                100.0 * share
            ));
        }
        lines.join("\n")
    }
}
