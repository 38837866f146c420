//! The plan of every gate at its own length and group size, as one table.

use serde::Serialize;

use super::addend::Place;
use super::budget::{Plan, Room};
use super::error::Error;
use super::offload::of_shape;
use super::predict::Pace;
use super::rollout::Rollout;
use super::seconds::Rates;
use crate::config::{Gate, Gradient, RunConfig};
use crate::model::shape::Shape;
use crate::prompt::handoff::Keeping;
use crate::runtime::units::{Bytes, Pages, Tokens};

/// The gates that train, in their order.
fn gates() -> impl Iterator<Item = Gate> {
    Gate::all().into_iter().filter(|gate| !gate.is_endpoint())
}

/// `config` at a gate's own length and group.
fn at(gate: &Gate, config: &RunConfig, gradient: Gradient) -> RunConfig {
    let own = gate.own();
    let mut config = config.clone();
    config.context.max_seq_len = own.positions;
    config.context.prompt_len = own.prompt_len;
    config.context.answer_len = own.answer_len;
    config.context.cp_pages_per_gpu = None;
    config.grpo.group_size = own.group_size;
    config.grpo.gradient = gradient;
    config.rollout.sample = gate.samples();
    config.rollout.max_tokens = gate.sampled_tokens().or(config.rollout.max_tokens);
    config
}

/// The plan of one gate. Bytes of a rank are those of the rank that holds most.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Name of the gate.
    pub gate: &'static str,
    /// Positions of prompt and answer.
    pub positions: Tokens,
    /// Answers of a group.
    pub group: u64,
    /// Pages of the prompt.
    pub pages: Pages,
    /// Pages of a rank.
    pub pages_per_rank: Pages,
    /// Device memory of a rank.
    pub device_bytes: Bytes,
    /// Host memory of a rank.
    pub host_bytes: Bytes,
    /// Host memory of a node.
    pub node_host_bytes: Bytes,
    /// Where pages and tail inputs wait for the sweep, and what is kept.
    pub keeping: Keeping,
    /// How answers are sampled; absent where they come with the data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout: Option<Rollout>,
    /// Predicted seconds of a group, all its updates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Whether it fits; absent where the room is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fits: Option<bool>,
    /// The setting that makes the largest addend smaller; absent where the gate fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub knob: Option<String>,
}

/// The plans of all gates.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Table {
    pub model_type: &'static str,
    /// Gradient mode of every gate.
    pub gradient: String,
    /// Ranks in the world.
    pub ranks: u64,
    /// Ranks that share a node's host memory.
    pub ranks_per_node: u64,
    /// Rates behind the seconds; absent without a prediction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rates: Option<Rates>,
    /// One row for each gate.
    pub gates: Vec<Row>,
    /// The first gate that does not fit.
    #[serde(skip)]
    refused: Option<Error>,
}

/// The plan of every gate, for a world of `ranks`.
#[must_use]
pub fn table(
    config: &RunConfig,
    ranks: u64,
    shape: &Shape,
    room: &Room,
    gradient: Gradient,
    pace: Option<&Pace>,
) -> Table {
    let mut refused = None;
    let mut row = |gate: Gate| {
        let config = at(&gate, config, gradient);
        let mut plan = of_shape(&config, ranks, Some(shape), room);
        if let Some(pace) = pace {
            plan.time(&config, shape, pace);
        }
        let outcome = plan.refuse(room);
        let known = room.device.is_some() || room.host.is_some();
        let knob = outcome.as_ref().err().and_then(|error| knob(&plan, error));
        let fits = (known || outcome.is_err()).then_some(outcome.is_ok());
        if let (None, Err(error)) = (&refused, outcome) {
            refused = Some(error.at_gate(gate.name()));
        }
        Row {
            gate: gate.name(),
            positions: config.context.max_seq_len,
            group: config.grpo.group_size,
            pages: plan.pages,
            pages_per_rank: plan.pages_per_rank,
            device_bytes: plan.sum(Place::Device),
            host_bytes: plan.sum(Place::Host),
            node_host_bytes: Bytes(plan.sum(Place::Host).0.saturating_mul(plan.ranks_per_node)),
            keeping: plan.keeping,
            rollout: plan.rollout,
            seconds: plan.seconds.as_ref().map(|seconds| seconds.round),
            fits,
            knob,
        }
    };
    let gates = gates().map(&mut row).collect();
    Table {
        model_type: shape.model_type,
        gradient: gradient.to_string(),
        ranks,
        ranks_per_node: if room.ranks_here == 0 { ranks } else { room.ranks_here.min(ranks) },
        rates: pace.map(|pace| *pace.rates()),
        gates,
        refused,
    }
}

/// The setting that makes the largest addend of the refused memory smaller, or a token faster.
fn knob(plan: &Plan, error: &Error) -> Option<String> {
    let what = match error {
        Error::DoesNotFit { what, .. } => what,
        Error::TooSlow { seconds, how, .. } => return Some(format!("{seconds:.3} s a token: {how}")),
    };
    let place = if *what == "device" { Place::Device } else { Place::Host };
    let largest = plan.alive(&[place]).into_iter().max_by_key(|addend| addend.bytes)?;
    Some(format!("{what} memory: {}, {}: {}", largest.name, largest.bytes, largest.knob))
}

impl Table {
    /// Refuses the first gate that does not fit.
    ///
    /// # Errors
    /// As [`Plan::refuse`], with the gate's name.
    pub fn refuse(self) -> Result<(), Error> {
        self.refused.map_or(Ok(()), Err)
    }

    /// The lines that the command prints.
    #[must_use]
    pub fn text(&self) -> String {
        let ranks = self.ranks;
        let here = self.ranks_per_node;
        let mut lines = vec![
            format!("gradient {}, {ranks} ranks, {here} on a node", self.gradient),
            format!(
                "{:<12} {:>9} {:>5} {:>6} {:>6} {:>11} {:>11} {:>11} {:>9}  fits",
                "gate", "positions", "group", "pages", "a rank", "device", "host", "node's host", "seconds"
            ),
        ];
        lines.extend(self.gates.iter().map(|row| {
            let fits = match (row.fits, &row.knob) {
                (None, _) => "not compared".to_owned(),
                (Some(true), _) => "yes".to_owned(),
                (Some(false), knob) => format!("no, {}", knob.as_deref().unwrap_or_default()),
            };
            let seconds = row.seconds.map_or("-".to_owned(), |seconds| format!("{seconds:.1}"));
            format!(
                "{:<12} {:>9} {:>5} {:>6} {:>6} {:>11} {:>11} {:>11} {:>9}  {fits}",
                row.gate,
                row.positions.to_string(),
                row.group,
                row.pages.to_string(),
                row.pages_per_rank.to_string(),
                row.device_bytes.to_string(),
                row.host_bytes.to_string(),
                row.node_host_bytes.to_string(),
                seconds
            )
        }));
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gate_has_the_pages_that_the_ladder_promises() {
        let ladder = Gate::named("gate7_online").map(|last| [vec![last.clone()], last.all_before()].concat());
        let ladder = ladder.into_iter().flatten().rev().filter(|gate| !gate.is_endpoint());
        let pages: Vec<u64> = ladder.map(|gate| gate.own().prompt_len.pages(Tokens(64)).0).collect();
        assert_eq!(pages, [384, 1920, 3968, 8064, 16_256, 32_640, 32_640, 32_640, 32_640, 384]);
        let each: Vec<u64> = pages.iter().map(|pages| pages.div_ceil(8)).collect();
        assert_eq!(each, [48, 240, 496, 1008, 2032, 4080, 4080, 4080, 4080, 48]);
    }
}
