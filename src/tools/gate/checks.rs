//! The checks of one run's receipt, each on one number or one list of it.

use serde_json::{Value, json};

use crate::config::{Gate, Own};
use crate::report::{Check, Receipt};
use crate::runtime::units::{Bytes, Pages, Tokens, from_index};

/// What a run of a gate should have been.
#[derive(Clone, Debug)]
pub(super) struct Expected {
    /// Updates, each with one call of the optimizer.
    pub(super) updates: u64,
    /// Pages of the prompt.
    pub(super) pages: Pages,
    /// Bytes of one page over all layers.
    pub(super) page_bytes: Bytes,
    /// Advantages of the answers, where the gate judges them.
    pub(super) advantages: Option<Vec<f64>>,
}

/// The check that a later gate looks for in this gate's receipt.
pub(super) const AS_NAMED: &str = "as_named";

/// A check from its parts.
pub(super) fn check(name: &str, value: Value, limit: impl Into<String>, passed: bool, means: &str) -> Check {
    Check { name: name.into(), value, limit: limit.into(), passed, means: means.into() }
}

/// The checks that one of a gate's runs carries in front of their names.
pub(super) fn prefixed(run: &str, check: Check) -> Check {
    Check { name: format!("{run}.{}", check.name), ..check }
}

/// All checks of a run but those of memory.
pub(super) fn of_run(receipt: &Receipt, expected: &Expected) -> Vec<Check> {
    let mut checks = vec![
        ended(receipt),
        finite(receipt),
        ratio(receipt),
        gradient(receipt),
        moved(receipt),
        equal(receipt),
        updates(receipt, expected),
        layers(receipt),
        pages(receipt, expected),
        page_bytes(receipt, expected),
    ];
    checks.extend(receipt.sampled_gap.map(|gap| sampled(gap, receipt.gap_warn)));
    checks.extend(expected.advantages.as_ref().map(|wanted| advantages(receipt, wanted)));
    checks
}

/// Whether the run was what the gate's name says: flags and variables override a gate's values. The length may be another
/// one where the gate's file allows it.
pub(super) fn as_named(receipt: &Receipt, gate: &Gate) -> Check {
    let full = |tokens: Tokens| Tokens(tokens.0 * receipt.scale.max(1));
    let own = gate.own();
    let mut wanted = own;
    let found = Own {
        positions: full(receipt.positions),
        prompt_len: full(receipt.prompt_len),
        answer_len: full(receipt.answer_len),
        group_size: receipt.group_size,
        steps: receipt.steps,
    };
    if gate.has_any_length() {
        (wanted.positions, wanted.prompt_len) = (found.positions, found.prompt_len);
    }
    let shown = |own: &Own| {
        json!({"positions": own.positions, "prompt_len": own.prompt_len, "answer_len": own.answer_len,
               "group_size": own.group_size, "steps": own.steps})
    };
    let means = "a flag or a variable of the environment has made another run of this gate, which says nothing about the one \
                 of its name: leave context, grpo.group_size and run.steps to the gate";
    let limit = format!("exactly {}, lengths times gate.scale", shown(&wanted));
    check(AS_NAMED, shown(&found), limit, found == wanted, means)
}

fn sampled(gap: f64, most: f64) -> Check {
    let means = "tokens were sampled from another distribution than the one that they are scored under: the answers' own state \
                 or their positions are wrong while they are sampled, or pages are stale";
    check("sampled_gap", json!(gap), format!("at most {most:e} nats (rollout.gap_warn)"), gap <= most, means)
}

fn ended(receipt: &Receipt) -> Check {
    let means = "the run was asked to stop before its last update; start the gate again";
    check("ended", json!(!receipt.stopped), "true", !receipt.stopped, means)
}

fn finite(receipt: &Receipt) -> Check {
    let numbers = [receipt.loss_first, receipt.loss, receipt.grad_norm];
    let means = "a loss or a gradient is not a number: look at metrics.jsonl for the first one, lower optimizer.lr";
    check("finite", json!(numbers), "all finite", numbers.iter().all(|number| number.is_finite()), means)
}

fn ratio(receipt: &Receipt) -> Check {
    let means = "score and replay do not compute the same numbers for the same tokens, so the objective starts from a wrong \
                 policy; a run without frozen scores (memory.prompt_no_grad = false) has no ratio at all";
    // To the bit: both go through the same blocks of rows, so nothing may differ.
    let exact = receipt.ratio_first.is_some_and(|range| range.iter().all(|ratio| ratio.to_bits() == 1f64.to_bits()));
    check("ratio_first", json!(receipt.ratio_first), "exactly [1, 1]", exact, means)
}

fn gradient(receipt: &Receipt) -> Check {
    let means = "no gradient has reached the adapters: check that rewards differ within the group (grpo.reward_fn)";
    check("grad_norm", json!(receipt.grad_norm), "above 0", receipt.grad_norm > 0.0, means)
}

