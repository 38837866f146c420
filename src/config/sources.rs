//! `data.sources`: several files to train on, each with a name and a weight; and what is common to one file and several.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::held_out::is_set_name;
use super::tables::DataConfig;

/// Parts that a weight is counted in, so that shares are exact.
const PARTS: f64 = 1e6;
const WEIGHT_MAX: f64 = 1e6;
const SOURCES_MAX: usize = 1000;

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

impl DataConfig {
    /// Whether there is a file to train on.
    #[must_use]
    pub fn names_files(&self) -> bool {
        self.path.is_some() || self.sources.is_some()
    }

    /// The sources, none where there is one file or none.
    #[must_use]
    pub fn sources(&self) -> &[DataSource] {
        self.sources.as_deref().unwrap_or_default()
    }

    /// The key that names the files to train on.
    #[must_use]
    pub fn train_key(&self) -> &'static str {
        if self.sources.is_some() { "data.sources" } else { "data.path" }
    }

    /// The files to train on, each with its key in messages.
    #[must_use]
    pub fn train_files(&self) -> Vec<(String, &Path)> {
        let one = self.path.iter().map(|path| ("data.path".to_owned(), path.as_path()));
        let several = self.sources().iter().map(|source| (source_key(&source.name), source.path.as_path()));
        one.chain(several).collect()
    }

    /// The files to train on in one text.
    #[must_use]
    pub fn train_files_text(&self) -> String {
        let files = self.train_files().into_iter().map(|(_, path)| path.display().to_string());
        files.collect::<Vec<_>>().join(", ")
    }
}

/// What messages call a source.
#[must_use]
pub fn source_key(name: &str) -> String {
    format!("data.sources.{name}")
}

impl Check<'_> {
    pub(super) fn sources(&mut self) {
        const KEY: &str = "data.sources";
        let data = &self.run.data;
        if data.path.is_some() && data.sources.is_some() {
            self.should("data.path", &[KEY], "left out", "data.sources names the files to train on");
        }
        let sources = data.sources();
        if sources.len() > SOURCES_MAX {
            self.should(KEY, &[], format!("a list of at most {SOURCES_MAX}"), format!("it has {}", sources.len()));
            return;
        }
        for (index, DataSource { name, weight, .. }) in sources.iter().enumerate() {
            if !is_set_name(name) {
                let why = format!("the name of a source stands in the names of measurements (it is {name:?})");
                self.should(KEY, &[], "of names of letters, digits, _ and -", why);
            }
            if sources[..index].iter().any(|other| other.name == *name) {
                self.should(KEY, &[], "without repetition", format!("{name} is in it twice"));
            }
            if !(weight.is_finite() && (1.0 / PARTS..=WEIGHT_MAX).contains(weight)) {
                let why =
                    format!("the weight of {name} is {weight:?}; leave a source out that no group should come from");
                self.should(KEY, &[], "of weights from 0.000001 to 1000000", why);
            }
        }
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
