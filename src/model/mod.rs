//! Decoders: what a checkpoint is, how it is loaded, and the maths of one block.
//!
//! Upstream names (config keys, tensor names) stop in `keys`, `spec`, `family` and `shape`; a family is one file there. A
//! block is segment A, a mixer and segment B; phases drive blocks through `pass` and know nothing of what is inside.

pub mod adapter_file;
pub mod answers;
pub mod attention;
pub mod attention_rows;
pub mod config_reader;
pub mod decoder;
pub mod delta;
pub mod digests;
pub mod experts;
pub mod family;
mod formulas;
pub mod head;
pub mod latent;
pub mod lora;
pub mod mixer;
pub mod parts;
pub mod pass;
pub mod past;
pub mod planes;
pub mod problems;
pub mod rope;
mod rotation;
pub mod shape;
pub mod shards;
pub mod spec;
pub mod stack;
pub mod token;
pub mod weights;
