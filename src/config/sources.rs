//! `data.sources`: several files to train on, each with a name and a weight; and what is common to one file and several.

use std::path::Path;

use super::check::Check;
use super::data_source::{DataSource, PARTS};
use super::set_name::is_set_name;
use super::tables::DataConfig;

const WEIGHT_MAX: f64 = 1e6;
const SOURCES_MAX: usize = 1000;

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

    /// The share of the run's groups that come from the file with this key, where there are several files to train on.
    #[must_use]
    pub fn share(&self, key: &str) -> Option<f64> {
        let sources = self.sources();
        let own = sources.iter().find(|source| source_key(&source.name) == key)?;
        Some(own.weight / sources.iter().map(|source| source.weight).sum::<f64>())
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
