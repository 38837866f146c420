//! The numbers of a run as `TensorBoard` reads them: `tensorboard/events.out.tfevents.*` in the run directory.
//!
//! ```text
//!   record   length (8 bytes) · masked CRC of the length · event · masked CRC of the event         (TFRecord)
//!   event    1 wall_time · 2 step · 3 file_version | 5 summary { 1 value { 1 tag · 2 simple_value } } | 7 session_log
//! ```
//!
//! Field numbers follow `tensorflow/core/util/event.proto` and `framework/summary.proto`. The four messages are written
//! without a protobuf crate: docs/decisions/0001-dependencies.md has the reason.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::error::Error;
use super::evaluation::Evaluation;
use super::step::Step;
use crate::runtime::units::from_index;

/// Viewers look for files with this prefix.
const PREFIX: &str = "events.out.tfevents.";

/// One run's event file.
#[derive(Debug)]
pub(super) struct Events {
    file: PathBuf,
    out: File,
}

impl Events {
    /// Opens a new file that viewers read after the existing ones. It states that the run starts after its first `made`
    /// updates, so that a viewer forgets later updates of an interrupted run. A new run (absent) removes the files of the
    /// run before.
    pub(super) fn open(folder: &Path, made: Option<u64>) -> Result<Events, Error> {
        let folder = folder.join("tensorboard");
        let write = |source| Error::Write { file: folder.clone(), source };
        let mut earlier = Vec::new();
        fs::create_dir_all(&folder).map_err(write)?;
        for entry in fs::read_dir(&folder).map_err(write)? {
            let entry = entry.map_err(write)?;
            let name = entry.file_name();
            let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
            if made.is_none() {
                fs::remove_file(entry.path()).map_err(|source| Error::Write { file: entry.path(), source })?;
            } else {
                earlier.extend(rest.split('.').next().and_then(|time| time.parse::<u64>().ok()));
            }
        }
        // Viewers read the files in the order of their names.
        let after = earlier.iter().max().map_or(0, |last| last.saturating_add(1));
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()).max(after);
        let host = rustix::system::uname().nodename().to_string_lossy().replace(['/', '.'], "-");
        let file = folder.join(format!("{PREFIX}{time:010}.{host}.{}", std::process::id()));
        let out = File::create(&file).map_err(|source| Error::Write { file: file.clone(), source })?;
        let mut events = Events { file, out };
        let start = [
            event(now_s(), 0, &bytes(3, b"brain.Event:2")),
            event(now_s(), made.unwrap_or(0) + 1, &bytes(7, &number(1, START))),
        ];
        events.write(&start)?;
        Ok(events)
    }

    /// Writes every number of an update.
    pub(super) fn step(&mut self, step: &Step) -> Result<(), Error> {
        self.numbers(step.step, &step.numbers())
    }

    /// Writes every number of an evaluation.
    pub(super) fn evaluation(&mut self, evaluation: &Evaluation) -> Result<(), Error> {
        self.numbers(evaluation.step, &evaluation.numbers())
    }

    fn numbers(&mut self, step: u64, numbers: &[(String, f64)]) -> Result<(), Error> {
        let values: Vec<u8> = numbers.iter().flat_map(|(tag, value)| bytes(1, &scalar(tag, *value))).collect();
        self.write(&[event(now_s(), step, &bytes(5, &values))])
    }

    fn write(&mut self, events: &[Vec<u8>]) -> Result<(), Error> {
        let records: Vec<u8> = events.iter().flat_map(|event| record(event)).collect();
        let written = self.out.write_all(&records).and_then(|()| self.out.flush());
        written.map_err(|source| Error::Write { file: self.file.clone(), source })
    }
}

/// Session status: the run starts here.
const START: u64 = 1;

fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// An event of update `step` with the encoded fields `content`.
fn event(wall_time_s: f64, step: u64, content: &[u8]) -> Vec<u8> {
    let mut event = key(1, FIXED_64);
    event.extend(wall_time_s.to_le_bytes());
    event.extend(number(2, step));
    event.extend(content);
    event
}

/// A summary value: a tag and a number.
fn scalar(tag: &str, value: f64) -> Vec<u8> {
    #[expect(clippy::cast_possible_truncation, reason = "a simple value is a float32")]
    let value = value as f32;
    let mut scalar = bytes(1, tag.as_bytes());
    scalar.extend(key(2, FIXED_32));
    scalar.extend(value.to_le_bytes());
    scalar
}

/// Wire types of protobuf fields.
const VARINT: u64 = 0;
const FIXED_64: u64 = 1;
const LENGTH_DELIMITED: u64 = 2;
const FIXED_32: u64 = 5;

fn key(field: u64, wire_type: u64) -> Vec<u8> {
    varint((field << 3) | wire_type)
}

fn number(field: u64, value: u64) -> Vec<u8> {
    [key(field, VARINT), varint(value)].concat()
}

fn bytes(field: u64, value: &[u8]) -> Vec<u8> {
    [&key(field, LENGTH_DELIMITED)[..], &varint(from_index(value.len())), value].concat()
}

/// Seven bits a byte, lowest first; the top bit is set where more bytes follow.
fn varint(mut value: u64) -> Vec<u8> {
    let mut written = Vec::new();
    loop {
        let [low, ..] = value.to_le_bytes();
        value >>= 7;
        if value == 0 {
            written.push(low & 0x7f);
            return written;
        }
        written.push(low | 0x80);
    }
}

