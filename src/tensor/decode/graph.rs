//! Launches of a decode step, and the CUDA graph that repeats them with one call.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::{from_mut, null_mut};

use tch::Tensor;

use crate::tensor::Error;
use crate::tensor::ffi::call;

// SAFETY: these are the functions of decode.cpp, compiled by build.rs, with the same parameter types.
unsafe extern "C" {
    fn longstraw_decode_launch(
        dtype: c_int,
        head: c_int,
        name: *const c_char,
        grid: *const c_uint,
        threads: c_uint,
        shared: c_uint,
        early: c_int,
        argument: *mut c_void,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn longstraw_graph_begin(message: *mut c_char, capacity: usize) -> c_int;
    fn longstraw_graph_end(keep: c_int, graph: *mut *mut c_void, message: *mut c_char, capacity: usize) -> c_int;
    fn longstraw_graph_launch(graph: *mut c_void, message: *mut c_char, capacity: usize) -> c_int;
    fn longstraw_graph_free(graph: *mut c_void);
}

/// How a kernel is started.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Blocks in each direction.
    pub(super) grid: [c_uint; 3],
    /// Threads of a block.
    pub(super) threads: c_uint,
    /// Bytes of shared memory that are asked for.
    pub(super) shared: c_uint,
    /// Whether it may begin before the kernel ahead of it has ended.
    pub(super) early: bool,
}

/// Starts kernels of one module, or records them.
#[derive(Debug)]
pub(super) struct Launcher {
    dtype: c_int,
    head: c_int,
    /// Tensors of the recorded launches, while a graph is recorded.
    recorded: RefCell<Option<Vec<Tensor>>>,
}

impl Launcher {
    pub(super) fn new(dtype: c_int, head: c_int) -> Launcher {
        Launcher { dtype, head, recorded: RefCell::default() }
    }

    /// Starts a kernel whose argument points into `tensors`, or records it and keeps them.
    ///
    /// # Safety
    /// `argument` is the kernel's argument struct, and what it points to lies in `tensors`, on the device or in pinned memory.
    pub(super) unsafe fn launch<T>(
        &self,
        name: &'static CStr,
        shape: &Shape,
        argument: &mut T,
        tensors: &[&Tensor],
    ) -> Result<(), Error> {
        if let Some(kept) = self.recorded.borrow_mut().as_mut() {
            kept.extend(tensors.iter().map(|tensor| tensor.shallow_clone()));
        }
        // Beside operations of the library an order of whole kernels is kept.
        let early = c_int::from(shape.early && self.recorded.borrow().is_some());
        // SAFETY: by this function's contract; the driver copies the argument before it returns.
        call("starting a kernel of a decode step", |message, capacity| unsafe {
            longstraw_decode_launch(
                self.dtype,
                self.head,
                name.as_ptr(),
                shape.grid.as_ptr(),
                shape.threads,
                shape.shared,
                early,
                from_mut(argument).cast(),
                message,
                capacity,
            )
        })
    }

    /// Records what `work` launches.
    pub(super) fn record<E: From<Error>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        // SAFETY: no arguments except the message buffer.
        call("recording a graph", |message, capacity| unsafe { longstraw_graph_begin(message, capacity) })?;
        self.recorded.replace(Some(Vec::new()));
        let worked = work();
        let tensors = self.recorded.take().unwrap_or_default();
        let mut graph = null_mut();
        let keep = c_int::from(worked.is_ok());
        // SAFETY: a recording has begun, and a place for one pointer.
        let ended = call("recording a graph", |message, capacity| unsafe {
            longstraw_graph_end(keep, &raw mut graph, message, capacity)
        });
        worked?;
        ended?;
        Ok(Graph { graph, _tensors: tensors })
    }
}

/// Launches that are repeated with one call.
#[derive(Debug)]
pub struct Graph {
    graph: *mut c_void,
    /// What the launches read and write.
    _tensors: Vec<Tensor>,
}

impl Graph {
    /// Repeats the launches as a step of the computation.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn launch(&self) -> Result<(), Error> {
        // SAFETY: a graph of ours, whose tensors live as long.
        call("starting a graph", |message, capacity| unsafe { longstraw_graph_launch(self.graph, message, capacity) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by the boundary, freed once; the driver waits for launches that still run.
        unsafe { longstraw_graph_free(self.graph) }
    }
}
