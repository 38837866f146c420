# shellcheck shell=bash
# The body of every template: starts the ranks, hands on the signals that ask for a stop, and turns what comes out into
# the job's exit code. A template goes to the project's folder, sources this file and calls `run_job NAME`.
#
# The rule of the exit code:
#   0   the launcher left with 0, and the receipt that this start has written says passed
#   75  all ranks left with 0 after a stop. Rank 0 has left the file `requeue` in the run directory: the job comes back;
#       or the receipt says that the run was stopped otherwise: it does not
#   8   the ranks left with 0 and the receipt does not say passed, or a gate's new receipt says that a check failed
#   else what the launcher said
# A rank's own code is not used as a message: a launcher that ends the other ranks may report theirs in its place.

# Where sites keep the file that brings the module command.
MODULE_FILES=${MODULE_FILES:-/etc/profile.d}

launcher_pid=
asked=
interrupted=0
# Slurm signals this shell alone (--signal=B:): USR1 ahead of a time limit, TERM ahead of a preemption or a cancellation,
# which leaves less time: the ranks hear of it as USR2. Before they have started the wish is only noted.
on_signal() { # SIGNAL
    asked=$1
    interrupted=1
    say "asked to stop after ${SECONDS} s"
    [ -z "$launcher_pid" ] || remind
}
trap 'on_signal USR1' USR1
trap 'on_signal USR2' TERM

say() { printf '%s %s: %s\n' "$(date -u +%FT%TZ)" "${SLURM_JOB_NAME:-job}" "$*"; }

# The launcher hands USR1 and USR2 on to every rank; TERM would make it end them. A signal is lost on a launcher or a rank that has
# not set its handler yet, so it is repeated until the launcher is gone.
reminder=
remind() {
    [ -z "$reminder" ] || kill "$reminder" 2>/dev/null || true
    (
        trap - USR1 TERM
        while kill "-$asked" "$launcher_pid" 2>/dev/null; do sleep 10; done
    ) &
    reminder=$!
}

load_modules() {
    local names=() file
    read -ra names <<<"$MODULES"
    [ "${#names[@]}" -gt 0 ] || return 0
    set +u # the module command is not written for it
    for file in modules.sh lmod.sh z00_lmod.sh; do
        command -v module >/dev/null && break
        # shellcheck source=/dev/null
        [ ! -r "$MODULE_FILES/$file" ] || . "$MODULE_FILES/$file" || true
    done
    command -v module >/dev/null ||
        refuse "MODULES is $MODULES in $SITE_FILE, and there is no module command: no modules.sh, lmod.sh or z00_lmod.sh in $MODULE_FILES brings one" \
            "source the site's own file in $SITE_FILE, or empty MODULES"
    module load "${names[@]}" || refuse "module load $MODULES failed"
    set -u
}

# The allocation must be what the site's file says: `sbatch` alone does not read it.
check_allocation() { # NAME
    local nodes tasks
    nodes=$(nodes "$1")
    tasks=$((nodes * $(tasks_per_node "$1")))
    [ "${SLURM_JOB_NUM_NODES:-0} ${SLURM_NTASKS:-0}" = "$nodes $tasks" ] ||
        refuse "the job has ${SLURM_NTASKS:-0} tasks on ${SLURM_JOB_NUM_NODES:-0} nodes, and $SITE_FILE says $tasks on $nodes" \
            "submit with  slurm/submit $1, which takes the options of sbatch from there"
}

# launch_words: sets LAUNCH to the launcher's command line.
launch_words() {
    local further=()
    case $LAUNCHER in
    srun) LAUNCH=(srun "--mpi=$MPI_TYPE" --kill-on-bad-exit=1 "--cpus-per-task=$SLURM_CPUS_PER_TASK") ;;
    mpirun) LAUNCH=(mpirun -n "$SLURM_NTASKS" --bind-to none) ;;
    *) refuse "LAUNCHER is $LAUNCHER in $SITE_FILE; it should be srun or mpirun" ;;
    esac
    read -ra further <<<"$LAUNCHER_ARGS"
    LAUNCH+=(${further[@]+"${further[@]}"})
}

# Starts the ranks and waits for them; the launcher's exit code is the function's.
start_and_wait() { # WORD...
    local code
    # A rank that has no handler yet ignores the signal instead of dying of it: what is ignored stays so over exec.
    # shellcheck disable=SC2016 # the rank's shell expands them
    "${LAUNCH[@]}" bash -c 'trap "" USR1 USR2; exec "$@"' rank "$@" &
    launcher_pid=$!
    [ -z "$asked" ] || remind
    while :; do
        interrupted=0
        code=0
        wait "$launcher_pid" || code=$?
        # A trap ends the wait early; the launcher goes on.
        [ "$interrupted" = 1 ] || break
    done
    launcher_pid=
    [ -z "$reminder" ] || kill "$reminder" 2>/dev/null || true
    return "$code"
}

# Leaves with 75; the job starts again where it may.
requeue() { # NAME
    local count=${SLURM_RESTART_COUNT:-0} state
    if [ "$count" -ge "$REQUEUES_MAX" ]; then
        say "not requeued: this was start $((count + 1)), and REQUEUES_MAX is $REQUEUES_MAX; submit it again to go on"
        exit 75
    fi
    # A job that somebody cancels must not come back.
    state=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p')
    if [ "$state" != RUNNING ]; then
        say "not requeued: the job is $state"
        exit 75
    fi
    say "requeueing, time $((count + 1)) of at most $REQUEUES_MAX"
    trap 'exit 75' TERM
    if scontrol requeue "$SLURM_JOB_ID"; then
        # Slurm ends this shell; its own exit would race with that.
        sleep 60 &
        wait $!
    else
        say "scontrol requeue failed; submit $1 again to go on"
    fi
    exit 75
}

run_job() { # NAME
    local name=$1 directory code=0
    # shellcheck source=slurm/site.sh
    . slurm/site.sh
    known "$name"
    check_allocation "$name"
    load_modules
    find_longstraw
    longstraw_words "$name"
    launch_words
    directory=$(run_dir "$name")
    mkdir -p "$directory"
    rm -f "$directory/requeue"
    : >"$directory/.started"
    # Under a launcher that binds, a rank sees its own cores only and would divide them once more.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}

    say "start $((${SLURM_RESTART_COUNT:-0} + 1)) on $SLURM_JOB_NODELIST: ${LAUNCH[*]} $LONGSTRAW ${WORDS[*]}"
    [ -z "$asked" ] || requeue "$name"
    start_and_wait "$LONGSTRAW" "${WORDS[@]}" --set "run.grace_sec=$SIGNAL_SECONDS" || code=$?

    if [ "$code" != 0 ]; then
        if [ "$name" != train ] && new_receipt "$name" "$directory/.started" && check_failed "$name"; then
            say "not passed: checks in $directory/receipt.json did not hold"
            exit 8
        fi
        say "failed: $LAUNCHER left with $code; the cause is in the line above that begins with longstraw:"
        exit "$code"
    fi
    if [ -e "$directory/requeue" ]; then
        rm -f "$directory/requeue"
        requeue "$name"
    fi
    if new_receipt "$name" "$directory/.started" && says "$name" stopped true; then
        say "stopped as asked, and saved; submit $name again to go on"
        exit 75
    fi
    if ! passed "$name" "$directory/.started"; then
        say "not passed: $directory/receipt.json does not say so, although all ranks left with 0"
        exit 8
    fi
    say "passed: $directory/receipt.json"
}
