#!/usr/bin/env bash
# mpirun with what one machine needs that has fewer cores than ranks.
#
#   scripts/mpirun.sh RANKS COMMAND [ARGUMENT...]
#
# On a cluster call mpirun or srun yourself; nothing here is needed there.
set -euo pipefail
[ "$#" -ge 2 ] || {
    echo "usage: scripts/mpirun.sh RANKS COMMAND [ARGUMENT...]" >&2
    exit 2
}
ranks=$1
shift

# Open MPI refuses to start as root unless told twice; nobody else needs the words.
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# Waiting ranks would otherwise spin on the cores that the others need: about 100 times slower.
export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
# One process reading another's memory is forbidden in many containers.
export OMPI_MCA_btl_vader_single_copy_mechanism=${OMPI_MCA_btl_vader_single_copy_mechanism:-none}
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    OMP_NUM_THREADS=$(($(nproc) / ranks))
    [ "$OMP_NUM_THREADS" -ge 1 ] || OMP_NUM_THREADS=1
    export OMP_NUM_THREADS
fi
# Open MPI pins each of up to two ranks to one core, with all its threads.
exec mpirun -n "$ranks" --oversubscribe --bind-to none "$@"
