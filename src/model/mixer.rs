//! What a mixer is: the part of a block in which rows meet, and the only one that talks to other ranks.
//!
//! Phases and [`super::pass`] carry queries, state and gradients as [`Planes`]; a mixer converts them to structs of its
//! own with named fields. So the state need not be keys and values.

use std::ops::Range;

use tch::Tensor;

use super::answers::AnswerState;
use super::delta::GatedDelta;
use super::latent::{LatentAttention, LentIndex};
use super::past::{ChunkState, Past, PastGradient};
use super::planes::Planes;
use crate::prompt::layout::{Piece, PromptLayout, Span};
use crate::prompt::pages::{PlaneRow, StateRows};
use crate::runtime::memory::Ledger;
use crate::tensor;
use crate::world::Axis;

/// This rank among the ranks that share a prompt.
#[derive(Clone, Copy)]
pub struct CpGroup<'a> {
    /// Ranks that share the prompt.
    pub axis: &'a Axis,
    /// Ranks that hold the experts of a layer together; part of `axis`.
    pub ep: &'a Axis,
    /// Counts the bytes that the mixer holds.
    pub ledger: &'a Ledger,
}

/// What segment A gives the mixer for some rows; or the gradient of it.
#[derive(Debug, Default)]
pub struct MixerInput {
    /// What the rows themselves need; stays with them.
    pub queries: Planes,
    /// What the rows leave behind for later rows.
    pub state: Planes,
}

/// What a mixer's forward leaves for its backward.
#[derive(Debug)]
pub struct Mixed {
    /// Output for this rank's rows, in the model's dtype.
    pub out: Tensor,
    /// What else the backward needs, in the accumulation dtype: of attention the merged log-sum-exp by row, of the delta rule
    /// states and maps.
    pub saved: Planes,
}

/// Elements of one row of [`Mixed`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MixedRow {
    /// Elements of the output.
    pub out: u64,
    /// Elements of all saved planes.
    pub saved: u64,
}

/// Queries of consecutive prompt rows.
#[derive(Debug)]
#[expect(missing_docs, reason = "the names say everything")]
pub struct BlockQueries {
    pub piece: Piece,
    pub queries: Planes,
}

/// What the backward of [`RingMixer::capture`] reads of consecutive tail rows.
#[derive(Debug)]
pub struct BlockBackward {
    /// The rows and their queries.
    pub block: BlockQueries,
    /// What [`RingMixer::capture`] returned for them.
    pub mixed: Mixed,
    /// Gradient of the output.
    pub dout: Tensor,
}

/// What [`RingMixer::capture_backward`] returns.
#[derive(Debug)]
pub struct CaptureGradient {
    /// Gradient of each block's queries.
    pub queries: Vec<Planes>,
    /// Complete gradient of this rank's tail state in both chunks, in the accumulation dtype.
    pub state: ChunkState,
}

/// What [`Mixer::backward`] reads.
#[derive(Debug)]
pub struct Backward<'a> {
    /// Rows of the forward.
    pub span: &'a Span,
    /// Input of the forward.
    pub input: &'a MixerInput,
    /// Past of the forward.
    pub past: &'a Past,
    /// Output of the forward.
    pub mixed: &'a Mixed,
    /// Gradient of this rank's output.
    pub dout: &'a Tensor,
    /// Gradient that later rows have left on this span's own state, or on the state at its end; `None` where there are none.
    pub later: Option<Planes>,
    /// Keys of the rows, in layers that choose them.
    pub index: Option<LentIndex<'a>>,
}

