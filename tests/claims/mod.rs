//! The loop of the test programs without a harness. `mpirun` starts them; every rank runs every claim in the same order.
//! A claim that does not hold panics, and the panic ends the whole job.

use std::time::Instant;

use longstraw::runtime::liveness::Tracker;
use longstraw::tensor::boundary::count_allocations;
use longstraw::world::World;
use serde_json::{Value, json};

/// Starts MPI; `None` for a test runner that lists tests, which finds none to run one by one.
pub(crate) fn start() -> Option<World> {
    if std::env::args().any(|argument| argument == "--list") {
        return None;
    }
    count_allocations();
    Some(World::start(None, Tracker::default()).expect("MPI starts"))
}

/// Holds each claim whose name contains one of the program's arguments, or all claims without arguments. Rank 0 prints a
/// line a claim, which is a JSON object where the claim returns measured numbers.
pub(crate) fn run<C>(claims: &[(&str, C)], world: &mut World, mut hold: impl FnMut(&C, &mut World) -> Vec<Value>) {
    let parts: Vec<String> = std::env::args().skip(1).collect();
    let root = world.all.rank().0 == 0;
    let mut passed = 0;
    for (name, claim) in claims {
        if !parts.is_empty() && !parts.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let start = Instant::now();
        let numbers = hold(claim, world);
        world.all.barrier();
        passed += 1;
        let seconds = start.elapsed().as_secs_f64();
        match root {
            true if numbers.is_empty() => println!("ok  {seconds:6.2} s  {name}"),
            true => {
                println!("{}", json!({"claim": name, "ranks": world.all.size(), "seconds": seconds, "found": numbers}))
            }
            false => {}
        }
    }
    if root {
        println!("{passed} passed, 0 failed");
    }
}
