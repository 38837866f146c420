//! Where each rank is, for messages and records; heartbeats, deadlines, and which rank has stalled.

mod deadline;
mod heartbeat;
mod peers;
mod site;
mod stall;
mod tracker;

pub use deadline::{Progress, StallLimits};
pub use heartbeat::{Heartbeat, HeartbeatFiles, Reading};
pub use peers::{Peers, Visibility};
pub use site::{SharedSite, SiteSnapshot, Waiting};
pub use stall::Stall;
pub use tracker::{Border, LayerCheck, Recorder, Tracker};
