//! Claims about the paged step on a GPU, which one process uses or two share. `scripts/gpu_test.sh` starts this program.

#![expect(clippy::print_stdout, reason = "a test program without a harness prints its own results")]

mod claims;
#[path = "gpu/delta.rs"]
mod delta;
#[path = "gpu/experts.rs"]
mod experts;
#[path = "gpu/fused.rs"]
mod fused;
#[path = "gpu/gradient.rs"]
mod gradient;
#[path = "gpu/indices.rs"]
mod indices;
#[path = "gpu/selection.rs"]
mod selection;

use longstraw::config::DeviceChoice;
use longstraw::tensor::gpu;
use longstraw::world::World;
use longstraw::world::devices;
use serde_json::Value;
use tch::Device;

type Claim = (&'static str, fn(&World, Device) -> Vec<Value>);

const CLAIMS: &[Claim] = &[
    ("merging_is_right_past_two_to_the_31_elements", indices::merge),
    ("attention_is_right_over_keys_of_more_than_two_to_the_31_elements", indices::attention),
    ("copies_of_more_than_two_to_the_31_elements_come_back_whole", indices::copies),
    ("a_feed_forward_of_more_than_two_to_the_31_elements_equals_its_last_rows", indices::feed_forward),
    ("experts_as_grouped_products_err_no_more_than_autograd_and_hold_no_more_for_more_rows", experts::grouped),
    ("random_weights_are_the_processors", gradient::random_weights),
    ("float32_equals_float32_autograd_and_bfloat16_errs_no_more_than_its_own", gradient::judged),
    ("compiled_index_scores_choose_the_keys_of_the_plain_ones_bit_for_bit_where_sums_are_exact", selection::exact),
    ("compiled_index_scores_choose_the_same_of_a_million_keys", selection::million),
    ("compiled_index_scores_differ_from_the_plain_ones_by_rounding_alone", selection::random),
    ("index_scores_take_these_seconds", selection::speed),
    ("the_compiled_gated_delta_rule_errs_by_rounding_alone", delta::judged),
    (
        "the_compiled_gated_delta_rule_gives_the_same_bits_in_one_call_of_two_to_the_31_elements_and_in_many",
        delta::blocks,
    ),
    ("the_compiled_convolution_errs_by_rounding_alone", delta::convolution),
    ("gated_delta_rules_take_these_seconds", delta::speed),
    ("elementwise_kernels_err_no_more_than_operators", fused::judged),
    ("a_row_of_elementwise_kernels_has_the_same_bits_alone", fused::alone),
    ("a_layer_that_nobody_reads_passes_the_same_gradients", fused::unread),
    ("elementwise_kernels_are_right_past_two_to_the_31_elements", fused::many),
    ("sums_of_gradients_by_a_kernel_have_the_bits_of_operators", fused::added),
    ("a_step_of_adamw_by_a_kernel_has_the_bits_of_operators", fused::adam),
    ("elementwise_kernels_take_these_milliseconds", fused::speed),
];

fn main() {
    let Some(mut world) = claims::start() else { return };
    // Why kernels are not used is said as a warning.
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let device = devices::choose(&world, DeviceChoice::Cuda, true, false);
    let device = device.unwrap_or_else(|failure| panic!("{failure}"));
    claims::run(
        CLAIMS,
        &mut world,
        |_| true,
        |claim, world| {
            let numbers = claim(world, device);
            gpu::empty_cache();
            numbers
        },
    );
}
