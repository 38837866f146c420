//! A folder to run the command in, and the output of a run.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::Value;
use tempfile::TempDir;

/// A run that takes longer hangs.
const RUN_SECONDS_MAX: u64 = 900;

/// The binary under test.
pub(crate) const LONGSTRAW: &str = env!("CARGO_BIN_EXE_longstraw");

/// Exit code and output of a run.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Said {
    /// Asserts the exit code, and that standard error contains each of `words`.
    #[track_caller]
    pub(crate) fn ended(&self, code: i32, words: &[&str]) -> &Said {
        assert_eq!(self.code, code, "{self}");
        for word in words {
            assert!(self.err.contains(word), "no {word:?} in:\n{self}");
        }
        assert!(!self.err.contains("panicked") && !self.err.contains("bug:"), "{self}");
        self
    }

    /// As [`Said::ended`], with exactly one message of longstraw's own.
    #[track_caller]
    pub(crate) fn refused(&self, code: i32, words: &[&str]) -> &Said {
        self.ended(code, words);
        let ours: Vec<&str> = self.err.lines().filter(|line| line.starts_with("longstraw: ")).collect();
        assert_eq!(ours.len(), 1, "one message, not {}:\n{self}", ours.len());
        self
    }

    /// The JSON object that is all of standard output.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.out.lines().count(), 1, "{self}");
        let value: Value = serde_json::from_str(&self.out).unwrap();
        assert!(value.is_object(), "{self}");
        value
    }
}

impl std::fmt::Display for Said {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "exit {}\nstandard output:\n{}\nstandard error:\n{}", self.code, self.out, self.err)
    }
}

/// A temporary folder to run in, and one for the output.
pub(crate) struct Room {
    folder: TempDir,
    aside: TempDir,
}

impl Room {
    pub(crate) fn new() -> Room {
        Room { folder: tempfile::tempdir().unwrap(), aside: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// A room with these files.
    pub(crate) fn with(files: &[(&str, &str)]) -> Room {
        let room = Room::new();
        for (name, text) in files {
            room.write(name, text);
        }
        room
    }

    /// The folder `model`: the checkpoint in `case`, with the tokenizer of another folder.
    pub(crate) fn model_with_tokenizer(&self, case: &Path, tokenizer: &TempDir) {
        let model = self.path().join("model");
        fs::create_dir(&model).unwrap();
        let tokenizer = tokenizer.path();
        for (folder, file) in [(case, "config.json"), (case, "model.safetensors"), (tokenizer, "tokenizer.json")] {
            fs::copy(folder.join(file), model.join(file)).unwrap();
        }
    }

    /// Writes a file, and creates its folders.
    pub(crate) fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let file = self.path().join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, text).unwrap();
        file
    }

    pub(crate) fn try_read(&self, name: &str) -> anyhow::Result<String> {
        let file = self.path().join(name);
        fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))
    }

    pub(crate) fn read(&self, name: &str) -> String {
        self.try_read(name).unwrap()
    }

    pub(crate) fn read_json(&self, name: &str) -> Value {
        let parsed = self.try_read(name).and_then(|text| Ok(serde_json::from_str(&text)?));
        parsed.with_context(|| format!("parsing {name}")).unwrap()
    }

    /// Every file below `folder`, as a path relative to it.
    pub(crate) fn files(&self, folder: &str) -> Vec<String> {
        let root = self.path().join(folder);
        let mut found = Vec::new();
        let mut folders = vec![root.clone()];
        while let Some(next) = folders.pop() {
            for entry in fs::read_dir(next).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    found.push(path.strip_prefix(&root).unwrap().display().to_string());
                }
            }
        }
        found.sort();
        found
    }

    /// Writes a shell script that mpirun can start instead of the command.
    pub(crate) fn script(&self, name: &str, text: &str) -> String {
        let file = self.write(name, format!("#!/bin/sh\n{text}\n"));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        file.display().to_string()
    }

    /// Runs one process, without mpirun.
    pub(crate) fn alone(&self, arguments: &[&str]) -> Said {
        self.run(&Call { ranks: 0, program: LONGSTRAW, arguments, variables: &[] })
    }

    /// Runs several ranks under mpirun.
    pub(crate) fn ranks(&self, ranks: usize, arguments: &[&str]) -> Said {
        self.run(&Call { ranks, program: LONGSTRAW, arguments, variables: &[] })
    }

    pub(crate) fn run(&self, call: &Call) -> Said {
        self.start(call).end()
    }

    /// Starts a run and returns while it runs.
    pub(crate) fn start(&self, call: &Call) -> Running {
        // Runs may go on beside each other.
        let number = fs::read_dir(self.aside.path()).unwrap().count();
        let (out, err) = ["out", "err"].map(|name| self.aside.path().join(format!("{name}_{number}"))).into();
        let mut command = call.command();
        command.current_dir(self.path()).stdin(Stdio::null());
        command.stdout(File::create(&out).unwrap()).stderr(File::create(&err).unwrap());
        heed_signals(&mut command);
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Running { child, out, err, end: None }
    }
}

