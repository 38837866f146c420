#!/usr/bin/env python3
"""The study of learning at length: GRPO on codes that a text gives to places, by gradient mode, seed and distance.

    scripts/study_learning.py small        minutes on a CPU
    scripts/study_learning.py full         one GPU; stops after --seconds and goes on when it is called again

Each stage has prompts of one length and begins from the adapters of another stage (or from the base model). Each of its arms
is run with each seed on the same data and for the same number of updates. Finished runs are not repeated; a run that was stopped
goes on from its checkpoint. At the end, and whenever it is stopped, tables and curves are in OUT: results.md and *.svg.

Several runs share a GPU (--at-once). Small models leave most of it idle; with NVIDIA's MPS the runs do not take turns.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

LONGSTRAW = os.environ.get("LONGSTRAW", "target/release/longstraw")
CONFIG = "configs/study/study.toml"
# Supervised steps: the right answer alone, with advantage 1.
SUPERVISED = "configs/study/supervised.toml"
MODEL = "models/smollm2-135m-instruct"
# Text that every Debian 12 with perl has.
TEXT = ["/usr/share/perl", "/usr/share/common-licenses"]
WINDOW = 8192

EXACT = ["grpo.gradient=exact"]
RESPONSE = ["grpo.gradient=response"]
LAST = ["grpo.gradient={ last = 512 }"]
# From the base model an answer is worth something when it ends by itself, as in `make run`; later stages begin from a policy
# that ends its answers, and only the code counts.
FROM_BASE = ['grpo.reward_fn=[{ name = "contains", weight = 0.8 }, { name = "length", weight = 0.2 }]', "grpo.std_min=0.1"]
# CPUs are slow at bfloat16.
ON_CPU = ["model.dtype=float32"]


class Stage:
    """Prompts of one length, and what is run on them."""

    def __init__(
        self, name, prompt, depths, prompts, arms, seeds, updates, begin=None, factor=None, hops=1, more=(), supervised=False
    ):
        self.name, self.prompt, self.begin, self.factor, self.hops = name, prompt, begin, factor, hops
        # The first range of depths, in percent of the text, is trained; the others are only evaluated.
        self.depths, self.prompts, self.arms, self.seeds, self.updates = depths, prompts, arms, seeds, updates
        self.more = list(more)
        # Supervised steps on the right answers instead of answers that the policy draws; nothing is evaluated.
        self.supervised = supervised


def cut(prompt):
    """The arm that sees a quarter of the prompt: its first and last tokens. With the exact gradient it costs about as much as the
    whole prompt with `response`."""
    return EXACT + [f"context.prompt_len={prompt // 4}", 'data.too_long="cut_middle"']


SCALES = {
    "small": [
        Stage(
            "384", 384, {"far": "0..25", "near": "75..100"}, (24, 4), {"exact": EXACT}, [0], 10,
            more=FROM_BASE + ON_CPU,
        ),
        Stage(
            "768", 768, {"far": "0..25", "near": "75..100"}, (24, 4), {"exact": EXACT, "response": RESPONSE}, [0], 6,
            begin="384-exact-0", more=ON_CPU,
        ),
    ],
    "full": [
        Stage(
            "2k", 2048, {"far": "0..25", "middle": "40..60", "near": "80..100"}, (40, 8), {"exact": EXACT}, [0], 60,
            more=FROM_BASE,
        ),
        Stage(
            "8k", 8128, {"far": "0..24", "middle": "40..60", "near": "80..100"}, (40, 8),
            {"exact": EXACT, "response": RESPONSE, "last512": LAST, "cut": cut(8128)}, [0, 1, 2], 60, begin="2k-exact-0",
        ),
        Stage(
            "32k", 32768, {"far": "0..24", "middle": "40..60", "near": "80..100"}, (40, 6),
            {"exact": EXACT, "response": RESPONSE}, [0, 1, 2], 40, begin="2k-exact-0", factor=5.0,
        ),
        # Under a scaling for 64K tokens the base model finds nothing at any length: it is shown right answers first, at lengths
        # that grow.
        Stage("8k-supervised", 8128, {"far": "0..8"}, (80, 1), {"exact": EXACT}, [0], 80, factor=9.0, supervised=True),
        Stage(
            "32k-supervised", 32768, {"far": "0..8"}, (40, 1), {"exact": EXACT}, [0], 40, begin="8k-supervised-exact-0", factor=9.0,
            supervised=True,
        ),
        Stage(
            "64k-supervised", 65536, {"far": "0..8"}, (16, 1), {"exact": EXACT}, [0], 16, begin="32k-supervised-exact-0", factor=9.0,
            supervised=True,
        ),
        Stage(
            "64k", 65536, {"far": "0..8"}, (40, 16), {"exact": EXACT, "response": RESPONSE}, [0, 1, 2], 30,
            begin="64k-supervised-exact-0", factor=9.0, more=["eval.every=15"],
        ),
        Stage(
            "8k-two-hops", 8128, {"far": "0..24", "middle": "40..60", "near": "80..100"}, (40, 8),
            {"exact": EXACT, "response": RESPONSE}, [0, 1, 2], 60, begin="2k-exact-0", hops=2,
        ),
    ],
}


def data_of(stage):
    return Path("data/study") / stage.name


def make_data(stages):
    """Prompts of each stage. With one seed no prompt that is trained shares a code with a held-out one, of any stage; of one length
    it shares no passage either. Finished folders stay; one that has other numbers of prompts is refused."""
    for stage in stages:
        train, held_out = stage.prompts
        for name, depth in stage.depths.items():
            folder = data_of(stage) / name
            if folder.exists():
                found = count_lines(folder / "train.jsonl"), count_lines(folder / "held_out.jsonl")
                if found != stage.prompts:
                    sys.exit(f"{folder} has {found} prompts, the stage {stage.prompts}: move it away, it is made anew then")
                continue
            begun = folder.with_name(f"{name}.part")
            command = [LONGSTRAW, "data", "keychain", "--model", MODEL, "--out", str(begun), "--depth", depth]
            command += ["--prompt-tokens", str(stage.prompt), "--keys", "6", "--answers", "4", "--seed", "0"]
            command += ["--train", str(train), "--held-out", str(held_out), "--hops", str(stage.hops)]
            for text in TEXT:
                command += ["--text", text]
            subprocess.run(command, check=True)
            if stage.supervised:
                keep_right_answers(begun / "train.jsonl")
            begun.rename(folder)


def count_lines(path):
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def keep_right_answers(path):
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for record in records:
        record["answers"] = [answer for answer in record["answers"] if answer["reward"] == 1.0]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


class Run:
    """One arm with one seed."""

    def __init__(self, out, stage, arm, seed):
        self.stage, self.arm, self.seed = stage, arm, seed
        self.name = f"{stage.name}-{arm}-{seed}"
        self.dir = out / self.name
        self.begin = out / stage.begin / "adapter" if stage.begin else None

    def settings(self, prompt=None):
        stage, data = self.stage, data_of(self.stage)
        sets = ", ".join(f'{name} = "{data / name / "held_out.jsonl"}"' for name in stage.depths)
        settings = [f"data.path={data / next(iter(stage.depths)) / 'train.jsonl'}"]
        if not stage.supervised:
            settings.append(f"data.held_out={{ {sets} }}")
        settings += [f"context.prompt_len={stage.prompt}", *stage.more, *stage.arms[self.arm]]
        if prompt:
            settings.append(f"context.prompt_len={prompt}")
        if stage.factor:
            table = f'rope_type = "yarn", factor = {stage.factor}, original_max_position_embeddings = {WINDOW}'
            settings.append(f"model.rope_scaling={{ {table} }}")
        return settings

    def finished(self):
        """An evaluation follows the last update, and the adapter is saved after it."""
        over = self.stage.supervised or self.evaluated()
        return over and (self.dir / "adapter" / "adapter_model.safetensors").exists()

    def evaluated(self):
        return any(line.get("evaluation", {}).get("step") == self.stage.updates for line in self.lines())

    def lines(self):
        try:
            return [json.loads(line) for line in (self.dir / "metrics.jsonl").read_text().splitlines() if line]
        except (OSError, ValueError):
            return []

    def ready(self):
        return self.begin is None or (self.begin / "adapter_model.safetensors").exists()

    def command(self, more):
        settings = [*self.settings(), f"run.seed={self.seed}", f"run.steps={self.stage.updates}", *more]
        if self.begin:
            settings.append(f"lora.init_from={self.begin}")
        config = SUPERVISED if self.stage.supervised else CONFIG
        command = [LONGSTRAW, "train", "--config", config, "--run-dir", str(self.dir)]
        if (self.dir / "latest").exists():
            command.append("--resume")
        return command + [part for setting in settings for part in ("--set", setting)]

    def whole_context(self, more):
        """Evaluation on whole prompts, for an arm that trains on cut ones; None where there is nothing to do."""
        if self.arm != "cut" or not self.finished() or (self.whole() / "evaluation.json").exists():
            return None
        settings = [*self.settings(self.stage.prompt), f"run.seed={self.seed}", *more]
        command = [LONGSTRAW, "eval", str(self.dir / "adapter"), "--config", CONFIG, "--out", str(self.whole())]
        return command + [part for setting in settings for part in ("--set", setting)]

    def whole(self):
        return self.dir / "whole_context"


def run_all(runs, at_once, deadline, more, logs):
    """Runs what is left, `at_once` at a time, the first of the list first, until all is done or `deadline` comes."""
    running, failed = {}, []

    def start(name, command):
        # Runs beside each other would wait for each other's threads.
        environment = {"OMP_NUM_THREADS": "1", **os.environ} if at_once > 1 else None
        with open(logs / f"{name}.log", "a", encoding="utf-8") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        running[name] = process

    while True:
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                print(f"{time.strftime('%H:%M:%S')} {name}: exit {process.returncode}", flush=True)
                if process.returncode not in (0, 75):
                    failed.append(name)
        over = time.time() > deadline
        left = [run for run in runs if run.name not in running and run.name not in failed]
        for run in left:
            if over or len(running) >= at_once:
                break
            command = run.whole_context(more) if run.finished() else run.command(more) if run.ready() else None
            if command:
                start(run.name, command)
        if over:
            # A run saves what it has and ends with the exit code of a stop.
            for process in running.values():
                process.send_signal(signal.SIGUSR1)
            for process in running.values():
                process.wait()
            return failed
        if not running:
            return failed
        time.sleep(0.2)


def mean(values):
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else math.nan


def deviation(values):
    centre = mean(values)
    return math.sqrt(mean([(value - centre) ** 2 for value in values])) if values else math.nan


def show(value):
    return "" if value is None or math.isnan(value) else f"{value:.2f}"


def table(stages, runs):
    """One row a stage, arm and evaluation: means over the seeds that have it."""
    for stage in stages:
        if stage.supervised:
            continue
        names = list(stage.depths)
        columns = [f"{name} ({depth} %)" for name, depth in stage.depths.items()]
        scaling = f", yarn {stage.factor:g}" if stage.factor else ""
        yield f"\n## {stage.name}: prompts of {stage.prompt:,} tokens{scaling}\n"
        yield "| arm | seeds | updates | reward of the 20 updates before | " + " | ".join(
            f"{column}: sampled | greedy | margin, nats" for column in columns
        ) + " | cut off, sampled |"
        yield "|---|---|---|---|" + "---|---|---|" * len(names) + "---|"
        for arm in stage.arms:
            ours = [run for run in runs if run.stage is stage and run.arm == arm and run.lines()]
            at = {}
            for run in ours:
                lines = run.lines()
                updates = {line["step"]: line["reward_mean"] for line in lines if "step" in line}
                for evaluation in (line["evaluation"] for line in lines if "evaluation" in line):
                    step = evaluation["step"]
                    before = mean([updates[one] for one in range(step - 19, step + 1) if one in updates])
                    at.setdefault(step, []).append((run.seed, before, evaluation["sets"]))
            for step in sorted(at):
                rows = at[step]
                cells = [arm, ", ".join(str(seed) for seed, _, _ in rows), str(step), show(mean([b for _, b, _ in rows]))]
                for name in names:
                    sampled = [sets[name]["reward"] for _, _, sets in rows]
                    greedy = [sets[name]["greedy"] for _, _, sets in rows]
                    margins = [sets[name].get("margin") for _, _, sets in rows]
                    spread = f" ± {deviation(sampled):.2f}" if len(sampled) > 1 else ""
                    cells += [show(mean(sampled)) + spread, show(mean(greedy)), show(mean(margins))]
                cells.append(show(mean([sets[name]["truncated_share"] for _, _, sets in rows for name in names])))
                yield "| " + " | ".join(cells) + " |"
            whole = [json.loads(path.read_text()) for run in ours if (path := run.whole() / "evaluation.json").exists()]
            if whole:
                cells = [f"{arm}, evaluated on whole prompts", str(len(whole)), str(stage.updates), ""]
                for name in names:
                    sets = [one["sets"][name] for one in whole]
                    sampled = [one["reward"] for one in sets]
                    greedy, margins = (mean([one.get(key) for one in sets]) for key in ("greedy", "margin"))
                    cells += [f"{show(mean(sampled))} ± {deviation(sampled):.2f}", show(greedy), show(margins)]
                cells.append(show(mean([one["sets"][name]["truncated_share"] for one in whole for name in names])))
                yield "| " + " | ".join(cells) + " |"


COLOURS = ["#1b6ca8", "#c2541b", "#3f7d3a", "#7a4a9e"]


def curve(stage, runs):
    """The training reward of each arm, mean over seeds and over ten updates, as one SVG."""
    width, height, left, bottom = 640, 300, 48, 36
    across, up = width - left - 12, height - bottom - 28
    body = []
    for place, arm in enumerate(stage.arms):
        by_step = {}
        for run in runs:
            if run.stage is stage and run.arm == arm:
                for line in run.lines():
                    if "step" in line:
                        by_step.setdefault(line["step"], []).append(line["reward_mean"])
        steps = sorted(by_step)
        if not steps:
            continue
        points = []
        for index, step in enumerate(steps):
            value = mean([mean(by_step[one]) for one in steps[max(0, index - 9) : index + 1]])
            points.append(f"{left + across * step / stage.updates:.1f},{height - bottom - up * min(1, max(0, value)):.1f}")
        colour = COLOURS[place % len(COLOURS)]
        body.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(points)}"/>')
        body.append(f'<text x="{left + 8 + 120 * place}" y="18" fill="{colour}">{arm}</text>')
    for tenth in range(0, 11, 2):
        y = height - bottom - up * tenth / 10
        body.append(f'<line x1="{left}" x2="{width - 12}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        body.append(f'<text x="8" y="{y + 4:.1f}" fill="#444">{tenth / 10:.1f}</text>')
    body.append(f'<text x="{left}" y="{height - 8}" fill="#444">0</text>')
    body.append(f'<text x="{width - 150}" y="{height - 8}" fill="#444">{stage.updates} updates</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
    title = f"<title>Training reward, {stage.name}: mean of the seeds and of the ten updates before</title>"
    return "\n".join([head, title, f'<rect width="{width}" height="{height}" fill="#fff"/>', *body, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scale", choices=SCALES)
    parser.add_argument("--out", type=Path, help="folder of the runs (default: runs/study/SCALE)")
    parser.add_argument("--seconds", type=float, default=540, help="stop after so many seconds; 0: never")
    parser.add_argument("--at-once", type=int, help="runs at one time (default: 1 with small, 6 with full)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--stage", action="append", help="only this stage; may be given again")
    parser.add_argument("--data-only", action="store_true", help="make the prompts and stop")
    parser.add_argument("--table-only", action="store_true", help="write tables and curves of what is there")
    flags = parser.parse_args()
    began = time.time()
    out = flags.out or Path("runs/study") / flags.scale
    out.mkdir(parents=True, exist_ok=True)
    stages = [stage for stage in SCALES[flags.scale] if not flags.stage or stage.name in flags.stage]
    runs = [Run(out, stage, arm, seed) for stage in stages for seed in stage.seeds for arm in stage.arms]
    # Seed after seed, so that a study that was stopped has all arms of some seeds.
    runs.sort(key=lambda run: run.seed)
    failed = []
    if not flags.table_only:
        if not (shutil.which(LONGSTRAW) and Path(MODEL, "config.json").exists()):
            parser.error(f"{LONGSTRAW} or {MODEL} is not there: run  make build model")
        make_data(stages)
    if not (flags.table_only or flags.data_only):
        at_once = flags.at_once or (1 if flags.scale == "small" else 6)
        more = [f"run.device={flags.device}"] + (["run.share_device=true"] if at_once > 1 else [])
        deadline = began + flags.seconds if flags.seconds > 0 else math.inf
        failed = run_all(runs, at_once, deadline, more, out)
    (out / "results.md").write_text("\n".join(table(stages, runs)) + "\n", encoding="utf-8")
    for stage in (stage for stage in stages if not stage.supervised):
        (out / f"{stage.name}.svg").write_text(curve(stage, runs), encoding="utf-8")
    left = [run.name for run in runs if not run.finished()]
    print((out / "results.md").read_text())
    if failed:
        print(f"failed: {', '.join(failed)}; their logs are in {out}", file=sys.stderr)
        return 1
    if left and not (flags.table_only or flags.data_only):
        print(f"not finished: {', '.join(left)}. The same command goes on with them.", file=sys.stderr)
        return 75
    return 0


if __name__ == "__main__":
    sys.exit(main())
