//! The chunked rule against the rule row by row, and its maps against each other, on the processor.

use tch::{Device, Kind, Tensor};

use super::{DeltaHeads, DeltaRows, Form, plain};
use crate::tensor::accumulation;

const HEADS: DeltaHeads = DeltaHeads { key_heads: 2, value_heads: 6, key_dim: 16, value_dim: 24 };
const LENGTHS: [i64; 9] = [1, 2, 3, 63, 64, 65, 127, 128, 130];

struct Case {
    rows: DeltaRows,
    state: Tensor,
    dout: Tensor,
    dstate: Tensor,
}

/// `decay` is the mean size of the logarithm of the decay.
fn case(t: i64, decay: f64, kind: Kind) -> Case {
    let acc = accumulation(kind);
    let normal = |shape: &[i64], kind: Kind| Tensor::randn(shape, (Kind::Double, Device::Cpu)).to_kind(kind);
    let gate = || normal(&[t, HEADS.value_heads], acc);
    Case {
        rows: DeltaRows {
            y_tu: normal(&[t, HEADS.channels()], kind),
            decay_th: gate().abs() * -decay,
            strength_th: gate().sigmoid(),
        },
        state: normal(&HEADS.state(), acc),
        dout: normal(&[t, HEADS.value_heads, HEADS.value_dim], kind),
        dstate: normal(&HEADS.state(), acc),
    }
}

/// Row by row.
fn stepped(case: &Case) -> (Tensor, Tensor) {
    let mut state = case.state.unsqueeze(0);
    let mut out = Vec::new();
    for row in 0..case.rows.y_tu.size()[0] {
        let part = |x: &Tensor| x.narrow(0, row, 1);
        let DeltaRows { y_tu, decay_th, strength_th } = &case.rows;
        let one = DeltaRows { y_tu: part(y_tu), decay_th: part(decay_th), strength_th: part(strength_th) };
        let (out_1hv, next) = plain::step(&HEADS, &one, &state);
        out.push(out_1hv);
        state = next;
    }
    (Tensor::cat(&out, 0), state.squeeze_dim(0))
}

fn error(found: &Tensor, wanted: &Tensor) -> f64 {
    let (found, wanted) = (found.to_kind(Kind::Double), wanted.to_kind(Kind::Double));
    ((found - &wanted).norm() / wanted.norm()).double_value(&[])
}

fn assert_close(found: &Tensor, wanted: &Tensor, tolerance: f64, what: &str) {
    let error = error(found, wanted);
    assert!(error <= tolerance, "{what}: relative error {error}");
}

#[test]
fn chunks_equal_the_rule_row_by_row() {
    tch::manual_seed(1);
    for (kind, tolerance) in [(Kind::Double, 1e-12), (Kind::Float, 1e-6)] {
        for t in LENGTHS {
            for decay in [0.001, 0.3, 20.0] {
                let case = case(t, decay, kind);
                let (out, next) = Form::Plain.forward(&HEADS, &case.rows, &case.state);
                let (wanted, state) = stepped(&case);
                assert_close(&out, &wanted, tolerance, &format!("output of {t} rows of {kind:?}, decay {decay}"));
                assert_close(&next, &state, tolerance, &format!("state after {t} rows of {kind:?}, decay {decay}"));
            }
        }
    }
}

#[test]
fn the_map_of_rows_gives_the_state_after_them() {
    tch::manual_seed(2);
    for (kind, tolerance) in [(Kind::Double, 1e-12), (Kind::Float, 1e-6)] {
        for t in LENGTHS {
            let case = case(t, 0.05, kind);
            let map = Form::Plain.transition(&HEADS, &case.rows);
            let state = map.factor_hkk.matmul(&case.state) + map.increment_hkv;
            let (_, next) = Form::Plain.forward(&HEADS, &case.rows, &case.state);
            assert_close(&state, &next, tolerance, &format!("{t} rows of {kind:?}"));
        }
    }
}

#[test]
fn the_gradient_of_a_state_is_that_of_the_whole_backward() {
    tch::manual_seed(3);
    for (kind, tolerance) in [(Kind::Double, 1e-12), (Kind::Float, 1e-6)] {
        for t in LENGTHS {
            let Case { rows, state, dout, dstate } = case(t, 0.05, kind);
            let whole = Form::Plain.backward(&HEADS, &rows, &state, &dout, &dstate).expect("a gradient");
            let pulled = Form::Plain.pull(&HEADS, &rows, &dout, &dstate);
            assert_close(&pulled, &whole.dstate_hkv, tolerance, &format!("{t} rows of {kind:?}"));
        }
    }
}

