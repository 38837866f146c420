//! Backward with given output gradients, storage sizes, and counted CPU allocations.

use std::ffi::{CStr, c_char, c_int};

use tch::Tensor;

use super::Error;
use super::ffi::{call, raw, torch_tensor};
use super::gpu;
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

/// Runs backward from pairs of (output, gradient of the output); leaf gradients are added to the leaves' `.grad`.
///
/// Pairs whose output has no graph are skipped: a constant has no gradient.
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
    // SAFETY: both arrays hold `live.len()` pointers to tensors that outlive the call, and the callee writes at most
    // `capacity` bytes, the terminating zero included.
    call("backward", |message, capacity| unsafe {
        longstraw_backward(outputs.as_ptr(), gradients.as_ptr(), live.len(), message, capacity)
    })
}

/// Bytes of the tensor's storage: for a view more than the view's own bytes.
#[must_use]
pub fn storage_bytes(tensor: &Tensor) -> Bytes {
    // SAFETY: the pointer is a live tensor's, and the callee only reads its storage's size.
    Bytes(unsafe { longstraw_storage_bytes(raw(tensor)) })
}

/// Allocated bytes, as the counting CPU allocator and the GPU's allocator report them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Counted {
    /// Bytes alive now.
    pub live: Bytes,
    /// Maximum of live bytes since [`forget_peaks`].
    pub peak: Bytes,
}

/// The version of libtorch that this binary was compiled against.
#[must_use]
pub fn torch_version() -> &'static str {
    // SAFETY: no arguments; the callee returns a string literal, which is terminated and lives as long as the process.
    unsafe { CStr::from_ptr(longstraw_torch_version()) }.to_str().unwrap_or("unknown")
}

/// Starts to count every CPU allocation of libtorch. Call once, before the first tensor.
pub fn count_allocations() {
    // SAFETY: registers an allocator of static lifetime; calling it again does nothing.
    unsafe { longstraw_count_install() }
}

/// Runs `work` with its CPU allocations counted in `space`.
pub fn within<T>(space: MemorySpace, work: impl FnOnce() -> T) -> T {
    // SAFETY: sets an atomic of static lifetime.
    unsafe { longstraw_count_tag(space as c_int) };
    let result = work();
    // SAFETY: as above.
    unsafe { longstraw_count_tag(MemorySpace::Device as c_int) };
    result
}

/// Bytes allocated in `space`.
#[must_use]
pub fn counted(space: MemorySpace) -> Counted {
    // SAFETY: both read counts of static lifetime; neither lets an exception out.
    let (live, peak) = unsafe { (longstraw_count_live(space as c_int), longstraw_count_peak(space as c_int)) };
    Counted { live: Bytes(u64::try_from(live).unwrap_or(0)), peak: Bytes(u64::try_from(peak).unwrap_or(0)) }
}

/// Bytes allocated in `space` and reserved by the GPU's allocator, for the ledger.
#[must_use]
pub fn measured(space: MemorySpace) -> Measured {
    let Counted { live, peak } = counted(space);
    let reserved = if space == MemorySpace::Device { gpu::reserved().map(|(now, _)| now) } else { None };
    Measured { live, peak, reserved }
}

/// Resets all peaks to the bytes that are alive now.
pub fn forget_peaks() {
    // SAFETY: writes counts of static lifetime; no exception comes out.
    unsafe { longstraw_count_reset_peak() }
}
