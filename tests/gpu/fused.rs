//! Elementwise kernels and products with adapters against operators of libtorch in float64, and how fast both are.

use longstraw::model::lora::{Adapter, linear};
use longstraw::tensor::boundary::backward;
use longstraw::tensor::fused::{
    self, Activation, AdamNumbers, AdamTensors, Layer, Scale, adam_step, adapted, add_into, plain, prepare, sum_of,
};
use longstraw::world::World;
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

use crate::selection::seconds;

/// One operation over inputs that carry gradient, given others that do not.
struct Case {
    name: String,
    inputs: Vec<Tensor>,
    constants: Vec<Tensor>,
    gradients: Vec<Tensor>,
    operation: Operation,
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Gate(Activation),
    Norm {
        one_plus: bool,
    },
    SumNorm {
        one_plus: bool,
    },
    Heads {
        normed: bool,
    },
    /// The output of layer `unread` is not read.
    Adapted {
        unread: Option<usize>,
    },
}

#[derive(Clone, Copy)]
enum By {
    Kernels,
    Operators,
}

const EPS: f64 = 1e-6;
const SCALE: f64 = 2.0;

fn random(shape: &[i64], kind: Kind, device: Device) -> Tensor {
    Tensor::randn(shape, (Kind::Float, device)).to_kind(kind)
}

impl Case {
    /// Outputs over leaves `x` with constants `c`.
    fn outputs(&self, by: By, x: &[Tensor], c: &[Tensor]) -> Vec<Tensor> {
        let scale = |at: usize, one_plus| Scale { weight: &c[at], eps: EPS, one_plus };
        let list = |(first, second): (Tensor, Tensor)| vec![first, second];
        match (self.operation, by) {
            (Operation::Gate(activation), By::Kernels) => vec![fused::gated(&x[0], &x[1], activation)],
            (Operation::Gate(activation), By::Operators) => vec![plain::gated(&x[0], &x[1], activation)],
            (Operation::Norm { one_plus }, By::Kernels) => vec![fused::normed(&x[0], &scale(0, one_plus))],
            (Operation::Norm { one_plus }, By::Operators) => vec![plain::normed(&x[0], &scale(0, one_plus))],
            (Operation::SumNorm { one_plus }, By::Kernels) => {
                list(fused::sum_normed(&x[0], x[1].shallow_clone(), &scale(0, one_plus)))
            }
            (Operation::SumNorm { one_plus }, By::Operators) => {
                let sum = &x[0] + &x[1];
                let normed = plain::normed(&sum, &scale(0, one_plus));
                vec![sum, normed]
            }
            (Operation::Heads { normed }, by) => {
                let scales = normed.then(|| [scale(2, false), scale(3, false)]);
                let turned = match by {
                    By::Kernels => fused::turned,
                    By::Operators => plain::turned,
                };
                list(turned([&x[0], &x[1]], scales, &c[0], &c[1]))
            }
            (Operation::Adapted { unread }, By::Kernels) => {
                let pair = |at: usize| Some([&x[1 + 2 * at], &x[2 + 2 * at]]);
                let layer = |(at, weight_oi)| {
                    let valued = unread != Some(at);
                    Layer { weight_oi, bias_o: None, pair: pair(at), valued }
                };
                let layers: Vec<Layer> = c.iter().enumerate().map(layer).collect();
                adapted(&x[0], &layers, SCALE).expect("layers with adapters in bfloat16 are taken")
            }
            (Operation::Adapted { .. }, By::Operators) => {
                let pair = |at: usize| Adapter {
                    module: String::new(),
                    a_ri: x[1 + 2 * at].shallow_clone(),
                    b_or: x[2 + 2 * at].shallow_clone(),
                };
                c.iter().enumerate().map(|(at, w)| linear(&x[0], w, None, Some((&pair(at), SCALE)))).collect()
            }
        }
    }

