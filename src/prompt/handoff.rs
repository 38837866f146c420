//! What one phase hands to the next. The types enforce the order: the optimizer takes only [`ReducedGrads`], and only
//! `finalize` makes them, from [`LocalGrads`] that it consumes.

use std::rc::Rc;

use serde::Serialize;
use tch::Tensor;

use crate::prompt::layout::{PromptLayout, Span};
use crate::prompt::pages::{self, AdapterVersion, ChoicePool, HiddenPool, PagePool, Residency, Slot, StagedHidden};
use crate::runtime::memory::{Ledger, Purpose};
use crate::runtime::units::{LayerIndex, Rank, Tokens, from_index};
use crate::tensor;

/// One group as the phases see it: the tokens of a prompt and of its answers, dealt to ranks.
#[derive(Debug)]
pub struct PlacedGroup {
    /// Which rank has which position of the prompt.
    pub layout: PromptLayout,
    /// Token ids of the prompt.
    pub prompt_ids: Vec<i64>,
    /// In the order of the data set.
    pub answers: Vec<Answer>,
}

/// One answer, and its rows on each rank.
#[derive(Debug)]
pub struct Answer {
    /// Token ids; never empty.
    pub ids: Vec<i64>,
    /// Which tokens are trained; `None`: all.
    pub mask: Option<Vec<bool>>,
    /// Its rows, one for each token but the last.
    pub span: Span,
}

impl Answer {
    /// [1]: 1 if its first token is trained, else 0; `None` if all tokens are.
    #[must_use]
    pub fn first_is_trained(&self) -> Option<Tensor> {
        self.mask.as_ref().map(|mask| as_numbers(&mask[..1]))
    }

    /// How many of its tokens are trained.
    #[must_use]
    pub fn trained_tokens(&self) -> u64 {
        let masked = self.mask.as_ref().map(|mask| mask.iter().filter(|&&trained| trained).count());
        from_index(masked.unwrap_or(self.ids.len()))
    }
}

fn as_numbers(mask: &[bool]) -> Tensor {
    Tensor::from_slice(&mask.iter().map(|&trained| f32::from(u8::from(trained))).collect::<Vec<f32>>())
}

impl PlacedGroup {
    /// Deals a group to ranks.
    #[must_use]
    pub fn new(layout: PromptLayout, prompt_ids: Vec<i64>, answers: Vec<Vec<i64>>) -> PlacedGroup {
        let answer = |ids: Vec<i64>| Answer { span: layout.answer(Tokens(from_index(ids.len()))), ids, mask: None };
        let answers = answers.into_iter().map(answer).collect();
        PlacedGroup { layout, prompt_ids, answers }
    }

    /// The same group with a mask of trained tokens for each answer.
    ///
    /// # Panics
    /// When a mask is not as long as its answer; the data have been checked for that.
    #[must_use]
    pub fn masked(mut self, masks: Vec<Option<Vec<bool>>>) -> PlacedGroup {
        assert_eq!(masks.len(), self.answers.len(), "every answer has a mask or none");
        for (answer, mask) in self.answers.iter_mut().zip(masks) {
            assert!(mask.as_ref().is_none_or(|mask| mask.len() == answer.ids.len()), "a mask is as long as its answer");
            answer.mask = mask;
        }
        self
    }

    /// [rows]: 1 if the token that a row of this rank predicts is trained, else 0; `None` if all tokens are.
    #[must_use]
    pub fn trained(&self, answer: &Answer, rank: Rank) -> Option<Tensor> {
        Some(as_numbers(&self.own_tokens(answer, rank, answer.mask.as_ref()?)))
    }

    /// [rows]: of `values`, one for each token of an answer, those of the tokens that this rank's rows predict.
    #[must_use]
    pub fn own_tokens<T: Copy>(&self, answer: &Answer, rank: Rank, values: &[T]) -> Vec<T> {
        answer.span.of(rank).flat_map(|piece| values[self.layout.labels(piece)].iter().copied()).collect()
    }

