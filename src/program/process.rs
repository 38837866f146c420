//! One run of a program. Its input and its output go through pipes at the same time; its output and its time are bounded.
//!
//! The program runs in its own process group. When it ends, or its time is over, the rest of the group is killed, so that
//! nothing that it has started goes on during the training. A descendant that has left the group is neither found nor
//! waited for.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::world::stop_requested;

/// The longest run: a month.
const TIME_MAX: Duration = Duration::from_hours(24 * 30);
/// How often a wait reports that it goes on.
const ALIVE: Duration = Duration::from_secs(1);
/// How often the program's end is looked for; data in a pipe ends the wait sooner.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A killed process is gone at once, unless it waits for a device.
pub const GONE_WITHIN: Duration = Duration::from_secs(5);
/// Bytes of one read or write.
const PART_BYTES: usize = 64 << 10;
/// Reads of one pipe in a row, so that a pipe that never ends leaves time to look at the clock.
const READS_MAX: u32 = 16;
/// What is kept of the end of standard error.
const STDERR_BYTES_MAX: usize = 4 << 10;

/// How a run ended.
#[derive(Debug, PartialEq)]
pub enum End {
    /// With this status.
    Exit(ExitStatus),
    /// Its time was over, or a stop was requested.
    TimeOut,
    /// It wrote more than [`Limits::stdout_bytes_max`].
    TooLong,
}

/// The outcome of a run.
#[derive(Debug)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Ran {
    pub end: End,
    pub stdout: Vec<u8>,
    /// The last bytes of it.
    pub stderr: Vec<u8>,
}

/// The bounds of a run.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Limits {
    pub time: Duration,
    pub stdout_bytes_max: usize,
    /// Whether a signal that requests a stop of this process ends the program too.
    pub ends_at_stop: bool,
}

/// Runs `command` on `input`; `alive` is called whenever it has written something.
///
/// # Errors
/// When it cannot be started, or the system cannot wait for its pipes.
pub(super) fn run(command: &mut Command, input: &[u8], limits: Limits, alive: &mut dyn FnMut()) -> io::Result<Ran> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let deadline = Instant::now() + limits.time.min(TIME_MAX);
    let mut child = command.spawn()?;
    let group = Pid::from_child(&child);
    let outcome = Pipes::open(&mut child, input, limits).and_then(|mut pipes| {
        let timely = pipes.until(deadline, group, alive);
        // Also after its own end: what it has started holds the pipes and would go on.
        let _ = kill_process_group(group, Signal::KILL);
        timely.and_then(|timely| pipes.read().map(|_| (timely, pipes)))
    });
    let _ = kill_process_group(group, Signal::KILL);
    let status = reap(&mut child)?;
    let (timely, pipes) = outcome?;
    let end = match status {
        _ if pipes.is_too_long() => End::TooLong,
        Some(status) if timely => End::Exit(status),
        _ => End::TimeOut,
    };
    Ok(Ran { end, stdout: pipes.output, stderr: pipes.errors })
}

/// The three pipes and what has gone through them.
struct Pipes<'a> {
    input: &'a [u8],
    stdout_bytes_max: usize,
    ends_at_stop: bool,
    stdin: Option<File>,
    stdout: Option<File>,
    stderr: Option<File>,
    output: Vec<u8>,
    errors: Vec<u8>,
}

