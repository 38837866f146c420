//! Adapters of experts that are spread over ranks: which of them a rank holds, and all of them together.
//!
//! A rank holds the adapters of its own experts only. The ranks of an expert group hold consecutive experts in rank order, with
//! as many adapters each, so what all of them hold is one run of entries after another, layer by layer.

use std::ops::Range;

use sha2::{Digest as _, Sha256};
use tch::{Device, Tensor};

use crate::model::lora::{Adapter, Adapters};
use crate::model::spec::{Linear, Spec, expert_of};
use crate::runtime::digest::hex;
use crate::runtime::units::{Tokens, from_index};
use crate::tensor::views;
use crate::world::Axis;
use crate::world::exchange::gather_rows;

/// Whether this rank of `group` holds the adapter of `linear`: it is of one of its experts, or of no expert.
#[must_use]
pub fn is_held(spec: &Spec, linear: &Linear, group: &Axis) -> bool {
    let count = spec.experts_of(linear.layer).map_or(1, |experts| experts.count);
    let each = (count / from_index(group.size())).max(1);
    expert_of(&linear.module).is_none_or(|expert| expert / each == from_index(group.rank().0))
}

/// SHA-256 over all values, in hexadecimal, those of experts on other ranks of `group` included: it does not depend on how
/// many ranks hold them. Every rank of the group enters.
#[must_use]
pub fn digest(adapters: &Adapters, group: &Axis) -> String {
    if adapters.entries().iter().all(|entry| expert_of(&entry.module).is_none()) {
        return adapters.digest();
    }
    let of = |tensor: &Tensor| {
        hex(Sha256::new_with_prefix(views::view(&tensor.detach().to_device(Device::Cpu).contiguous())))
    };
    let line = |entry: &Adapter| format!("{} {} {}\n", entry.module, of(&entry.a_ri), of(&entry.b_or));
    let (of_experts, others): (Vec<_>, Vec<_>) =
        adapters.entries().iter().partition(|entry| expert_of(&entry.module).is_some());
    let experts = of_experts.into_iter().map(line).collect::<String>();
    let experts = if adapters.is_spread() { group.gather_texts(&experts).concat() } else { experts };
    // Ranks hold the experts of every layer, so their lines are put in an order of their own.
    let mut lines: Vec<&str> = experts.lines().collect();
    lines.sort_unstable();
    let mut hash = Sha256::new();
    others.into_iter().map(line).for_each(|line| hash.update(line));
    lines.iter().for_each(|line| hash.update(line));
    hex(hash)
}

/// The adapters of all experts with those of no expert, in the order of the spec, on every rank where `keeps` holds; elsewhere
/// none. Values are detached and in host memory. `tensors` belong to `adapters`, in the order of [`Adapters::tensors`]: the
/// masters, or a moment of each. Every rank of the group enters.
///
/// # Panics
/// When there are not as many tensors as the adapters have.
#[must_use]
pub fn gathered(adapters: &Adapters, tensors: &[&Tensor], group: &Axis, keeps: bool) -> Vec<Adapter> {
    let entries = adapters.entries();
    assert_eq!(tensors.len(), 2 * entries.len(), "two tensors a pair");
    let host = |tensor: &Tensor| tensor.detach().to_device(Device::Cpu);
    let mut all = Vec::new();
    let mut at = 0;
    while at < entries.len() {
        let run = run_of_experts(entries, at);
        if run.is_empty() {
            if keeps {
                let pair = Adapter {
                    module: entries[at].module.clone(),
                    a_ri: host(tensors[2 * at]),
                    b_or: host(tensors[2 * at + 1]),
                };
                all.push(pair);
            }
            at += 1;
            continue;
        }
        at = run.end;
        all.extend(of_all_ranks(entries, tensors, run, group, keeps));
    }
    all
}

/// The consecutive entries from `at` on that are of experts of one layer.
fn run_of_experts(entries: &[Adapter], at: usize) -> Range<usize> {
    let layer = |entry: &Adapter| {
        let _is_of_an_expert = expert_of(&entry.module)?;
        entry.module.split('.').nth(2).map(str::to_owned)
    };
    let first = layer(&entries[at]);
    let of_the_layer = entries[at..].iter().take_while(|entry| first.is_some() && layer(entry) == first);
    at..at + of_the_layer.count()
}

/// The same run of entries on every rank, one rank after the other.
fn of_all_ranks(
    entries: &[Adapter],
    tensors: &[&Tensor],
    run: Range<usize>,
    group: &Axis,
    keeps: bool,
) -> Vec<Adapter> {
    let together = |tensor: &Tensor| {
        let own = tensor.detach().to_device(Device::Cpu).unsqueeze(0);
        let all = gather_rows(group, &own, &vec![Tokens(1); group.size()]);
        if keeps { all } else { all.narrow(0, 0, 0).copy() }
    };
    let pairs: Vec<[Tensor; 2]> =
        run.clone().map(|at| [together(tensors[2 * at]), together(tensors[2 * at + 1])]).collect();
    let number = |at: usize| expert_of(&entries[at].module).unwrap_or(0);
    let each = number(run.end - 1) + 1 - number(run.start);
    let first = number(run.start) - each * from_index(group.rank().0);
    let ranks = if keeps { 0..group.size() } else { 0..0 };
    let of_rank = |rank: usize| {
        let pairs = &pairs;
        run.clone().zip(pairs).map(move |(at, [a, b])| {
            let own = number(at);
            let expert = first + each * from_index(rank) + (own - number(run.start));
            let row = |all: &Tensor| all.get(i64::try_from(rank).unwrap_or(0)).copy();
            Adapter { module: renumbered(&entries[at].module, own, expert), a_ri: row(a), b_or: row(b) }
        })
    };
    ranks.flat_map(|rank| of_rank(rank).collect::<Vec<_>>()).collect()
}

/// The module of the expert `expert` in the place of that of `own`.
fn renumbered(module: &str, own: u64, expert: u64) -> String {
    module.replace(&format!(".experts.{own}."), &format!(".experts.{expert}."))
}
