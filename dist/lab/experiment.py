#!/usr/bin/env python3
"""An experiment: strategies × numbers of workers × clusters, each tuned with the same budget, in simulated runs.

    python3 dist/lab/experiment.py PLAN.json             carries out what is missing, and prints the tables
    python3 dist/lab/experiment.py PLAN.json --table     the tables of the runs that there are (--status: how far it is)
    python3 dist/lab/experiment.py PLAN.json --figures FOLDER
    python3 dist/lab/experiment.py PLAN.json … --check 3 runs three rows of the results again, and compares

PLAN.md has the fields of a plan. A cell is one strategy with one number of workers on one cluster. The search of a cell
tries `search` points of a lattice: learning rates a factor of two apart, momenta, and the constants in braces.
  1. Every learning rate of the plan, with its first momentum and the first value of every constant.
  2. Until `search` points are tried: of the tried points, best first, the first that has an untried neighbour. Those of
     a point are, in this order, η×2, η/2, the next larger and smaller momentum (with the η that leaves η/(1 − μ)
     nearest to what it was), the next larger and smaller value of each constant, also beyond the ends of its list.
  3. The best `finalists` points run with the other tuning seeds. The best mean over all tuning seeds is chosen.
  4. Final runs with seeds 1, 2, … and all epochs. Only these look at the test pictures.
Steps 1 to 3 use the held-out pictures; a run that diverged scores −1. Every run is a line of PLAN.jsonl as soon as it
ends. The search is a function of these lines alone, so an experiment may be interrupted anywhere, and the order in
which parallel runs end does not matter."""
import argparse
import concurrent.futures
import fcntl
import itertools
import json
import math
import os
import pathlib
import random
import re
import statistics
import sys
import textwrap

from experiment_plan import Plan, Refused, Trial, dry_run, simulate

try:
    from scipy import special
except ImportError:
    print("experiment: scipy is missing: apt-get install python3-scipy, or pip install scipy", file=sys.stderr)
    sys.exit(77)


# ---- results ---------------------------------------------------------------------------------------------------------
def read_results(path, plan):
    """{trial: outcome}, the last header, and the text without a last line that was cut off: it holds no run."""
    results, header, kept = {}, {}, ""
    if os.path.exists(path) and not os.path.isfile(path):
        raise Refused(f"{path}: is not a regular file: name one for the results")
    lines = pathlib.Path(path).read_text().splitlines(keepends=True) if os.path.exists(path) else []
    for at, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if at == 1 or "experiment" in row:
                header = checked_header(row, header, plan)
            else:
                trial = Trial(*(row[name] for name in Trial._fields))
                if trial in results:
                    raise Refused(f"is a second line of the run {trial}")
                results[trial] = checked_outcome(row, trial) | {"made_by": header["made_by"]}
        except (KeyError, TypeError, ValueError) as e:
            if at > 1 and not line.endswith("\n"):
                break
            raise Refused(f"{path}:{at}: " + (f'"{e.args[0]}" is missing' if type(e) is KeyError else str(e)))
        kept += line
    return results, header, kept


def checked_header(row, before, plan):
    if row["experiment"] != plan.conditions():
        raise Refused(f"holds results of another experiment ({row['experiment']}; the plan: {plan.conditions()}): "
                      "move it away")
    for name, conditions in plan.cluster_conditions().items():
        if row["clusters"].get(name, conditions) != conditions:
            raise Refused(f'holds results of another cluster "{name}" ({row["clusters"][name]}; the plan: '
                          f"{conditions}): rename the plan's")
    data = row.get("data") or before.get("data")
    if before.get("data") not in (None, data):
        raise Refused(f"the results had other data ({before['data']}; now: {data}): move them away")
    return row | {"data": data}


