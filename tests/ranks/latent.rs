//! Attention over latents with keys that an index chooses: what is chosen again, ties, and prompts shorter than a page.

use longstraw::config::Gradient;
use longstraw::model::weights::{ExpertShare, Weights};
use longstraw::prompt::handoff::Keeping;
use longstraw::prompt::pages::{Choice, ChoicePool};
use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::LayerIndex;
use longstraw::step::replay::Replayed;
use longstraw::step::transaction::Transaction;
use longstraw::tools::parity::distance::relative;
use longstraw::world::World;
use longstraw::world::exchange::gather_rows;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::fixture::{
    Group, How, Model, PLAIN, device, distance, glm, judged_step, mixture, observer, own, ratio_is_one, reduced, run,
    step, transaction,
};

/// Layers of the small glm whose index chooses.
const OWNERS: [usize; 3] = [0, 1, 3];
/// Largest relative error against autograd of the same float64 formulas.
const LIMIT: f64 = 1e-12;

/// Index sets of the tail that are chosen again, and tail inputs of every n-th layer, give the bits of what was kept.
pub(crate) fn chosen_again(world: &mut World) {
    let model = Model::random(&glm(&json!({})), Kind::Double);
    let group = Group::random(3, 61, 57, &[6, 1]);
    for (tail, micro_block) in [(57, 6), (50, 17)] {
        let gradients = |index_sets, every, attention| {
            let keeping = Keeping { index_sets, every, attention, ..Keeping::HOST };
            step(world, &model, &group, How { tail, micro_block, keeping, ..PLAIN }, &group.batch());
            own(&model.adapters)
        };
        let kept = gradients(true, 1, false);
        // A rank may have neither a row of the tail nor one of an answer.
        let moved = kept.iter().any(|gradient| gradient.abs().max().double_value(&[]) > 0.0);
        assert!(world.cp.gather_numbers(u64::from(moved)).contains(&1));
        for (index_sets, every, attention) in [(false, 1, false), (true, 2, false), (false, 2, true), (false, 3, false)]
        {
            let again = gradients(index_sets, every, attention);
            // On a GPU the gradient of keys adds up in any order.
            let on_gpu = device() != Device::Cpu;
            let close = |one: &Tensor, two: &Tensor| if on_gpu { relative(two, one) <= LIMIT } else { one.equal(two) };
            let same = kept.iter().zip(&again).all(|(one, two)| close(one, two));
            assert!(same, "tail {tail}, blocks of {micro_block}, sets kept: {index_sets}, every {every}");
        }
    }
}

/// Index scores that are all 0, and routers of which experts e and e + 4 are twins with one bias.
fn tie(weights: &Weights, layers: usize) {
    for layer in 0..layers {
        let zeroed = weights.try_get(&format!("model.layers.{layer}.self_attn.indexer.weights_proj.weight"));
        if let Some(mut heads) = zeroed {
            let _ = heads.zero_();
        }
        if let Some(gate_ew) = weights.try_get(&format!("model.layers.{layer}.mlp.gate.weight")) {
            gate_ew.narrow(0, 4, 4).copy_(&gate_ew.narrow(0, 0, 4));
        }
        if let Some(mut bias_e) = weights.try_get(&format!("model.layers.{layer}.mlp.gate.e_score_correction_bias")) {
            bias_e.copy_(&(Tensor::arange(8, (bias_e.kind(), bias_e.device())).remainder(4) * 0.02));
        }
    }
}

/// What was chosen for each answer's rows in each layer, on all ranks, in order of position: [rows, n] int64 each.
fn chosen(world: &World, transaction: &Transaction, group: &Group, pool: &ChoicePool, choice: Choice) -> Vec<Tensor> {
    let placed = transaction.placed(&group.prompt_ids, group.answers.clone());
    let mut found = Vec::new();
    for (answer, of_ranks) in placed.with_rows() {
        for layer in (0..transaction.policy.decoder.layers()).map(LayerIndex) {
            let Some(own) = run(pool.of(answer).stage(choice, layer).map_err(Into::into)) else { continue };
            // The staged tensor is another's once it is dropped.
            let own = own.to_kind(Kind::Int64).copy();
            found.push(gather_rows(&world.cp, &own, &of_ranks.span.counts()));
        }
    }
    found
}

