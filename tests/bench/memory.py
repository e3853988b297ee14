#!/usr/bin/env python3
"""Training ResNet-110 within a budget of memory, in several ways, beside PyTorch.

    make bench-memory [BENCH_ARGS="--rounds 7 --pythons 'python3 /venv/bin/python'"]

The budget is a quarter of what the step saves for backward.  All ways live in processes of their own and alternate in one run, each
for --seconds at a time; medians.  Prints a Markdown table, and a JSON line for each way with --jsonl.

  plain        nothing leaves
  recompute, swap, auto   the memory plan, by --swap
  accumulate   as many micro-batches as bring the peak within the budget (batch norm then sees micro-batches)
  torch        plain, and torch.utils.checkpoint over groups of blocks: of the group sizes whose peak of resident memory is within that
               of the plan's, the fastest; where none is, the one with the lowest peak (marked)
"""
import argparse
import ctypes
import json
import statistics
import sys
import time

from worker import Worker


def peer(blocks, layout, batch, threads):
    """One way of PyTorch's, over stdin and stdout as build/bench_memory: blocks to a checkpoint, 0 for none."""
    if not blocks:  # keeps freed memory, which spares PyTorch page faults; with checkpoints the peak counts
        ctypes.CDLL("libc.so.6").mallopt(-1, 2**31 - 1)
        ctypes.CDLL("libc.so.6").mallopt(-3, 2**31 - 1)
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.checkpoint import checkpoint
    from peer import FORMATS, MODELS, resident

    torch.set_num_threads(threads)
    torch.manual_seed(1)

    def build(name, n):
        model = MODELS[name][0]().to(memory_format=FORMATS[layout])
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        x = torch.randn(n, 3, 32, 32).to(memory_format=FORMATS[layout])
        labels = torch.arange(n) % 10

        def step():
            sgd.zero_grad(set_to_none=True)
            y, middle = model[:3](x), model[3:-3]
            if blocks:
                for i in range(0, len(middle), blocks):
                    y = checkpoint(middle[i:i + blocks], y, use_reentrant=False)
            else:
                y = middle(y)
            cross_entropy(model[-3:](y), labels).backward()
            sgd.step()
        return step

    build("resnet20", 2)()  # loads its code
    start = resident("VmRSS")
    step = build("resnet110", batch)
    for _ in range(3):
        step()

    def answer(seconds):
        print(json.dumps({"seconds": seconds, "resident": resident("VmHWM") - start, "torch": torch.__version__}), flush=True)
    answer(0)
    for line in sys.stdin:
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < float(line.split()[1]) or not steps:
            step()
            steps += 1
        answer((time.perf_counter() - began) / steps)


class Way(Worker):
    def __init__(self, name, command):
        super().__init__(command)
        self.name, self.times, self.said = name, [], []
        self.first = json.loads(self.answer())

    def run(self, seconds):
        self.tell(f"for {seconds}")
        self.said.append(json.loads(self.answer()))
        self.times.append(self.said[-1]["seconds"])

    def median(self, key="seconds"):
        return statistics.median(said[key] for said in self.said)


def torch_ways(python, most, a):
    """PyTorch without checkpoints, and with the best groups."""
    def start(blocks, layout):
        way = Way("", [python, __file__, "--peer", str(blocks), layout, str(a.batch), str(a.threads)])
        way.run(a.seconds)
        return way

    plains = {layout: start(0, layout) for layout in ("contiguous", "channels_last")}
    layout = min(plains, key=lambda l: plains[l].times[0])
    for other, way in plains.items():
        if other != layout:
            way.end()
    groups = {blocks: start(blocks, layout) for blocks in a.groups}
    within = {b: w for b, w in groups.items() if w.said[0]["resident"] <= most}
    best = min(within, key=lambda b: within[b].times[0]) if within else min(groups, key=lambda b: groups[b].said[0]["resident"])
    for blocks, way in groups.items():
        if blocks != best:
            way.end()
    version = plains[layout].first["torch"].split("+")[0]
    plains[layout].name = f"PyTorch {version}"
    groups[best].name = f"PyTorch {version}, checkpoint of {best} blocks" + ("" if within else " (more memory)")
    return [plains[layout], groups[best]]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--worker", default="build/bench_memory")
    p.add_argument("--model", default="resnet110")
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--seconds", type=float, default=2)
    p.add_argument("--share", type=float, default=4, help="saved bytes to a byte of the budget")
    p.add_argument("--pythons", default="python3")
    p.add_argument("--groups", type=lambda v: [int(n) for n in v.split(",")], default=[2, 3, 4, 6, 9])
    p.add_argument("--jsonl")
    a = p.parse_args()

    def ours(name, *extra):
        return Way(name, [a.worker, "--model", a.model, "--batch", str(a.batch), "--threads", str(a.threads), *extra])

    plain = ours("plain")
    budget = int(plain.first["saved"] / a.share)
    ways = [plain] + [ours(swap, "--budget", str(budget), "--swap", swap) for swap in ("recompute", "swap", "auto")]
    most = max(way.first["resident"] for way in ways[1:])
    for parts in (2, 4, 8, 16, 32):
        way = ours(f"accumulate, {parts} micro-batches", "--accumulate", str(parts))
        if way.first["peak"] <= budget:
            ways.append(way)
            break
        way.end()
    for python in a.pythons.split():
        if a.model == "resnet110":
            ways += torch_ways(python, most, a)
    for way in ways:
        way.said, way.times = [], []
    for _ in range(a.rounds):
        for way in ways:
            way.run(a.seconds)
    mib = 1 / 2**20
    print(f"{a.model}, batch {a.batch}, {a.threads} threads: a step saves {plain.first['saved'] * mib:.0f} MiB; "
          f"budget {budget * mib:.0f} MiB\n")
    print("| way | ms a step | of plain | resident MiB | predicted ms | stall ms, predicted | moved MiB: swapped, recomputed |")
    print("|---|---|---|---|---|---|---|")
    for way in ways:
        last, t = way.said[-1], way.median()
        line = f"| {way.name} | {1e3 * t:.0f} | {t / plain.median():.2f} | {last['resident'] * mib:.0f} |"
        if way.name in ("recompute", "swap", "auto"):
            predicted = way.median("predicted")
            line += (f" {1e3 * predicted:.0f} ({100 * (predicted / t - 1):+.0f} %) | {1e3 * way.median('stall'):.0f}, "
                     f"{1e3 * way.median('predicted_stall'):.0f} | {last['swapped'] * mib:.0f}, {last['recomputed'] * mib:.0f} |")
        else:
            line += " | | |"
        print(line)
        if a.jsonl:
            with open(a.jsonl, "a") as out:
                out.write(json.dumps({"way": way.name, "model": a.model, "batch": a.batch, "budget": budget, "times": way.times, **last}) + "\n")
        way.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
