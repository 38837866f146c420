//! Updates on a prompt that was captured under earlier adapters.

use std::rc::Rc;

use longstraw::model::decoder::{Decoder, FinishRows, Values};
use longstraw::model::lora::Adapters;
use longstraw::model::planes::Planes;
use longstraw::prompt::handoff::Scores;
use longstraw::prompt::layout::Piece;
use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::{LayerIndex, Tokens, as_dim, from_index};
use longstraw::step::conventional;
use longstraw::step::drift::Drift;
use longstraw::step::objective::{self, AnswerTokens, Objective};
use longstraw::step::replay::TrainedAnswer;
use longstraw::step::transaction::{Trained, Transaction};
use longstraw::tensor::boundary::backward;
use longstraw::world::World;
use longstraw::world::exchange::sum_number;
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::fixture::{
    Group, HEAD, How, Model, PLAIN, config, distance, glm, hybrid, mixture, observer, own, placed, reduced, run,
    transaction,
};

const PROMPT: usize = 50;

/// One block over a whole sequence: rows before `cut` under `earlier` adapters, the others under `now`.
fn whole_layer(
    decoder: &dyn Decoder,
    layer: LayerIndex,
    constant: &Tensor,
    live: &Tensor,
    [earlier, now]: [&Adapters; 2],
) -> (Tensor, Tensor) {
    let (cut, rows) = (constant.size()[0], constant.size()[0] + live.size()[0]);
    let mixer = decoder.mixer(layer);
    let finish = |adapters: &Adapters, x_tw: &Tensor, mixed: &Tensor, handed: &Planes| {
        let finished = decoder.finish(layer, &FinishRows { x_tw, mixed, handed, kept: None }, adapters, Values::All);
        match (decoder.experts(layer), &finished.routed) {
            (Some(experts), Some(routed)) => finished.y_tw + experts.plain(routed, adapters),
            _ => finished.y_tw,
        }
    };
    let before = tch::no_grad(|| decoder.project(layer, constant, &(0..cut).into(), earlier, Values::All));
    let after = decoder.project(layer, live, &(cut..rows).into(), now, Values::All);
    let constant = tch::no_grad(|| {
        let mixed = mixer.plain(0..cut, &before.input.queries, &before.input.state, None, false);
        finish(earlier, constant, &mixed, &before.handed)
    });
    let state = Planes::join(vec![before.input.state, after.input.state]);
    let mixed = mixer.plain(cut..rows, &after.input.queries, &state, None, false);
    (constant, finish(now, live, &mixed, &after.handed))
}

/// Log-probabilities of an answer's tokens by plain autograd over the whole sequence, [tokens].
fn plain(decoder: &dyn Decoder, adapters: [&Adapters; 2], group: &Group, tail: i64, index: usize) -> Tensor {
    let answer = &group.answers[index];
    let ids: Vec<i64> = group.prompt_ids.iter().chain(&answer[..answer.len() - 1]).copied().collect();
    let x_tw = decoder.embed(&ids);
    let (prompt, rows) = (as_dim(from_index(group.prompt_ids.len())), x_tw.size()[0]);
    let cut = prompt - tail;
    let (mut constant, mut live) = (x_tw.narrow(0, 0, cut), x_tw.narrow(0, cut, rows - cut));
    for layer in (0..decoder.layers()).map(LayerIndex) {
        (constant, live) = whole_layer(decoder, layer, &constant, &live, adapters);
    }
    let last = Tensor::cat(&[&constant, &live], 0).narrow(0, prompt - 1, as_dim(from_index(answer.len())));
    let logits = decoder.logits(&last).to_kind(Kind::Double) / HEAD.temperature;
    logits.log_softmax(-1, Kind::Double).gather(1, &Tensor::from_slice(answer).unsqueeze(1), false).squeeze_dim(1)
}

/// All log-probabilities of an answer on one rank, as they are there.
fn sum(scores: &Scores, cp: &longstraw::world::Axis) -> f64 {
    let of = |x: &Tensor| x.sum(Kind::Double).double_value(&[]);
    let own: f64 = scores.0.iter().map(|one| of(&one.rows) + one.first.as_ref().map_or(0.0, of)).sum();
    sum_number(cp, own)
}

