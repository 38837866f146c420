# shellcheck shell=bash
# Claims about the templates as jobs of the real command.

# shellcheck source=tests/slurm/jobs.sh
. tests/slurm/jobs.sh

training_passes_on_eight_ranks_with_either_launcher_and_on_two_nodes() {
    local site launcher nodes gpus digest='' found
    for site in "${SITES[@]}"; do
        read -r launcher nodes gpus <<<"$site"
        use_longstraw "$launcher" "$nodes" "$gpus" 2
        rm -rf "$here/runs/train" # a finished run would not run again
        expect_pass train
        expect_equal "$(receipt "$here/runs/train" passed ranks steps)" "True 8 2" "receipt on $site"
        # Neither the launcher nor the number of nodes changes a number.
        found=$(receipt "$here/runs/train" adapter_digest)
        expect_equal "$found" "${digest:=$found}" "adapters on $site"
    done
}

# As a time limit does: Slurm checks every half minute and signals ahead of the end, and the job comes back. The speed of the
# machine decides how many updates the first start makes; the second makes three more.
a_time_limit_interrupts_training_and_the_adapter_is_that_of_an_uninterrupted_run() {
    local id first
    use_longstraw srun 1 8 1000000
    id=$(SITE_SIGNAL_SECONDS=60 slurm/submit train)
    wait_until yes 300 has_lines "$here/runs/train/metrics.jsonl"
    scontrol update "JobId=$id" EndTime=now+62seconds
    wait_for_requeue "$id"
    first=$(sed 's/[^0-9]//g' "$here/runs/train/latest")
    [ "$first" -ge 1 ]
    write_config "$((first + 3))"
    scontrol update "JobId=$id" StartTime=now
    expect_same_training "$id" "$((first + 3))"
}

# An update of many groups takes seconds: a signal with one second of grace comes in its middle.
an_interrupted_step_runs_again_and_the_adapter_is_that_of_an_uninterrupted_run() {
    local id
    use_longstraw srun 1 8 4
    sed -i 's/^\[optimizer\]$/[optimizer]\ngrad_accum = 24/' "$SITE_CONFIG"
    id=$(SITE_SIGNAL_SECONDS=1 slurm/submit train)
    wait_until yes 300 has_lines "$here/runs/train/metrics.jsonl"
    sleep 1
    signal "$id" USR1
    start_requeued "$id"
    expect_same_training "$id" 4
    grep -q 'is dropped .* s into it: .* its prompts run again' "$here/runs/slurm/train-$id.out"
}

a_training_that_has_finished_passes_again_without_an_update() {
    local before
    use_longstraw srun 1 8 2
    expect_pass train
    before=$(cksum <"$here/runs/train/receipt.json")
    expect_pass train
    expect_equal "$(cksum <"$here/runs/train/receipt.json")" "$before" "receipt after the second job"
    expect_equal "$(wc -l <"$here/runs/train/metrics.jsonl")" 2 "updates in the metrics"
}

a_second_job_in_the_same_folder_is_refused_and_the_first_one_is_requeued_all_the_same() {
    local first second
    use_longstraw srun 1 8 1000000
    first=$(slurm/submit train)
    wait_until yes 300 has_lines "$here/runs/train/metrics.jsonl"
    second=$(slurm/submit train)
    # The exit code may be that of a rank which the launcher ended (docs/slurm.md).
    expect_state "$second" FAILED
    grep -q 'another run is writing to' "$here/runs/slurm/train-$second.out"
    signal "$first" USR1
    wait_for_requeue "$first"
    scancel "$first"
}

one_command_runs_every_gate() {
    local name
    use_gates srun 1 8
    submit_chain --from gate
    expect_chain_passes
    expect_equal "${#ids[@]}" "$(slurm/submit --gates | wc -l)" "gates"
    for name in "${names[@]}"; do
        expect_equal "$(gate_receipt "$name" gate passed)" "$name True" "receipt of $name"
        [ "$name" = gate1_key ] || expect_equal "$(gate_receipt "$name" ranks)" 8 "ranks of $name"
    done
    expect_equal "$(gate_receipt gate6_g8 group_size)" 8 "answers of gate6_g8"
    # No file of the gates holds the key.
    expect_equal "$(grep -rl "$LADDER_KEY" "$here" | wc -l)" 0 "files that hold the key"
}

gate2_passes_on_two_nodes_with_either_launcher() {
    local launcher
    for launcher in "${LAUNCHERS[@]}"; do
        use_gates "$launcher" 2 4
        expect_pass gate1_key gate2_32k
        expect_equal "$(gate_receipt gate2_32k passed ranks)" "True 8" "receipt under $launcher"
    done
}

a_fault_fails_its_gate_and_is_named() {
    use_gates srun 1 8
    # Without a learning rate no adapter moves.
    SITE_ARGS="--set optimizer.lr=0.0" submit_chain --from gate
    expect_end "${ids[0]}" "COMPLETED 0:0"
    expect_end "${ids[1]}" "FAILED 8:0"
    grep -q lora_b_moved "$here/runs/slurm/gate2_32k-${ids[1]}.out"
    expect_equal "$(gate_receipt gate2_32k passed)" False "receipt of gate2_32k"
    expect_end "${ids[-1]}" "CANCELLED 0:0"
    [ ! -e "$here/runs/gates/gate3_128k" ]
}
