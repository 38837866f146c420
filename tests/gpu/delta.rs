//! The compiled gated delta rule against matrix products in float64, and how fast both are.

use longstraw::tensor::delta::compiled::{agrees, load};
use longstraw::tensor::delta::{DeltaGradient, DeltaHeads, DeltaRows, Form};
use longstraw::tensor::selection_kernel::Instructions;
use longstraw::world::World;
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

use crate::selection::seconds;

/// Inputs of the rule, and gradients that come to it.
struct Case {
    heads: DeltaHeads,
    rows: DeltaRows,
    state: Tensor,
    dout: Tensor,
    dstate: Tensor,
}

fn heads(key_heads: i64, value_heads: i64) -> DeltaHeads {
    DeltaHeads { key_heads, value_heads, key_dim: 128, value_dim: 128 }
}

/// `decay` is the mean size of the logarithm of a row's decay.
fn case(heads: DeltaHeads, t: i64, decay: f64, state: f64, device: Device) -> Case {
    let normal = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, device));
    let gates = [t, heads.value_heads];
    Case {
        heads,
        rows: DeltaRows {
            y_tu: normal(&[t, heads.channels()]).to_kind(Kind::BFloat16).silu(),
            decay_th: normal(&gates).abs() * -decay,
            strength_th: normal(&gates).sigmoid(),
        },
        state: normal(&heads.state()) * state,
        dout: normal(&[t, heads.value_heads, heads.value_dim]).to_kind(Kind::BFloat16),
        dstate: normal(&heads.state()) * 0.3,
    }
}

impl Case {
    fn rows(&self, first: i64, count: i64) -> DeltaRows {
        let DeltaRows { y_tu, decay_th, strength_th } = &self.rows;
        let part = |x: &Tensor| x.narrow(0, first, count);
        DeltaRows { y_tu: part(y_tu), decay_th: part(decay_th), strength_th: part(strength_th) }
    }

    /// The same numbers in float64.
    fn wide(&self) -> Case {
        let wide = |x: &Tensor| x.to_kind(Kind::Double);
        let DeltaRows { y_tu, decay_th, strength_th } = &self.rows;
        Case {
            heads: self.heads,
            rows: DeltaRows { y_tu: wide(y_tu), decay_th: wide(decay_th), strength_th: wide(strength_th) },
            state: wide(&self.state),
            dout: wide(&self.dout),
            dstate: wide(&self.dstate),
        }
    }

    /// Everything that a form computes, by name.
    fn computed(&self, form: Form) -> Vec<(&'static str, Tensor)> {
        let Case { heads, rows, state, dout, dstate } = self;
        let (out, next) = form.forward(heads, rows, state);
        let map = form.transition(heads, rows);
        let pulled = form.pull(heads, rows, dout, dstate);
        let gradient = form.backward(heads, rows, state, dout, dstate).unwrap_or_else(|error| panic!("{error}"));
        let DeltaGradient { rows: DeltaRows { y_tu, decay_th, strength_th }, dstate_hkv } = gradient;
        let keys = heads.key_heads * heads.key_dim;
        let values = heads.value_heads * heads.value_dim;
        vec![
            ("output", out),
            ("state", next),
            ("composed", map.factor_hkk.matmul(state) + map.increment_hkv),
            ("pulled", pulled),
            ("query_gradient", y_tu.narrow(1, 0, keys)),
            ("key_gradient", y_tu.narrow(1, keys, keys)),
            ("value_gradient", y_tu.narrow(1, 2 * keys, values)),
            ("decay_gradient", decay_th),
            ("strength_gradient", strength_th),
            ("state_gradient", dstate_hkv),
        ]
    }
}

/// ‖found − wanted‖ / ‖wanted‖; the size of `found` where nothing is wanted.
fn error(found: &Tensor, wanted: &Tensor) -> f64 {
    let (found, wanted) = (found.to_kind(Kind::Double), wanted.to_kind(Kind::Double));
    let size = wanted.norm().double_value(&[]);
    (found - wanted).norm().double_value(&[]) / if size > 0.0 { size } else { 1.0 }
}

