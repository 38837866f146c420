//! Safe faces of the C++ boundary.

use std::ffi::{CStr, c_char, c_int};

use tch::Tensor;

use super::Error;
use crate::runtime::memory::Measured;
use crate::runtime::units::Bytes;

pub use crate::runtime::memory::MemorySpace;

// SAFETY: these are the functions of boundary.cpp, compiled by build.rs, with the same parameter types.
unsafe extern "C" {
    fn longstraw_backward(
        outputs: *const *mut torch_tensor,
        gradients: *const *mut torch_tensor,
        count: usize,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_storage_bytes(tensor: *mut torch_tensor) -> u64;
    fn longstraw_torch_version() -> *const c_char;
    fn longstraw_count_install();
    fn longstraw_count_tag(tag: c_int);
    fn longstraw_count_live(tag: c_int) -> i64;
    fn longstraw_count_peak(tag: c_int) -> i64;
    fn longstraw_count_reset_peak();
}

/// An `at::Tensor` as C++ sees it; `tch` keeps one behind every `Tensor`.
#[repr(C)]
#[allow(non_camel_case_types)]
pub(super) struct torch_tensor {
    _opaque: [u8; 0],
}

/// The tensor behind a `Tensor`, for the other side to look at or write to while the call lasts.
pub(super) fn raw(tensor: &Tensor) -> *mut torch_tensor {
    tensor.as_ptr().cast_mut().cast()
}

/// Room for an error's words from the other side.
pub(super) struct Words;

impl Words {
    /// Calls `work` with room for a message; a status other than 0 becomes an error with its first line.
    pub(super) fn of(operation: &'static str, work: impl FnOnce(*mut c_char, usize) -> c_int) -> Result<(), Error> {
        let mut message = vec![0u8; 2048];
        if work(message.as_mut_ptr().cast(), message.len()) == 0 {
            return Ok(());
        }
        let end = message.iter().position(|&byte| byte == 0).unwrap_or(message.len());
        let message = String::from_utf8_lossy(&message[..end]).lines().next().unwrap_or_default().to_owned();
        Err(Error::Torch { operation, message })
    }
}

/// Pulls `gradients` through `outputs`; leaf gradients add up in the leaves' `.grad`.
///
/// Pairs whose output carries no graph are left out: a constant has nothing to pull.
///
/// # Errors
/// When libtorch refuses, for example because shapes differ.
pub fn backward(pairs: &[(&Tensor, &Tensor)]) -> Result<(), Error> {
    let live: Vec<_> = pairs.iter().filter(|(output, _)| output.requires_grad()).collect();
    if live.is_empty() {
        return Ok(());
    }
    let outputs: Vec<_> = live.iter().map(|(output, _)| raw(output)).collect();
    let gradients: Vec<_> = live.iter().map(|(_, gradient)| raw(gradient)).collect();
    // SAFETY: both arrays hold `live.len()` pointers to tensors that outlive the call, and the callee writes at most as
    // many bytes as there is room for, a terminating zero included.
    Words::of("backward", |to, room| unsafe {
        longstraw_backward(outputs.as_ptr(), gradients.as_ptr(), live.len(), to, room)
    })
}

/// Bytes of the allocation behind a tensor, which is larger than the tensor's own if it is a view.
#[must_use]
pub fn storage_bytes(tensor: &Tensor) -> Bytes {
    // SAFETY: the pointer is a live tensor's, and the callee only reads its storage's size.
    Bytes(unsafe { longstraw_storage_bytes(raw(tensor)) })
}

/// Bytes that the counting CPU allocator has handed out.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Counted {
    /// Bytes alive now.
    pub live: Bytes,
    /// The most that were alive since the last reset.
    pub peak: Bytes,
}

/// The version of libtorch that this binary was compiled against.
#[must_use]
pub fn torch_version() -> &'static str {
    // SAFETY: no arguments; the callee returns a string literal, which is terminated and lives as long as the process.
    unsafe { CStr::from_ptr(longstraw_torch_version()) }.to_str().unwrap_or("unknown")
}

/// Makes every later CPU allocation of libtorch counted. Call once, before the first tensor.
pub fn count_allocations() {
    // SAFETY: registers an allocator of static lifetime; calling it again does nothing.
    unsafe { longstraw_count_install() }
}

/// Runs `work` with its allocations counted in `memory space`.
pub fn within<T>(space: MemorySpace, work: impl FnOnce() -> T) -> T {
    // SAFETY: sets an atomic of static lifetime.
    unsafe { longstraw_count_tag(space as c_int) };
    let result = work();
    // SAFETY: as above.
    unsafe { longstraw_count_tag(MemorySpace::Device as c_int) };
    result
}

/// What the counting allocator has handed out in `memory space`.
#[must_use]
pub fn counted(space: MemorySpace) -> Counted {
    // SAFETY: both read counts of static lifetime; neither lets an exception out.
    let (live, peak) = unsafe { (longstraw_count_live(space as c_int), longstraw_count_peak(space as c_int)) };
    Counted { live: Bytes(u64::try_from(live).unwrap_or(0)), peak: Bytes(u64::try_from(peak).unwrap_or(0)) }
}

/// The same, as a ledger asks it, with what the GPU's allocator has reserved.
#[must_use]
pub fn measured(space: MemorySpace) -> Measured {
    let Counted { live, peak } = counted(space);
    let reserved = if space == MemorySpace::Device { super::gpu::reserved().map(|(now, _)| now) } else { None };
    Measured { live, peak, reserved }
}

/// Forgets peaks: from here on the peak starts at what is alive now.
pub fn forget_peaks() {
    // SAFETY: writes counts of static lifetime; no exception comes out.
    unsafe { longstraw_count_reset_peak() }
}