fn moved(receipt: &Receipt) -> Check {
    let still = &receipt.lora_b_unmoved;
    let means = "these adapters have learnt nothing: no gradient has reached their layers, or optimizer.lr is 0";
    check("lora_b_moved", json!(still), "no lora_B left as it was", still.is_empty(), means)
}

fn equal(receipt: &Receipt) -> Check {
    let digests = &receipt.adapter_digest;
    let first = digests.first().filter(|first| !first.is_empty());
    let same = first.is_some_and(|first| digests.iter().all(|digest| digest == first));
    let means = "ranks hold different adapters after the update: their gradients were not summed over all ranks";
    let limit = format!("the same on {} ranks", receipt.ranks);
    check("adapters_equal", json!(digests), limit, same && digests.len() == receipt.ranks, means)
}

fn updates(receipt: &Receipt, expected: &Expected) -> Check {
    let (calls, wanted) = (receipt.optimizer_calls, expected.updates);
    let means =
        "the optimizer was not called exactly once for each update, so the adapters are not those of the loss curve";
    check("optimizer_calls", json!(calls), format!("exactly {wanted}"), calls == wanted, means)
}

/// Phases that go through every layer: without a graph, for the frozen scores, and down with one. Replay begins where the
/// score pass has left the answers, in the top layer.
const THROUGH_ALL_LAYERS: [&str; 3] = ["capture", "score", "sweep"];

fn layers(receipt: &Receipt) -> Check {
    let wanted = from_index(receipt.layers);
    let all = THROUGH_ALL_LAYERS.iter().all(|phase| receipt.layers_by_phase.get(phase) == Some(&wanted));
    let means =
        "a phase has left out layers, forward or backward; memory.prompt_no_grad = false runs none of these phases";
    let limit = format!("{wanted} in each of {}", THROUGH_ALL_LAYERS.join(", "));
    check("layers", json!(receipt.layers_by_phase), limit, all && wanted > 0, means)
}

/// Pages of each rank by zigzag dealing: `2 · ranks` chunks of whole pages, of which the first ones are a page longer where
/// the division leaves a rest. Rank r has chunk r and the r-th chunk from the end. This counts independently of `layout`.
fn dealt(pages: u64, ranks: usize) -> Vec<Pages> {
    let chunks = 2 * from_index(ranks);
    let of_chunk = |chunk: u64| pages / chunks + u64::from(chunk < pages % chunks);
    (0..from_index(ranks)).map(|rank| Pages(of_chunk(rank) + of_chunk(chunks - 1 - rank))).collect()
}

fn pages(receipt: &Receipt, expected: &Expected) -> Check {
    let one_prompt = dealt(expected.pages.0, receipt.cp_size.max(1));
    let wanted: Vec<Pages> = one_prompt.iter().copied().cycle().take(receipt.ranks).collect();
    let means = "pages are not dealt out to the ranks, so memory does not fall with their number: check parallel.cp_size \
                 and memory.prompt_no_grad";
    let limit = format!("{} pages dealt as {}", expected.pages, json!(one_prompt));
    check("pages_per_rank", json!(receipt.pages_per_rank), limit, receipt.pages_per_rank == wanted, means)
}

fn page_bytes(receipt: &Receipt, expected: &Expected) -> Check {
    let each = expected.page_bytes.0;
    let wanted: Vec<Bytes> = receipt.pages_per_rank.iter().map(|pages| Bytes(pages.0 * each)).collect();
    let means = "pages keep more storage alive than their own: a view of a larger buffer, and memory does not fall although \
                 pages are dealt out";
    let held = receipt.page_bytes_per_rank == wanted && wanted.iter().any(|bytes| bytes.0 > 0);
    check("page_bytes", json!(receipt.page_bytes_per_rank), format!("exactly pages × {each}"), held, means)
}

