//! The tokenizer of an HF folder, and ChatML prompts.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use tokenizers::Tokenizer as Backend;

use super::error::Error;
use crate::units::from_index;

/// What opens and closes a ChatML turn.
const TURN_START: &str = "<|im_start|>";
const TURN_END: &str = "<|im_end|>";

/// The tokenizer of an HF folder.
pub struct Tokenizer {
    file: PathBuf,
    backend: Backend,
    chat: Result<ChatMl, (PathBuf, String)>,
}

/// What a ChatML template needs.
#[derive(Debug)]
struct ChatMl {
    end: i64,
    /// What the template says for the system where the caller says nothing.
    system: Option<String>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("file", &self.file).field("chat", &self.chat).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads tokenizer.json of `folder`, and the chat template beside it if there is one.
    ///
    /// # Errors
    /// When tokenizer.json is absent or does not load. A missing or foreign chat template is an error only of those
    /// functions that need it.
    pub fn open(folder: &Path) -> Result<Tokenizer, Error> {
        let file = folder.join("tokenizer.json");
        let bytes = fs::read(&file).map_err(|source| Error::Io { file: file.clone(), action: "read it", source })?;
        let backend = Backend::from_bytes(&bytes).map_err(|reason| Error::Tokenizer {
            file: file.clone(),
            action: "is not a tokenizer that can be loaded",
            reason: reason.to_string(),
        })?;
        let chat = chat_ml(folder, &backend);
        Ok(Tokenizer { file, backend, chat })
    }

    /// The ids of `text`; nothing is added around it, special tokens written in it are recognised.
    ///
    /// # Errors
    /// When the tokenizer refuses the text.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>, Error> {
        let encoding = self.backend.encode_fast(text, false).map_err(|reason| Error::Tokenizer {
            file: self.file.clone(),
            action: "cannot encode a text",
            reason: reason.to_string(),
        })?;
        Ok(encoding.get_ids().iter().map(|id| i64::from(*id)).collect())
    }

    /// The text of `ids`, special tokens included.
    ///
    /// # Errors
    /// When an id is negative, or the tokenizer refuses.
    pub fn decode(&self, ids: &[i64]) -> Result<String, Error> {
        let refused =
            |reason: String| Error::Tokenizer { file: self.file.clone(), action: "cannot decode ids", reason };
        let ids: Vec<u32> = ids
            .iter()
            .map(|id| u32::try_from(*id).map_err(|_| refused(format!("{id} is no token id"))))
            .collect::<Result<_, _>>()?;
        self.backend.decode(&ids, false).map_err(|reason| refused(reason.to_string()))
    }

    /// How many tokens, added ones included; the model's embedding may have more rows.
    #[must_use]
    pub fn vocabulary(&self) -> u64 {
        from_index(self.backend.get_vocab_size(true))
    }

    /// The id of a token written exactly so.
    #[must_use]
    pub fn id(&self, token: &str) -> Option<i64> {
        self.backend.token_to_id(token).map(i64::from)
    }

    /// The texts of all added tokens, which text must not contain by accident; in id order.
    #[must_use]
    pub fn added(&self) -> Vec<String> {
        let mut added: Vec<_> = self.backend.get_added_tokens_decoder().into_iter().collect();
        added.sort_by_key(|(id, _)| *id);
        added.into_iter().map(|(_, token)| token.content).collect()
    }

    /// The id that ends a turn of a ChatML model.
    ///
    /// # Errors
    /// When the folder's chat template is not ChatML.
    pub fn turn_end(&self) -> Result<i64, Error> {
        self.chat().map(|chat| chat.end)
    }

    /// The text that ends a turn of a ChatML model.
    ///
    /// # Errors
    /// When the folder's chat template is not ChatML.
    pub fn turn_end_text(&self) -> Result<&'static str, Error> {
        self.chat().map(|_| TURN_END)
    }

    /// One system turn and one user turn as ChatML text, open for the assistant's answer. Without `system`, the
    /// template's own default stands, or no system turn where it has none.
    ///
    /// # Errors
    /// When the folder's chat template is not ChatML.
    pub fn chat_text(&self, system: Option<&str>, user: &str) -> Result<String, Error> {
        let chat = self.chat()?;
        let turn = |role: &str, text: &str| format!("{TURN_START}{role}\n{text}{TURN_END}\n");
        let system = system.or(chat.system.as_deref()).map(|text| turn("system", text)).unwrap_or_default();
        Ok(format!("{system}{}{TURN_START}assistant\n", turn("user", user)))
    }

    /// The ids of [`Tokenizer::chat_text`].
    ///
    /// # Errors
    /// When the folder's chat template is not ChatML, or the tokenizer refuses the text.
    pub fn chat_prompt(&self, system: Option<&str>, user: &str) -> Result<Vec<i64>, Error> {
        self.encode(&self.chat_text(system, user)?)
    }

    fn chat(&self) -> Result<&ChatMl, Error> {
        self.chat.as_ref().map_err(|(file, reason)| Error::NotChatMl { file: file.clone(), reason: reason.clone() })
    }
}

