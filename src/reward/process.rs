//! One run of a program: what it is given and what it says go through pipes at the same time, and both are bounded, as is
//! its time.
//!
//! It runs in a process group of its own. When it ends, and when its time is over, all that is left of the group is
//! killed, so that nothing it has started goes on beside the training. A descendant that has left the group is not found;
//! it is not waited for either.

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

/// The longest run that is asked for at all: a month.
const TIME_MAX: Duration = Duration::from_hours(24 * 30);
/// How often a wait says that it goes on.
const ALIVE: Duration = Duration::from_secs(1);
/// The program's end is looked for this often; pipes wake sooner.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A killed process is gone at once, but for one that waits for a device.
pub(super) const GONE_WITHIN: Duration = Duration::from_secs(5);
/// Bytes that are read or written at one time.
const PART_BYTES: usize = 64 << 10;
/// Reads of one pipe in a row, so that one that never ends leaves a look at the clock.
const READS_MAX: u32 = 16;
/// What is kept of the end of standard error.
const STDERR_BYTES_MAX: usize = 4 << 10;

/// How a run ended.
#[derive(Debug, PartialEq)]
pub(super) enum End {
    /// By itself.
    Exit(ExitStatus),
    /// Its time was over.
    TimeOut,
    /// It wrote more than it may.
    TooLong,
}

/// What came of a run.
#[derive(Debug)]
pub(super) struct Ran {
    pub(super) end: End,
    pub(super) stdout: Vec<u8>,
    /// The last of it.
    pub(super) stderr: Vec<u8>,
}

/// What a run may take.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) time: Duration,
    pub(super) stdout_bytes_max: usize,
}

/// Runs `command` on `input`; `heard` is called whenever it has written something.
///
/// # Errors
/// When it cannot be started, or the system cannot wait for its pipes.
pub(super) fn run(command: &mut Command, input: &[u8], limits: Limits, heard: &mut dyn FnMut()) -> io::Result<Ran> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let deadline = Instant::now() + limits.time.min(TIME_MAX);
    let mut child = command.spawn()?;
    let group = Pid::from_child(&child);
    let talked = Talk::of(&mut child, input, limits).and_then(|mut talk| {
        let timely = talk.until(deadline, group, heard);
        // Also after its own end: what it has started holds the pipes, and would go on.
        let _ = kill_process_group(group, Signal::KILL);
        timely.and_then(|timely| talk.read().map(|_| (timely, talk)))
    });
    let _ = kill_process_group(group, Signal::KILL);
    let status = reap(&mut child)?;
    let (timely, talk) = talked?;
    let end = match status {
        _ if talk.is_too_long() => End::TooLong,
        Some(status) if timely => End::Exit(status),
        _ => End::TimeOut,
    };
    Ok(Ran { end, stdout: talk.said, stderr: talk.complained })
}

/// The three pipes and what has gone through them.
struct Talk<'a> {
    input: &'a [u8],
    stdout_bytes_max: usize,
    stdin: Option<File>,
    stdout: Option<File>,
    stderr: Option<File>,
    said: Vec<u8>,
    complained: Vec<u8>,
}

impl<'a> Talk<'a> {
    fn of(child: &mut Child, input: &'a [u8], limits: Limits) -> io::Result<Talk<'a>> {
        Ok(Talk {
            input,
            stdout_bytes_max: limits.stdout_bytes_max,
            stdin: child.stdin.take().map(pipe).transpose()?,
            stdout: child.stdout.take().map(pipe).transpose()?,
            stderr: child.stderr.take().map(pipe).transpose()?,
            said: Vec::new(),
            complained: Vec::new(),
        })
    }

    /// Goes on until the program has ended (true), or its time is over or it wrote too much (false).
    fn until(&mut self, deadline: Instant, program: Pid, heard: &mut dyn FnMut()) -> io::Result<bool> {
        let mut told = Instant::now();
        loop {
            self.wait()?;
            self.write();
            // It has an end of its own: to wait for it is no stall.
            if self.read()? || told.elapsed() > ALIVE {
                told = Instant::now();
                heard();
            }
            // It is left to be reaped: until then nobody else gets its number, which is its group's.
            let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            if waitid(WaitId::Pid(program), look)?.is_some() {
                return Ok(true);
            }
            if Instant::now() >= deadline || self.is_too_long() || stop_requested() {
                return Ok(false);
            }
        }
    }

    fn is_too_long(&self) -> bool {
        self.said.len() > self.stdout_bytes_max
    }

    /// Until a pipe has something, or takes something, but not for long.
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

    /// Gives what the pipe takes; the pipe is closed at the end, and where nobody reads it any more.
    fn write(&mut self) {
        let Some(pipe) = &mut self.stdin else { return };
        let part = &self.input[..self.input.len().min(PART_BYTES)];
        match pipe.write(part) {
            Ok(bytes) => self.input = &self.input[bytes..],
            Err(error) if passes(&error) => {}
            Err(_) => self.input = &[],
        }
        if self.input.is_empty() {
            self.stdin = None;
        }
    }

    /// Takes what the pipes hold; whether there was any on standard output.
    fn read(&mut self) -> io::Result<bool> {
        let before = self.said.len();
        let (most, said, complained) = (self.stdout_bytes_max, &mut self.said, &mut self.complained);
        drain(&mut self.stdout, &mut |bytes| {
            // One byte too many tells that there were more.
            let room = (most + 1).saturating_sub(said.len());
            said.extend_from_slice(&bytes[..bytes.len().min(room)]);
        })?;
        drain(&mut self.stderr, &mut |bytes| {
            complained.extend_from_slice(bytes);
            complained.drain(..complained.len().saturating_sub(STDERR_BYTES_MAX));
        })?;
        Ok(self.said.len() > before)
    }
}

/// One end of a pipe that is never waited for.
fn pipe(end: impl Into<OwnedFd>) -> io::Result<File> {
    let end: OwnedFd = end.into();
    fcntl_setfl(end.as_fd(), fcntl_getfl(end.as_fd())? | OFlags::NONBLOCK)?;
    Ok(File::from(end))
}

/// Reads what is there, for a while; a pipe that has come to its end is closed.
fn drain(pipe: &mut Option<File>, take: &mut dyn FnMut(&[u8])) -> io::Result<()> {
    let mut part = vec![0; PART_BYTES];
    for _ in 0..READS_MAX {
        let Some(open) = pipe else { break };
        match open.read(&mut part) {
            Ok(0) => *pipe = None,
            Ok(bytes) => take(&part[..bytes]),
            Err(error) if passes(&error) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn passes(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Waits for a program that has ended or was killed. None where it does not go: it is left behind then.
fn reap(child: &mut Child) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + GONE_WITHIN;
    loop {
        match child.try_wait()? {
            None if Instant::now() < deadline => thread::sleep(LOOK_EVERY / 4),
            status => return Ok(status),
        }
    }
}