    /// Outputs, then gradients of the inputs, in the dtypes of the case or in float64.
    fn pulled(&self, by: By, wide: bool) -> Vec<Tensor> {
        let of = |list: &[Tensor]| -> Vec<Tensor> {
            list.iter().map(|x| if wide { x.to_kind(Kind::Double) } else { x.shallow_clone() }).collect()
        };
        let leaves: Vec<Tensor> = of(&self.inputs).iter().map(|x| x.detach().set_requires_grad(true)).collect();
        let outputs = self.outputs(by, &leaves, &of(&self.constants));
        let gradients = of(&self.gradients);
        let pairs: Vec<(&Tensor, &Tensor)> = outputs.iter().zip(&gradients).collect();
        backward(&pairs).unwrap_or_else(|error| panic!("{}: {error}", self.name));
        outputs.iter().map(Tensor::detach).chain(leaves.iter().map(Tensor::grad)).collect()
    }

    /// The same rows alone.
    fn rows(&self, first: i64, count: i64) -> Case {
        let t = self.inputs[0].size()[0];
        let part = |list: &[Tensor]| {
            list.iter().map(|x| if x.size()[0] == t { x.narrow(0, first, count) } else { x.shallow_clone() }).collect()
        };
        let (inputs, gradients) = (part(&self.inputs), part(&self.gradients));
        Case { name: self.name.clone(), inputs, constants: part(&self.constants), gradients, ..*self }
    }
}

fn error(found: &Tensor, wanted: &Tensor) -> f64 {
    let (found, wanted) = (found.to_kind(Kind::Double), wanted.to_kind(Kind::Double));
    ((found - &wanted).norm() / wanted.norm()).double_value(&[])
}

fn gate(rows: i64, width: i64, activation: Activation, kind: Kind, device: Device) -> Case {
    let draw = || random(&[rows, width], kind, device);
    let name = format!("{activation:?} gate of {rows} rows of {width}, {kind:?}");
    let (inputs, gradients) = (vec![draw() * 2.0, draw()], vec![draw()]);
    Case { name, inputs, constants: Vec::new(), gradients, operation: Operation::Gate(activation) }
}

fn norm(rows: i64, width: i64, operation: Operation, kind: Kind, device: Device) -> Case {
    let draw = || random(&[rows, width], kind, device);
    let count = if matches!(operation, Operation::SumNorm { .. }) { 2 } else { 1 };
    let name = format!("{operation:?} of {rows} rows of {width}, {kind:?}");
    let inputs = (0..count).map(|_| draw() * 3.0).collect();
    let constants = vec![random(&[width], kind, device)];
    Case { name, inputs, constants, gradients: (0..count).map(|_| draw()).collect(), operation }
}

/// `heads` of queries and of keys, `dim` wide, of which 2 `pairs` are rotated; queries are a slice of wider rows.
fn heads(rows: i64, heads: [i64; 2], [dim, pairs]: [i64; 2], normed: bool, kind: Kind, device: Device) -> Case {
    let draw = |shape: &[i64]| random(shape, kind, device);
    let angles = Tensor::randn([rows, pairs], (Kind::Float, device));
    let constants = vec![angles.cos().to_kind(kind), angles.sin().to_kind(kind), draw(&[dim]), draw(&[dim])];
    let inputs = vec![draw(&[rows, heads[0], 2 * dim]).narrow(2, 0, dim), draw(&[rows, heads[1], dim])];
    let gradients = heads.iter().map(|&heads| draw(&[rows, heads, dim])).collect();
    let name = format!("{rows} rows of {heads:?} heads of {dim}, {pairs} pairs, normed: {normed}, {kind:?}");
    Case { name, inputs, constants, gradients, operation: Operation::Heads { normed } }
}

