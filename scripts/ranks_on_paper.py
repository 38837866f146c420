#!/usr/bin/env python3
"""Simulates the seconds of an update on many GPUs from one GPU's measured seconds, on paper: no GPU is needed.

    ranks_on_paper.py                         checks against the runs of docs/benchmarks, then the tables of that document
    ranks_on_paper.py --check                 the checks alone; leaves with 1 if a capture, or a total of `exact`, is further off
                                              than 7 %
    ranks_on_paper.py --run FILE --shape CONFIG --prompt P --ranks R
                                              from another H200's run: FILE is what `longstraw bench --json` printed on one
                                              GPU, CONFIG the model's config.json; --prompt and --ranks may be repeated

Capture and sweep are played layer by layer and step by step for every rank: rank r holds chunks r and 2R−1−r of the prompt, its
queries meet the state of rank (r − step) mod R in each step, and a step ends when its computation and its messages have ended.
A message begins when both of its ranks have begun the step. What is not attention grows with a rank's rows. Replay and scores
divide by the ranks, and every exchange of an answer's rows costs what it cost on two GPUs.

Inputs, in `Machine`: the rates of the attention kernel (measured, one for each head width) and of the device's memory (measured),
of links (nominal, one way), the seconds of an exchange (from the two-GPU runs; so answers are no independent check there). Only
models whose layers all attend to every position before them are simulated. Not in it: what messages cost a computation beside
them, attention outputs that are not kept, adapters' gradients through MPI and the optimizer, loading, pinning, imbalance of
machines, host memory that 8 ranks share.
"""
import argparse
import dataclasses
import json
import pathlib

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
# `bench` computes a backward of attention as 2.5 forwards, as `plan` does.
BACKWARD_WORK = 2.5
# bfloat16; sums of dk and dv are float32.
MODEL_BYTES, SUM_BYTES = 2, 4
MICRO_BLOCK = 8192
OFF_MAX = 0.07

# FLOP/s of a forward and a backward (docs/benchmarks.md), the clock settled where it was measured for so long.
ATTENTION = {64: (482e12, 467e12), 128: (605e12, 538e12), 256: (654e12, 369e12)}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates of a GPU's memory and of the links between GPUs, B/s, and seconds of an exchange."""

    memory: float = 3.9e12
    # Nominal: half of an H200's 900 GB/s of NVLink, and a port of 400 Gb/s for each GPU between nodes.
    link: float = 450e9
    node_link: float = 50e9
    node: int = 8
    # Of an answer's rows in one layer on two GPUs, without and with a backward.
    exchange_score: float = 1.2e-3
    exchange_answer: float = 4.4e-3

    def rate(self, sender, receiver):
        return self.link if sender // self.node == receiver // self.node else self.node_link


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int = 36
    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128

    @classmethod
    def read(cls, path):
        config = json.loads(pathlib.Path(path).read_text())
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        return cls(config["num_hidden_layers"], heads, config["num_key_value_heads"], width)

    def seconds(self, pairs, back):
        """Of a forward or a backward over (query, key) pairs, one layer, at the rates of the nearest measured head width."""
        forward, backward = ATTENTION[min(ATTENTION, key=lambda width: abs(width - self.head_dim))]
        return 4.0 * self.heads * self.head_dim * pairs / (backward / BACKWARD_WORK if back else forward)

    def state_bytes(self, rows):
        return 2.0 * rows * self.key_heads * self.head_dim * MODEL_BYTES

    def sum_bytes(self, rows):
        return 2.0 * rows * self.key_heads * self.head_dim * SUM_BYTES


def chunks(ranks, rank):
    return rank, 2 * ranks - 1 - rank


def pairs(queries, keys, length):
    """Causal pairs of a chunk of queries with one of keys."""
    return length * length * (1.0 if queries > keys else 0.5 if queries == keys else 0.0)


def ring(begin, compute, size, machine):
    """One ring. `compute[rank][step]` in seconds, `size(step)` bytes that each rank sends to the next in that step. Steps without
    computation may follow. Returns when each rank has done."""
    now, ranks = list(begin), len(begin)
    for step in range(len(compute[0])):
        entered = list(now)
        for rank in range(ranks):
            now[rank] = entered[rank] + compute[rank][step]
            if size(step) > 0:
                for sender, receiver in ((rank, (rank + 1) % ranks), ((rank - 1) % ranks, rank)):
                    both = max(entered[sender], entered[receiver])
                    now[rank] = max(now[rank], both + size(step) / machine.rate(sender, receiver))
    return now


