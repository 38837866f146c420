//! Replay and sweep: the answers' top layer runs again, then gradients go down the layers, one graph alive at a time.
//!
//! ```text
//!   up     layer 0 … L−2   each pack: input waits in the pool, slot (pack, layer); left out where the score pass has left
//!                          the inputs, under the same adapters
//!   top    layer L−1       each pack: forward; each answer: head, loss, head backward; block backward; then the tail
//!   down   layer L−2 … 0   each pack: backward, its gradient takes the place of the block's input; then the tail
//! ```
//!
//! A pack is as many answers as a micro-block holds the rows of. The tail is the last N prompt rows, N the gradient mode.
//! Answers leave their share of the gradient on the tail's part of the pages, so the tail comes last in every layer; it runs
//! once for the group. Only one layer's gradient of page state exists at a time. The pool holds exactly answers × rows × width
//! × layers.

use tch::Tensor;

use crate::model::head::Head;
use crate::model::mixer::Mixed;
use crate::model::pass::{Pass, SpanRows, Tail};
use crate::model::past::{Past, PastGradient};
use crate::prompt::handoff::{AnswerStates, Captured, Leaves, Logprobs, PlacedGroup, Scores};
use crate::prompt::layout::Span;
use crate::prompt::pack::Pack;
use crate::prompt::pages::{Choice, HiddenPool, Slot, Staged, StagedHidden};
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::liveness::Tracker;
use crate::runtime::memory::Purpose;
use crate::runtime::units::{Bytes, LayerIndex, as_dim, from_index};
use crate::step::answers;
use crate::step::extremes::Range;
use crate::step::objective::{SequenceMeans, TokenStats};
pub use crate::step::targets::{FrozenScores, ReplayTargets, TrainedAnswer};
use crate::tensor::gpu::Mark;

/// What a replay leaves besides the adapters' gradients: this rank's share of the group's numbers.
#[derive(Debug)]
pub struct Replayed {
    /// This rank's part of the loss.
    pub loss: f64,
    /// Smallest and largest ratio to the frozen scores on this rank; `None` where it has no token.
    pub ratio: Option<Range>,
    /// Counts and sums of this rank's trained tokens.
    pub stats: TokenStats,
    /// Log-probabilities of this rank's tokens.
    pub logprobs: Scores,
    /// The most bytes that waited in the pool of answers' hidden states.
    pub pool_bytes: Bytes,
    /// Where the time went on this rank.
    pub seconds: Spent,
}

/// Seconds of a replay on one rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spent {
    /// Up to the end of the top layer; the top layer alone where the score pass has left its input.
    pub up: f64,
    /// From there down.
    pub down: f64,
    /// Of both: the tail's turns, which do not depend on the number of answers.
    pub tail: f64,
}

struct Replay<'a> {
    pass: &'a Pass<'a>,
    head: &'a Head,
    work: &'a PlacedGroup,
    captured: &'a Captured,
    targets: ReplayTargets<'a>,
    tracker: &'a Tracker,
    packs: Vec<Pack>,
    states: AnswerStates,
    /// Tail inputs that were computed again.
    recomputed: HiddenPool,
    /// The layer from whose kept tail input those above it were computed again last.
    filled_from: Option<usize>,
    /// Of each answer whose top layer is done, where the loss needs them.
    means: Vec<Option<SequenceMeans>>,
    /// When the tail's turns began and ended.
    turns: Vec<(Mark, Mark)>,
    done: Replayed,
}

