//! The prompt's state: which position lies where, pages in host or device memory, and what one phase hands to the next.

pub mod handoff;
pub mod layout;
pub mod pack;
pub mod pages;
pub mod ring;
