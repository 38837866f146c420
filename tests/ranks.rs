//! Claims about the paged step that must hold at any number of ranks. `scripts/mpi_test.sh` starts this program.

#![expect(clippy::print_stdout, reason = "a test program without a harness prints its own results")]

#[path = "ranks/axes.rs"]
mod axes;
#[path = "ranks/cases.rs"]
mod cases;
mod claims;
#[path = "ranks/delta.rs"]
mod delta;
#[path = "ranks/divergence.rs"]
mod divergence;
#[path = "ranks/drawing.rs"]
mod drawing;
#[path = "ranks/expert_adapters.rs"]
mod expert_adapters;
#[path = "ranks/experts.rs"]
mod experts;
#[path = "ranks/fixture.rs"]
mod fixture;
#[path = "ranks/importance.rs"]
mod importance;
#[path = "ranks/judged.rs"]
mod judged;
#[path = "ranks/latent.rs"]
mod latent;
#[path = "ranks/learning.rs"]
mod learning;
#[path = "ranks/left.rs"]
mod left;
#[path = "ranks/losses.rs"]
mod losses;
#[path = "ranks/memory.rs"]
mod memory;
#[path = "ranks/packs.rs"]
mod packs;
#[path = "ranks/reuse.rs"]
mod reuse;
#[path = "ranks/sampling.rs"]
mod sampling;
#[path = "ranks/tools.rs"]
mod tools;
#[path = "ranks/wire.rs"]
mod wire;

use longstraw::world::World;