fn advantages(receipt: &Receipt, wanted: &[f64]) -> Check {
    // To the bit: rewards 0 and 1 have the mean 1/2 and the deviation 1/2, which divide without rounding.
    let same = |(found, wanted): (&Option<f64>, &f64)| found.is_some_and(|found| found.to_bits() == wanted.to_bits());
    let held = receipt.advantages.len() == wanted.len() && receipt.advantages.iter().zip(wanted).all(same);
    let means = "rewards have not become the expected advantages: check grpo.reward_fn, grpo.normalize_adv and \
                 grpo.group_size";
    check("advantages", json!(receipt.advantages), format!("exactly {}", json!(wanted)), held, means)
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{expected, failed, gate, good};
    use super::*;

    #[test]
    fn a_good_receipt_passes_every_check() {
        let checks = of_run(&good(), &expected());
        assert_eq!((failed(&checks), checks.len()), (vec![], 12));
    }

    /// A check's name, a fault that should fail it, and words of what that means.
    type Planted = (&'static str, fn(&mut Receipt), &'static str);

    /// Each fault fails its own check and no other, with the words that a user reads.
    #[test]
    fn each_planted_fault_fails_exactly_its_check() {
        let rows: [Planted; 19] = [
            ("ended", |r| r.stopped = true, "asked to stop"),
            ("finite", |r| r.loss = f64::NAN, "not a number"),
            ("finite", |r| r.loss_first = f64::INFINITY, "not a number"),
            ("ratio_first", |r| r.ratio_first = Some([1.0, 1.0 + f64::EPSILON]), "score and replay"),
            ("ratio_first", |r| r.ratio_first = None, "memory.prompt_no_grad"),
            ("grad_norm", |r| r.grad_norm = 0.0, "no gradient has reached"),
            (
                "lora_b_moved",
                |r| r.lora_b_unmoved = vec!["model.layers.2.mlp.up_proj.lora_B".into()],
                "optimizer.lr is 0",
            ),
            ("adapters_equal", |r| r.adapter_digest[1] = "cd".into(), "not summed over all ranks"),
            ("adapters_equal", |r| drop(r.adapter_digest.pop()), "not summed over all ranks"),
            ("optimizer_calls", |r| r.optimizer_calls = 2, "exactly once"),
            ("layers", |r| r.layers_by_phase.extend([("sweep", 2)]), "left out layers"),
            ("layers", |r| r.layers_by_phase.retain(|phase, _| *phase != "capture"), "left out layers"),
            (
                "pages_per_rank",
                |r| {
                    // Evenly wrong: everything on one rank.
                    r.pages_per_rank = vec![Pages(7), Pages(0)];
                    r.page_bytes_per_rank = vec![Bytes(7000), Bytes(0)];
                },
                "parallel.cp_size",
            ),
            ("page_bytes", |r| r.page_bytes_per_rank[1] = Bytes(4001), "view of a larger buffer"),
            ("sampled_gap", |r| r.sampled_gap = Some(2e-4), "another distribution"),
            ("sampled_gap", |r| r.sampled_gap = Some(f64::NAN), "another distribution"),
            ("advantages", |r| r.advantages = vec![Some(1.0), Some(-1.0)], "grpo.normalize_adv"),
            ("advantages", |r| r.advantages = vec![Some(-0.5), Some(0.5)], "grpo.normalize_adv"),
            ("advantages", |r| r.advantages = vec![Some(-1.0), None], "grpo.reward_fn"),
        ];
        for (name, plant, words) in rows {
            let mut receipt = good();
            plant(&mut receipt);
            let checks = of_run(&receipt, &expected());
            assert_eq!(failed(&checks), [name]);
            let found = checks.iter().find(|check| check.name == name).expect("it failed");
            assert!(found.means.contains(words), "{name}: {}", found.means);
        }
    }

    /// A value of a receipt that is changed, and whether gate2 and gate7 of that receipt are still what their names say.
    type Named = (fn(&mut Receipt), bool, bool);

    #[test]
    fn a_run_of_another_length_group_or_count_of_updates_is_not_the_gate_of_its_name() {
        let rows: [Named; 8] = [
            (|_| (), true, true),
            (|r| r.positions = Tokens(256), false, true),
            (|r| r.prompt_len = Tokens(8), false, true),
            (|r| r.scale = 32, false, false),
            (|r| r.answer_len = Tokens(64), false, false),
            (|r| r.group_size = 3, false, false),
            (|r| r.steps += 1, false, false),
            (|r| r.steps = 0, false, false),
        ];
        for (index, (change, short, online)) in rows.into_iter().enumerate() {
            for (gate, held) in [(gate("gate2_32k"), short), (gate("gate7_online"), online)] {
                let mut receipt = Receipt { scale: 64, steps: gate.own().steps, ..good() };
                change(&mut receipt);
                assert_eq!(as_named(&receipt, &gate).passed, held, "row {index}, {}", gate.name());
                // Nothing but this check sees a changed length.
                assert_eq!(failed(&of_run(&receipt, &expected())), Vec::<&str>::new());
            }
        }
    }

    #[test]
    fn pages_are_counted_as_they_are_dealt() {
        for pages in [1, 5, 7, 16, 384, 32_640] {
            for ranks in 1..=8 {
                let layout = crate::prompt::layout::PromptLayout::new(Tokens(pages * 4), Tokens(4), ranks, Tokens(0));
                let owned = (0..ranks).map(|rank| layout.pages_of(crate::runtime::units::Rank(rank)));
                assert_eq!(dealt(pages, ranks), owned.collect::<Vec<_>>(), "{pages} pages, {ranks} ranks");
            }
        }
    }
}
