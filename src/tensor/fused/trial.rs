//! What decides whether the compiled kernels are used: small inputs through every kernel, beside operators in float32.

use tch::{Device, Kind, Tensor};

use super::{
    Activation, AdamNumbers, AdamTensors, Layer, Scale, adam_step, adapted, add_into, gated, merge_into, merge_of,
    normed, plain, sum_normed, sum_of, turned,
};
use crate::tensor::Error;
use crate::tensor::boundary::backward;

/// Relative error up to which a trial passes: several times what rounding to bfloat16 leaves.
const TRIAL_ERROR: f64 = 0.02;

/// Why kernels are not used after their trial.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error(transparent)]
    Torch(#[from] Error),
    #[error("{operation}: result {result} is {error:.1e} away from what operators give, of {TRIAL_ERROR} allowed")]
    Differs {
        operation: String,
        /// Number among outputs, then gradients of inputs.
        result: usize,
        /// ‖found − wanted‖ / ‖wanted‖.
        error: f64,
    },
}

/// Outputs of `work` over leaves with the values of `inputs`, then the leaves' gradients for `gradients` of the outputs.
fn with_gradients(
    inputs: &[Tensor],
    gradients: &[Tensor],
    work: impl FnOnce(&[Tensor]) -> Vec<Tensor>,
) -> Result<Vec<Tensor>, Error> {
    tch::with_grad(|| {
        let leaves: Vec<Tensor> = inputs.iter().map(|x| x.detach().set_requires_grad(true)).collect();
        let outputs = work(&leaves);
        let pairs: Vec<(&Tensor, &Tensor)> = outputs.iter().zip(gradients).collect();
        backward(&pairs)?;
        Ok(outputs.iter().map(Tensor::detach).chain(leaves.iter().map(Tensor::grad)).collect())
    })
}

/// ‖found − wanted‖ / ‖wanted‖.
fn relative_error(found: &Tensor, wanted: &Tensor) -> f64 {
    let wanted = wanted.to_kind(Kind::Double);
    ((found.to_kind(Kind::Double) - &wanted).norm() / wanted.norm()).double_value(&[])
}

/// Values that no random numbers are drawn for, so that the draws of a run stay the same.
fn waves(shape: &[i64], factor: f64, kind: Kind, device: Device) -> Tensor {
    let at = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, device));
    ((at + 1.0) * factor).sin().view(shape).to_kind(kind)
}

/// Passes where all kernels for `kind` give what operators give in float32, gradients included.
///
/// # Errors
/// When one gives something else, or the driver refuses.
pub(super) fn passes(device: Device, kind: Kind) -> Result<(), Refusal> {
    rows_agree(device, kind)?;
    heads_agree(device, kind)?;
    layers_agree(device, kind)?;
    sums_agree(device, kind)
}

/// Compares `fused` with `plain` on inputs of `kind`.
fn agree(
    operation: &str,
    inputs: &[Tensor],
    gradients: &[Tensor],
    fused: impl FnOnce(&[Tensor]) -> Vec<Tensor>,
    plain: impl FnOnce(&[Tensor]) -> Vec<Tensor>,
) -> Result<(), Refusal> {
    let float = |list: &[Tensor]| list.iter().map(|x| x.to_kind(Kind::Float)).collect::<Vec<_>>();
    let found = with_gradients(inputs, gradients, fused)?;
    let wanted = with_gradients(&float(inputs), &float(gradients), plain)?;
    near(operation, &found.iter().collect::<Vec<_>>(), &wanted.iter().collect::<Vec<_>>())
}

/// A missing result, or one with a value that is not a number, is not near.
fn near(operation: &str, found: &[&Tensor], wanted: &[&Tensor]) -> Result<(), Refusal> {
    for (result, wanted) in wanted.iter().enumerate() {
        let error = found.get(result).map_or(f64::INFINITY, |found| relative_error(found, wanted));
        let is_near = error <= TRIAL_ERROR;
        if !is_near {
            return Err(Refusal::Differs { operation: operation.to_owned(), result, error });
        }
    }
    Ok(())
}