fn layers(rows: i64, inputs: i64, outputs: &[i64], rank: i64, kind: Kind, device: Device) -> Case {
    let draw = |shape: &[i64], kind: Kind| random(shape, kind, device);
    let mut leaves = vec![draw(&[rows, inputs], kind)];
    for &output in outputs {
        leaves.extend([draw(&[rank, inputs], Kind::Float) * 0.05, draw(&[output, rank], Kind::Float) * 0.1]);
    }
    let constants = outputs.iter().map(|&output| draw(&[output, inputs], kind) * 0.05).collect();
    let gradients = outputs.iter().map(|&output| draw(&[rows, output], kind)).collect();
    let name = format!("{rows} rows of {inputs} through {outputs:?} with rank {rank}, {kind:?}");
    Case { name, inputs: leaves, constants, gradients, operation: Operation::Adapted { unread: None } }
}

fn cases(kind: Kind, device: Device) -> Vec<Case> {
    let mut all = Vec::new();
    for activation in [Activation::Silu, Activation::GeluTanh] {
        for (rows, width) in [(30, 37), (1_000, 12_288)] {
            all.push(gate(rows, width, activation, kind, device));
        }
    }
    for one_plus in [false, true] {
        for (rows, width) in [(77, 16), (333, 128), (33, 480), (3, 520), (333, 4_096), (5, 5_120), (7, 32_768)] {
            for operation in [Operation::Norm { one_plus }, Operation::SumNorm { one_plus }] {
                all.push(norm(rows, width, operation, kind, device));
            }
        }
    }
    for (counts, shape) in
        [([32, 8], [128, 64]), ([16, 2], [64, 32]), ([8, 2], [256, 32]), ([3, 1], [96, 48]), ([5, 5], [80, 40])]
    {
        all.extend([5, 777].map(|rows| heads(rows, counts, shape, true, kind, device)));
        all.push(heads(300, counts, shape, false, kind, device));
    }
    all.push(layers(77, 256, &[384, 96, 96], 16, kind, device));
    all.push(layers(300, 512, &[1_024, 1_024], 8, kind, device));
    all.push(layers(1_000, 1_024, &[512], 64, kind, device));
    all
}

/// Against float64 from the same inputs, the kernels err by no more than the operators that they replace: each result is
/// rounded once. A twentieth is left for chance, since the two round different numbers.
pub(crate) fn judged(_world: &World, device: Device) -> Vec<Value> {
    tch::manual_seed(31);
    let mut found = Vec::new();
    for kind in [Kind::Half, Kind::BFloat16] {
        prepare(device, kind);
        assert!(fused::is_used(kind), "the trial of {kind:?} found other numbers");
        for case in cases(kind, device) {
            let wanted = case.pulled(By::Operators, true);
            let by_operators = case.pulled(By::Operators, false);
            let mine = case.pulled(By::Kernels, false);
            let again = case.pulled(By::Kernels, false);
            let mut errors = Vec::new();
            for (at, wanted) in wanted.iter().enumerate() {
                assert!(mine[at].equal(&again[at]), "{}: two calls differ in result {at}", case.name);
                let (here, there) = (error(&mine[at], wanted), error(&by_operators[at], wanted));
                assert!(
                    here <= 1.05 * there,
                    "{}: result {at} errs by {here:.2e}, operators by {there:.2e}",
                    case.name
                );
                errors.push(json!([here, there]));
            }
            found.push(json!({"case": case.name, "errors_of_kernels_and_operators": errors}));
        }
    }
    found
}

/// A row has the same bits whatever rows stand beside it.
pub(crate) fn alone(_world: &World, device: Device) -> Vec<Value> {
    tch::manual_seed(32);
    prepare(device, Kind::BFloat16);
    let row_by_row =
        |case: &Case| !matches!(case.operation, Operation::Adapted { .. }) && case.inputs[0].size()[0] > 20;
    for case in cases(Kind::BFloat16, device).iter().filter(|case| row_by_row(case)) {
        let all = case.pulled(By::Kernels, false);
        for (first, count) in [(0, 1), (17, 3)] {
            let few = case.rows(first, count).pulled(By::Kernels, false);
            for (all, few) in all.iter().zip(&few) {
                assert!(all.narrow(0, first, count).equal(few), "{}: rows {first} to {}", case.name, first + count);
            }
        }
    }
    Vec::new()
}

