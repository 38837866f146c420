#!/usr/bin/env bash
# The Slurm templates on a real Slurm (scripts/slurm_ci.sh): two pretended nodes of eight GPUs, brought up here and taken
# down however this ends. A machine on which it does not come up fails.
#
#   scripts/slurm_test.sh [PATTERN]     claims whose name holds PATTERN; all without it
#
# COMMAND=FILE is tried in place of target/release/longstraw.
#
# Claims are functions; each prints its seconds. What a failed one said, and where its files lie, follows it.
set -euo pipefail
cd "$(dirname "$0")/.."
pattern=${1:-}

# One cluster at a time. Daemons must not inherit the lock.
exec 8>/tmp/longstraw_slurm_test.lock
flock -w 1800 8 || {
    echo "slurm_test: another run has held /tmp/longstraw_slurm_test.lock for 30 minutes" >&2
    exit 1
}
work=$(mktemp -d /tmp/longstraw_slurm_test.XXXXXX)
export SLURM_CI_DIR=${SLURM_CI_DIR:-/tmp/longstraw_slurm}
export SLURM_CONF=$SLURM_CI_DIR/slurm.conf
failed=0
passed=0
leave() {
    scripts/slurm_ci.sh down || true
    [ "$failed" != 0 ] || rm -rf "$work"
}
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# What makes 8 ranks bearable on a machine of two cores and lets two pretended nodes share one. sbatch hands it on.
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl_vader_single_copy_mechanism=none PMIX_MCA_gds=hash
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_tcp_if_include=lo OMPI_MCA_oob_tcp_if_include=lo
export OMP_NUM_THREADS=1
# The claims' site: nothing of the caller's own.
unset GRADIENT LAUNCHER SITE_FILE SITE_HOME "${!SITE_@}"

readonly SHAPES=("1 8" "2 4")
readonly LAUNCHERS=(srun mpirun)

# --- small words -----------------------------------------------------------------------------------------------------

# A folder of the claim's own, with the stand-in as the command. on LAUNCHER NODES GPUS_PER_NODE
on() {
    here=$(mktemp -d "$work/run.XXXXXX")
    export LAUNCHER=$1 SITE_NODES=$2 SITE_GPUS_PER_NODE=$3 SITE_RUNS=$here/runs SITE_MEM=64G
    export SITE_LONGSTRAW=$PWD/tests/slurm/stand_in.py STAND_IN=$here
    : >"$here/log"
}

equal() { # FOUND WANTED WHAT
    [ "$1" = "$2" ] || {
        printf '%s: found "%s", not "%s"\n' "$3" "$1" "$2"
        exit 1
    }
}

ended() { # JOB WANTED: waits for the job, whose state and exit code must be these
    equal "$(scripts/slurm_ci.sh wait "$1" 600 || true)" "$2" "job $1"
}

events() { # NAME EVENT: how often ranks have logged it
    grep -c "^$1 $2 " "$here/log" || true
}

until_is() { # WANTED SECONDS COMMAND...: waits until the command prints that
    local wanted=$1 end=$((SECONDS + $2)) found
    shift 2
    while found=$("$@") && [ "$found" != "$wanted" ]; do
        [ "$SECONDS" -lt "$end" ] || {
            echo "$* prints \"$found\" and never \"$wanted\""
            exit 1
        }
        sleep 0.1
    done
}

