//! The boundary to libtorch: the only place, besides `world`, with `unsafe` code.

pub mod bytes;
