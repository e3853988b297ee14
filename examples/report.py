#!/usr/bin/env python3
"""One HTML page about runs, side by side, from the JSON lines that programs write with --metrics.

    python3 examples/report.py RUN.jsonl… [-o report.html] [--title TEXT]

Trainings and simulations: loss, accuracy, learning rate and throughput by epoch and by time, final numbers and options.
build/tune: memory over a step, time against budget, time of a sample, minibatches. The page needs no other file.
"""
import argparse
import html
import itertools
import json
import math
import os
import statistics
import sys
from dataclasses import dataclass, field

MARK = 'name="generator" content="Tandem'  # a page that holds it may be replaced
EVENTS = "start resume epoch step warning not_finite end tuned minibatch budget memory".split()


def refuse(text, status=2):
    print("report: " + text, file=sys.stderr)
    raise SystemExit(status)


# ---- A run, as far as its file tells ---------------------------------------------------------------------------------
@dataclass
class Run:
    path: str
    label: str = ""
    lines: dict = field(default_factory=lambda: {event: [] for event in EVENTS})
    remarks: list = field(default_factory=list)  # how the run ended, and lines that could not be used
    per_epoch: float = math.nan  # steps

    def take(self, line):
        """Keeps a line, unless it is for other readers. Raises ValueError where it is not what it should be."""
        event = line.get("event") if isinstance(line, dict) else None
        if not isinstance(event, str):
            raise ValueError('not a line of metrics: there is no "event"')
        if event not in EVENTS:
            return
        if number(line, "batches_per_epoch") > 0:
            self.per_epoch = line["batches_per_epoch"]
        if event == "step":
            line["epoch"] = number(line, "step") / self.per_epoch  # 1.5 is half way through the second
            if math.isnan(line["epoch"]):
                raise ValueError("a step without its number, or before the start line")
        if event == "epoch":
            before = self.last("epoch") if self.lines["epoch"] else -math.inf
            if not number(line, "epoch") > before:
                raise ValueError(f"epoch {shown(line.get('epoch'))} after epoch {before:g}: are two runs in one file?")
        if event == "resume":  # what came after its checkpoint is trained again
            position = number(line, "step") / self.per_epoch + 1e-9
            for name in ("epoch", "step"):
                self.lines[name] = [old for old in self.lines[name] if not old["epoch"] > position]
            self.lines["end"] = []
        self.lines[event].append(line)

    def column(self, name):
        return [number(line, name) for line in self.lines["epoch"]]

    def of_epochs(self, name, how):
        known = [v for v in self.column(name) if math.isfinite(v)]
        return how(known) if known else math.nan

    def last(self, name, event="epoch"):
        return number(self.lines[event][-1], name) if self.lines[event] else math.nan

    def named(self, i):
        return swatch(i) + " " + escape(self.label).replace("_", "_<wbr>")


def number(line, name):
    """NaN where there is none, or one that no axis can hold."""
    value = line.get(name)
    return (value if abs(value) > 1e-300 else 0.0) if isinstance(value, float) and abs(value) < 1e300 else math.nan


def no_number(text):
    raise ValueError(text + " is no number of JSON")


