#!/usr/bin/env python3
"""An experiment: strategies × numbers of workers × clusters, each tuned with the same budget, in simulated runs.
PLAN.md has the fields of a plan, the steps of the search, the lines of the results, and what a check allows."""
import argparse
import collections
import fcntl
import functools
import itertools
import json
import math
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import textwrap
from concurrent import futures

SIMULATE = pathlib.Path(__file__).resolve().parents[2] / os.environ.get("BUILD", "build") / "simulate"
# A run. strategy: its text with its constants filled in; final: measured on test pictures, else on held-out ones.
Trial = collections.namedtuple("Trial", "strategy workers cluster rate momentum epochs seed final")
Cell = collections.namedtuple("Cell", "strategy workers cluster")  # each has its own search
# Each field of a plan and its default. A value must have the type of the default. The simulator checks its own ranges.
FIELDS = {
    "title": "", "data_set": "fashion-mnist", "model": "lenet5", "dtype": "f32", "augment": False,
    "schedule": "constant", "epochs": 4, "batch": 64, "val": 5000, "weight_decay": 5e-4, "evaluate_every": 1.0,
    "target": 0.0, "choose_by": "accuracy", "strategies": [""], "workers": [1], "clusters": [{"name": "even"}],
    "rates": [0.0], "momenta": [0.9, 0.7, 0.5, 0.0], "search": 12, "tuning_epochs": 1, "tuning_seeds": 3,
    "tuning_seed": 1001, "finalists": 3, "seeds": 5}
CLUSTER_FIELDS = {"name": "", "shape": 100.0, "slow_share": 0.0, "slow_factor": 1.0, "latency": 0.0, "bandwidth": 0.0}
KINDS = {  # by the type of the default: the expected value in words, and a test of it
    str: ("a text", lambda v: type(v) is str and v),
    bool: ("true or false", lambda v: type(v) is bool),
    int: ("a whole number from 1", lambda v: type(v) is int and v >= 1),
    float: ("a number from 0", lambda v: type(v) in (int, float) and v >= 0),
    dict: ("an object", lambda v: type(v) is dict)}


class Refused(Exception):
    """An error for the user: what is wrong, where, and what to do."""


def require(good, why):
    if not good:
        raise Refused(why)


def simulate(*words):
    """Runs build/simulate and returns its JSON. "why": the reason of a refusal; empty: there is none."""
    require(SIMULATE.exists(), f"{SIMULATE}: is not there: make builds it")
    run = subprocess.run([SIMULATE, "--json", *map(str, words)], capture_output=True, text=True)
    if run.returncode:
        return {"why": run.stderr.strip().removeprefix("simulate: ") or f"{SIMULATE} ended with {run.returncode}"}
    return json.loads(run.stdout) | {"why": ""}


@functools.cache
def dry_run(strategy, workers, dtype="f32"):
    """The JSON of --dry-run, with "momentum": whether the strategy's rule keeps one."""
    return simulate("--dry-run", "--strategy", strategy, "--workers", workers, "--dtype", dtype)


class Strategy:
    """A plan's strategy. Values in braces are searched: "ringmaster:R={2,4}+asgd:clip={1,4}"; "local-sgd:{4,8}": H."""

    def __init__(self, text, require=require):
        self.text, found = text, re.findall(r"([\w-]*)=?\{([^}]*)\}", text)
        require(text.count("{") == len(found), f"have {text}: a brace is not closed")
        try:
            self.lists = [[float(v) for v in values.split(",")] for _, values in found]
        except ValueError:
            self.lists = [[]]
        good = all(len(set(values)) == len(values) > 1 for values in self.lists)
        require(good, f"have {text}: braces need two values or more, none twice; on and off: a row of its own each")
        self.constants = [(name or "H", sorted(values)) for (name, _), values in zip(found, self.lists)]
        self.momentum = dry_run(self.filled(values[0] for values in self.lists), 100000).get("momentum")

    def filled(self, values):
        values = iter(values)
        return re.sub(r"\{[^}]*\}", lambda _: f"{next(values):.6g}", self.text)

    def values(self, indices):
        """The values of the constants. A list continues geometrically at both ends; None: there is no further value."""
        return [self.value(*constant, i) for constant, i in zip(self.constants, indices)]

    def value(self, name, values, i):
        if 0 <= i < len(values):
            return values[i]
        inner, end, steps = (*values[-2:], i + 1 - len(values)) if i > 0 else (values[1], values[0], -i)
        value, whole = end * (end / inner if inner else 2) ** steps, name in ("H", "R", "B", "every")
        if value < (1 if whole else 1e-12):
            return None
        return math.floor(value + 0.5) if whole else value


