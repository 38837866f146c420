//! Gated delta rules on any number of ranks: against the rule row by row, and against autograd around every edge.

use longstraw::model::delta::{Border, DeltaWeights, GatedDelta};
use longstraw::model::mixer::{CpGroup, MixerInput};
use longstraw::model::parts::DeltaSpec;
use longstraw::prompt::layout::{PromptLayout, Span, positions};
use longstraw::runtime::digest::sha256_hex;
use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::{LayerIndex, Rank, Tokens};
use longstraw::tensor::delta::{DeltaHeads, DeltaRows, Form, plain};
use longstraw::tensor::views;
use longstraw::tools::parity::distance::relative;
use longstraw::world::World;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::fixture::{Group, How, Model, PLAIN, device, hybrid, observer, own, run, step, transaction};
use crate::judged::compare;

const HEADS: DeltaHeads = DeltaHeads { key_heads: 2, value_heads: 6, key_dim: 8, value_dim: 5 };
const TAPS: i64 = 4;

/// The frozen tensors of a rule and what it reads of a prompt, the same on every rank, and the rule row by row.
struct Prompt {
    rule: GatedDelta,
    /// Inputs of the convolution, of the strength and of the decay.
    input: [Tensor; 3],
    /// Outputs of all rows.
    out_thv: Tensor,
    /// The state before each row and after the last.
    states: Vec<Tensor>,
}

impl Prompt {
    fn new(rows: i64, kind: Kind) -> Prompt {
        tch::manual_seed(23);
        let draw = |shape: &[i64]| Tensor::randn(shape, (Kind::Double, Device::Cpu)).to_kind(kind).to_device(device());
        let heads = HEADS.value_heads;
        let weights = DeltaWeights {
            conv_uj: draw(&[HEADS.channels(), TAPS]),
            log_rate_h: draw(&[heads]) - 1.0,
            bias_h: draw(&[heads]),
        };
        let spec = DeltaSpec {
            key_heads: 2,
            value_heads: 6,
            key_dim: 8,
            value_dim: 5,
            taps: 4,
            joined: false,
            layers: vec![true],
        };
        let input = [draw(&[rows, HEADS.channels()]), draw(&[rows, heads]), draw(&[rows, heads])];
        let [u_tu, b_th, a_th] = &input;
        let nothing = Tensor::zeros([TAPS - 1, HEADS.channels()], (kind, device()));
        let all = DeltaRows {
            y_tu: plain::convolve(&Tensor::cat(&[&nothing, u_tu], 0), &weights.conv_uj),
            decay_th: -weights.log_rate_h.exp() * (a_th + &weights.bias_h).softplus(),
            strength_th: b_th.sigmoid(),
        };
        let mut states = vec![Tensor::zeros([&[1], HEADS.state().as_slice()].concat(), (kind, device()))];
        let mut out = Vec::new();
        for row in 0..rows {
            let part = |x: &Tensor| x.narrow(0, row, 1);
            let one =
                DeltaRows { y_tu: part(&all.y_tu), decay_th: part(&all.decay_th), strength_th: part(&all.strength_th) };
            let (out_1hv, next) = plain::step(&HEADS, &one, &states[states.len() - 1]);
            out.push(out_1hv);
            states.push(next);
        }
        Prompt {
            rule: GatedDelta::new(&spec, &weights, kind, Form::choose(device(), &spec.heads(), 4, kind)),
            input,
            out_thv: Tensor::cat(&out, 0),
            states,
        }
    }

    /// The raw inputs of the convolution before row `at`, zeros before row 0.
    fn inputs_before(&self, at: i64) -> Tensor {
        let [u_tu, ..] = &self.input;
        u_tu.narrow(0, 0, at).constant_pad_nd([0, 0, TAPS - 1, 0]).narrow(0, at, TAPS - 1)
    }
}

/// A rank's rows of a span, of rows of all positions.
fn rows_of(x: &Tensor, span: &Span, rank: Rank) -> Tensor {
    let piece = |range: std::ops::Range<i64>| x.narrow(0, range.start, range.end - range.start);
    let parts = span.of(rank).map(|part| piece(positions(part)));
    Tensor::cat(&std::iter::once(piece(0..0)).chain(parts).collect::<Vec<_>>(), 0)
}