    /// Answers with rows, and their indices; an answer of one token has no row.
    pub fn with_rows(&self) -> impl Iterator<Item = (usize, &Answer)> {
        self.answers.iter().enumerate().filter(|(_, answer)| !answer.span.is_empty())
    }

    /// Ids of the tokens that are the inputs of this rank's rows of an answer.
    #[must_use]
    pub fn inputs(&self, answer: &Answer, rank: Rank) -> Vec<i64> {
        answer.span.of(rank).flat_map(|piece| answer.ids[self.layout.inputs(piece)].iter().copied()).collect()
    }

    /// [rows]: ids of the tokens that this rank's rows of an answer predict.
    pub fn labels(&self, answer: &Answer, rank: Rank) -> Tensor {
        let labels: Vec<i64> =
            answer.span.of(rank).flat_map(|piece| answer.ids[self.layout.labels(piece)].iter().copied()).collect();
        Tensor::from_slice(&labels)
    }

    /// [answers]: id of the first token of each answer, which row P−1 predicts.
    pub fn first_labels(&self) -> Tensor {
        Tensor::from_slice(&self.answers.iter().map(|answer| answer.ids[0]).collect::<Vec<i64>>())
    }
}

/// Where a captured prompt waits, and how much of its tail is kept for backward instead of being recomputed. Equal on
/// all ranks, since every rank takes part in a recomputation.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct Keeping {
    /// Where pages wait between phases.
    pub pages: Residency,
    /// Where the tail's block inputs wait between phases.
    pub tail: Residency,
    /// Block inputs of the tail are kept for every n-th layer; the others are recomputed.
    pub every: usize,
    /// Whether the tail's attention output and log-sum-exp are kept too.
    pub attention: bool,
    /// Whether the answers' attention output and log-sum-exp are kept in host memory, from their way up to their way down.
    pub answer_attention: bool,
    /// Whether the keys that indices chose for the tail's rows are kept; else they are chosen again by the same rule.
    pub index_sets: bool,
}

impl Default for Keeping {
    fn default() -> Self {
        Keeping::HOST
    }
}

impl Keeping {
    /// Everything in host memory, every layer's inputs, no attention output.
    pub const HOST: Keeping = Keeping {
        pages: Residency::Host,
        tail: Residency::Host,
        every: 1,
        attention: false,
        answer_attention: false,
        index_sets: true,
    };

    /// Most layer inputs of the tail that are kept at one time, for a model of `layers` layers: those of every k-th layer,
    /// and the k − 1 between two of them while they are computed again. A short tail keeps all of them.
    #[must_use]
    pub fn layer_inputs(&self, layers: u64, tail_is_long: bool) -> u64 {
        let every = if tail_is_long { from_index(self.every) } else { 1 };
        layers.div_ceil(every) + every - 1
    }
}

/// A captured prompt on one rank.
#[derive(Debug)]
pub struct Captured {
    /// The state of the pages that this rank owns.
    pub pages: PagePool,
    /// What is kept of the tail.
    pub keeping: Keeping,
    /// Block inputs of this rank's tail rows in slot (0, layer), for every n-th layer.
    pub tail: HiddenPool,
    /// Mixer outputs of the tail's stretches, if they are kept.
    pub mixed: MixedPool,
    /// What was chosen for this rank's tail rows; the tail is span 0.
    pub tail_choices: ChoicePool,
    /// What was chosen for this rank's rows of answers, by the number of the answer; used by every pass over them.
    pub choices: Rc<ChoicePool>,
    /// Whether these are choices of the sampled answers, made when they were sampled.
    pub from_sampling: bool,
    /// Where the choices made in sampling are not used: those choices, to be compared.
    pub drawn: Option<ChoicePool>,
    /// Last hidden state of row P−1, [1, w], on the rank that owns it.
    pub last_row: Option<Tensor>,
}

