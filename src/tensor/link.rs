//! Tensors from GPU to GPU, without the host between: NCCL's sends and receives, opened at run time.
//!
//! Messages go on a stream of their own, beside the computation. Nothing is summed on the way, so whatever NCCL
//! chooses, the bits that arrive are the bits that left.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;

use tch::Tensor;

use super::Error;
use super::ffi::{call, raw, torch_tensor};
use super::gpu::Event;
use crate::runtime::units::Rank;

// SAFETY: these are the functions of link.cpp, compiled by build.rs, with the same parameter types.
unsafe extern "C" {
    fn longstraw_link_there() -> c_int;
    fn longstraw_link_name(name: *mut c_char, message: *mut c_char, capacity: usize) -> c_int;
    fn longstraw_link_open(
        name: *const c_char,
        ranks: c_int,
        rank: c_int,
        link: *mut *mut c_void,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_link_exchange(
        link: *mut c_void,
        send: *const *mut torch_tensor,
        to: *const c_int,
        sends: usize,
        receive: *const *mut torch_tensor,
        from: *const c_int,
        receives: usize,
        done: *mut *mut c_void,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_link_close(link: *mut c_void);
}

/// Bytes of a link's id.
pub const ID_BYTES: usize = 128;

/// Whether NCCL can be opened; call after [`super::gpu::select`].
#[must_use]
pub fn nccl_available() -> bool {
    // SAFETY: no arguments; no exception comes out.
    unsafe { longstraw_link_there() != 0 }
}

/// A new id of a link: one rank makes it and sends it to the others.
///
/// # Errors
/// When NCCL finds no network interface.
pub fn new_id() -> Result<[u8; ID_BYTES], Error> {
    let mut name = [0u8; ID_BYTES];
    // SAFETY: the callee writes exactly `ID_BYTES` bytes.
    call("naming a link between GPUs", |message, capacity| unsafe {
        longstraw_link_name(name.as_mut_ptr().cast(), message, capacity)
    })?;
    Ok(name)
}

/// One tensor to send to, or to receive from, another rank: on the GPU, contiguous, not empty.
#[derive(Debug)]
pub struct Message {
    /// The values, or where they are received.
    pub tensor: Tensor,
    /// The other rank.
    pub peer: Rank,
}

/// A link between the GPUs of some ranks, one GPU each.
#[derive(Debug)]
pub struct Link(*mut c_void);

impl Link {
    /// Connects the ranks that have the same `id`; returns when all of them have called it.
    ///
    /// # Errors
    /// When NCCL cannot connect them.
    pub fn open(name: &[u8; ID_BYTES], ranks: usize, rank: Rank) -> Result<Link, Error> {
        let mut link = null_mut();
        let number = |count: usize| c_int::try_from(count).unwrap_or(c_int::MAX);
        // SAFETY: a name of the size that the callee reads, and a place for one pointer.
        call("linking GPUs", |message, capacity| unsafe {
            longstraw_link_open(name.as_ptr().cast(), number(ranks), number(rank.0), &raw mut link, message, capacity)
        })?;
        Ok(Link(link))
    }

    /// Sends and receives, all together, after all work queued on the computation so far. Every message needs its
    /// counterpart on the peer. The event is after them; the tensors must live until then.
    ///
    /// # Errors
    /// When NCCL refuses.
    pub fn exchange(&self, send: &[Message], receive: &[Message]) -> Result<Event, Error> {
        let tensors = |messages: &[Message]| messages.iter().map(|message| raw(&message.tensor)).collect::<Vec<_>>();
        let peers = |messages: &[Message]| {
            messages.iter().map(|message| c_int::try_from(message.peer.0).unwrap_or(c_int::MAX)).collect::<Vec<_>>()
        };
        let (sent, to_peers, received, from_peers) = (tensors(send), peers(send), tensors(receive), peers(receive));
        let mut done = null_mut();
        // SAFETY: a live link; each array is as long as said and outlives the call; a place for one pointer.
        call("a message between GPUs", |message, capacity| unsafe {
            longstraw_link_exchange(
                self.0,
                sent.as_ptr(),
                to_peers.as_ptr(),
                sent.len(),
                received.as_ptr(),
                from_peers.as_ptr(),
                received.len(),
                &raw mut done,
                message,
                capacity,
            )
        })?;
        // SAFETY: the callee has made an event and hands it over.
        Ok(unsafe { Event::taken(done) })
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // SAFETY: opened once, closed once.
        unsafe { longstraw_link_close(self.0) }
    }
}
