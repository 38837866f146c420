//! What a checkpoint says and holds: specs, weights and adapters, loaded exactly or refused in words.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so by its panic")]

mod adapters;
mod checkpoints;
mod experts;
mod fp8;
mod hybrid;
mod specs;
mod weights;