impl Captured {
    /// The same prompt for `answers`. What was chosen when answers were sampled serves those answers alone: for others than the
    /// `sampled` it is dropped.
    #[must_use]
    pub fn for_answers(mut self, sampled: &[Vec<i64>], answers: &[Vec<i64>], ledger: &Ledger) -> Captured {
        if sampled != answers {
            self.choices = Rc::new(ChoicePool::new(Residency::Host, ledger));
            self.from_sampling = false;
            self.drawn = None;
        }
        self
    }

    /// The same prompt for a further update under the adapters `to`. What was chosen for answers under the earlier ones is
    /// chosen again, unless it was chosen when they were sampled.
    #[must_use]
    pub fn lend(mut self, to: &AdapterVersion, ledger: &Ledger) -> Captured {
        self.pages.lend(to);
        self.drawn = None;
        if !self.from_sampling {
            self.choices = Rc::new(ChoicePool::new(Residency::Host, ledger));
        }
        self
    }
}

/// Mixer outputs of the tail's stretches, layer by layer, with the tensors that their backward needs.
#[derive(Debug)]
pub struct MixedPool {
    pool: HiddenPool,
    /// Tensors of one stretch: the output and the saved tensors.
    planes: usize,
    /// Stretches of a layer.
    blocks: usize,
}

impl MixedPool {
    /// An empty pool.
    #[must_use]
    pub fn new(residency: Residency, ledger: Ledger) -> Self {
        MixedPool { pool: HiddenPool::new(residency, Purpose::Checkpoints, ledger), planes: 0, blocks: 0 }
    }

    /// Keeps the mixer's output and saved tensors of the tail's stretch `block`.
    ///
    /// # Errors
    /// When there is no more memory for it.
    pub fn put(
        &mut self,
        layer: LayerIndex,
        block: usize,
        out: &Tensor,
        saved: &[Tensor],
    ) -> Result<(), tensor::Error> {
        self.planes = 1 + saved.len();
        self.blocks = self.blocks.max(block + 1);
        for (plane, x) in std::iter::once(out).chain(saved).enumerate() {
            self.pool.put(Slot { span: block * self.planes + plane, layer }, x)?;
        }
        Ok(())
    }

    /// Makes the computation wait until kept tensors have left the device; then their memory there is free.
    ///
    /// # Errors
    /// When a copy has failed.
    pub fn settle(&mut self) -> Result<(), tensor::Error> {
        self.pool.settle()
    }

    /// Starts to copy a layer's tensors to the device, for a later [`MixedPool::get`].
    ///
    /// # Errors
    /// When a copy cannot be made.
    pub fn prefetch(&self, layer: LayerIndex) -> Result<(), tensor::Error> {
        (0..self.blocks * self.planes).try_for_each(|span| self.pool.prefetch(Slot { span, layer }))
    }

    /// As [`MixedPool::prefetch`], for stretch `block` alone.
    ///
    /// # Errors
    /// When a copy cannot be made.
    pub fn prefetch_block(&self, layer: LayerIndex, block: usize) -> Result<(), tensor::Error> {
        (0..self.planes).try_for_each(|plane| self.pool.prefetch(Slot { span: block * self.planes + plane, layer }))
    }

    /// Output and saved tensors of stretch `block` on the device; `None` if none were kept.
    ///
    /// # Errors
    /// When a copy cannot be made.
    pub fn get(&self, layer: LayerIndex, block: usize) -> Result<Option<(Tensor, Vec<Tensor>)>, tensor::Error> {
        let slot = |plane| Slot { span: block * self.planes + plane, layer };
        if self.planes == 0 || !self.pool.holds(slot(0)) {
            return Ok(None);
        }
        let load = |plane| self.pool.stage(slot(plane)).map(StagedHidden::keep);
        let saved = (1..self.planes).map(load).collect::<Result<_, _>>()?;
        Ok(Some((load(0)?, saved)))
    }
}

/// Whether a pass of the answers up the layers is followed by a replay.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Leaves {
    /// Only scores are wanted: the input of one layer is held at a time.
    Nothing,
    /// The inputs of all layers stay.
    Replayable,
}

