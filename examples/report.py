#!/usr/bin/env python3
"""One HTML page about runs, side by side, from the JSON lines that programs write with --metrics.

    python3 examples/report.py RUN.jsonl… [-o report.html] [--title TEXT]

Trainings and simulations: loss, accuracy, learning rate and throughput by epoch and by time, final numbers and options.
build/tune: memory over a step, time against budget, time of a sample, minibatches. The page needs no other file. The
script needs matplotlib (Debian: python3-matplotlib).
"""
import argparse
import base64
import html
import io
import itertools
import json
import math
import os
import statistics
import sys

MARK = 'name="generator" content="Tandem'  # a page that holds it may be replaced
EVENTS = "start resume epoch step warning not_finite end tuned minibatch budget memory".split()


def refuse(text, status=2):
    print("report: " + text, file=sys.stderr)
    raise SystemExit(status)


try:
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot
except ImportError:
    refuse("matplotlib is missing: apt-get install python3-matplotlib, or pip install matplotlib", 77)
pyplot.rcParams.update({"svg.fonttype": "none", "text.parse_math": False, "axes.spines.top": False,
                        "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.4, "legend.frameon": False,
                        "figure.constrained_layout.use": True, "figure.constrained_layout.h_pad": 0.1})


# ---- A run, read from its file ---------------------------------------------------------------------------------------
class Run:
    """The lines of a file by their event. Refuses a file that cannot be read, or of which no line is about a run."""

    def __init__(self, path):
        self.path, self.label, self.per_epoch = path, "", math.nan
        self.lines, self.remarks, bad = {event: [] for event in EVENTS}, [], []
        try:
            with open(path, encoding="utf-8-sig", errors="replace", newline="\n") as file:
                lines = file.read().split("\n")
        except OSError as error:
            refuse(f"{path}: cannot be read: {error.strerror}")
        for i, line in enumerate(lines):
            try:
                if line.strip():
                    self.take(json.loads(line, parse_int=float))
            except (ValueError, RecursionError) as error:
                cut = i == len(lines) - 1  # a complete line ends with a newline
                bad.append(f"{path}:{i + 1}: {'cut off in the middle of the line' if cut else error}")
        if not any(self.lines.values()):
            refuse((bad or [f"{path}: no line is about a run"])[0] +
                   ": these are not metrics (a run writes them with --metrics)")
        self.remarks += ["stopped: " + shown(line.get("reason")) for line in self.lines["not_finite"]]
        self.remarks += ["warning: " + shown(line.get("text")) for line in self.lines["warning"]]
        self.remarks += bad[:5] + [f"{path}: {len(bad) - 5} more lines could not be used"] * (len(bad) > 5)
        if not self.lines["end"] and not self.lines["tuned"]:
            self.remarks.append("no end line: the run was killed, or is still going")
        elif self.last("stopped", "end") > 0:
            self.remarks.append("the run was stopped before its last epoch")

    def take(self, line):
        """Keeps a line if its event is known. Raises ValueError if the line is malformed."""
        event = line.get("event") if isinstance(line, dict) else None
        if not isinstance(event, str):
            raise ValueError('not a line of metrics: there is no "event"')
        if event not in EVENTS:
            return
        if number(line, "batches_per_epoch") > 0:
            self.per_epoch = line["batches_per_epoch"]
        if event == "step":
            line["epoch"] = number(line, "step") / self.per_epoch  # 1.5: in the middle of the second epoch
            if math.isnan(line["epoch"]):
                raise ValueError("a step without its number, or before the start line")
        if event == "epoch" and not number(line, "epoch") > (self.last("epoch") if self.lines["epoch"] else -math.inf):
            raise ValueError(f"epoch {shown(line.get('epoch'))} after a later one: are two runs in one file?")
        if event == "resume":  # the epochs and steps after its checkpoint are trained again
            position = number(line, "step") / self.per_epoch + 1e-9
            for name in ("epoch", "step"):
                self.lines[name] = [old for old in self.lines[name] if not old["epoch"] > position]
            self.lines["end"] = []
        self.lines[event].append(line)

    def column(self, name, event="epoch"):
        return [number(line, name) for line in self.lines[event]]

    def of_epochs(self, name, how):
        known = [v for v in self.column(name) if math.isfinite(v)]
        return how(known) if known else math.nan

    def last(self, name, event="epoch"):
        return (self.column(name, event) or [math.nan])[-1]

    def not_finite(self):
        """Whether a non-finite value ended the run: the run was not resumed after it, or its last loss is null."""
        stopped = self.lines["not_finite"] and self.last("stopped", "end") != 0
        return bool(stopped) or any(line.get("train_loss", 0) is None for line in self.lines["epoch"][-1:])