class Plan:
    """A plan's fields as attributes. Every error names the file and the line."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        try:
            self.text = self.path.read_text("utf-8")
            given = json.loads(self.text, object_pairs_hook=self.once)
        except ValueError as e:
            raise Refused(f"{path}:{getattr(e, 'lineno', 1)}: {e}: a plan is JSON in UTF-8")
        require(type(given) is dict, f'{path}:1: a plan is an object: {{"name": value, …}}')
        vars(self).update(self.checked(given, FIELDS, ("strategies", "workers", "rates"), "a plan"))
        self.clusters = [self.checked(c, CLUSTER_FIELDS, ("name",), "a cluster") for c in self.clusters]
        self.strategies = [Strategy(text, functools.partial(self.require, "strategies")) for text in self.strategies]
        self.title = self.title or self.path.stem
        self.tuning_epochs = given.get("tuning_epochs", self.epochs)
        self.search = given.get("search", max(self.search, len(self.rates)))
        self.by_time = self.choose_by == "time"
        self.check_ranges(given)
        self.rates = sorted(math.ldexp(self.rates[0], round(math.log2(rate / self.rates[0]))) for rate in self.rates)
        self.cells = [Cell(s, k, c["name"]) for k in self.workers for c in self.clusters for s in self.strategies]

    def once(self, pairs):
        for name, times in collections.Counter(name for name, _ in pairs).items():
            self.require(name, times == 1, "comes twice")
        return dict(pairs)

    def require(self, name, good, why):
        line = 1 + self.text.count("\n", 0, max(0, self.text.rfind(f'"{name}"')))
        require(good, f'{self.path}:{line}: "{name}" {why}')

    def checked(self, given, fields, required, owner):
        """Checks the given fields. Returns them with the defaults of the others."""
        for name, value in given.items():
            self.require(name, name in fields, f"is not a field of {owner}")
            listed = type(fields[name]) is list
            what, fits = KINDS[type(fields[name][0] if listed else fields[name])]
            values = value if listed and type(value) is list else [] if listed else [value]
            names = [str(v.get("name") if type(v) is dict else v) for v in values]
            good = values and all(map(fits, values)) and len(set(names)) == len(names)
            self.require(name, good, (
                f"is {json.dumps(value)}: expected {f'a list, each {what}, none twice' if listed else what}"))
        for name in required:
            self.require(name, name in given, f"is missing in {owner}")
        return fields | given

    def check_ranges(self, given):
        """Refuses values that neither their types nor the simulator exclude."""
        p, need, first = self, self.require, self.rates[0]
        powers = [math.log2(rate / first) if rate > 0 < first else 0.5 for rate in p.rates]
        need("rates", all(abs(x - round(x)) < 1e-6 for x in powers), f"must be above 0, {first:g} times a power of two")
        need("momenta", max(p.momenta) < 1, "must be below 1")
        need("target", p.target < 1 and given.get("target") != 0, "must be above 0 and below 1: an accuracy")
        need("dtype", p.dtype in ("f32", "bf16"), "must be f32 or bf16")
        need("evaluate_every", 0 < p.evaluate_every <= p.epochs, 'must be above 0, at most "epochs"')
        need("tuning_epochs", p.tuning_epochs <= p.epochs, 'must be at most "epochs"')
        need("tuning_seed", p.tuning_seed > 1000, "must not be below 1001: those are the seeds of final runs")
        need("search", p.search >= len(p.rates), 'must be at least as many points as "rates"')
        need("choose_by", p.choose_by in ("accuracy", "time"), "must be accuracy or time")
        need("choose_by", p.target or not p.by_time, 'needs a "target" for time')
        one = p.tuning_epochs == p.epochs or p.schedule == "constant" or not p.by_time
        need("choose_by", one, 'has times of two schedules: choose the constant one, or "tuning_epochs" like "epochs"')
        for cluster, workers in itertools.product(p.clusters, p.workers):
            share, shape, factor = (cluster[name] for name in ("slow_share", "shape", "slow_factor"))
            some = share <= 1 and (share == 0 or workers == 1 or slow_workers(cluster, workers))
            need("clusters", some, f"need slow workers: a share of {share:g} of {workers} workers is none")
            need("clusters", not 0 < shape < 0.01, f'have a "shape" of {shape:g}: expected 0, or 0.01 and more')
            both = factor >= 1 and (share > 0) == (factor > 1)
            need("clusters", both, 'have "slow_share" and "slow_factor", with an effect only together')
        for strategy, workers in itertools.product(p.strategies, p.workers):
            for values in itertools.product(*strategy.lists):
                why = dry_run(strategy.filled(values), workers)["why"]
                need("strategies", not why, f"have one that is refused: {why}")

    def header(self, made):
        """A header line of the results: conditions of all runs and of each cluster, "data" and "made_by" of `made`."""
        conditions = (f"{self.data_set}, {self.model}, {self.dtype}{', augmented' * self.augment}, schedule "
                      f"{self.schedule}, batch {self.batch}, {self.val} held back, weight decay "
                      f"{exact(self.weight_decay)}, evaluated every {exact(self.evaluate_every)} epochs"
                      + f", until {exact(self.target)}" * self.by_time)
        return {"experiment": conditions, "clusters": {
            c["name"]: f"shape {exact(c['shape'])}, {exact(c['slow_share'])} of the workers {exact(c['slow_factor'])} "
            f"times as slow, latency {exact(c['latency'])} s, bandwidth "
            + (exact(c["bandwidth"]) + " bytes/s" if c["bandwidth"] else "unlimited") for c in self.clusters},
            **{name: made[name] for name in ("data", "made_by") if name in made}}

    def run(self, trial, **changed):
        """One simulated run: its line of the results, with "data" and "made_by"."""
        cluster = next(c for c in self.clusters if c["name"] == trial.cluster)
        options = {
            "data-set": self.data_set, "model": self.model, "dtype": self.dtype, "batch": self.batch,
            "schedule": self.schedule, "weight-decay": self.weight_decay, "val": self.val, "epochs": trial.epochs,
            "strategy": trial.strategy, "workers": trial.workers, "lr": trial.rate, "momentum": trial.momentum,
            "seed": trial.seed, "evaluate-on": "test" if trial.final else "held-out",
            "evaluate-every": self.evaluate_every if trial.final or self.by_time else trial.epochs,
            "until": self.target if self.by_time else 2, "shape": cluster["shape"],
            "slow": ",".join(f"{w}:{cluster['slow_factor']!r}" for w in slow_workers(cluster, trial.workers)),
            "latency": cluster["latency"] * 1e3, "bandwidth": cluster["bandwidth"] * 8 / 1e9, **changed}
        words = [word for name, value in options.items() if value != "" for word in ("--" + name, value)]
        outcome = simulate(*words, *["--augment"] * self.augment)
        require(not outcome["why"], outcome["why"])
        part = self.data_set == "fashion-mnist" and outcome["data"].startswith("6000 + 1000 ")
        require(not part, "all of Fashion-MNIST is needed, not a part: run datasets/get-data.sh fashion-mnist")
        return trial._asdict() | {k: v for k, v in outcome.items() if k not in ("why", "settings", *Trial._fields)}

    def one_step(self):
        """A run of one worker that ends after one step. It finds a wrong data set or model before hours of training."""
        return self.run(Trial("asgd", 1, self.clusters[0]["name"], self.rates[0], 0, 1, 1, False),
                        **{"evaluate-every": 1e-6, "until": 1e-6, "slow": ""})


def exact(value):
    """The shortest text of a number, as std::to_chars writes it; for the headers of results."""
    texts = (f"{value:.{digits}{form}}" for form in "fe" for digits in range(18))
    return min((text for text in texts if float(text) == value), key=len)


def slow_workers(cluster, workers):
    return range(workers - int(cluster["slow_share"] * workers + 1e-9), workers)


class Results(dict):
    """{trial: outcome} of the lines of PLAN.jsonl. Text after the last line feed was cut off and is no run."""

    def __init__(self, plan):
        self.plan, self.path = plan, plan.path.with_suffix(".jsonl")
        self.read()

    def read(self):
        self.clear()
        self.header, text = {}, self.path.read_bytes() if self.path.exists() else b""
        require(not text or b"\n" in text, f"{self.path}:1: was cut off: remove the file")
        for at, line in enumerate(text.split(b"\n")[:-1], 1):
            try:
                self.add(json.loads(line))
            except Refused as e:
                raise Refused(f"{self.path}:{at}: {e}")
            except (AttributeError, KeyError, TypeError, ValueError) as e:
                damage = f"{e} is missing" if type(e) is KeyError else e
                raise Refused(f"{self.path}:{at}: is damaged ({damage}): restore the line, or remove that of a run")

    def add(self, row):
        """Adds a line. Raises Refused for a header with other conditions or data, and for an impossible run."""
        if self.header and "experiment" not in row:
            trial = Trial(*(row[name] for name in Trial._fields))
            require(trial not in self, "is a second line of its run: remove one")
            self[trial] = outcome_of(row | {"made_by": self.header["made_by"]})
            return
        mine, data = self.plan.header({}), row.get("data") or self.header.get("data")
        facts = [("experiment", row["experiment"], mine["experiment"]),
                 ("data set", self.header.get("data") or data, data)]
        facts += [(f'cluster "{name}"', row["clusters"].get(name, now), now) for name, now in mine["clusters"].items()]
        for what, was, now in facts:
            require(was == now, f"another {what} ({was}; now: {now}): move the results away, or rename the cluster")
        self.header = row | {"data": data}

    def carry_out(self, jobs, run):
        """Runs the missing trials by run(trial), `jobs` at a time. Writes each to the file as soon as it ends."""
        running, failure = {}, None
        with open(self.path, "a") as file, futures.ThreadPoolExecutor(jobs) as pool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Refused(f"{self.path}: another process writes its results there: wait until it has ended")
            self.read()
            file.truncate(self.path.read_bytes().rfind(b"\n") + 1)
            while True:
                missing = dict.fromkeys(t for cell in self.plan.cells for t in Search(self.plan, self, cell).missing)
                waiting = [t for t in missing if t not in running.values() and not failure]
                running |= {pool.submit(run, t): t for t in waiting[:jobs - len(running)]}
                if not running:
                    break
                for future in futures.wait(running, return_when=futures.FIRST_COMPLETED).done:
                    trial = running.pop(future)
                    if future.exception():  # the other runs in progress end, and are kept
                        failure = failure or future.exception()
                        continue
                    row = future.result()
                    header = self.plan.header({name: row.pop(name) for name in ("data", "made_by")})
                    for line in [row] if self.header | header == self.header else [header, row]:
                        self.add(line)
                        print(json.dumps(line, ensure_ascii=False), file=file, flush=True)
                    print(trial, self[trial]["status"], self[trial]["accuracy"], file=sys.stderr)
        if failure:
            raise failure


def outcome_of(row):
    """The row with its accuracy and its evaluations as triples. Raises Refused for impossible values."""
    diverged = {"ok": False, "diverged": True}[row["status"]]
    accuracy = 0 if diverged else row["test" if row["final"] else "validation"]
    evaluations = list(zip(*(row["evaluations"][name] for name in ("epoch", "seconds", "accuracy")), strict=True))
    steps = zip([(0, 0, 0), *evaluations], evaluations)
    good = (all(now[0] > was[0] and now[1] >= was[1] and 0 <= now[2] <= 1 for was, now in steps)
            and (diverged or [accuracy] == [last[2] for last in evaluations[-1:]]) and 0 <= row["participation"] <= 1
            and min([row["dropped"], row.get("refused", 0), row["wall_seconds"], *row["delays"]]) >= 0 and row["epochs"] > 0)
    require(good, "an evaluation, the accuracy or a number of pushes cannot be: remove the line, the run is made again")
    return {"refused": 0} | row | {"diverged": diverged, "accuracy": accuracy, "evaluations": evaluations}


class Search:
    """The search of a cell, replayed over the results. missing: the trials to run next; runs: the final ones, by seed.
    A point is a power of two for the rate, the index of the momentum, and the index of each constant."""

    def __init__(self, plan, results, cell):
        self.plan, self.results, self.cell = plan, results, cell
        self.tried, self.missing, self.chosen, self.edge, self.runs = {}, [], None, False, {}  # tried: {point: score}
        self.momenta = sorted(plan.momenta) if cell.strategy.momentum else [0]
        if len(self.momenta) > 1:
            more = [momentum for momentum in (0.95, 0.98) if momentum > self.momenta[-1]]
            self.momenta = [0] * (self.momenta[0] > 0) + self.momenta + more
        begin = [values.index(listed[0]) for listed, (_, values) in zip(cell.strategy.lists, cell.strategy.constants)]
        begin = (self.momenta.index(plan.momenta[0]) if cell.strategy.momentum else 0, *begin)
        points = [(round(math.log2(rate / plan.rates[0])), *begin) for rate in plan.rates]
        while points and not self.missing:
            self.missing = [t for t in map(self.trial, points) if t not in results]
            self.tried |= {p: self.score(self.trial(p)) for p in points if self.trial(p) in results}
            self.tried = dict(sorted(self.tried.items(), key=lambda item: -item[1]))  # best first, then the earlier
            untried = itertools.chain.from_iterable(map(self.neighbours, self.tried))
            points = list(itertools.islice(untried, 1)) if len(self.tried) < plan.search else []
        if not self.missing:
            self.choose()

    def trial(self, point, more=0):
        plan, strategy = self.plan, self.cell.strategy
        return Trial(strategy.filled(strategy.values(point[2:])), *self.cell[1:], math.ldexp(plan.rates[0], point[0]),
                     self.momenta[point[1]], plan.tuning_epochs, plan.tuning_seed + more, False)

    def score(self, trial):
        """−1: the run diverged; up to 1: its accuracy; above 1, by time: the earlier at the target, the higher."""
        outcome = self.results[trial]
        seconds = time_to(self.plan.target, outcome) if self.plan.by_time else None
        return -1 if outcome["diverged"] else outcome["accuracy"] if seconds is None else 1 + 1 / (1 + seconds)

    def neighbours(self, point):
        """The neighbours that were not tried and are valid."""
        for axis, by in itertools.product(range(len(point)), (1, -1)):
            near = [*point[:axis], point[axis] + by, *point[axis + 1:]]
            if not 0 <= near[1] < len(self.momenta) or None in self.cell.strategy.values(near[2:]):
                continue
            if axis == 1:  # η/(1 − μ) stays nearly what it was
                near[0] += round(math.log2((1 - self.momenta[near[1]]) / (1 - self.momenta[point[1]])))
            trial = self.trial(near)
            if tuple(near) not in self.tried and (trial in self.results or not dry_run(*trial[:2])["why"]):
                yield tuple(near)

    def choose(self):
        plan, strategy = self.plan, self.cell.strategy
        best = list(self.tried)[:plan.finalists]
        finalists = [p for p in best if self.tried[p] >= 0] or best[:1]
        trials = {p: [self.trial(p, more) for more in range(plan.tuning_seeds)] for p in finalists}
        self.missing = [t for t in itertools.chain(*trials.values()) if t not in self.results]
        if self.missing:
            return
        best = max(finalists, key=lambda p: sum(map(self.score, trials[p])))
        self.chosen = self.trial(best)._replace(epochs=plan.epochs, seed=1, final=True)
        self.edge = any(self.neighbours(best)) or 1 < len(self.momenta) == best[1] + 1
        final = [self.chosen._replace(seed=k) for k in range(1, plan.seeds + 1)]
        self.missing = [t for t in final if t not in self.results]
        self.runs = {t.seed: measured(self.results[t], plan.target) for t in final if t in self.results}
        settings = [("η", self.chosen.rate), ("μ", self.chosen.momentum),
                    *zip((name for name, _ in strategy.constants), strategy.values(best[2:]))]
        self.chosen_text = ", ".join(  # "η 0.064, μ 0.9, R 4"
            f"{name} {value:.3g}" for name, value in settings if name != "μ" or strategy.momentum)

    def values(self, which):
        """The values of the final runs that have one. which: 0: accuracy in %, 1: seconds to the target."""
        return [run[which][0] for run in self.runs.values() if run[which][0] is not None]


def time_to(target, outcome):
    """Virtual seconds to the first evaluation at the target or above, interpolated from the one before (the very first:
    its own time, an upper bound). None: it was not reached."""
    evaluations = outcome["evaluations"]
    before = [(0, seconds, 0) for _, seconds, _ in evaluations[:1]] + evaluations
    for (_, s, a), (_, seconds, accuracy) in zip(before, evaluations):
        if accuracy >= target:
            return s + (seconds - s) * (target - a) / (accuracy - a)
    return None


def measured(run, target):
    """For a final run: (accuracy in points, a note on it), and (seconds to the target, a note on them)."""
    seconds, gone = time_to(target, run), "diverged" if run["diverged"] else ""
    early = "at the first evaluation" if run["evaluations"] and run["evaluations"][0][2] >= target else ""
    return ((None, gone) if gone else (100 * run["accuracy"], ""),
            (seconds, gone or "not reached") if seconds is None else (seconds, early))


def standard_error(values):
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0


def half_interval(values):
    """Half of the 95 % t-interval of the mean; None for fewer than two values."""
    from scipy import special
    return special.stdtrit(len(values) - 1, 0.975) * standard_error(values) if len(values) > 1 else None


def mean_text(values, form, note, paired=False, change=float):
    """The mean ± its standard error, or for paired values [its 95 % t-interval], and a note in parentheses."""
    mean, error = statistics.fmean(values or [0]), standard_error(values)
    text = form % change(mean) if values else "–"
    if len(values) > 1 and paired:
        half = half_interval(values)
        text += f" [{form % change(mean - half)}, {form % change(mean + half)}]"
    elif len(values) > 1:
        text += f" ± {form % error}"
    return text + (f" ({note})" if note else "")


def counted(n, what):
    return f"{n} {what}{'' if n == 1 else 's'}"


class Report:
    """The tables of an experiment as Markdown, its figures, and its progress."""

    def __init__(self, plan, results):
        self.plan, self.results, self.workers = plan, results, sorted(plan.workers)
        self.searches = {cell: Search(plan, results, cell) for cell in plan.cells}

    def tables(self):
        p, (first, *others), target = self.plan, self.plan.strategies, f"{100 * self.plan.target:.4g} %"
        where = " where the target was reached, or at the end" if p.by_time else ""
        kinds = [  # for each table: whether it is wanted, its title, its rows, and the text of a cell
            (True, f"test accuracy in %{where}, mean ± standard error over seeds (what was chosen)", p.strategies,
             lambda s: f"{self.mean(s, 0, '%.2f')} ({s.chosen_text})" + "†" * s.edge),
            (not p.by_time, f"points that {first.text} is better by, paired by seed [95 % t-interval]", others,
             lambda s: self.paired(s, 0, "%+.2f", lambda x: -x)),
            (p.target, f"virtual seconds to {target}, mean ± standard error over the seeds that reach it (at the first "
             "evaluation: the time of that)", p.strategies, lambda s: self.mean(s, 1, "%.1f")),
            (p.target, f"time to {target} as a multiple of {first.text}'s, geometric mean over the seeds that both "
             "reach it after the first evaluation [95 % t-interval]", others,
             lambda s: self.paired(s, 1, "%.2f", math.log, math.exp))]
        text = (f"Each cell: {p.search} points searched with {counted(p.tuning_epochs, 'epoch')} of one seed, "
                f"{counted(p.finalists, 'finalist')} with {counted(p.tuning_seeds, 'seed')} in all, "
                f"{counted(p.seeds, 'final run')} with {counted(p.epochs, 'epoch')}.\n")
        for cluster, (wanted, *kind) in itertools.product([c["name"] for c in p.clusters], kinds):
            text += self.table(cluster, *kind) if wanted else ""
        if left := sum(not search.runs for search in self.searches.values()):
            text += f"\n{left} of {counted(len(self.searches), 'cell')}: no final run yet.\n"
        edge = any(search.edge and search.runs for search in self.searches.values())
        return text + "\n† A neighbour of what was chosen was not tried within the budget.\n" * edge

    def table(self, cluster, title, strategies, entry):
        """A row for each strategy that has final runs; empty if none has."""
        head = ["workers", *map(str, self.workers)]
        rows = [[s.text, *(self.searches[s, k, cluster] for k in self.workers)] for s in strategies]
        rows = [[name, *(entry(s) if s.runs else "–" for s in row)] for name, *row in rows if any(s.runs for s in row)]
        text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
        return f"\nCluster {cluster}: {title}\n\n| {' | '.join(head)} |\n{'|---' * len(head)}|\n{text}" if rows else ""

    def mean(self, search, which, form):
        """The mean over the seeds, and how many runs diverged, ended early or are missing."""
        said = [run[which][1] for run in search.runs.values()] + ["not run"] * (self.plan.seeds - len(search.runs))
        note = [f"{said.count(what)} of {self.plan.seeds} {what}"
                for what in ("diverged", "not reached", "at the first evaluation", "not run") if what in said]
        return mean_text(search.values(which), form, ", ".join(note))

    def paired(self, search, which, form, scale, back=float):
        """The difference from the first strategy's runs with the same seeds, where neither run has a note."""
        base, planned = self.searches[search.cell._replace(strategy=self.plan.strategies[0])].runs, self.plan.seeds
        pairs = [(*base[seed][which], *run[which]) for seed, run in search.runs.items() if seed in base]
        values = [scale(b) - scale(a) for a, said, b, said_too in pairs if not said and not said_too]
        note = f"{len(values)} of {planned} pairs" if pairs and len(values) != planned else ""
        return mean_text(values, form, note, True, back)

    def figures(self, folder):
        """NAME-CLUSTER.svg over the numbers of workers, with standard errors: test accuracy or, if the plan chooses by
        time, the time to the target."""
        from matplotlib import pyplot
        plan, folder = self.plan, pathlib.Path(folder)
        shown = f"virtual seconds to {100 * plan.target:.4g} %" if plan.by_time else "test accuracy in %"
        folder.mkdir(parents=True, exist_ok=True)
        for cluster in [c["name"] for c in plan.clusters]:
            figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
            axes.set_prop_cycle(pyplot.cycler(linestyle=["-", "--", ":"]) * pyplot.cycler(color=pyplot.cm.tab10.colors))
            for s in plan.strategies:
                values = [(k, self.searches[s, k, cluster].values(plan.by_time)) for k in self.workers]
                if points := [(k, statistics.fmean(v), standard_error(v)) for k, v in values if v]:
                    axes.errorbar(*zip(*points), marker="o", markersize=4, capsize=3, label=s.text)
            axes.set(xscale="log", xlabel="workers", ylabel=shown, yscale="log" if plan.by_time else "linear")
            axes.set_title(textwrap.fill(f"{plan.title}: {cluster}", 90), fontsize="medium")
            axes.set_xticks(self.workers, map(str, self.workers))
            axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
            figure.legend(fontsize="small", loc="outside right upper")
            figure.savefig(folder / f"{plan.path.stem}-{cluster}.svg")
            print(folder / f"{plan.path.stem}-{cluster}.svg")

    def status(self, jobs):
        """Points tried and final runs of each cell, and the hours that are left."""
        plan, text, left, final = self.plan, "", 0, 0
        widest = max(len(c["name"]) for c in plan.clusters)
        paces = [(t.workers, r["wall_seconds"] / t.epochs) for t, r in self.results.items() if not r["diverged"]]
        for (strategy, workers, cluster), search in self.searches.items():
            tried, done, chosen = len(search.tried), len(search.runs), ", chosen" if search.chosen else ""
            finalists = len(search.missing) if tried == plan.search else plan.finalists * (plan.tuning_seeds - 1)
            searching = 0 if chosen else max(0, plan.search - tried) + finalists
            same = [pace for k, pace in paces if k == workers] or [pace for _, pace in paces] or [0]
            left += statistics.fmean(same) * (searching * plan.tuning_epochs + (plan.seeds - done) * plan.epochs)
            final += done
            text += (f"{strategy.text:<40} {workers:4} workers, {cluster:<{widest}}  {tried:3} of {plan.search} points "
                     f"tried{chosen}, {done} of {plan.seeds} final runs\n")
        return text + f"{len(self.results)} runs, {final} of {len(plan.cells) * plan.seeds} final; " + (
            f"about {left / 3600 / jobs:.1f} hours are left with {counted(jobs, 'job')}\n" if paces
            else "no run has ended: the time that is left is unknown\n")


