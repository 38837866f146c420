//! What a score pass leaves of the answers, and the replay that starts from it.

use std::cell::RefCell;
use std::rc::Rc;

use longstraw::prompt::handoff::{Keeping, Leaves, Logprobs};
use longstraw::runtime::failure::Phase;
use longstraw::runtime::liveness::{Border, Recorder};
use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::LayerIndex;
use longstraw::step::objective::Objective;
use longstraw::step::optimizer::{AdamW, Settings};
use longstraw::step::replay::{self, FrozenScores, ReplayTargets};
use longstraw::step::transaction::{Trained, Transaction};
use longstraw::step::{capture, score};
use longstraw::world::World;
use serde_json::json;
use tch::{Kind, Tensor};

use crate::fixture::{
    Group, How, Model, PLAIN, config, glm, hybrid, mixture, observer, own, placed, ratio_is_one, reduced, run, step,
    transaction,
};

/// Layers that a replay goes through, up and at the top, in their order.
#[derive(Debug, Default)]
struct Replayed {
    phase: Option<Phase>,
    layers: Vec<LayerIndex>,
}

impl Recorder for Replayed {
    fn pass(&mut self, border: Border) {
        match border {
            Border::Phase(phase) => self.phase = Some(phase),
            Border::Layer(layer) if self.phase == Some(Phase::Replay) => self.layers.push(layer),
            Border::Layer(_) | Border::StepEnd => {}
        }
    }
}

/// One group's update without the optimizer, and the layers of its replay.
fn train(
    world: &World,
    model: &Model,
    group: &Group,
    how: How,
    given: Option<Rc<FrozenScores>>,
) -> (Trained, Vec<Tensor>, Vec<usize>) {
    let ledger = Ledger::default();
    let transaction = Transaction { objective: Objective::DEFAULT, ..transaction(world, model, how, &ledger) };
    let recorder = Rc::new(RefCell::new(Replayed::default()));
    world.tracker().set_recorders(vec![Box::new(recorder.clone())]);
    let answers = group.trained(&group.batch());
    let done = run(transaction.train(&group.prompt_ids, None, &answers, given, &mut observer(world)));
    world.tracker().set_recorders(Vec::new());
    let layers = recorder.borrow().layers.iter().map(|layer| layer.0).collect();
    (done, own(&model.adapters), layers)
}

fn same(one: &Logprobs, other: &Logprobs) -> bool {
    let first = one.first.as_ref().zip(other.first.as_ref());
    one.rows.equal(&other.rows) && first.is_none_or(|(one, other)| one.equal(other))
}