def number(line, name):
    """The number of this name; NaN if there is none, or if it is too large for an axis."""
    value = line.get(name)
    return value if isinstance(value, float) and abs(value) < 1e300 else math.nan


def labels_of(paths):
    """The names of the files, without the words with which all of them begin or end."""
    stems = [os.path.splitext(os.path.basename(path))[0] for path in paths]
    if len(set(stems)) < len(stems):
        stems = paths
    if len(stems) < 2:
        return stems
    head = len(os.path.commonprefix(stems))
    tail = len(os.path.commonprefix([stem[head:][::-1] for stem in stems]))
    while head and stems[0][head - 1].isalnum():
        head -= 1
    while tail and stems[0][-tail].isalnum():
        tail -= 1
    cut = [stem[head:len(stem) - tail] for stem in stems]
    return cut if all(cut) else paths


# ---- Values as text, tables, pictures --------------------------------------------------------------------------------
def printable(what):
    return "".join(c if c.isprintable() else " " for c in what)


def escape(what):
    return html.escape(printable(what))


def short(value):
    if not math.isfinite(value):
        return "–"
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def percent(share):
    return f"{100 * share:.2f} %" if math.isfinite(share) else "–"


def size(value):
    if not math.isfinite(value):
        return "–"
    unit = (value >= 2**10) + (value >= 2**20) + (value >= 2**30)
    return f"{value / 1024**unit:.4g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def shown(value):
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return value if isinstance(value, str) else "yes" if value is True else "no" if value is False else "–"


def flattened(line, prefix=""):
    """Names and texts of the values; names of what is nested are joined by dots."""
    for name, value in line.items():
        if isinstance(value, dict):
            yield from flattened(value, prefix + name + ".")
        elif prefix or name not in ("event", "run", "pictures_of_workers"):
            yield prefix + name, shown(value)


def table(head, rows):
    """rows: cells of text, and whether they are bold."""
    body = "".join(f'<tr{" class=bold" * bold}>' + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>\n"
                   for cells, bold in rows)
    names = "".join(f"<th>{escape(c)}</th>" for c in head)
    return f'<div class="wide"><table><tr>{names}</tr>\n{body}</table></div>\n'


def picture(figure):
    file = io.StringIO()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    data = base64.b64encode(file.getvalue().encode()).decode()
    return f'<div class="wide"><img alt="" src="data:image/svg+xml;base64,{data}"></div>\n'


# ---- Trainings and simulations ---------------------------------------------------------------------------------------
COLUMNS = {"epochs": lambda run: short(len(run.lines["epoch"])),
           "ended": lambda run: "not finite" if run.not_finite() else "–",
           "training loss": lambda run: short(run.last("train_loss")),
           "training accuracy": lambda run: percent(run.last("train_accuracy")),
           "validation accuracy": lambda run: percent(run.last("val_accuracy")),
           "test loss": lambda run: short(run.last("test_loss")),
           "test accuracy": lambda run: percent(run.last("test_accuracy")),
           "best test accuracy": lambda run: percent(run.of_epochs("test_accuracy", max)),
           "images/s (median)": lambda run: short(run.of_epochs("images_per_second", statistics.median_high)),
           "seconds of training": lambda run: short(run.of_epochs("seconds", sum)),
           "seconds of exchange": lambda run: short(run.last("exposed_seconds", "end")),
           "mean delay": lambda run: short(run.last("mean_delay", "end"))}
