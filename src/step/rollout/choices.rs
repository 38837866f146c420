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
use crate::runtime::memory::{Held, Ledger, MemorySpace, Purpose};
use crate::runtime::units::{LayerIndex, Position, Tokens, as_dim, from_dim, from_index};
use crate::tensor;
use crate::tensor::boundary::storage_bytes;
use crate::world::Axis;
use crate::world::exchange::{Traffic, send_rows};

/// Steps whose choices go to host memory together, on one rank: the ranks of the prompt take turns.
const STEPS: usize = 64;

/// Choices of consecutive steps with the same live answers.
#[derive(Debug)]
struct Block {
    live: Vec<usize>,
    /// [steps, answers, n] in host memory, on the rank whose turn it was, with its bytes in the ledger.
    chosen: Option<(Tensor, Held)>,
}

/// Choices of one kind in one layer, step by step.
#[derive(Debug, Default)]
struct Steps {
    blocks: Vec<Block>,
    /// [answers, n] each, of the answers `live`.
    pending: Vec<Tensor>,
    live: Vec<usize>,
    /// Steps before the pending ones.
    before: usize,
    /// Columns of the widest step.
    widest: i64,
}

impl Steps {
    fn add(&mut self, turns: &Turns, live: &[usize], chosen_an: &Tensor) {
        if self.live != live || (self.before + self.pending.len()).is_multiple_of(STEPS) {
            self.settle(turns);
            self.live = live.to_vec();
        }
        self.widest = self.widest.max(chosen_an.size()[1]);
        self.pending.push(chosen_an.shallow_clone());
    }

    fn settle(&mut self, turns: &Turns) {
        let pending = std::mem::take(&mut self.pending);
        let (first, steps) = (self.before, pending.len());
        self.before += steps;
        if steps == 0 {
            return;
        }
        let chosen = (turns.holder(first) == turns.rank).then(|| {
            let chosen = Tensor::stack(&padded(&pending, 0), 0).to_device(Device::Cpu);
            let held = turns.ledger.hold(Purpose::Choices, MemorySpace::Host, storage_bytes(&chosen));
            (chosen, held)
        });
        self.blocks.push(Block { live: self.live.clone(), chosen });
    }

    /// The choices of an answer's steps that this rank holds, in their order, [steps, n].
    fn of(&self, answer: usize) -> Option<Tensor> {
        let own = |block: &Block| {
            let place = block.live.iter().position(|&other| other == answer)?;
            let (chosen, _) = block.chosen.as_ref()?;
            Some(chosen.select(1, as_dim(from_index(place))))
        };
        let parts: Vec<Tensor> = self.blocks.iter().filter_map(own).collect();
        (!parts.is_empty()).then(|| Tensor::cat(&padded(&parts, self.widest), 0))
    }
}

/// The same tensors with as many columns as the widest, at least `least`; the new ones hold −1.
fn padded(parts: &[Tensor], least: i64) -> Vec<Tensor> {
    let columns = |part: &Tensor| part.size().last().copied().unwrap_or(0);
    let widest = parts.iter().map(columns).max().unwrap_or(0).max(least);
    let wide = |part: &Tensor| match widest - columns(part) {
        0 => part.shallow_clone(),
        missing => (part + 1).constant_pad_nd([0, missing]) - 1,
    };
    parts.iter().map(wide).collect()
}

/// Which rank of the prompt holds which step's choices until the answers have ended.
#[derive(Debug)]
struct Turns {
    rank: usize,
    ranks: usize,
    ledger: Ledger,
}

impl Turns {
    fn holder(&self, step: usize) -> usize {
        step / STEPS % self.ranks
    }
}

/// All choices of a group that is being sampled.
#[derive(Debug)]
pub(super) struct Drawn {
    turns: Turns,
    index: Vec<Steps>,
    experts: Vec<Steps>,
}

impl Drawn {
    pub(super) fn new(pass: &Pass) -> Drawn {
        let axis = pass.cp_group.axis;
        let steps = || (0..pass.decoder.layers()).map(|_| Steps::default()).collect();
        let turns = Turns { rank: axis.rank().0, ranks: axis.size(), ledger: pass.cp_group.ledger.clone() };
        Drawn { turns, index: steps(), experts: steps() }
    }

