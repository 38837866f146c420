//! The checkpoints of a run directory: written whole, found by their digests, removed by age. Only a checkpoint that newer
//! ones follow which look whole is ever removed; whatever else is in the way is renamed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use safetensors::{SafeTensors, serialize_to_file};
use sha2::{Digest, Sha256};
use tch::Tensor;

use super::error::Error;
use super::reading::{CAPTURED, LISTED, MASTERS, PARTS, STATE, Saved, compare, read_folder, sealed_in, state_of};
use super::state::{Sealed, State};
use crate::model::adapter_file::{AdapterShape, CONFIG, VALUES};
use crate::model::lora::Adapters;
use crate::prompt::handoff::Moments;
use crate::runtime::digest::hex;
use crate::runtime::units::{Rank, from_index};
use crate::tensor::bytes::map_file;
use crate::tensor::stored::StoredTensor;

const FOLDER: &str = "checkpoints";
const LATEST: &str = "latest";
const BEST: &str = "best";
/// Name of `best` while it is written.
const BEST_PARTIAL: &str = ".best.partial";
/// Name of `latest` while it is written; one rank that writes alone appends its own suffix.
const LATEST_PARTIAL: &str = ".latest.partial";

/// The checkpoints of a run directory. Rank 0 writes, removes and chooses; all ranks read.
#[derive(Debug)]
pub struct Store {
    run_dir: PathBuf,
}

/// The tensors of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Tensors<'a> {
    /// In the order that the other two follow.
    pub adapters: &'a Adapters,
    /// The optimizer's, in the adapters' order.
    pub moments: &'a Moments,
    /// The adapters that captured what a further update reuses, in the same order; none where nothing is reused.
    pub captured: &'a [Tensor],
}

/// The newest checkpoint that is whole, and the damaged ones after it.
#[derive(Debug, Default)]
pub struct Newest {
    /// Its number of updates.
    pub updates: Option<u64>,
    /// Updates of each damaged checkpoint with its error, newest first.
    pub passed_over: Vec<(u64, Error)>,
    /// What `latest` names.
    pub latest: Option<String>,
}

impl Store {
    /// The checkpoints of the run in `run_dir`.
    #[must_use]
    pub fn of(run_dir: &Path) -> Store {
        Store { run_dir: run_dir.to_owned() }
    }