# title, factor, fields of an epoch, field of a step (drawn behind them)
QUANTITIES = [("Loss", 1, ("test_loss", "train_loss", "val_loss"), "loss"),
              ("Accuracy in %", 100, ("test_accuracy", "train_accuracy", "val_accuracy"), None),
              ("Learning rate", 1, ("learning_rate",), "learning_rate"),
              ("Images per second", 1, ("images_per_second",), None)]
STYLES = {"train": "--", "val": ":"}  # solid: values of the test pictures, and values that no pictures give
MARKERS = "os^D"  # after ten runs the colours repeat with another marker


def draw_training(runs):
    """Each quantity by epoch and by time; None: there is nothing to draw."""
    known = [q for q in QUANTITIES if any(run.of_epochs(name, len) > 0 for run in runs for name in q[2])]
    if not known:
        return None
    figure, axes = pyplot.subplots(len(known), 2, figsize=(12, 3.4 * len(known)), squeeze=False)
    for (title, factor, fields, of_step), (by_epoch, by_time) in zip(known, axes):
        by_epoch.set(title=title, xlabel="epoch")
        by_epoch.xaxis.set_major_locator(pyplot.MaxNLocator(integer=True))
        by_time.set(title=title, xlabel="seconds of training")
        for i, run in enumerate(runs):
            if of_step:
                by_epoch.plot(run.column("epoch", "step"), run.column(of_step, "step"), color=f"C{i % 10}",
                              linewidth=0.5, alpha=0.5)
            times = list(itertools.accumulate(run.column("seconds")))
            for field in fields:
                values = [factor * v for v in run.column(field)]
                empty = all(map(math.isnan, values))
                if empty and not (run.not_finite() and field == fields[0]):  # a run that diverged stays in the legend
                    continue
                part = field.split("_")[0] if len(fields) > 1 else ""
                label = printable(f"{run.label} {part}".strip()) + ": not finite" * run.not_finite()
                for ax, xs in ((by_epoch, run.column("epoch")), (by_time, times)):
                    ax.plot(xs, values, STYLES.get(part, "-"), color=f"C{i % 10}", marker=MARKERS[i // 10 % 4],
                            markersize=3, label=label)
        if 0 < len(by_epoch.get_legend_handles_labels()[1]) <= 12:
            by_epoch.legend(fontsize=8)
    return figure


def rectangle(value):
    """The rows of a table of finite numbers; [] if the value is no such table."""
    rows = value if isinstance(value, list) else []
    good = all(isinstance(row, list) and row and len(row) == len(rows[0]) and
               all(isinstance(v, float) and math.isfinite(v) for v in row) for row in rows)
    return rows if good else []


def draw_classes(runs):
    """The pictures of each worker and class as a map, where workers have parts; the last accuracy of each class."""
    maps = [(run, rectangle(line.get("pictures_of_workers"))) for run in runs
            for line in (run.lines["start"] + run.lines["resume"])[:1]]
    maps = [(run, rows) for run, rows in maps if rows]
    accuracies = [(run, line["class_accuracy"]) for run in runs for line in run.lines["epoch"][-1:]
                  if isinstance(line.get("class_accuracy"), list)]
    if not maps and not accuracies:
        return None
    figure, axes = pyplot.subplots(1, len(maps) + bool(accuracies), squeeze=False,
                                   figsize=(12, 3.6 if len(maps) < 2 else 3))
    for ax, (run, rows) in zip(axes[0], maps):
        ax.imshow(rows, cmap="Blues", aspect="auto", vmin=0)
        ax.set(title=printable(f"Pictures, {run.label}"), xlabel="class", ylabel="worker")
        ax.yaxis.set_major_locator(pyplot.MaxNLocator(integer=True))
        ax.grid(False)
        for (worker, row) in enumerate(rows if len(rows) * len(rows[0]) <= 200 else []):
            for c, n in enumerate(row):
                ax.text(c, worker, f"{n:.0f}", ha="center", va="center", fontsize=6,
                        color="white" if n > 0.6 * max(map(max, rows)) else "black")
    for i, (run, values) in enumerate(accuracies):
        shares = [100 * v if isinstance(v, float) else math.nan for v in values]
        axes[0][-1].plot(shares, "o-", color=f"C{i % 10}", label=printable(run.label))
    if accuracies:
        axes[0][-1].set(title="Accuracy of each class in %, at the end", xlabel="class", ylim=(0, 100))
        axes[0][-1].xaxis.set_major_locator(pyplot.MaxNLocator(integer=True))
        axes[0][-1].legend(fontsize=8)
    return figure


def training_section(runs):
    filled = {name: [value(run) for run in runs] for name, value in COLUMNS.items()}
    filled = {name: cells for name, cells in filled.items() if set(cells) != {"–"}}
    rows = [([run.label] + [cells[i] for cells in filled.values()], False) for i, run in enumerate(runs)]
    figure = draw_training(runs)
    body = "<h2>After the last epoch</h2>\n" + table(["run", *filled], rows) + (picture(figure) if figure else "")
    classes = draw_classes(runs)
    body += "<h2>Classes and workers</h2>\n" + picture(classes) if classes else ""
    options = [dict(flattened((run.lines["start"] + run.lines["resume"] + [{}])[0])) for run in runs]
    rows = []
    for name in dict.fromkeys(name for one in options for name in one):
        values = [one.get(name, "–") for one in options]
        rows.append(([name] + values, len(set(values) - {"–"}) > 1))  # a run without the value does not differ
    head = [""] + [run.label for run in runs]
    return body + ("<h2>Options (bold: they differ)</h2>\n" + table(head, rows) if rows else "")


# ---- build/tune ------------------------------------------------------------------------------------------------------
def draw_tuned(run):
    """Memory over one iteration, time against the budget, time of a sample."""
    minibatch, mib, ms = shown(run.lines["tuned"][-1].get("minibatch")), 1 / 2**20, 1e3
    figure, (memory, against, samples) = pyplot.subplots(1, 3, figsize=(14, 3.6))
    edges = [0, *itertools.accumulate(ms * s for s in run.column("seconds", "memory"))]
    bottom = [0] * (len(edges) - 1)
    for name in ("rest", "kept", "recomputed", "swapped") if bottom else ():
        top = [b + mib * v for b, v in zip(bottom, run.column(name, "memory"))]
        memory.stairs(top, edges, baseline=bottom, fill=True, label=name)
        bottom = top
    memory.axhline(mib * run.last("budget", "tuned"), color="black", linestyle="--", label="budget")
    memory.set(title=f"Memory over one iteration, minibatch {minibatch}", xlabel="ms of computation, without stalls",
               ylabel="MiB")
    for means in dict.fromkeys(shown(line.get("means")) for line in run.lines["budget"]):
        points = [(mib * number(line, "budget"), ms * number(line, "seconds")) for line in run.lines["budget"]
                  if shown(line.get("means")) == means]
        against.plot(*zip(*points), "o-", label=printable(means))
    against.set(title=f"Time against budget, minibatch {minibatch}", xlabel="MiB of budget", ylabel="ms")
    fits = [line for line in run.lines["minibatch"] if number(line, "minibatch") > 0 and not number(line, "least") > 0]
    batches = [line["minibatch"] for line in fits]
    for field, style, label in (("sample_seconds", "o-", "predicted"), ("measured_sample_seconds", "s--", "measured")):
        times = [ms * number(line, field) for line in fits]
        if not all(map(math.isnan, times)):
            samples.plot(batches, times, style, label=label)
    samples.set(title="Time of a sample", xlabel="minibatch", ylabel="ms", xscale="log")
    samples.set_xticks(batches, map(short, batches))
    samples.minorticks_off()
    for ax in (memory, against, samples):
        if ax.get_legend_handles_labels()[1]:
            ax.legend(fontsize=8)
        ax.set_ylim(bottom=0)
    return figure


def tuned_section(run):
    choice, rows = run.lines["tuned"][-1], []
    for line in run.lines["minibatch"]:
        sizes = [size(number(line, field)) for field in ("peak", "swapped", "recomputed")]
        times = [short(1e3 * number(line, field)) for field in
                 "seconds stall exposed sample_seconds measured_sample_seconds".split()]
        if number(line, "least") > 0:
            sizes, times = [f"does not fit: at least {size(line['least'])}"], []
        rows.append(([shown(line.get("minibatch"))] + sizes + times, line.get("minibatch") == choice.get("minibatch")))
    head = "minibatch|peak|swapped|recomputed|ms a step|of these waiting|exchange|ms a sample|measured".split("|")
    facts = [(name, shown(choice.get(name))) for name in ("model", "dtype", "device", "learning_rate", "noise_scale")]
    facts += [(name, size(number(choice, name))) for name in ("budget", "copies_out", "copies_in")]
    return (f"<h2>The minibatch: {escape(run.label)}</h2>\n" + picture(draw_tuned(run)) +
            table([name for name, _ in facts], [([value for _, value in facts], False)]) + table(head, rows))


# ---- The whole page --------------------------------------------------------------------------------------------------
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:24px auto;padding:0 20px}
h1,h2,p{overflow-wrap:anywhere}.wide{overflow-x:auto}img{width:100%;min-width:760px}
table{border-collapse:collapse;margin:12px 0;font-size:14px}td{max-width:26em;overflow-wrap:break-word}
td,th{padding:4px 9px;text-align:left;border-top:1px solid #ccc;vertical-align:top}.bold{font-weight:700}
"""


def page(runs, title):
    trained = [run for run in runs if not run.lines["tuned"]]
    remarks = [r if r.startswith(run.path) else f"{run.label}: {r}" for run in runs for r in run.remarks]
    body = "".join(f"<p>{escape(remark)}</p>\n" for remark in remarks)
    body += training_section(trained) if trained else ""
    body += "".join(tuned_section(run) for run in runs if run.lines["tuned"])
    body += "<h2>Files</h2>\n" + "".join(f"<p>{escape(run.path)}</p>\n" for run in runs)
    return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta {MARK}">\n'
            f"<title>{escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n"
            f"<body>\n<h1>{escape(title)}</h1>\n{body}</body>\n</html>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN.jsonl")
    parser.add_argument("-o", default="report.html", metavar="FILE", help="the page (default report.html)")
    parser.add_argument("--title")
    chosen = parser.parse_intermixed_args()
    runs = [Run(path) for path in chosen.runs]
    for run, run.label in zip(runs, labels_of(chosen.runs)):
        for remark in run.remarks:
            print(remark if remark.startswith(run.path) else f"{run.path}: {remark}", file=sys.stderr)
    counted = f"{len(runs)} run" + "s" * (len(runs) > 1)
    try:
        if os.path.isfile(chosen.o) and os.path.getsize(chosen.o):
            with open(chosen.o, encoding="utf-8", errors="replace") as old:
                if MARK not in old.read(65536):
                    refuse(f"-o {chosen.o}: holds something else than a page of report: choose another name")
        written = page(runs, chosen.title or (runs[0].label if len(runs) == 1 else counted))
        with open(chosen.o, "w", encoding="utf-8", errors="replace") as file:
            file.write(written)
    except OSError as error:
        refuse(f"-o {chosen.o}: cannot be written: {error.strerror}")
    print(f"{chosen.o}: {counted}")


if __name__ == "__main__":
    main()
