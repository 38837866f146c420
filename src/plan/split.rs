//! How a world may be shared out: ranks that share a prompt (cp) times prompts side by side (dp), with the same groups in an
//! update each time; and the fastest way that fits.

use std::path::Path;

use serde::Serialize;

use super::addend::Place;
use super::budget::Room;
use super::error::Error;
use super::micro_block::micro_block;
use super::offload::of_shape;
use super::predict::Pace;
use super::seconds::{Rates, Seconds};
use crate::config::{DeviceChoice, RunConfig};
use crate::model::shape::Shape;
use crate::runtime::failure::Phase;
use crate::runtime::units::{Bytes, Tokens, float};

/// One way to share a world out.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Split {
    /// Ranks that share a prompt.
    pub cp_size: u64,
    /// Prompts side by side.
    pub dp_size: u64,
    /// Groups of an update one after another, `optimizer.grad_accum` under this split.
    pub turns: u64,
    /// Rows of a micro-block.
    pub micro_block: Tokens,
    /// Predicted seconds of an update; absent without rates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub update_seconds: Option<f64>,
    pub device_bytes: Bytes,
    pub host_bytes: Bytes,
    pub node_host_bytes: Bytes,
    /// Whether it fits and samples fast enough; absent where the room is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fits: Option<bool>,
    /// Why it does not fit, in a few words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// All ways that leave the groups of an update as they are.
#[derive(Clone, Debug, Serialize)]
pub struct Splits {
    /// Groups of an update.
    pub groups: u64,
    /// Ranks in the world.
    pub ranks: u64,
    /// The ways, the fewest ranks for a prompt first.
    pub rows: Vec<Split>,
    /// Ranks that share a prompt in the fastest way that fits; absent without rates, or where none fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fastest: Option<u64>,
    /// Ranks that share a prompt in the plan itself.
    pub planned: u64,
    /// Why `planned` was taken.
    pub because: SplitBecause,
}

/// Why a plan has so many ranks share a prompt.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SplitBecause {
    /// `parallel.cp_size` names them.
    Configured,
    /// Chosen: the fastest that fits, by published rates.
    Fastest,
    /// All ranks: nothing is predicted, one way is left, or none fits.
    All,
}

/// Whether nobody has said how many ranks share a prompt. A stated count of pages says it too, and the conventional schedule
/// knows one way only.
#[must_use]
pub fn is_open(config: &RunConfig) -> bool {
    let context = &config.context;
    config.parallel.cp_size.is_none() && context.cp_pages_per_gpu.is_none() && config.memory.prompt_no_grad
}

/// `config` with `cp_size` of `ranks` ranks for a prompt and the same groups in an update; `None` where they cannot be dealt out
/// evenly, or experts not be spread.
#[must_use]
pub fn shared_out(config: &RunConfig, ranks: u64, cp_size: u64) -> Option<RunConfig> {
    let groups = config.groups_per_update(ranks);
    if cp_size == 0 || !ranks.is_multiple_of(cp_size) || !cp_size.is_multiple_of(config.parallel.ep_size.max(1)) {
        return None;
    }
    let replicas = ranks / cp_size;
    if !groups.is_multiple_of(replicas) {
        return None;
    }
    let mut config = config.clone();
    config.optimizer.grad_accum = groups / replicas;
    config.parallel.cp_size = Some(cp_size);
    config.context.cp_pages_per_gpu = None;
    Some(config)
}

/// Every way to share out `ranks` ranks. `device` is the whole memory of a GPU, by which rows of a micro-block are chosen.
#[must_use]
pub fn splits(
    config: &RunConfig,
    ranks: u64,
    shape: &Shape,
    room: &Room,
    device: Option<Bytes>,
    pace: Option<&Pace>,
) -> Splits {
    let device = device.filter(|_| !room.host_only);
    let ways = (1..=ranks).filter(|cp| ranks.is_multiple_of(*cp));
    let ways = ways.filter_map(|cp| Some((cp, shared_out(config, ranks, cp)?)));
    let rows: Vec<Split> = ways
        .map(|(cp_size, mut config)| {
            config.memory.micro_block = micro_block(&config, ranks, Some(shape), device);
            row(&config, ranks, cp_size, shape, room, pace)
        })
        .collect();
    let fitting = rows.iter().filter(|row| row.fits != Some(false));
    let timed = fitting.filter_map(|row| Some((row.cp_size, row.update_seconds?)));
    // Of equal ones the fewest ranks for a prompt: they exchange least.
    let fastest = timed.reduce(|best, next| if next.1 < best.1 { next } else { best }).map(|(cp_size, _)| cp_size);
    let because = if config.parallel.cp_size.is_some() { SplitBecause::Configured } else { SplitBecause::All };
    Splits { groups: config.groups_per_update(ranks), ranks, rows, fastest, planned: config.cp_size(ranks), because }
}

