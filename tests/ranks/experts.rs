//! Experts over ranks, judged by one rank's plain sum under autograd.

use longstraw::model::experts::{Experts, Routed, route};
use longstraw::model::lora::Adapters;
use longstraw::model::parts::{ExpertSpec, Router};
use longstraw::model::spec::{EXPERT_PROJECTIONS, Linear};
use longstraw::runtime::digest::sha256_hex;
use longstraw::runtime::units::{LayerIndex, Rank, Tokens, as_dim, from_dim, from_index};
use longstraw::tensor::boundary::backward;
use longstraw::tensor::views;
use longstraw::tools::parity::random::RandomAdapters;
use longstraw::world::World;
use longstraw::world::exchange::{Traffic, send_rows};
use tch::{Device, Kind, Tensor};

use crate::fixture::{device, run};

const LAYER: LayerIndex = LayerIndex(2);
const WIDTH: i64 = 8;
const INNER: i64 = 16;
const LIMIT: f64 = 1e-12;

fn spec(ranks: usize, router: Router) -> ExpertSpec {
    ExpertSpec {
        count: 3 * from_index(ranks),
        chosen: 3,
        width: from_dim(INNER),
        shared_gate: false,
        shared_width: 0,
        router,
        normalised: true,
        scaling: 1.7,
        groups: 1,
        kept_groups: 1,
        sparse: vec![true; 3],
    }
}

/// A layer of experts, the rows of all ranks, and what their gradient is; the same on every rank.
struct Layer {
    spec: ExpertSpec,
    gate_ew: Tensor,
    bias_e: Tensor,
    gate_up: Tensor,
    down: Tensor,
    adapters: Adapters,
    x_tw: Tensor,
    dout_tw: Tensor,
    counts: Vec<Tokens>,
}

impl Layer {
    /// `adapted` are the projections that have adapters.
    fn new(world: &World, router: Router, counts: Vec<Tokens>, adapted: &[&str], kind: Kind) -> Layer {
        let spec = spec(world.all.size(), router);
        tch::manual_seed(17);
        let draw = |shape: &[i64]| Tensor::randn(shape, (Kind::Double, Device::Cpu)).to_device(device());
        let (experts, rows) = (as_dim(spec.count), counts.iter().map(|count| count.dim()).sum());
        // Every third expert is out of the router's reach, whatever the row.
        let bias_e =
            (Tensor::arange(experts, (Kind::Double, device())).remainder(3).eq(1).to_kind(Kind::Double)) * -5.0;
        let linears = (0..spec.count).flat_map(|expert| EXPERT_PROJECTIONS.map(|name| linear(expert, name)));
        let random = RandomAdapters {
            rank: 2,
            alpha: 3.0,
            a_deviation: 0.3,
            b_deviation: 0.3,
            seed: 5,
            sampled_in: Kind::Double,
            kind: if kind == Kind::Double { kind } else { Kind::Float },
            device: device(),
        };
        let adapters = random.sample(linears.filter(|linear| adapted.contains(&linear.projection)).collect());
        let to_kind = |x: Tensor| x.to_kind(kind);
        Layer {
            gate_ew: to_kind(draw(&[experts, WIDTH])),
            bias_e,
            gate_up: to_kind(draw(&[experts, 2 * INNER, WIDTH]) * 0.4),
            down: to_kind(draw(&[experts, WIDTH, INNER]) * 0.4),
            x_tw: to_kind(draw(&[rows, WIDTH])),
            dout_tw: to_kind(draw(&[rows, WIDTH])),
            adapters,
            counts,
            spec,
        }
    }

    /// All rows' experts, chosen once: rows whose router's logits differ in the last bit may choose otherwise.
    fn choice(&self) -> Tensor {
        let bias = (self.spec.router == Router::Sigmoid).then_some(&self.bias_e);
        route(&self.spec, &self.x_tw, &self.gate_ew, bias, None).expert_tk
    }

    /// This rank's rows of `x`.
    fn own(&self, rank: Rank, x: &Tensor) -> Tensor {
        let first = self.counts[..rank.0].iter().map(|count| count.dim()).sum();
        x.narrow(0, first, self.counts[rank.0].dim())
    }