    /// Folder of all checkpoints.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        self.run_dir.join(FOLDER)
    }

    /// Folder of the checkpoint after `updates` updates.
    #[must_use]
    pub fn place(&self, updates: u64) -> PathBuf {
        self.folder().join(format!("step_{updates}"))
    }

    /// Updates of each checkpoint folder, whole or not, in rising order.
    ///
    /// # Errors
    /// When the folder exists and cannot be read.
    pub fn all(&self) -> Result<Vec<u64>, Error> {
        let folder = self.folder();
        let mut found: Vec<u64> = names(&folder)
            .map_err(|source| Error::Read { file: folder, source })?
            .iter()
            .filter_map(|name| name.strip_prefix("step_")?.parse().ok())
            .collect();
        found.sort_unstable();
        Ok(found)
    }

    /// Writes a checkpoint under another name, brings it to the disk, and renames it. What already stands at its place is
    /// renamed to `step_N.replaced`.
    ///
    /// # Errors
    /// When something cannot be written. The unfinished folder is removed, and whole checkpoints stay as they were.
    pub fn write(&self, state: State, tensors: &Tensors, shape: &AdapterShape) -> Result<(), Error> {
        let folder = self.folder();
        fs::create_dir_all(&folder).map_err(|source| Error::Write { file: folder.clone(), source })?;
        self.sweep()?;
        let partial = unfinished(&folder, state.updates, "partial");
        let written = fill(&partial, state, tensors, shape).and_then(|updates| {
            self.rename_aside(updates, "replaced")?;
            self.settle_at(&partial, updates)
        });
        if written.is_err() {
            // The first failure is the one to report; the next save removes what may be left.
            let _ = fs::remove_dir_all(&partial);
        }
        written
    }

    /// As [`Store::write`], by the rank `writer` after a failure that the others may not know of: touches nothing that
    /// another rank may be writing, and writes nothing where a checkpoint of as many updates stands. Its own unfinished files
    /// have names that no other rank uses.
    ///
    /// # Errors
    /// When something cannot be written. Whole checkpoints stay as they were.
    pub fn write_alone(
        &self,
        writer: Rank,
        state: State,
        tensors: &Tensors,
        shape: &AdapterShape,
    ) -> Result<(), Error> {
        let folder = self.folder();
        if self.place(state.updates).exists() {
            return Ok(());
        }
        fs::create_dir_all(&folder).map_err(|source| Error::Write { file: folder.clone(), source })?;
        let own = own_suffix(writer);
        let partial = unfinished(&folder, state.updates, &format!("partial_{own}"));
        let written = fill(&partial, state, tensors, shape).and_then(|updates| {
            // A folder with files is no place to rename to, so the first of several ranks wins.
            let settled = self.settle_at(&partial, updates);
            if !self.place(updates).exists() {
                return settled;
            }
            self.point_from(LATEST, &format!("{LATEST_PARTIAL}_{own}"), updates)
        });
        let _ = fs::remove_dir_all(&partial);
        written
    }

    /// Renames a whole checkpoint to its place, and brings the names to the disk.
    fn settle_at(&self, partial: &Path, updates: u64) -> Result<(), Error> {
        let place = self.place(updates);
        let moved = fs::rename(partial, &place).and_then(|()| settle(&self.folder()));
        moved.and_then(|()| settle(&self.run_dir)).map_err(|source| Error::Write { file: place, source })
    }

    /// Makes `latest` name the checkpoint after `updates` updates; called once all ranks know that the checkpoint is whole.
    ///
    /// # Errors
    /// When `latest` cannot be replaced; it then names the checkpoint before.
    pub fn point(&self, updates: u64) -> Result<(), Error> {
        self.point_from(LATEST, LATEST_PARTIAL, updates)
    }

    /// Makes `best` name the checkpoint after `updates` updates.
    ///
    /// # Errors
    /// When `best` cannot be replaced.
    pub fn point_best(&self, updates: u64) -> Result<(), Error> {
        self.point_from(BEST, BEST_PARTIAL, updates)
    }

    /// Makes the file `name` name a checkpoint; `partial` is the file's name while it is written.
    fn point_from(&self, name: &str, partial: &str, updates: u64) -> Result<(), Error> {
        let file = self.run_dir.join(name);
        let partial = self.run_dir.join(partial);
        let written = durable(&partial, format!("{FOLDER}/step_{updates}\n").as_bytes())
            .and_then(|()| fs::rename(&partial, &file))
            .and_then(|()| settle(&self.run_dir));
        if written.is_err() {
            // The first failure is the one to report.
            let _ = fs::remove_file(&partial);
        }
        written.map_err(|source| Error::Write { file, source })
    }

    /// Removes what is older than `keep` checkpoints that are whole as far as [`Store::looks_whole`] sees: the one after
    /// `updates` updates, which `latest` names, and the nearest such ones before it. What lies between them stays, and so do
    /// later ones, the one after `best` updates, and the one that the file `best` names, of whatever measurement it is.
    ///
    /// # Errors
    /// When one cannot be removed.
    pub fn trim(&self, updates: u64, keep: u64, best: Option<u64>) -> Result<(), Error> {
        let before = self.all()?.into_iter().filter(|&step| step < updates);
        let named_best = self.named_best();
        let mut kept = 1;
        for step in before.rev() {
            if kept < keep {
                kept += u64::from(self.looks_whole(step));
                continue;
            }
            if best == Some(step) || named_best == Some(step) {
                continue;
            }
            // Renamed first, so that a half removed folder is never taken for a checkpoint.
            let removed = unfinished(&self.folder(), step, "removed");
            match fs::rename(self.place(step), &removed) {
                Ok(()) => remove(&removed)?,
                Err(source) if source.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(Error::Write { file: self.place(step), source }),
            }
        }
        Ok(())
    }

    /// Updates of the checkpoint that the file `best` names, if there is one.
    fn named_best(&self) -> Option<u64> {
        let text = fs::read_to_string(self.run_dir.join(BEST)).ok()?;
        text.trim().strip_prefix(&format!("{FOLDER}/step_"))?.parse().ok()
    }

    /// The newest checkpoint whose digests match. Reads every file of the checkpoints it checks. A damaged one is passed over,
    /// because it stays damaged. One that cannot be read now, or not by this version, is an error: the next attempt may read
    /// it, and an older one would cost updates.
    ///
    /// # Errors
    /// When the folder of checkpoints or a checkpoint cannot be read, or checkpoints exist and none can be used.
    pub fn newest(&self) -> Result<Newest, Error> {
        let mut newest = Newest { latest: self.latest()?, ..Newest::default() };
        for updates in self.all()?.into_iter().rev() {
            match self.verify(updates) {
                Ok(()) => {
                    newest.updates = Some(updates);
                    return Ok(newest);
                }
                Err(error) if error.is_damage() => newest.passed_over.push((updates, error)),
                Err(error) => return Err(Error::Unusable { folder: self.place(updates), source: Box::new(error) }),
            }
        }
        let Newest { latest, passed_over, .. } = newest;
        match latest {
            _ if !passed_over.is_empty() => {
                let passed_over = passed_over.into_iter().map(|(step, error)| (self.place(step), error)).collect();
                Err(Error::NoneUsable { folder: self.folder(), passed_over })
            }
            Some(named) => Err(Error::NoneThere { file: self.run_dir.join(LATEST), named, folder: self.folder() }),
            None => Ok(Newest::default()),
        }
    }

    /// What `latest` names, if it is there: `checkpoints/step_N`.
    fn latest(&self) -> Result<Option<String>, Error> {
        let file = self.run_dir.join(LATEST);
        match fs::read_to_string(&file) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Read { file, source }),
        }
    }

    /// Whether an earlier run has left checkpoints, or a name of one.
    ///
    /// # Errors
    /// When that cannot be read.
    pub fn has_progress(&self) -> Result<bool, Error> {
        Ok(!self.all()?.is_empty() || self.latest()?.is_some())
    }

    /// Renames a checkpoint that is passed over to `step_N.passed_over`; returns the new name.
    ///
    /// # Errors
    /// When it cannot be renamed.
    pub fn keep_aside(&self, updates: u64) -> Result<Option<PathBuf>, Error> {
        self.rename_aside(updates, "passed_over")
    }

    /// Whether the state's digest matches, all files are there, and the files of tensors are as long as their headers say.
    /// Unlike [`Store::verify`] it reads no tensor, so that a save stays short: a changed byte in a tensor is not found.
    fn looks_whole(&self, updates: u64) -> bool {
        let place = self.place(updates);
        let tensors = |name: &str| map_file(&place.join(name)).is_ok_and(|map| SafeTensors::deserialize(&map).is_ok());
        self.sealed(updates).is_ok() && place.join(CONFIG).is_file() && tensors(MASTERS) && tensors(VALUES)
    }

    fn verify(&self, updates: u64) -> Result<(), Error> {
        let sealed = self.sealed(updates)?;
        for name in LISTED {
            let file = self.place(updates).join(name);
            let found = digest_of(&file).map_err(|source| Error::Read { file: file.clone(), source })?;
            compare(&file, found, &sealed.files[name])?;
        }
        Ok(())
    }

    /// Reads the checkpoint after `updates` updates for a run that has `adapters`. Tensors have the adapters' dtype and
    /// device, and the bits that were saved.
    ///
    /// # Errors
    /// When a file is not what was written, or does not fit the adapters.
    pub fn read(&self, updates: u64, adapters: &Adapters) -> Result<Saved, Error> {
        read_folder(&self.place(updates), adapters)
    }

    /// The state after `updates` updates, without tensors.
    ///
    /// # Errors
    /// When `state.json` is not what was written.
    pub fn state(&self, updates: u64) -> Result<State, Error> {
        state_of(&self.place(updates))
    }

    /// The state with its digests; the seal is checked, and every file is listed.
    fn sealed(&self, updates: u64) -> Result<Sealed, Error> {
        sealed_in(&self.place(updates))
    }

    /// Renames the checkpoint after `updates` updates, if there is one, to a free name that says why; returns its new path.
    fn rename_aside(&self, updates: u64, why: &str) -> Result<Option<PathBuf>, Error> {
        let place = self.place(updates);
        let mut aside = self.folder().join(format!("step_{updates}.{why}"));
        let mut number = 1_u64;
        while aside.exists() {
            number += 1;
            aside = self.folder().join(format!("step_{updates}.{why}_{number}"));
        }
        match fs::rename(&place, &aside) {
            Ok(()) => Ok(Some(aside)),
            Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Write { file: place, source }),
        }
    }

    /// Removes what an interrupted save or removal has left.
    fn sweep(&self) -> Result<(), Error> {
        let folder = self.folder();
        let run_dir = &self.run_dir;
        for (folder, start) in [(&folder, ".step_"), (run_dir, LATEST_PARTIAL), (run_dir, BEST_PARTIAL)] {
            let names = names(folder).map_err(|source| Error::Read { file: folder.clone(), source })?;
            names.iter().filter(|name| name.starts_with(start)).try_for_each(|name| remove(&folder.join(name)))?;
        }
        Ok(())
    }
}