/// What bfloat16 operands of a few products in a row leave, each of them 2⁻⁹ at most.
const OF_ROWS: f64 = 8e-3;
/// Gradients of the gates are differences of sums that nearly cancel.
const OF_GATES: f64 = 2e-2;

/// Loads the kernels; fails with the reason where there are none.
fn choose(heads: &DeltaHeads, device: Device) {
    load_or_panic(Instructions::Native);
    assert!(agrees(device, heads, 4).unwrap_or_else(|error| panic!("{error}")), "the trial found other numbers");
    assert_eq!(Form::choose(device, heads, 4, Kind::BFloat16), Form::Compiled, "the trial chose otherwise");
}

fn load_or_panic(instructions: Instructions) {
    load(4, instructions).unwrap_or_else(|error| panic!("{instructions:?}: {error}"));
}

pub(crate) fn judged(_world: &World, device: Device) -> Vec<Value> {
    tch::manual_seed(21);
    choose(&heads(2, 4), device);
    let mut found = Vec::new();
    let shapes = [(2, 4, 1), (2, 4, 63), (2, 4, 64), (2, 4, 65), (2, 4, 1000), (16, 48, 1000), (4, 4, 130)];
    for instructions in [Instructions::Portable, Instructions::Native] {
        load_or_panic(instructions);
        for (key_heads, value_heads, t) in shapes {
            for (decay, state) in [(0.002, 0.3), (0.3, 0.0), (0.3, 0.3), (40.0, 0.3), (0.0, 0.3)] {
                let case = case(heads(key_heads, value_heads), t, decay, state, device);
                let what =
                    format!("{instructions:?}, {t} rows, {key_heads}:{value_heads}, decay {decay}, state {state}");
                found.push(json!({"case": what, "errors_of_compiled_and_plain": judge(&case, &what)}));
            }
        }
    }
    found
}

/// Relative errors of the kernels and of matrix products that round to bfloat16, both against float64, by name.
fn judge(case: &Case, what: &str) -> Map<String, Value> {
    let wanted = case.wide().computed(Form::Plain);
    let plain = case.computed(Form::Plain);
    let compiled = case.computed(Form::Compiled);
    let again = case.computed(Form::Compiled);
    let mut errors = Map::new();
    for (index, (name, wanted)) in wanted.iter().enumerate() {
        let (mine, by_plain) = (error(&compiled[index].1, wanted), error(&plain[index].1, wanted));
        assert!(compiled[index].1.equal(&again[index].1), "{name}, {what}: two calls differ");
        let gate = name.starts_with("decay") || name.starts_with("strength");
        let tolerance = if gate { OF_GATES } else { OF_ROWS };
        assert!(mine <= tolerance, "{name}, {what}: {mine:.1e}, matrix products {by_plain:.1e}");
        errors.insert((*name).to_owned(), json!([mine, by_plain]));
    }
    errors
}

/// Forward through all rows in calls of `each`: outputs, and the states before every call and after the last.
fn forward(form: Form, case: &Case, each: i64) -> (Vec<Tensor>, Vec<Tensor>) {
    let t = case.rows.y_tu.size()[0];
    let (mut outs, mut states) = (Vec::new(), vec![case.state.shallow_clone()]);
    for first in starts(t, each) {
        let (out, next) = form.forward(&case.heads, &case.rows(first, each.min(t - first)), &states[states.len() - 1]);
        outs.push(out);
        states.push(next);
    }
    (outs, states)
}

fn starts(t: i64, each: i64) -> Vec<i64> {
    (0..t).step_by(usize::try_from(each).unwrap_or(1)).collect()
}