def checked_outcome(row, trial):
    """The row with its accuracy and its evaluations as triples. Raises Refused for values that cannot be."""
    diverged = {"ok": False, "diverged": True}[row["status"]]
    accuracy = 0 if diverged else row["test" if trial.final else "validation"]
    evaluations = list(zip(*(row["evaluations"][name] for name in ("epoch", "seconds", "accuracy")), strict=True))
    for before, now in zip([(0, 0, 0), *evaluations], evaluations):
        if not (now[0] > before[0] and now[1] >= before[1] and 0 <= now[2] <= 1):
            raise Refused(f"the evaluation {now} cannot be, or cannot follow {before}")
    if not diverged and (not evaluations or evaluations[-1][2] != accuracy):
        raise Refused(f"its accuracy, {accuracy}, is not that of the last evaluation")
    if not 0 <= row["participation"] <= 1 or min([row["dropped"], row.get("refused", 0), *row["delays"]]) < 0:
        raise Refused("a participation beyond 0 to 1, or a negative number of pushes")
    return {"refused": 0} | row | {"diverged": diverged, "accuracy": accuracy, "evaluations": evaluations}


def carry_out(plan, path, jobs, run):
    """Runs what is missing, `jobs` at a time, by run(trial); each is a line of the file as soon as it ends."""
    with open(path, "a") as file, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refused(f"{path}: another process writes its results there")
        results, header, kept = read_results(path, plan)
        file.truncate(len(kept.encode()))
        print(end="" if kept.endswith("\n") or not kept else "\n", file=file)
        cells, under_way, failure = list(plan.cells), {}, None
        while True:
            missing = {c: Search(plan, results, c).missing for c in cells}
            cells = [c for c in cells if missing[c]]
            waiting = (t for c in cells for t in missing[c] if t not in under_way.values() and not failure)
            under_way |= {pool.submit(run, t): t for t in itertools.islice(waiting, jobs - len(under_way))}
            if not under_way and failure:
                raise failure
            if not under_way:
                return results
            for future in concurrent.futures.wait(under_way, return_when=concurrent.futures.FIRST_COMPLETED).done:
                trial = under_way.pop(future)
                if future.exception():  # the other runs under way end, and are kept
                    failure = failure or future.exception()
                    continue
                row = future.result()
                now = {"experiment": plan.conditions(), "clusters": plan.cluster_conditions(), "data": row.pop("data"),
                       "made_by": row.pop("made_by")}
                if header | now != header:
                    header = checked_header(now, header, plan)
                    print(json.dumps(now, ensure_ascii=False), file=file)
                row = trial._asdict() | {k: v for k, v in row.items() if k not in (*Trial._fields, "settings")}
                print(json.dumps(row, ensure_ascii=False), file=file, flush=True)
                results[trial] = checked_outcome(row, trial) | {"made_by": now["made_by"]}
                show(trial, results[trial])


