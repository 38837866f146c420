//! The GGUF container: header keys, tensor table, and tensor bytes on demand. Why no crate reads it:
//! `docs/decisions/0026-gguf.md`.
//!
//! Tensors are read by offset, a band of rows at a time, and not through a memory map: a file that is truncated while it
//! is read gives an error instead of a signal, and memory stays bounded by the band.

use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use indexmap::IndexMap;

use super::blocks::Quant;
use super::error::Error;
use crate::runtime::file_error::FileError;
use crate::runtime::units::{as_index, from_index};

/// Most keys or tensors of a header; real files have a few thousand.
const ENTRIES_MAX: u64 = 1 << 20;
const DIMENSIONS_MAX: u64 = 4;

/// A header value; integers of all widths become 64 bits.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    /// float64, or the shortest decimal that reads back to the stored float32.
    Float(f64),
    Bool(bool),
    Text(String),
    List(Vec<Value>),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Unsigned(number) => number.fmt(f),
            Value::Signed(number) => number.fmt(f),
            Value::Float(number) => number.fmt(f),
            Value::Bool(flag) => flag.fmt(f),
            Value::Text(text) => write!(f, "the text {text:?}"),
            Value::List(items) => write!(f, "a list of {}", items.len()),
        }
    }
}

/// One tensor of the file.
#[derive(Clone, Debug)]
pub(super) struct StoredTensor {
    pub(super) name: String,
    /// Dimensions, innermost first, at least one.
    pub(super) dims: Vec<u64>,
    quant: Quant,
    /// Offset of the first byte in the file.
    start: u64,
}

impl StoredTensor {
    /// Values in a row.
    pub(super) fn width(&self) -> u64 {
        self.dims[0]
    }

    pub(super) fn rows(&self) -> u64 {
        self.dims[1..].iter().product()
    }

    fn row_bytes(&self) -> u64 {
        self.width() / self.quant.block_values() * self.quant.block_bytes()
    }
}

/// An open GGUF file. Its header has been read, and all its tensors are inside the file.
#[derive(Debug)]
pub(super) struct Gguf {
    pub(super) path: PathBuf,
    /// Length of the file.
    pub(super) bytes: u64,
    keys: IndexMap<String, Value>,
    pub(super) tensors: IndexMap<String, StoredTensor>,
    file: File,
}

impl Gguf {
    /// Opens `path`, reads its header, and checks that every tensor is inside the file.
    pub(super) fn open(path: &Path) -> Result<Gguf, Error> {
        let file = File::open(path).map_err(FileError::at(path, "open it"))?;
        let bytes = file.metadata().map_err(FileError::at(path, "read its length"))?.len();
        let reader = BufReader::new(file.try_clone().map_err(FileError::at(path, "open it twice"))?);
        let mut header = Header { path, reader, at: 0, bytes };
        header.magic_and_version()?;
        let tensors_count = header.count("tensor count")?;
        let keys_count = header.count("key count")?;
        let keys = header.keys(keys_count)?;
        let mut tensors = header.tensors(tensors_count)?;
        let alignment = match keys.get("general.alignment") {
            None => 32,
            Some(Value::Unsigned(alignment)) if alignment.is_power_of_two() => *alignment,
            Some(other) => {
                let (file, key) = (path.to_owned(), "general.alignment".to_owned());
                return Err(Error::Key { file, key, found: other.to_string(), wanted: "a power of two".to_owned() });
            }
        };
        let data_start = header.at.next_multiple_of(alignment);
        for tensor in tensors.values_mut() {
            let size = tensor.rows().saturating_mul(tensor.row_bytes());
            tensor.start = data_start.saturating_add(tensor.start);
            let end = tensor.start.saturating_add(size);
            if end > bytes {
                let (file, tensor, start) = (path.to_owned(), tensor.name.clone(), tensor.start);
                return Err(Error::Outside { file, tensor, start, end, bytes });
            }
        }
        Ok(Gguf { path: path.to_owned(), bytes, keys, tensors, file })
    }

