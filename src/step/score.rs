//! Score: log-probabilities of each answer under the adapters the prompt was captured with, without a graph, frozen
//! before any update. The head takes one answer at a time.

use tch::Tensor;

use crate::model::head::Head;
use crate::model::pass::Pass;
use crate::model::past::Past;
use crate::prompt::handoff::{AnswerStates, Captured, Leaves, Logprobs, PlacedGroup, Scores};
use crate::prompt::pages::{HiddenPool, Residency, Slot};
use crate::runtime::failure::Failure;
use crate::runtime::liveness::Tracker;
use crate::runtime::memory::Purpose;
use crate::runtime::units::{LayerIndex, as_dim, from_index};
use crate::step::answers;

/// Scores every answer of `work`, and returns what the pass leaves of them.
///
/// # Errors
/// When the pages were captured under other adapters than the pass's, or there is no more host memory.
pub fn run(
    pass: &Pass,
    head: &Head,
    work: &PlacedGroup,
    captured: &Captured,
    leaves: Leaves,
    tracker: &Tracker,
) -> Result<(Scores, AnswerStates), Failure> {
    let rank = pass.cp_group.axis.rank();
    let first = captured.last_row.as_ref().map(|x_1w| head.logprobs_of_row(pass.decoder, x_1w, &work.first_labels()));
    let mut states = answers::up(pass, work, captured, leaves, tracker)?;
    let mut scores = Vec::with_capacity(work.answers.len());
    top(pass, work, captured, &states, tracker, |index, y_rw| {
        scores.push(Logprobs {
            rows: head.logprobs(pass.decoder, y_rw, &work.labels(&work.answers[index], rank)),
            first: first.as_ref().map(|all| all.narrow(0, as_dim(from_index(index)), 1)),
        });
        Ok(())
    })?;
    states.leave_device()?;
    Ok((Scores(scores), states))
}

/// Last hidden states of this rank's rows of every answer, in slot (answer, 0).
///
/// # Errors
/// As [`run`].
pub fn hidden(pass: &Pass, work: &PlacedGroup, captured: &Captured, tracker: &Tracker) -> Result<HiddenPool, Failure> {
    let states = answers::up(pass, work, captured, Leaves::Nothing, tracker)?;
    let mut pool = HiddenPool::new(Residency::Host, Purpose::Hidden, pass.cp_group.ledger.clone());
    top(pass, work, captured, &states, tracker, |index, y_rw| {
        Ok(pool.put(Slot { span: index, layer: LayerIndex(0) }, y_rw)?)
    })?;
    Ok(pool)
}

/// The top layer: gives every answer's output, in their order, to `visit`.
fn top(
    pass: &Pass,
    work: &PlacedGroup,
    captured: &Captured,
    states: &AnswerStates,
    tracker: &Tracker,
    mut visit: impl FnMut(usize, &Tensor) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let layer = LayerIndex(pass.decoder.layers() - 1);
    tracker.layer(layer)?;
    captured.choices.settle()?;
    // A replay begins in this layer again, other phases in the first one.
    let next = if states.leaves == Leaves::Replayable { layer } else { LayerIndex(0) };
    let staged = captured.pages.stage(layer, Some(next), pass.adapters.stamp())?;
    let past = Past::of_answers(&staged, &work.layout);
    let applied = pass.applied(layer);
    let pass = Pass { adapters: applied.as_ref().unwrap_or(pass.adapters), ..*pass };
    for (index, pack) in pass.packs(work).iter().enumerate() {
        let y_rw = if pack.span.is_empty() {
            // Answers of one token have no row in any layer.
            states.input(index, LayerIndex(0))?.keep()
        } else {
            let x_rw = states.input(index, layer)?;
            pass.forward(layer, &pack.span, &x_rw, &past, captured.choices.of_packed(&pack.sequences))?
        };
        for (answer, y_rw) in pack.split(&y_rw) {
            visit(answer, &y_rw)?;
        }
    }
    Ok(())
}
