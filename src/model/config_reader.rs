//! Reading a published `config.json`: typed look-ups that collect every problem instead of stopping at the first.

use serde_json::{Map, Value};

use crate::runtime::units::as_index;

/// Largest count that a config may state (tensor dimensions stay far below 2³¹).
const COUNT_MAX: u64 = 1 << 31;

/// Most layers of a decoder; no published one comes near, and lists per layer stay small whatever a file states.
const LAYERS_MAX: u64 = 1 << 14;

/// The largest width or number of heads or experts of a family with experts or delta rules: with it no sum of all layers comes
/// near 2⁶⁴.
pub const SIZE_MAX: u64 = 1 << 15;

/// One thing that is wrong with a config, with its key and value.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each is")]
pub enum Problem {
    #[error("`{key}` is missing; a model of this family states it")]
    Missing { key: String },
    #[error("`{key}` is {found}; it must be {wanted}")]
    Value { key: String, found: String, wanted: &'static str },
    #[error(
        "`{key}` is \"{found}\", which longstraw does not compute; it computes {known}, and the nearest of these is \"{nearest}\""
    )]
    ModelType { key: String, found: String, known: String, nearest: String },
    #[error("`{key}` is {found}, which longstraw does not compute; it computes {supported}")]
    Unsupported { key: String, found: String, supported: &'static str },
    #[error(
        "`num_attention_heads` is {query_heads} and `num_key_value_heads` is {kv_heads}; the first must be a multiple of the second"
    )]
    Heads { query_heads: u64, kv_heads: u64 },
    #[error(
        "`head_dim` is missing and `hidden_size` {width} is no multiple of `num_attention_heads` {query_heads}; state `head_dim`"
    )]
    HeadDim { width: u64, query_heads: u64 },
    #[error("`{key}` has {found} entries for {layers} layers (`num_hidden_layers`)")]
    Layers { key: String, found: usize, layers: usize },
}

impl Problem {
    /// Whether the value stands in the run's configuration, and not in the checkpoint's.
    #[must_use]
    pub fn is_of_the_run(&self) -> bool {
        match self {
            Problem::Missing { key } | Problem::Value { key, .. } | Problem::Unsupported { key, .. } => {
                key.starts_with("[model] ")
            }
            _ => false,
        }
    }
}

/// A table of a config, and the problems found in it so far.
///
/// Every look-up returns a usable value, so that reading goes on to the next key; the value of a key with a problem is
/// never used, because a file with problems is refused as a whole.
#[derive(Debug)]
pub struct ConfigReader<'a> {
    table: &'a Map<String, Value>,
    outer: &'a Map<String, Value>,
    prefix: &'a str,
    /// What is wrong so far.
    pub problems: Vec<Problem>,
}

impl<'a> ConfigReader<'a> {
    /// The text model's table of a config: `text_config` where there is one, else the whole file.
    #[must_use]
    pub fn of_text_model(config: &'a Map<String, Value>) -> ConfigReader<'a> {
        match config.get("text_config").and_then(Value::as_object) {
            Some(inner) => ConfigReader { table: inner, outer: config, prefix: "text_config.", problems: Vec::new() },
            None => ConfigReader { table: config, outer: config, prefix: "", problems: Vec::new() },
        }
    }

    /// Another table of the same file (or one given in its place), named `prefix`.
    #[must_use]
    pub fn within<'b>(table: &'b Map<String, Value>, prefix: &'b str) -> ConfigReader<'b> {
        ConfigReader { table, outer: table, prefix, problems: Vec::new() }
    }

    /// The key as messages name it.
    #[must_use]
    pub fn name(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// The raw value; `null` counts as absent.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&'a Value> {
        self.table.get(key).filter(|value| !value.is_null())
    }

    /// The raw value of a key that may stand in the text model's table or at the top level; `null` counts as absent.
    #[must_use]
    pub fn value_here_or_outside(&self, key: &str) -> Option<&'a Value> {
        self.value(key).or_else(|| self.outer.get(key).filter(|value| !value.is_null()))
    }