/// The folder of adapters that `given` means: the files `best` and `latest` of a run directory mean the checkpoint that they name,
/// and any other path means itself.
///
/// # Errors
/// When such a file is not there in a run directory, cannot be read, or names a folder that is not there.
pub fn folder_of(given: &Path) -> Result<PathBuf, Error> {
    let is_name = given.file_name().is_some_and(|name| name == BEST || name == LATEST);
    let run_dir = given.parent().unwrap_or(Path::new(""));
    if !is_name || given.is_dir() {
        return Ok(given.to_owned());
    }
    let file = given.to_owned();
    match fs::read_to_string(given) {
        Ok(text) => {
            let folder = run_dir.join(text.trim());
            if folder.is_dir() { Ok(folder) } else { Err(Error::NamesNone { file, folder }) }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound && run_dir.join(FOLDER).is_dir() => {
            Err(Error::NotNamed { file })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(file),
        Err(source) => Err(Error::Read { file, source }),
    }
}

/// Writes all files of a checkpoint into `folder` and brings them to the disk; returns the state's updates.
fn fill(folder: &Path, state: State, tensors: &Tensors, shape: &AdapterShape) -> Result<u64, Error> {
    let Tensors { adapters, moments, captured } = *tensors;
    super::save_adapters(folder, adapters, shape)?;
    let file = folder.join(MASTERS);
    let mut values = Vec::new();
    let parts: [Vec<&Tensor>; 4] = [
        adapters.tensors().collect(),
        moments.mean.iter().collect(),
        moments.square.iter().collect(),
        captured.iter().collect(),
    ];
    for (part, tensors) in PARTS.into_iter().chain([CAPTURED]).zip(parts) {
        for (name, tensor) in adapters.names().zip(tensors) {
            let name = format!("{part}.{name}");
            let value = StoredTensor::master(tensor).map_err(|source| Error::Bytes { name: name.clone(), source })?;
            values.push((name, value));
        }
    }
    serialize_to_file(values, None, &file).map_err(|source| Error::WriteTensors { file: file.clone(), source })?;
    let synced = File::open(&file).and_then(|written| written.sync_all());
    synced.map_err(|source| Error::Write { file, source })?;
    let mut files = BTreeMap::new();
    for name in LISTED {
        let file = folder.join(name);
        let digest = digest_of(&file).map_err(|source| Error::Read { file, source })?;
        files.insert(name.to_owned(), digest);
    }
    let (file, updates) = (folder.join(STATE), state.updates);
    let sealed = Sealed::new(state, files).and_then(|sealed| serde_json::to_vec_pretty(&sealed));
    let written = sealed.map_err(io::Error::from).and_then(|text| durable(&file, &text)).and_then(|()| settle(folder));
    written.map_err(|source| Error::Write { file, source })?;
    Ok(updates)
}

/// A name that is no checkpoint's, for a folder that is being written or removed.
fn unfinished(folder: &Path, updates: u64, why: &str) -> PathBuf {
    folder.join(format!(".step_{updates}.{why}"))
}

/// A suffix that no other rank and no other start uses: process numbers repeat over machines and containers.
fn own_suffix(writer: Rank) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{}_{}_{}", from_index(writer.0), std::process::id(), now.as_nanos())
}

/// Names in a folder; none without the folder.
fn names(folder: &Path) -> io::Result<Vec<String>> {
    match fs::read_dir(folder) {
        Ok(entries) => entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn remove(path: &Path) -> Result<(), Error> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed.map_err(|source| Error::Write { file: path.to_owned(), source })
}

/// Writes a file and brings it to the disk.
fn durable(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut opened = File::create(file)?;
    opened.write_all(bytes)?;
    opened.sync_all()
}

/// Brings a folder's names to the disk.
fn settle(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

fn digest_of(file: &Path) -> io::Result<String> {
    let mut hash = Sha256::new();
    io::copy(&mut File::open(file)?, &mut hash)?;
    Ok(hex(hash))
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::data::GroupOrder;
    use crate::model::lora::Adapter;
    use crate::tensor::bytes::bytes_of;

    fn adapters(kind: Kind) -> Adapters {
        let drawn = |rows: i64| Tensor::rand([rows, 3], (kind, Device::Cpu));
        Adapters::new(vec![Adapter { module: "m".into(), a_ri: drawn(2), b_or: drawn(5) }], 1.0, "policy")
    }

    fn write(store: &Store, updates: u64, adapters: &Adapters, moments: &Moments) {
        let state = State {
            updates,
            adapter_version: updates,
            optimizer_steps: 7,
            cursor: GroupOrder::new(1, 5),
            config_digest: String::new(),
            config: serde_json::json!({"optimizer": {"eps": 1e-8}}),
            groups_per_update: None,
            cp_size: None,
            schedule_steps: None,
            inputs: BTreeMap::new(),
            held_out: serde_json::Value::Null,
            best: serde_json::Value::Null,
            round: serde_json::Value::Null,
        };
        store.write(state, &Tensors { adapters, moments, captured: &[] }, &shape()).unwrap();
    }

    fn shape() -> AdapterShape {
        let targets = vec!["m".into()];
        AdapterShape { rank: 2, alpha: 2.0, targets, base_model: String::new(), rope_scaling: None }
    }

    fn moments(adapters: &Adapters) -> Moments {
        let drawn = || adapters.tensors().map(|tensor| tensor.detach().rand_like()).collect();
        Moments { steps: 7, mean: drawn(), square: drawn() }
    }

    #[test]
    fn masters_and_moments_come_back_bit_for_bit_in_their_own_dtype() {
        for kind in [Kind::Float, Kind::Double] {
            let folder = tempfile::tempdir().unwrap();
            let (store, adapters) = (Store::of(folder.path()), adapters(kind));
            let moments = moments(&adapters);
            write(&store, 3, &adapters, &moments);
            let saved = store.read(3, &adapters).unwrap();
            let bytes = |tensors: &[Tensor]| tensors.iter().map(|tensor| bytes_of(tensor).unwrap()).collect::<Vec<_>>();
            let masters: Vec<Tensor> = adapters.tensors().map(Tensor::detach).collect();
            assert_eq!(bytes(&saved.masters), bytes(&masters), "{kind:?}");
            assert_eq!(bytes(&saved.moments.mean), bytes(&moments.mean), "{kind:?}");
            assert_eq!(bytes(&saved.moments.square), bytes(&moments.square), "{kind:?}");
            assert_eq!((saved.moments.steps, saved.state.updates, saved.masters[0].kind()), (7, 3, kind));
        }
    }

    #[test]
    fn tensors_of_another_dtype_are_refused_and_not_converted() {
        let folder = tempfile::tempdir().unwrap();
        let (store, single) = (Store::of(folder.path()), adapters(Kind::Float));
        write(&store, 1, &single, &moments(&single));
        let refused = store.read(1, &adapters(Kind::Double)).unwrap_err().to_string();
        assert!(refused.contains("master.m.lora_A is Float [2, 3], this run has Double [2, 3]"), "{refused}");
    }

    #[test]
    fn the_newest_stays_with_the_nearest_before_it_and_so_does_what_claims_to_follow() {
        let folder = tempfile::tempdir().unwrap();
        let (store, adapters) = (Store::of(folder.path()), adapters(Kind::Float));
        for updates in [1, 2, 4, 8, 16] {
            write(&store, updates, &adapters, &moments(&adapters));
        }
        store.trim(8, 2, None).unwrap();
        assert_eq!(store.all().unwrap(), [4, 8, 16]);
        store.trim(16, 1, None).unwrap();
        assert_eq!(store.all().unwrap(), [16]);
        assert_eq!(names(&store.folder()).unwrap(), ["step_16"]);
    }

    #[test]
    fn the_best_stays_besides_the_last_ones_until_another_is_better() {
        let folder = tempfile::tempdir().unwrap();
        let (store, adapters) = (Store::of(folder.path()), adapters(Kind::Float));
        for updates in [1, 2, 4, 8, 16] {
            write(&store, updates, &adapters, &moments(&adapters));
        }
        store.trim(16, 2, Some(2)).unwrap();
        assert_eq!(store.all().unwrap(), [2, 8, 16]);
        store.trim(16, 2, Some(8)).unwrap();
        assert_eq!(store.all().unwrap(), [8, 16], "it is one of the last ones");
        store.point_best(8).unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("best")).unwrap(), "checkpoints/step_8\n");
        store.trim(16, 1, None).unwrap();
        assert_eq!(store.all().unwrap(), [8, 16], "what the file names stays, also in a run that asks for no best one");
    }

    #[test]
    fn a_damaged_checkpoint_does_not_count_among_those_that_are_kept() {
        let damages: [fn(&Path); 3] = [
            |place| fs::File::options().write(true).open(place.join(MASTERS)).unwrap().set_len(40).unwrap(),
            |place| fs::remove_file(place.join(VALUES)).unwrap(),
            |place| fs::write(place.join(STATE), "{").unwrap(),
        ];
        for damage in damages {
            let folder = tempfile::tempdir().unwrap();
            let (store, adapters) = (Store::of(folder.path()), adapters(Kind::Float));
            for updates in [4, 5, 10, 15] {
                write(&store, updates, &adapters, &moments(&adapters));
            }
            damage(&store.place(10));
            store.trim(15, 2, None).unwrap();
            assert_eq!(store.all().unwrap(), [5, 10, 15], "5 is the second that is whole");
            write(&store, 20, &adapters, &moments(&adapters));
            store.trim(20, 2, None).unwrap();
            assert_eq!(store.all().unwrap(), [15, 20]);
        }
    }

    #[test]
    fn a_save_where_a_checkpoint_stands_renames_it_and_a_save_after_a_failure_leaves_it() {
        let folder = tempfile::tempdir().unwrap();
        let (store, adapters) = (Store::of(folder.path()), adapters(Kind::Float));
        let moments = moments(&adapters);
        for _ in 0..3 {
            write(&store, 5, &adapters, &moments);
        }
        let mut found = names(&store.folder()).unwrap();
        found.sort();
        assert_eq!(found, ["step_5", "step_5.replaced", "step_5.replaced_2"]);
        let state = store.state(5).unwrap();
        let alone = |updates| State { updates, adapter_version: 77, ..state.clone() };
        let tensors = Tensors { adapters: &adapters, moments: &moments, captured: &[] };
        store.write_alone(Rank(1), alone(5), &tensors, &shape()).unwrap();
        assert_eq!(store.state(5).unwrap().adapter_version, 5);
        // What a rank with the same process number on another machine is writing at this moment.
        let other = unfinished(&store.folder(), 6, &format!("partial_{}", std::process::id()));
        fs::create_dir(&other).unwrap();
        fs::create_dir(folder.path().join(".latest.partial")).unwrap();
        store.write_alone(Rank(1), alone(6), &tensors, &shape()).unwrap();
        assert!(other.is_dir(), "the files of the other rank stay");
        assert_ne!(own_suffix(Rank(1)), own_suffix(Rank(2)));
        let newest = store.newest().unwrap();
        assert_eq!((newest.updates, newest.latest.as_deref()), (Some(6), Some("checkpoints/step_6")));
        assert_eq!(store.all().unwrap(), [5, 6]);
    }

    #[test]
    fn damage_is_passed_over_and_what_cannot_be_read_or_is_of_another_version_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let (store, adapters) = (Store::of(folder.path()), adapters(Kind::Float));
        for updates in [1, 2] {
            write(&store, updates, &adapters, &moments(&adapters));
        }
        let (masters, state) = (store.place(2).join(MASTERS), store.place(2).join(STATE));
        let whole = fs::read_to_string(&state).unwrap();
        // A file that is away for a moment.
        fs::rename(&masters, folder.path().join("away")).unwrap();
        let refused = store.newest().unwrap_err().to_string();
        assert!(refused.starts_with("cannot read ") && refused.contains("step_2/masters.safetensors"), "{refused}");
        assert!(refused.contains("Start again once the file can be read"), "{refused}");
        fs::rename(folder.path().join("away"), &masters).unwrap();
        fs::write(&state, whole.replacen("\"updates\"", "\"lessons\": 1, \"updates\"", 1)).unwrap();
        let refused = store.newest().unwrap_err().to_string();
        assert!(
            refused.contains("state.json is of another version of longstraw: unknown field `lessons`"),
            "{refused}"
        );
        assert!(refused.contains("Go on with the version that wrote it"), "{refused}");
        fs::write(&state, &whole[..whole.len() / 2]).unwrap();
        assert_eq!(store.newest().unwrap().updates, Some(1), "it is torn, so it is damaged");
        fs::remove_dir_all(store.place(1)).unwrap();
        let refused = store.newest().unwrap_err().to_string();
        assert!(refused.contains("can be used: ") && refused.contains("--anew"), "{refused}");
        fs::remove_dir_all(store.place(2)).unwrap();
        assert!(store.newest().unwrap().updates.is_none());
        store.point(2).unwrap();
        let refused = store.newest().unwrap_err().to_string();
        assert!(refused.contains("latest names checkpoints/step_2, and "), "{refused}");
    }
}
