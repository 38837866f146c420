//! How far one policy update on several ranks lies from the same update on one.

use std::path::Path;

use longstraw::config::Gradient;
use longstraw::model::lora::Adapters;
use longstraw::model::spec::Spec;
use longstraw::prompt::handoff::{PlacedGroup, Scores};
use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::{Rank, as_dim, from_index};
use longstraw::step::objective::Objective;
use longstraw::step::optimizer::{AdamW, Settings};
use longstraw::step::transaction::Transaction;
use longstraw::world::World;
use longstraw::world::exchange::gather_rows;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::fixture::{Group, How, Model, PLAIN, config, device, observer, reduced, run, transaction};

const SETTINGS: Settings = Settings { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0 };

/// k3 that context parallelism may leave between two scores of one updated policy in float32. AdamW's first step is nearly the
/// sign of the gradient, so that rounding turns steps where an element of the gradient is nearly 0.
const FLOAT_LIMIT: f64 = 1e-6;

/// Mean of exp(d) − d − 1 over tokens, nats, and the largest |d|.
fn k3(found: &Tensor, expected: &Tensor) -> (f64, f64) {
    let apart = found - expected;
    let mean = (apart.exp() - &apart - 1.0).mean(Kind::Double).double_value(&[]);
    (mean, apart.abs().max().double_value(&[]))
}

/// Log-probabilities of all tokens of all answers, on every rank.
fn whole(world: &World, placed: &PlacedGroup, scores: &Scores) -> Tensor {
    let mut all = Vec::new();
    for (answer, own) in placed.answers.iter().zip(&scores.0) {
        let none = own.rows.narrow(0, 0, 0);
        let first = own.first.as_ref().unwrap_or(&none);
        all.push(gather_rows(&world.cp, first, &placed.layout.last_row_counts()));
        all.push(gather_rows(&world.cp, &own.rows, &answer.span.counts()));
    }
    Tensor::cat(&all, 0).to_kind(Kind::Double).to_device(Device::Cpu)
}

fn exact<'a>(world: &'a World, model: &'a Model, ledger: &'a Ledger) -> Transaction<'a> {
    let how = How { page_size: 64, micro_block: 512, ..PLAIN };
    let whole = transaction(world, model, how, ledger);
    Transaction { gradient: Gradient::Exact, objective: Objective::DEFAULT, ..whole }
}

/// Log-probabilities after one exact update, with prompts shared by `cp` ranks.
fn updated(world: &mut World, cp: usize, kind: Kind, prompt: usize, answer: usize) -> Tensor {
    world.cut(cp, 1).expect("a divisor of the world");
    let sizes = if device() == Device::Cpu { [64, 4, 2, 16] } else { [1_024, 8, 4, 128] };
    let [width, heads, key_heads, dim] = sizes;
    let own = json!({
        "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 8, "num_attention_heads": heads,
        "num_key_value_heads": 2, "head_dim": 2 * dim, "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads, "linear_key_head_dim": dim, "linear_value_head_dim": dim,
        "rope_parameters": { "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25 },
        "max_position_embeddings": 65_536, "tie_word_embeddings": false
    });
    let config = config("qwen3_5_text", &own);
    let mut model = Model::random(&config, kind);
    // Adapters as a run begins with them: A random, B zero.
    let table = config.as_object().expect("a config is an object");
    let spec = Spec::from_config(table, None, Path::new("config.json")).expect("a sound config");
    let layers = spec.adapted(None).expect("the default targets");
    model.adapters = Adapters::starting(&layers, 8, 16.0, 3, Kind::Float, device());
    let group = Group::random(9, 61, prompt, &[answer, answer / 2]);
    let ledger = Ledger::default();
    let mut answers = group.trained(&group.batch());
    // Every prompt group of the world has the same answers, and all gradients are summed.
    let groups = f64::from(u32::try_from(world.all.size() / cp).expect("few ranks"));
    for answer in &mut answers {
        answer.weight /= groups;
    }
    run(exact(world, &model, &ledger).train(&group.prompt_ids, None, &answers, None, &mut observer(world)));
    let gradients = reduced(world, &model.adapters);
    assert!(gradients.norm() > 0.0);
    AdamW::new(&model.adapters, SETTINGS).update(&mut model.adapters, &gradients, 1e-4);
    let transaction = exact(world, &model, &ledger);
    let scored = run(transaction.score(&group.prompt_ids, None, group.answers.clone(), &mut observer(world)));
    let placed = transaction.placed(&group.prompt_ids, group.answers.clone());
    let all = whole(world, &placed, &scored.scores);
    assert_eq!(all.size()[0], as_dim(from_index(group.answers.iter().map(Vec::len).sum())));
    all
}

/// An updated policy of gated delta rules and attention gives nearly the same log-probabilities on one rank and on all: in
/// bfloat16 they are nearer to each other than one rank is to float64.
pub(crate) fn hybrid(world: &mut World) {
    let (prompt, answer) = if device() == Device::Cpu { (331, 40) } else { (16_381, 512) };
    let size = world.all.size();
    let exact = updated(world, 1, Kind::Double, prompt, answer);
    for kind in [Kind::Float, Kind::BFloat16] {
        let one = updated(world, 1, kind, prompt, answer);
        let all = updated(world, size, kind, prompt, answer);
        let (apart, largest) = k3(&all, &one);
        let (noise, _) = k3(&one, &exact);
        let limit = if kind == Kind::Float { FLOAT_LIMIT } else { noise };
        if world.all.rank() == Rank(0) {
            println!("{kind:?}, 1 and {size} ranks: k3 {apart:.2e}, largest {largest:.2e}; to float64 {noise:.2e}");
        }
        assert!(apart <= limit, "{kind:?}: k3 {apart:.2e} of {limit:.1e}, largest difference {largest:.2e}");
    }
}
