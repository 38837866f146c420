//! The tokens at which a model's answer ends.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value as Json;

use super::error::Error;
use super::tokenizer::Tokenizer;
use crate::runtime::reading;

/// All ids that end an answer of the model in `folder`, sorted, without repeats. Sources: `eos_token_id` of
/// `generation_config.json` and of `config.json` (there also under `text_config`); with a `tokenizer` also the `eos_token`
/// of `tokenizer_config.json`, and the token that the chat template writes after an answer. Files and keys may be absent.
///
/// # Errors
/// When a value is not an id, a list of ids or a token; names the file and the key (exit 3).
pub fn end_ids(folder: &Path, tokenizer: Option<&Tokenizer>) -> Result<Vec<i64>, Error> {
    let mut ends = BTreeSet::new();
    for name in ["generation_config.json", "config.json"] {
        let Some(config) = read(folder, name)? else { continue };
        for key in ["eos_token_id", "text_config.eos_token_id"] {
            let found = key.split('.').fold(&config, |value, part| &value[part]);
            let malformed = || Error::Key {
                file: folder.join(name),
                key,
                found: found.to_string(),
                wanted: "a token id or a list of token ids",
            };
            let ids = match found {
                Json::Null => &[] as &[Json],
                Json::Array(ids) => ids,
                id => std::slice::from_ref(id),
            };
            for id in ids {
                ends.insert(id.as_i64().filter(|id| *id >= 0).ok_or_else(malformed)?);
            }
        }
    }
    if let Some(tokenizer) = tokenizer {
        ends.extend(eos_token(folder, tokenizer)?);
        ends.extend(tokenizer.known_turn_end());
    }
    Ok(ends.into_iter().collect())
}

/// The id of the token that `tokenizer_config.json` names.
fn eos_token(folder: &Path, tokenizer: &Tokenizer) -> Result<Option<i64>, Error> {
    const NAME: &str = "tokenizer_config.json";
    let Some(config) = read(folder, NAME)? else { return Ok(None) };
    let found = &config["eos_token"];
    if found.is_null() {
        return Ok(None);
    }
    let id = found.as_str().or_else(|| found["content"].as_str()).and_then(|token| tokenizer.id(token));
    let malformed = || Error::Key {
        file: folder.join(NAME),
        key: "eos_token",
        found: found.to_string(),
        wanted: "a token of tokenizer.json, as a text or as an object with \"content\"",
    };
    id.ok_or_else(malformed).map(Some)
}

/// The JSON in a file of the folder; `None` if there is no file.
fn read(folder: &Path, name: &str) -> Result<Option<Json>, Error> {
    let file = folder.join(name);
    match reading::text(&file) {
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::io(&file, "read it")(source)),
        Ok(text) => serde_json::from_str(&text).map(Some).map_err(|source| Error::Json { file, source }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::test_tokenizer;
    use super::*;

    fn ends(files: &[(&str, &str)]) -> Result<Vec<i64>, String> {
        let folder = test_tokenizer::folder();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        end_ids(folder.path(), Some(&tokenizer)).map_err(|error| error.to_string())
    }

    #[test]
    fn every_file_may_name_ends_and_each_end_is_listed_once() {
        assert_eq!(ends(&[]).unwrap(), [test_tokenizer::END]);
        assert_eq!(ends(&[("generation_config.json", r#"{"eos_token_id": [7, 3, 258]}"#)]).unwrap(), [3, 7, 258]);
        let config = r#"{"eos_token_id": 5, "text_config": {"eos_token_id": [5, 6]}}"#;
        assert_eq!(ends(&[("config.json", config)]).unwrap(), [5, 6, 258]);
        for eos in [r#""<|endoftext|>""#, r#"{"content": "<|endoftext|>", "lstrip": false}"#] {
            let config = format!(r#"{{"eos_token": {eos}}}"#);
            assert_eq!(ends(&[("tokenizer_config.json", &config)]).unwrap(), [256], "no template, no end of a turn");
        }
        let none = [("generation_config.json", r#"{"eos_token_id": null}"#), ("tokenizer_config.json", "{}")];
        assert!(ends(&none).unwrap().is_empty());
    }

    #[test]
    fn without_a_tokenizer_only_ids_count() {
        let folder = test_tokenizer::folder();
        fs::write(folder.path().join("config.json"), r#"{"eos_token_id": 5}"#).unwrap();
        assert_eq!(end_ids(folder.path(), None).unwrap(), [5]);
        assert!(end_ids(Path::new("absent"), None).unwrap().is_empty());
    }

    #[test]
    fn a_malformed_end_is_refused_with_file_and_key() {
        for (file, text, words) in [
            ("generation_config.json", r#"{"eos_token_id": "</s>"}"#, "eos_token_id is \"</s>\""),
            ("generation_config.json", r#"{"eos_token_id": [1, 2.5]}"#, "eos_token_id is [1,2.5]"),
            ("config.json", r#"{"text_config": {"eos_token_id": -1}}"#, "text_config.eos_token_id is -1"),
            ("config.json", "{", "is no JSON"),
            ("tokenizer_config.json", r#"{"eos_token": "<none>"}"#, "eos_token is \"<none>\""),
            ("tokenizer_config.json", r#"{"eos_token": 2}"#, "eos_token is 2"),
        ] {
            let message = ends(&[(file, text)]).unwrap_err();
            assert!(message.contains(file) && message.contains(words), "{message}");
        }
    }
}
