//! Claims about the paged step on a GPU. No harness: started by `scripts/gpu_test.sh`, one process or two that share the
//! card; every rank runs every claim in the same order, and a claim that does not hold panics, which ends the job. Each
//! claim prints its numbers as one JSON object a line.

#![expect(clippy::print_stdout, reason = "a test program without a harness prints its own results")]

#[path = "gpu/gradient.rs"]
mod gradient;
#[path = "gpu/indices.rs"]
mod indices;

use std::time::Instant;

use longstraw::config::DeviceChoice;
use longstraw::runtime::liveness::Tracker;
use longstraw::tensor::boundary::count_allocations;
use longstraw::tensor::gpu;
use longstraw::world::World;
use longstraw::world::devices;
use serde_json::{Value, json};
use tch::Device;

type Claim = (&'static str, fn(&World, Device) -> Vec<Value>);

const CLAIMS: &[Claim] = &[
    ("merging_is_right_past_two_to_the_31_elements", indices::merge),
    ("attention_is_right_over_keys_of_more_than_two_to_the_31_elements", indices::attention),
    ("copies_of_more_than_two_to_the_31_elements_come_back_whole", indices::copies),
    ("a_feed_forward_of_more_than_two_to_the_31_elements_equals_its_last_rows", indices::feed_forward),
    ("random_weights_are_the_processors", gradient::random_weights),
    ("float32_equals_float32_autograd_and_bfloat16_errs_no_more_than_its_own", gradient::judged),
];

#[expect(clippy::disallowed_methods, reason = "the arguments of a test program without a harness")]
fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    if wanted.iter().any(|argument| argument == "--list") {
        return; // A test runner that asks for a list is told that there is nothing for it to run one by one.
    }
    count_allocations();
    let world = World::start(None, Tracker::default()).expect("MPI starts");
    let device = devices::choose(&world, DeviceChoice::Cuda, true, false);
    let device = device.unwrap_or_else(|failure| panic!("{failure}"));
    for (name, claim) in CLAIMS {
        if !wanted.is_empty() && !wanted.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let start = Instant::now();
        let found = claim(&world, device);
        gpu::empty_cache();
        world.all.barrier();
        if world.all.rank().0 == 0 {
            let seconds = start.elapsed().as_secs_f64();
            println!("{}", json!({"claim": name, "ranks": world.all.size(), "seconds": seconds, "found": found}));
        }
    }
}