/// Replays every answer of `work`; gradients add up in the adapters' `.grad`. `left` are the answers' states as a score pass
/// under the same adapters has left them; without them the answers go up the layers here.
///
/// # Errors
/// When the pages were captured, or `left` was made, under other adapters than the pass's, or libtorch refuses a backward.
pub fn run(
    pass: &Pass,
    head: &Head,
    work: &PlacedGroup,
    captured: &Captured,
    left: Option<AnswerStates>,
    targets: ReplayTargets,
    tracker: &Tracker,
) -> Result<Replayed, Failure> {
    let device = pass.decoder.device();
    let start = Mark::now(device)?;
    let states = match left {
        Some(left) => left.under(pass.adapters.stamp())?,
        None => answers::up(pass, work, captured, Leaves::Replayable, tracker)?,
    };
    let mut replay = Replay {
        pass,
        head,
        work,
        captured,
        targets,
        tracker,
        packs: pass.packs(work),
        states,
        recomputed: HiddenPool::new(captured.keeping.tail, Purpose::Checkpoints, pass.cp_group.ledger.clone()),
        filled_from: None,
        means: Vec::new(),
        turns: Vec::new(),
        done: Replayed {
            loss: 0.0,
            ratio: None,
            stats: TokenStats::default(),
            logprobs: Scores(Vec::new()),
            pool_bytes: Bytes(0),
            seconds: Spent::default(),
        },
    };
    let top = LayerIndex(pass.decoder.layers() - 1);
    tracker.layer(top)?;
    let mut dtail = replay.top(top)?;
    replay.done.pool_bytes = replay.states.inputs.bytes();
    let turned = Mark::now(device)?;
    for layer in (0..top.0).rev().map(LayerIndex) {
        tracker.layer(layer)?;
        dtail = replay.down(layer, dtail)?;
    }
    let end = Mark::now(device)?;
    let turns = replay.turns.iter().map(|(before, after)| before.seconds_to(after));
    let tail = turns.sum::<Result<f64, _>>()?;
    replay.done.seconds = Spent { up: start.seconds_to(&turned)?, down: turned.seconds_to(&end)?, tail };
    Ok(replay.done)
}

/// The layer that comes next on the way down.
fn below(layer: LayerIndex) -> Option<LayerIndex> {
    layer.0.checked_sub(1).map(LayerIndex)
}