/// Backward through all rows in calls of `each`: gradients of the rows of each call, and of the state before the first.
fn backward(form: Form, case: &Case, states: &[Tensor], each: i64) -> (Vec<DeltaRows>, Tensor) {
    let t = case.rows.y_tu.size()[0];
    let mut dstate = case.dstate.shallow_clone();
    let mut parts = Vec::new();
    for (index, &first) in starts(t, each).iter().enumerate().rev() {
        let count = each.min(t - first);
        let (rows, dout) = (case.rows(first, count), case.dout.narrow(0, first, count));
        let gradient = form.backward(&case.heads, &rows, &states[index], &dout, &dstate);
        let gradient = gradient.unwrap_or_else(|error| panic!("{error}"));
        dstate = gradient.dstate_hkv;
        parts.push(gradient.rows);
    }
    parts.reverse();
    (parts, dstate)
}

/// Rows × channels exceed 2³¹. Calls that end between chunks carry the state in float32, so one call and many give the same.
pub(crate) fn blocks(_world: &World, device: Device) -> Vec<Value> {
    tch::manual_seed(22);
    let heads = heads(16, 48);
    choose(&heads, device);
    let t = 262_144;
    let case = case(heads, t, 0.1, 0.3, device);
    assert!(t * heads.channels() > 1 << 31);
    let (whole, ends) = forward(Form::Compiled, &case, t);
    let (parts, states) = forward(Form::Compiled, &case, 16_384);
    assert!(Tensor::cat(&parts, 0).equal(&whole[0]), "outputs");
    assert!(states[states.len() - 1].equal(&ends[1]), "states");
    drop((whole, parts));
    let (whole, dstate) = backward(Form::Compiled, &case, &ends, t);
    let (parts, dstate_of_parts) = backward(Form::Compiled, &case, &states, 16_384);
    assert!(dstate.equal(&dstate_of_parts), "gradient of the state");
    let same = |part: fn(&DeltaRows) -> &Tensor| {
        let parts: Vec<&Tensor> = parts.iter().map(part).collect();
        Tensor::cat(&parts, 0).equal(part(&whole[0]))
    };
    assert!(same(|rows| &rows.y_tu) && same(|rows| &rows.decay_th) && same(|rows| &rows.strength_th), "gradients");
    // Other calls than whole chunks round in other places.
    let (odd, odd_states) = forward(Form::Compiled, &case, 16_385);
    let (even, _) = forward(Form::Compiled, &case, 16_384);
    let apart = error(&Tensor::cat(&odd, 0), &Tensor::cat(&even, 0));
    let states_apart = error(&odd_states[odd_states.len() - 1], &states[states.len() - 1]);
    assert!(apart <= OF_ROWS && states_apart <= OF_ROWS, "{apart:.1e}, {states_apart:.1e}");
    vec![json!({"rows": t, "channels": heads.channels(), "odd_calls_apart": apart, "odd_states_apart": states_apart})]
}

pub(crate) fn convolution(_world: &World, device: Device) -> Vec<Value> {
    tch::manual_seed(23);
    let mut found = Vec::new();
    for taps in [1, 2, 4, 8] {
        let heads = heads(1, 2);
        assert_eq!(Form::choose(device, &heads, taps, Kind::BFloat16), Form::Compiled, "{taps} taps");
        for t in [1, 3, 31, 32, 33, 1000] {
            let normal = |shape: &[i64]| Tensor::randn(shape, (Kind::BFloat16, device));
            let (u_eu, weight_uj) = (normal(&[taps - 1 + t, heads.channels()]), normal(&[heads.channels(), taps]));
            let dy_tu = normal(&[t, heads.channels()]);
            let both = |form: Form, kind: Kind| {
                let (u_eu, weight_uj, dy_tu) = (u_eu.to_kind(kind), weight_uj.to_kind(kind), dy_tu.to_kind(kind));
                let du_eu = form.convolve_backward(&u_eu, &weight_uj, &dy_tu);
                (form.convolve(&u_eu, &weight_uj), du_eu.unwrap_or_else(|error| panic!("{error}")))
            };
            let (y, du) = both(Form::Compiled, Kind::BFloat16);
            let (wanted_y, wanted_du) = both(Form::Plain, Kind::Double);
            let (plain_y, plain_du) = both(Form::Plain, Kind::BFloat16);
            let errors = [error(&y, &wanted_y), error(&du, &wanted_du)];
            // One rounding to bfloat16 in the output, none in the gradient.
            assert!(errors[0] <= 4e-3 && errors[1] <= 1e-5, "{taps} taps, {t} rows: {errors:?}");
            let of_plain = [error(&plain_y, &wanted_y), error(&plain_du, &wanted_du)];
            found.push(json!({"taps": taps, "rows": t, "errors": errors, "errors_of_plain": of_plain}));
        }
    }
    found
}

