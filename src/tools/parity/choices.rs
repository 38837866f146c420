//! What indices and routers chose for the answers' rows, against what the case expects.

use tch::{Kind, Tensor};

use super::case::Case;
use crate::model::pass::Pass;
use crate::prompt::layout::Piece;
use crate::prompt::pages::{Choice, ChoicePool, SpanChoices};
use crate::runtime::failure::Failure;
use crate::runtime::units::{LayerIndex, as_dim, from_index};
use crate::step::transaction::Scored;
use crate::world::World;
use crate::world::exchange::sum_number;

/// Share of an answer's rows whose choice differs from the expected one, by the name of the tensor that states it. Row 0 is
/// the prompt's last position, which counts where it is part of the tail.
pub(super) fn differing(
    world: &World,
    case: &Case,
    pass: &Pass,
    scored: &Scored,
) -> Result<Vec<(String, f64)>, Failure> {
    let mut found = Vec::new();
    for layer in (0..pass.decoder.layers()).map(LayerIndex) {
        let chooses = [
            (Choice::Index, "topk", pass.decoder.indexer(layer).is_some()),
            (Choice::Experts, "experts", pass.decoder.experts(layer).is_some()),
        ];
        for (choice, word, _) in chooses.into_iter().filter(|(_, _, chooses)| *chooses) {
            for answer in 0..scored.group.answers.len() {
                let name = format!("{word}.layers.{layer}.{answer}");
                let own = of_answer(world, scored, choice, layer, answer, case.get(&name)?)?;
                let [rows, wrong] = own.map(|count| sum_number(&world.cp, count));
                found.push((name, if rows > 0.0 { wrong / rows } else { 0.0 }));
            }
        }
    }
    Ok(found)
}

/// This rank's rows of one answer, and how many of them differ.
fn of_answer(
    world: &World,
    scored: &Scored,
    choice: Choice,
    layer: LayerIndex,
    answer: usize,
    expected: &Tensor,
) -> Result<[f64; 2], Failure> {
    let Scored { group, captured, .. } = scored;
    let rank = world.cp.rank();
    let mut counts = [0.0, 0.0];
    let mut compare = |own: &Tensor, first: i64| {
        let expected = expected.narrow(0, first, own.size()[0]);
        counts[0] += as_f64(own.size()[0]);
        counts[1] += as_f64(differing_rows(own, &expected));
    };
    let staged = |pool: &ChoicePool, span: usize| -> Result<Option<Tensor>, Failure> {
        let of: SpanChoices = pool.of(span);
        Ok(of.stage(choice, layer)?.map(|staged| staged.to_device(tch::Device::Cpu).copy()))
    };
    if let Some(tail) = staged(&captured.tail_choices, 0)?.filter(|_| group.layout.last_row_owner() == rank) {
        compare(&tail.narrow(0, tail.size()[0] - 1, 1), 0);
    }
    if let Some(rows) = staged(&captured.choices, answer)? {
        let mut start = 0;
        for piece in group.answers[answer].span.of(rank) {
            let count = Piece::rows(piece).dim();
            let token = as_dim(from_index(group.layout.labels(piece).start));
            compare(&rows.narrow(0, start, count), token);
            start += count;
        }
    }
    Ok(counts)
}

/// Rows of two lists of choices that differ; both are ascending, with -1 in the places that are left over.
fn differing_rows(own: &Tensor, expected: &Tensor) -> i64 {
    let width = own.size()[1].max(expected.size()[1]);
    let wide = |x: &Tensor| (x.to_kind(Kind::Int64) + 1).constant_pad_nd([0, width - x.size()[1]]);
    wide(own).not_equal_tensor(&wide(expected)).any_dim(1, false).sum(Kind::Int64).int64_value(&[])
}

fn as_f64(count: i64) -> f64 {
    crate::runtime::units::float(crate::runtime::units::from_dim(count))
}
