# shellcheck shell=bash
# The body of every template: starts the ranks, passes stop signals on to them, and sets the job's exit code. A template
# changes to the project's folder, sources this file and calls `run_job NAME`.
#
# Exit codes:
#   0   the launcher left with 0, and the receipt of this start says passed, or a training had finished before
#   75  all ranks left with 0 after a stop. The job is requeued if rank 0 has written the file `requeue` in the run
#       directory. It is not requeued if only the receipt says stopped
#   4 or above 128   a rank or its node has died. The job is requeued if RETRIES_MAX of the site allows it
#   8   the ranks left with 0 and the receipt does not say passed, or a gate's new receipt says that a check failed
#   1   three times in turn, no rank has started, although the launcher left with 0
#   otherwise the launcher's own code
# The code of a single rank decides nothing: a launcher that ends the other ranks may report their code instead.

# The folder of the file that defines the module command.
MODULE_FILES=${MODULE_FILES:-/etc/profile.d}

# Between two tries to start the ranks.
LAUNCH_PAUSE_S=5

launcher_pid=
stop_signal=
interrupted=0
# Slurm signals this shell alone (--signal=B:): USR1 ahead of a time limit, TERM ahead of a preemption or a cancellation.
# TERM leaves less time, so the ranks get USR2 for it. Before the ranks have started, the signal is only stored.
on_signal() { # SIGNAL
    stop_signal=$1
    interrupted=1
    say "stop signal after ${SECONDS} s"
    [ -z "$launcher_pid" ] || repeat_signal
}
trap 'on_signal USR1' USR1
trap 'on_signal USR2' TERM

say() { printf '%s %s: %s\n' "$(date -u +%FT%TZ)" "${SLURM_JOB_NAME:-job}" "$*"; }

# The launcher passes USR1 and USR2 on to every rank; on TERM it would end them. A launcher or a rank without a handler loses
# the signal, so it is repeated until the launcher has ended.
repeater_pid=
repeat_signal() {
    [ -z "$repeater_pid" ] || kill "$repeater_pid" 2>/dev/null || true
    (
        trap - USR1 TERM
        while kill "-$stop_signal" "$launcher_pid" 2>/dev/null; do sleep 10; done
    ) &
    repeater_pid=$!
}