    /// Adds the choice of one step, [answers, n], of the answers `live`; every rank of the prompt does.
    pub(super) fn add(&mut self, choice: Choice, layer: LayerIndex, live: &[usize], chosen_an: &Tensor) {
        let all = match choice {
            Choice::Index => &mut self.index,
            Choice::Experts => &mut self.experts,
        };
        all[layer.0].add(&self.turns, live, chosen_an);
    }

    /// The choices of this rank's rows of answers of these lengths. Every rank takes part and keeps those of every answer with
    /// rows.
    pub(super) fn pool(
        mut self,
        pass: &Pass,
        layout: &PromptLayout,
        lengths: &[usize],
    ) -> Result<ChoicePool, tensor::Error> {
        let pool = ChoicePool::new(Residency::Host, pass.cp_group.ledger);
        for (choice, layers) in [(Choice::Index, &mut self.index), (Choice::Experts, &mut self.experts)] {
            for (layer, steps) in layers.iter_mut().enumerate() {
                steps.settle(&self.turns);
                for (answer, &length) in lengths.iter().enumerate().filter(|(_, length)| **length > 1) {
                    let Some(kind) = kind_of(choice, steps) else { continue };
                    let none = || Tensor::zeros([0, steps.widest], (kind, Device::Cpu));
                    let held = steps.of(answer).unwrap_or_else(none);
                    let owners = owners(layout, length);
                    let own = dealt(pass.cp_group.axis, &self.turns, &held, &owners);
                    // From the device to memory that it reaches again.
                    let own = own.to_device(pass.decoder.device());
                    pool.of(answer).put(choice, LayerIndex(layer), &own)?;
                }
                steps.blocks.clear();
                pool.settle()?;
            }
        }
        Ok(pool)
    }
}

/// The dtype of a choice; `None` where the layer has made none.
fn kind_of(choice: Choice, steps: &Steps) -> Option<Kind> {
    let kind = match choice {
        Choice::Index => Kind::Int,
        Choice::Experts => Kind::Int64,
    };
    (!steps.blocks.is_empty()).then_some(kind)
}

/// The rank that owns each row of an answer of `length` tokens.
fn owners(layout: &PromptLayout, length: usize) -> Vec<usize> {
    let span = layout.answer(Tokens(from_index(length)));
    let mut owners = vec![0; length - 1];
    for piece in span.gathered() {
        let row = |position: Position| position.since(layout.end()).index();
        owners[row(piece.start)..row(piece.stop)].fill(piece.rank.0);
    }
    owners
}

/// Rows from the ranks that hold them to those that own them; `held` are this rank's, in order.
fn dealt(axis: &Axis, turns: &Turns, held: &Tensor, owners: &[usize]) -> Tensor {
    if axis.size() == 1 {
        return held.shallow_clone();
    }
    let mut rows = vec![vec![Tokens(0); axis.size()]; axis.size()];
    for (step, &owner) in owners.iter().enumerate() {
        rows[turns.holder(step)][owner].0 += 1;
    }
    let arrived = send_rows(axis, held, &Traffic::new(rows));
    // They arrive sender by sender, each sender's in order.
    let mine = |holder: usize| {
        let of = move |&(step, &owner): &(usize, &usize)| owner == turns.rank && turns.holder(step) == holder;
        owners.iter().enumerate().filter(of).map(|(step, _)| as_dim(from_index(step)))
    };
    let steps: Vec<i64> = (0..axis.size()).flat_map(mine).collect();
    arrived.index_select(0, &Tensor::from_slice(&steps).argsort(0, false))
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
                let pair = padded(&[drawn.to_kind(Kind::Int64), used.to_kind(Kind::Int64)], 0);
                let differs = pair[0].not_equal_tensor(&pair[1]).any_dim(1, false);
                counts.choices += from_dim(differs.size()[0]);
                counts.changed += from_dim(differs.sum(Kind::Int64).int64_value(&[]));
            }
        }
    }
    Ok(counts)
}
