//! What a run reports: lines on the terminal, metrics, answers, event files, logs, the receipt, and the page about it.
//!
//! Whatever is printed goes through `runtime::terminal`. Rank 0 writes; on a terminal the run is a bar that is
//! rewritten, in a file each update is one line.

mod answers;
mod averages;
mod earlier;
mod error;
mod evaluation;
mod events;
mod forecast;
mod jsonl;
mod log;
pub mod page;
mod progress;
mod receipt;
mod reporter;
mod results;
mod run_lock;
mod sources;
mod step;
mod summary;
mod tool_numbers;
mod trace;

pub use crate::runtime::terminal::{print_result, say};
pub use answers::AnswerLine;
pub use earlier::{finish_set_aside, set_aside};
pub use error::Error;
pub use evaluation::{Best, EvalAnswer, EvalLine, Evaluation, HeldOut};
pub use jsonl::EarlierMetrics;
pub use log::open_log;
pub use receipt::{AdapterForm, AlarmSpan, Check, KindBytes, PhaseMemory, Receipt, Seconds, write_receipt};
pub use reporter::Reporter;
pub use results::{EvalSummary, Results};
pub use run_lock::{RunLock, no_locks};
pub use sources::{SourceStep, SourceTotal};
pub use step::{Reuse, Step};
pub use summary::checks;
pub use tool_numbers::ToolNumbers;
pub use trace::{Row, TraceFile};
