//! Tensors from GPU to GPU, without the host between: NCCL's sends and receives, opened at run time.
//!
//! Messages go on a stream of their own, beside the computation. Nothing is summed on the way, so whatever NCCL chooses,
//! the bits that arrive are the bits that left.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;

use tch::Tensor;

use super::Error;
use super::boundary::{Words, raw, torch_tensor};
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

/// Bytes of a link's name.
pub const NAME_BYTES: usize = 128;

/// Whether NCCL is there; only asked once a GPU is driven.
#[must_use]
pub fn nccl_available() -> bool {
    // SAFETY: no arguments; no exception comes out.
    unsafe { longstraw_link_there() != 0 }
}

/// A new name, for one rank to tell the others.
///
/// # Errors
/// When NCCL finds no way to be reached.
pub fn name() -> Result<[u8; NAME_BYTES], Error> {
    let mut name = [0u8; NAME_BYTES];
    // SAFETY: the callee writes exactly `NAME_BYTES` bytes.
    Words::of("naming a link between GPUs", |to, room| unsafe {
        longstraw_link_name(name.as_mut_ptr().cast(), to, room)
    })?;
    Ok(name)
}

/// One tensor for, or from, another rank: on the GPU, contiguous, not empty.
#[derive(Debug)]
pub struct Parcel {
    /// What travels, or where it arrives.
    pub tensor: Tensor,
    /// The other rank.
    pub peer: Rank,
}

/// A link between the GPUs of some ranks, one GPU each.
#[derive(Debug)]
pub struct Link(*mut c_void);

impl Link {
    /// Joins the others under `name`; returns when all of them have come.
    ///
    /// # Errors
    /// When NCCL cannot connect them.
    pub fn open(name: &[u8; NAME_BYTES], ranks: usize, rank: Rank) -> Result<Link, Error> {
        let mut link = null_mut();
        let number = |count: usize| c_int::try_from(count).unwrap_or(c_int::MAX);
        // SAFETY: a name of the size that the callee reads, and a place for one pointer.
        Words::of("linking GPUs", |to, room| unsafe {
            longstraw_link_open(name.as_ptr().cast(), number(ranks), number(rank.0), &raw mut link, to, room)
        })?;
        Ok(Link(link))
    }

    /// Sends and receives, all at one time, after all that was asked of the computation so far. Every parcel has its
    /// counterpart on its peer. The event is behind them; until then the tensors must stay.
    ///
    /// # Errors
    /// When NCCL refuses.
    pub fn exchange(&self, send: &[Parcel], receive: &[Parcel]) -> Result<Event, Error> {
        let tensors = |parcels: &[Parcel]| parcels.iter().map(|parcel| raw(&parcel.tensor)).collect::<Vec<_>>();
        let peers = |parcels: &[Parcel]| {
            parcels.iter().map(|parcel| c_int::try_from(parcel.peer.0).unwrap_or(c_int::MAX)).collect::<Vec<_>>()
        };
        let (sent, to_peers, received, from_peers) = (tensors(send), peers(send), tensors(receive), peers(receive));
        let mut done = null_mut();
        // SAFETY: a live link; each array is as long as said and outlives the call; a place for one pointer.
        Words::of("a message between GPUs", |to, room| unsafe {
            longstraw_link_exchange(
                self.0,
                sent.as_ptr(),
                to_peers.as_ptr(),
                sent.len(),
                received.as_ptr(),
                from_peers.as_ptr(),
                received.len(),
                &raw mut done,
                to,
                room,
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
