//! The plan: the rank layout, the memory of a rank as a sum with a reason for each addend, and the seconds of a group by
//! phase. No GPU and no MPI are needed.
//!
//! ```text
//!   sum                  every addend, in one list
//!     sizes              lengths and widths that addends share, and what stays for the whole run
//!     weights            frozen weights, and what stays while they are dequantised
//!     phases, rollout    what capture, replay, sweep and sampling add
//!     special            what only some families have: choices, gathered keys
//!     delta              layers with a gated delta rule: states at borders, maps of pieces, rows, calls of the rule
//!     block              one micro-block of a layer: experts, attention over gathered keys
//!   choose               picks what the configuration leaves open
//!   micro_block          rows of a micro-block, where they are left open
//!   budget               the plan: the layout, the peak of the sum, and what does not fit
//!   work, operations     operations and bytes by phase, and those of one layer
//!   seconds              work divided by rates, and the bytes of a sampled token (drawing)
//!   measured             seconds from what `bench --rates` has measured
//!   predict              the prediction, by published rates or by measured ones
//!   split                ranks that share a prompt by prompts side by side: a table, and the fastest that fits
//!   record_counts        what records lack that rewards read
//!   lengths, forecast    real lengths of the data; hours, requests, tokens and disk of a whole run
//!   advice               all of these beside the plan
//!   ladder, text         the plan of every gate, and the plan in words
//! ```
//!
//! What a run measures is a second number, compared with the plan in the receipt; it never comes from the same formula.

mod addend;
mod advice;
mod block;
mod budget;
mod delta;
mod drawing;
mod error;
mod forecast;
mod judged;
pub mod ladder;
mod lengths;
pub mod measured;
mod micro_block;
mod offload;
mod offload_choice;
mod operations;
mod phases;
mod predict;
mod record_counts;
mod rollout;
pub mod seconds;
mod sizes;
mod special;
mod split;
mod sum;
mod text;
mod weights;
mod work;

pub use crate::runtime::memory::available_memory;
pub use addend::{Addend, Group, Place};
pub use advice::Advice;
pub use budget::{Plan, Room};
pub use drawing::{TokenReads, token_bytes};
pub use error::Error;
pub use forecast::{Counted, Forecast};
pub use lengths::Lengths;
pub use micro_block::{MicroBlock, RowsBecause, micro_block, planned_rows};
pub use offload::{context_note, gib, of, of_at_most, of_shape};
pub use operations::{Amount, delta_row};
pub use predict::Pace;
pub use rollout::Rollout;
pub use split::{Split, SplitBecause, Splits, choose, is_open, model_folder, shared_out, splits};