/// How the rows of a long prompt and the state of all ranks meet.
#[derive(Clone, Copy)]
pub enum Route<'a> {
    /// State travels past every rank's rows, run by run.
    Ring(&'a dyn RingMixer),
    /// Every rank gathers the state of all.
    Gathered(&'a LatentAttention),
    /// A state goes from row to row, and ranks gather the maps of their rows.
    Recurrent(&'a GatedDelta),
}

/// Mixes rows of a span with each other and with the past.
pub trait Mixer {
    /// The state planes: shape and dtype of the row that one position leaves behind.
    fn planes(&self) -> Vec<PlaneRow>;

    /// Shape and dtype of what stands at a border between positions; none where positions leave rows.
    fn border_planes(&self) -> Vec<PlaneRow> {
        Vec::new()
    }

    /// What a layer's state consists of.
    fn state_rows(&self) -> StateRows {
        StateRows { page: self.planes(), border: self.border_planes() }
    }

    /// Size of a row of [`Mixed`].
    fn mixed_row(&self) -> MixedRow;

    /// How many planes of the past carry gradient: the first ones.
    fn gradient_planes(&self) -> usize {
        self.planes().len()
    }

    /// How the rows of a long prompt meet the state of all ranks.
    fn route(&self) -> Route<'_>;

    /// Whether forward and backward tell the sequences of a packed span apart. Other mixers never get one.
    fn tells_sequences_apart(&self) -> bool {
        false
    }

    /// The same maths in differentiable operations, for `conventional`: rows at `positions` against the state of all
    /// positions from 0 to the last row's. `fused` takes the library's own kernel where there is one, as a conventional
    /// trainer would; otherwise plain products, which take rows × positions of memory. `index`
    /// holds the rows' keys in layers that choose them; so it does below.
    fn plain(
        &self,
        positions: Range<i64>,
        queries: &Planes,
        state: &Planes,
        index: Option<LentIndex>,
        fused: bool,
    ) -> Tensor;

    /// A span's rows against the past, all of which stands before them, and themselves. `input` is that of this rank's rows in
    /// position order, possibly none; of a packed span sequence after sequence.
    fn forward(
        &self,
        cp_group: &CpGroup,
        span: &Span,
        input: &MixerInput,
        past: &Past,
        index: Option<LentIndex>,
    ) -> Mixed;

    /// One new row of each of several answers, all at one position, against the prompt, the answers' own earlier rows and
    /// themselves; no graph. `rows` are the same on every rank, first dimension answers; `prompt` is this rank's part of the
    /// prompt, `own` its part of the answers with these rows on its planes. Every rank gets the same bits.
    fn decode(
        &self,
        cp_group: &CpGroup,
        rows: &MixerInput,
        prompt: &Past,
        own: &mut AnswerState,
        index: Option<LentIndex>,
    ) -> Tensor;

    /// Backward of [`Mixer::forward`]: adds to `past_gradient` and returns the gradient of the input in the model's dtype.
    ///
    /// # Errors
    /// When libtorch refuses.
    fn backward(
        &self,
        cp_group: &CpGroup,
        backward: Backward,
        past_gradient: &mut PastGradient,
    ) -> Result<MixerInput, tensor::Error>;
}

/// A mixer whose state travels round the ranks while the prompt's rows stay.
pub trait RingMixer: Mixer {
    /// Prompt rows against the prompt up to themselves: rows stay, state travels. `blocks` are this rank's rows in position
    /// order, `own` its filled state rows.
    fn capture(
        &self,
        cp_group: &CpGroup,
        layout: &PromptLayout,
        blocks: &[BlockQueries],
        own: ChunkState,
    ) -> Vec<Mixed>;

    /// What [`RingMixer::capture`] returns for blocks without rows, without messages.
    fn capture_no_rows(&self, blocks: &[BlockQueries]) -> Vec<Mixed>;

    /// Backward of [`RingMixer::capture`] for the tail's rows: state travels with the gradient of it. `later` is the gradient
    /// that later rows have left on this rank's tail state.
    fn capture_backward(
        &self,
        cp_group: &CpGroup,
        layout: &PromptLayout,
        blocks: Vec<BlockBackward>,
        own: ChunkState,
        later: ChunkState,
    ) -> CaptureGradient;
}
