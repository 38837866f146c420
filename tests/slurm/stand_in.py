#!/usr/bin/env python3
"""Replaces `longstraw` in tests of the templates: a rank that starts, and ends as the test says.

STAND_IN is a folder. Its file NAME says how job NAME ends (without the file it passes):

    fail        a receipt says that a check failed, and every rank leaves with 8
    die N       rank N is killed; the others wait for it
    lose N      as die in the first start. The next start passes
    give up N   as lose, and rank 0 has logged a failure of the run's own before
    silent      every rank leaves with 0, and no receipt is written
    wait        the first start waits for SIGUSR1 or SIGUSR2. Then rank 0 writes `requeue`, and all ranks leave with 0. The next
                start passes
    deaf        as wait, but without a signal handler in the first two seconds

Every rank appends its events to the folder's `log`, one a line: job, event, rank, ranks, host, restarts.
"""

import json
import os
import pathlib
import signal
import socket
import sys
import time

WAIT_S_MAX = 120

folder = pathlib.Path(os.environ["STAND_IN"])
arguments = sys.argv[1:]
name = arguments[1] if arguments[0] == "gate" else arguments[0]
run_dir = pathlib.Path(arguments[arguments.index("--run-dir") + 1])
rank = int(os.environ["PMIX_RANK"])
ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["SLURM_STEP_NUM_TASKS"])
restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def log(event):
    with open(folder / "log", "a") as file:
        file.write(f"{name} {event} {rank} {ranks} {socket.gethostname()} {restarts}\n")


def wait_for_signal():
    signals = []
    if outcome[0] == "deaf":
        time.sleep(2)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: signals.append(number))
    log("waits")
    for _ in range(WAIT_S_MAX * 10):
        if signals:
            break
        time.sleep(0.1)
    else:
        sys.exit("no signal came")
    log("signalled")
    if rank == 0:
        (run_dir / "requeue").write_text("stop\n")
    sys.exit(0)


def receipt(passed):
    if rank == 0:
        # The check passed; its `passed` must not be read as that of the receipt.
        contents = {"passed": passed, "checks": [{"passed": True}]}
        (run_dir / "receipt.json").write_text(json.dumps(contents, indent=2))


outcome = ((folder / name).read_text() if (folder / name).exists() else "pass").split()
log("starts")
if outcome[0] == "fail":
    receipt(False)
    time.sleep(0.5)
    sys.exit(8)
if outcome[0] == "give" and restarts == 0 and rank == 0:
    (run_dir / "logs").mkdir(exist_ok=True)
    with open(run_dir / "logs" / "rank_0.log", "a") as file:
        file.write("ERROR exit=7 the endpoint failed\n")
if outcome[0] == "die" or outcome[0] in ("lose", "give") and restarts == 0:
    if rank == int(outcome[-1]):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(WAIT_S_MAX)
if outcome[0] in ("wait", "deaf") and restarts == 0:
    wait_for_signal()
if outcome[0] == "silent":
    sys.exit(0)
receipt(True)
log("passes")