fn rows_agree(device: Device, kind: Kind) -> Result<(), Refusal> {
    let of = |shape: &[i64], factor: f64| waves(shape, factor, kind, device);
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let inputs = [of(&[3, 37], 1.7), of(&[3, 37], 0.9)];
        let act = |x: &[Tensor]| vec![gated(&x[0], &x[1], activation)];
        let plain_act = |x: &[Tensor]| vec![plain::gated(&x[0], &x[1], activation)];
        agree(&format!("{activation:?} gate"), &inputs, &[of(&[3, 37], 1.3)], act, plain_act)?;
    }
    for (width, one_plus) in [(1_048, false), (1_048, true), (48, false), (48, true)] {
        let weight = of(&[width], 2.3);
        let float = weight.to_kind(Kind::Float);
        let scale = Scale { weight: &weight, eps: 1e-6, one_plus };
        let wide = Scale { weight: &float, ..scale };
        let inputs = [of(&[5, width], 1.7), of(&[5, width], 0.4)];
        let gradients = [of(&[5, width], 1.1), of(&[5, width], 0.6)];
        let sum = |x: &[Tensor]| {
            let (sum, out) = sum_normed(&x[0], x[1].shallow_clone(), &scale);
            vec![sum, out]
        };
        let plain_sum = |x: &[Tensor]| {
            let sum = &x[0] + &x[1];
            let out = plain::normed(&sum, &wide);
            vec![sum, out]
        };
        let norm = |x: &[Tensor]| vec![normed(&x[0], &scale)];
        let plain_norm = |x: &[Tensor]| vec![plain::normed(&x[0], &wide)];
        let name = format!("rows of {width}, 1 + weight: {one_plus}");
        agree(&format!("sum and norm of {name}"), &inputs, &gradients, sum, plain_sum)?;
        agree(&format!("norm of {name}"), &inputs[..1], &gradients[..1], norm, plain_norm)?;
    }
    Ok(())
}

fn heads_agree(device: Device, kind: Kind) -> Result<(), Refusal> {
    let of = |shape: &[i64], factor: f64| waves(shape, factor, kind, device);
    let float = |x: &Tensor| x.to_kind(Kind::Float);
    let list = |(q, k): (Tensor, Tensor)| vec![q, k];
    for (dim, pairs, has_norm) in [(64, 32, true), (48, 8, true), (64, 32, false)] {
        let weights = [of(&[dim], 2.3), of(&[dim], 0.3)];
        let wide_weights = weights.each_ref().map(float);
        let angles = of(&[7, pairs], 0.8);
        let (cos, sin) = (angles.cos(), angles.sin());
        let scale = |weight| Scale { weight, eps: 1e-6, one_plus: false };
        let scales = has_norm.then(|| weights.each_ref().map(scale));
        let wide_scales = has_norm.then(|| wide_weights.each_ref().map(scale));
        let inputs = [of(&[7, 3, dim], 1.7), of(&[7, 2, dim], 0.9)];
        let gradients = [of(&[7, 3, dim], 1.3), of(&[7, 2, dim], 0.7)];
        let fused = |x: &[Tensor]| list(turned([&x[0], &x[1]], scales, &cos, &sin));
        let plain = |x: &[Tensor]| list(plain::turned([&x[0], &x[1]], wide_scales, &float(&cos), &float(&sin)));
        agree(&format!("heads of {dim}, {pairs} pairs, normed: {has_norm}"), &inputs, &gradients, fused, plain)?;
    }
    Ok(())
}

