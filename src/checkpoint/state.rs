//! `state.json`: everything of a checkpoint but tensors.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::{DEFAULT_TOML, compared};
use crate::data::GroupOrder;
use crate::runtime::digest::sha256_hex;

/// Where a run stands, and what must be the same when it goes on.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct State {
    pub updates: u64,
    /// Version of the adapters; pages name the version that they were captured under.
    pub adapter_version: u64,
    /// Steps of the optimizer in its moments.
    pub optimizer_steps: u32,
    /// Position in the data after these updates. Groups that were only captured lie after the position: they run again.
    pub cursor: GroupOrder,
    /// The configuration's digest, as the receipt of the run would have it.
    pub config_digest: String,
    /// The configuration without what a resumed run may change, to name what differs.
    pub config: Value,
    /// Groups of an update: replicas × `optimizer.grad_accum`. Absent in checkpoints of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups_per_update: Option<u64>,
    /// Ranks that shared a prompt. A run that goes on keeps them where `parallel.cp_size` is absent; sums have their order. Absent in
    /// checkpoints of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cp_size: Option<u64>,
    /// Updates after which a decaying learning rate has reached 0. Absent in checkpoints of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule_steps: Option<u64>,
    /// Digests of the run's inputs: the model, the data, the starting adapters.
    pub inputs: BTreeMap<String, String>,
    /// The held-out evaluation before the first update: each set as in the receipt, by its name. Earlier versions wrote the only
    /// set without a name.
    pub held_out: Value,
    /// The best checkpoint so far (`checkpoint.keep_best`), as in the receipt; null without one.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub best: Value,
    /// Answers and scores that further updates are made of (`grpo.updates_per_group`); null between rounds.
    #[serde(default)]
    pub round: Value,
}

/// One value that differs from the saved one.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "the names say everything")]
pub struct Difference {
    /// A key of the configuration, or the name of an input.
    pub what: String,
    pub saved: String,
    pub now: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} was {} and is {}", self.what, self.saved, self.now)
    }
}

impl State {
    /// What keeps a run with the configuration, inputs and groups of `now` from resuming here.
    #[must_use]
    pub fn differences(&self, now: &State) -> Vec<Difference> {
        // Checkpoints of earlier versions do not say how many groups an update has.
        let has_groups = self.groups_per_update.is_some();
        let texts = |state: &State| {
            let mut texts = config_texts(&state.config);
            texts.extend(state.inputs.iter().map(|(name, digest)| (format!("{name} (digest)"), digest.clone())));
            let groups = state.groups_per_update.filter(|_| has_groups);
            texts.extend(groups.map(|groups| (GROUPS.to_owned(), groups.to_string())));
            texts
        };
        different(&texts(self), &texts(now))
    }

    /// [`State::differences`] of the configuration alone, which is known before anything is loaded. A reward that no source
    /// names follows from the data, so it is compared later, with everything else.
    #[must_use]
    pub fn config_differences(&self, now: &Value) -> Vec<Difference> {
        let is_named = now.pointer("/grpo/reward_fn").is_some_and(|reward| !reward.is_null());
        let mut differences = different(&config_texts(&self.config), &config_texts(now));
        differences.retain(|difference| is_named || !difference.what.starts_with("grpo.reward_fn"));
        differences
    }
}

/// Keys that checkpoints of earlier versions lack, and whose default is what those versions did.
const NEUTRAL: [&str; 10] = [
    "grpo.loss",
    "grpo.kl_estimator",
    "grpo.deviation",
    "grpo.mask_truncated",
    "reward.judge_prompt_chars",
    "run.reuse_capture",
    "tools.call_start",
    "tools.call_end",
    "tools.turns",
    "tools.tokens",
];

/// What a message calls [`State::groups_per_update`].
const GROUPS: &str = "groups of an update (replicas × optimizer.grad_accum)";

/// The values that a resumed run must share, by their dotted keys.
fn config_texts(config: &Value) -> BTreeMap<String, String> {
    let mut texts = BTreeMap::new();
    leaves(&compared(config.clone()), "", &mut texts);
    texts
}

fn different(saved: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Vec<Difference> {
    let defaults = default_texts();
    // A key that the saved run did not know had no effect in it, which is what these have by default.
    let is_new = |key: &String| {
        let is_default = defaults.get(key).is_some_and(|text| now.get(key) == Some(text));
        NEUTRAL.contains(&key.as_str()) && !saved.contains_key(key) && is_default
    };
    let keys: BTreeSet<&String> = saved.keys().chain(now.keys()).filter(|key| !is_new(key)).collect();
    let of = |texts: &BTreeMap<String, String>, key| texts.get(key).cloned().unwrap_or_else(|| "absent".to_owned());
    keys.into_iter()
        .map(|key| Difference { what: key.clone(), saved: of(saved, key), now: of(now, key) })
        .filter(|difference| difference.saved != difference.now)
        .collect()
}

/// What differs between two nested values, by dotted keys.
#[must_use]
pub fn value_differences(saved: &Value, now: &Value) -> Vec<Difference> {
    let texts = |value: &Value| {
        let mut texts = BTreeMap::new();
        leaves(value, "", &mut texts);
        texts
    };
    different(&texts(saved), &texts(now))
}

/// The documented defaults by their dotted keys.
fn default_texts() -> BTreeMap<String, String> {
    let mut texts = BTreeMap::new();
    let defaults: Value = toml::from_str(DEFAULT_TOML).expect("the compiled-in defaults are TOML");
    leaves(&defaults, "", &mut texts);
    texts
}

/// Every value by its dotted key.
fn leaves(value: &Value, path: &str, found: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(table) => {
            for (key, inner) in table {
                let inner_path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                leaves(inner, &inner_path, found);
            }
        }
        _ => drop(found.insert(path.to_owned(), value.to_string())),
    }
}

