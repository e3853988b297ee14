"""The plan of an experiment (PLAN.md): its fields, the strategies whose constants are searched, and a run of it by
build/simulate."""
import collections
import decimal
import functools
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import typing

SIMULATE = pathlib.Path(__file__).resolve().parents[2] / os.environ.get("BUILD", "build") / "simulate"


class Refused(ValueError):
    """What is wrong, where, and what to do."""


# One run. strategy: its text with its constants filled in; final: measured on test pictures, else on held-out ones.
Trial = collections.namedtuple("Trial", "strategy workers cluster rate momentum epochs seed final")
# What a search is for. strategy: a Strategy.
Cell = collections.namedtuple("Cell", "strategy workers cluster")


def exact(value):
    """The shortest text of a number, as std::to_chars has it: headers of results hold it."""
    number = decimal.Decimal(repr(float(value))).normalize()
    return min(f"{number:f}", f"{float(value):.{len(number.as_tuple().digits) - 1}e}", key=len)


def simulate(arguments):
    """The line of JSON that build/simulate prints."""
    if not SIMULATE.exists():
        raise Refused(f"{SIMULATE}: is not there: make builds it")
    run = subprocess.run([SIMULATE, "--json", *map(str, arguments)], capture_output=True, text=True)
    if run.returncode:
        raise Refused(run.stderr.strip().removeprefix("simulate: ") or f"{SIMULATE} ended with {run.returncode}")
    return json.loads(run.stdout)


@functools.cache
def dry_run(strategy, workers):
    """"momentum": whether a strategy's rule keeps one; "why": why the simulator refuses it (empty: it does not)."""
    try:
        return simulate(["--dry-run", "--strategy", strategy, "--workers", workers]) | {"why": ""}
    except Refused as e:
        return {"why": str(e)}


# ---- the fields ------------------------------------------------------------------------------------------------------
# Each field's default. A value must have the type of the default. The simulator checks its own ranges.
FIELDS = {
    "title": "", "data_set": "fashion-mnist", "model": "lenet5", "dtype": "f32", "augment": False,
    "schedule": "constant", "epochs": 4, "batch": 64, "val": 5000, "weight_decay": 5e-4, "evaluate_every": 1.0,
    "target": 0.0, "choose_by": "accuracy", "strategies": [""], "workers": [1], "clusters": [{"name": "even"}],
    "rates": [0.0], "momenta": [0.9, 0.7, 0.5, 0.0], "search": 12, "tuning_epochs": 1, "tuning_seeds": 3,
    "tuning_seed": 1001, "finalists": 3, "seeds": 5}
CLUSTER_FIELDS = {"name": "", "shape": 100.0, "slow_share": 0.0, "slow_factor": 1.0, "latency": 0.0, "bandwidth": 0.0}
EXPECTED = {str: "a text", bool: "true or false", int: "a whole number from 1", float: "a number from 0",
            dict: "an object"}


def fits(value, example):
    if type(example) is list:
        names = [str(v.get("name") if type(v) is dict else v) for v in value] if type(value) is list else []
        return names and all(fits(v, example[0]) for v in value) and len(set(names)) == len(names)
    if type(example) in (int, float):
        return type(value) in (int, float) and (value >= 0 if type(example) is float else value >= 1 and value % 1 == 0)
    return type(value) is type(example) and value != ""


# ---- strategies ------------------------------------------------------------------------------------------------------
class Constant(typing.NamedTuple):
    name: str  # "R"; "H" where the text has none, as in "local-sgd:{4,8}"
    values: list  # ascending
    first: int  # the index of the one that was listed first
    whole: bool

    def at(self, i):
        """The i-th value. i < 0 and i past the end continue the list geometrically; None: there is no further value."""
        n = len(self.values)
        if 0 <= i < n:
            return self.values[i]
        up = i >= n
        value, inner = (self.values[-1], self.values[-2]) if up else (self.values[0], self.values[1])
        ratio = value / inner if value > 0 and inner > 0 else 2 if up else 0
        for _ in range(i - n + 1 if up else -i):
            following = value * ratio
            if self.whole:
                rounded = math.floor(following + 0.5)
                following = max(value + 1, rounded) if up else min(value - 1, rounded)
            value = following
        return value if value >= (1 if self.whole else 1e-12) else None


