//! The loop of the test programs without a harness. `mpirun` starts them; every rank runs every claim in the same order.
//! A claim that does not hold panics, and the panic ends the whole job.

use std::time::Instant;

use longstraw::runtime::liveness::Tracker;
use longstraw::tensor::boundary::count_allocations;
use longstraw::world::World;
use serde_json::{Value, json};

/// Starts MPI; `None` for a test runner that lists tests, which finds none to run one by one.
#[expect(clippy::disallowed_methods, reason = "the arguments of a test program without a harness")]
pub(crate) fn start() -> Option<World> {
    if std::env::args().any(|argument| argument == "--list") {
        return None;
    }
    count_allocations();
    Some(World::start(None, Tracker::default()).expect("MPI starts"))
}

/// Holds each claim whose name contains one of the program's arguments; without arguments those that `is_due`, of a claim's name,
/// takes. Rank 0 prints a line a claim, which is a JSON object where the claim returns measured numbers.
#[expect(clippy::disallowed_methods, reason = "the arguments of a test program without a harness")]
pub(crate) fn run<C>(
    claims: &[(&str, C)],
    world: &mut World,
    is_due: impl Fn(&str) -> bool,
    mut hold: impl FnMut(&C, &mut World) -> Vec<Value>,
) {
    let parts: Vec<String> = std::env::args().skip(1).collect();
    let root = world.all.rank().0 == 0;
    let mut passed = 0;
    for (name, claim) in claims {
        let is_named = parts.iter().any(|part| name.contains(part.as_str()));
        if !(is_named || parts.is_empty() && is_due(name)) {
            continue;
        }
        let start = Instant::now();
        let numbers = hold(claim, world);
        world.all.barrier();
        passed += 1;
        let seconds = start.elapsed().as_secs_f64();
        if root && numbers.is_empty() {
            println!("ok  {seconds:6.2} s  {name}");
        } else if root {
            let line = json!({"claim": name, "ranks": world.all.size(), "seconds": seconds, "found": numbers});
            println!("{line}");
        }
    }
    if root {
        println!("{passed} passed, 0 failed");
    }
}
