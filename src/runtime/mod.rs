//! What everything stands on: units, failures, the memory ledger, and where a rank is. Knows no MPI and no tensor.

pub mod failure;
pub mod liveness;
pub mod memory;
pub mod names;
pub mod random;
pub mod units;
