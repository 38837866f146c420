//! The state file, from which a rerun continues, and the data set.
//!
//! The state file has one line of options, then one line for each finished chunk in the order of completion. Each line is on
//! the disk before its thread sends the next request. The data set has its records in the order of the chunks: it is
//! rewritten from the state at the start, and grows as long as no earlier chunk is missing.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::{Error, Unusable};
use super::questions::{Exercise, record};
use super::texts::Chunk;
use crate::report::{no_locks, say};
use crate::runtime::file_lock::{Locked, lock};
use crate::runtime::units::from_index;

/// The result of a finished chunk.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Outcome {
    /// Index of the chunk.
    pub(super) chunk: usize,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) questions: Vec<Exercise>,
    /// Why there are no questions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) unusable: Option<Unusable>,
}

/// The content of a state file.
#[derive(Debug, Default)]
pub(super) struct SavedState {
    pub(super) outcomes: BTreeMap<usize, Outcome>,
    /// Bytes of whole lines; a process that was killed may leave part of a line after them.
    bytes: u64,
}

/// Both files, open for a run.
#[derive(Debug)]
pub(super) struct Journal<'a> {
    chunks: &'a [Chunk],
    paths: Paths,
    state: File,
    out: File,
    outcomes: BTreeMap<usize, Outcome>,
    /// The data set has the records of all chunks before this one.
    written: usize,
}

/// Paths of the two files.
#[derive(Clone, Debug)]
pub(super) struct Paths {
    out: PathBuf,
    state: PathBuf,
}

impl Paths {
    /// `out`, and `out` with `.state` appended.
    pub(super) fn new(out: &Path) -> Paths {
        let mut state = out.as_os_str().to_owned();
        state.push(".state");
        Paths { out: out.to_owned(), state: state.into() }
    }

    /// Reads the state file without changing it; default if there is none.
    ///
    /// # Errors
    /// When its options differ, or it is not a state.
    pub(super) fn saved_state(&self, options: &Map<String, Value>, chunks: usize) -> Result<SavedState, Error> {
        match fs::read(&self.state) {
            Ok(bytes) => self.parse(&bytes, options, chunks),
            Err(source) if source.kind() == std::io::ErrorKind::NotFound => {
                self.refuse_output_without_state()?;
                Ok(SavedState::default())
            }
            Err(source) => Err(Error::io(&self.state, "read it")(source)),
        }
    }

    /// A data set without a state belongs to somebody else.
    fn refuse_output_without_state(&self) -> Result<(), Error> {
        if self.out.exists() {
            return Err(Error::NoState { out: self.out.clone(), state: self.state.clone() });
        }
        Ok(())
    }

    fn parse(&self, bytes: &[u8], options: &Map<String, Value>, chunks: usize) -> Result<SavedState, Error> {
        let mut saved = SavedState::default();
        let wrong = |line| Error::NotState { state: self.state.clone(), line };
        let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let mut lines = bytes[..whole].split_inclusive(|&byte| byte == b'\n').enumerate().peekable();
        while let Some((index, line)) = lines.next() {
            if index == 0 {
                let header: Header = serde_json::from_slice(line).map_err(|_| wrong(1))?;
                self.check_options(&header.options, options)?;
            } else {
                match serde_json::from_slice::<Outcome>(line) {
                    Ok(outcome) if outcome.chunk < chunks => saved.outcomes.insert(outcome.chunk, outcome),
                    // After a power loss, a line may have its length but not its content.
                    Err(_) if lines.peek().is_none() => break,
                    _ => return Err(wrong(index + 1)),
                };
            }
            saved.bytes += from_index(line.len());
        }
        if saved.bytes == 0 {
            self.refuse_output_without_state()?;
        }
        Ok(saved)
    }

    fn check_options(&self, saved: &Map<String, Value>, options: &Map<String, Value>) -> Result<(), Error> {
        let short = |value: Option<&Value>| {
            let text = value.map_or_else(|| "nothing".into(), Value::to_string);
            text.chars().take(40).collect::<String>()
        };
        let keys = saved.keys().chain(options.keys().filter(|key| !saved.contains_key(*key)));
        let differences: Vec<String> = keys
            .filter(|key| saved.get(*key) != options.get(*key))
            .map(|key| format!("{key}: {}, now {}", short(saved.get(key)), short(options.get(key))))
            .collect();
        if differences.is_empty() {
            return Ok(());
        }
        Err(Error::OtherOptions { state: self.state.clone(), differences: differences.join("; ") })
    }
}

/// The first line of a state file.
#[derive(Deserialize, Serialize)]
struct Header {
    options: Map<String, Value>,
}