def read_run(path):
    """Refuses a file that cannot be read, or of which no line is about a run."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace", newline="\n") as file:
            lines = file.read().split("\n")
    except OSError as error:
        refuse(f"{path}: cannot be read: {error.strerror}")
    run, bad = Run(path), []
    for i, line in enumerate(lines):
        try:
            if line.strip():
                run.take(json.loads(line, parse_int=float, parse_constant=no_number))
        except (ValueError, RecursionError) as error:
            why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            cut = i == len(lines) - 1  # a line that was written to its end has a newline
            bad.append(f"{path}:{i + 1}: {'cut off in the middle of the line' if cut else why}")
    if not any(run.lines.values()):
        why = bad[0] if bad else path + (": no line is about a run" if any(map(str.strip, lines)) else ": empty")
        refuse(why + ": these are not metrics (a run writes them with --metrics)")
    run.remarks += ["stopped: " + shown(line.get("reason")) for line in run.lines["not_finite"]]
    run.remarks += ["warning: " + shown(line.get("text")) for line in run.lines["warning"]]
    run.remarks += bad[:5] + [f"{path}: {len(bad) - 5} more lines could not be used"] * (len(bad) > 5)
    if not run.lines["end"] and not run.lines["tuned"]:
        run.remarks.append("no end line: the run was killed, or is still going")
    elif run.last("stopped", "end") > 0:
        run.remarks.append("the run was stopped before its last epoch")
    return run


def labels_of(paths):
    """The shortest names that still tell the files apart, cut at borders of words: seed1 and seed2 are not 1 and 2."""
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


# ---- Numbers and values as text --------------------------------------------------------------------------------------
def escape(what):
    return html.escape("".join(c if c >= " " else " " for c in what))


def short(value, most=4):
    """0.3299, 21.5k, 1.2e-6"""
    if not math.isfinite(value):
        return "–"
    if min(1e4, 10**most) <= abs(value) < 1e15:
        unit = min(4, int(math.log10(abs(value)) / 3 + 1e-12))
        return f"{value / 1000**unit:.{max(3, most - 1)}g}{'kMGT'[unit - 1]}"
    return f"{value:.{most}g}".replace("e-0", "e-").replace("e+0", "e+")


def size(value):
    if not math.isfinite(value):
        return "–"
    unit = (value >= 2**10) + (value >= 2**20) + (value >= 2**30)
    return f"{value / 1024**unit:.4g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def duration(s):
    return f"{s:.1f} s" if s < 120 else f"{s / 60:.1f} min" if s < 7200 else f"{s / 3600:.1f} h"


def percent(share):
    return f"{100 * share:.2f} %"


def shown(value):
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else short(value, 7)
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return value if isinstance(value, str) else "yes" if value is True else "no" if value is False else "–"


def flattened(line, prefix=""):
    """Names and texts of the values; names of what is nested are joined by dots."""
    for name, value in line.items():
        if isinstance(value, dict):
            yield from flattened(value, prefix + name + ".")
        elif prefix or name not in ("event", "run"):
            yield prefix + name, shown(value)


# ---- Charts: SVG that scales with its box and takes its colours from the page ----------------------------------------
# Hues that differ in lightness too, for eyes that see fewer of them; each at least 4.5 : 1 on its background.
LIGHT = "#2257d6 #c04a00 #11803b #8a35d0 #cf1466 #6e6400 #007f99 #6d727d #14171c".split()
DARK = "#6fa3ff #ff9a4d #5fd67a #c792ff #ff78b0 #e3d74a #45d3e6 #959ca9 #ffffff".split()
# Circle, square, triangle, diamond: after nine runs the colours come again with another marker.
MARKERS = ["m-2.8 0a2.8 2.8 0 1 0 5.6 0a2.8 2.8 0 1 0-5.6 0z", "m-2.6-2.6h5.2v5.2h-5.2z", "m0-3.8l3.6 6.2h-7.2z",
           "m-3.6 0l3.6-3.6 3.6 3.6-3.6 3.6z"]
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 440, 258, 52, 46, 222  # in the SVG's own units


@dataclass
class Line:
    label: str
    points: list  # (x, y); where one is NaN there is a gap
    number: int = 0  # gives the colour and the marker
    style: str = "solid"  # or dashed, dotted, faint, area: filled down to the axis, over earlier ones
    labelled: bool = True  # False: it belongs to another line of its colour

    def colour(self):
        return f"c{self.number % len(LIGHT)}"

    def known(self):
        return [p for p in self.points if not math.isnan(sum(p))]


def marker(x, y, i, tooltip=""):
    shape = MARKERS[i // len(LIGHT) % len(MARKERS)]
    return f'<path class="dot" d="M{x:.1f} {y:.1f}{shape}">{tooltip}</path>'


def swatch(i):
    line = f'<g class="c{i % len(LIGHT)} solid"><path d="M1 5H21"/>{marker(11, 5, i)}</g>'
    return f'<svg class="chart swatch" viewBox="0 0 22 10">{line}</svg>'


def text(kind, x, y, what, anchor="start"):
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(what)}</text>\n'


def round_ticks(low, high, wanted):
    """Round numbers that cover [low, high] in about `wanted` steps: 0, 0.2, 0.4, …"""
    rough = ((high - low) or abs(low) / 10 or 1) / wanted
    power = 10 ** math.floor(math.log10(rough))
    step = power * next(s for s, most in ((1, 1.5), (2, 3.5), (5, 7.5), (10, math.inf)) if rough / power < most)
    last = math.ceil((low if high == low else high) / step - 1e-9) + (high == low)
    return [k * step for k in range(math.floor(low / step + 1e-9), last + 1)]


def separate(heights, gap, low, high):
    """Moves labels apart so that they do not cover each other, as near to their lines as that allows."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    for i in order:
        heights[i] = low = max(heights[i], low)
        low += gap
    for i in reversed(order):
        heights[i] = high = min(heights[i], high)
        high -= gap
    return heights


