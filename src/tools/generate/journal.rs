//! What has come so far: the state file, from which a rerun goes on, and the data set that follows it.
//!
//! The state file holds a line of options and then a line for each finished chunk, in the order in which they were
//! finished, each on the disk before the next request of its thread. The data set has its records in the order of the
//! chunks: it is made anew from the state at the start, and grows while no earlier chunk is missing.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::Error;
use super::questions::{Exercise, Unusable, record};
use super::texts::Chunk;
use crate::runtime::units::from_index;

/// A chunk that is finished.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Outcome {
    /// Its index.
    pub(super) chunk: usize,
    /// None where it gave none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) questions: Vec<Exercise>,
    /// Why it gave none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) unusable: Option<Unusable>,
}

/// Options and outcomes as they stand in a state file.
#[derive(Debug, Default)]
pub(super) struct Stand {
    /// By chunk.
    pub(super) outcomes: BTreeMap<usize, Outcome>,
    /// Bytes of whole lines; what follows was being written when the process ended.
    bytes: u64,
}

/// Both files of a run that goes on.
#[derive(Debug)]
pub(super) struct Journal<'a> {
    chunks: &'a [Chunk],
    paths: Paths,
    state: File,
    out: File,
    outcomes: BTreeMap<usize, Outcome>,
    /// Chunks whose records stand in the data set: all before this one.
    written: usize,
}

/// Where the two files lie.
#[derive(Clone, Debug)]
pub(super) struct Paths {
    out: PathBuf,
    state: PathBuf,
}

fn io(file: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::Io { file: file.to_owned(), action, source }
}

impl Paths {
    /// `out`, and its state file beside it.
    pub(super) fn of(out: &Path) -> Paths {
        let mut state = out.as_os_str().to_owned();
        state.push(".state");
        Paths { out: out.to_owned(), state: state.into() }
    }

    /// What stands there, without a change to it.
    ///
    /// # Errors
    /// When it was begun with other options, or is no state.
    pub(super) fn stand(&self, options: &Map<String, Value>, chunks: usize) -> Result<Stand, Error> {
        match fs::read(&self.state) {
            Ok(bytes) => self.read(&bytes, options, chunks),
            Err(source) if source.kind() == std::io::ErrorKind::NotFound => {
                self.no_stranger()?;
                Ok(Stand::default())
            }
            Err(source) => Err(io(&self.state, "read it")(source)),
        }
    }

    /// A data set without a state is somebody else's.
    fn no_stranger(&self) -> Result<(), Error> {
        if self.out.exists() {
            return Err(Error::NoState { out: self.out.clone(), state: self.state.clone() });
        }
        Ok(())
    }

    fn read(&self, bytes: &[u8], options: &Map<String, Value>, chunks: usize) -> Result<Stand, Error> {
        let mut stand = Stand::default();
        let wrong = |line| Error::NotState { state: self.state.clone(), line };
        let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let mut lines = bytes[..whole].split_inclusive(|&byte| byte == b'\n').enumerate().peekable();
        while let Some((index, line)) = lines.next() {
            if index == 0 {
                let Header { options: begun } = serde_json::from_slice(line).map_err(|_| wrong(1))?;
                self.same(&begun, options)?;
            } else {
                match serde_json::from_slice::<Outcome>(line) {
                    Ok(outcome) if outcome.chunk < chunks => stand.outcomes.insert(outcome.chunk, outcome),
                    // A disk that lost power may keep the length of a line and not what stood in it.
                    Err(_) if lines.peek().is_none() => break,
                    _ => return Err(wrong(index + 1)),
                };
            }
            stand.bytes += from_index(line.len());
        }
        if stand.bytes == 0 {
            self.no_stranger()?;
        }
        Ok(stand)
    }

    fn same(&self, begun: &Map<String, Value>, options: &Map<String, Value>) -> Result<(), Error> {
        let short = |value: Option<&Value>| {
            let text = value.map_or_else(|| "nothing".into(), Value::to_string);
            text.chars().take(40).collect::<String>()
        };
        let keys = begun.keys().chain(options.keys().filter(|key| !begun.contains_key(*key)));
        let differences: Vec<String> = keys
            .filter(|key| begun.get(*key) != options.get(*key))
            .map(|key| format!("{key}: {}, now {}", short(begun.get(key)), short(options.get(key))))
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
    /// Opens both files, for this process alone; what was torn is cut off.
    ///
    /// # Errors
    /// As [`Paths::stand`], and when the disk refuses.
    pub(super) fn open(paths: &Paths, options: &Map<String, Value>, chunks: &'a [Chunk]) -> Result<Journal<'a>, Error> {
        let Paths { out, state: place } = paths;
        if let Some(folder) = out.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(io(folder, "make the folder"))?;
        }
        if !place.exists() {
            paths.no_stranger()?;
        }
        let state = OpenOptions::new().create(true).read(true).write(true).truncate(false).open(place);
        let mut state = state.map_err(io(place, "open it"))?;
        match state.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(Error::Busy { state: place.clone() }),
            Err(TryLockError::Error(source)) => return Err(io(place, "lock it")(source)),
        }
        let mut bytes = Vec::new();
        state.read_to_end(&mut bytes).map_err(io(place, "read it"))?;
        let stand = paths.read(&bytes, options, chunks.len())?;
        state.set_len(stand.bytes).map_err(io(place, "cut it"))?;
        state.seek(SeekFrom::Start(stand.bytes)).map_err(io(place, "read it"))?;
        if stand.bytes == 0 {
            append(&mut state, place, &line(&Header { options: options.clone() }))?;
        }
        let outcomes = stand.outcomes;
        let written = (0..chunks.len()).take_while(|index| outcomes.contains_key(index)).count();
        let beginning = outcomes.range(..written).map(|(_, outcome)| outcome);
        let out = replace(out, &beginning.map(|outcome| lines(outcome, chunks)).collect::<String>())?;
        Ok(Journal { chunks, paths: paths.clone(), state, out, outcomes, written })
    }

