//! Answers that go through the layers together, against each one's own whole sequence under autograd.

use longstraw::model::mixer::CpGroup;
use longstraw::model::pass::micro_blocks;
use longstraw::prompt::layout::{PromptLayout, Span, positions};
use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::Tokens;
use longstraw::world::World;
use serde_json::{Value, json};
use tch::Kind;

use crate::fixture::{Group, How, Model, PLAIN, config, placed, run};
use crate::judged::compare;

/// Lengths of answers; of one token at both ends and between others, and one that is longer than a pack.
const LENGTHS: [usize; 7] = [1, 9, 2, 1, 24, 6, 1];

/// Packs of several answers, of one, and all in one; attention without and with windows.
pub(crate) fn as_alone(world: &mut World) {
    let windowed = |window: u64| config("mistral", &json!({ "sliding_window": window }));
    let shapes: [Value; 3] = [config("qwen3", &json!({})), windowed(5), windowed(70)];
    for (shape, seed) in shapes.into_iter().zip(3i64..) {
        let model = Model::random(&shape, Kind::Double);
        let group = Group::random(seed, 61, 66, &LENGTHS);
        for ((micro_block, packs), tail) in [(12, 3), (4096, 1)].into_iter().zip([u64::MAX, 1]) {
            let how = How { tail, micro_block, ..PLAIN };
            assert_eq!(packs_of(world, &model, &group, how), packs, "blocks of {micro_block}");
            let family = &shape["model_type"];
            compare(world, &model, &group, how, &format!("{family}, blocks of {micro_block}, tail {tail}"));
        }
    }
}

/// Experts of a pack over all ranks, of which some have none of its rows.
pub(crate) fn of_experts(world: &mut World) {
    let size = world.all.size();
    let extra = json!({
        "num_experts": 3 * size, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [1],
        "decoder_sparse_step": 1, "norm_topk_prob": true
    });
    let model = Model::random(&config("qwen3_moe", &extra), Kind::Double);
    run(world.cut(size, size));
    for (lengths, tail) in [(&[3usize, 1, 2][..], 1), (&[9, 2, 1, 6], u64::MAX)] {
        let group = Group::random(8, 61, 33, lengths);
        compare(world, &model, &group, How { tail, micro_block: 16, ..PLAIN }, &format!("answers of {lengths:?}"));
    }
}

/// Whatever a block may hold, with experts on every rank and spread over all; of an answer of two tokens the last rank
/// alone has a row, and the others take part with none.
pub(crate) fn one_block(world: &mut World) {
    let size = world.all.size();
    let layout = PromptLayout::new(Tokens(10), Tokens(4), size, Tokens(1));
    for ep in [1, size] {
        run(world.cut(size, ep));
        let ledger = Ledger::default();
        let cp_group = CpGroup { axis: &world.cp, ep: &world.ep, ledger: &ledger };
        let rank = world.cp.rank();
        for lengths in [&[2u64, 2][..], &[9, 2, 4]] {
            let alone: Vec<Span> = lengths.iter().map(|&length| layout.answer(Tokens(length))).collect();
            let span = Span::packed(&alone.iter().collect::<Vec<_>>());
            let own: Vec<_> = alone.iter().flat_map(|answer| answer.of(rank)).map(positions).collect();
            for rows_max in [Tokens(1), Tokens(4096)] {
                let words = format!("answers of {lengths:?}, blocks of {rows_max}, experts over {ep} ranks");
                let blocks = micro_blocks(&span, &cp_group, rows_max);
                let [block] = &blocks[..] else { panic!("{} blocks: {words}", blocks.len()) };
                let found = block.positions().runs().iter().filter(|run| !run.is_empty()).cloned().collect::<Vec<_>>();
                assert_eq!(found, own, "{words}");
                assert_eq!(
                    (block.first, block.rows()),
                    (0, own.iter().map(|run| run.end - run.start).sum::<i64>()),
                    "{words}"
                );
            }
        }
    }
}

fn packs_of(world: &World, model: &Model, group: &Group, how: How) -> usize {
    let ledger = Ledger::default();
    let transaction = crate::fixture::transaction(world, model, how, &ledger);
    transaction.policy.packs(&placed(world, model, group, how)).len()
}
