//! What indices and routers chose while answers were sampled: kept beside the tokens, so that the passes that score and train
//! them use the same keys and experts.
//!
//! Sampling computes rows one at a time, scoring in blocks: their last bits differ, and where two scores are nearly equal the
//! choice may differ with them. A token's log-probability then changes by far more than rounding.

use tch::{Device, Kind, Tensor};

use crate::model::pass::Pass;
use crate::prompt::handoff::PlacedGroup;
use crate::prompt::layout::PromptLayout;
use crate::prompt::pages::{Choice, ChoicePool, Residency};
use crate::runtime::units::{LayerIndex, Position, Tokens, as_dim, from_dim, from_index};
use crate::tensor;

/// Steps whose choices wait on the device before they go to host memory together.
const STEPS_MAX: usize = 64;

/// Choices of one kind in one layer, step by step, on every rank alike.
#[derive(Debug, Default)]
struct Steps {
    /// [steps, answers, n] each, in host memory, with the answers that were live.
    done: Vec<(Vec<usize>, Tensor)>,
    /// [answers, n] each, of the answers `live`.
    pending: Vec<Tensor>,
    live: Vec<usize>,
}

impl Steps {
    fn add(&mut self, live: &[usize], chosen_an: &Tensor) {
        if self.live != live || self.pending.len() == STEPS_MAX {
            self.settle();
            self.live = live.to_vec();
        }
        self.pending.push(chosen_an.shallow_clone());
    }

    fn settle(&mut self) {
        let pending = std::mem::take(&mut self.pending);
        if !pending.is_empty() {
            let stacked = Tensor::stack(&padded(&pending), 0).to_device(Device::Cpu);
            self.done.push((self.live.clone(), stacked));
        }
    }

    /// The choices of all steps of one answer, [steps, n]; `None` where it made no step.
    fn of(&mut self, answer: usize) -> Option<Tensor> {
        self.settle();
        let own = |(live, chosen): &(Vec<usize>, Tensor)| {
            let place = live.iter().position(|&other| other == answer)?;
            Some(chosen.select(1, as_dim(from_index(place))))
        };
        let parts: Vec<Tensor> = self.done.iter().filter_map(own).collect();
        (!parts.is_empty()).then(|| Tensor::cat(&padded(&parts), 0))
    }
}

/// The same tensors with as many columns as the widest; the new ones hold −1.
fn padded(parts: &[Tensor]) -> Vec<Tensor> {
    let columns = |part: &Tensor| part.size().last().copied().unwrap_or(0);
    let widest = parts.iter().map(columns).max().unwrap_or(0);
    let wide = |part: &Tensor| match widest - columns(part) {
        0 => part.shallow_clone(),
        missing => (part + 1).constant_pad_nd([0, missing]) - 1,
    };
    parts.iter().map(wide).collect()
}

/// All choices of a group that is being sampled.
#[derive(Debug)]
pub(super) struct Drawn {
    index: Vec<Steps>,
    experts: Vec<Steps>,
}

impl Drawn {
    pub(super) fn new(layers: usize) -> Drawn {
        let steps = || (0..layers).map(|_| Steps::default()).collect();
        Drawn { index: steps(), experts: steps() }
    }

    /// Adds the choice of one step, [answers, n], of the answers `live`.
    pub(super) fn add(&mut self, choice: Choice, layer: LayerIndex, live: &[usize], chosen_an: &Tensor) {
        let all = match choice {
            Choice::Index => &mut self.index,
            Choice::Experts => &mut self.experts,
        };
        all[layer.0].add(live, chosen_an);
    }

    /// The choices of this rank's rows of answers of these lengths. Every rank keeps those of every answer with rows.
    pub(super) fn pool(
        mut self,
        pass: &Pass,
        layout: &PromptLayout,
        lengths: &[usize],
    ) -> Result<ChoicePool, tensor::Error> {
        let rank = pass.cp_group.axis.rank();
        let pool = ChoicePool::new(Residency::Host, pass.cp_group.ledger);
        for (choice, layers) in [(Choice::Index, &mut self.index), (Choice::Experts, &mut self.experts)] {
            for (layer, steps) in layers.iter_mut().enumerate() {
                for (answer, &length) in lengths.iter().enumerate() {
                    let Some(all) = steps.of(answer) else { continue };
                    let span = layout.answer(Tokens(from_index(length)));
                    let row = |position: Position| position.since(layout.end()).dim();
                    let own = span.of(rank).map(|piece| all.narrow(0, row(piece.start), piece.rows().dim()));
                    let own: Vec<Tensor> = std::iter::once(all.narrow(0, 0, 0)).chain(own).collect();
                    // From the device to memory that it reaches again.
                    let own = Tensor::cat(&own, 0).to_device(pass.decoder.device());
                    pool.of(answer).put(choice, LayerIndex(layer), &own)?;
                }
            }
        }
        Ok(pool)
    }
}

/// How many choices there were, and how many of them another pass made differently. A choice is that of one row in one layer.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[expect(missing_docs, reason = "the type's comment explains both")]
pub struct ChangedChoices {
    pub choices: u64,
    pub changed: u64,
}

/// Compares what was chosen for this rank's rows when answers were sampled with what `used` holds.
///
/// # Errors
/// When a choice cannot be brought back.
pub(crate) fn changed(
    pass: &Pass,
    group: &PlacedGroup,
    drawn: &ChoicePool,
    used: &ChoicePool,
) -> Result<ChangedChoices, tensor::Error> {
    let mut counts = ChangedChoices::default();
    for layer in (0..pass.decoder.layers()).map(LayerIndex) {
        for choice in [Choice::Index, Choice::Experts] {
            for (answer, _) in group.with_rows() {
                let both = (drawn.of(answer).stage(choice, layer)?, used.of(answer).stage(choice, layer)?);
                let (Some(drawn), Some(used)) = both else { continue };
                let pair = padded(&[drawn.to_kind(Kind::Int64), used.to_kind(Kind::Int64)]);
                let differs = pair[0].not_equal_tensor(&pair[1]).any_dim(1, false);
                counts.choices += from_dim(differs.size()[0]);
                counts.changed += from_dim(differs.sum(Kind::Int64).int64_value(&[]));
            }
        }
    }
    Ok(counts)
}