/// A layer whose output nobody reads leaves NaN there, and all gradients with the bits that they have with its output.
pub(crate) fn unread(_world: &World, device: Device) -> Vec<Value> {
    tch::manual_seed(34);
    prepare(device, Kind::BFloat16);
    for outputs in [&[64, 96, 32][..], &[40]] {
        let all = layers(30, 64, outputs, 16, Kind::BFloat16, device);
        let wanted = all.pulled(By::Kernels, false);
        for unread in 0..outputs.len() {
            let case = Case { operation: Operation::Adapted { unread: Some(unread) }, ..all.rows(0, 30) };
            for (at, (found, wanted)) in case.pulled(By::Kernels, false).iter().zip(&wanted).enumerate() {
                let is_unread =
                    at == unread && bool::try_from(found.isnan().all()).unwrap() && found.size() == wanted.size();
                assert!(is_unread || at != unread && found.equal(wanted), "{}: layer {unread}, tensor {at}", case.name);
            }
        }
    }
    Vec::new()
}

/// Rows whose elements 32 bits do not count.
pub(crate) fn many(_world: &World, device: Device) -> Vec<Value> {
    tch::manual_seed(33);
    let kind = Kind::BFloat16;
    prepare(device, kind);
    let rows = (1 << 19) + 5;
    let check = |case: &Case| {
        let part = case.rows(rows - 3, 3).pulled(By::Kernels, false);
        for (all, part) in case.pulled(By::Kernels, false).iter().zip(&part) {
            assert!(all.narrow(0, rows - 3, 3).equal(part), "{}: the last rows", case.name);
        }
    };
    check(&gate(rows, 4_096, Activation::Silu, kind, device));
    check(&norm(rows, 4_096, Operation::SumNorm { one_plus: false }, kind, device));
    check(&heads(rows, [32, 2], [128, 64], true, kind, device));
    let [first, part] = [(); 2].map(|()| Tensor::empty([rows, 4_096], (kind, device)).uniform_(-1.0, 1.0));
    let mut sum = sum_of(&first, &part);
    add_into(&mut sum, &first);
    for at in [0, rows / 2, rows - 3] {
        let of = |x: &Tensor| x.narrow(0, at, 3).to_kind(Kind::Float);
        assert!(of(&sum).equal(&(of(&first) + of(&part) + of(&first))), "sums of rows from {at} on");
    }
    vec![json!({"elements": rows * 4_096})]
}

/// Sums in float32 of parts in the model's dtype have the bits of operators, whatever the number of elements and however the
/// parts lie in memory.
pub(crate) fn added(_world: &World, device: Device) -> Vec<Value> {
    tch::manual_seed(36);
    for kind in [Kind::Half, Kind::BFloat16] {
        prepare(device, kind);
        for shape in [[3, 2, 8], [777, 8, 128], [5, 3, 4], [3, 3, 1], [0, 2, 8]] {
            let [first, second, third] = [(); 3].map(|()| random(&shape, kind, device));
            let by_heads = random(&[shape[1], shape[0], shape[2]], kind, device).transpose(0, 1);
            let mut found = sum_of(&first, &second);
            let mut wanted = first.to_kind(Kind::Float) + second.to_kind(Kind::Float);
            for part in [&third, &by_heads] {
                add_into(&mut found, part);
                let _ = wanted.g_add_(part);
            }
            let middle = shape[0] / 3..shape[0] / 2;
            let of = |x: &Tensor| x.narrow(0, middle.start, middle.end - middle.start);
            add_into(&mut of(&found), &of(&first));
            let _ = of(&wanted).g_add_(&of(&first));
            assert!(found.equal(&wanted), "{kind:?} {shape:?}");
        }
    }
    Vec::new()
}