def contradiction(results, trial, again):
    """How a row that was run again contradicts the results; empty: it does not. PLAN.md has the allowed differences."""
    was = results[trial]
    bits = was["made_by"] == again["made_by"] and "-dirty" not in was["made_by"]
    cpus = [re.sub(r"^[^,]*(, git [^,]*)?", "", outcome["made_by"]) for outcome in (was, again)]
    seeds = [o["accuracy"] for t, o in [*results.items(), (trial._replace(seed=0), again)]
             if t != trial and t._replace(seed=trial.seed) == trial and not o["diverged"]]
    most = max(0.01 if cpus[0] == cpus[1] else 0.03, 3 * statistics.stdev(seeds) if len(seeds) > 1 else 0)
    ended = not was["diverged"] and not again["diverged"]
    whole = ended and len(was["evaluations"]) == len(again["evaluations"])  # else other pushes were made
    differ = {
        "end": cpus[0] == cpus[1] and was["diverged"] != again["diverged"],
        "accuracy": ended and abs(was["accuracy"] - again["accuracy"]) > most,
        "delays": whole and was["delays"] != again["delays"],
        "participation": whole and not math.isclose(was["participation"], again["participation"], rel_tol=1e-6)}
    for at, (one, two) in enumerate(zip(was["evaluations"], again["evaluations"]), 1):
        same = all(math.isclose(one[i], two[i], rel_tol=1e-6) for i in (0, 1))
        name = f"evaluation {at} ({one[1]:.7g} s, {one[2]:.7g}; now {two[1]:.7g} s, {two[2]:.7g})"
        differ[name] = not same or (cpus[0] == cpus[1] and abs(one[2] - two[2]) > most)
    if bits:
        fields = "diverged accuracy evaluations delays participation dropped refused gap correction".split()
        differ |= {name: was[name] != again[name] for name in fields}
    names = ", another ".join(name for name, is_so in differ.items() if is_so)
    allowed = "not the same bits" if bits else f"accuracies may differ by {100 * most:.7g} points"
    both = f"{was['accuracy']:.7g} by {was['made_by']}; now {again['accuracy']:.7g} by {again['made_by']}"
    return f"another {names}, {allowed}: recorded {both}" if names else ""