# ---- the search ------------------------------------------------------------------------------------------------------
class Search:
    """The search of a cell, replayed over the results. missing: what is to be run next; runs: final ones, by seed."""

    def __init__(self, plan, results, cell):
        self.plan, self.results, self.cell = plan, results, cell
        self.momenta = plan.momenta_of(cell.strategy)
        self.tried, self.missing, self.chosen, self.edge, self.runs = {}, [], None, False, {}  # tried: point → score
        first = self.momenta.index(plan.momenta[0]) if cell.strategy.momentum else 0
        for rate in plan.rates:
            self.attempt((round(math.log2(rate / plan.rates[0])), first, *(c.first for c in cell.strategy.constants)))
        while not self.missing and len(self.tried) < plan.search and (point := self.next_point()):
            self.attempt(point)
        if not self.missing:
            self.choose()

    def constants(self, point):
        return [c.at(i) for c, i in zip(self.cell.strategy.constants, point[2:])]

    def trial(self, point, more=0):
        plan, cell = self.plan, self.cell
        return Trial(cell.strategy.filled(self.constants(point)), cell.workers, cell.cluster,
                     math.ldexp(plan.rates[0], point[0]), self.momenta[point[1]], plan.tuning_epochs,
                     plan.tuning_seed + more, False)

    def score(self, trial):
        """−1: it diverged; up to 1: its accuracy; above 1, by the plan's choice: the sooner at the target, the more.
        None: it has not run, and is missing."""
        if trial not in self.results:
            self.missing.append(trial)
            return None
        outcome = self.results[trial]
        if outcome["diverged"]:
            return -1
        seconds = time_to(self.plan.target, outcome) if self.plan.by_time else None
        return outcome["accuracy"] if seconds is None else 1 + 1 / (1 + seconds)

    def attempt(self, point):
        score = self.score(self.trial(point))
        if score is not None:
            self.tried[point] = score

    def ranking(self):
        return sorted(self.tried, key=lambda point: -self.tried[point])

    def untried_neighbour(self, point):
        rate, momentum, *constants = point
        near = [(rate + by, momentum, *constants) for by in (1, -1)]
        for by in (1, -1):
            if 0 <= momentum + by < len(self.momenta):
                ratio = (1 - self.momenta[momentum + by]) / (1 - self.momenta[momentum])
                doublings = math.floor(abs(math.log2(ratio)) + 0.5) * (1 if ratio > 1 else -1)
                near.append((rate + doublings, momentum + by, *constants))
        near += [point[:i] + (point[i] + by,) + point[i + 1:] for i in range(2, len(point)) for by in (1, -1)]
        return next((p for p in near if p not in self.tried and self.exists(p)), None)

    def exists(self, point):
        values = self.constants(point)
        return None not in values and (self.trial(point) in self.results
                                       or not dry_run(self.cell.strategy.filled(values), self.cell.workers)["why"])

    def next_point(self):
        return next(filter(None, map(self.untried_neighbour, self.ranking())), None)

    def choose(self):
        finalists = self.ranking()[:self.plan.finalists]
        finalists = [p for p in finalists if self.tried[p] >= 0] or finalists[:1]
        scores = {p: [self.tried[p], *(self.score(self.trial(p, k)) for k in range(1, self.plan.tuning_seeds))]
                  for p in finalists}
        if self.missing:
            return
        best = max(finalists, key=lambda p: sum(scores[p]))
        self.chosen = self.trial(best)._replace(epochs=self.plan.epochs, seed=1, final=True)
        self.values = self.constants(best)
        self.edge = bool(self.untried_neighbour(best)) or 1 < len(self.momenta) == best[1] + 1
        final = [self.chosen._replace(seed=k) for k in range(1, self.plan.seeds + 1)]
        self.runs = {t.seed: self.results[t] for t in final if t in self.results}
        self.missing = [t for t in final if t not in self.results]

    def chosen_text(self):
        """"η 0.064, μ 0.9, R 4"; it has chosen."""
        momentum = [("μ", self.chosen.momentum)] if self.cell.strategy.momentum else []
        constants = [(c.name, v) for c, v in zip(self.cell.strategy.constants, self.values)]
        return ", ".join(f"{name} {v:.3g}" for name, v in [("η", self.chosen.rate), *momentum, *constants])


# ---- statistics ------------------------------------------------------------------------------------------------------
def time_to(target, outcome):
    """Virtual seconds to the first evaluation at the target or above, interpolated from the one before (the very first:
    its own time, an upper bound). None: it was not reached."""
    for before, now in zip([None, *outcome["evaluations"]], outcome["evaluations"]):
        if now[2] >= target:
            if not before:
                return now[1]
            return before[1] + (now[1] - before[1]) * (target - before[2]) / (now[2] - before[2])
    return None


def measured(run, target):
    """A final run with what tables and figures show of it: its accuracy in points, the seconds to the target, and these
    where they are no upper bound. None: there is none."""
    seconds, early = time_to(target, run), bool(run["evaluations"]) and run["evaluations"][0][2] >= target
    return run | {"points": None if run["diverged"] else 100 * run["accuracy"], "seconds": seconds, "early": early,
                  "bounded": None if early else seconds}


