//! The tokenizer of a GGUF file as tokenizer.json and its companions.
//!
//! The file has tokens, merges, token types and the *name* of the pre-tokenizer, the rule that splits text before merging.
//! The rules themselves are defined here, by model family. Only byte-level BPE (`gpt2`) can be converted.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::error::Error;
use super::gguf::{Gguf, Value};
use super::llama::token_id;
use super::options::Splits;

/// Token types of the format that become added tokens.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// GPT-2's rule in llama3's form: contractions in any case, letters with one leading character, up to three digits.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with single digits.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The tokenizer's files, and `generation_config.json`.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) tokenizer: Json,
    pub(super) tokenizer_config: Json,
    pub(super) special_tokens: Json,
    pub(super) generation: Json,
}

impl Files {
    pub(super) fn read(gguf: &Gguf, splits: Splits) -> Result<Files, Error> {
        let kind = gguf.required("tokenizer.ggml.model", Gguf::text)?;
        if kind != "gpt2" {
            return Err(gguf.wrong("tokenizer.ggml.model", kind, "gpt2 (byte-level BPE)"));
        }
        let tokens = texts(gguf, "tokenizer.ggml.tokens")?;
        let mut vocabulary = BTreeMap::new();
        for (id, token) in tokens.iter().enumerate() {
            if let Some(first) = vocabulary.insert(*token, id) {
                let found = format!("{token:?} at {first} and at {id}");
                return Err(gguf.wrong("tokenizer.ggml.tokens", found, "every token once"));
            }
        }
        let added = added_tokens(gguf, &tokens)?;
        let name = |key: &str| -> Result<Option<&str>, Error> {
            Ok(token_id(gguf, key)?.and_then(|id| usize::try_from(id).ok()).map(|id| tokens[id]))
        };
        let mut special = Map::new();
        for (field, key) in [
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        ] {
            if let Some(token) = name(key)? {
                special.insert(field.into(), token.into());
            }
        }
        let generation = json!({
            "bos_token_id": token_id(gguf, "tokenizer.ggml.bos_token_id")?,
            "eos_token_id": token_id(gguf, "tokenizer.ggml.eos_token_id")?,
            "pad_token_id": token_id(gguf, "tokenizer.ggml.padding_token_id")?,
        });
        Ok(Files {
            tokenizer: tokenizer(gguf, splits, &tokens, &vocabulary, &added, &special)?,
            tokenizer_config: tokenizer_config(gguf, &added, &special)?,
            special_tokens: Json::Object(special),
            generation,
        })
    }
}

fn tokenizer(
    gguf: &Gguf,
    splits: Splits,
    tokens: &[&str],
    vocabulary: &BTreeMap<&str, usize>,
    added: &[Json],
    special: &Map<String, Json>,
) -> Result<Json, Error> {
    let pre = gguf.text("tokenizer.ggml.pre")?.unwrap_or("default");
    let ids: Map<String, Json> =
        tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), id.into())).collect();
    let llama3 = matches!(pre, "llama-bpe" | "llama3" | "llama-v3");
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": pre_tokenizer(gguf, pre, splits)?,
        "post_processor": post_processor(gguf, vocabulary, special)?,
        "decoder": byte_level(true),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": llama3 && splits == Splits::AsTrained,
            "vocab": ids,
            "merges": merges(gguf, vocabulary)?,
        },
    }))
}

fn pre_tokenizer(gguf: &Gguf, pre: &str, splits: Splits) -> Result<Json, Error> {
    let pattern = match pre {
        "default" | "gpt-2" => return Ok(byte_level(true)),
        "smollm" if splits == Splits::AsTransformers => return Ok(byte_level(true)),
        "smollm" => {
            let digits = json!({ "type": "Digits", "individual_digits": true });
            return Ok(json!({ "type": "Sequence", "pretokenizers": [digits, byte_level(true)] }));
        }
        "llama-bpe" | "llama3" | "llama-v3" => LLAMA3,
        "qwen2" => QWEN2,
        other => {
            let known = "default, gpt-2, smollm, llama-bpe, llama3, llama-v3 or qwen2";
            return Err(gguf.wrong("tokenizer.ggml.pre", other, known));
        }
    };
    let split = json!({
        "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false
    });
    Ok(json!({ "type": "Sequence", "pretokenizers": [split, byte_level(false)] }))
}

/// Bytes as printable characters; with `use_regex` also GPT-2's own splitting rule.
fn byte_level(use_regex: bool) -> Json {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex })
}

