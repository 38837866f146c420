//! Score: log-probabilities of each answer under the adapters the prompt was captured with, without a graph, frozen
//! before any update. Layers outside, answers inside: a layer's pages are staged once for the whole group.

use crate::model::head::Head;
use crate::model::pass::Pass;
use crate::model::past::Past;
use crate::prompt::handoff::{Captured, Logprobs, PlacedGroup, Scores};
use crate::prompt::pages::{HiddenPool, Residency, Slot};
use crate::runtime::failure::Failure;
use crate::runtime::liveness::Tracker;
use crate::runtime::memory::Purpose;
use crate::runtime::units::{LayerIndex, as_dim, from_index};

/// Scores every answer of `work`.
///
/// # Errors
/// When the pages were captured under other adapters than the pass's.
pub fn run(
    pass: &Pass,
    head: &Head,
    work: &PlacedGroup,
    captured: &Captured,
    tracker: &Tracker,
) -> Result<Scores, Failure> {
    let rank = pass.cp_group.axis.rank();
    let pool = hidden(pass, work, captured, tracker)?;
    let first = captured.last_row.as_ref().map(|x_1w| head.logprobs_of_row(pass.decoder, x_1w, &work.first_labels()));
    let answers = work.answers.iter().enumerate().map(|(index, answer)| {
        Ok(Logprobs {
            rows: head.logprobs(pass.decoder, &*pool.stage(slot(index))?, &work.labels(answer, rank)),
            first: first.as_ref().map(|all| all.narrow(0, as_dim(from_index(index)), 1)),
        })
    });
    Ok(Scores(answers.collect::<Result<_, Failure>>()?))
}

/// Last hidden states of this rank's rows of every answer, in slot (answer, 0).
///
/// # Errors
/// As [`run`].
pub fn hidden(pass: &Pass, work: &PlacedGroup, captured: &Captured, tracker: &Tracker) -> Result<HiddenPool, Failure> {
    let rank = pass.cp_group.axis.rank();
    let mut pool = HiddenPool::new(Residency::Host, Purpose::Hidden, pass.cp_group.ledger.clone());
    for (index, answer) in work.answers.iter().enumerate() {
        pool.put(slot(index), &pass.decoder.embed(&work.inputs(answer, rank)))?;
    }
    let layers = pass.decoder.layers();
    for layer in (0..layers).map(LayerIndex) {
        tracker.layer(layer)?;
        captured.choices.settle()?;
        // After the last layer the next phase starts from the first one.
        let next = LayerIndex((layer.0 + 1) % layers);
        let staged = captured.pages.stage(layer, Some(next), pass.adapters.stamp())?;
        let past = Past::of_answers(&staged, &work.layout);
        for (index, answer) in work.with_rows() {
            let choices = captured.choices.of(index);
            let y_rw = pass.forward(layer, &answer.span, &*pool.stage(slot(index))?, &past, choices)?;
            pool.put(slot(index), &y_rw)?;
        }
    }
    Ok(pool)
}

fn slot(span: usize) -> Slot {
    Slot { span, layer: LayerIndex(0) }
}
