//! Attention over latents, with an index that chooses the keys of each query.

mod attention;
pub mod index;
mod keys;
mod project;
#[cfg(test)]
mod tests;

pub(crate) use attention::QueryGradient;
pub use attention::{GATHERED_ELEMENTS_MAX, LatentAttention};
pub use index::{IndexProjected, IndexSet, Indexer, LentIndex};
pub(in crate::model) use project::LatentBlock;
