#!/usr/bin/env python3
"""The pictures of the READMEs, from measured files: python3 examples/pictures.py [NAME…] writes
examples/pictures/*.svg.

Needs matplotlib; `workers` and `regimes` also scipy, and build/simulate, which knows the strategies. Colours and grey
text are readable on white and on black; the background is left out."""
import csv
import io
import json
import pathlib
import re
import statistics
import sys

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "dist/lab"))
import experiment

COLOURS = ["#2f81d6", "#e07b26", "#2f9e5a", "#c2489b", "#8a6fd1", "#b08a1e", "#d0473f"]
GREY = "#7d8590"
pyplot.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "tandem", "font.family": "sans-serif", "font.size": 11, "text.color": GREY,
    "axes.edgecolor": GREY, "axes.labelcolor": GREY, "axes.titlecolor": GREY, "xtick.color": GREY, "ytick.color": GREY,
    "axes.spines.top": False, "axes.spines.right": False, "axes.prop_cycle": pyplot.cycler(color=COLOURS),
    "legend.frameon": False, "figure.figsize": (7.2, 3.6), "figure.constrained_layout.use": True})


def lines_of(path):
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines()]


def save(figure, name):
    text = io.StringIO()
    figure.savefig(text, transparent=True, metadata={"Date": None})
    on_one_line = re.sub(r"\s*\n\s*", " ", text.getvalue()).replace("> <", "><").strip()
    (ROOT / "examples/pictures" / f"{name}.svg").write_text(on_one_line + "\n")


def training():
    """Loss of each twentieth step and test accuracy of each epoch: build/fashion_mnist --epochs 5 --log-every 20."""
    events = lines_of("examples/pictures/training.jsonl")
    steps = [e for e in events if e["event"] == "step"]
    epochs = [e for e in events if e["event"] == "epoch"]
    per_epoch = events[0]["batches_per_epoch"]
    figure, axes = pyplot.subplots()
    axes.plot([e["step"] / per_epoch for e in steps], [e["loss"] for e in steps], linewidth=1, color=COLOURS[0])
    axes.set(xlabel="epochs of Fashion-MNIST, SmallCNN on two cores", ylabel="training loss", ylim=(0, None))
    axes.yaxis.label.set_color(COLOURS[0])
    right = axes.twinx()
    right.plot([e["epoch"] for e in epochs], [100 * e["test_accuracy"] for e in epochs], "o-", color=COLOURS[1])
    for e in epochs:
        right.annotate(f"{100 * e['test_accuracy']:.1f}", (e["epoch"], 100 * e["test_accuracy"]), (0, 7),
                       textcoords="offset points", ha="center")
    right.set(ylabel="test accuracy in %", ylim=(80, 95))
    right.yaxis.label.set_color(COLOURS[1])
    save(figure, "training")


def speed():
    """A training step beside PyTorch's: make bench."""
    rows = [r for r in lines_of("tests/bench/results/step-avx512-2cores.jsonl") if r["bench"].startswith("train/")]
    figure, axes = pyplot.subplots()
    names = [r["bench"].removeprefix("train/").replace("/", " ") for r in rows]
    bars = axes.barh(names, [r["ratio"] for r in rows], color=COLOURS[0])
    axes.bar_label(bars, [f"{r['ratio']:.2f} × ({r['ours_ms']:.4g} ms)" for r in rows], padding=4, color=GREY)
    axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set(xlabel="training steps in the time of one of PyTorch (two cores, AVX-512)",
             xlim=(0, 1.3 * max(r["ratio"] for r in rows)))
    save(figure, "speed")


def slow_links():
    """Seconds of training and test accuracy on four hosts of two ranks: examples/experiments/slow_links.sh."""
    rows = [r for r in lines_of("examples/experiments/slow_links.jsonl") if r.get("accuracy")]
    figure, both = pyplot.subplots(1, 2, figsize=(9, 3.8))
    for axes, model, link, title in zip(both, ("fashion_mnist", "resnet20"), ("1gbit", "200mbit"), (
            "SmallCNN, Fashion-MNIST, 6 epochs, 1 Gbit/s", "ResNet-20, CIFAR-10, 4 epochs, 200 Mbit/s")):
        some = [r for r in rows if model in r["setup"] and r["link"] == link and "--lr" not in r["setup"]]
        for at, row in enumerate(sorted(some, key=lambda r: r["seconds"])):
            name = row["strategy"].replace("TANDEM_WIRE=bf16/all-reduce", "all-reduce, bf16 on the wire")
            name = name.replace("daso:faithful,", "daso, faithful:").split(":")[0]
            axes.plot(row["seconds"], 100 * row["accuracy"], "o", color=COLOURS[at % len(COLOURS)], label=name)
        axes.set(title=title, xlabel="seconds of training", xlim=(0, None))
        axes.title.set_fontsize(11)
        axes.margins(y=0.15)
        axes.legend(fontsize=9, labelcolor=GREY)
    both[0].set(ylabel="test accuracy in %")
    save(figure, "slow_links")


