//! The families that are planned and not trained.

use super::hybrid;
use super::layers::Shape;
use crate::model::config_reader::ConfigReader;

/// A family that is planned and not trained.
pub struct Planned {
    /// Its `model_type` values.
    model_types: &'static [&'static str],
    /// Reads a config; what is wrong is left in the keys, and the shape is then not used.
    pub read: fn(&mut ConfigReader<'_>) -> Shape,
}

const PLANNED: &[Planned] = &[Planned { model_types: &["qwen3_5", "qwen3_5_text"], read: hybrid::read }];

/// The planned family of this name.
#[must_use]
pub fn find(model_type: &str) -> Option<&'static Planned> {
    PLANNED.iter().find(|planned| planned.model_types.contains(&model_type))
}
