# shellcheck shell=bash
# Claims about the templates as jobs, with tests/slurm/stand_in.py in place of longstraw.

# shellcheck source=tests/slurm/jobs.sh
. tests/slurm/jobs.sh

the_whole_chain_runs_in_order() {
    local gates name
    use_site srun 1 8
    gates=$(slurm/submit --gates)
    submit_chain --from gate
    expect_equal "$(printf '%s\n' "${names[@]}")" "$gates" "submitted gates"
    expect_chain_passes
    expect_equal "$(awk '$2 == "starts" && $3 == 0 {print $1}' "$here/log")" "$gates" "gates in the order of their start"
    for name in "${names[@]}"; do
        case $name in
        gate1_key) expect_equal "$(events "$name" passes)" 1 "ranks of $name" ;;
        *) expect_equal "$(events "$name" passes)" 8 "ranks of $name" ;;
        esac
    done
}

part_of_the_chain_runs_with_either_launcher_on_one_node_and_on_two() {
    local site launcher nodes gpus name ranks hosts
    for site in "${SITES[@]}"; do
        read -r launcher nodes gpus <<<"$site"
        use_site "$launcher" "$nodes" "$gpus"
        submit_chain --from gate6
        expect_equal "${names[*]}" "gate6_g8 gate7_online" "submitted gates"
        expect_chain_passes
        for name in "${names[@]}"; do
            ranks=$(awk -v n="$name" '$1 == n && $2 == "passes" {print $3, $4}' "$here/log" | sort | paste -sd,)
            expect_equal "$ranks" "0 8,1 8,2 8,3 8,4 8,5 8,6 8,7 8" "ranks of $name on $site"
        done
        hosts=$(awk '$1 == "gate7_online" && $2 == "passes" {print $5}' "$here/log" | sort | uniq -c | awk '{print $1}' | paste -sd' ')
        case $nodes in 1) expect_equal "$hosts" 8 "ranks by node" ;; 2) expect_equal "$hosts" "4 4" "ranks by node" ;; esac
    done
}

a_gate_that_fails_stops_the_chain_after_it() {
    use_site srun 1 8
    echo fail >"$here/gate5_g2"
    submit_chain --from gate4
    expect_equal "${#ids[@]}" 4 "jobs"
    expect_end "${ids[0]}" "COMPLETED 0:0"
    # The launcher may report the code of ranks that it ended; the receipt decides.
    expect_end "${ids[1]}" "FAILED 8:0"
    expect_end "${ids[2]}" "CANCELLED 0:0"
    expect_end "${ids[3]}" "CANCELLED 0:0"
    expect_equal "$(awk '{print $1}' "$here/log" | sort -u | paste -sd' ')" "gate4_g1 gate5_g2" "gates that ran"
}

a_refused_submission_ends_the_chain() {
    local code=0
    use_site srun 1 8
    SITE_PARTITION=nowhere slurm/submit gates >"$here/chain" || code=$?
    expect_equal "$code $(wc -l <"$here/chain")" "2 0" "exit code and submitted jobs"
}

a_rank_that_dies_fails_the_job() {
    local launcher id
    for launcher in "${LAUNCHERS[@]}"; do
        use_site "$launcher" 2 4
        echo "die 3" >"$here/gate4_g1"
        id=$(slurm/submit gate4_g1)
        expect_state "$id" FAILED
        # The code of the rank, or of the ranks that the launcher then ended.
        grep -qE "failed: $launcher left with 1(37|43);" "$here/runs/slurm/gate4_g1-$id.out"
    done
}

ranks_that_leave_without_a_new_receipt_have_not_passed() {
    use_site srun 1 8
    echo silent >"$here/gate2_32k"
    expect_end "$(slurm/submit gate2_32k)" "FAILED 8:0"
    # The receipt of an earlier run says passed; it does not count.
    mkdir -p "$here/runs/gates/gate2_32k"
    printf '{\n  "passed": true\n}\n' >"$here/runs/gates/gate2_32k/receipt.json"
    expect_end "$(slurm/submit gate2_32k)" "FAILED 8:0"
    rm "$here/gate2_32k"
    expect_pass gate2_32k
}

a_stop_reaches_every_rank_and_the_job_comes_back() {
    local launcher id
    # Slurm's signal ahead of a time limit, and the one ahead of a preemption.
    local -A signals=([srun]=USR1 [mpirun]=TERM)
    for launcher in "${LAUNCHERS[@]}"; do
        use_site "$launcher" 2 4
        submit_waiting train
        signal "$id" "${signals[$launcher]}"
        start_requeued "$id"
        expect_end "$id" "COMPLETED 0:0"
        expect_equal "$(restarts "$id")" 1 "restarts"
        expect_equal "$(events train signalled)" 8 "ranks that got the signal"
        expect_equal "$(events train passes)" 8 "ranks that passed"
        [ ! -e "$here/runs/train/requeue" ]
        expect_equal "$(awk '$2 == "passes" {print $6}' "$here/log" | sort -u)" 1 "restart that passed"
        # One file holds the output of both starts.
        expect_equal "$(grep -c ': start [12] on ' "$here/runs/slurm/train-$id.out")" 2 "starts in the output"
    done
}

