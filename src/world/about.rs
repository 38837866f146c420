//! What MPI reports about itself and the machine.

/// The library's own description, up to the first comma or line end: name and version.
#[must_use]
pub fn library() -> String {
    let text = mpi::environment::library_version().unwrap_or_default();
    text.split([',', '\n', '\0']).next().unwrap_or_default().trim().to_owned()
}

/// The name of this machine, once MPI has started.
#[must_use]
pub fn host() -> String {
    mpi::environment::processor_name().unwrap_or_default().trim_end_matches('\0').to_owned()
}