/// A shell lets what it starts in the background ignore SIGINT, and `nohup` SIGHUP: a test must not depend on that.
#[expect(unsafe_code, reason = "sets signals in the child, between fork and exec")]
fn heed_signals(command: &mut Command) {
    let heed = || {
        for signal in [libc::SIGINT, libc::SIGHUP] {
            // SAFETY: the call may be made between fork and exec, and touches no memory.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: the closure makes nothing but calls that are allowed there.
    unsafe { command.pre_exec(heed) };
}

/// Program, arguments and variables of a run.
pub(crate) struct Call<'a> {
    /// Ranks under mpirun; 0 starts the program itself.
    pub(crate) ranks: usize,
    pub(crate) program: &'a str,
    pub(crate) arguments: &'a [&'a str],
    pub(crate) variables: &'a [(&'a str, &'a str)],
}

impl Call<'_> {
    fn command(&self) -> Command {
        let mut command = if self.ranks == 0 {
            Command::new(self.program)
        } else {
            let mut mpirun = Command::new("mpirun");
            mpirun.args(["-n", &self.ranks.to_string(), "--oversubscribe", "--bind-to", "none", self.program]);
            mpirun
        };
        command.args(self.arguments);
        // The user's own variables must not decide a test.
        #[expect(clippy::disallowed_methods, reason = "the test decides what the command inherits")]
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if ["LONGSTRAW_", "SLURM_", "OMPI_COMM_", "TAOTOKEN_"].iter().any(|prefix| name.starts_with(prefix)) {
                command.env_remove(name);
            }
        }
        // As in scripts/mpirun.sh. Only root needs the first two.
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        command.envs([("OMPI_MCA_mpi_yield_when_idle", "1"), ("OMPI_MCA_btl_vader_single_copy_mechanism", "none")]);
        command.env("OMP_NUM_THREADS", "1").envs(self.variables.iter().copied());
        command
    }
}

/// A run in progress. Dropping it ends the run.
pub(crate) struct Running {
    child: Child,
    out: PathBuf,
    err: PathBuf,
    end: Option<ExitStatus>,
}

impl Running {
    /// Whether the run has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.end = self.end.or(self.child.try_wait().unwrap());
        self.end.is_some()
    }

    /// Sends a signal to the process.
    pub(crate) fn signal(&self, signal: i32) {
        let sent = Command::new("kill").args([format!("-{signal}"), self.child.id().to_string()]).status();
        assert!(sent.unwrap().success(), "{}", self.said());
    }

    /// Waits until `ready` returns a value, at most as long as a run may take.
    #[track_caller]
    pub(crate) fn until<T>(&mut self, what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = ready() {
                return found;
            }
            let (ended, late) = (self.has_ended(), start.elapsed().as_secs() > RUN_SECONDS_MAX);
            assert!(!ended && !late, "{what} did not come; ended: {ended}\n{}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the run has ended.
    #[track_caller]
    pub(crate) fn end(mut self) -> Said {
        let start = Instant::now();
        while !self.has_ended() {
            assert!(start.elapsed().as_secs() <= RUN_SECONDS_MAX, "it does not end:\n{}", self.said());
            std::thread::sleep(Duration::from_millis(10));
        }
        self.said()
    }

    /// The output so far.
    pub(crate) fn said(&self) -> Said {
        let read = |file: &Path| String::from_utf8_lossy(&fs::read(file).unwrap()).into_owned();
        let code = self.end.and_then(|status| status.code()).unwrap_or(-1);
        Said { code, out: read(&self.out), err: read(&self.err) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.has_ended() {
            // mpirun ends its ranks on SIGTERM; on SIGKILL it could not.
            let _ = Command::new("kill").arg(self.child.id().to_string()).status();
            // A process on its own may be held by what the test has made.
            for _ in 0..500 {
                if self.has_ended() {
                    return;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