/// What a pass of the answers up the layers leaves in host memory: answers × rows × width × layers, with kept mixer outputs
/// (out + saved) × rows × answers × layers below the top more. It is of the adapters that the pass ran under.
#[derive(Debug)]
pub struct AnswerStates {
    /// What stays of them.
    pub leaves: Leaves,
    version: AdapterVersion,
    /// Block inputs in slot (pack, layer). The way down puts the gradient of an input in its place.
    pub inputs: HiddenPool,
    /// Whether one pack alone has rows.
    lone: bool,
    /// What was put last of a lone pack, still on the device: it is read next, and would queue behind the next layer's pages.
    on_device: Option<(Slot, Tensor)>,
    /// Mixer outputs, if they are kept; a pack of answers is a block.
    mixed: MixedPool,
}

impl AnswerStates {
    /// Nothing yet, of adapters at `version`; `lone` says whether one pack alone has rows.
    #[must_use]
    pub fn new(leaves: Leaves, version: AdapterVersion, ledger: &Ledger, lone: bool) -> Self {
        AnswerStates {
            leaves,
            version,
            inputs: HiddenPool::new(Residency::Host, Purpose::Hidden, ledger.clone()),
            lone,
            on_device: None,
            mixed: MixedPool::new(Residency::Host, ledger.clone()),
        }
    }

    fn slot(&self, pack: usize, layer: LayerIndex) -> Slot {
        Slot { span: pack, layer: if self.leaves == Leaves::Nothing { LayerIndex(0) } else { layer } }
    }

    /// Keeps the input of the block of a pack of answers; without a replay to follow, in the place of the one before.
    ///
    /// # Errors
    /// When there is no more memory for it.
    pub fn put_input(&mut self, pack: usize, layer: LayerIndex, x_rw: &Tensor) -> Result<(), tensor::Error> {
        let slot = self.slot(pack, layer);
        // What was put before has left the device then.
        self.inputs.settle()?;
        self.inputs.put(slot, x_rw)?;
        self.on_device = self.lone.then(|| (slot, x_rw.detach()));
        Ok(())
    }

    /// The input of the block of a pack of answers, on the device until it is dropped.
    ///
    /// # Errors
    /// When the copy cannot be made.
    pub fn input(&self, pack: usize, layer: LayerIndex) -> Result<StagedHidden, tensor::Error> {
        let slot = self.slot(pack, layer);
        match &self.on_device {
            Some((held, x_rw)) if *held == slot => Ok(StagedHidden::of(x_rw.shallow_clone())),
            _ => self.inputs.stage(slot),
        }
    }

    /// Starts to copy the input of a pack's block to the device.
    ///
    /// # Errors
    /// When the copy cannot be made.
    pub fn prefetch_input(&self, pack: usize, layer: LayerIndex) -> Result<(), tensor::Error> {
        let slot = self.slot(pack, layer);
        let is_there = self.on_device.as_ref().is_some_and(|(held, _)| *held == slot);
        if is_there { Ok(()) } else { self.inputs.prefetch(slot) }
    }

    /// Starts to copy the mixer's output of a pack to the device, if it was kept.
    ///
    /// # Errors
    /// When a copy cannot be made.
    pub fn prefetch_mixed(&self, pack: usize, layer: LayerIndex) -> Result<(), tensor::Error> {
        self.mixed.prefetch_block(layer, pack)
    }

    /// Holds nothing on the device any longer.
    ///
    /// # Errors
    /// When a copy has failed.
    pub fn leave_device(&mut self) -> Result<(), tensor::Error> {
        self.on_device = None;
        self.inputs.settle()
    }

    /// Drops the input of the block of a pack of answers, or the gradient that has taken its place.
    pub fn release_input(&mut self, pack: usize, layer: LayerIndex) {
        let slot = self.slot(pack, layer);
        self.on_device.take_if(|(held, _)| *held == slot);
        self.inputs.release(slot);
    }