    fn routed(&self, x_tw: &Tensor, choice: &Tensor) -> Routed {
        route(&self.spec, x_tw, &self.gate_ew, None, Some(choice))
    }

    /// Experts of which a rank holds its part: `None` for all.
    fn experts(&self, part: Option<(Rank, usize)>) -> Experts {
        let part = |x: &Tensor| match part {
            None => x.shallow_clone(),
            Some((rank, ranks)) => x.chunk(as_dim(from_index(ranks)), 0)[rank.0].copy(),
        };
        Experts::of(&self.spec, LAYER, part(&self.gate_up), part(&self.down))
    }
}

fn linear(expert: u64, projection: &'static str) -> Linear {
    let name = projection.trim_start_matches("experts.");
    let down = name == "down_proj";
    let (inputs, outputs) = if down { (INNER, WIDTH) } else { (WIDTH, INNER) };
    Linear {
        layer: LAYER,
        projection,
        module: format!("model.layers.{LAYER}.mlp.experts.{expert}.{name}"),
        inputs: from_dim(inputs),
        outputs: from_dim(outputs),
    }
}

fn uneven(ranks: usize) -> Vec<Tokens> {
    (0..from_index(ranks)).map(|rank| Tokens(if rank % 3 == 1 { 0 } else { 5 * rank + 4 })).collect()
}

fn worst(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.size(), expected.size());
    if found.numel() == 0 { 0.0 } else { (found - expected).abs().max().double_value(&[]) }
}

/// Gradients of adapters, zeros where there are none, and none left.
fn taken(adapters: &Adapters) -> Vec<Tensor> {
    let take = |tensor: &Tensor| {
        let mut gradient = tensor.grad();
        if !gradient.defined() {
            return tensor.detach().zeros_like();
        }
        let taken = gradient.copy();
        let _ = gradient.zero_();
        taken
    };
    adapters.tensors().map(take).collect()
}

/// Which tensors of the adapters are of experts on this rank.
fn is_here(world: &World, layer: &Layer, module: &str) -> bool {
    let number = module.split('.').nth(5).and_then(|number| number.parse::<u64>().ok()).expect("an expert's module");
    number / (layer.spec.count / from_index(world.all.size())) == from_index(world.all.rank().0)
}

const ADAPTED: [&[&str]; 3] = [&[], &EXPERT_PROJECTIONS, &["experts.down_proj"]];

/// Output, gradient of rows and of weights, and gradient of adapters, in several rounds and in one.
pub(crate) fn over_ranks(world: &mut World) {
    let (me, size) = (world.all.rank(), world.all.size());
    run(world.cut(size, size));
    let empty = vec![Tokens(0); size];
    for (router, counts, adapted) in [
        (Router::Sigmoid, uneven(size), ADAPTED[0]),
        (Router::Sigmoid, uneven(size), ADAPTED[1]),
        (Router::Softmax, uneven(size), ADAPTED[2]),
        (Router::Softmax, empty, ADAPTED[1]),
    ] {
        let layer = Layer::new(world, router, counts, adapted, Kind::Double);
        let choice = layer.choice();
        let all_x = layer.x_tw.copy().set_requires_grad(true);
        let mut all = layer.routed(&all_x, &choice);
        all.weight_tk = all.weight_tk.detach().set_requires_grad(true);
        let expected = layer.experts(None).plain(&all, &layer.adapters);
        backward(&[(&expected, &layer.dout_tw)]).expect("autograd of the plain sum");
        let [expected_dx, expected_dweight] = [&all_x, &all.weight_tk].map(|x| {
            let gradient = x.grad();
            if gradient.defined() { gradient } else { x.zeros_like() }
        });
        let expected_adapters = taken(&layer.adapters);
        for pairs_max in [3 * as_dim(from_index(size)), 1 << 16] {
            let experts = layer.experts(Some((me, size))).with_pairs_max(pairs_max);
            let own = |x: &Tensor| layer.own(me, x);
            let routed = layer.routed(&own(&layer.x_tw), &own(&choice));
            let out = experts.forward(&world.ep, &routed, &layer.adapters);
            assert!(worst(&out, &own(&expected.detach())) <= LIMIT, "forward, {router:?}, {adapted:?}");
            let gradient =
                experts.backward(&world.ep, &routed, &own(&layer.dout_tw), &layer.adapters).expect("backward");
            assert!(worst(&gradient.dx_tw, &own(&expected_dx)) <= LIMIT, "rows, {router:?}, {adapted:?}");
            assert!(worst(&gradient.dweight_tk, &own(&expected_dweight)) <= LIMIT, "weights, {router:?}, {adapted:?}");
            for ((name, found), expected) in layer.adapters.names().zip(taken(&layer.adapters)).zip(&expected_adapters)
            {
                let zeros = expected.zeros_like();
                let expected = if is_here(world, &layer, &name) { expected } else { &zeros };
                assert!(worst(&found, expected) <= LIMIT, "gradient of {name}");
            }
        }
    }
}