fn layers_agree(device: Device, kind: Kind) -> Result<(), Refusal> {
    // With a mean: sums of waves alone nearly cancel, and what is left is rounding.
    let of = |shape: &[i64], factor: f64, kind: Kind| waves(shape, factor, kind, device) + 0.5;
    let inputs = [
        of(&[21, 48], 1.7, kind),
        of(&[16, 48], 0.9, Kind::Float),
        of(&[96, 16], 0.3, Kind::Float),
        of(&[8, 48], 1.3, Kind::Float),
        of(&[40, 8], 2.1, Kind::Float),
    ];
    let weights = [of(&[96, 48], 0.7, kind), of(&[40, 48], 0.2, kind)];
    let gradients = [of(&[21, 96], 1.1, kind), of(&[21, 40], 0.6, kind)];
    let scale = 0.5;
    let fused = |x: &[Tensor]| {
        let layer = |at: usize| {
            let pair = Some([&x[1 + 2 * at], &x[2 + 2 * at]]);
            Layer { weight_oi: &weights[at], bias_o: None, pair, valued: true }
        };
        adapted(&x[0], &[layer(0), layer(1)], scale).unwrap_or_default()
    };
    let plain = |x: &[Tensor]| {
        let low = |at: usize| x[0].linear(&x[1 + 2 * at], None::<&Tensor>).linear(&x[2 + 2 * at], None::<&Tensor>);
        let layer = |at: usize| x[0].linear(&weights[at].to_kind(Kind::Float), None::<&Tensor>) + low(at) * scale;
        vec![layer(0), layer(1)]
    };
    agree("linear layers with adapters", &inputs, &gradients, fused, plain)
}

fn sums_agree(device: Device, kind: Kind) -> Result<(), Refusal> {
    let of = |shape: &[i64], factor: f64| waves(shape, factor, Kind::Float, device);
    let (mut out, mut lse) = (of(&[5, 3, 24], 1.7), of(&[5, 3], 0.9));
    let (mut plain_out, mut plain_lse) = (out.copy(), lse.copy());
    let (part, part_lse) = (of(&[3, 5, 24], 0.7).to_kind(kind).transpose(0, 1), of(&[3, 5], 0.4).transpose(0, 1));
    merge_into(&mut out, &mut lse, &part, &part_lse);
    plain::merge_into(&mut plain_out, &mut plain_lse, &part, &part_lse);
    let [weight, gradient, mean, square] = [1.7, 0.9, 0.3, 0.5].map(|factor| of(&[700], factor));
    let square = &square * &square;
    let moved = weight.copy();
    let numbers =
        AdamNumbers { betas: [0.9, 0.99], corrections: [0.1, 0.01], eps: 1e-8, kept: 0.999, learning_rate: 0.1 };
    let wanted_mean = &mean * 0.9 + &gradient * 0.1;
    let wanted_square = &square * 0.99 + &gradient * &gradient * 0.01;
    let wanted = &weight * 0.999 - (&wanted_mean * 10.0) / ((&wanted_square * 100.0).sqrt() + 1e-8) * 0.1;
    let (gradients, means, squares) = ([gradient], [mean], [square]);
    let tensors = AdamTensors { weights: &[&moved], gradients: &gradients, means: &means, squares: &squares };
    near("merge of attention", &[&out, &lse], &[&plain_out, &plain_lse])?;
    let (first, first_lse) = (of(&[5, 3, 24], 0.6).to_kind(kind), of(&[3, 5], 1.2).transpose(0, 1));
    let (out, lse) = merge_of([&first, &first_lse], [&part, &part_lse]);
    let (mut plain_out, mut plain_lse) = (first.to_kind(Kind::Float), first_lse.contiguous());
    plain::merge_into(&mut plain_out, &mut plain_lse, &part, &part_lse);
    near("merge of two parts", &[&out, &lse], &[&plain_out, &plain_lse])?;
    let [first, second, third] = [1.1, 0.3, 0.8].map(|factor| of(&[7, 3, 4], factor).to_kind(kind));
    let mut added = sum_of(&first, &second);
    add_into(&mut added, &third);
    let all = [first, second, third].map(|part| part.to_kind(Kind::Float)).iter().sum::<Tensor>();
    near("sum of gradients", &[&added], &[&all])?;
    let stepped = adam_step(&tensors, &numbers);
    let found = [&moved, &means[0], &squares[0]];
    near("step of AdamW", if stepped { &found } else { &[] }, &[&wanted, &wanted_mean, &wanted_square])
}
