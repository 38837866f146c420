//! `data.held_out`: one file, or several by name; and the names of what is measured on them.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{self, MapAccess, Visitor};
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::RunConfig;
use super::check::Check;

/// The name of the only set.
const ONLY: &str = "held_out";
/// The most sampled answers a prompt: they are drawn side by side.
const SAMPLES_MAX: u64 = 1 << 16;

/// The files of held-out prompts by the names of the sets, in the order of the names.
#[derive(Clone, Debug, PartialEq)]
pub enum HeldOutFiles {
    /// One set, which is called `held_out`.
    One(PathBuf),
    /// Sets with names, at least one.
    Named(BTreeMap<String, PathBuf>),
}

impl HeldOutFiles {
    /// Name and file of each set.
    #[must_use]
    pub fn sets(&self) -> Vec<(&str, &Path)> {
        match self {
            HeldOutFiles::One(file) => vec![(ONLY, file)],
            HeldOutFiles::Named(files) => files.iter().map(|(name, file)| (name.as_str(), file.as_path())).collect(),
        }
    }

    /// Whether the sets have names of their own.
    #[must_use]
    pub fn is_named(&self) -> bool {
        matches!(self, HeldOutFiles::Named(_))
    }
}

/// A text where there is one file without a name, else a table.
impl Serialize for HeldOutFiles {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            HeldOutFiles::One(file) => file.serialize(serializer),
            HeldOutFiles::Named(files) => {
                let mut table = serializer.serialize_map(Some(files.len()))?;
                files.iter().try_for_each(|(name, file)| table.serialize_entry(name, file))?;
                table.end()
            }
        }
    }
}

impl<'de> Deserialize<'de> for HeldOutFiles {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FilesVisitor;
        impl<'de> Visitor<'de> for FilesVisitor {
            type Value = HeldOutFiles;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a file, or a table of files by name")
            }

            fn visit_str<E: de::Error>(self, file: &str) -> Result<HeldOutFiles, E> {
                Ok(HeldOutFiles::One(file.into()))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<HeldOutFiles, A::Error> {
                let mut files = BTreeMap::new();
                while let Some((name, file)) = table.next_entry()? {
                    files.insert(name, file);
                }
                Ok(HeldOutFiles::Named(files))
            }
        }
        deserializer.deserialize_any(FilesVisitor)
    }
}

impl RunConfig {
    /// Sampled answers to a held-out prompt.
    #[must_use]
    pub fn eval_samples(&self) -> u64 {
        if self.rollout.sample { self.eval.samples.unwrap_or(self.grpo.group_size) } else { 0 }
    }

    /// Greedy answers to a held-out prompt: one or none.
    #[must_use]
    pub fn eval_greedy(&self) -> u64 {
        u64::from(self.rollout.sample && self.eval.greedy)
    }

    /// Answers of the policy to a held-out prompt.
    #[must_use]
    pub fn eval_answers(&self) -> u64 {
        self.eval_samples().saturating_add(self.eval_greedy())
    }

    /// The measurements that `checkpoint.keep_best` may name: those of which more is better.
    #[must_use]
    pub fn best_metrics(&self) -> Vec<String> {
        let mut kinds = Vec::new();
        kinds.extend((self.eval_greedy() > 0).then_some("greedy/reward"));
        kinds.extend((self.eval_samples() > 0).then_some("sampled/reward"));
        kinds.extend(["margin", "accuracy"]);
        let sets = self.data.held_out.as_ref().map(HeldOutFiles::sets).unwrap_or_default();
        sets.iter().flat_map(|(name, _)| kinds.iter().map(move |kind| format!("eval/{name}/{kind}"))).collect()
    }
}

impl Check<'_> {
    pub(super) fn evaluation(&mut self) {
        const KEY: &str = "checkpoint.keep_best";
        const WITH: [&str; 5] = ["data.held_out", "rollout.sample", "eval.greedy", "eval.samples", "grpo.group_size"];
        let (run, eval) = (self.run, &self.run.eval);
        let has_sets = run.data.held_out.is_some();
        if eval.every > 0 && !has_sets {
            let why = "there is no data.held_out to evaluate on";
            self.should("eval.every", &["data.held_out"], "0", why);
        }
        if let Some(samples) = eval.samples {
            self.at_most("eval.samples", samples, SAMPLES_MAX, "they are drawn side by side");
            if samples > 0 && !run.rollout.sample {
                let why = "answers come with the data where rollout.sample = false, and only their margin is measured";
                self.should("eval.samples", &["rollout.sample"], "left out", why);
            }
        }
        let Some(metric) = &run.checkpoint.keep_best else { return };
        let known = run.best_metrics();
        if !has_sets {
            self.should(
                KEY,
                &WITH,
                "left out",
                "there is no data.held_out whose measurements could choose a checkpoint",
            );
        } else if !known.contains(metric) {
            let be = format!("one of {}", known.join(", "));
            self.should(
                KEY,
                &WITH,
                be,
                format!("these are the measurements of which more is better (it is {metric:?})"),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::set_name::is_set_name;
    use super::*;

    #[test]
    fn one_file_and_files_by_name_come_back_as_they_were_written() {
        for text in [r#""a.jsonl""#, r#"{"books":"b.jsonl","codes":"a.jsonl"}"#] {
            let files: HeldOutFiles = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&files).unwrap(), text);
        }
        let named: HeldOutFiles = serde_json::from_str(r#"{"codes":"a.jsonl","books":"b.jsonl"}"#).unwrap();
        assert_eq!(named.sets(), [("books", Path::new("b.jsonl")), ("codes", Path::new("a.jsonl"))]);
        let one: HeldOutFiles = serde_json::from_str(r#""a.jsonl""#).unwrap();
        assert_eq!(one.sets(), [("held_out", Path::new("a.jsonl"))]);
        assert!(is_set_name("codes-2_b") && !is_set_name("") && !is_set_name("a/b") && !is_set_name("a b"));
    }
}
