//! The digest of a data set: every field of every group, whichever way the file spells it.

use serde_json::Value as Json;
use sha2::{Digest as _, Sha256};

use super::group::Group;
use crate::runtime::digest::hex;
use crate::runtime::units::from_index;

/// SHA-256 over the groups that were added so far.
#[derive(Debug, Default)]
pub(super) struct DataDigest(Sha256);

impl DataDigest {
    /// Adds a group with its prompt's token ids.
    pub(super) fn add(&mut self, group: &Group, prompt_ids: &[i64]) {
        let hash = &mut self.0;
        let mut part = |bytes: &[u8]| {
            hash.update(from_index(bytes.len()).to_le_bytes());
            hash.update(bytes);
        };
        let bytes = |ids: &[i64]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
        part(group.name.as_bytes());
        part(&bytes(prompt_ids));
        part(&group.cut.map(|cut| cut.0.to_le_bytes().to_vec()).unwrap_or_default());
        part(sorted(&Json::Object(group.reward_data.clone())).to_string().as_bytes());
        // A record without marks has the digest that it had before there were any.
        for (key, mark) in group.tool_marks.entries() {
            if let Some(mark) = mark {
                part(key.as_bytes());
                part(mark.as_bytes());
            }
        }
        part(&from_index(group.answers.len()).to_le_bytes());
        for answer in &group.answers {
            part(&bytes(&answer.ids));
            part(&answer.reward.map(f64::to_le_bytes).map(Vec::from).unwrap_or_default());
            part(&answer.mask.iter().flatten().map(|&trained| u8::from(trained)).collect::<Vec<u8>>());
            if let Some(logprobs) = &answer.logprobs {
                // A missing one has no number that a given one could have.
                part(&logprobs.iter().flat_map(|one| one.unwrap_or(f64::NAN).to_le_bytes()).collect::<Vec<u8>>());
            }
        }
    }

    /// The digest: 64 hexadecimal digits.
    pub(super) fn finish(self) -> String {
        hex(self.0)
    }
}

/// The same value with the keys of every object sorted, so that their order in the file does not count.
fn sorted(value: &Json) -> Json {
    match value {
        Json::Array(items) => items.iter().map(sorted).collect(),
        Json::Object(entries) => {
            let mut entries: Vec<(String, Json)> =
                entries.iter().map(|(key, value)| (key.clone(), sorted(value))).collect();
            entries.sort_by(|(one, _), (other, _)| one.cmp(other));
            Json::Object(entries.into_iter().collect())
        }
        other => other.clone(),
    }
}