fn near(found: f64, expected: f64, words: &str) {
    assert!((found - expected).abs() <= 1e-9 * expected.abs().max(1e-3), "{words}: {found} for {expected}");
}

/// Captured and scored under the first adapters, which then change.
fn first_update(world: &World, model: &mut Model, group: &Group, how: How, shift: f64) -> (Trained, Adapters) {
    let ledger = Ledger::default();
    let answers = group.trained(&group.batch());
    let first = {
        let transaction = Transaction { objective: Objective::DEFAULT, ..transaction(world, model, how, &ledger) };
        run(transaction.train(&group.prompt_ids, None, &answers, None, &mut observer(world)))
    };
    let _ = own(&model.adapters);
    let earlier = model.adapters.frozen("policy");
    tch::manual_seed(17);
    let moved: Vec<Tensor> = model.adapters.tensors().map(|x| x.detach() + x.detach().randn_like() * shift).collect();
    model.adapters.update(&moved);
    (first, earlier)
}

/// Gradient, log-probabilities and drift of a further update against plain autograd in which the constants stand as they were.
fn further(world: &World, shape: &Value, tail: u64) {
    let words = format!("{}, tail {tail}", shape["model_type"]);
    let mut model = Model::random(shape, Kind::Double);
    let mut group = Group::random(3, 61, PROMPT, &[6, 1, 9]);
    group.advantages[2] = None;
    let how = How { tail, ..PLAIN };
    let (mut first, earlier) = first_update(world, &mut model, &group, how, 0.05);
    let ledger = Ledger::default();
    let transaction = Transaction { objective: Objective::DEFAULT, ..transaction(world, &model, how, &ledger) };
    let answers = group.trained(&group.batch());
    let held = first.captured.take().expect("it stays captured");
    let mut observer = observer(world);
    let again = transaction.train_on_reused(&group.prompt_ids, held, &answers, first.scores.clone(), &mut observer);
    let again = run(again);
    let found = reduced(world, &model.adapters);
    let drift = run(transaction.drift(&answers, &again, &mut observer));
    // The prompt captured again under the earlier adapters gives the same bits.
    let captured = run(transaction.capture_under(&earlier, &group.prompt_ids, group.answers.clone(), &mut observer));
    let repeated =
        run(transaction.train_on_reused(&group.prompt_ids, captured, &answers, first.scores.clone(), &mut observer));
    let gradients = reduced(world, &model.adapters);
    assert!(found.gradients().iter().zip(gradients.gradients()).all(|(one, other)| one.equal(other)), "{words}: bits");
    assert_eq!(again.replayed.loss.to_bits(), repeated.replayed.loss.to_bits(), "{words}: loss");
    let expected = judge(&model, &earlier, &group, tail, &answers);
    near(sum(&again.replayed.logprobs, &world.cp), expected.sum, &words);
    near(sum_number(&world.cp, again.replayed.loss), expected.drift.loss_reused, &words);
    let off = distance(&model.adapters, found.gradients(), &expected.gradients);
    assert!(off.all <= 1e-9 && off.worst <= 1e-9, "{words}: {off:?}");
    let numbers = |drift: &Drift| [drift.nll_reused, drift.nll_fresh, drift.loss_reused, drift.loss_fresh, drift.k3];
    for (found, expected) in numbers(&drift).into_iter().zip(numbers(&expected.drift)) {
        near(sum_number(&world.cp, found), expected, &words);
    }
    let gap = world.cp.gather_numbers(drift.gap.to_bits()).into_iter().map(f64::from_bits).fold(0.0, f64::max);
    near(gap, expected.drift.gap, &words);
    assert!(gap > 1e-6 || tail >= from_index(PROMPT), "{words}: the adapters have moved");
}

struct Judged {
    gradients: Vec<Tensor>,
    /// Of all log-probabilities.
    sum: f64,
    drift: Drift,
}