fn bits(x: &Tensor) -> String {
    sha256_hex(views::view(&x.to_device(Device::Cpu).contiguous()))
}

/// Pieces in chunks, composed over ranks: outputs and both borders are those of the rule row by row, borders are the same bits
/// on every rank, and raw inputs at a border are the rows themselves.
pub(crate) fn chunks(world: &mut World) {
    let ledger = Ledger::default();
    let cp_group = CpGroup { axis: &world.cp, ep: &world.ep, ledger: &ledger };
    let rank = world.cp.rank();
    let mut worst = 0.0f64;
    for (kind, limit) in [(Kind::Double, 1e-12), (Kind::Float, 1e-6)] {
        // Shorter than the convolution; pages of one row; chunks of 64 cut by ranks; calls of 1,024 rows.
        for (rows, page_size, tail) in [(2, 3, 1), (9, 1, 4), (131, 7, 62), (2_300, 64, 700)] {
            let prompt = Prompt::new(rows, kind);
            let layout = PromptLayout::new(rows_count(rows), Tokens(page_size), world.cp.size(), Tokens(tail));
            let state: Vec<Tensor> = prompt.input.iter().map(|x| rows_of(x, &layout.span(), rank)).collect();
            let input = MixerInput { state: state.into(), ..MixerInput::default() };
            let (out, borders) = tch::no_grad(|| prompt.rule.prompt(&cp_group, &layout, &input));
            let expected = rows_of(&prompt.out_thv, &layout.span(), rank);
            let what = format!("{kind:?}, {rows} rows, pages of {page_size}");
            let mut hold = |found: &Tensor, expected: &Tensor, part: &str| {
                let apart = relative(found, expected);
                assert!(apart <= limit, "{what}: {part} {apart:.1e}");
                worst = if kind == Kind::Float { worst.max(apart) } else { worst };
            };
            hold(&out, &expected, "outputs");
            let cut = positions_at(layout.cut().0);
            for (at, Border { state_hkv, inputs_ju }) in [cut, rows].into_iter().zip(&borders) {
                hold(state_hkv, &prompt.states[index(at)].get(0), "a border's state");
                assert!(inputs_ju.equal(&prompt.inputs_before(at)), "{what}: raw inputs before {at}");
                let own = [bits(state_hkv), bits(inputs_ju)].concat();
                assert!(world.cp.gather_texts(&own).iter().all(|other| *other == own), "{what}: the border at {at}");
            }
        }
    }
    if rank.0 == 0 {
        println!("chunks against rows in float32: {worst:.1e}");
    }
}

fn rows_count(rows: i64) -> Tokens {
    Tokens(longstraw::runtime::units::from_dim(rows))
}

fn positions_at(position: u64) -> i64 {
    longstraw::runtime::units::as_dim(position)
}

fn index(at: i64) -> usize {
    longstraw::runtime::units::as_index(longstraw::runtime::units::from_dim(at))
}

/// Gradient begins before, at and behind each edge: of the prompt, of a chunk, of a page, of a rank, of the last row; and
/// answers of a token, of a few, and of more than a chunk.
pub(crate) fn edges(world: &mut World) {
    let model = Model::random(&hybrid(&json!({})), Kind::Double);
    let prompt = 131;
    let group = Group::random(3, 61, 131, &[3, 1]);
    // 64: a chunk's end. 70: a page's end, and a rank's at any number of ranks.
    let cuts: &[u64] =
        if world.all.size() < 8 { &[0, 3, 63, 64, 65, 69, 70, 71, 130, 131] } else { &[0, 64, 69, 70, 71, 131] };
    for (number, cut) in cuts.iter().enumerate() {
        // A tail in many blocks and in one.
        let how = How { tail: prompt - cut, micro_block: [5, 4096][number % 2], ..PLAIN };
        compare(world, &model, &group, how, &format!("gradient from position {cut} on"));
    }
    for (number, tail) in [u64::MAX, 5, 0].into_iter().enumerate() {
        let group = Group::random(4, 61, 66, &[67, 1, 4]);
        let how = How { page_size: [3, 64][number % 2], tail, ..PLAIN };
        compare(world, &model, &group, how, &format!("an answer over a chunk, tail {tail}"));
    }
}

