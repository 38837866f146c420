//! settings.json as a value: JSON without duplicate keys.
//!
//! JSON readers keep the last of two equal keys in silence. TOML refuses them, and so does this reader.

use std::fmt;

use figment::value::{Dict, Empty, Value};
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// The object that `text` holds.
pub(super) fn object(text: &str) -> Result<Dict, serde_json::Error> {
    serde_json::from_str::<Object>(text).map(|object| object.0)
}

struct Object(Dict);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ValueVisitor).map(|value| Object(value.into_dict().unwrap_or_default()))
    }
}

struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor).map(Unique)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object { \"key\": value, … }")
    }

    fn visit_bool<E: Error>(self, on: bool) -> Result<Value, E> {
        Ok(Value::from(on))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Value, E> {
        Ok(Value::from(number))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Value, E> {
        Ok(Value::from(number))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<Value, E> {
        Ok(Value::from(number))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        Ok(Value::from(text))
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::from(Empty::Unit))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values: Vec<Value> = Vec::new();
        while let Some(Unique(value)) = items.next_element()? {
            values.push(value);
        }
        Ok(Value::from(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut pairs: A) -> Result<Value, A::Error> {
        let mut dict = Dict::new();
        while let Some((key, Unique(value))) = pairs.next_entry::<String, Unique>()? {
            if dict.insert(key.clone(), value).is_some() {
                return Err(A::Error::custom(format_args!("duplicate key {key}")));
            }
        }
        Ok(Value::from(dict))
    }
}