/// The same by plain autograd, on every rank.
fn judge(model: &Model, earlier: &Adapters, group: &Group, tail: u64, answers: &[TrainedAnswer]) -> Judged {
    let decoder = &*model.decoder;
    let (now, tail) = (&model.adapters, as_dim(tail));
    let mut judged = Judged { gradients: Vec::new(), sum: 0.0, drift: Drift::default() };
    let of = |x: &Tensor| x.sum(Kind::Double).double_value(&[]);
    for (index, answer) in answers.iter().enumerate() {
        let old = tch::no_grad(|| plain(decoder, [earlier, earlier], group, tail, index));
        let fresh = tch::no_grad(|| plain(decoder, [now, now], group, tail, index));
        let reused = plain(decoder, [earlier, now], group, tail, index);
        judged.sum += of(&reused);
        let Some(advantage) = answer.advantage else { continue };
        let loss = |logprobs: &Tensor| {
            let (reference, importance, trained, means) = (None, None, None, None);
            let (old, weight) = (&old, answer.weight);
            let tokens = AnswerTokens { logprobs, old, reference, importance, advantage, weight, trained, means };
            objective::tokens(&tokens, &Objective::DEFAULT)
        };
        let added = loss(&reused.detach());
        if reused.requires_grad() {
            backward(&[(&reused, &added.dlogprobs)]).expect("a graph");
        }
        let d = reused.detach() - &fresh;
        judged.drift.add(Drift {
            tokens: from_index(answer.ids.len()),
            nll_reused: -of(&reused),
            nll_fresh: -of(&fresh),
            loss_reused: added.loss,
            loss_fresh: loss(&fresh).loss,
            k3: of(&(d.exp() - &d - 1.0)),
            gap: d.abs().max().double_value(&[]),
        });
    }
    judged.gradients = own(now);
    judged
}

pub(crate) fn as_plain_autograd(world: &mut World) {
    for tail in [0, 1, 4] {
        further(world, &config("qwen3", &json!({"num_hidden_layers": 2})), tail);
    }
    let layers =
        json!({"num_hidden_layers": 2, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]});
    further(world, &config("gemma3_text", &layers), 5);
    further(world, &mixture(&json!({"num_hidden_layers": 2})), 1);
    further(world, &hybrid(&json!({})), 0);
}

/// Adapters that did not change: with no tail the bits are those of pages that are captured anew, else other sums are taken.
pub(crate) fn no_drift(world: &mut World) {
    for (shape, tail, most) in [
        (config("qwen3", &json!({})), 0, 0.0),
        (glm(&json!({})), 0, 0.0),
        (hybrid(&json!({})), 0, 0.0),
        (config("llama", &json!({})), 3, 1e-12),
    ] {
        let mut model = Model::random(&shape, Kind::Double);
        let group = Group::random(5, 61, PROMPT, &[4, 7]);
        let how = How { tail, ..PLAIN };
        let (mut first, _) = first_update(world, &mut model, &group, how, 0.0);
        let ledger = Ledger::default();
        let transaction = transaction(world, &model, how, &ledger);
        let transaction = Transaction { objective: Objective::DEFAULT, ..transaction };
        let answers = group.trained(&group.batch());
        let held = first.captured.take().expect("it stays captured");
        let scores: Rc<_> = first.scores.clone();
        let mut observer = observer(world);
        let again = run(transaction.train_on_reused(&group.prompt_ids, held, &answers, scores, &mut observer));
        let _ = own(&model.adapters);
        let drift = run(transaction.drift(&answers, &again, &mut observer));
        let words = format!("{}, tail {tail}: {drift:?}", shape["model_type"]);
        assert!(drift.gap <= most && (drift.nll_reused - drift.nll_fresh).abs() <= most, "{words}");
        let tokens: u64 = world.cp.gather_numbers(drift.tokens).into_iter().sum();
        assert_eq!(tokens, 11, "{words}");
        let (rank, placed) = (world.cp.rank(), placed(world, &model, &group, how));
        let rows: Tokens = placed.answers.iter().flat_map(|answer| answer.span.of(rank)).map(Piece::rows).sum();
        let first = if placed.layout.last_row_owner() == rank { 2 } else { 0 };
        assert_eq!(drift.tokens, rows.0 + first, "{words}: a rank counts its own tokens");
        let conventional = conventional::Group {
            prompt_ids: &group.prompt_ids,
            answers: &group.answers,
            tail: Tokens(tail),
            temperature: HEAD.temperature,
        };
        let expected: f64 = (0..2)
            .map(|index| {
                let logprobs = tch::no_grad(|| conventional.logprobs(&*model.decoder, &model.adapters, index));
                -logprobs.sum(Kind::Double).double_value(&[])
            })
            .sum();
        near(sum_number(&world.cp, drift.nll_fresh), expected, &words);
    }
}
