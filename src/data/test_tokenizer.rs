//! A small byte-level tokenizer for tests: 256 bytes, no merges, and the three special tokens of ChatML models.

use std::fs;

use serde_json::{Map, Value as Json, json};
use tempfile::TempDir;

/// The id that ends a turn.
pub(crate) const END: i64 = 258;

/// The 256 printable characters that stand for bytes, in byte order.
pub(crate) fn alphabet() -> Vec<char> {
    let printable = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut further = 256..;
    (0..256)
        .map(|byte| if printable(&byte) { byte } else { further.next().unwrap() })
        .filter_map(char::from_u32)
        .collect()
}

/// An HF folder with tokenizer.json and a ChatML template.
pub(crate) fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
    let mut vocab: Map<String, Json> =
        alphabet().iter().enumerate().map(|(id, character)| (character.to_string(), id.into())).collect();
    let mut added = Vec::new();
    for (id, special) in (256..).zip(specials) {
        vocab.insert(special.into(), id.into());
        added.push(json!({
            "id": id, "content": special, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        }));
    }
    let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": []
        }
    });
    let template = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}\
                    {% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}\
                    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = json!({ "chat_template": template });
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}