/// Start and end tokens around an encoded text, if the file has the flags for them.
fn post_processor(gguf: &Gguf, vocabulary: &BTreeMap<&str, usize>, special: &Map<String, Json>) -> Result<Json, Error> {
    let token_if_flag = |field: &str| {
        let key = format!("tokenizer.ggml.add_{field}");
        if !gguf.flag(&key)? {
            return Ok(None);
        }
        let token = special.get(field).and_then(Json::as_str);
        token.map(Some).ok_or_else(|| gguf.wrong(&key, "true", format!("a {field}_id as well")))
    };
    let start = token_if_flag("bos_token")?;
    let end = token_if_flag("eos_token")?;
    if start.is_none() && end.is_none() {
        return Ok(Json::Null);
    }
    let token = |token: &str, type_id: u8| json!({ "SpecialToken": { "id": token, "type_id": type_id } });
    let sequence = |name: &str, type_id: u8| json!({ "Sequence": { "id": name, "type_id": type_id } });
    let framed = |name: &str, type_id: u8| {
        let parts = [start.map(|text| token(text, type_id)), Some(sequence(name, type_id))];
        parts.into_iter().chain([end.map(|text| token(text, type_id))]).flatten().collect::<Vec<_>>()
    };
    let named: Map<String, Json> = start
        .iter()
        .chain(&end)
        .map(|text| ((*text).to_owned(), json!({ "id": text, "ids": [vocabulary.get(text)], "tokens": [text] })))
        .collect();
    let pair: Vec<Json> = framed("A", 0).into_iter().chain(framed("B", 1)).collect();
    Ok(json!({ "type": "TemplateProcessing", "single": framed("A", 0), "pair": pair, "special_tokens": named }))
}

/// The merge rules as pairs.
fn merges(gguf: &Gguf, vocabulary: &BTreeMap<&str, usize>) -> Result<Vec<[String; 2]>, Error> {
    let merges = texts(gguf, "tokenizer.ggml.merges")?;
    let pair = |(index, merge): (usize, &&str)| {
        merge
            .split_once(' ')
            .filter(|(left, right)| vocabulary.contains_key(left) && vocabulary.contains_key(right))
            .filter(|(left, right)| vocabulary.contains_key(format!("{left}{right}").as_str()))
            .map(|(left, right)| [left.to_owned(), right.to_owned()])
            .ok_or_else(|| Error::Merge { file: gguf.path.clone(), index, merge: (*merge).to_owned() })
    };
    merges.iter().enumerate().map(pair).collect()
}

/// Control tokens become special added tokens, user-defined ones plain added tokens.
fn added_tokens(gguf: &Gguf, tokens: &[&str]) -> Result<Vec<Json>, Error> {
    let key = "tokenizer.ggml.token_type";
    let types = gguf.required(key, Gguf::list)?;
    if types.len() != tokens.len() {
        return Err(gguf.wrong(key, format!("a list of {}", types.len()), format!("one for each of {}", tokens.len())));
    }
    let mut added = Vec::new();
    for (id, (token, kind)) in tokens.iter().zip(types).enumerate() {
        let kind = match kind {
            Value::Signed(kind) => *kind,
            Value::Unsigned(kind) => i64::try_from(*kind).unwrap_or(i64::MAX),
            _ => return Err(gguf.wrong(key, "a list of other things", "a list of integers")),
        };
        if kind == CONTROL || kind == USER_DEFINED {
            added.push(json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": kind == CONTROL,
            }));
        }
    }
    Ok(added)
}

/// `tokenizer_config.json` with the chat template.
fn tokenizer_config(gguf: &Gguf, added: &[Json], special: &Map<String, Json>) -> Result<Json, Error> {
    let mut decoder = Map::new();
    for token in added {
        let mut token = token.clone();
        let id = token.as_object_mut().and_then(|fields| fields.remove("id")).unwrap_or_default();
        decoder.insert(id.to_string(), token);
    }
    let mut config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": gguf.flag("tokenizer.ggml.add_bos_token")?,
        "add_eos_token": gguf.flag("tokenizer.ggml.add_eos_token")?,
        "added_tokens_decoder": decoder,
        "clean_up_tokenization_spaces": false,
        "model_max_length": gguf.unsigned("llama.context_length")?,
    });
    for (field, token) in special {
        config[field] = token.clone();
    }
    if let Some(template) = gguf.text("tokenizer.chat_template")? {
        config["chat_template"] = template.into();
    }
    Ok(config)
}

fn texts<'gguf>(gguf: &'gguf Gguf, key: &str) -> Result<Vec<&'gguf str>, Error> {
    let items = gguf.required(key, Gguf::list)?;
    let text = |item: &'gguf Value| match item {
        Value::Text(text) => Ok(text.as_str()),
        _ => Err(gguf.wrong(key, "a list of other things", "a list of texts")),
    };
    items.iter().map(text).collect()
}
