#!/usr/bin/env bash
# A temporary Slurm on this machine, for tests: real daemons, simulated nodes with simulated GPUs, on 127.0.0.1 only.
#
#   scripts/slurm_ci.sh up [NODES]           (1) starts it; then  export SLURM_CONF=FOLDER/slurm.conf
#   scripts/slurm_ci.sh down                 stops its jobs and its daemons
#   scripts/slurm_ci.sh status
#   scripts/slurm_ci.sh wait JOB [SECONDS]   waits, then prints `STATE EXITCODE:SIGNAL`; exit code 0 only for COMPLETED
#
# Needs root and Debian's packages (`scripts/setup.sh slurm`). All files are in SLURM_CI_DIR (/tmp/longstraw_slurm); no file of
# the system changes. Written for Slurm 22.05 and tested with it.
set -euo pipefail

dir=${SLURM_CI_DIR:-/tmp/longstraw_slurm}
port=${SLURM_CI_PORT:-16917}
gpus=8
export SLURM_CONF=$dir/slurm.conf

die() {
    printf 'slurm_ci: %s\n' "$@" >&2
    exit 1
}

write_configuration() { # NODES
    local nodes=$1 node gpu
    mkdir -p "$dir/state" "$dir/log" "$dir/run" "$dir/dev"
    : >"$dir/.slurm_ci"
    install -d -m 0711 "$dir/munge"
    (umask 077 && head -c 128 /dev/urandom >"$dir/munge/key")
    # Slurm expects character devices; these have the numbers of /dev/null.
    for ((gpu = 0; gpu < gpus; gpu++)); do mknod -m 666 "$dir/dev/gpu$gpu" c 1 3; done
    # The names of the nodes exist inside the mount namespaces of the daemons only.
    { grep -v '^#' /etc/hosts || true; } >"$dir/hosts"
    {
        printf '127.0.0.1 controller'
        for ((node = 1; node <= nodes; node++)); do printf ' node%s' "$node"; done
        echo
    } >>"$dir/hosts"
    for ((node = 1; node <= nodes; node++)); do
        mkdir -p "$dir/spool/node$node"
        install -d -m 1777 "$dir/tmp/node$node"
    done
    # slurmd loads a cgroup plugin even if nothing uses it; v1 started on every machine that was tried.
    echo "CgroupPlugin=cgroup/v1" >"$dir/cgroup.conf"
    printf '%s\n' "AutoDetect=off" \
        "NodeName=node[1-$nodes] Name=gpu Type=h200 File=$dir/dev/gpu[0-$((gpus - 1))] Flags=nvidia_gpu_env" >"$dir/gres.conf"
    slurm_conf "$nodes" >"$dir/slurm.conf"
}

slurm_conf() { # NODES
    local node
    cat <<CONF
ClusterName=ci
SlurmctldHost=controller(127.0.0.1)
SlurmctldPort=$port
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/munge/socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
MailProg=/bin/true
ReturnToService=2
KillWait=5
MpiDefault=none
# The PMIx plugins of two nodes would use the same name under /tmp.
TmpFS=$dir/tmp/%n
# 64 cores and 500 GB are declared whatever the machine has; nothing binds to them.
SlurmdParameters=config_overrides
TaskPlugin=task/none
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$dir/log/jobcomp.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
# A job that can never start is refused at once.
EnforcePartLimits=ALL
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0,sched_min_interval=0
GresTypes=gpu
NodeName=DEFAULT Boards=1 SocketsPerBoard=2 CoresPerSocket=32 ThreadsPerCore=1 RealMemory=500000 TmpDisk=1000000 Gres=gpu:h200:$gpus State=UNKNOWN
CONF
    for ((node = 1; node <= $1; node++)); do echo "NodeName=node$node NodeAddr=127.0.0.1 Port=$((port + node))"; done
    echo "PartitionName=ci Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=5 State=UP"
}

# as_host NAME COMMAND...: runs the command in namespaces with its own host name, /etc/hosts and /dev/shm. Two nodes with one
# /dev/shm would overwrite each other's MPI segments.
as_host() {
    # shellcheck disable=SC2016 # the inner shell expands them
    unshare --uts --mount --propagation slave sh -c '
        hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs tmpfs /dev/shm || exit 1
        shift 2
        exec "$@"' sh "$1" "$dir/hosts" "${@:2}" </dev/null
}