def thinned(points, most=400):
    """Of many points the lowest and the highest of each stretch."""
    if len(points) <= 2 * most:
        return points
    known = [p for p in points if not math.isnan(p[1])]
    parts = [known[i:i + len(points) // most] for i in range(0, len(known), len(points) // most)]
    ends = ({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])} for part in parts)
    return [p for pair in ends for p in sorted(pair)]


def chart(title, x_unit, y_unit, lines, note="", from_zero=False, holds=(), names={}):
    """holds: the x axis holds these too. names: what stands at which x, instead of round numbers."""
    svg = f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} by {x_unit}">\n'
    svg += text("head", 8, 17, title + (f" ({y_unit})" if y_unit else "")) + text("note", 8, 33, note)
    lines = [line for line in lines if line.known()]
    if not lines:
        return svg + text("note", WIDTH / 2, HEIGHT / 2, "no values", "middle") + "</svg>\n"
    labelled = [line for line in lines if line.labelled]
    labels = [s if len(s) <= 20 else s[:8] + "…" + s[-11:] for s in (line.label for line in labelled)]
    if len(labels) > 12:
        labelled, labels = [], []  # they have no room; the list above the charts has them
    right = WIDTH - 14 - 7.7 * max(map(len, labels), default=0)
    xs = [p[0] for line in lines for p in line.known()] + list(holds)
    ys = [p[1] for line in lines for p in line.known()] + [0] * from_zero
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    if y1 - y0 <= 1e-12 * max(abs(y0), abs(y1)):  # a constant gets room around it
        room = abs(y0) / 10 or 1
        y0, y1 = y0 - (0 if from_zero else room), y1 + room
    y_ticks = round_ticks(y0, y1, 5)
    y0, y1 = y_ticks[0], y_ticks[-1]
    x_ticks = list(names)[::len(names) // 9 + 1] or round_ticks(x0, x1, min(6, int((right - LEFT) / 50)))
    if x0 == x1:  # one point stands in the middle
        x0, x1, x_ticks = x0 - 0.5, x1 + 0.5, [x0]

    def place(point):
        x, y = point
        return LEFT + (x - x0) / (x1 - x0) * (right - LEFT), TOP + (y1 - y) / (y1 - y0) * (BOTTOM - TOP)

    for tick in y_ticks:
        y = place((x0, tick))[1]
        svg += f'<path class="grid" d="M{LEFT} {y:.1f}H{right:.1f}"/>\n'
        svg += text("tick", LEFT - 6, y + 4, short(0 if abs(tick) < 1e-12 * (y1 - y0) else tick, 3), "end")
    for tick in x_ticks:
        whole = x_unit != "epoch" or abs(tick - round(tick)) < 1e-9
        if whole and x0 - 1e-9 * abs(x0) <= tick <= x1 + 1e-9 * abs(x1):
            svg += text("tick", place((tick, y0))[0], BOTTOM + 16, names.get(tick) or short(tick), "middle")
    svg += f'<path class="axis" d="M{LEFT} {BOTTOM}H{right:.1f}"/>\n'
    svg += text("note", (LEFT + right) / 2, HEIGHT - 4, x_unit, "middle")
    for line in lines:
        path, pen, markers, known = "", "M", "", line.known()
        for point in line.points:
            gap = math.isnan(sum(point))
            path += "" if gap else "{}{:.1f} {:.1f}".format(pen, *place(point))
            pen = "M" if gap else "L"
        if line.style == "area":
            path += f"V{BOTTOM}H{place(known[0])[0]:.1f}Z"
        elif line.style != "faint":
            for x, y in known[::math.ceil(len(known) / 60)]:
                told = f"{line.label}, {x_unit} {names.get(x) or short(x)}: {short(y)} {y_unit}".strip()
                markers += marker(*place((x, y)), line.number, f"<title>{escape(told)}</title>")
        many = " many" if len(known) > 30 else ""
        svg += f'<g class="{line.colour()} {line.style}{many}"><path d="{path}"/>{markers}</g>\n'
    ends = [place(line.known()[-1]) for line in labelled]
    heights = separate([y for _, y in ends], 14, TOP + 6, BOTTOM - 2)
    for line, label, (x, y), height in zip(labelled, labels, ends, heights):
        if abs(height - y) > 5 or x < right - 3:
            svg += f'<path class="lead {line.colour()}" d="M{x + 3:.1f} {y:.1f}L{right + 6:.1f} {height:.1f}"/>\n'
        svg += text("end " + line.colour(), right + 8, height + 4, label)
    return svg + "</svg>\n"


def table(head, rows, letters, kind=""):
    """rows: (class, cells as HTML); a cell may bring its own tag. letters: of the longest name on the left."""
    def cells(row, tag):
        return "".join(c if c.startswith(("<td", "<th")) else f"<{tag}>{c}</{tag}>" for c in row)
    body = "".join(f'<tr class="{of}">{cells(row, "td")}</tr>\n' for of, row in rows)
    return (f'<div class="scroll"><table class="{kind}" style="--first:{letters}ch">\n'
            f'<thead><tr>{cells(head, "th")}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n')


# ---- Trainings and simulations ---------------------------------------------------------------------------------------
# name, value, as text, what is better: more (1), less (-1), neither
COLUMNS = [("epochs", lambda run: len(run.lines["epoch"]), short, 0),
           ("training loss", lambda run: run.last("train_loss"), short, 0),
           ("training accuracy", lambda run: run.last("train_accuracy"), percent, 0),
           ("validation accuracy", lambda run: run.last("val_accuracy"), percent, 1),
           ("test loss", lambda run: run.last("test_loss"), short, -1),
           ("test accuracy", lambda run: run.last("test_accuracy"), percent, 1),
           ("best test accuracy", lambda run: run.of_epochs("test_accuracy", max), percent, 0),
           ("images/s", lambda run: run.of_epochs("images_per_second", statistics.median_high), short, 1),
           ("training time", lambda run: run.of_epochs("seconds", sum), duration, 0),
           ("exchange wait", lambda run: run.last("exposed_seconds", "end"), duration, 0),
           ("mean delay", lambda run: run.last("mean_delay", "end"), short, 0)]

# title, unit, factor, from zero?, fields with what they are, the step's field that is drawn behind them
SETS = {"test": "test", "train": "training", "val": "validation"}
QUANTITIES = [("Loss", "", 1, False, {name + "_loss": what for name, what in SETS.items()}, "loss"),
              ("Accuracy", "%", 100, False, {name + "_accuracy": what for name, what in SETS.items()}, None),
              ("Learning rate", "", 1, True, {"learning_rate": ""}, "learning_rate"),
              ("Throughput", "images/s", 1, True, {"images_per_second": ""}, None)]
STYLES = {"test": "solid", "training": "dashed", "validation": "dotted", "": "solid"}  # the same in all charts


def final_numbers(runs):
    columns = [c for c in COLUMNS if any(math.isfinite(c[1](run)) for run in runs)]
    rows = []
    for i, run in enumerate(runs):
        cells = [run.named(i)]
        for _, value, as_text, better in columns:
            mine = value(run)
            leads = better and len(runs) > 1 and not any(better * value(other) > better * mine for other in runs)
            cell = as_text(mine) if math.isfinite(mine) else "–"
            cells.append(f'<td class="best">{cell}</td>' if leads and math.isfinite(mine) else cell)
        rows.append(("", cells))
    note = "<p>After the last epoch that a file holds; images/s is the median over epochs.</p>\n"
    head = ["run"] + [c[0] for c in columns]
    return "<h2>At the end</h2>\n" + table(head, rows, max(len(run.label) for run in runs) + 7) + note


def quantity_chart(runs, quantity, longest):
    """longest: seconds of the longest run, for a chart by time; 0: by epoch."""
    title, y_unit, factor, from_zero, fields, of_step = quantity
    fields = {name: what for name, what in fields.items() if any(run.of_epochs(name, len) > 0 for run in runs)}
    if not fields:
        return ""
    scale, unit = next(s for s in ((3600, "hours"), (60, "minutes"), (1, "seconds")) if longest > 2 * s[0] or s[0] == 1)
    lines = []
    for i, run in enumerate(runs):
        if of_step and not longest:
            steps = [(step["epoch"], number(step, of_step)) for step in run.lines["step"]]
            lines.append(Line(run.label, thinned(steps), i, "faint", False))
        xs = [s / scale for s in itertools.accumulate(run.column("seconds"))] if longest else run.column("epoch")
        for k, (name, what) in enumerate(fields.items()):
            points = [(x, factor * y) for x, y in zip(xs, run.column(name))]
            if len(runs) == 1 and len(fields) > 1:
                lines.append(Line(what, points, i, STYLES[what]))
            else:  # a label is a run's, at its first curve
                lines.append(Line(run.label, points, i, STYLES[what], k == 0 and len(runs) > 1))
    note = ", ".join(f"{STYLES[what]}: {what}" for what in fields.values() if what)
    x_unit, holds = (f"{unit} of training", (0, longest / scale)) if longest else ("epoch", ())
    return f"<div>{chart(title, x_unit, y_unit, lines, note, from_zero, holds)}</div>\n"


def options_table(runs):
    options = [dict(flattened((run.lines["start"] + run.lines["resume"] + [{}])[0])) for run in runs]
    names = dict.fromkeys(name for one in options for name in one)
    rows = []
    for name in names:
        values = [one.get(name, "–") for one in options]
        differs = len(set(values) - {"–"}) > 1  # a run that does not say does not differ
        kind = "" if len(runs) == 1 else "differs" if differs else "same"
        rows.append((kind, [f"<th>{escape(name)}</th>"] + [escape(v) for v in values]))
    head = [""] + [run.named(i) for i, run in enumerate(runs)]
    return "<h2>Options</h2>\n" + table(head, rows, max(map(len, names)), "options") if rows else ""


# ---- build/tune ------------------------------------------------------------------------------------------------------
TIMES = "seconds stall exposed sample_seconds measured_sample_seconds".split()


def tuned_section(run, heading):
    choice, ms, mib = run.lines["tuned"][-1], 1e3, 1 / 2**20
    budget, minibatch = mib * number(choice, "budget"), shown(choice.get("minibatch"))

    # Filled areas, each over those before it; a level lasts as long as its event.
    areas = [Line("the rest", [], 7, "area"), Line("kept", [], 0, "area"), Line("recomputed", [], 2, "area"),
             Line("swapped", [], 1, "area")]
    time = 0
    for line in run.lines["memory"]:
        level, end = 0, time + ms * number(line, "seconds")
        for area, name in zip(areas, ("rest", "kept", "recomputed", "swapped")):
            level += mib * number(line, name)
            area.points += [(time, level), (end, level)]
        time = end
    memory = areas[::-1] + [Line("budget", [(0, budget), (time, budget)], 8, "dashed")]
    against = {}
    for line in run.lines["budget"]:
        means = shown(line.get("means"))
        against.setdefault(means, Line(means, [], len(against)))
        against[means].points.append((mib * number(line, "budget"), ms * number(line, "seconds")))
    predicted, measured, names, rows = Line("predicted", []), Line("measured", [], 1, "dashed"), {}, []
    for line in run.lines["minibatch"]:
        name = shown(line.get("minibatch"))
        cells = [size(number(line, field)) for field in ("peak", "swapped", "recomputed")]
        times = [ms * number(line, field) for field in TIMES]
        if number(line, "least") > 0:
            cells, times = [f'<td colspan="8">does not fit: at least {size(line["least"])}</td>'], []
        elif number(line, "minibatch") >= 1:
            x = math.log2(line["minibatch"])
            names[x] = name
            predicted.points.append((x, times[-2]))
            measured.points.append((x, times[-1]))
        rows.append(("best" if name == minibatch else "", [escape(name)] + cells + [short(t) for t in times]))
    told = ", ".join(shown(choice.get(name)) for name in ("model", "dtype", "device"))
    told += f". Budget {size(number(choice, 'budget'))}; copies {size(number(choice, 'copies_out'))}/s out, "
    told += f"{size(number(choice, 'copies_in'))}/s in. Learning rate {short(number(choice, 'learning_rate'))}; "
    told += f"gradient noise scale {short(number(choice, 'noise_scale'))}."
    title = ", minibatch " + minibatch
    charts = [chart("Memory over one iteration" + title, "ms of computation, without stalls", "MiB", memory,
                    from_zero=True),
              chart("Time against budget" + title, "MiB of budget", "ms", list(against.values()), from_zero=True),
              chart("Time of a sample", "minibatch", "ms", [predicted, measured], from_zero=True, names=names)]
    drawn = "".join(f"<div>{svg}</div>\n" for svg in charts)
    head = "minibatch|peak|swapped|recomputed|ms a step|of these waiting|exchange|ms a sample|measured".split("|")
    return (f'<h2>{escape(heading)}</h2>\n<p>{escape(told)}</p>\n<div class="charts">\n{drawn}</div>\n'
            + table(head, rows, 13))


# ---- The whole page --------------------------------------------------------------------------------------------------
STYLE = """*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 20px 48px;overflow-wrap:break-word}
h1{font-size:24px;line-height:1.25;margin:0 0 4px}h2{font-size:17px;margin:34px 0 10px;break-after:avoid}
p{margin:4px 0 12px;color:var(--soft);max-width:75ch}
.runs{display:flex;flex-wrap:wrap;gap:6px 18px;list-style:none;margin:12px 0 0;padding:0}
.remarks{margin:12px 0 0;padding:8px 12px 8px 30px;border-left:4px solid #d08700;background:var(--card)}
.remarks,.options td{overflow-wrap:anywhere}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:14px;margin-bottom:14px}
.charts>div,.scroll{background:var(--card);border:1px solid var(--rule);border-radius:8px}
.charts>div{padding:10px 10px 6px;break-inside:avoid}.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}tr{break-inside:avoid}
th,td{padding:6px 9px;text-align:right;border-top:1px solid var(--rule);white-space:nowrap}
thead th{border-top:0;color:var(--soft);font-weight:600;white-space:normal;vertical-align:bottom}
tr>:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:min(var(--first),19ch,35vw)}
tr>:first-child{position:sticky;left:0;background:var(--card)}
.options td,.options th{text-align:left;white-space:normal;overflow-wrap:break-word;max-width:20em;vertical-align:top}
td[colspan]{text-align:left}
.differs *,.best,.best *{font-weight:700}.same *{color:var(--soft);font-weight:400}
svg.chart{display:block;overflow:visible;width:100%;height:auto;font:12px system-ui,sans-serif}
svg.swatch{display:inline-block;width:22px}
.chart text{fill:var(--soft);font-variant-numeric:tabular-nums}
.chart .head{font-weight:600;font-size:14px;fill:var(--ink)}
.chart .end{font-weight:600;font-size:11px}.grid{stroke:var(--rule)}.axis{stroke:var(--soft)}
.lead{fill:none;opacity:.6;stroke-dasharray:1 3}
.chart g path{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.chart g .dot{stroke:none}
.chart .dashed path{stroke-dasharray:5 4;stroke-width:1.5}.chart .dotted path{stroke-dasharray:1 4}
.dashed .dot,.dotted .dot,.many .dot{transform:scale(.65);transform-box:fill-box;transform-origin:center}
.chart .faint path{stroke-width:1;opacity:.45}.chart .area path{stroke:none}
@media (max-width:520px){main{padding:16px 12px 36px}h1{font-size:20px}
.chart .tick,.chart .note{font-size:14px}.chart .end{font-size:12px}}
@media print{:root{--page:#fff}main{max-width:none;padding:0}.charts{grid-template-columns:1fr 1fr}
.scroll{overflow:visible}.scroll tr>*{position:static;white-space:normal;min-width:0;padding:3px 4px;font-size:9px}}
"""


def style():
    light, dark = ("".join(f"--c{i}:{c};" for i, c in enumerate(colours)) for colours in (LIGHT, DARK))
    light += "--page:#fbfbfa;--card:#fff;--ink:#1c1f24;--soft:#5c6570;--rule:#e1e4e8"
    dark += "--page:#14161a;--card:#1c1f25;--ink:#e8eaed;--soft:#a2abb6;--rule:#333942"
    css = f":root{{color-scheme:light dark;{light}}}\n"
    css += f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    for i in range(len(LIGHT)):
        css += f".chart .c{i} path,.chart path.c{i}{{stroke:var(--c{i})}}"
        css += f".chart text.c{i},.chart .c{i} .dot,.chart .c{i}.area path{{fill:var(--c{i})}}\n"
    return css + STYLE


def page(runs, title):
    trained = [run for run in runs if not run.lines["tuned"]]
    title = escape(title)
    remarks = [r if r.startswith(run.path) else f"{run.label}: {r}" for run in runs for r in run.remarks]
    body = "".join(f"<li>{run.named(i)}</li>\n" for i, run in enumerate(trained) if len(trained) > 1)
    body = f'<ul class="runs">\n{body}</ul>\n' if body else ""
    if remarks:
        body += '<ul class="remarks">\n' + "".join(f"<li>{escape(remark)}</li>\n" for remark in remarks) + "</ul>\n"
    if trained:
        longest = max(1e-9, *(run.of_epochs("seconds", sum) for run in trained))
        charts = "".join(quantity_chart(trained, q, by) for q in QUANTITIES for by in (0, longest))
        body += final_numbers(trained)
        body += f'<h2>By epoch and by time</h2>\n<div class="charts">\n{charts}</div>\n' if charts else ""
        body += options_table(trained)
    for run in runs:
        if run.lines["tuned"]:
            body += tuned_section(run, "The minibatch" + (f": {run.label}" if len(runs) > 1 else ""))
    body += "<h2>Files</h2>\n<ul>\n" + "".join(f"<li>{escape(run.path)}</li>\n" for run in runs) + "</ul>\n"
    return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta {MARK}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>\n{style()}</style>\n</head>\n"
            f"<body>\n<main>\n<h1>{title}</h1>\n{body}</main>\n</body>\n</html>\n")