    /// Whether the key is there, be it `null`.
    #[must_use]
    pub fn states(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// A count of at least 1. Absent: `default`, or a problem where there is none.
    pub fn count(&mut self, key: &str, default: Option<u64>) -> u64 {
        let Some(value) = self.value(key) else {
            return default.unwrap_or_else(|| {
                self.problems.push(Problem::Missing { key: self.name(key) });
                1
            });
        };
        value.as_u64().filter(|count| (1..=COUNT_MAX).contains(count)).unwrap_or_else(|| {
            self.refuse(key, value, "a whole number from 1 to 2^31");
            1
        })
    }

    /// A width, or a number of heads or experts: a count of at most [`SIZE_MAX`]. Absent: `default`, or a problem.
    pub fn size(&mut self, key: &str, default: Option<u64>) -> u64 {
        let size = self.count(key, default);
        if size > SIZE_MAX {
            self.refuse(key, &Value::from(size), "a whole number from 1 to 32768");
        }
        size.min(SIZE_MAX)
    }

    /// A number of layers. Absent: a problem.
    pub fn layers(&mut self, key: &str) -> usize {
        let stated = self.count(key, None);
        if stated > LAYERS_MAX {
            self.refuse(key, &Value::from(stated), "at most 16384");
        }
        as_index(stated.min(LAYERS_MAX))
    }

    /// A finite number above 0. Absent: `default`, or a problem where there is none.
    pub fn positive(&mut self, key: &str, default: Option<f64>) -> f64 {
        let Some(value) = self.value(key) else {
            return default.unwrap_or_else(|| {
                self.problems.push(Problem::Missing { key: self.name(key) });
                1.0
            });
        };
        value.as_f64().filter(|x| x.is_finite() && *x > 0.0).unwrap_or_else(|| {
            self.refuse(key, value, "a finite number above 0");
            1.0
        })
    }

    /// A finite number that may be absent.
    pub fn number(&mut self, key: &str) -> Option<f64> {
        let value = self.value(key)?;
        let number = value.as_f64().filter(|x| x.is_finite());
        if number.is_none() {
            self.refuse(key, value, "a finite number");
        }
        number
    }

    /// A switch. Absent: `default`.
    pub fn flag(&mut self, key: &str, default: bool) -> bool {
        self.flag_from(self.value(key), key, default)
    }

    /// A switch that may stand in the text model's table or at the top level.
    pub fn flag_here_or_outside(&mut self, key: &str, default: bool) -> bool {
        self.flag_from(self.value_here_or_outside(key), key, default)
    }

    /// A word. Absent: `default`.
    pub fn word(&mut self, key: &str, default: &'a str) -> &'a str {
        let Some(value) = self.value(key) else { return default };
        value.as_str().unwrap_or_else(|| {
            self.refuse(key, value, "a word in quotes");
            default
        })
    }

    /// Token ids: one, a list, or none.
    pub fn tokens(&mut self, key: &str, default: &[u64]) -> Vec<u64> {
        if !self.states(key) {
            return default.to_vec();
        }
        let Some(value) = self.value(key) else { return Vec::new() };
        let ids: Option<Vec<u64>> = match value {
            Value::Array(ids) => ids.iter().map(Value::as_u64).collect(),
            one => one.as_u64().map(|id| vec![id]),
        };
        ids.unwrap_or_else(|| {
            self.refuse(key, value, "a token id or a list of token ids");
            Vec::new()
        })
    }

    /// As [`ConfigReader::tokens`], from the top level where the text model's table does not state the key.
    pub fn tokens_here_or_outside(&mut self, key: &str, default: &[u64]) -> Vec<u64> {
        if self.states(key) {
            return self.tokens(key, default);
        }
        let mut outer = ConfigReader::within(self.outer, "");
        let ids = outer.tokens(key, default);
        self.problems.append(&mut outer.problems);
        ids
    }

    /// A list with one word a layer: for each layer its index in `known`. `None` where the list is absent or not sound.
    pub fn layer_words(
        &mut self,
        key: &str,
        layers: usize,
        known: &[&str],
        wanted: &'static str,
    ) -> Option<Vec<usize>> {
        let value = self.value(key)?;
        let Some(list) = value.as_array() else {
            self.refuse(key, value, "a list with one entry per layer");
            return None;
        };
        if list.len() != layers {
            self.problems.push(Problem::Layers { key: self.name(key), found: list.len(), layers });
            return None;
        }
        let mut indices = Vec::with_capacity(layers);
        for word in list {
            let Some(index) = known.iter().position(|known| word == known) else {
                self.unsupported(key, word, wanted);
                return None;
            };
            indices.push(index);
        }
        Some(indices)
    }

    /// Notes that the value of `key` is not one of what is `wanted`.
    pub fn refuse(&mut self, key: &str, found: &Value, wanted: &'static str) {
        self.problems.push(Problem::Value { key: self.name(key), found: found.to_string(), wanted });
    }

    /// Notes that the maths for the value of `key` is not built.
    pub fn unsupported(&mut self, key: &str, found: &Value, supported: &'static str) {
        self.problems.push(Problem::Unsupported { key: self.name(key), found: found.to_string(), supported });
    }

    fn flag_from(&mut self, value: Option<&Value>, key: &str, default: bool) -> bool {
        let Some(value) = value else { return default };
        value.as_bool().unwrap_or_else(|| {
            self.refuse(key, value, "true or false");
            default
        })
    }
}