impl<'a> Journal<'a> {
    /// Opens both files, locks the state file, and cuts off a line that was not written completely.
    ///
    /// # Errors
    /// As [`Paths::saved_state`], and when a file cannot be written.
    pub(super) fn open(paths: &Paths, options: &Map<String, Value>, chunks: &'a [Chunk]) -> Result<Journal<'a>, Error> {
        let Paths { out, state: state_path } = paths;
        if let Some(folder) = out.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(Error::io(folder, "create the folder"))?;
        }
        if !state_path.exists() {
            paths.refuse_output_without_state()?;
        }
        let state = OpenOptions::new().create(true).read(true).write(true).truncate(false).open(state_path);
        let mut state = state.map_err(Error::io(state_path, "open it"))?;
        match lock(&state).map_err(Error::io(state_path, "lock it"))? {
            Locked::Held => {}
            Locked::Busy => return Err(Error::Busy { state: state_path.clone() }),
            Locked::Unsupported(error) => say(&format!("longstraw: {}", no_locks(state_path, &error))),
        }
        let mut bytes = Vec::new();
        state.read_to_end(&mut bytes).map_err(Error::io(state_path, "read it"))?;
        let saved = paths.parse(&bytes, options, chunks.len())?;
        state.set_len(saved.bytes).map_err(Error::io(state_path, "truncate it"))?;
        state.seek(SeekFrom::Start(saved.bytes)).map_err(Error::io(state_path, "read it"))?;
        if saved.bytes == 0 {
            append(&mut state, state_path, &line(&Header { options: options.clone() }))?;
        }
        let outcomes = saved.outcomes;
        let written = (0..chunks.len()).take_while(|index| outcomes.contains_key(index)).count();
        let beginning = outcomes.range(..written).map(|(_, outcome)| outcome);
        let out = replace(out, &beginning.map(|outcome| lines(outcome, chunks)).collect::<String>())?;
        Ok(Journal { chunks, paths: paths.clone(), state, out, outcomes, written })
    }

    /// Unfinished chunks, in order.
    pub(super) fn pending(&self) -> Vec<usize> {
        (0..self.chunks.len()).filter(|index| !self.outcomes.contains_key(index)).collect()
    }

    /// Number of finished chunks.
    pub(super) fn finished(&self) -> u64 {
        from_index(self.outcomes.len())
    }

    /// Questions of all finished chunks.
    pub(super) fn questions(&self) -> u64 {
        self.outcomes.values().map(|outcome| from_index(outcome.questions.len())).sum()
    }

    /// Writes a finished chunk to the state file, and all records without a gap before them to the data set.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub(super) fn finish(&mut self, outcome: Outcome) -> Result<(), Error> {
        append(&mut self.state, &self.paths.state, &line(&outcome))?;
        self.outcomes.insert(outcome.chunk, outcome);
        let mut text = String::new();
        while let Some(outcome) = self.outcomes.get(&self.written) {
            text += &lines(outcome, self.chunks);
            self.written += 1;
        }
        append(&mut self.out, &self.paths.out, &text)
    }

    /// Writes every record to the data set, also those after a missing chunk.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub(super) fn write_all_records(&mut self) -> Result<(), Error> {
        if self.outcomes.range(self.written..).next().is_some() {
            let all = self.outcomes.values().map(|outcome| lines(outcome, self.chunks)).collect::<String>();
            self.out = replace(&self.paths.out, &all)?;
        }
        Ok(())
    }
}

fn line<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("all keys are texts, so there is a JSON form") + "\n"
}

/// The records of a chunk, one a line.
fn lines(outcome: &Outcome, chunks: &[Chunk]) -> String {
    let questions = outcome.questions.iter().enumerate();
    questions.map(|(number, question)| line(&record(&chunks[outcome.chunk], number, question))).collect()
}

/// Appends, and waits until the text is on the disk.
fn append(file: &mut File, path: &Path, text: &str) -> Result<(), Error> {
    if text.is_empty() {
        return Ok(());
    }
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_data());
    written.map_err(Error::io(path, "write to it"))
}