fn row(config: &RunConfig, ranks: u64, cp_size: u64, shape: &Shape, room: &Room, pace: Option<&Pace>) -> Split {
    let mut plan = of_shape(config, ranks, Some(shape), room);
    if let Some(pace) = pace {
        plan.time(config, shape, pace);
    }
    let outcome = plan.refuse(room);
    let known = room.device.is_some() || room.host.is_some();
    let turns = config.optimizer.grad_accum;
    Split {
        cp_size,
        dp_size: ranks / cp_size,
        turns,
        micro_block: config.memory.micro_rows(),
        update_seconds: plan.seconds.as_ref().map(|seconds| seconds.of_update(turns)),
        device_bytes: plan.sum(Place::Device),
        host_bytes: plan.sum(Place::Host),
        node_host_bytes: Bytes(plan.sum(Place::Host).0.saturating_mul(plan.ranks_per_node)),
        fits: (known || outcome.is_err()).then_some(outcome.is_ok()),
        why: outcome.err().map(|error| match error {
            Error::DoesNotFit { what, .. } => format!("{what} memory"),
            Error::TooSlow { seconds, .. } => format!("{seconds:.3} s a token"),
        }),
    }
}

/// The configuration under the fastest way that fits, by published rates, where nobody has said how many ranks share a prompt and
/// there are several ways; `None` otherwise. It follows from its arguments alone, which are equal on all ranks.
#[must_use]
pub fn choose(
    config: &RunConfig,
    ranks: u64,
    shape: &Shape,
    room: &Room,
    device: Option<Bytes>,
) -> Option<(RunConfig, Split)> {
    if !is_open(config) || room.host_only || config.run.device == DeviceChoice::Cpu {
        return None;
    }
    let pace = Pace::Published(Rates::h200(config, shape));
    let splits = splits(config, ranks, shape, room, device, Some(&pace));
    let fastest = splits.fastest.filter(|_| splits.rows.len() > 1)?;
    let row = splits.rows.into_iter().find(|row| row.cp_size == fastest)?;
    Some((shared_out(config, ranks, fastest)?, row))
}

impl Split {
    /// The sentence of a run, or of a plan, that has chosen it.
    #[must_use]
    pub fn note(&self, ranks: u64) -> String {
        let Split { cp_size, dp_size, turns, .. } = self;
        let seconds = self.update_seconds.map(|seconds| format!(", {seconds:.0} s an update by published rates"));
        format!(
            "parallel.cp_size: {cp_size} of {ranks} ranks share a prompt, chosen as the fastest that fits{}; {dp_size} prompts side \
             by side, {turns} one after another; the update has the same groups in every way",
            seconds.unwrap_or_default()
        )
    }
}

impl Seconds {
    /// Predicted seconds of an update with so many groups one after another on each replica. Gradients are summed over ranks once.
    #[must_use]
    pub fn of_update(&self, turns: u64) -> f64 {
        let finalize = self.phases.iter().filter(|phase| phase.phase == Phase::Finalize).map(|phase| phase.seconds);
        let finalize: f64 = finalize.sum();
        let each = self.round / float(self.updates.max(1)) - finalize;
        float(turns) * each + finalize
    }
}

impl Splits {
    /// The lines of the table.
    #[must_use]
    pub fn text(&self) -> String {
        let Splits { groups, ranks, planned, .. } = *self;
        if self.rows.len() < 2 {
            return self.choice().unwrap_or_default();
        }
        let mut lines = vec![
            format!("ways to share out {ranks} ranks, with the same update (groups: {groups}):"),
            format!(
                "  {:>4} × {:>4} {:>6} {:>6} {:>10} {:>11} {:>11} {:>11}  fits",
                "cp", "dp", "turns", "rows", "s an update", "device", "host", "node's host"
            ),
        ];
        lines.extend(self.rows.iter().map(|row| {
            let fits = match (row.fits, &row.why) {
                (None, _) => "not compared".to_owned(),
                (Some(true), _) => "yes".to_owned(),
                (Some(false), why) => format!("no, {}", why.as_deref().unwrap_or_default()),
            };
            let fastest = if self.fastest == Some(row.cp_size) { ", the fastest" } else { "" };
            let here = if row.cp_size == planned { " <- this plan" } else { "" };
            let seconds = row.update_seconds.map_or("-".to_owned(), |seconds| format!("{seconds:.1}"));
            format!(
                "  {:>4} × {:>4} {:>6} {:>6} {:>11} {:>11} {:>11} {:>11}  {fits}{fastest}{here}",
                row.cp_size,
                row.dp_size,
                row.turns,
                row.micro_block.to_string(),
                seconds,
                row.device_bytes.to_string(),
                row.host_bytes.to_string(),
                row.node_host_bytes.to_string()
            )
        }));
        lines.extend(self.choice());
        lines.join("\n")
    }

