//! The GGUF container: header keys, tensor table, and tensor bytes on demand.
//!
//! Tensor bytes come by positioned reads, a band of rows at a time, not by a memory map: a file that is cut short while
//! it is read gives an error instead of a signal, and memory stays bounded by the band.

use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use indexmap::IndexMap;

use super::blocks::Quant;
use super::error::Error;
use crate::runtime::units::{as_index, from_index};

/// Most keys or tensors a header may state; real files have a few thousand.
const ENTRIES_MAX: u64 = 1 << 20;
/// Most dimensions of a tensor.
const DIMENSIONS_MAX: u64 = 4;

/// A header value. Numbers keep 64 bits.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// float32, as the shortest decimal that reads back to it, or float64.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    Text(String),
    /// A list of any of these.
    List(Vec<Value>),
}

/// Where one tensor lies and how it is stored.
#[derive(Clone, Debug)]
pub(super) struct Info {
    /// Name in the file.
    pub(super) name: String,
    /// Dimensions, innermost first, at least one.
    pub(super) dims: Vec<u64>,
    /// The stored type.
    pub(super) quant: Quant,
    /// First byte in the file.
    start: u64,
}

impl Info {
    /// Values in a row.
    pub(super) fn width(&self) -> u64 {
        self.dims[0]
    }

    /// How many rows.
    pub(super) fn rows(&self) -> u64 {
        self.dims[1..].iter().product()
    }

    /// Bytes of a row.
    fn row_bytes(&self) -> u64 {
        self.width() / self.quant.block_values() * self.quant.block_bytes()
    }
}

/// An open GGUF file whose header has been read and whose tensors all lie within it.
#[derive(Debug)]
pub(super) struct Gguf {
    /// The path, as errors name it.
    pub(super) path: PathBuf,
    /// Length of the file in bytes.
    pub(super) bytes: u64,
    /// Header keys in file order.
    pub(super) keys: IndexMap<String, Value>,
    /// Tensors in file order.
    pub(super) tensors: IndexMap<String, Info>,
    file: File,
}

impl Gguf {
    /// Reads the header of `path`, checks every tensor's place, and leaves the file open.
    pub(super) fn open(path: &Path) -> Result<Gguf, Error> {
        let io = |action| move |source| Error::Io { file: path.to_owned(), action, source };
        let file = File::open(path).map_err(io("open it"))?;
        let bytes = file.metadata().map_err(io("ask its length"))?.len();
        let reader = BufReader::new(file.try_clone().map_err(io("open it twice"))?);
        let mut header = Header { path, reader, at: 0, bytes };
        header.opening()?;
        let tensors_count = header.count("tensor count")?;
        let keys_count = header.count("key count")?;
        let keys = header.keys(keys_count)?;
        let mut tensors = header.tensors(tensors_count)?;
        let alignment = match keys.get("general.alignment") {
            None => 32,
            Some(Value::Unsigned(alignment)) if alignment.is_power_of_two() => *alignment,
            Some(other) => return Err(wrong(path, "general.alignment", other, "a power of two")),
        };
        let data_start = header.at.next_multiple_of(alignment);
        for info in tensors.values_mut() {
            let start = data_start.checked_add(info.start);
            let size = info.rows().checked_mul(info.row_bytes());
            let end = start.zip(size).and_then(|(start, size)| start.checked_add(size));
            info.start = start.unwrap_or(u64::MAX);
            if end.is_none_or(|end| end > bytes) {
                return Err(Error::Outside {
                    file: path.to_owned(),
                    tensor: info.name.clone(),
                    start: info.start,
                    end: end.unwrap_or(u64::MAX),
                    bytes,
                });
            }
        }
        Ok(Gguf { path: path.to_owned(), bytes, keys, tensors, file })
    }

