//! Adapters of experts that are spread over ranks.

use std::path::{Path, PathBuf};

use longstraw::checkpoint::{self, State, Store, Tensors};
use longstraw::data::GroupOrder;
use longstraw::model::adapter_file::AdapterShape;
use longstraw::model::experts::adapters::{digest, gathered, is_held};
use longstraw::model::lora::{Adapter, Adapters};
use longstraw::model::spec::{EXPERT_PROJECTIONS, Linear, Spec, expert_of};
use longstraw::model::weights::ExpertShare;
use longstraw::prompt::handoff::{LocalGrads, Moments};
use longstraw::runtime::units::{Rank, float, from_index};
use longstraw::step::finalize;
use longstraw::tools::parity::distance::relative;
use longstraw::tools::parity::random::RandomAdapters;
use longstraw::world::World;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::fixture::{Group, How, Model, PLAIN, config, device, glm, judged_step, mixture, run, step};

const RANK: u64 = 2;
const ALPHA: f64 = 6.0;
const TARGETS: [&str; 4] = ["q_proj", EXPERT_PROJECTIONS[0], EXPERT_PROJECTIONS[1], EXPERT_PROJECTIONS[2]];

/// A spec with experts that the number of ranks divides, in two of its three layers.
fn spec(ranks: usize) -> Spec {
    let extra = json!({
        "num_experts": 3 * ranks, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [1],
        "decoder_sparse_step": 1, "norm_topk_prob": true
    });
    let config = config("qwen3_moe", &extra);
    Spec::from_config(config.as_object().expect("an object"), None, Path::new("config.json"))
        .unwrap_or_else(|error| panic!("{error}"))
}

fn shape() -> AdapterShape {
    AdapterShape {
        rank: RANK,
        alpha: ALPHA,
        targets: TARGETS.map(str::to_owned).to_vec(),
        base_model: "m".into(),
        rope_scaling: None,
    }
}

fn linears(spec: &Spec) -> Vec<Linear> {
    spec.adapted(Some(&TARGETS.map(str::to_owned))).unwrap_or_else(|error| panic!("{error}"))
}

/// All adapters, with B that is not zero; the same on every rank.
fn all(spec: &Spec) -> Adapters {
    let all = Adapters::starting(&linears(spec), RANK, ALPHA, 3, Kind::Double, Device::Cpu);
    let pair = |entry: &Adapter| Adapter {
        module: entry.module.clone(),
        a_ri: entry.a_ri.detach().copy(),
        b_or: entry.b_or.detach().rand_like() - 0.5,
    };
    Adapters::new(all.entries().iter().map(pair).collect(), ALPHA / float(RANK), "policy")
}

/// Those of them that this rank holds.
fn part(world: &World, spec: &Spec, all: &Adapters) -> Adapters {
    part_of(world, spec, &linears(spec), all)
}

/// As [`part`], of adapters of `linears`.
fn part_of(world: &World, spec: &Spec, linears: &[Linear], all: &Adapters) -> Adapters {
    let held = all.entries().iter().zip(linears).filter(|(_, linear)| is_held(spec, linear, &world.ep));
    let copy = |entry: &Adapter| Adapter {
        module: entry.module.clone(),
        a_ri: entry.a_ri.detach().copy(),
        b_or: entry.b_or.detach().copy(),
    };
    let part = Adapters::new(held.map(|(entry, _)| copy(entry)).collect(), all.scale(), "policy");
    if world.ep.size() > 1 { part.spread() } else { part }
}

fn divisors(size: usize) -> Vec<usize> {
    (1..=size).filter(|ep| size.is_multiple_of(*ep)).collect()
}

/// What a rank's backward leaves for a tensor: every rank its own, those of experts too.
fn gradient(name: &str, tensor: &Tensor, rank: usize) -> Tensor {
    let number = name.bytes().fold(7u32, |sum, byte| (sum * 31 + u32::from(byte)) % 1009);
    tensor.detach() * (f64::from(number) / 1000.0) + float(from_index(rank)) * 0.25
}