#[test]
fn blocks_one_after_another_equal_one_run() {
    tch::manual_seed(4);
    let Case { rows, state, dout, dstate } = case(130, 0.05, Kind::Double);
    let (out, next) = Form::Plain.forward(&HEADS, &rows, &state);
    let part = |first: i64, t: i64| DeltaRows {
        y_tu: rows.y_tu.narrow(0, first, t),
        decay_th: rows.decay_th.narrow(0, first, t),
        strength_th: rows.strength_th.narrow(0, first, t),
    };
    let (early, late) = (part(0, 37), part(37, 93));
    let (out_early, middle) = Form::Plain.forward(&HEADS, &early, &state);
    let (out_late, end) = Form::Plain.forward(&HEADS, &late, &middle);
    assert_close(&Tensor::cat(&[out_early, out_late], 0), &out, 1e-12, "output");
    assert_close(&end, &next, 1e-12, "state");
    let whole = Form::Plain.backward(&HEADS, &rows, &state, &dout, &dstate).expect("a gradient");
    let of_late = Form::Plain.backward(&HEADS, &late, &middle, &dout.narrow(0, 37, 93), &dstate).expect("a gradient");
    let of_early = Form::Plain.backward(&HEADS, &early, &state, &dout.narrow(0, 0, 37), &of_late.dstate_hkv);
    let of_early = of_early.expect("a gradient");
    assert_close(&of_early.dstate_hkv, &whole.dstate_hkv, 1e-12, "gradient of the state");
    let joined = Tensor::cat(&[of_early.rows.y_tu, of_late.rows.y_tu], 0);
    assert_close(&joined, &whole.rows.y_tu, 1e-12, "gradient of the rows");
    let joined = Tensor::cat(&[of_early.rows.decay_th, of_late.rows.decay_th], 0);
    assert_close(&joined, &whole.rows.decay_th, 1e-12, "gradient of the decays");
}

#[test]
fn decays_down_to_nothing_give_numbers() {
    tch::manual_seed(5);
    for kind in [Kind::Double, Kind::Float] {
        let Case { rows, state, dout, dstate } = case(130, 500.0, kind);
        let (out, next) = Form::Plain.forward(&HEADS, &rows, &state);
        let gradient = Form::Plain.backward(&HEADS, &rows, &state, &dout, &dstate).expect("a gradient");
        for x in [out, next, gradient.rows.y_tu, gradient.rows.decay_th, gradient.rows.strength_th, gradient.dstate_hkv]
        {
            assert!(x.isfinite().all().int64_value(&[]) == 1, "{kind:?}");
        }
    }
}

#[test]
fn no_rows_leave_the_state_as_it_is() {
    for form in [Form::Plain, Form::Compiled] {
        let Case { rows, state, dout, dstate } = case(0, 1.0, Kind::Float);
        let (out, next) = form.forward(&HEADS, &rows, &state);
        assert_eq!(out.size(), [0, HEADS.value_heads, HEADS.value_dim]);
        assert!(next.equal(&state));
        assert!(form.pull(&HEADS, &rows, &dout, &dstate).equal(&dstate));
        let map = form.transition(&HEADS, &rows);
        assert!((map.factor_hkk.matmul(&state) + map.increment_hkv).equal(&state));
    }
}

#[test]
fn without_a_gpu_matrix_products_compute_whatever_is_asked_for() {
    tch::manual_seed(6);
    let heads = DeltaHeads { key_heads: 1, value_heads: 3, key_dim: 128, value_dim: 128 };
    assert_eq!(Form::choose(Device::Cpu, &heads, 4, Kind::BFloat16), Form::Plain);
    let Case { rows, state, dout, dstate } = case(70, 0.1, Kind::BFloat16);
    let (out, next) = Form::Compiled.forward(&HEADS, &rows, &state);
    let (wanted, wanted_next) = Form::Plain.forward(&HEADS, &rows, &state);
    assert!(out.equal(&wanted) && next.equal(&wanted_next));
    let found = Form::Compiled.backward(&HEADS, &rows, &state, &dout, &dstate).expect("a gradient");
    let wanted = Form::Plain.backward(&HEADS, &rows, &state, &dout, &dstate).expect("a gradient");
    assert!(found.rows.y_tu.equal(&wanted.rows.y_tu) && found.dstate_hkv.equal(&wanted.dstate_hkv));
}