/// The rows of drawing stand on every rank.
pub(crate) fn replicated(world: &mut World) {
    let (me, size) = (world.all.rank(), world.all.size());
    run(world.cut(size, size));
    for adapted in ADAPTED {
        let layer = Layer::new(world, Router::Sigmoid, vec![Tokens(7)], adapted, Kind::Double);
        let routed = layer.routed(&layer.x_tw, &layer.choice());
        let expected = layer.experts(None).plain(&routed, &layer.adapters).detach();
        for pairs_max in [6, 1 << 16] {
            let experts = layer.experts(Some((me, size))).with_pairs_max(pairs_max);
            let found = experts.replicated(&world.ep, &routed, &layer.adapters);
            assert!(worst(&found, &expected) <= LIMIT);
            let bits = sha256_hex(views::view(&found.to_device(Device::Cpu).contiguous()));
            assert!(world.all.gather_texts(&bits).iter().all(|other| *other == bits), "the same bits on every rank");
        }
    }
}

/// Experts of which ranks hold all, groups beside each other, and one group of all ranks: one result.
pub(crate) fn groups(world: &mut World) {
    let (me, size) = (world.all.rank(), world.all.size());
    let layer = Layer::new(world, Router::Softmax, uneven(size), &EXPERT_PROJECTIONS, Kind::Double);
    let choice = layer.choice();
    let routed = layer.routed(&layer.own(me, &layer.x_tw), &layer.own(me, &choice));
    let all = layer.routed(&layer.x_tw, &choice);
    let expected = layer.own(me, &layer.experts(None).plain(&all, &layer.adapters).detach());
    for ep in (1..=size).filter(|ep| size.is_multiple_of(*ep)) {
        run(world.cut(size, ep));
        assert_eq!((world.ep.size(), world.ep.rank().0), (ep, me.0 % ep), "consecutive ranks");
        assert_eq!((world.edp.size(), world.edp.rank().0), (size / ep, me.0 / ep), "those with the same experts");
        let out = layer.experts(None).forward(&world.ep, &routed, &layer.adapters);
        assert!(worst(&out, &expected) <= LIMIT, "{ep} ranks hold a layer's experts");
    }
    if size > 1 {
        let refused = world.cut(size, size + 1).expect_err("no divisor");
        assert!(refused.to_string().contains("expert-parallel groups"), "{refused}");
    }
}

/// Two identical columns of the router, rows cut differently on every rank.
pub(crate) fn ties(world: &mut World) {
    let (me, size) = (world.all.rank(), world.all.size());
    let layer = Layer::new(world, Router::Sigmoid, vec![Tokens(64)], &[], Kind::Double);
    let spec = ExpertSpec { chosen: 1, ..layer.spec.clone() };
    let best = layer.gate_ew.copy();
    // The first and the last expert are equal and the best of all.
    let strong = Tensor::ones([WIDTH], (Kind::Double, device())) * 9.0;
    best.get(0).copy_(&strong);
    best.get(as_dim(spec.count) - 1).copy_(&strong);
    let rows = layer.x_tw.abs();
    let bias = None;
    let step = as_dim(from_index(me.0)) + 1;
    let cut: Vec<Tensor> = rows.split(step, 0).iter().map(|x| route(&spec, x, &best, bias, None).expert_tk).collect();
    let chosen = Tensor::cat(&cut, 0).to_device(Device::Cpu).contiguous();
    assert!(chosen.equal(&chosen.zeros_like()), "the lowest of equal ones, in pieces of {step} rows");
    // A choice that came with the rows holds, also against the tie.
    let kept = chosen.to_device(device()).fill(as_dim(spec.count) - 1);
    let routed = route(&spec, &rows, &best, bias, Some(&kept));
    assert!(routed.expert_tk.equal(&kept));
    assert!(worst(&routed.weight_tk, &(routed.weight_tk.ones_like() * spec.scaling)) <= LIMIT);
    let all = world.all.gather_texts(&sha256_hex(views::view(&chosen)));
    assert!(all.iter().all(|other| *other == all[0]) && all.len() == size);
}

