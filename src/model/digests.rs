//! Digests of the bytes of a checkpoint's tensors, and where they are kept.
//!
//! A digest covers every byte of a tensor. Files of some size are digested once: the digests are kept in a file beside
//! the weights, or in another folder where that one cannot be written, and hold as long as the file is what it was.
//!
//! ```text
//!   a kept file holds for   length · time of the last write · time of the last change of the file · inode
//! ```
//!
//! A copy of a file has another inode, so it is read again, also with the same time of its last write.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::runtime::digest::sha256_hex;
use crate::runtime::file_state::FileState;
use crate::runtime::saved::save_whole;

/// Version of the kept files.
const FORMAT: u64 = 1;

/// Digest of each tensor by its name: 64 hexadecimal digits of BLAKE3 over its bytes in the file.
pub type TensorDigests = BTreeMap<String, String>;

/// The content of a kept file.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    format: u64,
    file: FileState,
    tensors: TensorDigests,
}

/// The digest of a tensor's bytes, on all cores.
#[must_use]
pub fn digest(bytes: &[u8]) -> String {
    blake3::Hasher::new().update_rayon(bytes).finalize().to_hex().to_string()
}

/// The digests that are kept for `file`, if they still hold. `elsewhere` is the folder for files whose own folder cannot be
/// written. What cannot be read counts as not kept.
#[must_use]
pub fn kept(file: &Path, state: &FileState, elsewhere: Option<&Path>) -> TensorDigests {
    let read = |place: PathBuf| -> Option<Kept> { serde_json::from_slice(&fs::read(place).ok()?).ok() };
    let holds = |kept: &Kept| kept.format == FORMAT && kept.file == *state;
    let found = places(file, elsewhere).into_iter().filter_map(read).find(holds);
    found.map(|kept| kept.tensors).unwrap_or_default()
}

/// Keeps the digests of the tensors in `file`; returns the place.
///
/// # Errors
/// When neither place can be written; the error is that of the last one.
pub fn keep(
    file: &Path,
    state: &FileState,
    tensors: TensorDigests,
    elsewhere: Option<&Path>,
) -> Result<PathBuf, io::Error> {
    let text = serde_json::to_vec(&Kept { format: FORMAT, file: state.clone(), tensors })?;
    let mut failure = io::Error::from(io::ErrorKind::NotFound);
    for place in places(file, elsewhere) {
        match save_whole(&place, &text) {
            Ok(()) => return Ok(place),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// Where digests of `file` may be kept, the best place first.
fn places(file: &Path, elsewhere: Option<&Path>) -> Vec<PathBuf> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let mut places = vec![file.with_file_name(format!(".{name}.digests.json"))];
    if let Some(folder) = elsewhere {
        // Files of the same name in other folders have files of their own.
        let whole = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
        let number = sha256_hex(whole.as_os_str().as_encoded_bytes());
        places.push(folder.join(format!("{name}.{}.digests.json", &number[..16])));
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_that_of_the_hash_itself() {
        // The value for no input is that of the published test vectors.
        let empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        assert_eq!(digest(b""), empty);
        let bytes: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
        assert_eq!(digest(&bytes), blake3::hash(&bytes).to_hex().to_string());
    }

    #[test]
    fn kept_digests_hold_until_the_file_changes_in_any_way() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.safetensors");
        let digests = TensorDigests::from([("a".to_owned(), "1".to_owned())]);
        fs::write(&file, "weights").unwrap();
        let state = FileState::of(&file).unwrap();
        assert!(kept(&file, &state, None).is_empty());
        let place = keep(&file, &state, digests.clone(), None).unwrap();
        assert_eq!(place, folder.path().join(".model.safetensors.digests.json"));
        assert_eq!(kept(&file, &FileState::of(&file).unwrap(), None), digests);
        // The same length and the same time of the last write: a copy that keeps times, damaged on its way.
        let times = fs::metadata(&file).unwrap().modified().unwrap();
        let copy = folder.path().join("copy");
        fs::write(&copy, "weighty").unwrap();
        fs::File::options().write(true).open(&copy).unwrap().set_modified(times).unwrap();
        fs::rename(&copy, &file).unwrap();
        let other = FileState::of(&file).unwrap();
        assert_eq!((other.bytes, other.written_ns), (state.bytes, state.written_ns));
        assert!(kept(&file, &other, None).is_empty());
        fs::write(&place, "{").unwrap();
        assert!(kept(&file, &state, None).is_empty(), "what is damaged is not kept");
    }

    #[test]
    fn digests_of_a_folder_that_cannot_be_written_are_kept_elsewhere() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let file = folder.path().join("model.safetensors");
        fs::write(&file, "weights").unwrap();
        // A folder in the place of the kept file: also root cannot write there.
        fs::create_dir_all(folder.path().join(".model.safetensors.digests.json/in_the_way")).unwrap();
        let (state, elsewhere) = (FileState::of(&file).unwrap(), other.path().join("kept"));
        let digests = TensorDigests::from([("a".to_owned(), "1".to_owned())]);
        let place = keep(&file, &state, digests.clone(), Some(&elsewhere)).unwrap();
        assert!(place.starts_with(&elsewhere), "{place:?}");
        assert_eq!(kept(&file, &state, Some(&elsewhere)), digests);
        assert!(keep(&file, &state, digests, None).is_err());
    }
}
