//! Names that people give to data sets and judges: they are parts of the names of measurements.

/// The most characters of a name.
const NAME_CHARS_MAX: usize = 64;

/// Whether a set, a source or a judge may have this name.
pub(super) fn is_set_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    !name.is_empty() && name.len() <= NAME_CHARS_MAX && name.chars().all(plain)
}
