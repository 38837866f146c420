//! A rank's GPU: opened at run time, so that one binary runs with and without a GPU; copies concurrent with the
//! computation; pinned host memory that is kept for tensors of about the same size.
//!
//! There are three streams: the computation, copies in, copies out. A copy starts after all work queued on the
//! computation before it; whoever needs its result waits for its [`Event`]. The time that the computation waits for
//! copies is measured on the device.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::time::Instant;

use tch::{Device, Tensor};

use super::Error;
use super::ffi::{call, raw, torch_tensor};
use crate::runtime::units::Bytes;

// SAFETY: these are the functions of gpu.cpp, compiled by build.rs, with the same parameter types.
unsafe extern "C" {
    fn longstraw_gpu_open(folder: *const c_char, message: *mut c_char, capacity: usize) -> c_int;
    fn longstraw_gpu_count() -> c_int;
    fn longstraw_gpu_drive(index: c_int, deterministic: c_int, message: *mut c_char, capacity: usize) -> c_int;
    fn longstraw_gpu_repeats() -> c_int;
    fn longstraw_gpu_identity(index: c_int, text: *mut c_char, capacity: usize) -> c_int;
    fn longstraw_gpu_memory(free: *mut u64, total: *mut u64, message: *mut c_char, capacity: usize) -> c_int;
    fn longstraw_gpu_synchronize(message: *mut c_char, capacity: usize) -> c_int;
    fn longstraw_gpu_reserved_bytes(now: *mut u64, peak: *mut u64) -> c_int;
    fn longstraw_gpu_empty_cache();
    fn longstraw_pinned_like(
        like: *mut torch_tensor,
        made: *mut *mut torch_tensor,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_pinned_reserve(bytes: *const u64, count: usize, message: *mut c_char, capacity: usize) -> c_int;
    fn longstraw_pinned_reserved() -> u64;
    fn longstraw_copy_near(
        target: *mut torch_tensor,
        source: *mut torch_tensor,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_copy_out(
        target: *mut torch_tensor,
        source: *mut torch_tensor,
        done: *mut *mut c_void,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_copy_in(
        target: *mut torch_tensor,
        source: *mut torch_tensor,
        done: *mut *mut c_void,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_event_wait(event: *mut c_void, message: *mut c_char, capacity: usize) -> c_int;
    fn longstraw_event_block(event: *mut c_void, message: *mut c_char, capacity: usize) -> c_int;
    fn longstraw_event_finish(event: *mut c_void, message: *mut c_char, capacity: usize) -> c_int;
    fn longstraw_event_free(event: *mut c_void);
    fn longstraw_event_now(event: *mut *mut c_void, message: *mut c_char, capacity: usize) -> c_int;
    fn longstraw_event_between(
        before: *mut c_void,
        after: *mut c_void,
        milliseconds: *mut f64,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_moved(into: *mut u64, out: *mut u64);
    fn longstraw_stall_ms() -> f64;
}

/// Opens libtorch's CUDA library, from `folder` or from the loader's search path, and returns the number of visible
/// GPUs. Call before the first tensor of the process.
///
/// # Errors
/// When there is no such library; the message is the loader's.
pub fn open(folder: &Path) -> Result<usize, Error> {
    let path = std::ffi::CString::new(folder.as_os_str().as_encoded_bytes()).unwrap_or_default();
    // SAFETY: a terminated string that outlives the call.
    call("opening libtorch_cuda", |message, capacity| unsafe { longstraw_gpu_open(path.as_ptr(), message, capacity) })?;
    // SAFETY: no arguments; the callee catches what it throws.
    Ok(usize::try_from(unsafe { longstraw_gpu_count() }).unwrap_or(0))
}

/// Makes GPU `index` the one of this process; sums stay in float32. With `deterministic`, no library kernel with
/// atomics is used.
///
/// # Errors
/// When the GPU cannot be used.
pub fn select(index: usize, deterministic: bool) -> Result<Device, Error> {
    let number = c_int::try_from(index).unwrap_or(c_int::MAX);
    let deterministic = c_int::from(deterministic);
    // SAFETY: plain numbers.
    call("taking a GPU", |message, capacity| unsafe { longstraw_gpu_drive(number, deterministic, message, capacity) })?;
    Ok(Device::Cuda(index))
}

/// Whether [`select`] was called with `deterministic`.
#[must_use]
pub fn repeats() -> bool {
    // SAFETY: no arguments; no exception comes out.
    unsafe { longstraw_gpu_repeats() != 0 }
}

/// The GPU's address on the PCI bus, which no two GPUs of a machine share, whatever `CUDA_VISIBLE_DEVICES` says.
#[must_use]
pub fn identity(index: usize) -> Option<String> {
    let mut text = [0u8; 32];
    let number = c_int::try_from(index).unwrap_or(c_int::MAX);
    // SAFETY: the callee writes at most `text.len()` bytes, a terminating zero included.
    let status = unsafe { longstraw_gpu_identity(number, text.as_mut_ptr().cast(), text.len()) };
    let length = text.iter().position(|&byte| byte == 0)?;
    (status == 0).then(|| String::from_utf8_lossy(&text[..length]).into_owned())
}

/// Free and total memory of this process's GPU.
///
/// # Errors
/// When the runtime does not say.
pub fn memory() -> Result<(Bytes, Bytes), Error> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: two numbers that outlive the call.
    call("asking for the GPU's memory", |message, capacity| unsafe {
        longstraw_gpu_memory(&raw mut free, &raw mut total, message, capacity)
    })?;
    Ok((Bytes(free), Bytes(total)))
}

/// Bytes that libtorch's allocator has reserved on the GPU, now and at the peak; more than the bytes of all tensors.
#[must_use]
pub fn reserved() -> Option<(Bytes, Bytes)> {
    let (mut now, mut peak) = (0, 0);
    // SAFETY: two numbers that outlive the call.
    let status = unsafe { longstraw_gpu_reserved_bytes(&raw mut now, &raw mut peak) };
    (status == 0).then_some((Bytes(now), Bytes(peak)))
}

/// Returns reserved memory that no tensor uses to the GPU.
pub fn empty_cache() {
    // SAFETY: no arguments; no exception comes out.
    unsafe { longstraw_gpu_empty_cache() }
}

/// Waits until `device` has done all queued work; does nothing on a CPU.
///
/// # Errors
/// When queued work has failed.
pub fn synchronize(device: Device) -> Result<(), Error> {
    if device == Device::Cpu {
        return Ok(());
    }
    // SAFETY: no arguments except the message buffer.
    call("waiting for the GPU", |message, capacity| unsafe { longstraw_gpu_synchronize(message, capacity) })
}

/// Bytes copied to the device and back to host memory so far; 0 without a GPU.
#[must_use]
pub fn copied_bytes() -> (Bytes, Bytes) {
    let (mut into, mut out) = (0, 0);
    // SAFETY: two numbers that outlive the call.
    unsafe { longstraw_moved(&raw mut into, &raw mut out) };
    (Bytes(into), Bytes(out))
}

/// Seconds that the computation has waited for copies so far; 0 without a GPU.
#[must_use]
pub fn stage_wait_seconds() -> f64 {
    // SAFETY: no arguments; no exception comes out.
    unsafe { longstraw_stall_ms() / 1e3 }
}

/// A tensor of the shape and dtype of `like` in its own pinned host memory; values are not initialized.
///
/// # Errors
/// When no more host memory can be pinned.
pub fn pinned_like(like: &Tensor) -> Result<Tensor, Error> {
    let mut made = null_mut();
    // SAFETY: a live tensor, and a place for one pointer.
    call("pinning host memory", |message, capacity| unsafe {
        longstraw_pinned_like(raw(like), &raw mut made, message, capacity)
    })?;
    // SAFETY: the callee has made a tensor and hands it over.
    Ok(unsafe { Tensor::from_ptr(made.cast()) })
}

/// Pins blocks of these sizes now, in parallel, for later [`pinned_like`] tensors. Returns all bytes pinned so far.
///
/// # Errors
/// When no more host memory can be pinned.
pub fn reserve_pinned(blocks: &[Bytes]) -> Result<Bytes, Error> {
    let sizes: Vec<u64> = blocks.iter().map(|bytes| bytes.0).collect();
    // SAFETY: `sizes` outlives the call.
    call("pinning host memory", |message, capacity| unsafe {
        longstraw_pinned_reserve(sizes.as_ptr(), sizes.len(), message, capacity)
    })?;
    // SAFETY: no arguments; no exception comes out.
    Ok(Bytes(unsafe { longstraw_pinned_reserved() }))
}

/// A point in the work of a stream.
#[derive(Debug)]
pub struct Event(*mut c_void);

impl Event {
    /// # Safety
    /// `made` comes from the boundary, and nothing else holds it.
    pub(super) unsafe fn taken(made: *mut c_void) -> Event {
        Event(made)
    }

    /// After all work queued on the computation so far; can be timed.
    ///
    /// # Errors
    /// When no event can be made.
    pub fn now() -> Result<Event, Error> {
        let mut made = null_mut();
        // SAFETY: a place for one pointer.
        call("marking a stream", |message, capacity| unsafe { longstraw_event_now(&raw mut made, message, capacity) })?;
        Ok(Event(made))
    }

    /// The computation waits for the event; the time counts as waiting for copies.
    ///
    /// # Errors
    /// When queued work has failed.
    pub fn wait(&self) -> Result<(), Error> {
        // SAFETY: an event of ours.
        call("waiting for a copy", |message, capacity| unsafe { longstraw_event_wait(self.0, message, capacity) })
    }

    /// The computation waits for the event, a message of another rank; the time does not count as waiting for copies.
    ///
    /// # Errors
    /// As [`Event::wait`].
    pub fn block(&self) -> Result<(), Error> {
        // SAFETY: an event of ours.
        call("waiting for a message", |message, capacity| unsafe { longstraw_event_block(self.0, message, capacity) })
    }

    /// The host waits for the event.
    ///
    /// # Errors
    /// As [`Event::wait`].
    pub fn finish(&self) -> Result<(), Error> {
        // SAFETY: an event of ours.
        call("waiting for a copy", |message, capacity| unsafe { longstraw_event_finish(self.0, message, capacity) })
    }

    /// Seconds on the device from this event to `later`, both made by [`Event::now`]; the host waits for `later`.
    ///
    /// # Errors
    /// As [`Event::wait`].
    pub fn seconds_to(&self, later: &Event) -> Result<f64, Error> {
        let mut milliseconds = 0.0;
        // SAFETY: two events of ours, and a place for one number.
        call("timing a stream", |message, capacity| unsafe {
            longstraw_event_between(self.0, later.0, &raw mut milliseconds, message, capacity)
        })?;
        Ok(milliseconds / 1e3)
    }
}

/// A point in time of a computation: on a GPU the time at which the device reaches it, not at which it was queued.
#[derive(Debug)]
pub enum Mark {
    /// By the host's clock.
    Host(Instant),
    /// After all queued work of the device.
    Device(Event),
}

impl Mark {
    /// Now, on `device`.
    ///
    /// # Errors
    /// When no event can be made.
    pub fn now(device: Device) -> Result<Mark, Error> {
        match device {
            Device::Cpu => Ok(Mark::Host(Instant::now())),
            _ => Ok(Mark::Device(Event::now()?)),
        }
    }

    /// Seconds from this point to `later`, for which the host waits on a GPU; 0 between different devices.
    ///
    /// # Errors
    /// When queued work has failed.
    pub fn seconds_to(&self, later: &Mark) -> Result<f64, Error> {
        match (self, later) {
            (Mark::Host(before), Mark::Host(after)) => Ok(after.duration_since(*before).as_secs_f64()),
            (Mark::Device(before), Mark::Device(after)) => before.seconds_to(after),
            _ => Ok(0.0),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by the boundary, freed once.
        unsafe { longstraw_event_free(self.0) }
    }
}

/// Copies up to this size should use [`copy_by_kernel`].
pub const KERNEL_COPY_BYTES_MAX: u64 = 1 << 25;

/// Copies `source` over `target` as a step of the computation: later work on the device sees the new values. Both have
/// the same shape and are contiguous; one is pinned and the other on the GPU. Copy engines work through large copies in
/// order, so a small urgent copy would wait for them.
///
/// # Errors
/// When libtorch refuses.
pub fn copy_by_kernel(target: &Tensor, source: &Tensor) -> Result<(), Error> {
    // SAFETY: two live tensors.
    call("copying by a kernel", |message, capacity| unsafe {
        longstraw_copy_near(raw(target), raw(source), message, capacity)
    })
}

/// Starts copying `source` (on the GPU) over `target` (pinned, same shape). The source must stay until the event.
///
/// # Errors
/// When libtorch refuses.
pub fn copy_out(target: &Tensor, source: &Tensor) -> Result<Event, Error> {
    let mut done = null_mut();
    // SAFETY: two live tensors, and a place for one pointer.
    call("copying to host memory", |message, capacity| unsafe {
        longstraw_copy_out(raw(target), raw(source), &raw mut done, message, capacity)
    })?;
    Ok(Event(done))
}

/// Starts copying `source` (pinned) over `target` (on the GPU, same shape).
///
/// # Errors
/// When libtorch refuses.
pub fn copy_in(target: &Tensor, source: &Tensor) -> Result<Event, Error> {
    let mut done = null_mut();
    // SAFETY: two live tensors, and a place for one pointer.
    call("copying to the GPU", |message, capacity| unsafe {
        longstraw_copy_in(raw(target), raw(source), &raw mut done, message, capacity)
    })?;
    Ok(Event(done))
}
