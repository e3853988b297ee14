#!/usr/bin/env python3
"""Workers whose data differ, in the simulator: the bias of asynchronous rules, and the published table of NIID-Bench.

    python3 examples/experiments/parts.py bias|table              carries out what is missing, and prints the table
    python3 examples/experiments/parts.py bias|table --show       the table of the runs that there are

As many runs of build/simulate as there are cores go side by side. Each is a line of parts_bias.jsonl or
parts_table.jsonl as soon as it ends, so a study may be interrupted anywhere.

bias: half of 10 workers take four times as long, and they alone have classes 0 to 4 of Fashion-MNIST. No momentum, except the mean of
    changes that heloco is made of.
table: CIFAR-10 (arXiv 2102.02079, the network conv 5×5×6, conv 5×5×16, 120, 84, 10; last accuracy, in %)."""
import argparse
import json
import os
import pathlib
import statistics
import sys
from concurrent import futures

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "dist/lab"))
import experiment

RULES = ["asgd", "rescaled", "ddc-asgd", "ringmaster:R=10", "delay-adaptive", "rennala:B=10", "fedbuff:B=10",
         "heloco"]
BIAS = [{"name": rule, "seed": seed, "options": {
    "--strategy": rule, "--seed": seed, "--workers": 10, "--partition": "groups:n=2", "--slow": slow,
    "--model": "mlp", "--epochs": 3, "--batch": 64, "--lr": 0.05, "--momentum": 0.9 if rule == "heloco" else 0, "--schedule": "cosine",
    "--evaluate-on": "test"}} for slow in ("classes:0-4:4", "") for seed in range(1, 6) for rule in RULES]

PUBLISHED = {"dirichlet:alpha=0.5": (68.2, 67.9, 69.8, 66.8), "classes:k=2": (49.8, 50.7, 49.1, 46.5),
             "sizes:beta=0.5": (72.0, 71.2, 62.4, 10.0)}
METHODS = ["fedavg:epochs=10", "fedprox:epochs=10,mu={}", "scaffold:epochs=10", "fednova:epochs=10"]
SAMPLED = {"dirichlet:alpha=0.5": 59.4, "classes:k=2": 45.3, "equal": 65.6}


def cell(partition, method, workers, rounds, seed):
    return {"name": f"{partition}, {workers} workers, {method}", "seed": seed, "options": {
        "--strategy": method, "--partition": partition, "--workers": workers, "--epochs": 10 * rounds, "--seed": seed,
        "--data-set": "cifar10", "--model": "lenet5", "--augment": None, "--reflect": None, "--mean": 0, "--std": 1, "--batch": 64,
        "--lr": 0.01, "--momentum": 0.9, "--weight-decay": 1e-5, "--evaluate-every": 100, "--evaluate-on": "test"}}


TABLE = [cell(p, m.format(0.001 if p.startswith("dirichlet") else 0.01), 10, 50, seed)
         for seed in (1, 2, 3) for p in PUBLISHED for m in METHODS if seed == 1 or m == METHODS[0]]
TABLE += [cell(p, "fedavg:epochs=10,sample=0.1", 100, 500, 1) for p in SAMPLED]


def key(run):
    return json.dumps([run["name"], run["seed"], run["options"]])


def carry_out(runs, path, done):
    def simulated(run):
        words = [w for name, value in run["options"].items() if value != ""
                 for w in ([name] if value is None else [name, value])]
        line = experiment.simulate(*words)
        experiment.require(not line["why"], f"{run['name']}: {line['why']}")
        return run, line

    missing = [run for run in runs if key(run) not in done]
    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:  # a run has one thread
        try:
            for ended in futures.as_completed([pool.submit(simulated, run) for run in missing]):
                run, line = ended.result()
                kept = {name: line.get(name) for name in ("status", "test", "class_accuracy", "wall_seconds", "made_by")}
                done[key(run)] = run | kept
                with open(path, "a") as file:
                    print(json.dumps(done[key(run)]), file=file)
                print(f"{run['name']}, seed {run['seed']}: {percent(line.get('test'))} in {line['wall_seconds']:.0f} s",
                      flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # also after Ctrl-C: nothing else is begun
            raise


def percent(share):
    return "diverged" if share is None else f"{100 * share:.1f} %"


def interval(values):
    if len(values) < 2:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {experiment.half_interval(values):.1f}"


def halves(run):
    """Mean accuracy of classes 0 to 4 and of classes 5 to 9, in points."""
    c = run["class_accuracy"]
    return 100 * statistics.mean(c[:5]), 100 * statistics.mean(c[5:])


def show_bias(done):
    print("| rule | classes 0–4 (slow workers) | classes 5–9 | difference | the same with even speeds |\n|---|---|---|---|---|")
    for rule in RULES:
        cells = []
        for slow in ("classes:0-4:4", ""):
            pairs = [halves(r) for r in done.values() if r["name"] == rule and r["options"]["--slow"] == slow]
            if pairs:
                low, high = zip(*pairs)
                gap = interval([a - b for a, b in pairs])
                cells += [interval(low), interval(high), gap] if slow else [gap]
            elif not slow and cells:
                cells += ["–"]
        if cells:
            print(f"| `{rule}` | " + " | ".join(cells) + " |")


def show_table(done):
    print("| partition | method | published | ours |\n|---|---|---|---|")
    names = {run["name"]: run for run in TABLE}
    for name in names:
        ended = [done[key(run)] for run in TABLE if run["name"] == name and key(run) in done]
        ours = [100 * run["test"] for run in ended if run["test"]]
        partition, workers, method = name.split(", ", 2)
        column = [m.split(":")[0] for m in METHODS].index(method.split(":")[0])
        published = SAMPLED[partition] if workers.startswith("100") else PUBLISHED[partition][column]
        print(f"| {partition}, {workers} | {method} | {published} | {interval(ours) if ours else '–'} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["bias", "table"])
    parser.add_argument("--show", action="store_true")
    chosen = parser.parse_args()
    path = HERE / f"parts_{chosen.study}.jsonl"
    done = {key(r): r for r in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    if not chosen.show:
        carry_out(BIAS if chosen.study == "bias" else TABLE, path, done)
    (show_bias if chosen.study == "bias" else show_table)(done)


if __name__ == "__main__":
    try:
        main()
    except experiment.Refused as e:
        raise SystemExit(f"parts: {e}") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the same command goes on") from None
