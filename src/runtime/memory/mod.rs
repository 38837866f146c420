//! Memory: the ledger of bytes by purpose, the machine's free memory, and the report when memory has run out.

mod cgroup;
mod ledger;
mod shortage;

pub use cgroup::job_memory;
pub use ledger::{Held, Holding, Holdings, Ledger, Measured, MemorySpace, Meter, Part, Purpose};
pub use shortage::{Shortage, available_memory};
