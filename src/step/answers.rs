//! Answers go up the layers without a graph, in score and in replay. Layers outside, packs of answers inside: a layer's pages
//! are staged once for the whole group.

use crate::model::pass::{Forward, Pass};
use crate::model::past::Past;
use crate::prompt::handoff::{AnswerStates, Captured, Leaves, PlacedGroup};
use crate::prompt::pack::Pack;
use crate::runtime::failure::Failure;
use crate::runtime::liveness::Tracker;
use crate::runtime::units::{LayerIndex, Rank};

/// Runs every answer of `work` through all layers below the top one. What stays is the input of the top layer or, for a
/// replay, of every layer; then also the mixers' outputs, where the prompt was captured with
/// [`answer_attention`](crate::prompt::handoff::Keeping::answer_attention).
///
/// # Errors
/// When the pages were captured under other adapters than the pass's, or there is no more host memory.
pub(super) fn up(
    pass: &Pass,
    work: &PlacedGroup,
    captured: &Captured,
    leaves: Leaves,
    tracker: &Tracker,
) -> Result<AnswerStates, Failure> {
    let rank = pass.cp_group.axis.rank();
    let top = LayerIndex(pass.decoder.layers() - 1);
    let version = pass.adapters.stamp().clone();
    let packs = pass.packs(work);
    let lone = packs.iter().filter(|pack| !pack.span.is_empty()).count() == 1;
    let mut states = AnswerStates::new(leaves, version, pass.cp_group.ledger, lone);
    for (index, pack) in packs.iter().enumerate() {
        states.put_input(index, LayerIndex(0), &pass.decoder.embed(&inputs(work, pack, rank)))?;
    }
    for layer in (0..top.0).map(LayerIndex) {
        tracker.layer(layer)?;
        captured.choices.settle()?;
        let above = LayerIndex(layer.0 + 1);
        let staged = captured.pages.stage(layer, Some(above), pass.adapters.stamp())?;
        let past = Past::of_answers(&staged, &work.layout);
        let applied = pass.applied(layer);
        let pass = Pass { adapters: applied.as_ref().unwrap_or(pass.adapters), ..*pass };
        let keeps_mixed = leaves == Leaves::Replayable && captured.keeping.answer_attention && pass.keeps_mixed(layer);
        for (index, pack) in packs.iter().enumerate().filter(|(_, pack)| !pack.span.is_empty()) {
            let x_rw = states.input(index, layer)?;
            let choices = captured.choices.of_packed(&pack.sequences);
            let Forward { y_tw: y_rw, mixed, .. } = pass.forward_whole(layer, &pack.span, &x_rw, &past, choices)?;
            states.put_input(index, above, &y_rw)?;
            if keeps_mixed {
                states.put_mixed(index, layer, &mixed.out, mixed.saved.tensors())?;
            }
        }
    }
    Ok(states)
}

/// Ids of the tokens that are the inputs of this rank's rows of a pack.
fn inputs(work: &PlacedGroup, pack: &Pack, rank: Rank) -> Vec<i64> {
    work.answers[pack.answers.clone()].iter().flat_map(|answer| work.inputs(answer, rank)).collect()
}
