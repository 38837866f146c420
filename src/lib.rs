//! longstraw: GRPO training on prompts of up to millions of tokens, on a fixed handful of GPUs.
//!
//! The shared prompt is captured once without autograd onto pages that exactly one rank owns; answers are replayed
//! against it, each seeing the prompt and itself; adapter gradients are summed over ranks once. A module imports only from the rows above it in
//! this list; `tests/tidy.rs` holds the table.

// Row 0.
pub mod runtime;

// Row 1.
pub mod config;

// Row 2.
pub mod endpoint;
pub mod program;
pub mod tensor;
pub mod world;

// Row 3.
pub mod data;
pub mod prompt;

// Row 4.
pub mod model;

// Row 5.
pub mod step;

// Row 6.
pub mod calls;
pub mod checkpoint;
pub mod plan;
pub mod report;
pub mod reward;

// Row 7.
pub mod train;

// Row 8.
pub mod tools;