/// One step in place gives the bits of the operators.
pub(crate) fn adam(_world: &World, device: Device) -> Vec<Value> {
    tch::manual_seed(34);
    prepare(device, Kind::BFloat16);
    let draw = || (0..40).map(|at| random(&[1 + 997 * at], Kind::Float, device)).collect::<Vec<_>>();
    let (weights, gradients, means) = (draw(), draw(), draw());
    let squares: Vec<Tensor> = draw().iter().map(Tensor::square).collect();
    let numbers = AdamNumbers {
        betas: [0.9, 0.999],
        corrections: [0.271, 1.0 - 0.999],
        eps: 1e-8,
        kept: 0.9999,
        learning_rate: 0.01,
    };
    let wanted: Vec<[Tensor; 3]> = (0..weights.len())
        .map(|at| {
            let gradient = &gradients[at];
            let mean = &means[at] * 0.9 + gradient * (1.0 - 0.9);
            let square = &squares[at] * 0.999 + gradient * gradient * (1.0 - 0.999);
            let [first, second] = numbers.corrections;
            let step = (&mean / first) / ((&square / second).sqrt() + 1e-8);
            [&weights[at] * 0.9999 - step * 0.01, mean, square]
        })
        .collect();
    let trained: Vec<&Tensor> = weights.iter().collect();
    let tensors = AdamTensors { weights: &trained, gradients: &gradients, means: &means, squares: &squares };
    assert!(adam_step(&tensors, &numbers), "the kernels take float32 tensors on a GPU");
    for (at, [weight, mean, square]) in wanted.iter().enumerate() {
        for (name, found, wanted) in
            [("weight", &weights[at], weight), ("mean", &means[at], mean), ("mean square", &squares[at], square)]
        {
            let apart = found.ne_tensor(wanted).sum(Kind::Int64).int64_value(&[]);
            assert_eq!(apart, 0, "{name} of tensor {at}: {apart} of {} elements differ", weight.numel());
        }
    }
    Vec::new()
}

/// Milliseconds of kernels and operators at Qwen3-8B's shape, and gigabytes a second of the least that must move: every
/// input read once and every output written once. Backward is timed with the forward before it, which is taken off.
pub(crate) fn speed(_world: &World, device: Device) -> Vec<Value> {
    tch::manual_seed(35);
    let kind = Kind::BFloat16;
    prepare(device, kind);
    let mut found = Vec::new();
    for rows in [4_096, 16_384] {
        let all = [
            (gate(rows, 12_288, Activation::Silu, kind, device), [3, 5]),
            (norm(rows, 4_096, Operation::Norm { one_plus: false }, kind, device), [2, 3]),
            (norm(rows, 4_096, Operation::SumNorm { one_plus: false }, kind, device), [4, 4]),
            (heads(rows, [32, 8], [128, 64], true, kind, device), [2, 3]),
        ];
        for (case, passes) in all {
            let by_head = matches!(case.operation, Operation::Heads { .. });
            let outputs = if by_head { &case.gradients[..] } else { &case.gradients[..1] };
            let numel: usize = outputs.iter().map(Tensor::numel).sum();
            let mut times = Map::new();
            for (name, by) in [("kernels", By::Kernels), ("operators", By::Operators)] {
                let forward = || tch::no_grad(|| case.outputs(by, &case.inputs, &case.constants));
                let (one, both) = (seconds(device, 9, forward), seconds(device, 9, || case.pulled(by, false)));
                let rate = |passes: i32, seconds: f64| f64::from(passes) * 2e-9 * measure(numel) / seconds;
                let row = json!({"forward_ms": one * 1e3, "backward_ms": (both - one) * 1e3,
                    "forward_gb_s": rate(passes[0], one), "backward_gb_s": rate(passes[1], both - one)});
                times.insert(name.to_owned(), row);
            }
            found.push(json!({"case": case.name, "times": times}));
        }
    }
    found
}

fn measure(count: usize) -> f64 {
    u32::try_from(count).map_or(f64::INFINITY, f64::from)
}
