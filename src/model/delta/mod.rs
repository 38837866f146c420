//! The gated delta rule as a mixer: a short causal convolution, then a state that goes from row to row.
//!
//! How it departs from the textbook:
//!
//! 1. Every rank's pieces of a span run at once. A piece is an affine map of the state before it, `S_out = T S + B`; the maps of
//!    all pieces are gathered, composed in the order of positions, and only then outputs are computed. No rank waits for
//!    another's rows. In backward D = Cᵀ dO of every piece is gathered, and `dS_in = Tᵀ dS_out + D` is composed in reverse.
//! 2. The convolution reads rows before its piece: the last ones of every piece are gathered, since a piece may be shorter than
//!    the convolution. Their gradient goes back the same way.
//! 3. No position leaves a row on a page. The state stands at two borders of the prompt, before its tail and at its end, the
//!    same on every rank, and every answer starts from the latter without touching it.
//!
//! States, maps and their gradients are of the accumulation dtype whatever the model's.

mod border;
mod mixing;
mod order;
mod rule;

pub use border::Border;
pub use rule::{DeltaWeights, GatedDelta};