class Strategy:
    """One of a plan. Values in braces are searched: "ringmaster:R={2,4}+asgd:clip={1,4}"."""

    def __init__(self, text):
        self.text = text
        parts = re.split(r"\{([^}]*)\}", text)
        self.pieces = parts[::2]  # what stands around the braces
        if "{" in "".join(self.pieces):
            raise Refused(f"{text}: a brace is not closed")
        self.constants = [self.constant(*pair) for pair in zip(self.pieces, parts[1::2])]
        self.first = [c.values[c.first] for c in self.constants]
        others = [self.first[:i] + [v] + self.first[i + 1:] for i, c in enumerate(self.constants) for v in c.values]
        for values in [self.first, *others]:
            if why := dry_run(self.filled(values), 100000)["why"]:
                raise Refused(why)
        self.momentum = dry_run(self.filled(self.first), 100000)["momentum"]

    def constant(self, before, values):
        name = re.split("[:,+]", before)[-1].split("=")[0] or "H"
        is_whole = name in ("R", "B", "H", "every")
        try:
            listed = [float(v) for v in values.split(",")]
        except ValueError:
            listed = [-1.0]
        if any(v < is_whole or (is_whole and v % 1) for v in listed):
            expected = "whole numbers from 1" if is_whole else "numbers from 0"
            raise Refused(f"{self.text}: {{{values}}}: expected {expected}"
                          " (a row of its own for each setting of an on/off constant)")
        if len(set(listed)) < max(2, len(listed)):
            raise Refused(f"{self.text}: {{{values}}} needs two values or more, none twice; without braces it is fixed")
        return Constant(name, sorted(listed), sorted(listed).index(listed[0]), is_whole)

    def filled(self, values):
        return self.pieces[0] + "".join(f"{v:.6g}{piece}" for v, piece in zip(values, self.pieces[1:]))


