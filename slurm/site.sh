# shellcheck shell=bash
# What the site's values mean: the list of jobs, the options of sbatch and the words of longstraw. Sourced from the
# project's folder by everything in slurm/; changes nothing by itself but for the names it sets.

SITE_FILE=${SITE_FILE:-slurm/site.env}
# shellcheck source=slurm/site.env
. "$SITE_FILE"

refuse() { # WORDS...: the configuration is wrong (exit 2)
    printf 'slurm: %s\n' "$@" >&2
    exit 2
}

jobs() { awk 'NF == 2 {print $1}' <<<"$TIMES"; }
gates() { jobs | grep -v '^train$'; }

known() { # NAME
    jobs | grep -qxF -e "$1" || refuse "there is no $1; there are: $(jobs | paste -sd' ')"
}

# The gate that must have passed before NAME, as its file in configs/gates says; nothing for the first one and for training.
after() { # NAME
    [ ! -r "configs/gates/$1.toml" ] || sed -n 's/^after = "\(.*\)"$/\1/p' "configs/gates/$1.toml"
}

# gates_from START: the gates from the first whose name begins with START on.
gates_from() {
    gates | awk -v start="$1" 'index($0, start) == 1 {on = 1} on'
}

run_dir() { # NAME
    case $1 in
    train) echo "$RUNS/train" ;;
    *) echo "$RUNS/gates/$1" ;;
    esac
}

# The ranks of a job on one node; the key is asked for by one process, which needs no GPU.
tasks_per_node() { # NAME
    case $1 in
    gate1_key) echo 1 ;;
    *) echo "$GPUS_PER_NODE" ;;
    esac
}

nodes() { # NAME
    case $1 in
    gate1_key) echo 1 ;;
    *) echo "$NODES" ;;
    esac
}

# sbatch_options NAME: one a line.
sbatch_options() {
    local name=$1 mem=$MEM
    [ "$name" != gate1_key ] || mem=$MEM_KEY
    echo "--job-name=$name"
    echo "--nodes=$(nodes "$name")"
    echo "--ntasks-per-node=$(tasks_per_node "$name")"
    echo "--cpus-per-task=$CPUS_PER_TASK"
    [ "$name" = gate1_key ] || echo "--gpus-per-node=$GPUS_PER_NODE"
    echo "--mem=$mem"
    echo "--time=$(awk -v name="$name" '$1 == name {print $2}' <<<"$TIMES")"
    echo "--signal=B:USR1@$SIGNAL_SECONDS"
    echo "--requeue"
    echo "--open-mode=append"
    echo "--output=%x-%j.out"
    [ -z "$PARTITION" ] || echo "--partition=$PARTITION"
    [ -z "$ACCOUNT" ] || echo "--account=$ACCOUNT"
}

# The batch file of a job. slurm/NAME.sbatch is this text (tests/tidy compares them), for those who submit it without
# slurm/submit; a job without such a file is submitted from this text.
batch_file() { # NAME
    printf '#!/usr/bin/env bash\n'
    sbatch_options "$1" | sed 's/^/#SBATCH /'
    cat <<END
set -euo pipefail
cd "\${SITE_HOME:-\$SLURM_SUBMIT_DIR}"
# shellcheck source=slurm/job.sh
. slurm/job.sh || { echo "submit from the project's folder, or set SITE_HOME to it" >&2; exit 2; }
run_job $1
END
}

# find_longstraw: sets LONGSTRAW to a command that can be started.
find_longstraw() {
    if [ -z "$LONGSTRAW" ]; then
        LONGSTRAW=$PWD/target/release/longstraw
        [ -x "$LONGSTRAW" ] || LONGSTRAW=longstraw
    fi
    command -v "$LONGSTRAW" >/dev/null ||
        refuse "$LONGSTRAW cannot be started: run  make build  or  make install, or set LONGSTRAW in $SITE_FILE"
}

# longstraw_words NAME: sets WORDS to the command line behind `longstraw`.
longstraw_words() {
    local name=$1 further=()
    case $name in
    train) WORDS=(train --resume) ;;
    *) WORDS=(gate "$name") ;;
    esac
    WORDS+=(--config "$CONFIG" --settings "$SETTINGS" --run-dir "$(run_dir "$name")")
    [ -z "$MODEL" ] || WORDS+=(--set "model.path=$MODEL")
    case $name in
    train | gate1_key) ;; # these have no lengths of a gate's
    *) [ "$GATE_SCALE" = 1 ] || WORDS+=(--set "gate.scale=$GATE_SCALE") ;;
    esac
    case $name in
    gate1_key | gate2_*) ;; # the key has no gradient, and gate2 runs both modes
    *) [ -z "$GRADIENT" ] || WORDS+=(--set "grpo.gradient=$GRADIENT") ;;
    esac
    read -ra further <<<"$ARGS"
    WORDS+=(${further[@]+"${further[@]}"})
}

# What a receipt says of the run as a whole. Only the receipt's own keys stand two blanks from the margin; those of its
# checks are further in.
says() { grep -Eq "^  \"$2\": $3,?\$" "$(run_dir "$1")/receipt.json"; } # NAME KEY VALUE

# is_new FILE STAMP: whether there is FILE, and it is not older than the file STAMP.
is_new() { [ -e "$1" ] && [ ! "$1" -ot "$2" ]; }

new_receipt() { is_new "$(run_dir "$1")/receipt.json" "$2"; } # NAME STAMP

# A run that was asked to stop has not passed either, and nothing was wrong with it.
check_failed() { says "$1" passed false && ! says "$1" stopped true; } # NAME

passed() { new_receipt "$1" "$2" && says "$1" passed true; } # NAME STAMP