type Claim = (&'static str, fn(&mut World));

const CLAIMS: &[Claim] = &[
    ("collectives_move_the_same_bytes_in_many_small_rounds", wire::small_rounds),
    ("one_rank_works_alone_while_the_others_sleep", wire::alone),
    ("what_rank_0_does_all_ranks_know_of", wire::root),
    ("a_panic_while_a_ring_moves_comes_out_as_itself_once_the_buffers_are_free", wire::panic_in_ring),
    ("a_ring_shows_the_state_of_every_rank_and_holds_that_of_two_others_at_most", wire::ring),
    ("sums_follow_the_state_round_the_ring_and_come_home_in_ring_order", wire::ring_sums),
    ("the_sum_over_ranks_is_the_sum_in_rank_order_on_every_rank", wire::sum),
    ("rows_travel_in_uneven_numbers_to_every_rank_and_back", experts::rows_travel),
    ("experts_over_ranks_equal_one_ranks_plain_sum_and_its_autograd", experts::over_ranks),
    ("experts_of_rows_that_all_ranks_have_give_the_same_bits_on_all", experts::replicated),
    ("groups_of_ranks_that_hold_experts_together_change_nothing", experts::groups),
    ("equal_router_columns_choose_alike_on_every_rank_and_a_kept_choice_holds", experts::ties),
    ("experts_in_bfloat16_err_as_bfloat16_does", experts::bfloat16),
    ("adapters_of_experts_are_summed_over_the_ranks_that_share_them_and_counted_once", expert_adapters::summed),
    ("an_experts_gradient_that_is_not_finite_ends_all_ranks_and_is_named", expert_adapters::not_finite),
    ("adapters_of_experts_have_the_gradient_of_autograd_wherever_experts_lie", expert_adapters::as_conventional),
    ("adapters_of_experts_saved_by_any_number_of_ranks_are_read_by_any_other", expert_adapters::saved),
    ("reference_cases_hold_in_every_gradient_mode", cases::hold),
    ("one_rank_and_all_ranks_agree", cases::one_and_all),
    ("reference_cases_hold_with_experts_spread_over_ranks", cases::spread),
    ("keys_that_the_sweep_chooses_again_give_the_bits_of_kept_ones", latent::chosen_again),
    ("equal_scores_choose_the_lowest_key_and_expert_on_any_ranks_and_the_first_ratio_is_1", latent::ties),
    ("prompts_of_fewer_positions_than_an_index_chooses_agree_with_autograd", latent::short),
    ("gated_delta_rules_in_chunks_on_any_ranks_are_those_row_by_row_and_borders_the_same_bits", delta::chunks),
    ("gradients_at_every_edge_of_a_gated_delta_rule_agree_with_autograd", delta::edges),
    ("prompts_shorter_than_a_convolution_agree_with_autograd", delta::short),
    ("answers_in_any_order_leave_no_state_to_each_other", delta::any_order),
    ("a_mode_that_a_case_does_not_expect_is_judged_by_autograd", cases::judged),
    ("micro_blocks_change_nothing_but_rounding", cases::micro_blocks),
    ("micro_blocks_change_nothing_but_rounding_with_windows_states_and_experts", cases::blocks_of_families),
    ("conventional_autograd_agrees_on_uneven_prompts_and_answers", judged::uneven),
    ("conventional_autograd_agrees_where_a_window_cuts_pages_and_ranks", judged::windows),
    ("conventional_autograd_agrees_with_adapters_on_experts_over_any_ranks", judged::mixtures),
    ("answers_in_packs_have_the_gradients_of_each_answers_own_sequence", packs::as_alone),
    ("experts_of_packs_agree_with_autograd_where_ranks_have_none_of_their_rows", packs::of_experts),
    ("a_ranks_rows_of_a_pack_are_one_block_also_where_it_has_none", packs::one_block),
    ("masked_tokens_take_no_part_in_gradient_or_loss", judged::masked),
    ("log_probabilities_that_came_with_answers_weigh_as_autograd_says", importance::weights),
    ("every_loss_and_correction_has_the_gradient_of_its_plain_formula", losses::as_autograd),
    ("the_first_ratio_of_a_sequence_is_exactly_one", losses::first_ratio),
    ("a_short_and_a_long_tail_take_different_ways_to_one_gradient", judged::both_tails),
    ("ten_exact_updates_equal_ten_conventional_ones", judged::ten_exact_updates),
    ("pages_on_the_host_and_on_the_device_give_the_same_bits", memory::residency),
    ("what_is_kept_and_what_is_computed_again_give_the_same_bits", memory::keeping),
    ("capture_leaves_no_graph_and_page_storage_is_exact", memory::exact_pages),
    ("page_bytes_of_a_rank_fall_with_the_number_of_ranks", memory::falling_pages),
    ("a_rank_never_holds_more_than_two_foreign_page_runs", memory::foreign_runs),
    ("device_bytes_are_flat_in_the_group_and_the_pool_follows_its_formula", memory::flat_in_group),
    ("device_bytes_of_a_group_grow_to_one_pack_and_not_beyond", memory::grows_to_one_pack),
    ("prompt_groups_side_by_side_equal_one_with_their_groups_accumulated", axes::dp_equals_accumulation),
    ("equal_rewards_give_a_gradient_of_exactly_zero", learning::equal_rewards),
    ("ten_updates_leave_bit_equal_adapters_on_all_ranks_and_repeat", learning::ten_updates),
    ("sampled_answers_are_the_same_on_any_ranks_and_their_log_probabilities_are_their_scores", sampling::as_scored),
    ("sampled_answers_have_the_log_probabilities_of_a_whole_sequence", sampling::as_conventional),
    ("an_answer_ends_at_an_end_or_at_the_longest_length", sampling::ends),
    ("kept_choices_make_drawn_log_probabilities_those_of_the_score_pass", sampling::with_choices),
    ("choices_that_are_kept_are_the_drawn_ones_and_those_that_are_not_are_counted", sampling::changed_choices),
    ("kernels_of_a_decode_step_draw_what_single_operations_draw", drawing::same),
    ("an_answer_is_drawn_alike_alone_and_beside_others", drawing::alone),
    ("answers_are_sampled_alike_from_pages_on_the_device_and_pages_that_are_staged", sampling::residency),
    ("replies_to_calls_are_read_and_answers_with_them_are_the_same_on_any_ranks", tools::replies_are_read),
    ("a_gradient_is_that_of_the_drawn_tokens_alone_where_tools_have_replied", tools::replies_are_not_trained),
    ("what_a_replys_tokens_would_be_worth_changes_no_bit_of_a_gradient", tools::a_replys_own_probability_is_nobodys),
    ("an_update_on_several_ranks_stays_near_that_on_one_where_states_go_from_row_to_row", divergence::hybrid),
    ("a_replay_from_what_a_score_pass_left_gives_the_bits_of_one_that_goes_up_itself", left::same_bits),
    ("packs_that_a_score_pass_left_give_the_bits_of_a_replay_that_goes_up_itself", left::same_bits_of_packs),
    ("attention_outputs_that_a_score_pass_left_give_the_bits_of_those_computed_again", left::kept_outputs),
    ("what_a_score_pass_left_is_refused_after_an_update", left::stale),
    ("gradient_and_drift_on_reused_pages_are_those_of_plain_autograd_with_earlier_constants", reuse::as_plain_autograd),
    ("reused_pages_of_adapters_that_did_not_change_have_no_drift", reuse::no_drift),
    ("stale_pages_are_refused_after_an_update", learning::stale_pages),
    ("a_reference_policy_scores_under_its_own_pages", learning::reference_policy),
];

/// Claims that take most of the time, and the numbers of ranks at which they hold unless they are named: together they have every
/// number, and each has an uneven one or the largest.
const LONG: &[(&str, &[usize])] = &[
    ("reference_cases_hold_in_every_gradient_mode", &[1, 3]),
    ("one_rank_and_all_ranks_agree", &[2, 4, 8]),
    ("conventional_autograd_agrees_on_uneven_prompts_and_answers", &[1, 3]),
    ("gradients_at_every_edge_of_a_gated_delta_rule_agree_with_autograd", &[2, 3]),
    ("reference_cases_hold_with_experts_spread_over_ranks", &[2, 8]),
    ("a_replay_from_what_a_score_pass_left_gives_the_bits_of_one_that_goes_up_itself", &[1, 3]),
    ("packs_that_a_score_pass_left_give_the_bits_of_a_replay_that_goes_up_itself", &[1, 3]),
    ("micro_blocks_change_nothing_but_rounding_with_windows_states_and_experts", &[1, 3]),
    ("device_bytes_of_a_group_grow_to_one_pack_and_not_beyond", &[1, 3]),
    ("a_mode_that_a_case_does_not_expect_is_judged_by_autograd", &[1, 3]),
    ("conventional_autograd_agrees_where_a_window_cuts_pages_and_ranks", &[2, 3]),
    ("every_loss_and_correction_has_the_gradient_of_its_plain_formula", &[1, 2, 3]),
    ("log_probabilities_that_came_with_answers_weigh_as_autograd_says", &[1, 3]),
    ("gradient_and_drift_on_reused_pages_are_those_of_plain_autograd_with_earlier_constants", &[1, 3]),
    ("reused_pages_of_adapters_that_did_not_change_have_no_drift", &[2, 3]),
    ("replies_to_calls_are_read_and_answers_with_them_are_the_same_on_any_ranks", &[1, 3]),
    ("answers_in_any_order_leave_no_state_to_each_other", &[1, 3]),
    ("what_is_kept_and_what_is_computed_again_give_the_same_bits", &[1, 3]),
    ("kept_choices_make_drawn_log_probabilities_those_of_the_score_pass", &[2, 3]),
    ("prompts_shorter_than_a_convolution_agree_with_autograd", &[2, 3]),
    ("keys_that_the_sweep_chooses_again_give_the_bits_of_kept_ones", &[1, 3]),
    ("an_update_on_several_ranks_stays_near_that_on_one_where_states_go_from_row_to_row", &[2, 3]),
];

fn is_due(claim: &str, ranks: usize) -> bool {
    LONG.iter().find(|(name, _)| *name == claim).is_none_or(|(_, numbers)| numbers.contains(&ranks))
}

fn main() {
    let Some(mut world) = claims::start() else { return };
    fixture::choose_device(&world);
    assert!(LONG.iter().all(|(long, _)| CLAIMS.iter().any(|(name, _)| name == long)), "every long claim is a claim");
    let ranks = world.all.size();
    claims::run(
        CLAIMS,
        &mut world,
        |claim| is_due(claim, ranks),
        |claim, world| {
            claim(world);
            world.cut(world.all.size(), 1).expect("all ranks form one prompt group");
            Vec::new()
        },
    );
}
