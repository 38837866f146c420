//! Updates, and what must be the same after them.

use longstraw::model::mixer::CpGroup;
use longstraw::model::pass::Pass;
use longstraw::prompt::handoff::{Keeping, Scores};
use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::{Tokens, from_index};
use longstraw::step::optimizer::{AdamW, Settings};
use longstraw::step::replay::{self, ReplayTargets};
use longstraw::step::{capture, score};
use longstraw::world::World;
use serde_json::json;
use tch::Kind;

use crate::fixture::{Group, HEAD, Model, PLAIN, TERMS, config, own, reduced, run, step, work};

const SETTINGS: Settings = Settings { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01 };

fn model() -> Model {
    Model::random(&config("llama", &json!({})), Kind::Float)
}

pub(crate) fn equal_rewards(world: &mut World) {
    let model = model();
    let mut group = Group::random(5, 61, 50, &[9, 2]);
    group.advantages = longstraw::step::objective::advantages(&[Some(0.3), Some(0.3)], true);
    let done = one_update(world, &model, &group, 0.0);
    assert!(done.is_none_or(|range| range == (1.0, 1.0)));
    assert!(own(&model.adapters).iter().all(|gradient| gradient.any().int64_value(&[]) == 0));
}

/// Captures, scores and replays against the step's own scores; returns the range of the ratio on this rank.
fn one_update(world: &World, model: &Model, group: &Group, kl_coef: f64) -> Option<(f64, f64)> {
    let (ledger, work) = (Ledger::default(), work(world, group, PLAIN));
    let cp_group = CpGroup { axis: &world.cp, ledger: &ledger };
    let pass = Pass { decoder: &*model.decoder, adapters: &model.adapters, cp_group, micro_block: Tokens(5) };
    let captured = run(capture::run(&pass, &work, Keeping::HOST, world.tracker()));
    let old = run(score::run(&pass, &HEAD, &work, &captured, world.tracker()));
    let weights: Vec<f64> =
        group.answers.iter().map(|answer| group.batch().weight(TERMS.aggregation, from_index(answer.len()))).collect();
    let terms = longstraw::step::objective::Objective { kl_coef, ..TERMS };
    let goal =
        ReplayTargets { old: &old, reference: None, advantages: &group.advantages, weights: &weights, terms: &terms };
    run(replay::run(&pass, &HEAD, &work, &captured, goal, world.tracker())).ratio
}

pub(crate) fn ten_updates(world: &mut World) {
    let digests: Vec<String> = (0..2)
        .map(|_| {
            let mut model = model();
            let start = model.adapters.digest();
            let mut optimizer = AdamW::new(&model.adapters, SETTINGS);
            for update in 0..10 {
                let group = Group::random(update, 61, 40 + usize::try_from(update).expect("small"), &[7, 3, 1]);
                let ratio = one_update(world, &model, &group, 0.0);
                assert!(
                    ratio.is_none_or(|range| range == (1.0, 1.0)),
                    "{ratio:?} is not 1: the first replay's ratio to the frozen scores, update {update}"
                );
                let gradients = reduced(world, &model.adapters);
                assert!(gradients.norm() > 0.0);
                let before: Vec<_> = model.adapters.tensors().map(tch::Tensor::copy).collect();
                optimizer.update(&mut model.adapters, &gradients, 1e-3);
                let moved = model.adapters.tensors().zip(&before).all(|(now, before)| !now.equal(before));
                assert!(moved, "every adapter tensor of every layer moves in update {update}");
            }
            let digest = model.adapters.digest();
            assert_ne!(digest, start);
            let all = world.all.gather_texts(&digest);
            assert!(all.iter().all(|other| *other == all[0]), "adapters are the same bits on all ranks");
            digest
        })
        .collect();
    assert_eq!(digests[0], digests[1], "two runs with one seed are the same bits");
}

pub(crate) fn stale_pages(world: &mut World) {
    let mut model = model();
    let group = Group::random(5, 61, 50, &[9, 2]);
    let (ledger, work) = (Ledger::default(), work(world, &group, PLAIN));
    let captured = {
        let cp_group = CpGroup { axis: &world.cp, ledger: &ledger };
        let pass = Pass { decoder: &*model.decoder, adapters: &model.adapters, cp_group, micro_block: Tokens(5) };
        run(capture::run(&pass, &work, Keeping::HOST, world.tracker()))
    };
    step(world, &model, &group, PLAIN, &group.batch());
    let gradients = reduced(world, &model.adapters);
    AdamW::new(&model.adapters, SETTINGS).update(&mut model.adapters, &gradients, 1e-3);
    let cp_group = CpGroup { axis: &world.cp, ledger: &ledger };
    let pass = Pass { decoder: &*model.decoder, adapters: &model.adapters, cp_group, micro_block: Tokens(5) };
    let refused = score::run(&pass, &HEAD, &work, &captured, world.tracker());
    let words = refused.err().map(|failure| failure.to_string()).unwrap_or_default();
    assert!(words.contains("policy version 0") && words.contains("policy version 1"), "{words}");
}

/// Scores of the starting policy differ from the policy's after an update and stay what they were.
pub(crate) fn reference_policy(world: &mut World) {
    let mut model = model();
    let group = Group::random(5, 61, 50, &[9, 2]);
    let reference = model.adapters.frozen("reference");
    let scored = |model: &Model, adapters: &longstraw::model::lora::Adapters| -> Scores {
        let (ledger, work) = (Ledger::default(), work(world, &group, PLAIN));
        let cp_group = CpGroup { axis: &world.cp, ledger: &ledger };
        let pass = Pass { decoder: &*model.decoder, adapters, cp_group, micro_block: Tokens(5) };
        let captured = run(capture::run(&pass, &work, Keeping::HOST, world.tracker()));
        run(score::run(&pass, &HEAD, &work, &captured, world.tracker()))
    };
    let before = scored(&model, &model.adapters);
    step(world, &model, &group, PLAIN, &group.batch());
    let gradients = reduced(world, &model.adapters);
    AdamW::new(&model.adapters, SETTINGS).update(&mut model.adapters, &gradients, 1e-2);
    let (now, then) = (scored(&model, &model.adapters), scored(&model, &reference));
    for ((before, now), then) in before.0.iter().zip(&now.0).zip(&then.0) {
        assert!(before.rows.equal(&then.rows), "the reference is the starting policy, bit for bit");
        assert!(before.rows.numel() == 0 || !before.rows.equal(&now.rows), "the policy has moved");
    }
}
