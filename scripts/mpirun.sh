#!/usr/bin/env bash
# mpirun for one machine that has fewer cores than ranks.
#
#   scripts/mpirun.sh RANKS COMMAND [ARGUMENT...]
#
# On a cluster call mpirun or srun directly; nothing of this is needed there.
set -euo pipefail
[ "$#" -ge 2 ] || {
    echo "usage: scripts/mpirun.sh RANKS COMMAND [ARGUMENT...]" >&2
    exit 2
}
ranks=$1
shift

# Open MPI starts as root only if both variables are set.
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# Without this, waiting ranks spin on the cores that the others need: about 100 times slower.
export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
# Many containers forbid a process to read another's memory.
export OMPI_MCA_btl_vader_single_copy_mechanism=${OMPI_MCA_btl_vader_single_copy_mechanism:-none}
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    OMP_NUM_THREADS=$(($(nproc) / ranks))
    [ "$OMP_NUM_THREADS" -ge 1 ] || OMP_NUM_THREADS=1
    export OMP_NUM_THREADS
fi
# By default Open MPI binds each of up to two ranks, with all its threads, to one core.
exec mpirun -n "$ranks" --oversubscribe --bind-to none "$@"