/// Fewer positions than taps, pages of one row, ranks without pages: raw inputs come from several ranks or from nowhere.
pub(crate) fn short(world: &mut World) {
    let others = [(&[3usize, 1][..], 1), (&[2, 6], 0), (&[4], 2)];
    for (taps, prompts) in
        [(4, &[(1, 3), (2, 1), (3, 3), (4, 1), (5, 3), (11, 1), (20, 64)][..]), (2, &[(1, 1), (5, 1)])]
    {
        let model = Model::random(&hybrid(&json!({ "linear_conv_kernel_dim": taps })), Kind::Double);
        for (number, &(prompt, page_size)) in prompts.iter().enumerate() {
            let other = others[number % others.len()];
            for (lengths, tail) in [(&[1usize, 4][..], u64::MAX), other] {
                let group = Group::random(8, 61, prompt, lengths);
                let how = How { page_size, tail, micro_block: 3, ..PLAIN };
                compare(world, &model, &group, how, &format!("{taps} taps, prompt {prompt}, tail {tail}, {lengths:?}"));
            }
        }
    }
}

/// The answers of a group in another order, of which one is trained.
fn reordered(group: &Group, order: &[usize], trained: usize) -> Group {
    Group {
        prompt_ids: group.prompt_ids.clone(),
        answers: order.iter().map(|&answer| group.answers[answer].clone()).collect(),
        advantages: order.iter().map(|&answer| group.advantages[answer].filter(|_| answer == trained)).collect(),
        masks: vec![None; order.len()],
    }
}

/// An answer's gradient has the same bits alone and behind or before others, and the sum of them is the group's; capture leaves
/// the same bits at the borders of every rank.
pub(crate) fn any_order(world: &mut World) {
    let model = Model::random(&hybrid(&json!({})), Kind::Double);
    let group = Group::random(6, 61, 67, &[9, 1, 5]);
    let batch = group.batch();
    // On a GPU the gradient of keys adds up in any order.
    let same =
        |one: &Tensor, two: &Tensor| if device() == Device::Cpu { one.equal(two) } else { relative(two, one) < 1e-12 };
    for tail in [0, u64::MAX] {
        let how = How { tail, ..PLAIN };
        let gradients = |group: &Group| {
            step(world, &model, group, how, &batch);
            own(&model.adapters)
        };
        let mut sum: Vec<Tensor> = model.adapters.tensors().map(Tensor::zeros_like).collect();
        for trained in 0..3 {
            let alone = gradients(&reordered(&group, &[trained], trained));
            for order in [[0, 1, 2], [2, 1, 0]] {
                let among = gradients(&reordered(&group, &order, trained));
                let equal = alone.iter().zip(&among).all(|(one, two)| same(one, two));
                assert!(equal, "tail {tail}: answer {trained} in {order:?}");
            }
            sum = sum.iter().zip(&alone).map(|(sum, one)| sum + one).collect();
        }
        let moved = sum.iter().any(|gradient| gradient.abs().max().double_value(&[]) > 0.0);
        assert!(world.cp.gather_numbers(u64::from(moved)).contains(&1));
        for (sum, whole) in sum.iter().zip(gradients(&group)) {
            let apart = relative(&whole, sum);
            assert!(apart <= 1e-12, "tail {tail}: {apart:.1e}");
        }
    }
    borders(world, &model, &group);
}

fn borders(world: &World, model: &Model, group: &Group) {
    let ledger = Ledger::default();
    let transaction = transaction(world, model, How { tail: 40, ..PLAIN }, &ledger);
    let scored = run(transaction.score(&group.prompt_ids, None, group.answers.clone(), &mut observer(world)));
    let mut found = 0;
    for layer in (0..model.decoder.layers()).map(LayerIndex) {
        let staged = run(scored.captured.pages.stage(layer, None, model.adapters.stamp()).map_err(Into::into));
        for border in staged.borders() {
            let own = bits(border);
            assert!(world.cp.gather_texts(&own).iter().all(|other| *other == own), "layer {layer}");
            found += 1;
        }
    }
    assert_eq!(found, 4, "two layers have a state and raw inputs");
}