    /// Keeps the mixer's output and saved tensors of a pack in a layer. Those of the pack before have left the device then.
    ///
    /// # Errors
    /// When there is no more memory for it.
    pub fn put_mixed(
        &mut self,
        pack: usize,
        layer: LayerIndex,
        out: &Tensor,
        saved: &[Tensor],
    ) -> Result<(), tensor::Error> {
        self.mixed.settle()?;
        self.mixed.put(layer, pack, out, saved)
    }

    /// Output and saved tensors of a pack's mixer on the device; `None` if none were kept.
    ///
    /// # Errors
    /// When a copy cannot be made.
    pub fn mixed(&self, pack: usize, layer: LayerIndex) -> Result<Option<(Tensor, Vec<Tensor>)>, tensor::Error> {
        self.mixed.get(layer, pack)
    }

    /// These states for a replay under the adapters `wanted`.
    ///
    /// # Errors
    /// When they are of other adapters, which would give gradients of neither.
    pub fn under(self, wanted: &AdapterVersion) -> Result<AnswerStates, pages::Error> {
        if self.version == *wanted {
            Ok(self)
        } else {
            Err(pages::Error::StaleAnswers { held: self.version, wanted: wanted.clone() })
        }
    }
}

/// Log-probabilities of one answer's tokens on one rank, in the accumulation dtype.
#[derive(Debug)]
pub struct Logprobs {
    /// [rows]: of the tokens that this rank's rows predict.
    pub rows: Tensor,
    /// [1]: of the first token, on the rank that owns row P−1.
    pub first: Option<Tensor>,
}

/// Frozen log-probabilities of a group's answers.
#[derive(Debug)]
pub struct Scores(pub Vec<Logprobs>);

/// Adapter gradients of one rank, not summed yet.
#[derive(Debug)]
#[must_use = "gradients that are not finalized never reach the other ranks"]
pub struct LocalGrads(pub Vec<Tensor>);

/// Adapter gradients summed over all ranks and clipped: the same bits everywhere. Nothing but `finalize` makes them:
///
/// ```compile_fail,E0451
/// use longstraw::prompt::handoff::{LocalGrads, ReducedGrads};
///
/// fn unsummed(own: LocalGrads) -> ReducedGrads {
///     ReducedGrads { gradients: own.0, norm: 0.0 }
/// }
/// ```
#[derive(Debug)]
pub struct ReducedGrads {
    pub(crate) gradients: Vec<Tensor>,
    pub(crate) norm: f64,
}

impl ReducedGrads {
    /// Gradients in the adapters' order.
    pub fn gradients(&self) -> &[Tensor] {
        &self.gradients
    }

    /// Euclidean norm before clipping.
    #[must_use]
    pub fn norm(&self) -> f64 {
        self.norm
    }
}

/// State of the optimizer, saved in checkpoints.
#[derive(Debug)]
pub struct Moments {
    /// Number of updates so far.
    pub steps: u32,
    /// Running mean of the gradient, in the adapters' order, shape and dtype.
    pub mean: Vec<Tensor>,
    /// Running mean of its square, likewise.
    pub square: Vec<Tensor>,
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn states(leaves: Leaves, lone: bool) -> AnswerStates {
        AnswerStates::new(leaves, AdapterVersion { policy: "policy", version: 0 }, &Ledger::default(), lone)
    }

    /// Rows that all hold `value`.
    fn rows(count: i64, value: i64) -> Tensor {
        Tensor::full([count, 2], value, (Kind::Double, Device::Cpu))
    }

    /// Puts three rows of `value`.
    fn put(states: &mut AnswerStates, (pack, layer): (usize, usize), value: i64) {
        states.put_input(pack, LayerIndex(layer), &rows(3, value)).unwrap();
    }

    /// Whether the input is `expected`, read twice: a copy is overwritten when it is dropped, what was put is not.
    fn holds(states: &AnswerStates, (pack, layer): (usize, usize), expected: &Tensor) -> bool {
        let mut read = (0..2).map(|_| states.input(pack, LayerIndex(layer)).unwrap().equal(expected));
        read.all(|equal| equal)
    }

