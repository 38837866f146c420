//! What the command offers besides training, one readable story each.

pub mod bench;
pub mod convert;
pub mod doctor;
pub mod gate;
pub mod generate;
pub mod merge;
pub mod parity;
pub mod review;
pub mod study;
