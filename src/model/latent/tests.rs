//! Keys where they lie, and attention over them against autograd of one masked softmax.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::attention::{LatentAttention, QueryGradient};
use super::keys::{KeyRun, Keys};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
/// Rounding of float64 sums of a few terms of size 1.
const LIMIT: f64 = 1e-12;
const LATENT: i64 = 5;
const WIDTH: i64 = LATENT + 2;
const HEADS: i64 = 3;

fn attention() -> LatentAttention {
    LatentAttention {
        heads: HEADS,
        latent: LATENT,
        rotated: WIDTH - LATENT,
        index_dim: None,
        scale: 0.37,
        kind: Kind::Double,
    }
}

/// Runs of the keys `key_sk` of all positions, those marked with gradient.
fn runs(key_sk: &Tensor, stretches: &[(Range<i64>, bool)]) -> Vec<KeyRun> {
    let run = |(positions, carries): &(Range<i64>, bool)| {
        let rows = positions.end - positions.start;
        KeyRun {
            positions: positions.clone(),
            key_sk: key_sk.narrow(0, positions.start, rows),
            gradient_sk: carries.then(|| Tensor::zeros([rows, WIDTH], DOUBLE)),
        }
    };
    stretches.iter().map(run).collect()
}

fn keys(runs: Vec<KeyRun>) -> Keys {
    Keys::new(runs, WIDTH, Kind::Double, Device::Cpu)
}

/// A key says its position in every element.
fn labelled(end: i64) -> Tensor {
    Tensor::arange(end, DOUBLE).unsqueeze(1).expand([end, WIDTH], false).contiguous()
}

fn sets(rows: &[&[i32]]) -> Tensor {
    let widest = rows.iter().map(|row| row.len()).max().unwrap_or(0);
    let padded: Vec<Tensor> = rows
        .iter()
        .map(|row| Tensor::from_slice(&row.iter().copied().chain(vec![-1; widest - row.len()]).collect::<Vec<i32>>()))
        .collect();
    Tensor::stack(&padded, 0)
}

fn worst(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.size(), expected.size());
    assert_eq!(found.isfinite().all().int64_value(&[]), 1, "{found}");
    (found - expected).abs().max().double_value(&[])
}

const SETS: [&[i32]; 5] = [&[0, 4, 5, 11, 12], &[3, 19], &[], &[1, 2, 9, 10, 18], &[6, 7, 8, 13, 14]];

#[test]
fn keys_are_found_in_runs_of_any_order() {
    let key_sk = labelled(20);
    let here = [12..15, 3..6, 6..6, 9..12, 18..20];
    let stretches: Vec<(Range<i64>, bool)> = here.iter().map(|run| (run.clone(), false)).collect();
    for turn in 0..stretches.len() {
        let mut stretches = stretches.clone();
        stretches.rotate_left(turn);
        let keys = keys(runs(&key_sk, &stretches));
        let found = keys.find(&sets(&SETS));
        let held = |set: &[i32]| -> Vec<f64> {
            set.iter()
                .filter(|&&at| here.iter().any(|run| run.contains(&i64::from(at))))
                .map(|&at| f64::from(at))
                .collect()
        };
        assert_eq!(found.width(), 4, "as wide as the fullest row");
        let gathered = keys.gather(&found, &(0..5));
        for (row, set) in (0i64..).zip(SETS) {
            let absent: Vec<bool> = (&gathered.absent_tm.get(row)).try_into().expect("flags");
            let label: Vec<f64> = (&gathered.key_tmk.get(row).select(1, 0)).try_into().expect("numbers");
            let present: Vec<f64> =
                label.iter().zip(&absent).filter(|(_, absent)| !**absent).map(|(label, _)| *label).collect();
            assert_eq!(present, held(set), "row {row}, turn {turn}");
        }
    }
}

#[test]
fn keys_of_all_positions_are_found_as_they_are_and_none_beyond() {
    let keys = keys(runs(&labelled(12), &[(5..12, false), (0..5, false)]));
    let gathered = keys.gather(&keys.find(&sets(&[&[0, 4, 11, 12], &[19]])), &(0..2));
    let absent: Vec<Vec<bool>> = (&gathered.absent_tm).try_into().expect("flags");
    assert_eq!(absent, [[false, false, false, true], [true; 4]]);
    let label: Vec<f64> = (&gathered.key_tmk.get(0).select(1, 0)).try_into().expect("numbers");
    assert_eq!(label[..3], [0.0, 4.0, 11.0]);
}

