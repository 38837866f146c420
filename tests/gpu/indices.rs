//! Tensors with more elements than 32 bits count.

use longstraw::model::attention::Attention;
use longstraw::model::attention_rows::{KeyValue, Queries};
use longstraw::model::lora::{Adapter, linear};
use longstraw::model::mixer::{CpGroup, Mixer, MixerInput};
use longstraw::model::past::{Past, PastRun};
use longstraw::prompt::layout::PromptLayout;
use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::{Position, Tokens};
use longstraw::tensor::gpu;
use longstraw::tensor::kernels::{Heads, Kernel};
use longstraw::world::World;
use longstraw::world::exchange::merge_into;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

fn relative(one: &Tensor, two: &Tensor) -> f64 {
    let norm = |x: &Tensor| x.to_kind(Kind::Double).square().sum(Kind::Double).sqrt().double_value(&[]);
    norm(&(one.to_kind(Kind::Double) - two.to_kind(Kind::Double))) / norm(two)
}

/// Position 1,048,576 of 32 heads of 128 is element 2³² of an output.
pub(crate) fn merge(_world: &World, device: Device) -> Vec<Value> {
    let rows = (1 << 20) + 4;
    let mut out = Tensor::zeros([rows, 32, 128], (Kind::Float, device));
    let mut lse = Tensor::full([rows, 32], f64::NEG_INFINITY, (Kind::Float, device));
    let draw = |shape: &[i64]| Tensor::randn(shape, (Kind::BFloat16, device));
    let (last_out, last_lse) = ([draw(&[8, 32, 128]), draw(&[8, 32, 128])], [draw(&[8, 32]), draw(&[8, 32])]);
    for (part_out, part_lse) in last_out.iter().zip(&last_lse) {
        let new_out = Tensor::zeros([rows, 32, 128], (Kind::BFloat16, device));
        let new_lse = Tensor::zeros([rows, 32], (Kind::Float, device));
        new_out.narrow(0, rows - 8, 8).copy_(part_out);
        new_lse.narrow(0, rows - 8, 8).copy_(part_lse);
        merge_into(&mut out, &mut lse, &new_out, &new_lse);
    }
    let weights = Tensor::stack(&last_lse, 0).to_kind(Kind::Double).softmax(0, Kind::Double).unsqueeze(-1);
    let expected =
        (Tensor::stack(&last_out, 0).to_kind(Kind::Double) * weights).sum_dim_intlist(0i64, false, Kind::Double);
    let apart = relative(&out.narrow(0, rows - 8, 8), &expected);
    assert!(apart < 1e-6, "{apart:.1e}");
    vec![json!({"elements": out.numel(), "apart": apart})]
}

