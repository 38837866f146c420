//! What every other room uses: units, failures, digests, the memory ledger, and where a rank is. Contains no MPI and no
//! tensors.

pub mod digest;
pub mod failure;
pub mod file_error;
pub mod file_lock;
pub mod file_state;
pub mod liveness;
pub mod memory;
pub mod names;
pub mod random;
pub mod reading;
pub mod saved;
pub mod terminal;
pub mod units;
