//! Strong and weak scaling: the same update on 1, 2, 4 … ranks of one job, the others idle.
//!
//! ```text
//!   strong   the prompt of `--prompt` at every number of ranks
//!   weak     a prompt that is longer by the number of ranks: the positions of a rank, and so its memory, stay the same
//! ```

use serde::Serialize;
use tch::Device;

use super::rates::Work;
use super::{Bench, Error, Options, Run};
use crate::config::Gradient;
use crate::model::decoder::Decoder;
use crate::model::mixer::CpGroup;
use crate::model::spec::Spec;
use crate::runtime::failure::Failure;
use crate::runtime::units::{Bytes, Tokens, float, from_index};
use crate::world::exchange;
use crate::world::{Axis, World};

/// How the prompt goes with the number of ranks.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scaling {
    /// It stays; on one rank both kinds are the same.
    Strong,
    /// It grows with them.
    Weak,
}

/// One update on some of the ranks.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Row {
    pub scaling: Scaling,
    pub ranks: usize,
    pub prompt: Tokens,
    /// Share of one rank's pace that each rank keeps: strong T₁ / (R · T), weak the operations a second and rank of the prompt's
    /// phases (capture and tail) against those of one rank.
    pub efficiency: f64,
    /// Bytes that the ranks have sent to each other, all together.
    pub sent_bytes: Bytes,
    /// On rank 0.
    pub run: Run,
}

/// Ranks that take part, one number after another: powers of two, and all.
fn counts(ranks: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1), |count: &usize| count.checked_mul(2));
    powers.take_while(|&count| count < ranks).chain([ranks]).collect()
}

/// Positions of the prompts on `ranks` ranks.
fn prompts(prompt: Tokens, ranks: usize) -> Vec<(Scaling, Tokens)> {
    let longer = (ranks > 1).then(|| (Scaling::Weak, Tokens(prompt.0.saturating_mul(from_index(ranks)))));
    std::iter::once((Scaling::Strong, prompt)).chain(longer).collect()
}

/// Work and seconds of a run, which its efficiency is computed from.
struct Pace {
    ranks: f64,
    /// Operations of a pass over the prompt, 10¹².
    tera: f64,
    prompt_seconds: f64,
    total_seconds: f64,
}

impl Pace {
    fn of(spec: &Spec, ranks: usize, prompt: Tokens, run: &Run) -> Pace {
        let tera = Work::of(spec, prompt).tera();
        let prompt_seconds = run.capture_seconds + run.tail_seconds;
        Pace { ranks: float(from_index(ranks)), tera, prompt_seconds, total_seconds: run.total_seconds }
    }

    fn efficiency(&self, scaling: Scaling, one: &Pace) -> f64 {
        match scaling {
            Scaling::Strong => one.total_seconds / (self.ranks * self.total_seconds),
            Scaling::Weak => self.tera / one.tera * one.prompt_seconds / (self.ranks * self.prompt_seconds),
        }
    }
}

/// Some ranks of the job that share a prompt.
struct Part {
    cp: Axis,
    ep: Axis,
    /// Whether this rank is one of them.
    is_member: bool,
}

impl Part {
    /// The first `ranks` ranks of the job; the others form a part that does nothing. Every rank takes part.
    fn first(world: &World, ranks: usize, options: &Options) -> Result<Part, Failure> {
        let is_member = world.all.rank().0 < ranks;
        let cp = world.split(usize::from(!is_member));
        let ep = world.split(world.all.rank().0);
        if !options.through_host {
            exchange::connect(&cp, options.device)?;
        }
        Ok(Part { cp, ep, is_member })
    }
}

/// Measures every number of ranks, group size and gradient mode.
pub(super) fn sweep(bench: &Bench) -> Result<Vec<Row>, Failure> {
    let (world, options) = (bench.world, bench.options);
    if world.ep.size() > 1 {
        return world.agree(Err(Error::SweepExperts { ep_size: world.ep.size() }.into()));
    }
    let mut rows: Vec<Row> = Vec::new();
    let mut is_first = true;
    for ranks in counts(world.all.size()) {
        let part = Part::first(world, ranks, options)?;
        for (scaling, prompt) in prompts(options.prompt, ranks) {
            // On a GPU libraries choose their kernels for every shape anew.
            if options.device != Device::Cpu || is_first {
                warm_up(bench, &part, prompt)?;
                is_first = false;
            }
            for &group in &options.groups {
                for &gradient in &options.gradients {
                    let (run, sent_bytes) = measured(bench, &*bench.decoder, &part, prompt, group, gradient)?;
                    let Some(run) = run else { continue };
                    let is_base =
                        |row: &&Row| row.ranks == 1 && row.run.group == run.group && row.run.gradient == run.gradient;
                    let pace = Pace::of(&bench.spec, ranks, prompt, &run);
                    let one = rows.iter().find(is_base).map(|row| Pace::of(&bench.spec, 1, row.prompt, &row.run));
                    let efficiency = one.map_or(1.0, |one| pace.efficiency(scaling, &one));
                    rows.push(Row { scaling, ranks, prompt, efficiency, sent_bytes, run });
                }
            }
        }
    }
    Ok(rows)
}