def standard_error(values):
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0


def mean_text(values, form, gone):
    """The mean of those that are not None ± its standard error, and what `gone` says of the others."""
    values = [v for v in values if v is not None]
    text = form % statistics.fmean(values) if values else "–"
    if len(values) > 1:
        text += " ± " + form % standard_error(values)
    return text + (f" ({gone})" if gone else "")


def paired(values, form, planned, change=lambda x: x):
    """The mean over pairs of runs with one seed [95 % t-interval]; None in `values`: a pair that has none."""
    kept = [v for v in values if v is not None]
    mean = statistics.fmean(kept or [0])
    text = form % change(mean) if kept else "–"
    if len(kept) > 1:
        half = special.stdtrit(len(kept) - 1, 0.975) * standard_error(kept)
        text += f" [{form % change(mean - half)}, {form % change(mean + half)}]"
    return text + (f" ({len(kept)} of {planned} pairs)" if values and len(kept) != planned else "")


def counted(n, what):
    return f"{n} {what}{'' if n == 1 else 's'}"


# ---- tables and figures ----------------------------------------------------------------------------------------------
class Report:
    """The tables of an experiment as Markdown, and its figures."""

    def __init__(self, plan, results):
        self.plan, self.workers = plan, sorted(plan.workers)
        self.searches = {(c.cluster, c.workers, c.strategy.text): Search(plan, results, c) for c in plan.cells}
        self.runs = {key: {seed: measured(run, plan.target) for seed, run in search.runs.items()}
                     for key, search in self.searches.items()}

    def tables(self):
        p, first = self.plan, self.plan.strategies[0].text
        text = (f"Each cell: {p.search} points searched with {counted(p.tuning_epochs, 'epoch')} of one seed, "
                f"{counted(p.finalists, 'finalist')} with {counted(p.tuning_seeds, 'seed')} in all, "
                f"{counted(p.seeds, 'final run')} with {counted(p.epochs, 'epoch')}.\n")
        where = " where the target was reached, or at the end" if p.by_time else ""
        target, others = f"{100 * p.target:.4g} %", p.strategies[1:]
        kinds = [(True, f"test accuracy in %{where}, mean ± standard error over seeds (what was chosen)", p.strategies,
                  self.accuracy),
                 (not p.by_time, f"points that {first} is better by, paired by seed [95 % t-interval]", others,
                  self.advantage),
                 (p.target, f"virtual seconds to {target}, mean ± standard error over the seeds that reach it (at the "
                  "first evaluation: the time of that)", p.strategies, self.time),
                 (p.target, f"time to {target} as a multiple of {first}'s, geometric mean over the seeds that both "
                  "reach it after the first evaluation [95 % t-interval]", others, self.ratio)]
        for cluster in [c["name"] for c in p.clusters]:
            text += "".join(self.table(f"Cluster {cluster}: {title}", strategies, cluster, entry)
                            for wanted, title, strategies, entry in kinds if wanted)
        if left := sum(not runs for runs in self.runs.values()):
            text += f"\n{left} of {counted(len(self.runs), 'cell')}: no final run yet.\n"
        edges = any(search.edge and search.runs for search in self.searches.values())
        return text + ("\n† A neighbour of what was chosen was not tried within the budget.\n" if edges else "")

    def table(self, title, strategies, cluster, entry):
        rows = ""
        for s in strategies:
            keys = [(cluster, k, s.text) for k in self.workers]
            if any(self.runs[key] for key in keys):
                rows += f"| {s.text} | " + " | ".join(entry(key) if self.runs[key] else "–" for key in keys) + " |\n"
        head = f"\n{title}\n\n| workers | " + " | ".join(map(str, self.workers)) + " |\n"
        return head + "|---|" + "---|" * len(self.workers) + "\n" + rows if rows else ""

    def censored(self, **counts):
        return ", ".join(f"{n} of {self.plan.seeds} {what.replace('_', ' ')}" for what, n in counts.items() if n)

    def accuracy(self, key):
        runs, search = self.runs[key].values(), self.searches[key]
        gone = self.censored(diverged=sum(r["diverged"] for r in runs), not_run=self.plan.seeds - len(runs))
        mean = mean_text([r["points"] for r in runs], "%.2f", gone)
        return f"{mean} ({search.chosen_text()})" + "†" * search.edge

    def time(self, key):
        runs = self.runs[key].values()
        missed = [r["diverged"] for r in runs if r["seconds"] is None]
        gone = self.censored(diverged=sum(missed), not_reached=len(missed) - sum(missed),
                             at_the_first_evaluation=sum(r["early"] for r in runs), not_run=self.plan.seeds - len(runs))
        return mean_text([r["seconds"] for r in runs], "%.1f", gone)

    def pairs(self, key, name, compare):
        """compare(the first strategy's value, this one's), by seed; None where one of them has none."""
        one, other = self.runs[key[0], key[1], self.plan.strategies[0].text], self.runs[key]
        pairs = [(one[seed][name], other[seed][name]) for seed in one if seed in other]
        return [None if None in pair else compare(*pair) for pair in pairs]

    def advantage(self, key):
        return paired(self.pairs(key, "points", lambda a, b: a - b), "%+.2f", self.plan.seeds)

    def ratio(self, key):
        logarithms = self.pairs(key, "bounded", lambda a, b: math.log(b / a))
        return paired(logarithms, "%.2f", self.plan.seeds, math.exp)

    def figures(self, folder):
        """NAME-CLUSTER.svg over the numbers of workers, with standard errors: test accuracy, or, of a plan that chooses
        by time, the time to the target."""
        try:
            from matplotlib import pyplot
        except ImportError:
            raise Refused("--figures needs matplotlib: apt-get install python3-matplotlib")
        plan, name = self.plan, "seconds" if self.plan.by_time else "points"
        shown = f"virtual seconds to {100 * plan.target:.4g} %" if plan.by_time else "test accuracy in %"
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        for cluster in [c["name"] for c in plan.clusters]:
            figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
            axes.set_prop_cycle(pyplot.cycler(linestyle=["-", "--", ":"]) * pyplot.cycler(color=pyplot.cm.tab10.colors))
            for strategy in plan.strategies:
                values = {k: [r[name] for r in self.runs[cluster, k, strategy.text].values() if r[name] is not None]
                          for k in self.workers}
                points = [(k, statistics.fmean(v), standard_error(v)) for k, v in values.items() if v]
                if points:
                    axes.errorbar(*zip(*points), marker="o", markersize=4, capsize=3, label=strategy.text)
            axes.set(xscale="log", xlabel="workers", ylabel=shown, yscale="log" if plan.by_time else "linear")
            axes.set_title(textwrap.fill(f"{plan.title}: {cluster}", 90), fontsize="medium")
            axes.set_xticks(self.workers, map(str, self.workers))
            axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
            figure.legend(fontsize="small", loc="outside right upper")
            path = pathlib.Path(folder) / f"{pathlib.Path(plan.path).stem}-{cluster}.svg"
            figure.savefig(path)
            print(path)