/// Recognises ChatML: both turn tokens stand in the template and are single tokens, and the assistant's turn is opened.
fn chat_ml(folder: &Path, backend: &Backend) -> Result<ChatMl, (PathBuf, String)> {
    let (file, template) = template(folder)?;
    for part in [TURN_START, TURN_END, "assistant", "add_generation_prompt"] {
        if !template.contains(part) {
            return Err((file, format!("it never says {part:?}")));
        }
    }
    let added = backend.get_added_tokens_decoder();
    let id = |token: &str| added.iter().find(|(_, added)| added.content == token).map(|(id, _)| i64::from(*id));
    match (id(TURN_START), id(TURN_END)) {
        (Some(_), Some(end)) => Ok(ChatMl { end, system: default_system(&template) }),
        _ => Err((file, format!("{TURN_START} and {TURN_END} are not tokens of tokenizer.json"))),
    }
}

/// The chat template's text and the file it stands in.
fn template(folder: &Path) -> Result<(PathBuf, String), (PathBuf, String)> {
    let file = folder.join("chat_template.jinja");
    if let Ok(template) = fs::read_to_string(&file) {
        return Ok((file, template));
    }
    let file = folder.join("tokenizer_config.json");
    let config = fs::read(&file).map_err(|cause| cause.to_string());
    let config = config.and_then(|bytes| serde_json::from_slice::<Json>(&bytes).map_err(|cause| cause.to_string()));
    let found = match config.as_ref().map(|config| &config["chat_template"]) {
        Err(reason) => return Err((file, reason.clone())),
        Ok(Json::String(template)) => Some(template.clone()),
        Ok(Json::Array(named)) => named
            .iter()
            .find(|entry| entry["name"] == "default")
            .and_then(|entry| entry["template"].as_str())
            .map(str::to_owned),
        Ok(_) => None,
    };
    match found {
        Some(template) => Ok((file, template)),
        None => Err((file, "there is no chat_template".to_owned())),
    }
}

/// The system text that the template itself writes where a conversation has none: the literal between a system turn's
/// start and end. A turn that is put together from expressions is none.
fn default_system(template: &str) -> Option<String> {
    let template = template.replace("\\n", "\n");
    let start = format!("{TURN_START}system\n");
    let mut turns = template.split(&start).skip(1);
    let literal = |turn: &str| {
        let (text, _) = turn.split_once(TURN_END)?;
        let composed = ["{{", "}}", "{%", "' +", "'+", "\" +", "\"+", "' ~", "'~"];
        let plain = composed.iter().all(|part| !text.contains(part));
        plain.then(|| text.to_owned())
    };
    turns.find_map(literal)
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn text_comes_back_from_its_ids() {
        let folder = sample::folder();
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        let text = "ünïcode\t and  digits 12\n<|im_end|>\n";
        let ids = tokenizer.encode(text).unwrap();
        assert!(ids.contains(&sample::END));
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        assert_eq!(tokenizer.vocabulary(), 259);
        assert!(tokenizer.decode(&[-1]).unwrap_err().to_string().contains("-1 is no token id"));
    }

    #[test]
    fn a_chat_prompt_is_chat_ml_with_the_templates_own_system_text() {
        let folder = sample::folder();
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        let text = |system| tokenizer.decode(&tokenizer.chat_prompt(system, "hi").unwrap()).unwrap();
        assert_eq!(
            text(None),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        );
        assert!(text(Some("Be kind.")).starts_with("<|im_start|>system\nBe kind.<|im_end|>\n"));
        assert_eq!(tokenizer.turn_end().unwrap(), sample::END);
    }

    #[test]
    fn a_composed_system_turn_is_no_default() {
        let template = "{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}";
        assert_eq!(default_system(template), None);
        let second = format!("{template}{{{{ '<|im_start|>system\\nIt''s me.<|im_end|>\\n' }}}}");
        assert_eq!(default_system(&second).as_deref(), Some("It''s me."));
    }

    #[test]
    fn a_foreign_chat_template_is_refused_in_words() {
        let folder = sample::folder();
        fs::write(folder.path().join("chat_template.jinja"), "[INST] {{ messages }} [/INST]").unwrap();
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        let message = tokenizer.chat_prompt(None, "hi").unwrap_err().to_string();
        assert!(message.contains("not ChatML: it never says \"<|im_start|>\""), "{message}");
        fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
        fs::write(folder.path().join("tokenizer_config.json"), "{}").unwrap();
        let message = Tokenizer::open(folder.path()).unwrap().turn_end().unwrap_err().to_string();
        assert!(message.contains("there is no chat_template"), "{message}");
    }
}