up() { # NODES
    local nodes=$1 node tries command
    [ "$(id -u)" = 0 ] || die "the temporary Slurm needs root (namespaces, device files)."
    for command in munged slurmctld slurmd sbatch unshare; do
        command -v "$command" >/dev/null || die "$command is not installed: run  scripts/setup.sh slurm"
    done
    down
    [ ! -e "$dir" ] || [ -e "$dir/.slurm_ci" ] || die "$dir was not made by this script; set SLURM_CI_DIR to another folder"
    rm -rf "$dir"
    write_configuration "$nodes"
    munged --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munge/pid" \
        --log-file="$dir/munge/log" --seed-file="$dir/munge/seed" || die "munged does not start"
    as_host controller slurmctld -c || die "slurmctld does not start" "$(tail -n 20 "$dir/log/slurmctld.log" 2>&1)"
    for ((node = 1; node <= nodes; node++)); do
        as_host "node$node" slurmd -N "node$node" || die "slurmd of node$node does not start"
    done
    for ((tries = 0; tries < 150; tries++)); do
        [ "$(timeout 5 sinfo -h -o '%T %D' 2>/dev/null)" != "idle $nodes" ] || return 0
        sleep 0.1
    done
    tail -n 20 "$dir"/log/*.log >&2
    die "the nodes are not idle after 15 s; the ends of the logs are above"
}

# end_daemon PIDFILE NAME: ends the process of this number if it is still that program.
end_daemon() {
    local pid tries
    [ -s "$1" ] || return 0
    pid=$(cat "$1")
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ] || return 0
    kill "$pid" 2>/dev/null || true
    for ((tries = 0; tries < 100; tries++)); do
        # Its parent may not collect it for a while, so a zombie counts as ended.
        case $(awk '/^State/ {print $2}' "/proc/$pid/status" 2>/dev/null) in '' | Z | X) return 0 ;; esac
        sleep 0.1
    done
    kill -9 "$pid" 2>/dev/null || true
}

down() {
    local file pid tries
    [ -d "$dir/run" ] || return 0
    # Without a controller, clients take long to give up.
    if [ -s "$dir/run/slurmctld.pid" ] && timeout 3 scontrol ping >/dev/null 2>&1; then
        timeout 5 squeue -h -o %A 2>/dev/null | sort -u | xargs -r timeout 5 scancel 2>/dev/null || true
        for ((tries = 0; tries < 100; tries++)); do
            [ -n "$(timeout 5 squeue -h 2>/dev/null)" ] || break
            sleep 0.1
        done
    fi
    for file in "$dir"/run/slurmd.*.pid; do end_daemon "$file" slurmd; done
    end_daemon "$dir/run/slurmctld.pid" slurmctld
    end_daemon "$dir/munge/pid" munged
    # Job steps that outlived their daemon. Those of another cluster have another environment.
    for file in /proc/[0-9]*/comm; do
        [ "$(cat "$file" 2>/dev/null)" = slurmstepd ] || continue
        pid=${file#/proc/}
        pid=${pid%/comm}
        { tr '\0' '\n' <"/proc/$pid/environ" | grep -qxF "SLURM_CONF=$SLURM_CONF"; } 2>/dev/null || continue
        kill -9 "$pid" 2>/dev/null || true
    done
}

wait_for() { # JOB SECONDS
    local end=$((SECONDS + $2)) job state
    while :; do
        job=$(timeout 20 scontrol -o show job "$1" 2>/dev/null) || die "there is no job $1"
        state=$(sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p' <<<"$job")
        case $state in
        PENDING | RUNNING | CONFIGURING | COMPLETING | SUSPENDED | REQUEUED) ;;
        # The state is final before the job has left its nodes.
        *) [ -n "$(timeout 20 squeue -h -j "$1" -t COMPLETING 2>/dev/null)" ] || break ;;
        esac
        [ "$SECONDS" -lt "$end" ] || { echo "$state after $2 s"; return 124; }
        sleep 0.2
    done
    echo "$state $(sed -n 's/.* ExitCode=\([0-9:]*\).*/\1/p' <<<"$job")"
    [ "$state" = COMPLETED ]
}

case ${1:-} in
up) up "${2:-1}" ;;
down) down ;;
status)
    timeout 20 sinfo
    timeout 20 squeue
    ;;
wait) wait_for "${2:?wait needs a job}" "${3:-300}" ;;
*) die "usage: scripts/slurm_ci.sh up [NODES] | down | status | wait JOB [SECONDS]" ;;
esac
