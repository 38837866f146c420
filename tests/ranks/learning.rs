//! Updates, and what must be the same after them.

use longstraw::model::lora::Adapters;
use longstraw::model::pass::Pass;
use longstraw::prompt::handoff::Scores;
use longstraw::runtime::memory::Ledger;
use longstraw::step::extremes::Range;
use longstraw::step::objective::{self, Objective, Scaling};
use longstraw::step::optimizer::{AdamW, Settings};
use longstraw::step::transaction::Transaction;
use longstraw::world::World;
use serde_json::json;
use tch::Kind;

use crate::fixture::{Group, Model, PLAIN, config, observer, own, reduced, run, step, transaction};

const SETTINGS: Settings = Settings { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01 };

fn model() -> Model {
    Model::random(&config("llama", &json!({})), Kind::Float)
}

pub(crate) fn equal_rewards(world: &mut World) {
    let model = model();
    let mut group = Group::random(5, 61, 50, &[9, 2]);
    group.advantages = objective::advantages(&[Some(0.3), Some(0.3)], Scaling::DEFAULT);
    let ratio = one_update(world, &model, &group);
    assert!(ratio.is_none_or(|range| range == Range::at(1.0)));
    assert!(own(&model.adapters).iter().all(|gradient| gradient.any().int64_value(&[]) == 0));
}

/// A transaction against the step's own scores; returns the range of the ratio on this rank.
fn one_update(world: &World, model: &Model, group: &Group) -> Option<Range> {
    let ledger = Ledger::default();
    let transaction = Transaction { objective: Objective::DEFAULT, ..transaction(world, model, PLAIN, &ledger) };
    let answers = group.trained(&group.batch());
    let done = transaction.train(&group.prompt_ids, None, &answers, None, &mut observer(world));
    run(done).replayed.ratio
}

pub(crate) fn ten_updates(world: &mut World) {
    let digests: Vec<String> = (0..2)
        .map(|_| {
            let mut model = model();
            let start = model.adapters.digest();
            let mut optimizer = AdamW::new(&model.adapters, SETTINGS);
            for update in 0..10 {
                let group = Group::random(update, 61, 40 + usize::try_from(update).expect("small"), &[7, 3, 1]);
                let ratio = one_update(world, &model, &group);
                assert!(
                    ratio.is_none_or(|range| range == Range::at(1.0)),
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
    let ledger = Ledger::default();
    let score = |model: &Model, captured| {
        let transaction = transaction(world, model, PLAIN, &ledger);
        transaction.score(&group.prompt_ids, captured, group.answers.clone(), &mut observer(world))
    };
    let captured = run(score(&model, None)).captured;
    step(world, &model, &group, PLAIN, &group.batch());
    let gradients = reduced(world, &model.adapters);
    AdamW::new(&model.adapters, SETTINGS).update(&mut model.adapters, &gradients, 1e-3);
    let refused = score(&model, Some(captured));
    let words = refused.err().map(|failure| failure.to_string()).unwrap_or_default();
    assert!(words.contains("policy version 0") && words.contains("policy version 1"), "{words}");
}

/// Scores of the starting policy differ from the policy's after an update and stay what they were.
pub(crate) fn reference_policy(world: &mut World) {
    let mut model = model();
    let group = Group::random(5, 61, 50, &[9, 2]);
    let reference = model.adapters.frozen("reference");
    let scored = |model: &Model, adapters: &Adapters| -> Scores {
        let ledger = Ledger::default();
        let own = transaction(world, model, PLAIN, &ledger);
        let transaction = Transaction { policy: Pass { adapters, ..own.policy }, ..own };
        run(transaction.score(&group.prompt_ids, None, group.answers.clone(), &mut observer(world))).scores
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