def memory():
    """A step under budgets from all memory to the least: examples/experiments/memory_curve.sh."""
    text = (ROOT / "examples/experiments/memory_curve.csv").read_text()
    text = [line for line in text.splitlines() if line[0] != "#"]
    rows = list(csv.DictReader(text))
    megabytes = [float(r["budget"]) / 1e6 for r in rows]
    figure, axes = pyplot.subplots()
    axes.plot(megabytes, [float(r["ms"]) for r in rows], "o-", color=COLOURS[0], label="measured")
    axes.plot(megabytes, [float(r["predicted_ms"]) for r in rows], "--", color=GREY, label="predicted")
    axes.set(xlabel="memory budget in MB (ResNet-110, batch 128, two cores)", ylabel="ms a step", ylim=(0, None),
             xlim=(0, None))
    axes.legend()
    save(figure, "memory")


def bias():
    """Mean accuracy of each class, where half of the workers are slow and alone have classes 0 to 4:
    examples/experiments/parts.py bias."""
    runs = [r for r in lines_of("examples/experiments/parts_bias.jsonl") if r["options"]["--slow"]]
    figure, axes = pyplot.subplots(figsize=(8, 3.2))
    for i, rule in enumerate(dict.fromkeys(r["name"] for r in runs)):
        means = [100 * statistics.mean(c) for c in zip(*(r["class_accuracy"] for r in runs if r["name"] == rule))]
        axes.plot(means, "o-" if i < 7 else "s--", label=rule, markersize=3, linewidth=1)  # seven colours
    axes.axvspan(-0.5, 4.5, color=GREY, alpha=0.15, linewidth=0)
    axes.set(xlabel="class (grey: only with workers that take four times as long)",
             ylabel="accuracy in %", ylim=(0, 100))
    axes.legend(fontsize=9, ncols=2, labelcolor=GREY)
    save(figure, "bias")


def final_runs(plan, cluster, which):
    """[(strategy, workers, values of its final runs, whether it has a †)]; which: 0: accuracy in %, 1: seconds to the
    target."""
    plan = experiment.Plan(ROOT / "examples/experiments" / plan)
    cells = experiment.Report(plan, experiment.Results(plan)).searches.items()
    return [(c.strategy.text, c.workers, s.values(which), s.edge) for c, s in cells if c.cluster == cluster]


def workers():
    """Test accuracy and the number of workers, half of which are slow, with 95 % t-intervals: fashion_mnist.json."""
    shown = {"ddc-asgd:lambda={50,25}": "ddc-asgd", "asgd": "asgd", "dana-dc:lambda={2,0.5}": "dana-dc",
             "ddc-asgd:lambda=0": "ddc-asgd without correction", "ringmaster:R={8,16}+asgd": "ringmaster",
             "rennala:B={4,8}": "rennala (32: three runs)"}
    runs = final_runs("fashion_mnist.json", "uneven", 0)
    figure, axes = pyplot.subplots()
    for at, (name, label) in enumerate(shown.items()):
        points = sorted((k * 1.02 ** (at - 2.5), v, edge) for strategy, k, v, edge in runs if strategy == name and v)
        axes.plot([x for x, *_ in points], [statistics.fmean(v) for _, v, _ in points], color=COLOURS[at], linewidth=1)
        for x, values, edge in points:  # beside each other, so that no interval covers another
            axes.errorbar(x, statistics.fmean(values), experiment.half_interval(values), fmt="o", color=COLOURS[at],
                          markersize=5, markerfacecolor="none" if edge else COLOURS[at], capsize=3)
        axes.plot([], [], "o", color=COLOURS[at], label=label)
    axes.set(xscale="log", xlabel="workers, half of them four times slower", ylabel="test accuracy in %")
    axes.set_xticks([4, 16, 32], ["4", "16", "32"])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.legend(fontsize=9, labelcolor=GREY)
    save(figure, "workers")


def regimes():
    """Seconds to 82 % with 64 workers on four clusters, with 95 % t-intervals: regimes.json."""
    clusters = ["fast links, even", "slow links, even", "fast links, uneven", "slow links, uneven"]
    shown = ["ddc-asgd", "asgd", "local-sgd", "outer", "ringmaster", "rennala", "all-reduce"]
    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    for row, cluster in enumerate(clusters):
        runs = {s.split(":")[0]: (v, edge) for s, k, v, edge in final_runs("regimes.json", cluster, 1) if k == 64}
        for at, name in enumerate(shown):
            seconds, edge = runs[name]
            if seconds:
                axes.errorbar(statistics.fmean(seconds), row + 0.1 * (at - 3), xerr=experiment.half_interval(seconds),
                              capsize=3, fmt="o" if len(seconds) == 5 else "x", color=COLOURS[at], markersize=5,
                              markerfacecolor="none" if edge else COLOURS[at])
    for at, name in enumerate(shown):
        axes.plot([], [], "o", color=COLOURS[at], label=name)
    axes.set(xscale="log", xlabel="virtual seconds to 82 % with 64 workers", ylim=(3.5, -0.5))
    axes.set_xticks([10, 20, 50, 100, 200, 500], ["10", "20", "50", "100", "200", "500"])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.set_yticks(range(4), clusters)
    axes.legend(fontsize=9, labelcolor=GREY, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "regimes")


if __name__ == "__main__":
    pictures = {p.__name__: p for p in (training, speed, slow_links, memory, bias, workers, regimes)}
    if not set(sys.argv[1:]) <= set(pictures):
        sys.exit(f"usage: python3 examples/pictures.py [NAME…], from {', '.join(pictures)}")
    for name in sys.argv[1:] or pictures:
        pictures[name]()