/// Dense layers, experts, latents with an index, and states that go from row to row; an answer of one token has no row. The
/// replay computes the top layer and the log-probabilities itself in every case.
pub(crate) fn same_bits(world: &mut World) {
    let shapes = [
        config("qwen3", &json!({"num_hidden_layers": 4})),
        config(
            "gemma3_text",
            &json!({"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
        ),
        mixture(&json!({})),
        glm(&json!({})),
        hybrid(&json!({})),
    ];
    for shape in shapes {
        let model = Model::random(&shape, Kind::Float);
        let group = Group::random(3, 61, 50, &[6, 1, 14]);
        for (tail, answer_attention) in [(0, true), (1, false), (9, true), (50, false), (50, true)] {
            let how = How { tail, keeping: Keeping { answer_attention, ..Keeping::HOST }, ..PLAIN };
            let words = format!("{}, tail {tail}, outputs kept: {answer_attention}", shape["model_type"]);
            compare(world, &model, &group, how, &words);
        }
    }
}

/// Tokens of answers that go through the layers in packs.
const PACKED: [usize; 6] = [6, 1, 9, 14, 1, 3];

/// Several packs, and all answers in one, where mixers take a pack at once. Blocks of 14 make packs of 13, 13 and 2
/// rows, one with an answer without rows between others; on three ranks or more some have no row of the last pack.
pub(crate) fn same_bits_of_packs(world: &mut World) {
    let windows =
        json!({"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]});
    for shape in [config("qwen3", &json!({})), config("gemma3_text", &windows), mixture(&json!({}))] {
        let model = Model::random(&shape, Kind::Float);
        let group = Group::random(3, 61, 50, &PACKED);
        for (micro_block, tail, answer_attention) in [(14, 50, true), (14, 1, false), (4096, 9, true)] {
            let how = How { tail, micro_block, keeping: Keeping { answer_attention, ..Keeping::HOST }, ..PLAIN };
            let words = format!("{}, blocks of {micro_block}, tail {tail}", shape["model_type"]);
            compare(world, &model, &group, how, &words);
        }
    }
}

/// A replay from what its own score pass has left, and one that goes up the layers by itself.
fn compare(world: &World, model: &Model, group: &Group, how: How, words: &str) {
    let layers = model.decoder.layers();
    let (left, gradients, passed) = train(world, model, group, how, None);
    let (alone, expected, upwards) = train(world, model, group, how, Some(left.scores.clone()));
    assert_eq!(passed, [layers - 1], "{words}: the replay begins in the top layer");
    assert_eq!(upwards, (0..layers).collect::<Vec<_>>(), "{words}: given scores leave no inputs");
    assert!(gradients.iter().zip(&expected).all(|(one, other)| one.equal(other)), "{words}: gradients");
    // A rank may have neither a row of the tail nor one of an answer.
    let moved = gradients.iter().any(|gradient| gradient.any().int64_value(&[]) == 1);
    assert!(world.cp.gather_numbers(u64::from(moved)).contains(&1), "{words}: a gradient");
    let [left, alone] = [left.replayed, alone.replayed];
    assert_eq!(left.loss.to_bits(), alone.loss.to_bits(), "{words}: the loss");
    assert_eq!(left.pool_bytes, alone.pool_bytes, "{words}: bytes of the inputs");
    assert!(left.logprobs.0.iter().zip(&alone.logprobs.0).all(|(one, other)| same(one, other)), "{words}");
    assert!(ratio_is_one(&left) && ratio_is_one(&alone), "{words}: ratios to the frozen scores");
}

/// Kept outputs are those of the score pass: gradients with and without them are the same bits, of answers alone, in
/// several packs and in one.
pub(crate) fn kept_outputs(world: &mut World) {
    let model = Model::random(&config("qwen3", &json!({})), Kind::Float);
    for (micro_block, lengths) in [(PLAIN.micro_block, &[6, 1, 14][..]), (14, &PACKED), (4096, &PACKED)] {
        let group = Group::random(3, 61, 50, lengths);
        let gradients = [false, true].map(|answer_attention| {
            let how = How { tail: 9, micro_block, keeping: Keeping { answer_attention, ..Keeping::HOST }, ..PLAIN };
            train(world, &model, &group, how, None).1
        });
        let same = gradients[0].iter().zip(&gradients[1]).all(|(again, kept)| again.equal(kept));
        assert!(same, "blocks of {micro_block}");
    }
}

pub(crate) fn stale(world: &mut World) {
    let mut model = Model::random(&config("llama", &json!({})), Kind::Float);
    let group = Group::random(5, 61, 50, &[9, 2]);
    let ledger = Ledger::default();
    let answers = group.trained(&group.batch());
    let work = placed(world, &model, &group, PLAIN);
    let left = {
        let Transaction { policy, head, .. } = transaction(world, &model, PLAIN, &ledger);
        let captured = run(capture::run(&policy, &work, Keeping::HOST, world.tracker()));
        run(score::run(&policy, &head, &work, &captured, Leaves::Replayable, world.tracker())).1
    };
    let frozen = train(world, &model, &group, PLAIN, None).0.scores;
    step(world, &model, &group, PLAIN, &group.batch());
    let gradients = reduced(world, &model.adapters);
    let settings = Settings { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01 };
    AdamW::new(&model.adapters, settings).update(&mut model.adapters, &gradients, 1e-3);
    let Transaction { policy, head, .. } = transaction(world, &model, PLAIN, &ledger);
    let captured = run(capture::run(&policy, &work, Keeping::HOST, world.tracker()));
    let targets = ReplayTargets { answers: &answers, scores: &frozen, objective: &Objective::DEFAULT };
    let refused = replay::run(&policy, &head, &work, &captured, Some(left), targets, world.tracker());
    let words = refused.err().map(|failure| failure.to_string()).unwrap_or_default();
    assert!(words.contains("policy version 0") && words.contains("policy version 1"), "{words}");
}