impl Replay<'_> {
    /// What `layer` will need first of the answers sets out for the device, before the pages of the layer after the present one,
    /// which are longer.
    fn expect_answers(&self, layer: Option<LayerIndex>) -> Result<(), Failure> {
        let Some((first, layer)) = self.first_with_rows().zip(layer) else { return Ok(()) };
        self.states.prefetch_input(first, layer)?;
        Ok(self.states.prefetch_mixed(first, layer)?)
    }

    /// The first pack of which this rank has rows.
    fn first_with_rows(&self) -> Option<usize> {
        self.packs.iter().position(|pack| !pack.span.is_empty())
    }

    fn stage(&self, layer: LayerIndex, next: Option<LayerIndex>) -> Result<Staged, Failure> {
        Ok(self.captured.pages.stage(layer, next, self.pass.adapters.stamp())?)
    }

    /// The top layer: every pack's forward, the answers' losses and the first step back; then the tail's.
    fn top(&mut self, layer: LayerIndex) -> Result<Option<Tensor>, Failure> {
        self.expect_answers(Some(layer))?;
        self.expect_answers(below(layer))?;
        let staged = self.stage(layer, self.after(layer))?;
        let past = Past::of_answers(&staged, &self.work.layout);
        let mut gradient = PastGradient::zeros(&past, self.pass.decoder.mixer(layer).gradient_planes());
        let first = self.first_tokens();
        let packs = std::mem::take(&mut self.packs);
        let last = packs.iter().rposition(|pack| !pack.span.is_empty());
        if last.is_none() {
            self.expect_tail(Some(layer))?;
        }
        for (index, pack) in packs.iter().enumerate() {
            if pack.span.is_empty() {
                let _ = self.top_of(pack, &self.no_rows(), first.as_ref())?;
                continue;
            }
            let x_rw = self.states.input(index, layer)?;
            let choices = self.captured.choices.of_packed(&pack.sequences);
            let y_rw = self.pass.forward(layer, &pack.span, &x_rw, &past, choices)?;
            let dy_rw = self.top_of(pack, &y_rw, first.as_ref())?;
            drop(y_rw);
            if last == Some(index) {
                // Beside the last step back, when the answers' logits have been let go.
                self.expect_tail(Some(layer))?;
            }
            let rows = SpanRows { span: &pack.span, x_tw: &x_rw, dy_tw: &dy_rw, choices };
            let dx_rw = self.pass.backward(layer, &rows, &past, None, &mut gradient, None)?;
            self.states.put_input(index, layer, &dx_rw)?;
        }
        self.packs = packs;
        let dlast = self.first_token_gradient(first.as_ref())?;
        let dtail = self.tail_start(dlast);
        self.tracker.enter(Phase::Sweep);
        self.tracker.layer(layer)?;
        self.tail(layer, &staged, dtail, gradient)
    }

    /// Head and loss of a pack's answers, one after another: the gradient of `y_rw`, this rank's rows of the last block.
    fn top_of(&mut self, pack: &Pack, y_rw: &Tensor, first: Option<&Tensor>) -> Result<Tensor, Failure> {
        let Pass { decoder, cp_group, .. } = *self.pass;
        let rank = cp_group.axis.rank();
        let dy_rw = y_rw.zeros_like();
        for ((index, y_rw), (_, dy_rw)) in pack.split(y_rw).zip(pack.split(&dy_rw)) {
            let answer = &self.work.answers[index];
            let first = first.map(|all| all.narrow(0, as_dim(from_index(index)), 1));
            let labels = self.work.labels(answer, rank);
            let rows = self.head.logprobs(decoder, &y_rw, &labels);
            self.means.push(self.targets.means(self.work, cp_group.axis, index, &rows, first.as_ref()));
            if !answer.span.is_empty() {
                let dlogprobs = self.loss(index, &rows, self.work.trained(answer, rank), |scores| &scores.rows);
                dy_rw.shallow_clone().copy_(&self.head.backward(decoder, &y_rw, &labels, &dlogprobs)?);
            }
            self.done.logprobs.0.push(Logprobs { rows, first });
        }
        Ok(dy_rw)
    }

    fn down(&mut self, layer: LayerIndex, dtail: Option<Tensor>) -> Result<Option<Tensor>, Failure> {
        self.expect_answers(below(layer))?;
        let staged = self.stage(layer, self.after(layer))?;
        let past = Past::of_answers(&staged, &self.work.layout);
        let mut gradient = PastGradient::zeros(&past, self.pass.decoder.mixer(layer).gradient_planes());
        for (index, pack) in self.packs.iter().enumerate().filter(|(_, pack)| !pack.span.is_empty()) {
            let above = LayerIndex(layer.0 + 1);
            let x_rw = self.states.input(index, layer)?;
            let dy_rw = self.states.input(index, above)?;
            let kept = self.states.mixed(index, layer)?;
            let mixed = kept.map(|(out, saved)| Mixed { out, saved: saved.into() });
            let choices = self.captured.choices.of_packed(&pack.sequences);
            let rows = SpanRows { span: &pack.span, x_tw: &x_rw, dy_tw: &dy_rw, choices };
            let dx_rw = self.pass.backward(layer, &rows, &past, None, &mut gradient, mixed)?;
            self.states.release_input(index, above);
            self.states.put_input(index, layer, &dx_rw)?;
        }
        self.tail(layer, &staged, dtail, gradient)
    }

    /// The layer from whose kept tail input that of `layer` has to be computed again, if it has to.
    fn fill_from(&self, layer: LayerIndex) -> Option<LayerIndex> {
        let span = self.work.layout.tail();
        let kept = layer.0 - layer.0 % self.captured.keeping.every;
        let due = !span.is_empty() && layer.0 != kept && self.filled_from != Some(kept);
        due.then_some(LayerIndex(kept))
    }

    /// The layer whose pages are asked for next, on the way down, after those of `layer`.
    fn after(&self, layer: LayerIndex) -> Option<LayerIndex> {
        self.fill_from(layer).or(below(layer))
    }

    /// The tail's turn in a layer: `gradient` is what the answers have left on its state. Every rank takes part, with
    /// or without rows.
    fn tail(
        &mut self,
        layer: LayerIndex,
        staged: &Staged,
        dtail: Option<Tensor>,
        gradient: PastGradient,
    ) -> Result<Option<Tensor>, Failure> {
        let Some(dy_tw) = dtail else { return Ok(None) };
        let start = Mark::now(self.pass.decoder.device())?;
        let layout = &self.work.layout;
        let span = layout.tail();
        self.fill_tail(layer, &span)?;
        self.choose_tail(layer, &span)?;
        let x_tw = self.tail_input(layer)?;
        self.expect_tail(below(layer))?;
        let rows = SpanRows { span: &span, x_tw: &x_tw, dy_tw: &dy_tw, choices: self.captured.tail_choices.of(0) };
        let dx_tw = if self.pass.travels(&span) {
            self.pass.backward_tail(layer, &rows, &self.travelling(&span, staged), gradient)?
        } else {
            let past = Past::of_tail(staged, layout);
            let mut constants = PastGradient::zeros(&past, self.pass.decoder.mixer(layer).gradient_planes());
            self.pass.backward(layer, &rows, &past, gradient.into_tail(), &mut constants, None)?
        };
        let slot = Slot { span: 0, layer };
        self.recomputed.release(slot);
        self.captured.tail_choices.release(Choice::Index, slot);
        self.turns.push((start, Mark::now(self.pass.decoder.device())?));
        Ok(Some(dx_tw))
    }

    /// The tail's block input in `layer`, on the device; no rows on a rank that has none.
    fn tail_input(&self, layer: LayerIndex) -> Result<StagedHidden, Failure> {
        let slot = Slot { span: 0, layer };
        let pools = [&self.recomputed, &self.captured.tail];
        let held = pools.into_iter().find(|pool| pool.holds(slot)).map(|pool| pool.stage(slot)).transpose()?;
        Ok(held.unwrap_or_else(|| StagedHidden::of(self.no_rows())))
    }

    /// What the tail will need in the layer that comes next sets out for the device.
    fn expect_tail(&self, layer: Option<LayerIndex>) -> Result<(), Failure> {
        let Some(layer) = layer else { return Ok(()) };
        let slot = Slot { span: 0, layer };
        for pool in [&self.recomputed, &self.captured.tail] {
            pool.prefetch(slot)?;
        }
        Ok(self.captured.mixed.prefetch(layer)?)
    }

    /// Computes the tail's input of `layer` again, from the nearest layer below whose input was kept, and those of the
    /// layers between with it: going down, they come next. Every rank takes part, with or without rows.
    fn fill_tail(&mut self, layer: LayerIndex, span: &Span) -> Result<(), Failure> {
        let Some(kept) = self.fill_from(layer) else { return Ok(()) };
        for under in (kept.0..layer.0).map(LayerIndex) {
            let above = LayerIndex(under.0 + 1);
            // After the last of them the sweep goes on from the layer below this one.
            let next = if above < layer { Some(above) } else { below(layer) };
            self.choose_tail(under, span)?;
            let staged = self.stage(under, next)?;
            let x_tw = self.tail_input(under)?;
            let y_tw = self.pass.forward_tail(under, &x_tw, &self.travelling(span, &staged))?;
            if y_tw.size()[0] > 0 {
                self.recomputed.put(Slot { span: 0, layer: above }, &y_tw)?;
            }
        }
        self.filled_from = Some(kept.0);
        Ok(())
    }

    /// Chooses the keys of a long tail's rows for `layer` again, where they are not held: going down, a layer that borrows them
    /// comes before the one that chose. Every rank takes part, with or without rows.
    fn choose_tail(&mut self, layer: LayerIndex, span: &Span) -> Result<(), Failure> {
        let Some(owner) = self.pass.decoder.index_owner(layer) else { return Ok(()) };
        let slot = Slot { span: 0, layer: owner };
        if self.captured.tail_choices.holds(Choice::Index, slot) {
            return Ok(());
        }
        let filled_from = self.filled_from;
        if owner < layer {
            self.fill_tail(owner, span)?;
        }
        let staged = self.stage(owner, Some(layer))?;
        let x_tw = self.tail_input(owner)?;
        self.pass.choose_tail(owner, &x_tw, &self.travelling(span, &staged))?;
        drop((x_tw, staged));
        self.filled_from = filled_from;
        Ok(())
    }

    fn travelling<'b>(&'b self, span: &'b Span, staged: &'b Staged) -> Tail<'b> {
        let kept = self.captured.keeping.attention.then_some(&self.captured.mixed);
        let choices = self.captured.tail_choices.of(0);
        Tail { span, layout: &self.work.layout, staged, kept, choices }
    }

    fn no_rows(&self) -> Tensor {
        Tensor::zeros([0, self.pass.decoder.width()], (self.pass.decoder.kind(), self.pass.decoder.device()))
    }

    /// Log-probabilities of all first tokens, [answers], on the rank that owns row P−1.
    fn first_tokens(&self) -> Option<Tensor> {
        let x_1w = self.captured.last_row.as_ref()?;
        Some(self.head.logprobs_of_row(self.pass.decoder, x_1w, &self.work.first_labels()))
    }

    /// Adds the first tokens to the loss; returns the gradient of row P−1, [1, w], summed over the group.
    fn first_token_gradient(&mut self, first: Option<&Tensor>) -> Result<Option<Tensor>, Failure> {
        let (Some(all), Some(x_1w)) = (first, self.captured.last_row.as_ref()) else { return Ok(None) };
        let dlogprobs: Vec<Tensor> = (0..self.work.answers.len())
            .map(|index| {
                let logprobs = all.narrow(0, as_dim(index as u64), 1);
                let trained = self.work.answers[index].first_is_trained();
                self.loss(index, &logprobs, trained, |scores| {
                    scores.first.as_ref().expect("the owner scored the first token")
                })
            })
            .collect();
        let gradient = Tensor::cat(&dlogprobs, 0);
        Ok(Some(self.head.backward_of_row(self.pass.decoder, x_1w, &self.work.first_labels(), &gradient)?))
    }

    /// The gradient with which the tail enters the sweep: zero but for row P−1. `None` if no row carries gradient.
    fn tail_start(&self, dlast: Option<Tensor>) -> Option<Tensor> {
        let tail = self.work.layout.tail();
        if tail.is_empty() {
            return None;
        }
        let rows: i64 = tail.of(self.pass.cp_group.axis.rank()).map(|piece| piece.rows().dim()).sum();
        let kind = (self.pass.decoder.kind(), self.pass.decoder.device());
        let dtail = Tensor::zeros([rows, self.pass.decoder.width()], kind);
        if let Some(dlast) = dlast {
            dtail.narrow(0, rows - 1, 1).copy_(&dlast);
        }
        Some(dtail)
    }

    /// Adds tokens of one answer to this rank's loss and returns the gradient of their log-probabilities, as
    /// [`ReplayTargets::tokens`] takes them.
    fn loss(
        &mut self,
        index: usize,
        logprobs: &Tensor,
        trained: Option<Tensor>,
        part: impl Fn(&Logprobs) -> &Tensor,
    ) -> Tensor {
        let Some(added) = self.targets.tokens(index, logprobs, trained, self.means[index], part) else {
            return logprobs.zeros_like();
        };
        self.done.loss += added.loss;
        self.done.stats.add(added.stats);
        self.done.ratio = Range::cover(self.done.ratio, added.ratio);
        added.dlogprobs
    }
}
