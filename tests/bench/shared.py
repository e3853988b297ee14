#!/usr/bin/env python3
"""What training programs on the same cores leave of each other's speed: `make bench-shared`.

    shared.py [--models mlp,smallcnn,resnet20] [--at-once 1,2,4] [--seconds 2] [--rounds 3]
              [--worker build/bench_shared] [--python /usr/bin/python3]

Each program trains with its default threads, as if it were alone. Ours are bench_shared; the peers are peer.py, where the
Python has torch. The sizes alternate in each round; a cell is the median over rounds of the mean images/s of one program, and
its share of the speed alone.
"""
import argparse
import os
import statistics
import subprocess
import sys

from worker import Worker

HERE = os.path.dirname(os.path.abspath(__file__))
BATCH = 128


def started(command, start=None):
    worker = Worker(command)
    if start:
        worker.answer(), worker.tell(start)
    worker.answer()
    return worker


def together(workers, seconds):
    """Mean images/s of programs that run at once."""
    for w in workers:
        w.tell(f"for {seconds}")
    answers = [w.answer().split() for w in workers]
    return statistics.mean([float(v) if name == "images/s" else BATCH * 1000 / float(v) for name, v, *_ in answers])


def measure(start, sizes, rounds, seconds):
    workers = [start() for _ in range(max(sizes))]  # those that wait for a line use no core
    rates = {n: [] for n in sizes}
    for _ in range(rounds):
        for n in sizes:
            rates[n].append(together(workers[:n], seconds))
    for w in workers:
        w.end()
    return [statistics.median(rates[n]) for n in sizes]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="mlp,smallcnn,resnet20")
    parser.add_argument("--at-once", default="1,2,4")
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", default="build/bench_shared")
    parser.add_argument("--python", default="/usr/bin/python3")
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    sizes = [int(n) for n in args.at_once.split(",")]
    has_torch = not args.no_peer and subprocess.run([args.python, "-c", "import torch"], stderr=subprocess.DEVNULL).returncode == 0
    print(f"{'images/s of each':20}" + "".join(f"{n:>9} at once" + " " * 6 for n in sizes))
    for model in args.models.split(","):
        programs = [("ours", lambda: started([args.worker, model]))]
        if has_torch:
            peer = [args.python, os.path.join(HERE, "peer.py"), "--threads", str(len(os.sched_getaffinity(0))), "--keep-memory"]
            programs.append(("PyTorch", lambda: started(peer, f"{model} f32 {BATCH} contiguous")))
        for name, start in programs:
            rates = measure(start, sizes, args.rounds, args.seconds)
            cells = "".join(f"{r:10.0f} ({r / rates[0]:4.2f})      " for r in rates)
            print(f"{model:9} {name:9} {cells.rstrip()}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