/// A `TFRecord` with `data`.
fn record(data: &[u8]) -> Vec<u8> {
    let length = from_index(data.len()).to_le_bytes();
    [&length[..], &masked(&length).to_le_bytes(), data, &masked(data).to_le_bytes()].concat()
}

/// The masked checksum of `TFRecord`.
fn masked(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), bit by bit: a run writes a few kilobytes an update.
fn crc32c(data: &[u8]) -> u32 {
    let bit = |crc: u32, _| if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
    !data.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), bit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Seconds;

    /// One field of a message, read without any of the code above.
    #[derive(Debug, PartialEq)]
    enum Field {
        Number(u64),
        Double(f64),
        Float(f32),
        Bytes(Vec<u8>),
    }

    fn read_varint(data: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = data[0];
            *data = &data[1..];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        value
    }

    fn fields(mut data: &[u8]) -> Vec<(u64, Field)> {
        let mut found = Vec::new();
        while !data.is_empty() {
            let key = read_varint(&mut data);
            let field = match key & 7 {
                0 => Field::Number(read_varint(&mut data)),
                1 => {
                    let (value, rest) = data.split_at(8);
                    data = rest;
                    Field::Double(f64::from_le_bytes(value.try_into().unwrap()))
                }
                2 => {
                    let length = usize::try_from(read_varint(&mut data)).unwrap();
                    let (value, rest) = data.split_at(length);
                    data = rest;
                    Field::Bytes(value.to_vec())
                }
                5 => {
                    let (value, rest) = data.split_at(4);
                    data = rest;
                    Field::Float(f32::from_le_bytes(value.try_into().unwrap()))
                }
                other => panic!("wire type {other}"),
            };
            found.push((key >> 3, field));
        }
        found
    }

    /// The events of a file; asserts every checksum.
    fn records(mut data: &[u8]) -> Vec<Vec<(u64, Field)>> {
        let mut found = Vec::new();
        let checked = |data: &[u8], masked: &[u8]| {
            let unmasked = u32::from_le_bytes(masked.try_into().unwrap()).wrapping_sub(0xa282_ead8).rotate_left(15);
            assert_eq!(unmasked, crc32c(data));
        };
        while !data.is_empty() {
            checked(&data[..8], &data[8..12]);
            let length = usize::try_from(u64::from_le_bytes(data[..8].try_into().unwrap())).unwrap();
            checked(&data[12..12 + length], &data[12 + length..16 + length]);
            found.push(fields(&data[12..12 + length]));
            data = &data[16 + length..];
        }
        found
    }

    fn files(folder: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(folder.join("tensorboard")).unwrap();
        let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }

    #[test]
    fn checksums_are_the_published_ones() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn every_number_of_every_update_comes_back() {
        let room = tempfile::tempdir().unwrap();
        let mut events = Events::open(room.path(), None).unwrap();
        let update = |step: u64| Step {
            step,
            loss: -0.5,
            reward_mean: Some(0.1),
            seconds: Seconds { capture: 300.25, ..Seconds::default() },
            memory: [("capture".to_owned(), [1 << 40, 5])].into(),
            ..Step::default()
        };
        for step in [1, 2, 300] {
            events.step(&update(step)).unwrap();
        }
        let read = records(&fs::read(&files(room.path())[0]).unwrap());
        assert!(read[0].contains(&(3, Field::Bytes(b"brain.Event:2".to_vec()))), "{:?}", read[0]);
        assert_eq!(read[1][1..], [(2, Field::Number(1)), (7, Field::Bytes(vec![8, 1]))]);
        assert_eq!(read.len(), 2 + 3);
        for (event, step) in read[2..].iter().zip([1, 2, 300]) {
            assert!(matches!(event[0], (1, Field::Double(time)) if time > 1.7e9));
            assert_eq!(event[1], (2, Field::Number(step)));
            let (5, Field::Bytes(summary)) = &event[2] else { panic!("{event:?}") };
            let values: Vec<(String, f32)> = fields(summary)
                .into_iter()
                .map(|value| match value {
                    (1, Field::Bytes(value)) => match &fields(&value)[..] {
                        [(1, Field::Bytes(tag)), (2, Field::Float(value))] => {
                            (String::from_utf8(tag.clone()).unwrap(), *value)
                        }
                        other => panic!("{other:?}"),
                    },
                    other => panic!("{other:?}"),
                })
                .collect();
            #[expect(clippy::cast_possible_truncation, reason = "what a file can hold")]
            let expected: Vec<(String, f32)> =
                update(step).numbers().into_iter().map(|(tag, value)| (tag, value as f32)).collect();
            assert_eq!(values, expected);
        }
    }

    #[test]
    fn a_resumed_run_writes_a_later_file_and_a_new_run_removes_all() {
        let room = tempfile::tempdir().unwrap();
        Events::open(room.path(), None).unwrap();
        fs::write(room.path().join("tensorboard/notes.txt"), "mine").unwrap();
        let later = format!("{PREFIX}9999999998.host.1");
        fs::write(room.path().join("tensorboard").join(&later), "").unwrap();
        Events::open(room.path(), Some(4)).unwrap();
        let found = files(room.path());
        assert_eq!(found.len(), 4, "{found:?}");
        let last = records(&fs::read(&found[2]).unwrap());
        assert!(found[2].to_str().unwrap().contains(".9999999999."), "{found:?}");
        assert_eq!(last[1][1], (2, Field::Number(5)), "what an interrupted run wrote of update 5 is forgotten");
        Events::open(room.path(), None).unwrap();
        let found = files(room.path());
        assert!(found.len() == 2 && found[1].ends_with("notes.txt"), "{found:?}");
    }
}