a_signal_before_any_handler_is_not_lost() {
    local id
    use_site srun 1 8
    echo deaf >"$here/train"
    id=$(slurm/submit train)
    wait_until RUNNING 60 state "$id"
    wait_until 8 60 events train starts
    signal "$id" USR1
    start_requeued "$id"
    expect_end "$id" "COMPLETED 0:0"
    expect_equal "$(events train signalled)" 8 "ranks that got the signal"
}

a_training_that_lost_a_rank_comes_back_where_the_site_says_so() {
    local id
    use_site srun 1 8
    # A failure of an earlier start tells nothing of this one.
    mkdir -p "$here/runs/train/logs"
    echo "ERROR exit=7 long ago" >"$here/runs/train/logs/rank_0.log"
    echo "lose 5" >"$here/train"
    id=$(SITE_RETRIES_MAX=1 slurm/submit train)
    start_requeued "$id"
    expect_end "$id" "COMPLETED 0:0"
    grep -q "requeueing, time 1 of at most 1" "$here/runs/slurm/train-$id.out"
}

ranks_that_the_launcher_could_not_start_are_started_again() {
    local id
    use_site srun 1 8
    failing_launcher
    id=$(PATH=$here/bin:$PATH FAILING=2 slurm/submit gate2_32k)
    expect_end "$id" "COMPLETED 0:0"
    grep -q "no rank has started, and srun left with 0: try 2 of 3" "$here/runs/slurm/gate2_32k-$id.out"
    expect_equal "$(events gate2_32k passes)" 8 "ranks that passed"

    rm "$here/tries"
    id=$(PATH=$here/bin:$PATH FAILING=3 slurm/submit gate2_32k)
    expect_end "$id" "FAILED 1:0"
    expect_equal "$(cat "$here/tries")" 3 "tries"
    ! grep -q "all ranks left with 0" "$here/runs/slurm/gate2_32k-$id.out"
}

a_signal_between_two_tries_requeues_the_job() {
    local id
    use_site srun 1 8
    failing_launcher
    id=$(PATH=$here/bin:$PATH FAILING=1 slurm/submit train)
    wait_until yes 60 has_line "try 1 of 3" "$here/runs/slurm/train-$id.out"
    signal "$id" USR1
    start_requeued "$id"
    expect_end "$id" "COMPLETED 0:0"
    expect_equal "$(cat "$here/tries")" 2 "tries, one of them in the second start"
}

a_training_that_ended_by_itself_or_a_default_site_does_not_come_back() {
    local id
    use_site srun 1 8
    echo "lose 5" >"$here/train"
    id=$(slurm/submit train)
    expect_state "$id" FAILED
    echo "give up 5" >"$here/train"
    id=$(SITE_RETRIES_MAX=1 slurm/submit train)
    expect_state "$id" FAILED
    ! grep -q "requeue" "$here/runs/slurm/train-$id.out"
}

requeues_are_bounded() {
    local id
    use_site srun 1 8
    SITE_REQUEUES_MAX=0 submit_waiting train
    signal "$id" USR1
    expect_end "$id" "FAILED 75:0"
    grep -q "not requeued: this was start 1, and REQUEUES_MAX is 0" "$here/runs/slurm/train-$id.out"
}

a_cancelled_job_does_not_come_back() {
    local id
    use_site srun 1 8
    submit_waiting train
    scancel "$id"
    expect_state "$id" CANCELLED
    sleep 3
    expect_equal "$(state "$id")" CANCELLED "the job after three seconds"
}

an_allocation_that_the_site_does_not_describe_is_refused() {
    local id
    use_site srun 1 8
    id=$(SITE_NODES=2 sbatch --parsable "--output=$here/%x-%j.out" slurm/gate5_g2.sbatch)
    expect_end "$id" "FAILED 2:0"
    grep -q "the job has 8 tasks on 1 nodes, and slurm/site.env says 16 on 2" "$here/gate5_g2-$id.out"
    expect_equal "$(wc -l <"$here/log")" 0 "ranks that ran"
}

a_bare_sbatch_is_enough_on_the_default_site() {
    local id
    use_site srun 1 8
    unset SITE_NODES SITE_GPUS_PER_NODE SITE_MEM LAUNCHER
    id=$(sbatch --parsable "--output=$here/%x-%j.out" slurm/gate5_g2.sbatch)
    expect_end "$id" "COMPLETED 0:0"
    expect_equal "$(events gate5_g2 passes)" 8 "ranks"
}

gates_run_here_without_slurm() {
    local code=0
    use_site srun 1 8
    RANKS=2 slurm/here gate1_key gate4_g1
    expect_equal "$(events gate1_key passes) $(events gate4_g1 passes)" "1 2" "ranks"
    echo fail >"$here/gate5_g2"
    RANKS=2 slurm/here gate5_g2 gate6_g8 || code=$?
    expect_equal "$code" 8 "exit code of the gate that fails"
    expect_equal "$(events gate6_g8 starts)" 0 "ranks of the gate after it"
    echo silent >"$here/gate5_g2"
    RANKS=2 slurm/here gate5_g2 || code=$?
    expect_equal "$code" 8 "exit code of the gate without a receipt"
    expect_equal "$(slurm/submit --gates gate3_ | head -n 5 | paste -sd' ')" \
        "gate3_128k gate3_256k gate3_512k gate3_1m gate3_2m" "gates of make gate3"
    expect_equal "$(slurm/submit --gates gate3_256k)" gate3_256k "gates of make gate3 GATE3=256k"
}