def status(plan, results, jobs):
    """Points tried and final runs of each cell, and the hours that are left."""
    text, left, final = "", 0, 0
    widest = max(len(c["name"]) for c in plan.clusters)
    paces = [(t.workers, r["wall_seconds"] / t.epochs) for t, r in results.items() if not r["diverged"]]
    for cell in plan.cells:
        search = Search(plan, results, cell)
        tried, done = len(search.tried), len(search.runs)
        final += done
        finalists = len(search.missing) if tried == plan.search else plan.finalists * (plan.tuning_seeds - 1)
        searching = 0 if search.chosen else max(0, plan.search - tried) + finalists
        same = [pace for workers, pace in paces if workers == cell.workers] or [pace for _, pace in paces]
        if same:
            left += statistics.fmean(same) * (searching * plan.tuning_epochs + (plan.seeds - done) * plan.epochs)
        text += (f"{cell.strategy.text:<40} {cell.workers:4} workers, {cell.cluster:<{widest}}  {tried:3} of "
                 f"{plan.search} points tried{', chosen' * bool(search.chosen)}, {done} of {plan.seeds} final runs\n")
    text += f"{len(results)} runs, {final} of {len(plan.cells) * plan.seeds} final; "
    return text + (f"about {left / 3600 / jobs:.1f} hours are left with {counted(jobs, 'job')}\n" if paces
                   else "no run has ended: the time that is left is unknown\n")


