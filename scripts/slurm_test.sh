#!/usr/bin/env bash
# Tests the Slurm templates on a real Slurm (scripts/slurm_ci.sh) with two simulated nodes of eight GPUs. The script starts
# this Slurm and stops it in every case. A machine on which it does not start fails.
#
#   scripts/slurm_test.sh [PATTERN]     the claims whose names contain PATTERN; all claims without it
#
# COMMAND=FILE is tested in place of target/release/longstraw. Each function in tests/slurm/claims_*.sh is a claim.
set -euo pipefail
cd "$(dirname "$0")/.."
pattern=${1:-}

# One cluster at a time. The daemons must not inherit the lock.
exec 8>/tmp/longstraw_slurm_test.lock
flock -w 1800 8 || {
    echo "slurm_test: another run has held /tmp/longstraw_slurm_test.lock for 30 minutes" >&2
    exit 1
}
# shellcheck source=scripts/claims.sh
. scripts/claims.sh
export SLURM_CI_DIR=${SLURM_CI_DIR:-/tmp/longstraw_slurm}
export SLURM_CONF=$SLURM_CI_DIR/slurm.conf
clean_up() {
    scripts/slurm_ci.sh down || true
    [ "$claims_failed" != 0 ] || rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# These let 8 ranks run on a machine of two cores, and two simulated nodes share one machine. sbatch passes them on.
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl_vader_single_copy_mechanism=none PMIX_MCA_gds=hash
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_tcp_if_include=lo OMPI_MCA_oob_tcp_if_include=lo
export OMP_NUM_THREADS=1
# The site of the claims takes nothing from the caller's environment.
unset GRADIENT LAUNCHER SITE_FILE SITE_HOME "${!SITE_@}"

claims=()
for file in tests/slurm/claims_{files,jobs,training}.sh; do
    # shellcheck source=/dev/null # the Makefile checks them one by one
    . "$file"
    mapfile -t -O "${#claims[@]}" claims < <(sed -n "s/^\([a-z0-9_]*${pattern}[a-z0-9_]*\)() {\$/\1/p" "$file")
done

scripts/slurm_ci.sh up 2 8>&- || {
    echo "slurm_test: no Slurm starts on this machine, so nothing was tested" >&2
    exit 1
}
for claim in ${claims[@]+"${claims[@]}"}; do
    run_claim "${claim//_/ }" hidden "$claim"
    if [ "$claim_exit" != 0 ]; then
        echo "        files: $work"
        timeout 20 squeue -h -o '%A' | xargs -r timeout 20 scancel
    fi
done
claims_end