/// Unmeasured updates of every group and mode, through the first layers alone.
fn warm_up(bench: &Bench, part: &Part, prompt: Tokens) -> Result<(), Failure> {
    for &group in &bench.options.groups {
        for &gradient in &bench.options.gradients {
            measured(bench, &*bench.short, part, prompt, group, gradient)?;
        }
    }
    Ok(())
}

/// One update on the ranks of `part`, and what all of them have sent meanwhile; nothing on the others, which sleep.
fn measured(
    bench: &Bench,
    decoder: &dyn Decoder,
    part: &Part,
    prompt: Tokens,
    group: u64,
    gradient: Gradient,
) -> Result<(Option<Run>, Bytes), Failure> {
    let world = bench.world;
    let cp_group = CpGroup { axis: &part.cp, ep: &part.ep, ledger: world.ledger() };
    let before = part.cp.sent_bytes();
    let run = part.is_member.then(|| bench.paged(decoder, cp_group, prompt, group, gradient)).transpose()?;
    let sent = part.cp.sent_bytes().0 - before.0;
    world.all.quiet_barrier();
    Ok((run, Bytes(world.all.gather_numbers(sent).iter().sum())))
}

/// The rows as a table.
pub(super) fn table(rows: &[Row]) -> Vec<String> {
    let head = format!(
        "{:<7} {:>5} {:>10} {:<9} {:>5} {:>9} {:>8} {:>9} {:>8} {:>9} {:>10} {:>12}",
        "scaling",
        "ranks",
        "prompt",
        "gradient",
        "group",
        "capture",
        "score",
        "answers",
        "tail",
        "total s",
        "efficiency",
        "sent"
    );
    let line = |row: &Row| {
        let run = &row.run;
        format!(
            "{:<7} {:>5} {:>10} {:<9} {:>5} {:>9.2} {:>8.2} {:>9.2} {:>8.2} {:>9.2} {:>10.3} {:>12}",
            match (row.scaling, row.ranks) {
                (_, 1) => "–",
                (Scaling::Strong, _) => "strong",
                (Scaling::Weak, _) => "weak",
            },
            row.ranks,
            row.prompt.0,
            run.gradient,
            run.group,
            run.capture_seconds,
            run.score_seconds,
            run.answers_seconds,
            run.tail_seconds,
            run.total_seconds,
            row.efficiency,
            row.sent_bytes.to_string()
        )
    };
    std::iter::once(head).chain(rows.iter().map(line)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_doubled_up_to_all_of_them() {
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(2), [1, 2]);
        assert_eq!(counts(6), [1, 2, 4, 6]);
        assert_eq!(counts(8), [1, 2, 4, 8]);
    }

    #[test]
    fn only_the_weak_prompt_grows() {
        assert_eq!(prompts(Tokens(96), 1), [(Scaling::Strong, Tokens(96))]);
        assert_eq!(prompts(Tokens(96), 4), [(Scaling::Strong, Tokens(96)), (Scaling::Weak, Tokens(384))]);
    }

    #[test]
    fn ranks_that_keep_one_ranks_pace_are_fully_efficient() {
        let one = Pace { ranks: 1.0, tera: 100.0, prompt_seconds: 10.0, total_seconds: 12.0 };
        let strong = Pace { ranks: 4.0, tera: 100.0, prompt_seconds: 2.5, total_seconds: 3.0 };
        // Four times the positions: sixteen times the attention on four ranks.
        let weak = Pace { ranks: 4.0, tera: 1_600.0, prompt_seconds: 40.0, total_seconds: 48.0 };
        let near = |found: f64, wanted: f64| assert!((found - wanted).abs() < 1e-12, "{found}, {wanted}");
        near(strong.efficiency(Scaling::Strong, &one), 1.0);
        near(weak.efficiency(Scaling::Weak, &one), 1.0);
        near(Pace { total_seconds: 4.0, ..strong }.efficiency(Scaling::Strong, &one), 0.75);
        near(Pace { prompt_seconds: 80.0, ..weak }.efficiency(Scaling::Weak, &one), 0.5);
    }
}
