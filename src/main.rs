//! The `longstraw` command.

fn main() {}
