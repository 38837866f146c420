//! The state that earlier positions left on this rank, and its gradient.

use tch::{Kind, Tensor};

use super::planes::Planes;
use crate::prompt::layout::PromptLayout;
use crate::prompt::pages::{Slab, Staged};
use crate::runtime::units::Position;
use crate::tensor::accumulation;

/// Where in a layer's borders the state before the tail stands, and that at the prompt's end.
const CUT: i64 = 0;
const END: i64 = 1;

/// State that earlier positions left on this rank: runs in position order, cut at the tail's start.
#[derive(Debug, Default)]
pub struct Past {
    /// In position order.
    pub runs: Vec<PastRun>,
}

/// State of consecutive positions.
#[derive(Debug)]
pub struct PastRun {
    /// The first position. State that stands at a border is one row: the state before this position.
    pub start: Position,
    /// The mixer's state planes; for attention one row a position.
    pub state: Planes,
    /// Whether these rows carry gradient, or are constants.
    pub carries_gradient: bool,
}

impl Past {
    /// What an answer sees: every filled page row, those before the tail as constants.
    #[must_use]
    pub fn of_answers(staged: &Staged, layout: &PromptLayout) -> Past {
        Self::at_border(staged, END, layout.end(), layout.cut() < layout.end())
            .unwrap_or_else(|| Self::before(staged, layout, layout.end()))
    }

    /// What the tail sees: the page rows before it, constants all.
    #[must_use]
    pub fn of_tail(staged: &Staged, layout: &PromptLayout) -> Past {
        Self::at_border(staged, CUT, layout.cut(), false).unwrap_or_else(|| Self::before(staged, layout, layout.cut()))
    }

    /// Every filled page row as a constant, in as few runs as there are.
    #[must_use]
    pub fn without_gradient(staged: &Staged, layout: &PromptLayout) -> Past {
        if let Some(past) = Self::at_border(staged, END, layout.end(), false) {
            return past;
        }
        let filled = staged.slabs().iter().filter(|slab| slab.run.rows().0 > 0);
        let run = |slab: &Slab| PastRun { start: slab.run.start, state: slab.filled().into(), carries_gradient: false };
        Past { runs: filled.map(run).collect() }
    }

    /// The state at one of the prompt's borders, in layers that have it there.
    fn at_border(staged: &Staged, border: i64, start: Position, carries_gradient: bool) -> Option<Past> {
        let planes: Vec<Tensor> = staged.borders().iter().map(|plane| plane.narrow(0, border, 1)).collect();
        (!planes.is_empty()).then(|| Past { runs: vec![PastRun { start, state: planes.into(), carries_gradient }] })
    }

    /// The filled page rows of positions before `end`, in runs that do not cross the tail's start.
    fn before(staged: &Staged, layout: &PromptLayout, end: Position) -> Past {
        let mut runs = Vec::new();
        for slab in staged.slabs() {
            let run = slab.run;
            for (start, stop, carries_gradient) in
                [(run.start, run.stop.min(layout.cut()), false), (run.start.max(layout.cut()), run.stop.min(end), true)]
            {
                if start < stop {
                    let first = start.since(run.start).dim();
                    let rows = stop.since(start).dim();
                    let state: Vec<_> = slab.planes.iter().map(|plane| plane.narrow(0, first, rows)).collect();
                    runs.push(PastRun { start, state: state.into(), carries_gradient });
                }
            }
        }
        Past { runs }
    }
}

/// State or its gradient in both chunks of this rank (see `prompt::layout`), each with the mixer's state planes.
#[derive(Debug, Default)]
pub struct ChunkState {
    /// Rows of the chunk that stands earlier in the prompt.
    pub early: Planes,
    /// Rows of the other chunk.
    pub late: Planes,
}

impl ChunkState {
    /// Filled state rows of the two chunks in `slabs`; views.
    #[must_use]
    pub fn filled(slabs: &[Slab]) -> ChunkState {
        ChunkState { early: slabs[0].filled().into(), late: slabs[1].filled().into() }
    }

    /// The planes of the early chunk, then those of the late one.
    #[must_use]
    pub fn into_tensors(self) -> Vec<Tensor> {
        self.early.into_tensors().into_iter().chain(self.late.into_tensors()).collect()
    }

    /// The reverse of [`ChunkState::into_tensors`].
    #[must_use]
    pub fn from_tensors(mut early: Vec<Tensor>) -> ChunkState {
        let late = early.split_off(early.len() / 2);
        ChunkState { early: early.into(), late: late.into() }
    }

    /// All rows in position order, in dtype `kind`.
    #[must_use]
    pub fn join(self, kind: Kind) -> Planes {
        let join = |(early, late): (Tensor, Tensor)| {
            let mut shape = early.size();
            let rows = [early.size()[0], late.size()[0]];
            shape[0] = rows.iter().sum();
            // Written in place: the chunks are not joined in their own dtype first.
            let joined = Tensor::empty(shape, (kind, early.device()));
            joined.narrow(0, 0, rows[0]).copy_(&early);
            joined.narrow(0, rows[0], rows[1]).copy_(&late);
            joined
        };
        self.early.into_tensors().into_iter().zip(self.late.into_tensors()).map(join).collect::<Vec<_>>().into()
    }
}

/// Gradient of the past, in the accumulation dtype.
#[derive(Debug, Default)]
pub struct PastGradient {
    /// One entry for each run of the past; `None` for a run of constants.
    pub runs: Vec<Option<Planes>>,
}

impl PastGradient {
    /// Zeros for the first `planes` state planes of every run that carries gradient.
    #[must_use]
    pub fn zeros(past: &Past, planes: usize) -> PastGradient {
        let zeros = |run: &PastRun| run.carries_gradient.then(|| run.state.first(planes).zero_gradient());
        PastGradient { runs: past.runs.iter().map(zeros).collect() }
    }

    /// The gradient of the tail's state in each chunk of this rank; no rows where a chunk lies before the tail. `slabs` are
    /// the chunks that the past was made of, `planes` is the number of planes that carry gradient.
    #[must_use]
    pub fn into_chunks(self, slabs: &[Slab], layout: &PromptLayout, planes: usize) -> ChunkState {
        let mut runs = self.runs.into_iter().flatten();
        let mut chunk = |slab: &Slab| {
            if slab.run.stop > layout.cut() && slab.run.rows().0 > 0 {
                return runs.next().unwrap_or_default();
            }
            let no_rows =
                slab.planes.iter().take(planes).map(|plane| plane.narrow(0, 0, 0).to_kind(accumulation(plane.kind())));
            Planes::from(no_rows.map(|plane| plane.contiguous()).collect::<Vec<_>>())
        };
        let early = chunk(&slabs[0]);
        let late = chunk(&slabs[1]);
        ChunkState { early, late }
    }

    /// The gradient of this rank's tail rows in position order; `None` where it has none.
    #[must_use]
    pub fn into_tail(self) -> Option<Planes> {
        let runs: Vec<Planes> = self.runs.into_iter().flatten().collect();
        (!runs.is_empty()).then(|| Planes::join(runs))
    }
}
