//! One training step: the objective, the phases, which never import each other, and the conventional schedule that the
//! paged one is judged by.

pub mod capture;
pub mod conventional;
pub mod finalize;
pub mod objective;
pub mod optimizer;
pub mod replay;
pub mod rollout;
pub mod score;
