# shellcheck shell=bash
# The loop of the test scripts: runs claims, counts them and prints the results. Sourced from the project's folder. Sets
# `work`, a folder for files that is removed at the end.

work=$(mktemp -d /tmp/longstraw_test.XXXXXX)
trap 'rm -rf "$work"' EXIT
claims_passed=0
claims_failed=0
claim_exit=0
claim_seconds=0

# run_claim NAME shown|hidden COMMAND...: a command that ends with the line `12 passed, 0 failed` counts as 12 claims, and
# any other command as one. Its output is in $work/output; where it is hidden, it is printed only if the claim fails.
run_claim() {
    local name=$1 output=$2 start=$SECONDS passed failed
    shift 2
    # The shell of a claim ends at the first command that fails. In a condition it would not.
    set +e
    if [ "$output" = shown ]; then
        (set -e; "$@") 2>&1 | tee "$work/output"
        claim_exit=${PIPESTATUS[0]}
    else
        (set -e; "$@") >"$work/output" 2>&1
        claim_exit=$?
    fi
    set -e
    claim_seconds=$((SECONDS - start))
    passed=$(sed -n 's/^\([0-9]\+\) passed, 0 failed$/\1/p' "$work/output" | tail -n 1)
    failed=0
    if [ "$claim_exit" != 0 ]; then
        # Whatever was printed before: a program that ends badly has failed.
        passed=0
        failed=1
        printf 'FAILED  %s (%s s, exit %s)\n' "$name" "$claim_seconds" "$claim_exit"
        [ "$output" = shown ] || sed 's/^/        /' "$work/output"
    else
        passed=${passed:-1}
        printf 'ok      %s (%s s)\n' "$name" "$claim_seconds"
    fi
    claims_passed=$((claims_passed + passed))
    claims_failed=$((claims_failed + failed))
}

# Prints the sums; fails unless every claim held and there was one.
claims_end() {
    echo "$claims_passed passed, $claims_failed failed, $SECONDS s"
    [ "$claims_failed" = 0 ] && [ "$claims_passed" -gt 0 ]
}

# build_programs TARGET...: builds these test targets and links their programs into $work.
build_programs() {
    cargo test --release --locked --no-run --message-format=json "${@/#/--test=}" | python3 -c '
import json, os, sys
for line in sys.stdin:
    message = json.loads(line) if line.startswith("{") else {}
    if message.get("reason") == "compiler-artifact" and message.get("executable") and message["target"]["kind"] == ["test"]:
        os.symlink(message["executable"], os.path.join(sys.argv[1], message["target"]["name"]))
    elif message.get("reason") == "compiler-message":
        print(message["message"]["rendered"], file=sys.stderr)
' "$work"
}

# run_program PROGRAM RANKS LIMIT_S: the claims of an MPI test program.
run_program() {
    run_claim "${1##*/} at $2 ranks" shown timeout --kill-after=10 "$3" scripts/mpirun.sh "$2" "$1"
    case $claim_exit in 124 | 137) echo "        stopped at its limit of $3 s (LIMIT_S)" ;; esac
}