state() { scontrol -o show job "$1" | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p'; }
restarts() { scontrol -o show job "$1" | sed -n 's/.* Restarts=\([0-9]*\).*/\1/p'; }

# A requeued job begins two minutes later; a node that has just let it go takes it again at once.
requeued() { # JOB
    until_is 1 100 restarts "$1"
    until_is PENDING 60 state "$1"
    until_is "" 60 squeue -h -j "$1" -t COMPLETING
    sleep 2
}
start_again() { # JOB
    requeued "$1"
    scontrol update "JobId=$1" StartTime=now
}

lint() { # FILE: what sbatch ignores without a word
    awk -v file="$1" '
        NR == 1 && !/^#!/ { print file ": no #! line"; bad = 1 }
        /^#SBATCH/ && code { print file ":" NR ": an #SBATCH line after the first command is ignored"; bad = 1 }
        /^#SBATCH.*[$]/ { print file ":" NR ": variables are not expanded in an #SBATCH line"; bad = 1 }
        !/^#/ && NF { code = 1 }
        END { exit bad }' "$1"
}

# --- claims: the templates as files ----------------------------------------------------------------------------------

every_template_is_clean_and_accepted() {
    local file shape name options
    shellcheck -x slurm/*.sbatch
    equal "$(find slurm -name '*.sbatch' | wc -l)" 12 templates
    for file in slurm/*.sbatch; do
        lint "$file"
        sbatch --test-only "$file"
        name=$(basename "$file" .sbatch)
        for shape in "${SHAPES[@]}"; do
            read -r SITE_NODES SITE_GPUS_PER_NODE <<<"$shape"
            export SITE_NODES SITE_GPUS_PER_NODE
            mapfile -t options < <(slurm/submit --options "$name")
            sbatch --test-only "${options[@]}" "$file"
        done
    done
}

the_lint_finds_what_sbatch_ignores() {
    local file=$work/planted.sbatch
    printf '#!/bin/bash\ntrue\n#SBATCH --nodes=1\n' >"$file"
    equal "$(lint "$file" || true)" "$file:3: an #SBATCH line after the first command is ignored" lint
    # shellcheck disable=SC2016 # the planted fault
    printf '#!/bin/bash\n#SBATCH --nodes=$NODES\n' >"$file"
    equal "$(lint "$file" || true)" "$file:2: variables are not expanded in an #SBATCH line" lint
    printf '#SBATCH --nodes=1\n' >"$file"
    equal "$(lint "$file" || true)" "$file: no #! line" lint
}

# --- claims: the templates as jobs, the command stood in for ---------------------------------------------------------

the_whole_chain_runs_in_order() {
    local wanted id name
    on srun 1 8
    slurm/submit gates >"$here/chain"
    wanted=$(slurm/submit --gates)
    equal "$(awk '{print $2}' "$here/chain")" "$wanted" "what was submitted"
    while read -r id name; do ended "$id" "COMPLETED 0:0"; done <"$here/chain"
    equal "$(awk '$2 == "starts" && $3 == 0 {print $1}' "$here/log")" "$wanted" "what ran, in order"
    equal "$(events gate1_key passes)" 1 "ranks of gate1_key"
    for name in $(tail -n +2 <<<"$wanted"); do equal "$(events "$name" passes)" 8 "ranks of $name"; done
}

part_of_the_chain_runs_with_either_launcher_on_one_node_and_on_two() {
    local launcher nodes gpus id name hosts
    for launcher in "${LAUNCHERS[@]}"; do
        for shape in "${SHAPES[@]}"; do
            read -r nodes gpus <<<"$shape"
            on "$launcher" "$nodes" "$gpus"
            slurm/submit gates --from gate6 >"$here/chain"
            equal "$(awk '{print $2}' "$here/chain" | paste -sd' ')" "gate6_g8 gate7_online" "what was submitted"
            while read -r id name; do
                ended "$id" "COMPLETED 0:0"
                equal "$(awk -v n="$name" '$1 == n && $2 == "passes" {print $3, $4}' "$here/log" | sort | paste -sd,)" \
                    "0 8,1 8,2 8,3 8,4 8,5 8,6 8,7 8" "ranks of $name under $launcher"
            done <"$here/chain"
            hosts=$(awk '$1 == "gate7_online" && $2 == "passes" {print $5}' "$here/log" | sort | uniq -c | awk '{print $1}' | paste -sd' ')
            case $nodes in 1) equal "$hosts" 8 "ranks by node" ;; 2) equal "$hosts" "4 4" "ranks by node" ;; esac
        done
    done
}

a_gate_that_fails_stops_the_chain_after_it() {
    local ids
    on srun 1 8
    echo fail >"$here/gate5_g2"
    slurm/submit gates --from gate4 >"$here/chain"
    mapfile -t ids < <(awk '{print $1}' "$here/chain")
    equal "${#ids[@]}" 4 "jobs"
    ended "${ids[0]}" "COMPLETED 0:0"
    # The launcher may report the code of ranks that it ended; the receipt decides.
    ended "${ids[1]}" "FAILED 8:0"
    ended "${ids[2]}" "CANCELLED 0:0"
    ended "${ids[3]}" "CANCELLED 0:0"
    equal "$(awk '{print $1}' "$here/log" | sort -u | paste -sd' ')" "gate4_g1 gate5_g2" "what ran"
}

a_submission_that_is_refused_ends_the_chain() {
    local code=0
    on srun 1 8
    SITE_PARTITION=nowhere slurm/submit gates >"$here/chain" || code=$?
    equal "$code $(wc -l <"$here/chain")" "2 0" "exit code and submitted jobs"
}

a_rank_that_dies_fails_the_job() {
    local launcher id
    for launcher in "${LAUNCHERS[@]}"; do
        on "$launcher" 2 4
        echo "die 3" >"$here/gate4_g1"
        id=$(slurm/submit gate4_g1)
        equal "$(scripts/slurm_ci.sh wait "$id" 60 | awk '{print $1}' || true)" FAILED "$launcher"
        # Its own code, or that of the ranks that it took along.
        grep -qE "failed: $launcher left with 1(37|43);" "$here/runs/slurm/gate4_g1-$id.out"
    done
}

ranks_that_leave_without_a_new_receipt_have_not_passed() {
    on srun 1 8
    echo silent >"$here/gate2_32k"
    ended "$(slurm/submit gate2_32k)" "FAILED 8:0"
    # Neither does one of an earlier run, which says passed.
    mkdir -p "$here/runs/gates/gate2_32k"
    printf '{\n  "passed": true\n}\n' >"$here/runs/gates/gate2_32k/receipt.json"
    ended "$(slurm/submit gate2_32k)" "FAILED 8:0"
    rm "$here/gate2_32k"
    ended "$(slurm/submit gate2_32k)" "COMPLETED 0:0"
}

a_stop_reaches_every_rank_and_the_job_comes_back() {
    local launcher id
    # Slurm's own signal ahead of a time limit, and the one that comes ahead of a preemption.
    local -A signals=([srun]=USR1 [mpirun]=TERM)
    for launcher in "${LAUNCHERS[@]}"; do
        on "$launcher" 2 4
        echo wait >"$here/train"
        id=$(slurm/submit train)
        until_is 8 60 events train waits
        scancel --batch "--signal=${signals[$launcher]}" "$id"
        start_again "$id"
        ended "$id" "COMPLETED 0:0"
        equal "$(restarts "$id")" 1 "starts after the first"
        equal "$(events train asked)" 8 "ranks that were asked"
        equal "$(events train passes)" 8 "ranks that passed"
        [ ! -e "$here/runs/train/requeue" ]
        equal "$(awk '$2 == "passes" {print $6}' "$here/log" | sort -u)" 1 "the start that passed"
        # One file holds both starts.
        equal "$(grep -c ': start [12] on ' "$here/runs/slurm/train-$id.out")" 2 "starts in the output"
    done
}

a_signal_before_any_handler_is_not_lost() {
    local id
    on srun 1 8
    echo deaf >"$here/train"
    id=$(slurm/submit train)
    until_is RUNNING 60 state "$id"
    until_is 8 60 events train starts
    scancel --batch --signal=USR1 "$id"
    start_again "$id"
    ended "$id" "COMPLETED 0:0"
    equal "$(events train asked)" 8 "ranks that were asked"
}

requeues_are_bounded() {
    local id
    on srun 1 8
    echo wait >"$here/train"
    id=$(SITE_REQUEUES_MAX=0 slurm/submit train)
    until_is 8 60 events train waits
    scancel --batch --signal=USR1 "$id"
    ended "$id" "FAILED 75:0"
    grep -q "not requeued: this was start 1, and REQUEUES_MAX is 0" "$here/runs/slurm/train-$id.out"
}

a_cancelled_job_does_not_come_back() {
    local id
    on srun 1 8
    echo wait >"$here/train"
    id=$(slurm/submit train)
    until_is 8 60 events train waits
    scancel "$id"
    equal "$(scripts/slurm_ci.sh wait "$id" 60 | awk '{print $1}' || true)" CANCELLED "the job"
    sleep 3
    equal "$(state "$id")" CANCELLED "the job, later"
}

an_allocation_that_the_site_does_not_describe_is_refused() {
    local id
    on srun 1 8
    id=$(SITE_NODES=2 sbatch --parsable "--output=$here/%x-%j.out" slurm/gate5_g2.sbatch)
    ended "$id" "FAILED 2:0"
    grep -q "the job has 8 tasks on 1 nodes, and slurm/site.env says 16 on 2" "$here/gate5_g2-$id.out"
    equal "$(wc -l <"$here/log")" 0 "ranks that ran"
}

a_bare_sbatch_is_enough_on_the_default_site() {
    local id
    on srun 1 8
    unset SITE_NODES SITE_GPUS_PER_NODE SITE_MEM LAUNCHER
    id=$(sbatch --parsable "--output=$here/%x-%j.out" slurm/gate5_g2.sbatch)
    ended "$id" "COMPLETED 0:0"
    equal "$(events gate5_g2 passes)" 8 ranks
}

gates_run_here_without_slurm() {
    local code=0
    on srun 1 8
    RANKS=2 slurm/here gate1_key gate4_g1
    equal "$(events gate1_key passes) $(events gate4_g1 passes)" "1 2" ranks
    echo fail >"$here/gate5_g2"
    RANKS=2 slurm/here gate5_g2 gate6_g8 || code=$?
    equal "$code" 8 "the gate that fails"
    equal "$(events gate6_g8 starts)" 0 "ranks of the one after it"
    echo silent >"$here/gate5_g2"
    RANKS=2 slurm/here gate5_g2 || code=$?
    equal "$code" 8 "the gate without a receipt"
    equal "$(slurm/submit --gates gate3_ | head -n 5 | paste -sd' ')" "gate3_128k gate3_256k gate3_512k gate3_1m gate3_2m" "what make gate3 runs"
    equal "$(slurm/submit --gates gate3_256k)" gate3_256k "what make gate3 GATE3=256k runs"
}

# --- claims: the real command ----------------------------------------------------------------------------------------

# The tiny reference checkpoint on CPUs. trains LAUNCHER NODES GPUS_PER_NODE STEPS
trains() {
    on "$1" "$2" "$3"
    export SITE_LONGSTRAW=${COMMAND:-}
    export SITE_MODEL=$PWD/tests/cases/llama/base SITE_CONFIG=$here/config.toml
    training_config "$4"
}

has_lines() { if [ -s "$1" ]; then echo yes; else echo no; fi; }

training_config() { # STEPS
    cat >"$SITE_CONFIG" <<CONFIG
[context]
max_seq_len = 120
prompt_len = 96
answer_len = 24
page_size = 4
[optimizer]
lr = 1e-3
[grpo]
group_size = 2
reward_fn = "synthetic"
[lora]
rank = 4
alpha = 8.0
[model]
dtype = "float32"
[run]
device = "cpu"
steps = $1
CONFIG
}

of_receipt() { # KEY...: of the training run, or of the one in the folder RUN
    python3 -c 'import json, sys; r = json.load(open(sys.argv[1])); print(*(r[k] for k in sys.argv[2:]))' \
        "${RUN:-$here/runs/train}/receipt.json" "$@"
}

training_passes_on_eight_ranks_with_either_launcher_and_on_two_nodes() {
    local launcher nodes gpus shape digest='' found
    for launcher in "${LAUNCHERS[@]}"; do
        for shape in "${SHAPES[@]}"; do
            read -r nodes gpus <<<"$shape"
            trains "$launcher" "$nodes" "$gpus" 2
            ended "$(slurm/submit train)" "COMPLETED 0:0"
            equal "$(of_receipt passed ranks steps)" "True 8 2" "receipt of $launcher on $shape"
            # Neither the launcher nor the nodes are in the numbers.
            found=$(of_receipt adapter_digest)
            equal "$found" "${digest:=$found}" "adapters of $launcher on $shape"
        done
    done
}

# The true way of a time limit: Slurm looks every half minute, signals ahead of the end, and the job comes back. How many
# updates the first start makes is the machine's affair; the second makes three more.
a_time_limit_interrupts_training_and_the_adapter_is_the_uninterrupted_ones() {
    local id first steps whole=$work/whole
    trains srun 1 8 1000000
    id=$(SITE_SIGNAL_SECONDS=60 slurm/submit train)
    until_is yes 120 has_lines "$here/runs/train/metrics.jsonl"
    scontrol update "JobId=$id" EndTime=now+62seconds
    requeued "$id"
    first=$(sed 's/[^0-9]//g' "$here/runs/train/latest")
    [ "$first" -ge 1 ]
    steps=$((first + 3))
    training_config "$steps"
    scontrol update "JobId=$id" StartTime=now
    ended "$id" "COMPLETED 0:0"
    equal "$(restarts "$id")" 1 "starts after the first"
    equal "$(of_receipt passed steps)" "True $steps" "the interrupted run"

    mv "$here/runs/train" "$whole"
    ended "$(slurm/submit train)" "COMPLETED 0:0"
    equal "$(of_receipt passed steps)" "True $steps" "the uninterrupted run"
    cmp "$whole/adapter/adapter_model.safetensors" "$here/runs/train/adapter/adapter_model.safetensors"
    equal "$(of_receipt adapter_digest)" "$(RUN=$whole of_receipt adapter_digest)" "adapters"
}

# An update of many groups takes seconds; a signal with one second of grace meets it in the middle.
a_step_that_a_stop_meets_in_its_middle_runs_again_and_the_adapter_is_the_uninterrupted_ones() {
    local id steps=4 whole=$work/undisturbed
    trains srun 1 8 "$steps"
    sed -i 's/^\[optimizer\]$/[optimizer]\ngrad_accum = 24/' "$SITE_CONFIG"
    id=$(SITE_SIGNAL_SECONDS=1 slurm/submit train)
    until_is yes 120 has_lines "$here/runs/train/metrics.jsonl"
    sleep 1
    scancel --batch --signal=USR1 "$id"
    start_again "$id"
    ended "$id" "COMPLETED 0:0"
    grep -q 'is dropped .* s into it: .* its prompts run again' "$here/runs/slurm/train-$id.out"
    equal "$(restarts "$id")" 1 "starts after the first"
    equal "$(of_receipt passed steps)" "True $steps" "the interrupted run"
    equal "$(wc -l <"$here/runs/train/metrics.jsonl")" "$steps" "updates that are told"

    mv "$here/runs/train" "$whole"
    ended "$(slurm/submit train)" "COMPLETED 0:0"
    cmp "$whole/adapter/adapter_model.safetensors" "$here/runs/train/adapter/adapter_model.safetensors"
}

# A small ladder: the tiny model, lengths divided by 64, an endpoint on this machine. ladder LAUNCHER NODES GPUS_PER_NODE
ladder() {
    trains "$1" "$2" "$3" 1
    export SITE_GATE_SCALE=64 SITE_SETTINGS=$here/settings.json LADDER_KEY=key-of-the-test
    # The service ends with this claim's shell, which holds the other end of its standard input.
    exec 9> >(exec tests/slurm/service.py "$here" "$LADDER_KEY")
    until_is yes 20 has_lines "$here/settings.json"
}

of_gate() { RUN=$here/runs/gates/$1 of_receipt "${@:2}"; } # GATE KEY...

the_ladder_of_gates_is_climbed_by_one_command() {
    local id name
    ladder srun 1 8
    slurm/submit gates >"$here/chain"
    while read -r id name; do
        ended "$id" "COMPLETED 0:0"
        equal "$(of_gate "$name" gate passed)" "$name True" "receipt of $name"
        [ "$name" = gate1_key ] || equal "$(of_gate "$name" ranks)" 8 "ranks of $name"
    done <"$here/chain"
    equal "$(wc -l <"$here/chain")" 11 gates
    equal "$(of_gate gate6_g8 group_size)" 8 "answers of gate6_g8"
    # The key is in no file that the ladder has left.
    equal "$(grep -rl "$LADDER_KEY" "$here" | wc -l)" 0 "files that hold the key"
}

gate2_passes_on_two_nodes_with_either_launcher() {
    local launcher id name
    for launcher in "${LAUNCHERS[@]}"; do
        ladder "$launcher" 2 4
        ended "$(slurm/submit gate1_key)" "COMPLETED 0:0"
        ended "$(slurm/submit gate2_32k)" "COMPLETED 0:0"
        equal "$(of_gate gate2_32k passed ranks)" "True 8" "receipt under $launcher"
    done
}

a_planted_fault_fails_its_gate_and_is_named() {
    local ids
    ladder srun 1 8
    # Without a learning rate no adapter moves.
    SITE_ARGS="--set optimizer.lr=0.0" slurm/submit gates >"$here/chain"
    mapfile -t ids < <(awk '{print $1}' "$here/chain")
    ended "${ids[0]}" "COMPLETED 0:0"
    ended "${ids[1]}" "FAILED 8:0"
    grep -q lora_b_moved "$here/runs/slurm/gate2_32k-${ids[1]}.out"
    equal "$(of_gate gate2_32k passed)" False "receipt of gate2_32k"
    ended "${ids[10]}" "CANCELLED 0:0"
    [ ! -e "$here/runs/gates/gate3_128k" ]
}

# ---------------------------------------------------------------------------------------------------------------------

claim() { # FUNCTION
    local start=$SECONDS code=0
    [[ $1 == *"$pattern"* ]] || return 0
    # A claim is a shell of its own that ends at the first command that fails; in a condition it would not.
    set +e
    (
        set -e
        "$1"
    ) >"$work/said" 2>&1
    code=$?
    set -e
    if [ "$code" = 0 ]; then
        passed=$((passed + 1))
        printf 'ok      %s (%s s)\n' "${1//_/ }" "$((SECONDS - start))"
    else
        failed=$((failed + 1))
        printf 'FAILED  %s (%s s); files are in %s\n' "${1//_/ }" "$((SECONDS - start))" "$work"
        sed 's/^/        /' "$work/said"
        timeout 20 squeue -h -o '%A' | xargs -r timeout 20 scancel
    fi
}

scripts/slurm_ci.sh up 2 8>&- || {
    echo "slurm_test: no Slurm comes up on this machine, so nothing was tested" >&2
    exit 1
}
# In the order of this file: the claims are the functions whose names are sentences.
mapfile -t claims < <(sed -n 's/^\([a-z0-9]*\(_[a-z0-9]*\)\{2,\}\)() {$/\1/p' "$0")
for function in "${claims[@]}"; do claim "$function"; done
echo "$passed passed, $failed failed, $SECONDS s"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