/// The sum over ranks is that of the ranks that hold the same experts, the norm counts each adapter once, and all are clipped
/// alike.
pub(crate) fn summed(world: &mut World) {
    let size = world.all.size();
    let spec = spec(size);
    for ep in divisors(size) {
        run(world.cut(size, ep));
        let whole = all(&spec);
        let own = part(world, &spec, &whole);
        let expected: Vec<(String, Tensor)> = whole
            .names()
            .zip(whole.tensors())
            .map(|(name, tensor)| {
                // Of experts, only the ranks that hold them have a gradient.
                let index = expert_of(&name).map(|expert| expert / (3 * from_index(size) / from_index(ep)));
                let holds = |rank: &usize| index.is_none_or(|index| from_index(rank % ep) == index);
                let parts = (0..size).filter(holds).map(|rank| gradient(&name, tensor, rank));
                let sum = parts.reduce(|sum, part| sum + part).expect("some rank holds it");
                (name, sum)
            })
            .collect();
        let norm = expected.iter().map(|(_, sum)| sum.square().sum(Kind::Double).double_value(&[])).sum::<f64>().sqrt();
        for norm_max in [0.0, norm / 3.0, 2.0 * norm] {
            let scale = if norm_max > 0.0 && norm > norm_max { norm_max / norm } else { 1.0 };
            let mine = own.names().zip(own.tensors()).map(|(name, tensor)| gradient(&name, tensor, world.all.rank().0));
            let local = LocalGrads(mine.collect());
            let reduced = run(finalize::run_everywhere(world, local, &own, norm_max));
            assert!((reduced.norm() - norm).abs() <= 1e-12 * norm, "ep {ep}: {} for {norm}", reduced.norm());
            for (name, found) in own.names().zip(reduced.gradients()) {
                let (_, sum) = expected.iter().find(|(other, _)| *other == name).expect("a name of the whole");
                let error = (found - sum * scale).abs().max().double_value(&[]);
                assert!(error <= 1e-12, "ep {ep}: {name} is {error:.1e} off");
            }
            let bits = format!("{:x}", reduced.norm().to_bits());
            assert!(world.all.gather_texts(&bits).iter().all(|other| *other == bits), "one norm on all ranks");
        }
    }
}

/// A model whose projections and experts have adapters; of the experts' those that this rank holds.
fn model(config: &Value, world: &World) -> Model {
    let Model { decoder, .. } = Model::of(config, Kind::Double, ExpertShare::of(&world.ep), &|_| {});
    let table = config.as_object().expect("an object");
    let spec = Spec::from_config(table, None, Path::new("config.json")).unwrap_or_else(|error| panic!("{error}"));
    let targets = EXPERT_PROJECTIONS.map(str::to_owned);
    let mut linears = spec.adapted(None).expect("the default targets");
    linears.extend(spec.adapted(Some(&targets)).expect("experts"));
    let random = RandomAdapters {
        rank: RANK,
        alpha: ALPHA,
        a_deviation: 0.2,
        b_deviation: 0.2,
        seed: 11,
        sampled_in: Kind::Double,
        kind: Kind::Double,
        device: device(),
    };
    let adapters = part_of(world, &spec, &linears, &random.sample(linears.clone()));
    Model { decoder, adapters }
}

/// Experts here or elsewhere, every gradient mode: the summed gradient of each adapter is that of whole sequences.
pub(crate) fn as_conventional(world: &mut World) {
    let size = world.all.size();
    for config in [glm(&json!({})), mixture(&json!({}))] {
        for tail in [0, 1, u64::MAX] {
            let group = Group::random(5, 61, 29, &[6, 1, 9]);
            world.cut(1, 1).expect("one rank a prompt");
            let whole = model(&config, world);
            let (_, expected) = judged_step(world, &whole, &group, tail, &group.batch());
            let names: Vec<String> = whole.adapters.names().collect();
            for ep in [1, 2].into_iter().filter(|ep| size.is_multiple_of(*ep)) {
                world.cut(size, ep).expect("a divisor of the world");
                let model = model(&config, world);
                step(world, &model, &group, How { tail, page_size: 3, ..PLAIN }, &group.batch());
                let reduced =
                    run(finalize::run_everywhere(world, finalize::take(&model.adapters), &model.adapters, 0.0));
                let mut of_experts = 0;
                for (name, found) in model.adapters.names().zip(reduced.gradients()) {
                    let place = names.iter().position(|other| *other == name).expect("a name of the whole");
                    let apart = relative(found, &expected[place]);
                    let what = format!("{}, tail {tail}, ep {ep}", config["model_type"]);
                    assert!(apart <= 1e-9, "{what}: {name} is {apart:.1e} off");
                    of_experts += usize::from(expert_of(&name).is_some());
                }
                assert_eq!(of_experts * ep, names.iter().filter(|name| expert_of(name).is_some()).count());
            }
        }
    }
}

/// A value that is not finite fails where it is, and the norm tells the others.
pub(crate) fn not_finite(world: &mut World) {
    let size = world.all.size();
    let spec = spec(size);
    run(world.cut(size, size));
    let own = part(world, &spec, &all(&spec));
    let last = world.all.rank().0 == size - 1;
    let spoilt = own.names().zip(own.tensors()).map(|(name, tensor)| {
        let spoils = last && expert_of(&name) == Some(3 * from_index(size) - 1);
        if spoils { tensor.detach().full_like(f64::INFINITY) } else { tensor.detach().zeros_like() }
    });
    let outcome = finalize::run_everywhere(world, LocalGrads(spoilt.collect()), &own, 1.0);
    let agreed = world.agree(outcome);
    assert!(agreed.is_err(), "all fail together");
    if last {
        let words = agreed.expect_err("above").to_string();
        assert!(words.contains(&format!("experts.{}.", 3 * size - 1)), "{words}");
    }
}

