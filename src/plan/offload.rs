//! Makes a plan: chooses what the configuration leaves open, the cheapest in time that fits.

use super::addend::Place;
use super::budget::{Plan, Room};
use super::offload_choice::OffloadChoice;
use super::rollout::Rollout;
use super::seconds::Rates;
use super::sizes::Sizes;
use super::sum;
use crate::config::{RunConfig, When};
use crate::model::shape::Shape;
use crate::model::spec::Spec;
use crate::prompt::handoff::Keeping;
use crate::prompt::pages::Residency;
use crate::runtime::units::Bytes;

/// The plan of `config` for a world of `ranks`. What the configuration leaves open is chosen for `room`: index sets, tail
/// inputs and attention outputs are kept and pages stay on the device as far as they fit. Then pages of as many layers as fit
/// stay on the device during rollout. For an unknown room the plan takes the least device memory and keeps the inputs
/// of every layer.
#[must_use]
pub fn of(config: &RunConfig, ranks: u64, spec: Option<&Spec>, room: &Room) -> Plan {
    of_shape(config, ranks, spec.map(Shape::of).as_ref(), room)
}

/// As [`of`], with pages of at most `resident_max` layers on the device during rollout where the configuration leaves their
/// number open: other ranks have room for no more.
#[must_use]
pub fn of_at_most(config: &RunConfig, ranks: u64, spec: Option<&Spec>, room: &Room, resident_max: usize) -> Plan {
    of_shape_at_most(config, ranks, spec.map(Shape::of).as_ref(), room, resident_max)
}

/// As [`of`], for a shape that this build may only plan. On a GPU a sampled token is timed at an H200's rates;
/// [`Plan::time`] takes others.
#[must_use]
pub fn of_shape(config: &RunConfig, ranks: u64, shape: Option<&Shape>, room: &Room) -> Plan {
    of_shape_at_most(config, ranks, shape, room, usize::MAX)
}

fn of_shape_at_most(config: &RunConfig, ranks: u64, shape: Option<&Shape>, room: &Room, resident_max: usize) -> Plan {
    let choosing = shape.is_some_and(|shape| shape.layers.iter().any(|layer| layer.mix.chooses().is_some()));
    let with = |choice: OffloadChoice| {
        let sizes = shape.map(|shape| Sizes::new(config, ranks, shape, choice, !room.host_only));
        Plan {
            ranks,
            ranks_per_node: if room.ranks_here == 0 { ranks } else { room.ranks_here.min(ranks) },
            cp_size: config.cp_size(ranks),
            pages: config.prompt_pages(),
            pages_per_rank: config.pages_per_rank(ranks),
            micro_block: None,
            keeping: choice.keeping,
            index_sets: choosing.then_some(choice.keeping.index_sets),
            rollout: sizes.as_ref().and_then(|sizes| Rollout::new(sizes)),
            addends: sizes.map(|sizes| sum::addends(&sizes)).unwrap_or_default(),
            seconds: None,
        }
    };
    let fits = |choice: OffloadChoice| with(choice).refuse(room).is_ok();
    let known = room.device.is_some() || room.host.is_some();
    let least = OffloadChoice::stated(config, Residency::Host);
    let Some(shape) = shape else { return with(least) };
    let mut choice = if known {
        let tried = tried(config, shape, choosing);
        let sum = |choice: &OffloadChoice| {
            let plan = with(*choice);
            plan.sum(Place::Host).0.saturating_add(plan.sum(Place::Device).0)
        };
        let first = tried.iter().copied().find(|&choice| fits(choice));
        first.unwrap_or_else(|| tried.into_iter().min_by_key(sum).unwrap_or(least))
    } else {
        least
    };
    // Pages that stay on the device for all tokens cost no time, whatever else was chosen.
    let roomy = room.device.is_some() || (room.host_only && room.host.is_some());
    if config.rollout.sample && config.rollout.pages_on_device == When::Auto && roomy {
        let most = resident_max.min(shape.layers.len());
        let with_resident = |resident| OffloadChoice { resident, ..choice };
        choice = (1..=most).rev().map(with_resident).find(|&choice| fits(choice)).unwrap_or(choice);
    }
    let mut plan = with(choice);
    if !room.host_only {
        plan.time_answers(config, shape, &Rates::h200(config, shape));
    }
    plan
}

/// The choices that the configuration leaves open, the cheapest in time first.
fn tried(config: &RunConfig, shape: &Shape, choosing: bool) -> Vec<OffloadChoice> {
    let memory = &config.memory;
    let most = if memory.inputs_every == 0 { shape.layers.len().max(1) } else { 1 };
    let swept = choosing && config.tail(config.context.prompt_len) > memory.micro_rows();
    let mut tried = Vec::new();
    for (pages, index_sets) in [Residency::Device, Residency::Host].into_iter().flat_map(|at| [(at, true), (at, false)])
    {
        if index_sets && !swept {
            continue;
        }
        for step in 1..=most {
            let stated = OffloadChoice::stated(config, pages);
            let every = if memory.inputs_every == 0 { step } else { stated.keeping.every };
            let open = memory.keep_attention == When::Auto;
            let choice = |attention: bool, answer_attention: bool| {
                let keeping = Keeping { every, attention, answer_attention, index_sets, ..stated.keeping };
                OffloadChoice { keeping, ..stated }
            };
            let Keeping { attention, answer_attention, .. } = stated.keeping;
            if open && step == 1 {
                tried.extend([choice(true, true), choice(true, false)]);
            }
            if open {
                tried.push(choice(false, true));
            }
            tried.push(choice(attention, answer_attention));
        }
    }
    // Computing again costs more than copying pages. Choosing keys again costs most, a score of every pair of positions; then
    // layers that are left out, then attention of the prompt, then that of the answers; pages in host memory cost least.
    tried.sort_by_key(|&OffloadChoice { keeping, .. }| {
        let Keeping { pages, every, attention, answer_attention, index_sets, .. } = keeping;
        (!index_sets, every, !attention, !answer_attention, pages == Residency::Host)
    });
    tried
}

/// Bytes of `count` GiB, 2³⁰ bytes each.
#[must_use]
pub fn gib(count: u64) -> Bytes {
    Bytes(count.saturating_mul(1 << 30))
}

/// A note where the longest sequence exceeds the model's context window.
#[must_use]
pub fn context_note(config: &RunConfig, spec: &Spec) -> Option<String> {
    spec.context_note(config.context.max_seq_len)
}
