//! What `bench --rates` has measured of one machine with one model's layers, and the seconds that follow from it.
//!
//! Updates on the first few layers are timed as wholes, at two numbers of layers and two prompts. Their differences are the
//! seconds of a layer at each prompt, without what a phase does once; these two are split into what grows with the rows and what
//! grows with pairs of rows. So products, elementwise work, launches and attention are counted at the pace and in the blocks that
//! a run has, and no share of a rate is assumed. A token of sampled answers is timed with all layers at the same two prompts.

mod file;
mod fit;
mod phases;
mod rates;

pub use file::{
    AttentionRate, Copies, DrawPoint, Error, MeasuredGradient, Measurements, ProductRate, UpdatePoint, VERSION,
    layer_kinds, layer_parameters,
};
pub(super) use phases::phase_seconds;
pub use rates::MeasuredRates;