def attention(begin, shape, prompt, machine, back, together):
    """A layer's attention over the prompt on every rank. `together`: both chunks travel in one ring and sums beside the
    computation (decision 0058); otherwise one after the other, sums after each step's computation."""
    ranks = len(begin)
    length = prompt / (2 * ranks)

    def seconds(rank, step, which):
        keys = [chunks(ranks, (rank - step) % ranks)[chunk] for chunk in which]
        of_all = sum(pairs(query, key, length) for query in chunks(ranks, rank) for key in keys)
        return shape.seconds(of_all, back)

    now = list(begin)
    for which in [(0, 1)] if together else [(0,), (1,)]:
        rows = length * len(which)
        state, sums = shape.state_bytes(rows), shape.sum_bytes(rows)
        if ranks == 1:
            now = ring(now, [[seconds(0, 0, which)]], lambda step: 0, machine)
        elif not back:
            compute = [[seconds(rank, step, which) for step in range(ranks)] for rank in range(ranks)]
            now = ring(now, compute, lambda step: state if step + 1 < ranks else 0, machine)
        elif together:
            # A part is zeroed; the arrived sums are read and written and the part is read.
            add = 4 * sums / machine.memory
            compute = [[seconds(rank, step, which) + add for step in range(ranks)] + [0.0] for rank in range(ranks)]
            size = lambda step: (state if step + 1 < ranks else 0) + (sums if step > 0 else 0)
            now = ring(now, compute, size, machine)
        else:
            compute = [[part for step in range(ranks) for part in (seconds(rank, step, which), 0.0)] for rank in range(ranks)]
            size = lambda half: sums if half % 2 else (state if half // 2 + 1 < ranks else 0)
            now = ring(now, compute, size, machine)
    return now


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds by phase of one GPU's update."""

    prompt: int
    answer: int
    gradient: str
    group: int
    capture: float
    score: float
    answers: float
    tail: float

    @property
    def total(self):
        return self.capture + self.score + self.answers + self.tail

    @classmethod
    def all_of(cls, result):
        for run in result["runs"]:
            if run["schedule"] == "paged":
                times = [run[f"{phase}_seconds"] for phase in ("capture", "score", "answers", "tail")]
                yield cls(result["prompt"], result["answer"], run["gradient"], run["group"], *times)


def predict(one, shape, machine, prompt, ranks, together=True, packs=True):
    """The update of `one`, measured on one GPU, at another length and on `ranks` GPUs."""
    grown = prompt / one.prompt

    def over_the_prompt(measured, back):
        # What is no attention, and grows with the rows.
        mixed = shape.layers * shape.seconds(one.prompt * one.prompt / 2.0, back)
        other = max(measured - mixed, 0.0) * grown / ranks
        now = [0.0] * ranks
        for _ in range(shape.layers):
            now = attention([at + other / shape.layers for at in now], shape, prompt, machine, back, together)
        return max(now)

    def of_answers(measured, back, exchange):
        behind = shape.layers * shape.seconds(one.group * one.answer * one.prompt, back)
        rows = one.group * one.answer
        times = -(-rows // MICRO_BLOCK) if packs else one.group
        grown_seconds = measured + behind * (grown - 1.0)
        return grown_seconds / ranks + (exchange * shape.layers * times if ranks > 1 else 0.0)

    exact = one.gradient == "exact"
    return Measured(
        prompt, one.answer, one.gradient, one.group,
        over_the_prompt(one.capture, False),
        of_answers(one.score, False, machine.exchange_score),
        of_answers(one.answers, True, machine.exchange_answer),
        over_the_prompt(one.tail, True) if exact else one.tail,
    )


def results(name):
    """What `bench` printed, line by line."""
    for line in (BENCHMARKS / name).read_text().splitlines():
        record = json.loads(line)
        record = record.get("result", record)
        if "runs" in record:
            yield record


def found(name, commit, prompt, gradient, group):
    """The last such run of a file; `None` if there is none."""
    runs = [run for record in results(name) if record["commit"].startswith(commit) for run in Measured.all_of(record)]
    runs = [run for run in runs if (run.prompt, run.gradient, run.group) == (prompt, gradient, group)]
    return runs[-1] if runs else None


QWEN3_8B, QWEN25_HALF_B = Shape(), Shape(24, 14, 2, 64)
ONE = ("2026-11-30-h200-qwen3-8b-131072-paged.json", "2af7d10")
TWO = ("2026-11-30-two-h200-qwen3-8b-131072-direct.json", "3e864f8")
LONG, SHORT = ("2026-11-29-h200-qwen3-8b-131072-paged.json", "535e515"), ("2026-11-29-h200-qwen3-8b-65536-paged.json", "8a8be5a")
RATES = ("2026-12-01-h200-measured-rates.jsonl", "5806631")
# The program that is predicted from.
NOW = ("2026-12-02-h200-sums-and-first-parts.jsonl", "c890b8e")
# Shape, runs and prompt to predict from, runs, prompt and GPUs that are predicted.
COMPARED = [
    (QWEN3_8B, ONE, 131_072, TWO, 131_072, 2),
    (QWEN3_8B, LONG, 131_072, SHORT, 65_536, 1),
    (QWEN25_HALF_B, RATES, 131_072, RATES, 524_288, 1),
]
CASES = [("exact", 2), ("exact", 8), ("response", 2), ("response", 8)]


def row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def phases(run):
    return [f"{seconds:.2f}" for seconds in (run.capture, run.score, run.answers, run.tail)] + [f"**{run.total:.2f}**"]


def check(machine):
    """Prints simulated / measured; whether captures and the totals of `exact` are near."""
    near = True
    row("prompt, GPUs", "predicted", "gradient", "G", "capture", "score", "answers", "tail", "total", "ratio")
    row(*["---"] * 10)
    for shape, first, prompt, second, longer, ranks in COMPARED:
        for gradient, group in CASES:
            one, measured = found(*first, prompt, gradient, group), found(*second, longer, gradient, group)
            if one is None or measured is None:
                continue
            paper = predict(one, shape, machine, longer, ranks, together=False, packs=False)
            both = [f"{a} / {b}".replace("**", "") for a, b in zip(phases(paper), phases(measured))]
            judged = [(paper.capture, measured.capture)]
            if gradient == "exact":
                judged.append((paper.total, measured.total))
            near &= all(abs(a / b - 1.0) <= OFF_MAX for a, b in judged)
            row(f"{prompt:,}, 1", f"{longer:,}, {ranks}", gradient, group, *both, f"{paper.total / measured.total:.2f}")
    return near


def ladder(one, shape, machine, prompts, counts):
    row("prompt", "GPUs", "gradient", "capture", "score", "answers", "tail", "total", "efficiency", "chunks one by one")
    row(*["---"] * 10)
    for prompt in prompts:
        alone = predict(one, shape, machine, prompt, 1)
        for ranks in counts:
            new = predict(one, shape, machine, prompt, ranks)
            old = predict(one, shape, machine, prompt, ranks, together=False)
            efficiency = alone.total / (ranks * new.total)
            row(f"{prompt:,}", ranks, one.gradient, *phases(new), f"{efficiency:.2f}", f"{old.total:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the measured runs alone")
    parser.add_argument("--run", help="what `longstraw bench` printed on one GPU")
    parser.add_argument("--shape", help="the config.json of that run's model")
    parser.add_argument("--prompt", type=int, action="append")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--link", type=float, default=450.0, help="GB/s one way between GPUs of a node (nominal: 450)")
    parser.add_argument("--node-link", type=float, default=50.0, help="GB/s one way between nodes, a GPU (nominal: 50)")
    arguments = parser.parse_args()
    if (arguments.run is None) != (arguments.shape is None):
        parser.error("--run and --shape belong together")
    machine = Machine(link=arguments.link * 1e9, node_link=arguments.node_link * 1e9)
    prompts = arguments.prompt or [131_072, 262_144, 2_097_152]
    counts = arguments.ranks or [1, 2, 4, 8, 64]
    if arguments.run:
        shape = Shape.read(arguments.shape)
        result = json.loads(pathlib.Path(arguments.run).read_text())
        if result.get("ranks", 1) != 1 or not result["runs"]:
            parser.error("--run must hold updates that `bench --json` measured on one rank")
        for one in Measured.all_of(result):
            print(f"{one.gradient}, G = {one.group}")
            ladder(one, shape, machine, prompts, counts)
        return 0
    near = check(machine)
    if not arguments.check:
        for gradient, group in [("exact", 2), ("exact", 8), ("response", 2)]:
            print()
            print(f"{gradient}, G = {group}")
            ladder(found(*NOW, 131_072, gradient, group), QWEN3_8B, machine, prompts, counts)
    return 0 if near else 1


if __name__ == "__main__":
    raise SystemExit(main())
