//! longstraw: GRPO training on prompts of up to millions of tokens, on a fixed handful of GPUs.
//!
//! The shared prompt is captured once without autograd onto pages that exactly one rank owns; answers are replayed one
//! at a time against it; adapter gradients are summed over ranks once. A module imports only from the rows above it in
//! this list; `tests/tidy.rs` holds the table.

// Row 0.
pub mod failure;
pub mod units;
pub mod watch;

// Row 1.
pub mod config;

// Row 2.
pub mod endpoint;
pub mod tensor;
pub mod world;

// Row 3.
pub mod data;
pub mod devices;
pub mod layout;
pub mod pages;

// Row 4.
pub mod exchange;
pub mod handoff;
pub mod objective;

// Row 5.
pub mod model;

// Row 6.
pub mod capture;
pub mod checkpoint;
pub mod finalize;
pub mod optimizer;
pub mod replay;
pub mod reward;
pub mod rollout;
pub mod score;

// Row 7.
pub mod report;

// Row 8.
pub mod conventional;
pub mod convert;
pub mod doctor;
pub mod generate;
pub mod parity;
pub mod plan;
pub mod review;
pub mod trainer;

// Row 9.
pub mod bench;
pub mod gate;
pub mod study;