load_modules() {
    local names=() file
    read -ra names <<<"$MODULES"
    [ "${#names[@]}" -gt 0 ] || return 0
    set +u # the module command reads unset variables
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

# The allocation must be that of the site's file, which `sbatch` alone does not read.
check_allocation() { # NAME
    local nodes tasks
    nodes=$(nodes "$1")
    tasks=$((nodes * $(tasks_per_node "$1")))
    [ "${SLURM_JOB_NUM_NODES:-0} ${SLURM_NTASKS:-0}" = "$nodes $tasks" ] ||
        refuse "the job has ${SLURM_NTASKS:-0} tasks on ${SLURM_JOB_NUM_NODES:-0} nodes, and $SITE_FILE says $tasks on $nodes" \
            "submit with  slurm/submit $1, which takes the options of sbatch from there"
}

# Sets LAUNCH to the launcher's command line.
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

# Starts the ranks and waits for them. Returns the launcher's exit code. A launcher may fail before any rank has started: after
# a requeue the number of a step is used again, and srun cannot launch it while the node still cleans up after the step before;
# srun then leaves with 0. So every rank makes the file BEGUN, and without it the ranks are started again.
start_and_wait() { # BEGUN WORD...
    local begun=$1 try code
    for try in 1 2 3; do
        code=0
        start_once "$@" || code=$?
        [ ! -e "$begun" ] || return "$code"
        say "no rank has started, and $LAUNCHER left with $code: try $try of 3; its own lines above tell why"
        # A job that is to stop starts nothing more. A signal ends this wait.
        [ -n "$stop_signal" ] || [ "$try" = 3 ] || { sleep "$LAUNCH_PAUSE_S" & wait $! || true; }
        [ -z "$stop_signal" ] || break
    done
    [ "$code" != 0 ] || code=1
    return "$code"
}

start_once() { # BEGUN WORD...
    local code
    # A signal must not end a rank that has no handler yet. What is ignored here stays ignored after exec.
    # shellcheck disable=SC2016 # the rank's shell expands $1 and $@
    "${LAUNCH[@]}" bash -c 'trap "" USR1 USR2; : >"$1" || exit 1; shift; exec "$@"' rank "$@" &
    launcher_pid=$!
    [ -z "$stop_signal" ] || repeat_signal
    while :; do
        interrupted=0
        code=0
        wait "$launcher_pid" || code=$?
        # A trap ends the wait early while the launcher still runs.
        [ "$interrupted" = 1 ] || break
    done
    launcher_pid=
    [ -z "$repeater_pid" ] || kill "$repeater_pid" 2>/dev/null || true
    return "$code"
}

# Requeues the job if BOUND, a value of the site, allows one more start; else exits with CODE.
requeue() { # NAME BOUND CODE
    local count=${SLURM_RESTART_COUNT:-0} most=${!2} state
    if [ "$count" -ge "$most" ]; then
        say "not requeued: this was start $((count + 1)), and $2 is $most; submit $1 again to continue"
        exit "$3"
    fi
    # A cancelled job must not come back.
    state=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p')
    if [ "$state" != RUNNING ]; then
        say "not requeued: the job is $state"
        exit "$3"
    fi
    say "requeueing, time $((count + 1)) of at most $most"
    # shellcheck disable=SC2064 # the code as it is now
    trap "exit $3" TERM
    if scontrol requeue "$SLURM_JOB_ID"; then
        # Slurm ends this shell. An exit here would race with that.
        sleep 60 &
        wait $!
    else
        say "scontrol requeue failed; submit $1 again to continue"
    fi
    exit "$3"
}

# How many failures of the run's own the ranks have logged: codes other than 4, which tells that another rank is gone.
own_failures() { # DIRECTORY
    cat "$1"/logs/rank_*.log 2>/dev/null | grep -o 'exit=[0-9]*' | grep -cvx 'exit=4' || true
}

run_job() { # NAME
    local name=$1 directory started failures code=0
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
    # Another job may be running in this folder: longstraw refuses this start then, and nothing of the other job is touched.
    # So this start has a stamp of its own, and an old file `requeue` is told by its age.
    started=$directory/.started.$SLURM_JOB_ID
    : >"$started"
    rm -f "$started.ranks"
    # shellcheck disable=SC2064 # the paths as they are now
    trap "rm -f '$started' '$started.ranks'" EXIT
    # Under a launcher that binds, a rank sees its own cores only and would divide them again.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}

    say "start $((${SLURM_RESTART_COUNT:-0} + 1)) on $SLURM_JOB_NODELIST: ${LAUNCH[*]} $LONGSTRAW ${WORDS[*]}"
    [ -z "$stop_signal" ] || requeue "$name" REQUEUES_MAX 75
    failures=$(own_failures "$directory")
    start_and_wait "$started.ranks" "$LONGSTRAW" "${WORDS[@]}" --set "run.grace_sec=$SIGNAL_SECONDS" || code=$?
    # As if the signal had come before the first try.
    [ -e "$started.ranks" ] || [ -z "$stop_signal" ] || requeue "$name" REQUEUES_MAX 75

    if [ "$code" != 0 ]; then
        if [ "$name" != train ] && new_receipt "$name" "$started" && check_failed "$name"; then
            say "not passed: checks in $directory/receipt.json did not hold"
            exit 8
        fi
        say "failed: $LAUNCHER left with $code; the cause is in the line above that begins with longstraw:"
        # A run that has ended for a reason of its own has logged another code, or has written a receipt.
        if [ "$name" = train ] && { [ "$code" = 4 ] || [ "$code" -gt 128 ]; } && [ "$RETRIES_MAX" -gt 0 ] &&
            ! new_receipt train "$started" && [ "$(own_failures "$directory")" = "$failures" ]; then
            requeue train RETRIES_MAX "$code"
        fi
        exit "$code"
    fi
    if is_new "$directory/requeue" "$started"; then
        rm -f "$directory/requeue"
        requeue "$name" REQUEUES_MAX 75
    fi
    if new_receipt "$name" "$started" && says "$name" stopped true; then
        say "stopped as requested, and saved; submit $name again to continue"
        exit 75
    fi
    # A finished training that is started again does nothing. It has locked its folder, and the receipt is that of before.
    if [ "$name" = train ] && is_new "$directory/.lock" "$started" && says train passed true; then
        say "passed: $directory/receipt.json"
        exit 0
    fi
    if ! passed "$name" "$started"; then
        say "not passed: $directory/receipt.json does not say so, although all ranks left with 0"
        exit 8
    fi
    say "passed: $directory/receipt.json"
}
