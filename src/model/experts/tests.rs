//! The router against a loop over rows, and what it promises about ties and kept choices.

use tch::{Device, Kind, Tensor};

use super::{Error, check_spread, route};
use crate::model::parts::{ExpertSpec, Router};
use crate::tensor::boundary::backward;

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

fn spec(router: Router, groups: u64, kept_groups: u64, chosen: u64) -> ExpertSpec {
    ExpertSpec {
        count: 12,
        chosen,
        width: 5,
        shared_width: 0,
        shared_gate: false,
        router,
        normalised: true,
        scaling: 2.5,
        groups,
        kept_groups,
        sparse: vec![true],
    }
}

fn integers(x: &Tensor) -> Vec<Vec<i64>> {
    Vec::try_from(x).expect("rows of integers")
}

fn numbers(x: &Tensor) -> Vec<Vec<f64>> {
    Vec::try_from(x).expect("rows of numbers")
}

/// Indices of the `count` largest, the lowest index first among equal ones.
fn best(values: &[f64], count: usize) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..values.len()).collect();
    indices.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
    indices.truncate(count);
    indices
}

/// Choice and weights of one row, written as a loop.
fn by_hand(spec: &ExpertSpec, logits: &[f64], bias: &[f64]) -> (Vec<i64>, Vec<f64>) {
    let exp: Vec<f64> = logits.iter().map(|logit| logit.exp()).collect();
    let sum: f64 = exp.iter().sum();
    let score: Vec<f64> = match spec.router {
        Router::Softmax => exp.iter().map(|one| one / sum).collect(),
        Router::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
    };
    let mut choice: Vec<f64> = score.iter().zip(bias).map(|(score, bias)| score + bias).collect();
    if spec.groups > 1 {
        let size = choice.len() / usize::try_from(spec.groups).unwrap();
        let worth: Vec<f64> =
            choice.chunks(size).map(|group| best(group, 2).into_iter().map(|index| group[index]).sum()).collect();
        let kept = best(&worth, usize::try_from(spec.kept_groups).unwrap());
        for (index, value) in choice.iter_mut().enumerate() {
            if !kept.contains(&(index / size)) {
                *value = f64::NEG_INFINITY;
            }
        }
    }
    let mut experts = best(&choice, usize::try_from(spec.chosen).unwrap());
    experts.sort_unstable();
    let sum: f64 = experts.iter().map(|&expert| score[expert]).sum();
    let weights = experts.iter().map(|&expert| score[expert] / sum * spec.scaling).collect();
    (experts.into_iter().map(|expert| i64::try_from(expert).unwrap()).collect(), weights)
}

#[test]
fn choice_and_weights_are_those_of_a_loop_over_rows() {
    tch::manual_seed(3);
    let (x_tw, gate_ew) = (Tensor::randn([40, 7], DOUBLE), Tensor::randn([12, 7], DOUBLE));
    let bias_e = Tensor::randn([12], DOUBLE) * 0.3;
    let logits = numbers(&x_tw.matmul(&gate_ew.tr()));
    for spec in [
        spec(Router::Softmax, 1, 1, 3),
        spec(Router::Sigmoid, 1, 1, 3),
        spec(Router::Sigmoid, 4, 2, 3),
        spec(Router::Sigmoid, 12, 4, 2),
        spec(Router::Softmax, 1, 1, 1),
    ] {
        let bias = (spec.router == Router::Sigmoid).then_some(&bias_e);
        let routed = route(&spec, &x_tw, &gate_ew, bias, None);
        let (experts, weights) = (integers(&routed.expert_tk), numbers(&routed.weight_tk));
        let bias: Vec<f64> = bias.map_or(vec![0.0; 12], |bias| Vec::try_from(bias).unwrap());
        for (row, logits) in logits.iter().enumerate() {
            let (expected, expected_weights) = by_hand(&spec, logits, &bias);
            assert_eq!(experts[row], expected, "row {row} of {spec:?}");
            for (found, expected) in weights[row].iter().zip(&expected_weights) {
                assert!((found - expected).abs() < 1e-13, "row {row} of {spec:?}: {found} for {expected}");
            }
        }
    }
}

