//! One of several files to train on.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Parts that a weight is counted in, so that shares are exact.
pub(super) const PARTS: f64 = 1e6;

/// One file to train on.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DataSource {
    /// Unique; a part of the names of its measurements and its records.
    pub name: String,
    /// File of JSON lines.
    pub path: PathBuf,
    /// Its share of the groups is this over the sum of all weights.
    #[serde(default = "weight_default")]
    pub weight: f64,
}

fn weight_default() -> f64 {
    1.0
}

impl DataSource {
    /// The weight in millionths, at least 1 in a configuration that has passed its checks.
    #[must_use]
    pub fn weight_parts(&self) -> u64 {
        // A finite whole number is written with all its digits.
        format!("{:.0}", self.weight * PARTS).parse().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_whole_numbers_of_millionths() {
        let of = |weight| DataSource { name: "a".into(), path: "a.jsonl".into(), weight }.weight_parts();
        assert_eq!([1.0, 0.1, 0.7, 1e-6, 1e6].map(of), [1_000_000, 100_000, 700_000, 1, 1_000_000_000_000]);
        assert_eq!([0.0, -1.0, f64::NAN, f64::INFINITY].map(of), [0; 4]);
        let one: DataSource = serde_json::from_str(r#"{"name":"a","path":"a.jsonl"}"#).unwrap();
        assert!((one.weight - 1.0).abs() < f64::EPSILON);
    }
}
