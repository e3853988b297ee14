#!/usr/bin/env python3
"""The pictures of the READMEs, from measured files: python3 examples/pictures.py writes examples/pictures/*.svg.

Needs matplotlib. Colours and grey text are readable on white and on black; the background is left out."""
import csv
import io
import json
import pathlib
import re
import statistics

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

ROOT = pathlib.Path(__file__).resolve().parents[1]
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
    text = [line for line in (ROOT / "examples/experiments/memory_curve.csv").read_text().splitlines() if line[0] != "#"]
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


if __name__ == "__main__":
    for picture in (training, speed, slow_links, memory, bias):
        picture()