/// Replaces a file by rename; the returned file is open for appending.
fn replace(path: &Path, text: &str) -> Result<File, Error> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = PathBuf::from(temporary);
    let mut file = File::create(&temporary).map_err(Error::io(&temporary, "write it"))?;
    append(&mut file, &temporary, text)?;
    fs::rename(&temporary, path).map_err(Error::io(path, "rename a temporary file to it"))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks() -> Vec<Chunk> {
        (1..=3).map(|number| Chunk { name: format!("part {number}"), text: format!("text {number}") }).collect()
    }

    fn options(questions: u64) -> Map<String, Value> {
        Map::from_iter([("questions".to_owned(), questions.into())])
    }

    fn outcome(chunk: usize) -> Outcome {
        let question =
            Exercise { question: format!("which {chunk}?"), answer: "one".into(), wrong: vec!["two".into()] };
        Outcome { chunk, questions: vec![question], unusable: None }
    }

    fn open<'a>(paths: &Paths, chunks: &'a [Chunk]) -> Result<Journal<'a>, Error> {
        Journal::open(paths, &options(2), chunks)
    }

    fn names(paths: &Paths) -> Vec<String> {
        let text = fs::read_to_string(&paths.out).unwrap();
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["name"].as_str().unwrap().into()).collect()
    }

    #[test]
    fn records_are_in_the_order_of_the_chunks_however_they_finish() {
        let (folder, chunks) = (tempfile::tempdir().unwrap(), chunks());
        let paths = Paths::new(&folder.path().join("deep/out.jsonl"));
        let mut journal = open(&paths, &chunks).unwrap();
        journal.finish(outcome(2)).unwrap();
        assert!(names(&paths).is_empty(), "an earlier chunk may still come");
        journal.finish(outcome(0)).unwrap();
        assert_eq!(names(&paths), ["part 1, question 1"]);
        journal.write_all_records().unwrap();
        assert_eq!(names(&paths), ["part 1, question 1", "part 3, question 1"]);
        drop(journal);
        let mut again = open(&paths, &chunks).unwrap();
        assert_eq!((again.pending(), again.finished(), again.questions()), (vec![1], 2, 2));
        again.finish(outcome(1)).unwrap();
        again.write_all_records().unwrap();
        assert_eq!(names(&paths), ["part 1, question 1", "part 2, question 1", "part 3, question 1"]);
    }

    #[test]
    fn an_incomplete_line_is_cut_off_and_its_chunk_is_pending_again() {
        let (folder, chunks) = (tempfile::tempdir().unwrap(), chunks());
        let paths = Paths::new(&folder.path().join("out.jsonl"));
        let mut journal = open(&paths, &chunks).unwrap();
        journal.finish(outcome(0)).unwrap();
        let kept = (fs::read(&paths.state).unwrap(), fs::read(&paths.out).unwrap());
        journal.finish(outcome(1)).unwrap();
        drop(journal);
        let whole = fs::read(&paths.state).unwrap();
        for torn in
            [whole[..whole.len() - 1].to_vec(), whole[..=kept.0.len()].to_vec(), [&kept.0[..], b"\0\0\0\n"].concat()]
        {
            fs::write(&paths.state, &torn).unwrap();
            fs::write(&paths.out, b"{\"name\": \"ha").unwrap();
            assert_eq!(open(&paths, &chunks).unwrap().pending(), [1, 2]);
            assert_eq!((fs::read(&paths.state).unwrap(), fs::read(&paths.out).unwrap()), kept);
        }
        fs::remove_file(&paths.out).unwrap();
        fs::write(&paths.state, &whole[..10]).unwrap();
        assert_eq!(open(&paths, &chunks).unwrap().pending(), [0, 1, 2], "an incomplete first line starts anew");
    }

    #[test]
    fn other_options_a_foreign_file_and_a_second_process_are_refused() {
        let (folder, chunks) = (tempfile::tempdir().unwrap(), chunks());
        let paths = Paths::new(&folder.path().join("out.jsonl"));
        let journal = open(&paths, &chunks).unwrap();
        let busy = open(&paths, &chunks).unwrap_err().to_string();
        assert!(busy.contains("another process is writing to"), "{busy}");
        drop(journal);
        let other = Journal::open(&paths, &options(3), &chunks).unwrap_err().to_string();
        assert!(other.contains("begun with other options (questions: 2, now 3)"), "{other}");
        let other = paths.saved_state(&options(3), 3).unwrap_err().to_string();
        assert!(other.contains("questions: 2, now 3"), "{other}");
        fs::write(&paths.state, "{\"options\":{\"questions\":2}}\nnonsense\n{\"chunk\":1}\n").unwrap();
        let broken = open(&paths, &chunks).unwrap_err().to_string();
        assert!(broken.contains("line 2: is not a state"), "{broken}");
        fs::remove_file(&paths.state).unwrap();
        let foreign = open(&paths, &chunks).unwrap_err().to_string();
        assert!(foreign.contains("out.jsonl.state does not: name another --out"), "{foreign}");
        assert!(!paths.state.exists(), "a refusal creates no file");
        assert!(paths.saved_state(&options(2), 3).is_err());
    }
}