/// 2.2 million positions of 8 key heads of 128: more than 2³¹ elements in one plane.
pub(crate) fn attention(world: &World, device: Device) -> Vec<Value> {
    let (positions, rows, heads, kv, dim) = (2_200_000_i64, 64_i64, 32_i64, 8_i64, 128_i64);
    let kind = Kind::BFloat16;
    let draw = |rows: i64, heads: i64| Tensor::randn([rows, heads, dim], (kind, device));
    let (k, v) = (draw(positions, kv), draw(positions, kv));
    let own_q = draw(rows, heads) * 2.0;
    let (own_k, own_v) = (draw(rows, kv), draw(rows, kv));
    let scale = 0.088_388_347_648_318_4;
    let kernel = Kernel::choose(device, &Heads { query: heads, kv, dim, kind }, false);
    let mixer = Attention { heads, kv_heads: kv, head_dim: dim, window: None, scale, kind, kernel };
    let layout = PromptLayout::new(Tokens(2_200_000), Tokens(64), 1, Tokens(1));
    let span = layout.answer(Tokens(65));
    let ledger = Ledger::default();
    let cp_group = CpGroup { axis: &world.cp, ep: &world.ep, ledger: &ledger };
    let state = |k: &Tensor, v: &Tensor| KeyValue { k_tgd: k.shallow_clone(), v_tgd: v.shallow_clone() }.into();
    let past = Past { runs: vec![PastRun { start: Position(0), state: state(&k, &v), carries_gradient: false }] };
    let queries = Queries { q_thd: own_q.shallow_clone() }.into();
    let input = MixerInput { queries, state: state(&own_k, &own_v) };
    let out = mixer.forward(&cp_group, &span, &input, &past).out;
    // The definition, head group by head group, in float32.
    let mut apart: f64 = 0.0;
    for group in 0..kv {
        let of =
            |x: &Tensor, own: &Tensor| Tensor::cat(&[x.select(1, group), own.select(1, group)], 0).to_kind(Kind::Float);
        let (k, v) = (of(&k, &own_k), of(&v, &own_v));
        let q = own_q.narrow(1, group * 4, 4).to_kind(Kind::Float).transpose(0, 1);
        let at = Tensor::arange(positions + rows, (Kind::Int64, device)) - positions;
        let hidden = at.unsqueeze(0).gt_tensor(&Tensor::arange(rows, (Kind::Int64, device)).unsqueeze(1));
        let scores = (q.matmul(&k.tr()) * scale).masked_fill(&hidden, f64::NEG_INFINITY);
        let expected = scores.softmax(-1, Kind::Float).matmul(&v).transpose(0, 1);
        apart = apart.max(relative(&out.narrow(1, group * 4, 4), &expected));
    }
    assert!(apart < 1e-2, "{apart:.1e}: more than bfloat16 rounding");
    vec![json!({"elements": k.numel(), "kernel": format!("{kernel:?}"), "apart": apart})]
}

pub(crate) fn copies(_world: &World, device: Device) -> Vec<Value> {
    let rows = 1_100_000;
    let here = Tensor::randint(256, [rows, 2048], (Kind::Uint8, device));
    let held = gpu::pinned_like(&here).unwrap_or_else(|error| panic!("{error}"));
    gpu::copy_out(&held, &here).and_then(|left| left.finish()).unwrap_or_else(|error| panic!("{error}"));
    let back = here.zeros_like();
    gpu::copy_in(&back, &held).and_then(|came| came.finish()).unwrap_or_else(|error| panic!("{error}"));
    assert!(back.equal(&here), "what came back is what left");
    let last = held.get(rows - 1).to_device(device);
    assert!(last.equal(&here.get(rows - 1)), "the last row lies where it belongs");
    vec![json!({"elements": here.numel()})]
}

/// 131,072 rows of a feed-forward 17,408 wide, with an adapter, against its last rows alone.
pub(crate) fn feed_forward(_world: &World, device: Device) -> Vec<Value> {
    let (rows, width, ffn, kind) = (131_072_i64, 512_i64, 17_408_i64, Kind::BFloat16);
    let draw = |shape: [i64; 2], scale: f64| Tensor::randn(shape, (kind, device)) * scale;
    let pair = |inputs: i64, outputs: i64| Adapter {
        module: "mlp".into(),
        a_ri: (draw([16, inputs], 0.02)).to_kind(Kind::Float),
        b_or: (draw([outputs, 16], 0.1)).to_kind(Kind::Float),
    };
    let (up, down) = (draw([ffn, width], 0.04), draw([width, ffn], 0.008));
    let (up_pair, down_pair) = (pair(width, ffn), pair(ffn, width));
    let x = draw([rows, width], 1.0);
    let run = |x: &Tensor| {
        let wide = linear(x, &up, None, Some((&up_pair, 2.0)));
        (wide.silu(), wide.numel())
    };
    let (wide, elements) = run(&x);
    let y = linear(&wide, &down, None, Some((&down_pair, 2.0)));
    drop(wide);
    let last = x.narrow(0, rows - 16, 16);
    let expected = linear(&run(&last).0, &down, None, Some((&down_pair, 2.0)));
    let apart = relative(&y.narrow(0, rows - 16, 16), &expected);
    assert!(apart < 1e-2, "{apart:.1e}: more than bfloat16 rounding");
    vec![json!({"elements": elements, "apart": apart})]
}