# ---- the plan --------------------------------------------------------------------------------------------------------
class Plan:
    """A plan's fields as attributes. Every error names the file and the line."""

    def __init__(self, path):
        self.path, self.text = str(path), pathlib.Path(path).read_text()
        try:
            given = json.loads(self.text, object_pairs_hook=self.members)
        except json.JSONDecodeError as e:
            raise Refused(f"{path}:{e.lineno}: {e.msg}")
        vars(self).update(self.checked(given, FIELDS, ("strategies", "workers", "rates"), "a plan"))
        self.clusters = [self.checked(c, CLUSTER_FIELDS, ("name",), "a cluster") for c in self.clusters]
        self.title = self.title or pathlib.Path(path).stem
        self.tuning_epochs = given.get("tuning_epochs", self.epochs)
        self.search = given.get("search", max(self.search, len(self.rates)))
        self.by_time = self.choose_by == "time"
        try:
            self.strategies = [Strategy(s) for s in self.strategies]
        except Refused as e:
            self.wrong("strategies", e)
        for name, wrong, why in self.checks(given):
            if wrong:
                self.wrong(name, f'"{name}": {why}')
        self.rates = sorted(math.ldexp(self.rates[0], round(math.log2(rate / self.rates[0]))) for rate in self.rates)
        self.cells = [Cell(s, k, c["name"]) for k in self.workers for c in self.clusters for s in self.strategies]

    def members(self, pairs):
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                self.wrong(name, f'"{name}" comes twice')
        return dict(pairs)

    def wrong(self, name, why):
        line = 1 + self.text.count("\n", 0, max(0, self.text.rfind(f'"{name}"')))
        raise Refused(f"{self.path}:{line}: {why}")

    def checked(self, given, fields, required, owner):
        if type(given) is not dict:
            self.wrong("", f'{owner} is an object: {{"name": value, …}}')
        for name, value in given.items():
            if name not in fields:
                self.wrong(name, f'"{name}" is not a field of {owner}')
            if not fits(value, fields[name]):
                listed = type(fields[name]) is list
                what = EXPECTED[type(fields[name][0] if listed else fields[name])]
                what = f"a list, each {what}, none twice" if listed else what
                self.wrong(name, f'"{name}" is {json.dumps(value, ensure_ascii=False)}: expected {what}')
        for name in required:
            if name not in given:
                self.wrong("", f'"{name}" is missing')
        return fields | given

    def checks(self, given):
        """What types and the simulator do not see: the field, whether it is wrong, and why."""
        first = self.rates[0]
        yield "rates", min(self.rates) <= 0, "each is above 0"
        yield "rates", any(abs(math.log2(r / first) % 1 - 0.5) < 0.5 - 1e-6 for r in self.rates), (
            f"each is {first:g} times a power of two")
        yield "momenta", max(self.momenta) >= 1, "momenta are below 1"
        yield "workers", max(self.workers) > 100000, "at most 100000 workers"
        yield "target", self.target >= 1 or given.get("target") == 0, "an accuracy is above 0 and below 1"
        yield "dtype", self.dtype not in ("f32", "bf16"), "f32 or bf16 is expected"
        yield "evaluate_every", not 0 < self.evaluate_every <= self.epochs, 'above 0, at most "epochs"'
        yield "tuning_epochs", self.tuning_epochs > self.epochs, 'at most "epochs"'
        yield "tuning_seed", self.tuning_seed < 1001, "seeds below 1001 are those of final runs"
        yield "search", self.search < len(self.rates), 'at least as many points as "rates"'
        yield "choose_by", self.choose_by not in ("accuracy", "time"), "accuracy or time is expected"
        yield "choose_by", self.by_time and not self.target, 'time needs a "target"'
        yield "choose_by", self.by_time and self.tuning_epochs != self.epochs and self.schedule != "constant", (
            "the times of searches and of final runs belong to two schedules: choose the constant one, or as many "
            '"tuning_epochs" as "epochs"')
        for cluster, workers in itertools.product(self.clusters, self.workers):
            share, shape, factor = (cluster[name] for name in ("slow_share", "shape", "slow_factor"))
            none = share > 1 or (workers > 1 and share > 0 and not slow_workers(cluster, workers))
            yield "clusters", none, f"a share of {share:g} of {workers} workers is none: choose another"
            yield "clusters", 0 < shape < 0.01, f'"shape" is {shape:g}: expected 0, or 0.01 and more'
            yield "clusters", factor < 1 or (share > 0) != (factor > 1), (
                '"slow_share" and "slow_factor" have an effect only together')
        for strategy, workers in itertools.product(self.strategies, self.workers):
            why = dry_run(strategy.filled(strategy.first), workers)["why"]
            yield "strategies", why, why

    def momenta_of(self, strategy):
        """Those that a search may try, ascending: the list of the plan, continued."""
        momenta = sorted(self.momenta)
        if not strategy.momentum:
            return [0]
        if len(momenta) == 1:
            return momenta
        return [0] * (momenta[0] > 0) + momenta + [more for more in (0.95, 0.98) if more > momenta[-1]]

    def conditions(self):
        return (f"{self.data_set}, {self.model}, {self.dtype}{', augmented' * self.augment}, schedule {self.schedule}, "
                f"batch {self.batch}, {self.val} held back, weight decay {exact(self.weight_decay)}, "
                f"evaluated every {exact(self.evaluate_every)} epochs"
                + (f", until {exact(self.target)}" if self.by_time else ""))

    def cluster_conditions(self):
        return {c["name"]: f"shape {exact(c['shape'])}, {exact(c['slow_share'])} of the workers "
                f"{exact(c['slow_factor'])} times as slow, latency {exact(c['latency'])} s, bandwidth "
                + (exact(c["bandwidth"]) + " bytes/s" if c["bandwidth"] else "unlimited") for c in self.clusters}

    def run(self, trial):
        """One simulated run: what build/simulate prints, with the trial's key."""
        cluster = next(c for c in self.clusters if c["name"] == trial.cluster)
        slow = ",".join(f"{w}:{cluster['slow_factor']!r}" for w in slow_workers(cluster, trial.workers))
        every = self.evaluate_every if trial.final or self.by_time else trial.epochs
        options = {
            "data-set": self.data_set, "model": self.model, "dtype": self.dtype, "batch": self.batch,
            "schedule": self.schedule, "weight-decay": self.weight_decay, "val": self.val, "epochs": trial.epochs,
            "strategy": trial.strategy, "workers": trial.workers, "lr": trial.rate, "momentum": trial.momentum,
            "seed": trial.seed, "evaluate-every": every, "evaluate-on": "test" if trial.final else "held-out",
            "until": self.target if self.by_time else "", "slow": slow, "shape": cluster["shape"],
            "latency": cluster["latency"] * 1e3, "bandwidth": cluster["bandwidth"] * 8 / 1e9}
        words = [word for name, value in options.items() if value != "" for word in ("--" + name, value)]
        outcome = simulate(words + ["--augment"] * self.augment)
        if self.data_set == "fashion-mnist" and outcome["data"].startswith("6000 + 1000 "):
            raise Refused("all of Fashion-MNIST is needed, not a part: run datasets/get-data.sh fashion-mnist")
        return outcome | trial._asdict()


def slow_workers(cluster, workers):
    return range(workers - int(cluster["slow_share"] * workers + 1e-9), workers)
