//! What a mixer is: the part of a block in which rows meet, and the only one that talks to other ranks.

use std::ops::Range;

use tch::Tensor;

use super::answers::AnswerState;
use crate::prompt::layout::{Piece, PromptLayout, Span};
use crate::prompt::pages::{PlaneRow, Slab, Staged};
use crate::runtime::memory::Ledger;
use crate::runtime::units::Position;
use crate::tensor::accumulation;
use crate::world::Axis;

/// This rank's `cp_group` among the ranks that share a prompt.
#[derive(Clone, Copy)]
pub struct CpGroup<'a> {
    /// Those ranks.
    pub axis: &'a Axis,
    /// Where bytes are counted.
    pub ledger: &'a Ledger,
}

/// State that earlier positions left on this rank: filled rows of page runs, cut at the tail's start.
#[derive(Debug, Default)]
pub struct Past {
    /// In position order.
    pub runs: Vec<PastRun>,
}

/// Consecutive positions of the past.
#[derive(Debug)]
pub struct PastRun {
    /// The first position.
    pub start: Position,
    /// One tensor a plane, rows first.
    pub planes: Vec<Tensor>,
    /// Whether these rows carry gradient, or are constants.
    pub carries: bool,
}

impl Past {
    /// What an answer sees: every filled page row, those before the tail as constants.
    #[must_use]
    pub fn of_answers(staged: &Staged, layout: &PromptLayout) -> Past {
        Self::between(staged, layout, layout.end())
    }

    /// What the tail sees: the page rows before it, constants all.
    #[must_use]
    pub fn of_tail(staged: &Staged, layout: &PromptLayout) -> Past {
        Self::between(staged, layout, layout.cut())
    }

    /// Every filled page row, whether it carries gradient or not, in as few runs as there are.
    #[must_use]
    pub fn without_gradient(staged: &Staged) -> Past {
        let filled = staged.slabs.iter().filter(|slab| slab.run.rows().0 > 0);
        let run = |slab: &Slab| PastRun { start: slab.run.start, planes: slab.filled(), carries: false };
        Past { runs: filled.map(run).collect() }
    }

    fn between(staged: &Staged, layout: &PromptLayout, end: Position) -> Past {
        let mut runs = Vec::new();
        for slab in &staged.slabs {
            let run = slab.run;
            for (start, stop, carries) in
                [(run.start, run.stop.min(layout.cut()), false), (run.start.max(layout.cut()), run.stop.min(end), true)]
            {
                if start < stop {
                    let (first, rows) = (start.since(run.start).dim(), stop.since(start).dim());
                    let planes = slab.planes.iter().map(|plane| plane.narrow(0, first, rows)).collect();
                    runs.push(PastRun { start, planes, carries });
                }
            }
        }
        Past { runs }
    }
}

/// Gradient of the past: for each run that carries gradient, one tensor a plane, in the accumulation dtype.
#[derive(Debug, Default)]
pub struct PastGradient {
    /// Empty for a run of constants.
    pub runs: Vec<Vec<Tensor>>,
}

impl PastGradient {
    /// Nothing yet.
    #[must_use]
    pub fn zeros(past: &Past) -> PastGradient {
        let zeros = |plane: &Tensor| plane.zeros_like().to_kind(accumulation(plane.kind()));
        let runs = past.runs.iter();
        let runs = runs.map(|run| if run.carries { run.planes.iter().map(zeros).collect() } else { Vec::new() });
        PastGradient { runs: runs.collect() }
    }

    /// The gradient of the tail's state in each of this rank's chunks, one tensor a plane; no rows where a chunk lies
    /// before the tail. `slabs` are the chunks that the past was made of.
    #[must_use]
    pub fn into_chunks(self, slabs: &[Slab], layout: &PromptLayout) -> [Vec<Tensor>; 2] {
        let mut runs = self.runs.into_iter().filter(|planes| !planes.is_empty());
        let empty = |slab: &Slab| {
            slab.planes
                .iter()
                .map(|plane| plane.narrow(0, 0, 0).to_kind(accumulation(plane.kind())).contiguous())
                .collect()
        };
        let chunk = |slab: &Slab| {
            if slab.run.stop > layout.cut() && slab.run.rows().0 > 0 {
                runs.next().unwrap_or_default()
            } else {
                empty(slab)
            }
        };
        let mut chunks: Vec<Vec<Tensor>> = slabs.iter().map(chunk).collect();
        let second = chunks.pop().unwrap_or_default();
        [chunks.pop().unwrap_or_default(), second]
    }

    /// The gradient of this rank's tail rows, one tensor a plane, in position order; `None` where it has none.
    #[must_use]
    pub fn into_tail(self) -> Option<Vec<Tensor>> {
        let runs: Vec<_> = self.runs.into_iter().filter(|planes| !planes.is_empty()).collect();
        let planes = runs.first()?.len();
        let joined = |plane: usize| Tensor::cat(&runs.iter().map(|run| &run[plane]).collect::<Vec<_>>(), 0);
        Some((0..planes).map(joined).collect())
    }
}