#[test]
fn no_key_at_all_is_found_where_a_rank_holds_none() {
    for stretches in [&[][..], &[(4..4, true)]] {
        let mut held = runs(&labelled(20), stretches);
        let keys = keys(runs(&labelled(20), stretches));
        let q_thk = Tensor::randn([5, HEADS, WIDTH], DOUBLE);
        let found = keys.find(&sets(&SETS));
        let (out_thc, lse_th) = attention().attend(&q_thk, &keys, &found).into_acc();
        assert!(out_thc.equal(&out_thc.zeros_like()) && lse_th.isneginf().all().int64_value(&[]) == 1);
        keys.return_gradient(&mut held);
    }
}

#[test]
fn gradient_lands_on_the_run_of_its_position_and_constants_get_none() {
    let key_sk = labelled(20);
    let stretches = [(12..15, true), (3..6, false), (6..6, true), (9..12, true), (18..20, false), (15..16, true)];
    for turn in 0..stretches.len() {
        let mut stretches = stretches.to_vec();
        stretches.rotate_left(turn);
        let mut held = runs(&key_sk, &stretches);
        let again = held.iter().map(|run| KeyRun {
            positions: run.positions.clone(),
            key_sk: run.key_sk.shallow_clone(),
            gradient_sk: run.gradient_sk.as_ref().map(Tensor::shallow_clone),
        });
        let keys = keys(again.collect());
        assert!(keys.carries_gradient());
        let gathered = keys.gather(&keys.find(&sets(&SETS)), &(1..5));
        // Places without a key bring something too, which must land nowhere.
        keys.add_gradient(&gathered, &(&gathered.key_tmk + 100.0));
        keys.return_gradient(&mut held);
        for run in &held {
            let Some(found) = &run.gradient_sk else { continue };
            let expected = run.positions.clone().map(|position| {
                let times =
                    SETS[1..].iter().flat_map(|set| set.iter()).filter(|&&at| i64::from(at) == position).count();
                (&key_sk.get(position) + 100.0) * i64::try_from(times).expect("few")
            });
            let expected: Vec<Tensor> = expected.collect();
            if !expected.is_empty() {
                assert!(found.equal(&Tensor::stack(&expected, 0)), "{:?}, turn {turn}", run.positions);
            }
        }
    }
}

#[test]
fn places_without_a_key_add_nothing_where_every_run_carries_gradient() {
    let key_sk = Tensor::randn([20, WIDTH], DOUBLE);
    let held = runs(&key_sk, &[(0..20, true)]);
    let gradient_sk = held[0].gradient_sk.as_ref().expect("it carries gradient").shallow_clone();
    let keys = keys(held);
    let found = keys.find(&sets(&[&[7, 8], &[8], &[]]));
    let q_thk = Tensor::randn([3, HEADS, WIDTH], DOUBLE);
    let (out_thc, lse_th) = attention().attend(&q_thk, &keys, &found).into_acc();
    let dout_thc = out_thc.ones_like();
    let rows_of = QueryGradient { q_thk: &q_thk, out_thc: &out_thc, lse_th: &lse_th, dout_thc: &dout_thc };
    let _dq = attention().backward_attend(&rows_of, &keys, &found);
    for position in (0..20).filter(|position| ![7, 8].contains(position)) {
        let row = gradient_sk.get(position);
        assert!(row.equal(&row.zeros_like()), "position {position}");
    }
}

/// What plain autograd has: output, and gradients of queries and keys. Rows that see no key have an output of 0.
fn reference(q_thk: &Tensor, key_sk: &Tensor, position_tn: &Tensor, dout_thc: &Tensor) -> [Tensor; 4] {
    let (q_thk, key_sk) = (q_thk.copy().set_requires_grad(true), key_sk.copy().set_requires_grad(true));
    let end = key_sk.size()[0];
    let key_s = Tensor::arange(end, (Kind::Int, Device::Cpu));
    let seen_ts = position_tn.unsqueeze(-1).eq_tensor(&key_s).any_dim(1, false);
    let score_ths = q_thk.matmul(&key_sk.transpose(0, 1)) * 0.37;
    let hidden = seen_ts.logical_not().unsqueeze(1);
    // A finite number in the place of −∞: a row that sees nothing has no NaN, and the product takes its weights away.
    let weight_ths = score_ths.masked_fill(&hidden, -1e9).softmax(-1, Kind::Double) * seen_ts.unsqueeze(1);
    let out_thc = weight_ths.matmul(&key_sk.narrow(1, 0, LATENT));
    (&out_thc * dout_thc).sum(Kind::Double).backward();
    let lse_th = score_ths.detach().masked_fill(&hidden, f64::NEG_INFINITY).logsumexp([-1i64].as_slice(), false);
    [out_thc.detach(), lse_th, q_thk.grad(), key_sk.grad()]
}