class Once(argparse.Action):
    def __call__(self, parser, chosen, value, option=None):
        if getattr(chosen, self.dest) is not None:
            refuse(f"{option} is given twice ({getattr(chosen, self.dest)} and {value})")
        setattr(chosen, self.dest, value)


class Arguments(argparse.ArgumentParser):
    def error(self, message):
        refuse(message + ". Try: --help")


def main():
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("runs", nargs="*", metavar="RUN.jsonl")
    parser.add_argument("-o", action=Once, metavar="FILE", help="the page (default report.html)")
    parser.add_argument("--title", action=Once)
    chosen = parser.parse_intermixed_args()
    paths, output = chosen.runs, chosen.o or "report.html"
    if not paths:
        refuse("which runs? Name the files that they wrote with --metrics")
    runs = [read_run(path) for path in paths]
    for i, path in enumerate(paths):
        if os.path.exists(output) and os.path.samefile(path, output):
            refuse(f"-o {output} would overwrite a run that is to be read")
        for other in paths[:i]:
            if os.path.samefile(path, other):
                refuse(f"{other} and {path} are the same run: name it once")
    for run, run.label in zip(runs, labels_of(paths)):
        for remark in run.remarks:
            print(remark if remark.startswith(run.path) else f"{run.path}: {remark}", file=sys.stderr)
    counted = f"{len(runs)} run" + "s" * (len(runs) > 1)
    written = page(runs, chosen.title or (runs[0].label if len(runs) == 1 else counted))
    try:
        if os.path.isfile(output) and os.path.getsize(output):
            with open(output, encoding="utf-8", errors="replace") as old:
                if MARK not in old.read(65536):
                    refuse(f"-o {output}: is there and holds something else than a page of report: choose another name")
        with open(output, "w", encoding="utf-8", errors="replace") as file:
            file.write(written)
    except OSError as error:
        refuse(f"-o {output}: cannot be written: {error.strerror}")
    try:
        os.write(1, f"{output}: {counted}\n".encode(errors="replace"))
    except OSError as error:
        refuse(f"standard output could not be written: {error.strerror}", 1)


if __name__ == "__main__":
    main()
