# shellcheck shell=bash
# What the claims of this folder share: a site of their own, jobs and their states, and comparisons.
# shellcheck disable=SC2034 # the claims read what is set here

: "${work:?a folder for files}"
LAUNCHERS=(srun mpirun)
SITES=("srun 1 8" "srun 2 4" "mpirun 1 8" "mpirun 2 4") # launcher, nodes, GPUs of a node

# use_site LAUNCHER NODES GPUS_PER_NODE: a site in a folder of its own, `here`, with the stand-in as the command.
use_site() {
    here=$(mktemp -d "$work/run.XXXXXX")
    export LAUNCHER=$1 SITE_NODES=$2 SITE_GPUS_PER_NODE=$3 SITE_RUNS=$here/runs SITE_MEM=64G
    export SITE_LONGSTRAW=$PWD/tests/slurm/stand_in.py STAND_IN=$here
    : >"$here/log"
}

expect_equal() { # FOUND WANTED WHAT
    [ "$1" = "$2" ] || {
        printf '%s: found "%s", expected "%s"\n' "$3" "$1" "$2"
        exit 1
    }
}

expect_end() { # JOB STATE: waits for the job; STATE is its state and exit code
    expect_equal "$(scripts/slurm_ci.sh wait "$1" 600 || true)" "$2" "job $1"
}

expect_state() { # JOB STATE: as expect_end, and without the exit code
    expect_equal "$(scripts/slurm_ci.sh wait "$1" 60 | awk '{print $1}' || true)" "$2" "job $1"
}

expect_pass() { # NAME...: submits each job after the end of the one before
    local name
    for name in "$@"; do expect_end "$(slurm/submit "$name")" "COMPLETED 0:0"; done
}

# submit_chain ARGUMENT...: submits gates; sets the arrays `ids` and `names`.
submit_chain() {
    slurm/submit gates "$@" >"$here/chain"
    mapfile -t ids < <(awk '{print $1}' "$here/chain")
    mapfile -t names < <(awk '{print $2}' "$here/chain")
}

expect_chain_passes() {
    local id
    for id in "${ids[@]}"; do expect_end "$id" "COMPLETED 0:0"; done
}

events() { # NAME EVENT: how often ranks have logged it
    grep -c "^$1 $2 " "$here/log" || true
}

wait_until() { # WANTED SECONDS COMMAND...: waits until the command prints WANTED
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

has_lines() { if [ -s "$1" ]; then echo yes; else echo no; fi; } # FILE
has_line() { if grep -qs "$1" "$2"; then echo yes; else echo no; fi; } # TEXT FILE
state() { scontrol -o show job "$1" | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p'; }
restarts() { scontrol -o show job "$1" | sed -n 's/.* Restarts=\([0-9]*\).*/\1/p'; }
signal() { scancel --batch "--signal=$2" "$1"; } # JOB SIGNAL

# A requeued job starts two minutes later. A node that has just finished a job accepts the next one after a moment.
wait_for_requeue() { # JOB
    wait_until 1 100 restarts "$1"
    wait_until PENDING 60 state "$1"
    wait_until "" 60 squeue -h -j "$1" -t COMPLETING
    sleep 2
}

start_requeued() { # JOB
    wait_for_requeue "$1"
    scontrol update "JobId=$1" StartTime=now
}

# submit_waiting NAME: a job whose ranks wait for a signal; sets `id` once all eight wait.
submit_waiting() {
    echo wait >"$here/$1"
    id=$(slurm/submit "$1")
    wait_until 8 60 events "$1" waits
}

# A launcher in $here/bin that leaves with 0 before it has started a rank, FAILING times, as srun does when it cannot launch a
# step.
failing_launcher() {
    mkdir "$here/bin"
    # shellcheck disable=SC2016 # the launcher's shell expands them
    printf '%s\n' '#!/bin/sh' 'n=$(cat "$STAND_IN/tries" 2>/dev/null || echo 0)' 'echo $((n + 1)) >"$STAND_IN/tries"' \
        '[ "$n" -lt "$FAILING" ] || exec /usr/bin/srun "$@"' >"$here/bin/srun"
    chmod +x "$here/bin/srun"
}

receipt() { # RUN_DIR KEY...
    python3 -c 'import json, sys; r = json.load(open(sys.argv[1])); print(*(r[key] for key in sys.argv[2:]))' \
        "$1/receipt.json" "${@:2}"
}

template_faults() { # FILE: prints lines that sbatch ignores without a message
    awk -v file="$1" '
        NR == 1 && !/^#!/ { print file ": no #! line"; bad = 1 }
        /^#SBATCH/ && code { print file ":" NR ": an #SBATCH line after the first command is ignored"; bad = 1 }
        /^#SBATCH.*[$]/ { print file ":" NR ": variables are not expanded in an #SBATCH line"; bad = 1 }
        !/^#/ && NF { code = 1 }
        END { exit bad }' "$1"
}

# --- the real command ------------------------------------------------------------------------------------------------

# use_longstraw LAUNCHER NODES GPUS_PER_NODE STEPS: a site that trains the tiny reference checkpoint on CPUs.
use_longstraw() {
    use_site "$1" "$2" "$3"
    export SITE_LONGSTRAW=${COMMAND:-}
    export SITE_MODEL=$PWD/tests/cases/llama/base SITE_CONFIG=$here/config.toml
    write_config "$4"
}

write_config() { # STEPS
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

# expect_same_training JOB STEPS: the requeued job passes, and its adapter equals that of a run without an interruption.
expect_same_training() {
    local run=$here/runs/train interrupted=$here/interrupted
    expect_end "$1" "COMPLETED 0:0"
    expect_equal "$(restarts "$1")" 1 "restarts"
    expect_equal "$(receipt "$run" passed steps)" "True $2" "receipt of the interrupted run"
    expect_equal "$(wc -l <"$run/metrics.jsonl")" "$2" "updates in the metrics"
    mv "$run" "$interrupted"
    expect_pass train
    expect_equal "$(receipt "$run" passed steps)" "True $2" "receipt of the run without an interruption"
    cmp "$interrupted/adapter/adapter_model.safetensors" "$run/adapter/adapter_model.safetensors"
    expect_equal "$(receipt "$interrupted" adapter_digest)" "$(receipt "$run" adapter_digest)" "adapter digests"
}

# use_gates LAUNCHER NODES GPUS_PER_NODE: a site of small gates: the tiny model, lengths divided by 64, a local endpoint.
use_gates() {
    use_longstraw "$1" "$2" "$3" 1
    export SITE_GATE_SCALE=64 SITE_SETTINGS=$here/settings.json LADDER_KEY=key-of-the-test
    # The service ends with the claim's shell, which holds the other end of its standard input.
    exec 9> >(exec tests/slurm/service.py "$here" "$LADDER_KEY")
    wait_until yes 20 has_lines "$here/settings.json"
}

gate_receipt() { receipt "$here/runs/gates/$1" "${@:2}"; } # GATE KEY...