# ---- checks ----------------------------------------------------------------------------------------------------------
def cpu_of(made_by):
    """Of "0.1.0, git 1a2b3c4, AMD EPYC, oneDNN 2.6.3, AVX2", or without a commit: what is after the version."""
    return re.sub(r"^[^,]*(, git [^,]*)?", "", made_by)


def contradiction(results, trial, again):
    """Why a row that was run again contradicts the results; empty: it does not. PLAN.md says what may differ."""
    was = results[trial]
    said = ["diverged" if o["diverged"] else f"{100 * o['accuracy']:.7g} %" for o in (was, again)]
    both = f"recorded: {said[0]} by {was['made_by']}; now: {said[1]} by {again['made_by']}"
    if was["made_by"] == again["made_by"] and "-dirty" not in was["made_by"]:
        fields = "diverged accuracy evaluations delays participation dropped refused gap correction".split()
        return "" if all(was[name] == again[name] for name in fields) else both + " (not the same bits)"
    same_cpu = cpu_of(was["made_by"]) == cpu_of(again["made_by"])
    seeds = [r["accuracy"] for t, r in results.items() if t._replace(seed=trial.seed) == trial and t != trial
             and not r["diverged"]] + ([] if again["diverged"] else [again["accuracy"]])
    most = max(0.01 if same_cpu else 0.03, 3 * statistics.stdev(seeds) if len(seeds) > 1 else 0)
    allowed = f" (they may differ by {100 * most:.7g} points)"
    if same_cpu and was["diverged"] != again["diverged"]:
        return both
    for at, (one, two) in enumerate(zip(was["evaluations"], again["evaluations"]), 1):
        if any(abs(one[i] - two[i]) > 1e-6 * two[i] for i in (0, 1)):
            return f"{both}, evaluation {at}: {one[1]:.7g} virtual seconds were recorded, now {two[1]:.7g}"
        if same_cpu and abs(one[2] - two[2]) > most:
            return f"{both}, evaluation {at}: {100 * one[2]:.7g} % was recorded, now {100 * two[2]:.7g} %{allowed}"
    if was["diverged"] or again["diverged"]:
        return ""
    if abs(was["accuracy"] - again["accuracy"]) > most:
        return both + allowed
    # Runs that end at a target may end sooner or later. Then other pushes were made.
    shares = was["participation"], again["participation"]
    pushes = was["delays"] == again["delays"] and math.isclose(*shares, rel_tol=1e-6)
    return "" if pushes or len(was["evaluations"]) != len(again["evaluations"]) else (
        both + ": other delays or another participation")


def can_run(plan):
    """Whether this CPU has the plan's type."""
    try:
        simulate(["--dry-run", "--dtype", plan.dtype])
        return True
    except Refused as e:
        print(f"{plan.path}: left out: {e}")
        return False