def check(plans, count, seed, seconds):
    """Rows of all plans' results, drawn together, are run again. Exits with 1 when one contradicts the results."""
    rows, wrong = [], 0
    for plan in plans:
        if why := dry_run("asgd", 1, plan.dtype)["why"]:
            print(f"{plan.path}: left out: {why}")
            continue
        results = Results(plan)
        rows += [(plan, results, trial) for trial, row in results.items() if row["wall_seconds"] <= seconds]
    require(rows, f"no row took at most {seconds:g} s: choose a larger --check-seconds")
    drawn = random.Random(seed).sample(rows, min(count, len(rows)))
    print(f"{len(drawn)} of {len(rows)} rows, drawn with seed {seed} of those of at most {seconds:g} s")
    for plan, results, trial in drawn:
        row = plan.run(trial)
        results.add(plan.header(row))
        was, again = results[trial], outcome_of(row)
        print(trial, again["status"], again["accuracy"], file=sys.stderr)
        why = contradiction(results, trial, again)
        agrees = ("not decided: on one of two CPUs it diverged, only times were compared"
                  if was["diverged"] != again["diverged"] else "agrees, every evaluation to the bit"
                  if was["evaluations"] == again["evaluations"] else "agrees")
        print(f"{plan.path}: {why or agrees}", flush=True)
        wrong += bool(why)
    if wrong:
        sys.exit(f"experiment: {counted(wrong, 'row')} of {len(drawn)} contradict the results")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plans", nargs="+", metavar="PLAN.json")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each, 1 to 1000 (2)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--table", action="store_true", help="only print the tables of the runs that there are")
    only.add_argument("--figures", metavar="FOLDER", help="only draw the runs that there are")
    only.add_argument("--status", action="store_true", help="only print what is done and the hours that are left")
    only.add_argument("--check", metavar="ROWS[,SEED]", help="run so many rows of the results again, and compare")
    parser.add_argument("--check-seconds", type=float, default=300, help="only rows that took at most so long (300)")
    parser.error = lambda why: require(False, f"{why}: --help has the options")  # one line, without the usage
    options = parser.parse_args()
    rows = re.fullmatch(r"([1-9]\d*)(?:,(\d+))?", options.check or "1")
    require(rows, f"--check {options.check}: expected a number of rows from 1, or ROWS,SEED")
    require(len(options.plans) == 1 or options.check, "name one plan (--check takes several)")
    require(1 <= options.jobs <= 1000, f"--jobs {options.jobs}: expected 1 to 1000")
    plans = [Plan(path) for path in options.plans]
    if options.check:
        return check(plans, int(rows[1]), int(rows[2] or random.randrange(1000000)), options.check_seconds)
    plan, results = plans[0], Results(plans[0])
    if not (options.table or options.figures or options.status):
        print("each run is kept: when this is interrupted, the same command goes on", file=sys.stderr)
        if any(Search(plan, results, cell).missing for cell in plan.cells):
            results.add(plan.header(plan.one_step()))
        results.carry_out(options.jobs, plan.run)
    none = f"{results.path}: there are no results: the same command without an option makes them"
    require(results or options.status, none)
    report = Report(plan, results)
    if options.figures:
        report.figures(options.figures)
    else:
        print(report.status(options.jobs) if options.status else report.tables(), end="")


if __name__ == "__main__":
    try:
        main()
    except (ImportError, OSError, Refused) as e:
        what = (f"{e.name} is missing: apt-get install python3-{e.name}" if isinstance(e, ImportError) else
                f"{e.filename or 'a file'}: {e.strerror}: give a path that can be read and written, with room"
                if isinstance(e, OSError) else e)
        print(f"experiment: {what}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
