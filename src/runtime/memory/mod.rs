//! Memory: the ledger of bytes by kind, what this machine can still give, and what to report when there is none left.

mod cgroup;
mod ledger;
mod shortage;

pub use cgroup::job_memory;
pub use ledger::{Held, Holding, Holdings, Ledger, Measured, MemorySpace, Meter, Part, Purpose};
pub use shortage::{Shortage, available_memory};
