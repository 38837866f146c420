#!/usr/bin/env python3
"""Stands in for `longstraw` in tests of the templates: starts as a rank does, and ends as the test wants.

STAND_IN is a folder. Its file NAME says how job NAME goes (absent: it passes):

    fail        a receipt says that a check failed, and every rank leaves with 8
    die N       rank N is killed; the others wait for it
    silent      every rank leaves with 0, and no receipt is written
    wait        the first start waits for SIGUSR1 or SIGUSR2; rank 0 then leaves `requeue`, all leave with 0; the next one passes
    deaf        as wait, and signals of the first two seconds are not heard

Every rank writes what it sees into the folder's `log`, a line at a time: job, event, rank, ranks, host, start.
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
words = sys.argv[1:]
name = words[1] if words[0] == "gate" else words[0]
run_dir = pathlib.Path(words[words.index("--run-dir") + 1])
rank = int(os.environ["PMIX_RANK"])
ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["SLURM_STEP_NUM_TASKS"])
start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def log(event):
    with open(folder / "log", "a") as file:
        file.write(f"{name} {event} {rank} {ranks} {socket.gethostname()} {start}\n")


def wait_for_the_signal():
    asked = []
    if plan[0] == "deaf":
        time.sleep(2)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: asked.append(1))
    log("waits")
    for _ in range(WAIT_S_MAX * 10):
        if asked:
            break
        time.sleep(0.1)
    else:
        sys.exit("no signal has come")
    log("asked")
    if rank == 0:
        (run_dir / "requeue").write_text("asked to stop\n")
    sys.exit(0)


def receipt(passed):
    if rank == 0:
        # A check that holds: its own `passed` must not be taken for the receipt's.
        told = {"passed": passed, "checks": [{"passed": True}]}
        (run_dir / "receipt.json").write_text(json.dumps(told, indent=2))


plan = ((folder / name).read_text() if (folder / name).exists() else "pass").split()
log("starts")
if plan[0] == "fail":
    receipt(False)
    time.sleep(0.5)
    sys.exit(8)
if plan[0] == "die":
    if rank == int(plan[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(WAIT_S_MAX)
if plan[0] in ("wait", "deaf") and start == 0:
    wait_for_the_signal()
if plan[0] == "silent":
    sys.exit(0)
receipt(True)
log("passes")