#[test]
fn of_equal_scores_the_lowest_experts_and_groups_are_chosen() {
    let (x_tw, gate_ew) = (Tensor::randn([300, 7], DOUBLE), Tensor::zeros([12, 7], DOUBLE));
    for spec in [spec(Router::Softmax, 1, 1, 3), spec(Router::Sigmoid, 1, 1, 3), spec(Router::Sigmoid, 3, 2, 3)] {
        for experts in integers(&route(&spec, &x_tw, &gate_ew, None, None).expert_tk) {
            assert_eq!(experts, [0, 1, 2], "{spec:?}");
        }
    }
    // Groups 1 and 2 of three are better than group 0 and equal.
    let bias_e = Tensor::from_slice(&[0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
    let routed = route(&spec(Router::Sigmoid, 3, 1, 3), &x_tw, &gate_ew, Some(&bias_e), None);
    assert!(integers(&routed.expert_tk).iter().all(|experts| experts == &[4, 5, 6]));
}

/// A router that has changed since the choice was made must still weigh, and learn from, the experts that are computed.
#[test]
fn a_kept_expert_that_would_not_be_chosen_now_has_weight_and_gradient() {
    tch::manual_seed(4);
    for router in [Router::Softmax, Router::Sigmoid] {
        let spec = spec(router, 1, 1, 2);
        let x_tw = Tensor::randn([1, 7], DOUBLE).set_requires_grad(true);
        let gate_ew = Tensor::randn([12, 7], DOUBLE);
        let order: Vec<i64> = Vec::try_from(x_tw.detach().matmul(&gate_ew.tr()).argsort(-1, true).get(0)).unwrap();
        // The best and the worst of all.
        let mut kept = [order[0], order[11]];
        kept.sort_unstable();
        let routed = route(&spec, &x_tw, &gate_ew, None, Some(&Tensor::from_slice(&kept).unsqueeze(0)));
        assert_eq!(integers(&routed.expert_tk), [kept]);
        let worst = i64::from(kept[1] == order[11]);
        let weight = routed.weight_tk.select(1, worst);
        assert!(weight.double_value(&[0]) > 0.0);
        let sum = routed.weight_tk.sum(Kind::Double).double_value(&[]);
        assert!((sum - spec.scaling).abs() < 1e-12, "divided by the sum of those that are computed: {sum}");
        backward(&[(&weight, &weight.ones_like())]).unwrap();
        assert!(x_tw.grad().abs().max().double_value(&[]) > 1e-6, "{router:?}");
    }
}

#[test]
fn one_normalised_expert_has_its_full_weight_and_no_gradient() {
    let x_tw = Tensor::randn([5, 7], DOUBLE).set_requires_grad(true);
    let routed = route(&spec(Router::Softmax, 1, 1, 1), &x_tw, &Tensor::randn([12, 7], DOUBLE), None, None);
    assert!(routed.weight_tk.equal(&(routed.weight_tk.ones_like() * 2.5)));
    assert!(!routed.weight_tk.requires_grad());
}

/// The published router computes logits in the model's dtype and scores in float32.
#[test]
fn a_bfloat16_softmax_router_has_bfloat16_logits_and_weights() {
    tch::manual_seed(5);
    let kind = (Kind::BFloat16, Device::Cpu);
    let (x_tw, gate_ew) = (Tensor::randn([9, 7], kind), Tensor::randn([12, 7], kind));
    let routed = route(&spec(Router::Softmax, 1, 1, 3), &x_tw, &gate_ew, None, None);
    assert_eq!(routed.weight_tk.kind(), Kind::Float);
    let score_te = x_tw.linear(&gate_ew, None::<&Tensor>).softmax(-1, Kind::Float);
    let chosen = score_te.gather(1, &routed.expert_tk, false);
    let expected = &chosen / chosen.sum_dim_intlist(-1i64, true, Kind::Float);
    assert!(routed.weight_tk.equal(&(expected.to_kind(Kind::BFloat16).to_kind(Kind::Float) * 2.5)));
    let sigmoid = route(&spec(Router::Sigmoid, 1, 1, 3), &x_tw, &gate_ew, None, None);
    let logits = x_tw.to_kind(Kind::Float).matmul(&gate_ew.to_kind(Kind::Float).tr());
    let kept = logits.sigmoid().gather(1, &sigmoid.expert_tk, false);
    let expected = &kept / kept.sum_dim_intlist(-1i64, true, Kind::Float) * 2.5;
    assert!((sigmoid.weight_tk - expected).abs().max().double_value(&[]) < 1e-6);
}

#[test]
fn ranks_that_do_not_divide_the_experts_are_refused() {
    let experts = spec(Router::Softmax, 1, 1, 1);
    assert!([1, 2, 3, 4, 6, 12].iter().all(|&ranks| check_spread(&experts, "qwen3_moe", ranks).is_ok()));
    for ranks in [0, 5, 8, 24] {
        let Err(Error::Uneven { experts, ep_size, .. }) = check_spread(&experts, "qwen3_moe", ranks) else {
            panic!("{ranks} ranks hold a part of an expert");
        };
        assert_eq!((experts, ep_size), (12, ranks));
    }
}
