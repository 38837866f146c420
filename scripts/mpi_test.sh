#!/usr/bin/env bash
# Runs the MPI test program, tests/ranks.rs, at several world sizes.
#
#   scripts/mpi_test.sh [RANKS...]      (1 2 3 4 8)
#
# LONG in tests/ranks.rs says which claims run at some of these sizes only.
#
# LIMIT_S bounds each run.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$#" -gt 0 ] || set -- 1 2 3 4 8
# shellcheck source=scripts/claims.sh
. scripts/claims.sh

build_programs ranks
export OMP_NUM_THREADS=1
for ranks in "$@"; do run_program "$work/ranks" "$ranks" "${LIMIT_S:-900}"; done
claims_end