    /// Reads `count` rows from row `first`, as float32, row-major, all finite.
    pub(super) fn rows(&self, tensor: &StoredTensor, first: u64, count: u64) -> Result<Vec<f32>, Error> {
        let mut stored = vec![0; as_index(count * tensor.row_bytes())];
        let offset = tensor.start + first * tensor.row_bytes();
        self.file.read_exact_at(&mut stored, offset).map_err(FileError::at(&self.path, "read a tensor"))?;
        let values = tensor.quant.values(&stored);
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(at) => Err(Error::NotFinite {
                file: self.path.clone(),
                tensor: tensor.name.clone(),
                index: first * tensor.width() + from_index(at),
                value: values[at],
            }),
        }
    }

    pub(super) fn unsigned(&self, key: &str) -> Result<Option<u64>, Error> {
        self.optional(key, "a non-negative integer", |value| match value {
            Value::Unsigned(number) => Some(*number),
            Value::Signed(number) => u64::try_from(*number).ok(),
            _ => None,
        })
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f64>, Error> {
        self.optional(key, "a finite number", |value| match value {
            Value::Float(number) if number.is_finite() => Some(*number),
            _ => None,
        })
    }

    /// A boolean; absent means false.
    pub(super) fn flag(&self, key: &str) -> Result<bool, Error> {
        let flag = self.optional(key, "true or false", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        });
        Ok(flag?.unwrap_or(false))
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>, Error> {
        self.optional(key, "a text", |value| match value {
            Value::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    pub(super) fn list(&self, key: &str) -> Result<Option<&[Value]>, Error> {
        self.optional(key, "a list", |value| match value {
            Value::List(items) => Some(items.as_slice()),
            _ => None,
        })
    }

    fn optional<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.keys.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.wrong(key, value, wanted))
    }

    /// The value that one of the functions above reads, or an error that names the missing key.
    pub(super) fn required<'a, T>(
        &'a self,
        key: &str,
        read: impl Fn(&'a Gguf, &str) -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        read(self, key)?.ok_or_else(|| Error::KeyMissing { file: self.path.clone(), key: key.to_owned() })
    }

    /// The error for a key whose value cannot be used.
    #[expect(clippy::needless_pass_by_value, reason = "an error path: callers pass texts and numbers alike")]
    pub(super) fn wrong(&self, key: &str, found: impl ToString, wanted: impl ToString) -> Error {
        Error::Key {
            file: self.path.clone(),
            key: key.to_owned(),
            found: found.to_string(),
            wanted: wanted.to_string(),
        }
    }

    /// The error for a tensor whose dimensions (innermost first) are not the wanted ones.
    pub(super) fn check_dims(&self, tensor: &StoredTensor, wanted: Vec<u64>) -> Result<(), Error> {
        if tensor.dims == wanted {
            return Ok(());
        }
        let (file, found) = (self.path.clone(), tensor.dims.clone());
        Err(Error::Shape { file, tensor: tensor.name.clone(), found, wanted })
    }
}

/// Reads a header; checks every length against the rest of the file before it allocates.
struct Header<'path> {
    path: &'path Path,
    reader: BufReader<File>,
    /// Offset of the reader.
    at: u64,
    /// Length of the file.
    bytes: u64,
}

impl Header<'_> {
    fn magic_and_version(&mut self) -> Result<(), Error> {
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

    /// The tensor table; `start` is still relative to the first byte of the tensor data.
    fn tensors(&mut self, count: u64) -> Result<IndexMap<String, StoredTensor>, Error> {
        let mut tensors = IndexMap::new();
        for index in 0..count {
            let name = self.text(&format!("the name of tensor {index} of {count}"))?;
            let dims_count = u64::from(u32::from_le_bytes(self.array(&name)?));
            if !(1..=DIMENSIONS_MAX).contains(&dims_count) {
                return Err(self.header(format!("dimension count of tensor {name}"), dims_count, "only 1 to 4"));
            }
            let mut dims = Vec::new();
            for _ in 0..dims_count {
                let dim = u64::from_le_bytes(self.array(&name)?);
                if !(1..1 << 40).contains(&dim) {
                    return Err(self.header(format!("a dimension of tensor {name}"), dim, "only 1 to 2^40"));
                }
                dims.push(dim);
            }
            if dims.iter().try_fold(1_u64, |product, dim| product.checked_mul(*dim)).is_none_or(|all| all > 1 << 48) {
                return Err(self.header(format!("largest dimension of tensor {name}"), dims[0], "2^48 values in all"));
            }
            let kind = u32::from_le_bytes(self.array(&name)?);
            let start = u64::from_le_bytes(self.array(&name)?);
            let quant = Quant::from_number(kind).map_err(|found| Error::Quantisation {
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
            if tensors.contains_key(&name) {
                return Err(Error::Twice { file: self.path.to_owned(), name });
            }
            tensors.insert(name.clone(), StoredTensor { name, dims, quant, start });
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
            _ => {
                return Err(self.header(
                    format!("value type of {key}"),
                    kind.into(),
                    "only 0 to 12, and lists of scalars",
                ));
            }
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
        self.reader.read_exact(target).map_err(FileError::at(self.path, "read its header"))?;
        self.at += from_index(target.len());
        Ok(())
    }

    /// Checks that the rest of the file has at least `needed` bytes.
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
