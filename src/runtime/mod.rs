//! What everything stands on: units, failures, the memory ledger, and where a rank is. Knows no MPI and no tensor.

pub mod digest;
pub mod failure;
pub mod liveness;
pub mod memory;
pub mod units;
