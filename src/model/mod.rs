//! Decoders: what a checkpoint is, how it is loaded, and the maths of one block.
//!
//! Upstream names (config keys, tensor names) stop in `keys`, `spec` and `family`; a family is one file there.

pub mod adapter_file;
pub mod family;
pub mod keys;
pub mod problems;
pub mod rope;
pub mod shards;
pub mod spec;
pub mod weights;