    /// The values of `count` rows from row `first`, float32, row-major; all finite.
    pub(super) fn rows(&self, info: &Info, first: u64, count: u64) -> Result<Vec<f32>, Error> {
        let mut stored = vec![0; as_index(count * info.row_bytes())];
        let offset = info.start + first * info.row_bytes();
        self.file.read_exact_at(&mut stored, offset).map_err(|source| Error::Io {
            file: self.path.clone(),
            action: "read a tensor",
            source,
        })?;
        let values = info.quant.values(&stored);
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(at) => Err(Error::NotFinite {
                file: self.path.clone(),
                tensor: info.name.clone(),
                index: first * info.width() + from_index(at),
                value: values[at],
            }),
        }
    }

    /// The value of `key`, if it stands in the header.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.keys.get(key)
    }

    /// A non-negative integer.
    pub(super) fn unsigned(&self, key: &str) -> Result<Option<u64>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(number)) => Ok(Some(*number)),
            Some(Value::Signed(number)) if *number >= 0 => Ok(Some(number.unsigned_abs())),
            Some(other) => Err(wrong(&self.path, key, other, "a non-negative integer")),
        }
    }

    /// A floating-point number.
    pub(super) fn float(&self, key: &str) -> Result<Option<f64>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(number)) if number.is_finite() => Ok(Some(*number)),
            Some(other) => Err(wrong(&self.path, key, other, "a finite number")),
        }
    }

    /// A truth value; absent is false.
    pub(super) fn flag(&self, key: &str) -> Result<bool, Error> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(wrong(&self.path, key, other, "true or false")),
        }
    }

    /// A text.
    pub(super) fn text(&self, key: &str) -> Result<Option<&str>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(&self.path, key, other, "a text")),
        }
    }

    /// A list.
    pub(super) fn list(&self, key: &str) -> Result<Option<&[Value]>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::List(items)) => Ok(Some(items)),
            Some(other) => Err(wrong(&self.path, key, other, "a list")),
        }
    }

    /// The value, or an error that names the key.
    pub(super) fn needed<T>(&self, key: &str, value: Option<T>) -> Result<T, Error> {
        value.ok_or_else(|| Error::KeyMissing { file: self.path.clone(), key: key.to_owned() })
    }

    /// The error for a key whose value cannot be used.
    #[expect(clippy::needless_pass_by_value, reason = "an error path: callers hand over texts and numbers alike")]
    pub(super) fn wrong(&self, key: &str, found: impl ToString, wanted: impl ToString) -> Error {
        Error::Key {
            file: self.path.clone(),
            key: key.to_owned(),
            found: found.to_string(),
            wanted: wanted.to_string(),
        }
    }
}

/// The error for a key of the wrong type.
fn wrong(path: &Path, key: &str, found: &Value, wanted: &str) -> Error {
    let found = match found {
        Value::Unsigned(number) => number.to_string(),
        Value::Signed(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Bool(flag) => flag.to_string(),
        Value::Text(text) => format!("the text {text:?}"),
        Value::List(items) => format!("a list of {}", items.len()),
    };
    Error::Key { file: path.to_owned(), key: key.to_owned(), found, wanted: wanted.to_owned() }
}

/// A reader that knows its offset and never asks for more than the file holds.
struct Header<'path> {
    path: &'path Path,
    reader: BufReader<File>,
    at: u64,
    bytes: u64,
}