def check(plans, count, seed, seconds):
    """Rows of all plans' results, drawn together, are run again. Exits with 1 when one contradicts the results."""
    results = {plan: read_results(results_of(plan), plan) for plan in plans}
    rows = [(plan, t) for plan in plans if can_run(plan) for t, r in results[plan][0].items()
            if r["wall_seconds"] <= seconds]
    if not rows:
        raise Refused(f"no row took at most {seconds:g} s: choose a larger --check-seconds")
    drawn = random.Random(seed).sample(rows, min(count, len(rows)))
    print(f"{len(drawn)} of {len(rows)} rows, drawn with seed {seed} of those of at most {seconds:g} s")
    wrong = 0
    for plan, trial in drawn:
        recorded, header, _ = results[plan]
        row = plan.run(trial)
        if header["data"] and row["data"] != header["data"]:
            raise Refused(f"{plan.path}: its runs had other data ({header['data']}; now: {row['data']})")
        again = checked_outcome(row, trial)
        show(trial, again)
        why = contradiction(recorded, trial, again)
        agrees = ("not decided: on one of two CPUs it diverged, only times were compared"
                  if recorded[trial]["diverged"] != again["diverged"] else "agrees, every evaluation to the bit"
                  if recorded[trial]["evaluations"] == again["evaluations"] else "agrees")
        print(f"{plan.path}: {why or agrees}", flush=True)
        wrong += bool(why)
    if wrong:
        sys.exit(f"experiment: {counted(wrong, 'row')} of {len(drawn)} contradict the results")


def show(trial, outcome):
    accuracy = "diverged" if outcome["diverged"] else (
        f"{'test' if trial.final else 'held back'} {100 * outcome['accuracy']:.2f} %")
    print(f"{trial.strategy:<26} {trial.workers:4} workers  {trial.cluster:<8} η {trial.rate:<9.4g} "
          f"μ {trial.momentum:<5.3g} {trial.epochs} epochs  seed {trial.seed:<5} {accuracy}, "
          f"{outcome['wall_seconds']:.0f} s", file=sys.stderr)


def results_of(plan):
    return str(pathlib.Path(plan.path).with_suffix(".jsonl"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plans", nargs="+", metavar="PLAN.json")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each (2)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--table", action="store_true", help="only print the tables of the runs that there are")
    only.add_argument("--figures", metavar="FOLDER", help="only draw the runs that there are")
    only.add_argument("--status", action="store_true", help="only print what is done and the hours that are left")
    only.add_argument("--check", metavar="ROWS[,SEED]", help="run so many rows of the results again, and compare")
    parser.add_argument("--check-seconds", type=float, default=300, help="only rows that took at most so long (300)")
    options = parser.parse_args()
    rows = re.fullmatch(r"([1-9]\d*)(?:,(\d+))?", options.check or "1")
    if not rows:
        raise Refused(f"--check {options.check}: expected a number of rows from 1, or ROWS,SEED")
    if len(options.plans) > 1 and not options.check:
        raise Refused("name one plan (--check takes several)")
    if not 1 <= options.jobs <= 1000:
        raise Refused(f"--jobs {options.jobs}: expected 1 to 1000")
    plans = [Plan(path) for path in options.plans]
    if options.check:
        return check(plans, int(rows[1]), int(rows[2] or random.randrange(1000000)), options.check_seconds)
    plan, path = plans[0], results_of(plans[0])
    if not (options.table or options.figures or options.status):
        print("each run is kept: when this is interrupted, the same command goes on", file=sys.stderr)
        carry_out(plan, path, options.jobs, plan.run)
    if not options.status and not os.path.exists(path):
        raise Refused(f"{path}: there are no results: the same command without an option makes them")
    results = read_results(path, plan)[0]
    if options.status:
        print(status(plan, results, options.jobs), end="")
    elif options.figures:
        Report(plan, results).figures(options.figures)
    else:
        print(Report(plan, results).tables(), end="")


if __name__ == "__main__":
    try:
        main()
    except (OSError, Refused) as e:
        what = f"{e.filename}: {e.strerror}" if isinstance(e, OSError) else e
        print(f"experiment: {what}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
