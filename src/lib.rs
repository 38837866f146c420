//! longstraw: GRPO training on prompts of up to millions of tokens, on a fixed handful of GPUs.
//!
//! The shared prompt is captured once without autograd onto pages that exactly one rank owns; answers are replayed one
//! at a time against it; adapter gradients are summed over ranks once. A module imports only from the rows above it in
//! this list; `tests/tidy.rs` holds the table.

// Row 0.
pub mod failure;
pub mod units;

// Row 3.
pub mod data;

// Row 8.
pub mod convert;