/// bfloat16 errs as its plain sum does. On a GPU this takes the grouped product.
pub(crate) fn bfloat16(world: &mut World) {
    let (me, size) = (world.all.rank(), world.all.size());
    run(world.cut(size, size));
    let layer = Layer::new(world, Router::Softmax, uneven(size), &[], Kind::BFloat16);
    let choice = layer.choice();
    let own = |x: &Tensor| layer.own(me, x);
    let routed = layer.routed(&own(&layer.x_tw), &own(&choice));
    let wide = |x: &Tensor| x.to_kind(Kind::Double);
    let exact = Experts::of(&layer.spec, LAYER, wide(&layer.gate_up), wide(&layer.down));
    let x = wide(&routed.x_tw).set_requires_grad(true);
    let weight_tk = wide(&routed.weight_tk).detach().set_requires_grad(true);
    let wide_routed = Routed { x_tw: x.shallow_clone(), weight_tk, expert_tk: routed.expert_tk.shallow_clone() };
    let expected = exact.plain(&wide_routed, &layer.adapters);
    backward(&[(&expected, &wide(&own(&layer.dout_tw)))]).expect("autograd of the plain sum");
    let experts = layer.experts(Some((me, size)));
    let found = [
        experts.forward(&world.ep, &routed, &layer.adapters),
        experts.backward(&world.ep, &routed, &own(&layer.dout_tw), &layer.adapters).expect("backward").dx_tw,
    ];
    if found[0].numel() > 0 {
        for (found, expected) in found.iter().zip([expected.detach(), x.grad()]) {
            let error = (wide(found) - &expected).norm().double_value(&[]) / expected.norm().double_value(&[]);
            assert!(error < 1e-2, "bfloat16 keeps 8 bits: {error:.1e}");
        }
    }
}

/// Rows of any number from every rank to every rank, and back to where they came from.
pub(crate) fn rows_travel(world: &mut World) {
    let axis = &world.all;
    let (me, size) = (axis.rank().0, axis.size());
    let rows = |from: usize, to: usize| if (from + 2 * to) % 4 == 1 { 0 } else { (from * 3 + to) % 5 };
    let table = (0..size).map(|from| (0..size).map(|to| Tokens(from_index(rows(from, to)))).collect()).collect();
    let traffic = Traffic::new(table);
    // A row says where it comes from, where it goes and which one it is.
    let of = |from: usize, to: usize| {
        let all = (0..rows(from, to)).flat_map(|number| [from, to, number]).map(|number| as_dim(from_index(number)));
        let count = as_dim(from_index(rows(from, to)));
        Tensor::from_slice(&all.collect::<Vec<i64>>()).view([count, 3]).to_device(device())
    };
    let joined = |parts: Vec<Tensor>| Tensor::cat(&parts, 0);
    let sent = joined((0..size).map(|to| of(me, to)).collect());
    let expected = joined((0..size).map(|from| of(from, me)).collect());
    let whole = axis.round_bytes();
    for round in [1, 7, 48, whole] {
        axis.set_round_bytes(round);
        let arrived = send_rows(axis, &sent, &traffic);
        assert!(arrived.equal(&expected), "in rounds of {round} bytes");
        assert!(send_rows(axis, &arrived, &traffic.back()).equal(&sent), "and back");
    }
    axis.set_round_bytes(whole);
}