fn tensors_equal(found: &Adapters, expected: &Adapters) {
    assert_eq!(found.names().collect::<Vec<_>>(), expected.names().collect::<Vec<_>>());
    for ((found, expected), name) in found.tensors().zip(expected.tensors()).zip(expected.names()) {
        assert!(found.equal(&expected.detach()), "{name}");
    }
}

fn state() -> State {
    State {
        updates: 1,
        adapter_version: 1,
        optimizer_steps: 1,
        cursor: GroupOrder::new(Some(1), 5),
        config_digest: String::new(),
        config: json!({}),
        groups_per_update: None,
        cp_size: None,
        schedule_steps: None,
        inputs: std::collections::BTreeMap::new(),
        held_out: Value::Null,
        best: Value::Null,
        round: Value::Null,
    }
}

/// What any number of ranks has saved, any other number reads: the same starts, digests, checkpoints and files.
pub(crate) fn saved(world: &mut World) {
    let size = world.all.size();
    let spec = spec(size);
    let whole = all(&spec);
    let starting = Adapters::starting(&linears(&spec), RANK, ALPHA, 9, Kind::Double, Device::Cpu);
    let of_whole = digest(&whole, &world.ep);
    for ep in divisors(size) {
        run(world.cut(size, ep));
        let own = part(world, &spec, &whole);
        assert_eq!(digest(&own, &world.ep), of_whole, "ep {ep}");
        let holds = |linear: &Linear| is_held(&spec, linear, &world.ep);
        let own_start = Adapters::starting_where(holds, &linears(&spec), RANK, ALPHA, 9, Kind::Double, Device::Cpu);
        tensors_equal(&own_start, &part(world, &spec, &starting));
        let first = world.all.rank() == Rank(0);
        let gather = |tensors: &[&Tensor]| gathered(&own, tensors, &world.ep, first);
        let masters = gather(&own.tensors().collect::<Vec<_>>());
        let halves: Vec<Tensor> = own.tensors().map(|tensor| tensor.detach() * 0.5).collect();
        let moments: Vec<Tensor> =
            gather(&halves.iter().collect::<Vec<_>>()).into_iter().flat_map(|pair| [pair.a_ri, pair.b_or]).collect();
        assert_eq!(masters.is_empty(), !first, "only rank 0 keeps them");
        let folder = folder(world);
        if first {
            let masters = Adapters::new(masters, own.scale(), "policy");
            tensors_equal(&masters, &whole);
            let square = moments.iter().map(Tensor::copy).collect();
            let moments = Moments { steps: 1, mean: moments, square };
            let tensors = Tensors { adapters: &masters, moments: &moments, captured: &[] };
            Store::of(&folder).write(state(), &tensors, &shape()).unwrap_or_else(|error| panic!("{error}"));
            let saved = checkpoint::save(&folder.join("adapter"), &masters, &shape());
            run(saved);
        }
        world.all.barrier();
        for other in divisors(size) {
            run(world.cut(size, other));
            let wanted = part(world, &spec, &whole);
            let read = Store::of(&folder).read(1, &wanted).unwrap_or_else(|error| panic!("{error}"));
            for ((found, mean), expected) in read.masters.iter().zip(&read.moments.mean).zip(wanted.tensors()) {
                assert!(found.equal(&expected.detach()) && mean.equal(&(expected.detach() * 0.5)), "{ep} to {other}");
            }
            let holds = |linear: &Linear| is_held(&spec, linear, &world.ep);
            let loaded = checkpoint::load(&folder.join("adapter"), &spec, &shape(), holds, Kind::Double, Device::Cpu);
            let loaded = run(loaded);
            assert_eq!(loaded.names().collect::<Vec<_>>(), wanted.names().collect::<Vec<_>>());
            for (found, expected) in loaded.tensors().zip(wanted.tensors()) {
                let error = (found - expected).abs().max().double_value(&[]);
                assert!(error < 1e-6, "the file has float32");
            }
        }
        world.all.barrier();
        if first {
            std::fs::remove_dir_all(&folder).expect("an own folder");
        }
    }
}

/// A folder that all ranks see and nobody else uses.
fn folder(world: &World) -> PathBuf {
    let own = std::env::temp_dir().join(format!("longstraw_experts_{}", world.job_number()));
    if world.all.rank() == Rank(0) {
        std::fs::create_dir_all(&own).expect("a temporary folder");
    }
    world.all.barrier();
    own
}