/// A step with fresh scores, its choices of keys and of experts.
fn first_replay(world: &World, model: &Model, group: &Group, how: How) -> (Replayed, [Vec<Tensor>; 2]) {
    let ledger = Ledger::default();
    let transaction = Transaction { gradient: Gradient::Exact, ..transaction(world, model, how, &ledger) };
    let answers = group.trained(&group.batch());
    let done = run(transaction.train(&group.prompt_ids, None, &answers, None, &mut observer(world)));
    let of = |choice| chosen(world, &transaction, group, &done.choices, choice);
    (done.replayed, [of(Choice::Index), of(Choice::Experts)])
}

fn expect_lowest([index, experts]: &[Vec<Tensor>; 2], what: &str) {
    for set_tn in index {
        let lowest = Tensor::arange(6, (Kind::Int64, set_tn.device())).expand_as(set_tn);
        assert!(set_tn.equal(&lowest), "{what}: the lowest positions of equal scores, not {set_tn}");
    }
    for expert_tk in experts {
        let rows: Vec<Vec<i64>> = expert_tk.try_into().expect("rows of integers");
        let lowest = |row: &Vec<i64>| row.iter().all(|&expert| expert < 4 || row.contains(&(expert - 4)));
        assert!(rows.iter().all(lowest), "{what}: the lowest of two equal experts, not {rows:?}");
    }
}

/// Equal index scores and equal router columns: the lowest positions and experts, on every run and number of ranks, so that
/// score and first replay are the same bits.
pub(crate) fn ties(world: &mut World) {
    let (size, three) = (world.all.size(), json!({ "num_experts_per_tok": 3 }));
    let group = Group::random(6, 61, 13, &[7, 1, 5]);
    let shapes: [(Value, bool); 2] = [(glm(&three), true), (mixture(&three), false)];
    for (config, has_index) in &shapes {
        for kind in [Kind::Double, Kind::BFloat16] {
            let how = How { page_size: 3, micro_block: 8, ..PLAIN };
            // One rank's rows are the same numbers in float64 only; what two runs choose is the same in any dtype.
            let first = if kind == Kind::Double { 1 } else { size };
            let mut runs = Vec::new();
            for (ranks, ep) in [(first, 1), (size, 1), (size, 2)] {
                if !ranks.is_multiple_of(ep) {
                    continue;
                }
                world.cut(ranks, ep).expect("a divisor of the world");
                let model = Model::of(config, kind, ExpertShare::of(&world.ep), &|weights| tie(weights, 5));
                let (replayed, choices) = first_replay(world, &model, &group, how);
                let what = format!("{} in {kind:?}, {ranks} ranks, ep {ep}", config["model_type"]);
                assert!(ratio_is_one(&replayed), "{what}: the first ratio is {:?}", replayed.ratio);
                let _ = own(&model.adapters);
                assert_eq!(choices[0].len(), if *has_index { 2 * OWNERS.len() } else { 0 }, "{what}");
                assert!(!choices[1].is_empty(), "{what}");
                expect_lowest(&choices, &what);
                runs.push(choices);
            }
            let same = |one: &[Tensor], two: &[Tensor]| one.iter().zip(two).all(|(one, two)| one.equal(two));
            assert!(same(&runs[0][1], &runs[1][1]), "experts of {} in {kind:?}", config["model_type"]);
        }
    }
}

/// Prompts of one position to one more than an index chooses, most ranks without a page, and answers of one token.
pub(crate) fn short(world: &mut World) {
    let model = Model::random(&glm(&json!({})), Kind::Double);
    for prompt in [1, 2, 3, 4, 6, 7] {
        for lengths in [&[1usize][..], &[3, 1]] {
            let group = Group::random(8, 61, prompt, lengths);
            let how = How { page_size: 3, tail: u64::MAX, micro_block: 3, ..PLAIN };
            step(world, &model, &group, how, &group.batch());
            let paged = reduced(world, &model.adapters);
            let (_, judged) = judged_step(world, &model, &group, how.tail, &group.batch());
            let apart = distance(&model.adapters, paged.gradients(), &judged);
            assert!(apart.worst <= LIMIT, "prompt {prompt}, {lengths:?}: {} {:.1e}", apart.worst_tensor, apart.worst);
        }
    }
}
