//! One training step. `transaction` says what a group goes through; the phases, which never import each other, do it; and
//! `conventional` is plain autograd over whole sequences, which the paged step is judged by.

mod answers;
pub mod capture;
pub mod conventional;
pub mod drift;
pub mod extremes;
pub mod finalize;
mod further;
pub mod importance;
pub mod objective;
pub mod observer;
pub mod optimizer;
mod outcome;
pub mod replay;
pub mod rollout;
pub mod score;
mod targets;
pub mod transaction;