/// What a mixer's forward leaves for its backward.
#[derive(Debug)]
pub struct Mixed {
    /// Output for this rank's rows, in the model's dtype.
    pub out: Tensor,
    /// Whatever else the backward needs; for attention the merged log-sum-exp.
    pub saved: Vec<Tensor>,
}

/// Mixes rows of a span with each other and with the past.
pub trait Mixer {
    /// What one position leaves behind for later ones, a row for each plane.
    fn planes(&self) -> Vec<PlaneRow>;

    /// Elements of a row of what [`Mixer::capture`] returns: its output, in the model's dtype, and what is saved beside it,
    /// in the accumulation dtype.
    fn kept_row(&self) -> (u64, u64);

    /// Segment A's output as what rows ask with and the state that they leave behind, one tensor a plane each.
    fn split(&self, mix: Vec<Tensor>) -> (Vec<Tensor>, Vec<Tensor>);

    /// Prompt rows against all of the prompt: rows stay, state travels. `blocks` are this rank's rows in position order
    /// with what they ask with; `own` are this rank's filled state rows of both its chunks. Returns what each block's
    /// rows make of it.
    fn capture(
        &self,
        cp_group: &CpGroup,
        layout: &PromptLayout,
        blocks: &[(Piece, Vec<Tensor>)],
        own: [Vec<Tensor>; 2],
    ) -> Vec<Mixed>;

    /// What [`Mixer::capture`] returns for blocks without rows, without talking to other ranks.
    fn nothing(&self, blocks: &[(Piece, Vec<Tensor>)]) -> Vec<Mixed>;

    /// Backward of [`Mixer::capture`] for the tail's rows: state and the gradients of it travel. `own_gradient` are the
    /// gradients that later rows have left on this rank's state of the tail in both its chunks; they come back complete.
    /// Returns the gradient of what each block asked with.
    fn sweep(
        &self,
        cp_group: &CpGroup,
        layout: &PromptLayout,
        blocks: Vec<Swept>,
        own: [Vec<Tensor>; 2],
        own_gradient: &mut [Vec<Tensor>; 2],
    ) -> Vec<Vec<Tensor>>;

    /// The same maths in differentiable operations, for `conventional`: rows at `positions` with what they ask, against
    /// the state of all positions from 0 to the last row's. `fused` takes the library's own kernel where there is one,
    /// as a conventional trainer would; otherwise plain products, which take rows × positions of memory.
    fn plain(&self, positions: Range<i64>, ask: &[Tensor], state: &[Tensor], fused: bool) -> Tensor;

    /// A span's rows against the past and themselves. `mix` is segment A's output for this rank's rows, in position
    /// order, possibly none.
    fn forward(&self, cp_group: &CpGroup, span: &Span, mix: &[Tensor], past: &Past) -> Mixed;

    /// One row of each of several answers, all at one position: against the prompt, the answers' own earlier rows, and
    /// themselves, no graph. `ask` are the same rows on every rank, first dimension answers; `prompt` is what this rank owns
    /// of the prompt, `own` what it keeps of the answers, these rows included. Every rank gets the same bits.
    fn draw(&self, cp_group: &CpGroup, ask: &[Tensor], prompt: &Past, own: &AnswerState) -> Tensor;

    /// Backward of [`Mixer::forward`]. `dout` is the gradient of this rank's output; `later` what later rows have left on
    /// this span's own state. Adds to `past_gradient` and returns the gradient of each tensor of `mix`.
    fn backward(&self, cp_group: &CpGroup, backward: Backward, past_gradient: &mut PastGradient) -> Vec<Tensor>;
}

/// One block of the tail's rows on its way back.
#[derive(Debug)]
pub struct Swept {
    /// The rows.
    pub piece: Piece,
    /// What they asked with.
    pub ask: Vec<Tensor>,
    /// What [`Mixer::capture`] returned for them.
    pub mixed: Mixed,
    /// Gradient of its output.
    pub dout: Tensor,
}

/// Everything a mixer's backward reads.
#[derive(Debug)]
pub struct Backward<'a> {
    /// The rows.
    pub span: &'a Span,
    /// Segment A's output for this rank's rows.
    pub mix: &'a [Tensor],
    /// The past of the forward.
    pub past: &'a Past,
    /// What the forward returned.
    pub mixed: &'a Mixed,
    /// Gradient of this rank's output.
    pub dout: &'a Tensor,
    /// Gradient that later rows have left on this span's own state, one tensor a plane; `None` where there are none.
    pub later: Option<Vec<Tensor>>,
}
