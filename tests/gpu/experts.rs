//! Experts as grouped products.

use longstraw::model::experts::{Experts, Routed, route};
use longstraw::model::lora::Adapters;
use longstraw::model::parts::{ExpertSpec, Router};
use longstraw::runtime::memory::MemorySpace;
use longstraw::runtime::units::{LayerIndex, from_dim};
use longstraw::tensor::boundary::{backward, counted, forget_peaks};
use longstraw::tensor::gpu::{self, Mark};
use longstraw::world::World;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

/// Experts, experts of a row, width, inner width.
const SHAPES: [[i64; 4]; 2] = [[128, 8, 2048, 768], [64, 8, 6144, 2048]];
const ROWS: i64 = 32_768;
const ROWS_JUDGED: i64 = 512;

fn relative(one: &Tensor, two: &Tensor) -> f64 {
    let norm = |x: &Tensor| x.to_kind(Kind::Double).square().sum(Kind::Double).sqrt().double_value(&[]);
    norm(&(one.to_kind(Kind::Double) - two.to_kind(Kind::Double))) / norm(two)
}

struct Layer {
    spec: ExpertSpec,
    gate_ew: Tensor,
    gate_up: Tensor,
    down: Tensor,
}

impl Layer {
    fn new([experts, chosen, width, inner]: [i64; 4], device: Device) -> Layer {
        let spec = ExpertSpec {
            count: from_dim(experts),
            chosen: from_dim(chosen),
            width: from_dim(inner),
            shared_width: 0,
            router: Router::Softmax,
            normalised: true,
            scaling: 1.0,
            groups: 1,
            kept_groups: 1,
            sparse: vec![true],
            shared_gate: false,
        };
        let draw = |shape: &[i64], inputs: i64| {
            let deviation = f64::from(i32::try_from(inputs).expect("a width")).powf(-0.5);
            (Tensor::randn(shape, (Kind::BFloat16, device))) * deviation
        };
        Layer {
            spec,
            gate_ew: draw(&[experts, width], width),
            gate_up: draw(&[experts, 2 * inner, width], width),
            down: draw(&[experts, width, inner], inner),
        }
    }

    fn experts(&self, kind: Kind) -> Experts {
        Experts::of(&self.spec, LayerIndex(0), self.gate_up.to_kind(kind), self.down.to_kind(kind))
    }

    fn routed(&self, rows: i64) -> Routed {
        let x_tw = Tensor::randn([rows, self.gate_ew.size()[1]], (Kind::BFloat16, self.gate_ew.device()));
        tch::no_grad(|| route(&self.spec, &x_tw, &self.gate_ew, None, None))
    }
}

/// The grouped product and the backward by hand against float32 autograd of the plain sum, and both against the plain sum's
/// own bfloat16.
fn judged(layer: &Layer, world: &World, adapters: &Adapters) -> Value {
    let routed = layer.routed(ROWS_JUDGED);
    let dout_tw = routed.x_tw.randn_like();
    let plain = |kind: Kind| {
        let x_tw = routed.x_tw.to_kind(kind).set_requires_grad(true);
        let weight_tk = routed.weight_tk.copy().set_requires_grad(true);
        let leaves = Routed { x_tw, weight_tk, expert_tk: routed.expert_tk.shallow_clone() };
        let out = layer.experts(kind).plain(&leaves, adapters);
        backward(&[(&out, &dout_tw.to_kind(kind))]).expect("autograd of the plain sum");
        [out.detach(), leaves.x_tw.grad(), leaves.weight_tk.grad()]
    };
    let exact = plain(Kind::Float);
    let own = plain(Kind::BFloat16);
    let experts = layer.experts(Kind::BFloat16);
    let out = experts.forward(&world.ep, &routed, adapters);
    let gradient = experts.backward(&world.ep, &routed, &dout_tw, adapters).expect("backward");
    let found = [out, gradient.dx_tw, gradient.dweight_tk];
    let errors: Vec<[f64; 2]> =
        (0..3).map(|at| [relative(&found[at], &exact[at]), relative(&own[at], &exact[at])]).collect();
    for [found, own] in &errors {
        assert!(*found <= 1.5 * own, "{found:.1e} from float32, autograd in bfloat16 {own:.1e}");
    }
    json!(errors)
}

/// Seconds and most bytes beyond what was there and what is returned, for `rows` rows.
fn measured<T>(device: Device, work: impl Fn() -> T) -> (f64, u64) {
    drop(work());
    gpu::synchronize(device).expect("the device");
    forget_peaks();
    let before = counted(MemorySpace::Device).live;
    let start = Mark::now(device).expect("a mark");
    let result = work();
    let end = Mark::now(device).expect("a mark");
    gpu::synchronize(device).expect("the device");
    let after = counted(MemorySpace::Device);
    let seconds = start.seconds_to(&end).expect("both are reached");
    let beyond = after.peak.0 - before.0.max(after.live.0);
    drop(result);
    (seconds, beyond)
}

pub(crate) fn grouped(world: &World, device: Device) -> Vec<Value> {
    let adapters = Adapters::new(Vec::new(), 1.0, "policy");
    let shape = |shape: [i64; 4]| {
        let layer = Layer::new(shape, device);
        let errors = judged(&layer, world, &adapters);
        gpu::empty_cache();
        let experts = layer.experts(Kind::BFloat16);
        let mut found = Vec::new();
        for rows in [ROWS / 2, ROWS] {
            let routed = layer.routed(rows);
            let dout_tw = routed.x_tw.randn_like();
            let (forward_s, forward_bytes) = measured(device, || experts.forward(&world.ep, &routed, &adapters));
            let (backward_s, backward_bytes) =
                measured(device, || experts.backward(&world.ep, &routed, &dout_tw, &adapters).expect("backward"));
            found.push([forward_bytes, backward_bytes]);
            if rows == ROWS {
                let [_, chosen, width, inner] = shape;
                let products = f64::from(i32::try_from(rows * chosen / 1024).expect("few")) * 1024.0;
                let products = products * 6.0 * f64::from(i32::try_from(width * inner / 1024).expect("few")) * 1024.0;
                return json!({
                    "experts, chosen, width, inner": shape, "rows": rows, "errors and autograd's": errors,
                    "forward_s": forward_s, "backward_s": backward_s, "forward_tflops": products / forward_s / 1e12,
                    "backward_tflops": 2.0 * products / backward_s / 1e12, "bytes_beyond": [forward_bytes, backward_bytes],
                    "of_half_the_rows": found[0],
                });
            }
        }
        Value::Null
    };
    let all: Vec<Value> = SHAPES.map(shape).into();
    for one in &all {
        let (bytes, half) = (&one["bytes_beyond"], &one["of_half_the_rows"]);
        for at in 0..2 {
            let [bytes, half] = [bytes, half].map(|bytes| bytes[at].as_u64().unwrap_or(0));
            assert!(bytes <= half + half / 20, "what is held beside the result does not grow with the rows: {one}");
        }
    }
    all
}
