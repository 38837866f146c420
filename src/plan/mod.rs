//! The plan: the rank layout, the memory of a rank as a sum with a reason for each addend, and the seconds of a group by
//! phase. No GPU and no MPI are needed.
//!
//! ```text
//!   sum      the addends, in one list     sizes    lengths and widths that addends share, and what stays for the whole run
//!   phases   capture, replay, sweep       rollout  sampled answers          special  what dense decoders do not have
//!   work     operations and bytes by phase         seconds  work divided by rates
//!   choose   picks what the configuration leaves open     budget   the plan: sums it up and refuses what does not fit
//!   ladder   the plan of every gate                text     the plan in words
//! ```
//!
//! What a run measures is a second number, compared with the plan in the receipt; it never comes from the same formula.

mod addend;
mod budget;
mod choice;
mod choose;
mod error;
pub mod ladder;
mod phases;
mod rollout;
pub mod seconds;
mod sizes;
mod special;
mod sum;
mod text;
mod work;

pub use crate::runtime::memory::available_memory;
pub use addend::{Addend, Group, Place};
pub use budget::{Plan, Room};
pub use choose::{context_note, gib, of, of_shape};
pub use error::Error;
pub use rollout::Rollout;