    /// Chunks that are still to be asked about, in order.
    pub(super) fn pending(&self) -> Vec<usize> {
        (0..self.chunks.len()).filter(|index| !self.outcomes.contains_key(index)).collect()
    }

    /// Chunks that are finished.
    pub(super) fn finished(&self) -> u64 {
        from_index(self.outcomes.len())
    }

    /// Questions of all finished chunks.
    pub(super) fn questions(&self) -> u64 {
        self.outcomes.values().map(|outcome| from_index(outcome.questions.len())).sum()
    }

    /// Brings a finished chunk to the disk, and to the data set what no earlier chunk is missing before.
    ///
    /// # Errors
    /// When the disk refuses.
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

    /// The data set holds every record there is, also those behind a chunk that is missing.
    ///
    /// # Errors
    /// When the disk refuses.
    pub(super) fn settle(&mut self) -> Result<(), Error> {
        if self.outcomes.range(self.written..).next().is_some() {
            let all = self.outcomes.values().map(|outcome| lines(outcome, self.chunks)).collect::<String>();
            self.out = replace(&self.paths.out, &all)?;
        }
        Ok(())
    }
}

/// A value as a line.
fn line<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("keys are texts, so there is a JSON form") + "\n"
}

/// The records of a chunk.
fn lines(outcome: &Outcome, chunks: &[Chunk]) -> String {
    let questions = outcome.questions.iter().enumerate();
    questions.map(|(number, question)| line(&record(&chunks[outcome.chunk], number, question))).collect()
}

/// Appends, and waits for the disk.
fn append(file: &mut File, path: &Path, text: &str) -> Result<(), Error> {
    if text.is_empty() {
        return Ok(());
    }
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_data());
    written.map_err(io(path, "write to it"))
}

/// Writes a file beside and renames it; what is written to it afterwards goes behind that.
fn replace(path: &Path, text: &str) -> Result<File, Error> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    let mut file = File::create(&beside).map_err(io(&beside, "write it"))?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_data()).map_err(io(&beside, "write it"))?;
    fs::rename(&beside, path).map_err(io(path, "put it in place"))?;
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
    fn records_stand_in_the_order_of_the_chunks_however_they_finish() {
        let (folder, chunks) = (tempfile::tempdir().unwrap(), chunks());
        let paths = Paths::of(&folder.path().join("deep/out.jsonl"));
        let mut journal = open(&paths, &chunks).unwrap();
        journal.finish(outcome(2)).unwrap();
        assert!(names(&paths).is_empty(), "an earlier chunk may still come");
        journal.finish(outcome(0)).unwrap();
        assert_eq!(names(&paths), ["part 1, question 1"]);
        journal.settle().unwrap();
        assert_eq!(names(&paths), ["part 1, question 1", "part 3, question 1"]);
        drop(journal);
        let mut again = open(&paths, &chunks).unwrap();
        assert_eq!((again.pending(), again.finished(), again.questions()), (vec![1], 2, 2));
        again.finish(outcome(1)).unwrap();
        again.settle().unwrap();
        assert_eq!(names(&paths), ["part 1, question 1", "part 2, question 1", "part 3, question 1"]);
    }

    #[test]
    fn a_torn_end_is_cut_off_and_its_chunk_is_asked_about_again() {
        let (folder, chunks) = (tempfile::tempdir().unwrap(), chunks());
        let paths = Paths::of(&folder.path().join("out.jsonl"));
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
        assert_eq!(open(&paths, &chunks).unwrap().pending(), [0, 1, 2], "a torn first line is a beginning");
    }

    #[test]
    fn other_options_a_stranger_and_a_second_process_are_refused() {
        let (folder, chunks) = (tempfile::tempdir().unwrap(), chunks());
        let paths = Paths::of(&folder.path().join("out.jsonl"));
        let journal = open(&paths, &chunks).unwrap();
        let busy = open(&paths, &chunks).unwrap_err().to_string();
        assert!(busy.contains("another process is writing to"), "{busy}");
        drop(journal);
        let other = Journal::open(&paths, &options(3), &chunks).unwrap_err().to_string();
        assert!(other.contains("begun with other options (questions: 2, now 3)"), "{other}");
        let other = paths.stand(&options(3), 3).unwrap_err().to_string();
        assert!(other.contains("questions: 2, now 3"), "{other}");
        fs::write(&paths.state, "{\"options\":{\"questions\":2}}\nnonsense\n{\"chunk\":1}\n").unwrap();
        let broken = open(&paths, &chunks).unwrap_err().to_string();
        assert!(broken.contains("line 2: is no state"), "{broken}");
        fs::remove_file(&paths.state).unwrap();
        let stranger = open(&paths, &chunks).unwrap_err().to_string();
        assert!(stranger.contains("out.jsonl.state is not: name another --out"), "{stranger}");
        assert!(!paths.state.exists(), "a refusal makes no file");
        assert!(paths.stand(&options(2), 3).is_err());
    }
}