    #[test]
    fn an_input_is_what_was_put_last_in_its_place_on_the_device_or_not() {
        for lone in [true, false] {
            let mut states = states(Leaves::Replayable, lone);
            put(&mut states, (0, 0), 1);
            assert!(holds(&states, (0, 0), &rows(3, 1)), "lone: {lone}");
            put(&mut states, (0, 1), 2);
            assert!(holds(&states, (0, 0), &rows(3, 1)) && holds(&states, (0, 1), &rows(3, 2)), "lone: {lone}");
            // The way down: a gradient in the place of an input, whose copy may have set out.
            states.inputs.prefetch(states.slot(0, LayerIndex(1))).unwrap();
            put(&mut states, (0, 1), 3);
            assert!(holds(&states, (0, 1), &rows(3, 3)) && holds(&states, (0, 0), &rows(3, 1)), "lone: {lone}");
            states.leave_device().unwrap();
            assert!(holds(&states, (0, 1), &rows(3, 3)) && holds(&states, (0, 0), &rows(3, 1)), "lone: {lone}");
            states.release_input(0, LayerIndex(1));
            assert!(!states.inputs.holds(states.slot(0, LayerIndex(1))));
            put(&mut states, (0, 0), 4);
            assert!(holds(&states, (0, 0), &rows(3, 4)), "lone: {lone}");
            states.release_input(0, LayerIndex(2));
            assert!(holds(&states, (0, 0), &rows(3, 4)), "another layer's was dropped; lone: {lone}");
        }
    }

    #[test]
    fn an_input_is_that_of_its_own_pack() {
        for leaves in [Leaves::Nothing, Leaves::Replayable] {
            let mut states = states(leaves, false);
            put(&mut states, (0, 0), 1);
            put(&mut states, (1, 0), 2);
            put(&mut states, (0, 1), 3);
            assert!(holds(&states, (1, 0), &rows(3, 2)) && holds(&states, (0, 1), &rows(3, 3)), "{leaves:?}");
            put(&mut states, (1, 1), 4);
            assert!(holds(&states, (0, 1), &rows(3, 3)) && holds(&states, (1, 1), &rows(3, 4)), "{leaves:?}");
        }
    }

    #[test]
    fn without_a_replay_an_input_takes_the_place_of_that_of_the_layer_below() {
        for lone in [true, false] {
            let mut states = states(Leaves::Nothing, lone);
            for (layer, value) in [(0, 5), (1, 6), (2, 7)] {
                put(&mut states, (0, layer), value);
                assert!(holds(&states, (0, layer), &rows(3, value)), "layer {layer}, lone: {lone}");
            }
        }
    }

    #[test]
    fn a_lone_packs_input_is_its_own_beside_packs_without_rows() {
        for leaves in [Leaves::Nothing, Leaves::Replayable] {
            let mut states = states(leaves, true);
            for (pack, count) in [(0, 0), (1, 3), (2, 0)] {
                states.put_input(pack, LayerIndex(0), &rows(count, 8)).unwrap();
            }
            assert!(holds(&states, (1, 0), &rows(3, 8)), "{leaves:?}");
            put(&mut states, (1, 1), 9);
            assert!(holds(&states, (1, 1), &rows(3, 9)), "{leaves:?}");
            assert!(holds(&states, (0, 0), &rows(0, 0)) && holds(&states, (2, 0), &rows(0, 0)), "{leaves:?}");
        }
    }

    #[test]
    fn reading_an_input_never_overwrites_the_tensor_that_was_put() {
        for lone in [true, false] {
            let mut states = states(Leaves::Replayable, lone);
            let x_rw = rows(3, 7);
            states.put_input(0, LayerIndex(0), &x_rw).unwrap();
            drop(states.input(0, LayerIndex(0)).unwrap());
            assert!(x_rw.equal(&rows(3, 7)), "lone: {lone}");
        }
    }
}