impl Header<'_> {
    fn opening(&mut self) -> Result<(), Error> {
        let found = self.array("the magic")?;
        if &found != b"GGUF" {
            return Err(Error::Magic { file: self.path.to_owned(), found });
        }
        let version = u32::from_le_bytes(self.array("the version")?);
        if !(2..=3).contains(&version) {
            return Err(Error::Version { file: self.path.to_owned(), version });
        }
        Ok(())
    }

    fn keys(&mut self, count: u64) -> Result<IndexMap<String, Value>, Error> {
        let mut keys = IndexMap::new();
        for index in 0..count {
            let key = self.text(&format!("key {index} of {count}"))?;
            let kind = u32::from_le_bytes(self.array(&key)?);
            let value = self.value(&key, kind)?;
            if keys.contains_key(&key) {
                return Err(Error::Twice { file: self.path.to_owned(), name: key });
            }
            keys.insert(key, value);
        }
        Ok(keys)
    }

    /// The tensor table; `start` is still relative to the data.
    fn tensors(&mut self, count: u64) -> Result<IndexMap<String, Info>, Error> {
        let mut tensors = IndexMap::new();
        for index in 0..count {
            let name = self.text(&format!("the name of tensor {index} of {count}"))?;
            let dims_count = u64::from(u32::from_le_bytes(self.array(&name)?));
            if !(1..=DIMENSIONS_MAX).contains(&dims_count) {
                return Err(self.header(format!("dimension count of tensor {name}"), dims_count, "1 to 4"));
            }
            let mut dims = Vec::new();
            for _ in 0..dims_count {
                let dim = u64::from_le_bytes(self.array(&name)?);
                if !(1..1 << 40).contains(&dim) {
                    return Err(self.header(format!("a dimension of tensor {name}"), dim, "1 to 2^40"));
                }
                dims.push(dim);
            }
            if dims.iter().try_fold(1_u64, |product, dim| product.checked_mul(*dim)).is_none_or(|all| all > 1 << 48) {
                return Err(self.header(format!("largest dimension of tensor {name}"), dims[0], "2^48 values in all"));
            }
            let kind = u32::from_le_bytes(self.array(&name)?);
            let start = u64::from_le_bytes(self.array(&name)?);
            let quant = Quant::of(kind).map_err(|found| Error::Quantisation {
                file: self.path.to_owned(),
                tensor: name.clone(),
                found,
                known: Quant::names(),
            })?;
            if dims[0] % quant.block_values() != 0 {
                return Err(Error::Blocks {
                    file: self.path.to_owned(),
                    tensor: name,
                    row: dims[0],
                    block: quant.block_values(),
                    kind: quant.name(),
                });
            }
            let info = Info { name: name.clone(), dims, quant, start };
            if tensors.insert(name, info).is_some() {
                let name = tensors.pop().map(|(name, _)| name).unwrap_or_default();
                return Err(Error::Twice { file: self.path.to_owned(), name });
            }
        }
        Ok(tensors)
    }

    fn value(&mut self, key: &str, kind: u32) -> Result<Value, Error> {
        if kind != 9 {
            return self.scalar(key, kind);
        }
        let item_kind = u32::from_le_bytes(self.array(key)?);
        let count = u64::from_le_bytes(self.array(key)?);
        self.check(key, count)?;
        (0..count).map(|_| self.scalar(key, item_kind)).collect::<Result<_, _>>().map(Value::List)
    }

    fn scalar(&mut self, key: &str, kind: u32) -> Result<Value, Error> {
        Ok(match kind {
            0 => Value::Unsigned(u8::from_le_bytes(self.array(key)?).into()),
            1 => Value::Signed(i8::from_le_bytes(self.array(key)?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.array(key)?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.array(key)?).into()),
            4 => Value::Unsigned(u32::from_le_bytes(self.array(key)?).into()),
            5 => Value::Signed(i32::from_le_bytes(self.array(key)?).into()),
            6 => {
                let single = f32::from_le_bytes(self.array(key)?);
                Value::Float(single.to_string().parse().unwrap_or(f64::from(single)))
            }
            7 => Value::Bool(u8::from_le_bytes(self.array(key)?) != 0),
            8 => Value::Text(self.text(key)?),
            10 => Value::Unsigned(u64::from_le_bytes(self.array(key)?)),
            11 => Value::Signed(i64::from_le_bytes(self.array(key)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            _ => return Err(self.header(format!("value type of {key}"), kind.into(), "0 to 12, lists of scalars")),
        })
    }

    fn count(&mut self, what: &str) -> Result<u64, Error> {
        let count = u64::from_le_bytes(self.array(what)?);
        if count > ENTRIES_MAX {
            return Err(self.header(what.to_owned(), count, "at most 2^20"));
        }
        Ok(count)
    }

    fn text(&mut self, what: &str) -> Result<String, Error> {
        let length = u64::from_le_bytes(self.array(what)?);
        self.check(what, length)?;
        let offset = self.at;
        let mut text = vec![0; as_index(length)];
        self.fill(&mut text)?;
        String::from_utf8(text).map_err(|_| Error::Text { file: self.path.to_owned(), what: what.to_owned(), offset })
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Error> {
        self.check(what, from_index(N))?;
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, target: &mut [u8]) -> Result<(), Error> {
        self.reader.read_exact(target).map_err(|source| Error::Io {
            file: self.path.to_owned(),
            action: "read its header",
            source,
        })?;
        self.at += from_index(target.len());
        Ok(())
    }

    /// At least `needed` more bytes are there.
    fn check(&self, what: &str, needed: u64) -> Result<(), Error> {
        if needed <= self.bytes - self.at {
            return Ok(());
        }
        Err(Error::Truncated {
            file: self.path.to_owned(),
            what: what.to_owned(),
            offset: self.at,
            needed,
            bytes: self.bytes,
        })
    }

    fn header(&self, what: String, found: u64, allowed: &'static str) -> Error {
        Error::Header { file: self.path.to_owned(), what, found, allowed }
    }
}