/// The file: a state, the digests of the checkpoint's other files, and the digest of both.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Sealed {
    pub(super) state: State,
    /// SHA-256 by file name.
    pub(super) files: BTreeMap<String, String>,
    /// SHA-256 over the two fields above; nothing else shows that they are whole.
    pub(super) seal: String,
}

impl Sealed {
    pub(super) fn new(state: State, files: BTreeMap<String, String>) -> Result<Sealed, serde_json::Error> {
        let seal = seal(&state, &files)?;
        Ok(Sealed { state, files, seal })
    }

    /// The digest that `seal` should equal.
    pub(super) fn digest(&self) -> Result<String, serde_json::Error> {
        seal(&self.state, &self.files)
    }
}

fn seal(state: &State, files: &BTreeMap<String, String>) -> Result<String, serde_json::Error> {
    Ok(sha256_hex(serde_json::to_vec(&(state, files))?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn state() -> State {
        State {
            updates: 3,
            adapter_version: 3,
            optimizer_steps: 3,
            cursor: GroupOrder::new(7, 5),
            config_digest: "c".into(),
            config: json!({"optimizer": {"lr": 0.1, "betas": [0.9, 0.999]}, "lora": {"rank": 4}}),
            groups_per_update: Some(2),
            cp_size: None,
            schedule_steps: Some(9),
            inputs: [("the model".to_owned(), "m".to_owned())].into(),
            held_out: Value::Null,
            best: Value::Null,
            round: Value::Null,
        }
    }

    #[test]
    fn what_differs_is_named_by_its_key_with_both_values() {
        let mut other = state();
        other.config = json!({"optimizer": {"lr": 0.2, "betas": [0.9, 0.999]}, "lora": {"rank": 4, "alpha": 8.0}});
        other.inputs.insert("the model".into(), "n".into());
        // Progress and the position in the data are no differences.
        other.updates = 4;
        other.cursor.take(2);
        let words: Vec<String> = state().differences(&other).iter().map(ToString::to_string).collect();
        let expected = [
            "lora.alpha was absent and is 8.0",
            "optimizer.lr was 0.1 and is 0.2",
            "the model (digest) was m and is n",
        ];
        assert_eq!(words, expected);
        assert!(state().differences(&state()).is_empty());
    }

    #[test]
    fn spellings_and_what_changes_no_number_are_no_differences_also_in_a_checkpoint_that_holds_them() {
        let mut saved = state();
        saved.config =
            json!({"model": {"path": "models/a"}, "run": {"seed": 1, "trace": false}, "checkpoint": {"keep": 2}});
        let mut now = state();
        now.config = json!({"model": {}, "run": {"seed": 1, "trace": true}, "checkpoint": {"keep": 5}});
        assert!(saved.differences(&now).is_empty() && saved.config_differences(&now.config).is_empty());
        now.config["run"]["seed"] = json!(2);
        now.groups_per_update = Some(4);
        let words: Vec<String> = saved.differences(&now).iter().map(ToString::to_string).collect();
        assert_eq!(words, [&format!("{GROUPS} was 2 and is 4"), "run.seed was 1 and is 2"]);
        saved.groups_per_update = None;
        assert_eq!(saved.differences(&now).len(), 1, "an earlier version did not say");
    }

    #[test]
    fn a_key_that_the_saved_run_did_not_know_may_have_its_default_and_nothing_else() {
        let (saved, mut now) = (state(), state());
        now.config["grpo"] = json!({"loss": "grpo", "kl_estimator": "k3", "mask_truncated": false});
        assert!(saved.differences(&now).is_empty() && saved.config_differences(&now.config).is_empty());
        now.config["grpo"] = json!({"loss": "gspo", "clip_dual": 3.0});
        let words: Vec<String> = saved.differences(&now).iter().map(ToString::to_string).collect();
        assert_eq!(words, ["grpo.clip_dual was absent and is 3.0", "grpo.loss was absent and is \"gspo\""]);
        assert_eq!(now.differences(&saved).len(), 2, "a key that is gone is told");
        // Earlier versions sent no temperature: the default of this key is not what they did.
        now.config["grpo"] = json!({});
        now.config["reward"] = json!({"judge_temperature": 0.0});
        assert_eq!(saved.differences(&now).len(), 1);
    }

    #[test]
    fn a_changed_count_breaks_the_seal_and_a_read_file_keeps_it() {
        let sealed = Sealed::new(state(), [("a".to_owned(), "b".to_owned())].into()).unwrap();
        let text = serde_json::to_string_pretty(&sealed).unwrap();
        let read: Sealed = serde_json::from_str(&text).unwrap();
        assert_eq!(read.digest().unwrap(), read.seal);
        let changed: Sealed = serde_json::from_str(&text.replace("\"updates\": 3", "\"updates\": 2")).unwrap();
        assert_ne!(changed.digest().unwrap(), changed.seal);
    }
}