/// One layer of 16 key and 48 value heads over 131,072 rows. FLOPs of the forward are those of the products of a chunk and a
/// value head, whole squares: q k, k k, k S, q S, T R, P V', k V'; the backward counts twice as many, and nothing that is
/// computed again.
pub(crate) fn speed(_world: &World, device: Device) -> Vec<Value> {
    tch::manual_seed(24);
    let (heads, t) = (heads(16, 48), 131_072_i64);
    choose(&heads, device);
    let case = case(heads, t, 0.3, 0.0, device);
    let chunks = f64::from(u32::try_from(t / 64 * heads.value_heads).unwrap_or(0));
    let tflop = chunks * 2.0 * (4.0 * 64.0 * 64.0 * 128.0 + 3.0 * 64.0 * 128.0 * 128.0) / 1e12;
    let mut found = Vec::new();
    for (form, repeats) in [(Form::Compiled, 5), (Form::Plain, 1)] {
        let each = form.rows_max(device);
        let (_, states) = forward(form, &case, each);
        let ahead = seconds(device, repeats, || forward(form, &case, each));
        let back = seconds(device, repeats, || backward(form, &case, &states, each));
        let parts = starts(t, each);
        let maps = seconds(device, repeats, || {
            for &first in &parts {
                drop(form.transition(&case.heads, &case.rows(first, each)));
            }
        });
        let pulls = seconds(device, repeats, || {
            for &first in &parts {
                let dout = case.dout.narrow(0, first, each);
                drop(form.pull(&case.heads, &case.rows(first, each), &dout, &case.dstate));
            }
        });
        found.push(json!({
            "form": form.name(), "rows": t, "rows_of_a_call": each, "forward_seconds": ahead, "backward_seconds": back,
            "layers_48_seconds": 48.0 * (ahead + back), "forward_tflops": tflop / ahead,
            "backward_tflops": 2.0 * tflop / back, "transition_seconds": maps, "pull_seconds": pulls,
        }));
    }
    found.extend(convolution_speed(&heads, t, device));
    found
}

/// The convolution of one layer's rows, four taps.
fn convolution_speed(heads: &DeltaHeads, t: i64, device: Device) -> Vec<Value> {
    let normal = |shape: &[i64]| Tensor::randn(shape, (Kind::BFloat16, device));
    let (u_eu, weight_uj) = (normal(&[t + 3, heads.channels()]), normal(&[heads.channels(), 4]));
    let dy_tu = normal(&[t, heads.channels()]);
    let mut found = Vec::new();
    for (form, repeats) in [(Form::Compiled, 5), (Form::Plain, 1)] {
        let each = form.rows_max(device);
        let parts = starts(t, each);
        let ahead = seconds(device, repeats, || {
            for &first in &parts {
                drop(form.convolve(&u_eu.narrow(0, first, each + 3), &weight_uj));
            }
        });
        let back = seconds(device, repeats, || {
            for &first in &parts {
                let (u_eu, dy_tu) = (u_eu.narrow(0, first, each + 3), dy_tu.narrow(0, first, each));
                drop(form.convolve_backward(&u_eu, &weight_uj, &dy_tu).unwrap_or_else(|error| panic!("{error}")));
            }
        });
        found.push(json!({
            "form": form.name(), "convolution": true, "rows": t, "forward_seconds": ahead, "backward_seconds": back,
        }));
    }
    found
}