#[test]
fn attention_over_runs_is_that_of_a_masked_softmax_and_its_autograd() {
    tch::manual_seed(3);
    let key_sk = Tensor::randn([20, WIDTH], DOUBLE);
    let q_thk = Tensor::randn([5, HEADS, WIDTH], DOUBLE);
    let dout_thc = Tensor::randn([5, HEADS, LATENT], DOUBLE);
    let position_tn = sets(&SETS);
    let [out, lse_th, dq, dkey] = reference(&q_thk, &key_sk, &position_tn, &dout_thc);
    let attention = attention();
    for stretches in [
        &[(0..20, true)][..],
        &[(0..7, true), (7..20, true)],
        &[(12..20, true), (0..3, true), (3..12, true)],
        &[(12..20, true), (0..12, false)],
    ] {
        let mut held = runs(&key_sk, stretches);
        let again = runs(&key_sk, stretches)
            .into_iter()
            .zip(&held)
            .map(|(run, held)| KeyRun { gradient_sk: held.gradient_sk.as_ref().map(Tensor::shallow_clone), ..run });
        let keys = keys(again.collect());
        let found = keys.find(&position_tn);
        let (out_thc, merged_th) = attention.attend(&q_thk, &keys, &found).into_acc();
        assert!(worst(&out_thc, &out) <= LIMIT, "{stretches:?}");
        // exp, since −∞ less −∞ is no number.
        assert!(worst(&merged_th.exp(), &lse_th.exp()) <= LIMIT * 1e2, "{stretches:?}");
        let rows_of = QueryGradient { q_thk: &q_thk, out_thc: &out_thc, lse_th: &merged_th, dout_thc: &dout_thc };
        assert!(worst(&attention.backward_attend(&rows_of, &keys, &found), &dq) <= LIMIT, "{stretches:?}");
        keys.return_gradient(&mut held);
        for run in held {
            let Some(gradient) = run.gradient_sk else { continue };
            let expected = dkey.narrow(0, run.positions.start, run.positions.end - run.positions.start);
            assert!(worst(&gradient, &expected) <= LIMIT, "{:?} of {stretches:?}", run.positions);
        }
    }
}

/// Parts of several holders, merged by the caller in training; here each part's backward under the whole's output adds up.
#[test]
fn parts_of_two_holders_add_up_to_the_whole_gradient() {
    tch::manual_seed(4);
    let key_sk = Tensor::randn([20, WIDTH], DOUBLE);
    let q_thk = Tensor::randn([5, HEADS, WIDTH], DOUBLE);
    let dout_thc = Tensor::randn([5, HEADS, LATENT], DOUBLE);
    let position_tn = sets(&SETS);
    let [out, lse_th, dq, _] = reference(&q_thk, &key_sk, &position_tn, &dout_thc);
    let rows_of = QueryGradient { q_thk: &q_thk, out_thc: &out, lse_th: &lse_th, dout_thc: &dout_thc };
    let parts = [&[(0..4, true), (16..20, true)][..], &[(4..16, false)]].map(|stretches| {
        let keys = keys(runs(&key_sk, stretches));
        attention().backward_attend(&rows_of, &keys, &keys.find(&position_tn))
    });
    assert!(worst(&(&parts[0] + &parts[1]), &dq) <= LIMIT);
}

#[test]
fn a_row_that_sees_no_key_has_an_output_of_0_and_no_gradient() {
    let key_sk = Tensor::randn([20, WIDTH], DOUBLE);
    let q_thk = Tensor::randn([2, HEADS, WIDTH], DOUBLE);
    let dout_thc = Tensor::randn([2, HEADS, LATENT], DOUBLE);
    for position_tn in [sets(&[&[], &[]]), Tensor::full([2, 3], -1, (Kind::Int, Device::Cpu))] {
        let mixed = attention().prompt(&q_thk, &key_sk, &position_tn);
        let lse_th = &mixed.saved.tensors()[0];
        assert!(mixed.out.equal(&mixed.out.zeros_like()) && lse_th.isneginf().all().int64_value(&[]) == 1);
        for cut in [0, 6] {
            let gradient_gk = Tensor::zeros([20 - cut, WIDTH], DOUBLE);
            let rows_of = QueryGradient { q_thk: &q_thk, out_thc: &mixed.out, lse_th, dout_thc: &dout_thc };
            let dq_thk = attention().prompt_backward(&rows_of, &key_sk, &position_tn, cut, &gradient_gk);
            assert!(dq_thk.equal(&dq_thk.zeros_like()) && gradient_gk.equal(&gradient_gk.zeros_like()), "cut {cut}");
        }
    }
}