    /// The sentence about the ranks that share a prompt.
    fn choice(&self) -> Option<String> {
        let Splits { groups, ranks, planned, because, .. } = *self;
        let fastest = self.fastest.filter(|&fastest| fastest != planned);
        let faster = fastest.and_then(|fastest| self.rows.iter().find(|row| row.cp_size == fastest));
        match (because, faster) {
            (_, Some(Split { cp_size, turns, .. })) => Some(format!(
                "  set parallel.cp_size = {cp_size} and optimizer.grad_accum = {turns} for the fastest with the same update"
            )),
            (SplitBecause::Fastest, None) if self.rows.iter().any(|row| row.fits.is_none()) => Some(format!(
                "  parallel.cp_size is absent: {planned} taken, the fastest by published rates if it fits; without --device-gib and \
                 --host-gib memory is not compared, and a run may choose another"
            )),
            (SplitBecause::Fastest, None) => Some(format!(
                "  parallel.cp_size is absent: {planned} chosen, the fastest that fits by published rates; a run chooses likewise"
            )),
            (SplitBecause::All, None) if self.rows.len() == 1 => Some(format!(
                "  parallel.cp_size is absent: all {ranks} ranks share a prompt; optimizer.grad_accum = {groups} is all of an update's \
                 groups, and prompts side by side need more of them"
            )),
            (SplitBecause::All | SplitBecause::Configured, None) => None,
        }
    }
}

/// The folder of a model that is named by its folder or by its config.json.
#[must_use]
pub fn model_folder(model: &Path) -> &Path {
    if model.is_dir() { model } else { model.parent().unwrap_or(model) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::gib;

    fn sixteen(groups: u64) -> RunConfig {
        let mut config = RunConfig::laptop();
        config.run.device = DeviceChoice::Auto;
        config.model.dtype = crate::config::Dtype::Bfloat16;
        config.context.prompt_len = Tokens(65_536);
        config.context.answer_len = Tokens(512);
        config.context.max_seq_len = Tokens(66_048);
        config.grpo.group_size = 8;
        config.parallel.cp_size = None;
        config.optimizer.grad_accum = groups;
        config
    }

    fn chosen(config: &RunConfig, device: u64) -> Option<(RunConfig, Split)> {
        let shape = Shape::read(&Path::new("configs/shapes").join("qwen3-8b"), None).unwrap();
        let room = Room { ranks_here: 8, device: Some(gib(device)), host_only: false, host: Some(gib(1500)) };
        choose(config, 16, &shape, &room, room.device)
    }

    #[test]
    fn the_fastest_split_that_fits_is_chosen_and_an_update_keeps_its_groups() {
        let (config, row) = chosen(&sixteen(16), 139).unwrap();
        assert_eq!((row.cp_size, row.dp_size, row.turns), (1, 16, 1));
        assert_eq!((config.parallel.cp_size, config.optimizer.grad_accum), (Some(1), 1));
        assert_eq!(config.groups_per_update(16), 16);
        // Four groups cannot be dealt out to eight or sixteen replicas.
        let (config, row) = chosen(&sixteen(4), 139).unwrap();
        assert_eq!((row.cp_size, row.dp_size, row.turns, config.groups_per_update(16)), (4, 4, 1, 4));
    }

    #[test]
    fn nothing_is_chosen_where_one_way_is_left_or_somebody_has_said_it() {
        assert!(chosen(&sixteen(1), 139).is_none(), "one group: all ranks share it, as ever");
        let mut stated = sixteen(16);
        stated.parallel.cp_size = Some(16);
        assert!(chosen(&stated, 139).is_none());
        let mut pages = sixteen(16);
        pages.context.cp_pages_per_gpu = Some(crate::runtime::units::Pages(64));
        assert!(chosen(&pages, 139).is_none());
        let mut cpu = sixteen(16);
        cpu.run.device = DeviceChoice::Cpu;
        assert!(chosen(&cpu, 139).is_none());
        assert!(chosen(&sixteen(16), 10).is_none(), "the weights alone do not fit");
    }

    #[test]
    fn experts_are_spread_over_ranks_of_one_prompt() {
        let mut config = sixteen(16);
        config.parallel.ep_size = 4;
        let ways: Vec<u64> = (1..=16).filter(|&cp| shared_out(&config, 16, cp).is_some()).collect();
        assert_eq!(ways, [4, 8, 16]);
    }
}