impl<'a> Pipes<'a> {
    fn open(child: &mut Child, input: &'a [u8], limits: Limits) -> io::Result<Pipes<'a>> {
        Ok(Pipes {
            input,
            stdout_bytes_max: limits.stdout_bytes_max,
            ends_at_stop: limits.ends_at_stop,
            stdin: child.stdin.take().map(pipe).transpose()?,
            stdout: child.stdout.take().map(pipe).transpose()?,
            stderr: child.stderr.take().map(pipe).transpose()?,
            output: Vec::new(),
            errors: Vec::new(),
        })
    }

    /// Serves the pipes until the program has ended (true), or its time is over or it wrote too much (false).
    fn until(&mut self, deadline: Instant, program: Pid, alive: &mut dyn FnMut()) -> io::Result<bool> {
        let mut last_report = Instant::now();
        loop {
            self.wait()?;
            self.write();
            // The run has its own time limit, so waiting for it is no stall.
            if self.read()? || last_report.elapsed() > ALIVE {
                last_report = Instant::now();
                alive();
            }
            // It is not reaped yet: until then its process id, which is that of its group, is given to nobody else.
            let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            if waitid(WaitId::Pid(program), look)?.is_some() {
                return Ok(true);
            }
            if Instant::now() >= deadline || self.is_too_long() || self.is_to_stop() {
                return Ok(false);
            }
        }
    }

    fn is_to_stop(&self) -> bool {
        self.ends_at_stop && stop_requested()
    }

    fn is_too_long(&self) -> bool {
        self.output.len() > self.stdout_bytes_max
    }

    /// Waits until a pipe can be read or written, for [`LOOK_EVERY`] at most.
    fn wait(&self) -> io::Result<()> {
        let ends = [(&self.stdin, PollFlags::OUT), (&self.stdout, PollFlags::IN), (&self.stderr, PollFlags::IN)];
        let open = ends.iter().filter_map(|(pipe, flags)| pipe.as_ref().map(|pipe| PollFd::new(pipe, *flags)));
        let mut open: Vec<PollFd<'_>> = open.collect();
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(LOOK_EVERY.subsec_nanos()) };
        match poll(&mut open, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes what the pipe takes; closes the pipe at the end of the input, and where nobody reads it any more.
    fn write(&mut self) {
        let Some(pipe) = &mut self.stdin else { return };
        let part = &self.input[..self.input.len().min(PART_BYTES)];
        match pipe.write(part) {
            Ok(bytes) => self.input = &self.input[bytes..],
            Err(error) if is_temporary(&error) => {}
            Err(_) => self.input = &[],
        }
        if self.input.is_empty() {
            self.stdin = None;
        }
    }

    /// Reads what the pipes hold; true where there was any standard output.
    fn read(&mut self) -> io::Result<bool> {
        let before = self.output.len();
        let bytes_max = self.stdout_bytes_max;
        let output = &mut self.output;
        let errors = &mut self.errors;
        drain(&mut self.stdout, &mut |bytes| {
            // One byte more than allowed shows that there were more.
            let room = (bytes_max + 1).saturating_sub(output.len());
            output.extend_from_slice(&bytes[..bytes.len().min(room)]);
        })?;
        drain(&mut self.stderr, &mut |bytes| {
            errors.extend_from_slice(bytes);
            errors.drain(..errors.len().saturating_sub(STDERR_BYTES_MAX));
        })?;
        Ok(self.output.len() > before)
    }
}

/// One end of a pipe, as a file whose reads and writes never block.
fn pipe(end: impl Into<OwnedFd>) -> io::Result<File> {
    let end: OwnedFd = end.into();
    fcntl_setfl(end.as_fd(), fcntl_getfl(end.as_fd())? | OFlags::NONBLOCK)?;
    Ok(File::from(end))
}

/// Reads what is there, [`READS_MAX`] times at most; a pipe at its end is closed.
fn drain(pipe: &mut Option<File>, take: &mut dyn FnMut(&[u8])) -> io::Result<()> {
    let mut part = vec![0; PART_BYTES];
    for _ in 0..READS_MAX {
        let Some(open) = pipe else { break };
        match open.read(&mut part) {
            Ok(0) => *pipe = None,
            Ok(bytes) => take(&part[..bytes]),
            Err(error) if is_temporary(&error) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Waits for a program that has ended or was killed. None where it does not end in time; it is not waited for then.
fn reap(child: &mut Child) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + GONE_WITHIN;
    loop {
        match child.try_wait()? {
            None if Instant::now() < deadline => thread::sleep(LOOK_EVERY / 4),
            status => return Ok(status),
        }
    }
}
