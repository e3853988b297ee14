"""dist/lab/experiment.py: the search on a runner whose best point is known, interrupted after every run; censored runs,
intervals against values worked out by hand; rows that are checked; plans and the lines of their errors."""
import contextlib
import copy
import io
import json
import math
import pathlib
import re
import sys
import tempfile
import threading
import unittest

sys.path.insert(0, "dist/lab")
import experiment
from experiment import Plan, Refused, Report, Results, Search, Strategy, contradiction, slow_workers, time_to

DDC, RINGMASTER = "ddc-asgd", "ringmaster:R={2,4}+asgd:clip={0.5,1}"


def accuracy_of(t):
    """ddc-asgd: best at η = 0.16, μ = 0.95. ringmaster: at η = 0.02/√workers, R = 16, clip = 0.125."""
    best, off = 0.16, 20 * abs(t.momentum - 0.95)
    if t.strategy != DDC:
        values = [float(re.search(name + r"=([\d.]+)", t.strategy)[1]) for name in ("R", "clip")]
        best, off = 0.02 / math.sqrt(t.workers), abs(math.log2(values[0] / 16)) + abs(math.log2(values[1] / 0.125))
    return 0.9 - 0.02 * abs(math.log2(t.rate / best)) - 0.02 * off + 1e-4 * (t.seed % 10)


def row_of(t, **changes):
    a = accuracy_of(t)
    return t._asdict() | {
        "status": "ok", "test" if t.final else "validation": a, "delays": [1, 2, 3], "participation": 0.5, "dropped": 7,
        "evaluations": {"epoch": [1 / 3, 2], "seconds": [10 / 3, 20], "accuracy": [a / 2, a]}, "refused": 0,
        "gap": 0.25, "correction": 0, "wall_seconds": 1, "data": "100 + 10 pictures",
        "made_by": "0.1.0, git 1a2b3c4, a CPU"} | changes


def outcome_of(t, **changes):
    return experiment.outcome_of(row_of(t)) | changes


class Experiment(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.file, self.runs = str(self.folder / "plan.jsonl"), 0

    def plan(self, **fields):
        all_fields = {"strategies": [DDC, RINGMASTER], "workers": [1, 16], "rates": [0.01, 0.02, 0.04], "search": 3,
                      "tuning_epochs": 2, "tuning_seeds": 2, "finalists": 2, "seeds": 3} | fields
        path = self.folder / "plan.json"
        path.write_text(json.dumps(all_fields, ensure_ascii=False))
        return Plan(path)

    def carry_out(self, plan, jobs=1, until=1 << 30, run=row_of):
        def counted(trial):
            self.runs += 1
            if self.runs > until:
                raise Refused("interrupted")
            return run(trial)
        results = Results(plan)
        with contextlib.redirect_stderr(io.StringIO()):
            results.carry_out(jobs, counted)
        return results

    def finished(self, plan, cell, row=outcome_of):
        results = {}
        while not (search := Search(plan, results, cell)).chosen:
            results |= {t: row(t) for t in search.missing}
        return search, results

    def refused(self, text, *parts):
        path = self.folder / "bad.json"
        path.write_text(text)
        with self.assertRaises(Refused) as e:
            Plan(path)
        for part in parts:
            self.assertIn(part, str(e.exception).replace(str(self.folder) + "/", ""))

    # ---- the search
    def test_it_finds_the_best_beyond_the_lists_of_the_plan(self):
        plan = self.plan(search=40)
        results = self.carry_out(plan)
        for cell in plan.cells:
            search = Search(plan, results, cell)
            self.assertEqual(len(search.tried), 40)
            self.assertFalse(search.edge)
            if cell.strategy.text == DDC:
                self.assertEqual((search.chosen.rate, search.chosen.momentum), (0.16, 0.95))
            else:
                self.assertEqual(search.chosen.rate, 0.02 if cell.workers == 1 else 0.005)
                self.assertEqual(search.chosen.momentum, 0, "its rule keeps no velocity")
                self.assertEqual(search.chosen.strategy, "ringmaster:R=16+asgd:clip=0.125")

    def test_it_may_be_for_time(self):
        """The larger the rate the sooner the target is reached, up to where it diverges."""
        def row(t):
            o = outcome_of(t, diverged=t.rate > 0.7)
            return o | ({"evaluations": [(1, 0.1 / t.rate, 0.5), (2, 50, o["accuracy"])]} if t.rate > 0.05 else {})
        for choose_by, rate in (("accuracy", 0.16), ("time", 0.64)):
            plan = self.plan(search=20, target=0.5, choose_by=choose_by)
            self.assertEqual(self.finished(plan, plan.cells[2], row)[0].chosen.rate, rate)

    def test_every_cell_has_the_same_budget(self):
        plan = self.plan(search=24)
        for cell in plan.cells:
            _, results = self.finished(plan, cell)
            self.assertEqual(sum(t.seed == 1001 for t in results), plan.search)
            self.assertEqual(len(results), plan.search + plan.finalists * (plan.tuning_seeds - 1))
            self.assertFalse(any(t.final for t in results), "nothing is chosen on test pictures")

    def test_the_order_of_neighbours(self):
        plan = self.plan(rates=[0.01], search=9, workers=[1], momenta=[0.9, 0.5])
        def tried(cell):
            first = []
            def row(t):
                first[:] = first or [t]
                return outcome_of(t, accuracy=0.9 if t == first[0] else 0.1)
            search, _ = self.finished(plan, cell, row)
            return [search.trial(p) for p in search.tried]
        a, b = map(tried, plan.cells)
        self.assertEqual([(t.rate, t.momentum) for t in a[1:5]],
                         [(0.02, 0.9), (0.005, 0.9), (0.005, 0.95), (0.04, 0.5)])
        self.assertEqual([t.strategy[13:] for t in (b[0], *b[3:7])],
                         ["2+asgd:clip=0.5", "4+asgd:clip=0.5", "1+asgd:clip=0.5", "2+asgd:clip=1", "2+asgd:clip=0.25"])

    def test_a_budget_that_ends_at_an_edge_is_marked(self):
        plan = self.plan()
        self.assertIn(")†", Report(plan, self.carry_out(plan)).tables())

    def test_lists_of_constants_continue(self):
        s = Strategy("ringmaster:R={4,2,8}+asgd:clip={1,4}")
        self.assertEqual(s.constants, [("R", [2, 4, 8]), ("clip", [1, 4])])
        for indices, values in (([3, 3], [16, 64]), ([-1, -2], [1, 1 / 16]), ([-2, 0], [None, 1])):
            self.assertEqual(s.values(indices), values)
        h = Strategy("local-sgd:{2,3}")
        self.assertEqual((h.values([2]), h.values([-1]), h.filled([5])), ([5], [1], "local-sgd:5"))
        for text, momentum in (("sa-asgd", False), ("all-reduce", True), ("outer:H={8,16}", True), ("bsp", True)):
            self.assertEqual(Strategy(text).momentum, momentum, text)

    def test_parallel_runs_and_interruptions_change_nothing(self):
        plan = self.plan(search=6)
        every = self.carry_out(plan)
        needed = self.runs
        self.assertEqual(needed, len(every))
        pathlib.Path(self.file).unlink()
        self.assertEqual(self.carry_out(plan, jobs=4), every)
        pathlib.Path(self.file).unlink()
        for until in range(1, needed):
            self.runs = until - 1
            with self.assertRaises(Refused):
                self.carry_out(plan, until=until)
            with open(self.file, "a") as f:  # killed while it wrote
                f.write('{"strategy":"a","workers":1,"ra)')
            Results(plan)
        self.assertEqual(self.carry_out(plan), every)
        self.runs = 0
        self.assertEqual(self.carry_out(plan), every)
        self.assertEqual(self.runs, 0)
        text = pathlib.Path(self.file).read_text()
        for line in text.splitlines():
            json.loads(line)
        pathlib.Path(self.file).write_text(text[:-1])  # whole, but for its line feed
        self.assertEqual(self.carry_out(plan), every)
        self.assertEqual(pathlib.Path(self.file).read_text(), text)
        self.assertIn("3 of 3 points tried, chosen, 3 of 3 final runs",
                      Report(self.plan(), self.carry_out(self.plan())).status(2))

    def test_a_failing_run_loses_no_other(self):
        first = threading.Event()
        def run(trial):
            if self.runs == 1:
                first.wait(10)
                return row_of(trial)
            first.set()
            raise Refused("out of memory")
        with self.assertRaisesRegex(Refused, "out of memory"):
            self.carry_out(self.plan(), jobs=2, run=run)
        self.assertEqual(len(Results(self.plan())), 1)

    # ---- results
    def test_other_conditions_are_another_experiment(self):
        self.carry_out(self.plan())
        for fields, part in (({"batch": 32}, "another experiment"),
                             ({"clusters": [{"name": "even", "shape": 10}]}, "another cluster")):
            with self.assertRaisesRegex(Refused, "plan.jsonl:1: .*" + part):
                Results(self.plan(**fields))
        with self.assertRaisesRegex(Refused, "other data"):
            self.carry_out(self.plan(seeds=4), run=lambda t: row_of(t, data="99 + 10 pictures"))
        text = "something else\nof another kind\n"
        pathlib.Path(self.file).write_text(text)
        with self.assertRaises(Refused):
            self.carry_out(self.plan())
        self.assertEqual(pathlib.Path(self.file).read_text(), text)

    def test_results_that_cannot_be_are_refused(self):
        plan = self.plan()
        self.carry_out(plan)
        *lines, last = pathlib.Path(self.file).read_text().splitlines()
        row = json.loads(last)
        for change in ({"test": 1.5}, {"test": 0.123}, {"participation": 2}, {"dropped": -1}, {"delays": [-1]},
                       {"status": "odd"}, {"evaluations": {"epoch": [1, 1], "seconds": [1, 2], "accuracy": [0.1, 0.2]}},
                       {"evaluations": {"epoch": [1], "seconds": [1, 2], "accuracy": [0.1, 0.2]}}, {"workers": None}):
            bad = {k: v for k, v in (row | change).items() if v is not None}
            pathlib.Path(self.file).write_text("\n".join([*lines, json.dumps(bad)]) + "\n")
            with self.assertRaisesRegex(Refused, f"plan.jsonl:{len(lines) + 1}: "):
                Results(plan)
        pathlib.Path(self.file).write_text("\n".join([*lines, last, last]) + "\n")
        with self.assertRaisesRegex(Refused, "a second line"):
            Results(plan)

    # ---- statistics
    def test_intervals_are_those_worked_out_by_hand(self):
        half = 4.3027 / math.sqrt(3)  # differences 1, 2, 3: standard deviation 1
        self.assertEqual(experiment.mean_text([1, 2, 3], "%+.2f", "3 of 4 pairs", True),
                         f"+2.00 [{2 - half:+.2f}, {2 + half:+.2f}] (3 of 4 pairs)")
        self.assertEqual(experiment.mean_text([90, 92, 94], "%.2f", ""), f"92.00 ± {2 / math.sqrt(3):.2f}")

    def test_times_to_a_target(self):
        o = {"evaluations": [(1, 10, 0.5), (2, 20, 0.7), (3, 30, 0.6), (4, 40, 0.9)]}
        for target, seconds in ((0.6, 15), (0.75, 35), (0.4, 10)):
            self.assertAlmostEqual(time_to(target, o), seconds)
        self.assertIsNone(time_to(0.91, o))

    def test_censored_runs_are_counted_and_not_averaged(self):
        plan = self.plan(target=0.6, workers=[1])
        results = self.carry_out(plan)
        one, other = (Search(plan, results, c).chosen for c in plan.cells)
        # Times 10, 20 and never; the other's 5, 5, and diverged before it got there.
        for k in range(3):
            last = 0.5 if k == 2 else 0.6
            results[one._replace(seed=k + 1)] |= {"accuracy": 0.8,
                                                  "evaluations": [(0.5, 0, 0), (1, 10 * (k + 1), last)]}
            results[other._replace(seed=k + 1)] |= {"accuracy": 0.8, "diverged": k == 2,
                                                    "evaluations": [(0.5, 0, 0), (1, 5, 0.1 if k == 2 else 0.6)]}
        table = Report(plan, results).tables()
        for part in ("80.00 ± 0.00 (1 of 3 diverged) (η 0.", "| 15.0 ± 5.0 (1 of 3 not reached) |", "(2 of 3 pairs)",
                     f"| {1 / math.sqrt(8):.2f} ["):
            self.assertIn(part, table)
        self.assertNotIn("nan", table)

    def test_a_table_has_the_cells_with_final_runs_and_counts_the_others(self):
        plan = self.plan(target=0.2)
        results = self.carry_out(plan)
        self.assertIn("3 of 3 at the first evaluation", Report(plan, results).tables())
        some = {t: o for t, o in results.items() if t.strategy == DDC or not t.final}
        table = Report(plan, some).tables()
        self.assertIn("| ddc-asgd |", table)
        self.assertIn("2 of 4 cells: no final run yet.", table)
        self.assertNotIn("| ringmaster", table)
        self.assertNotIn("better by", table)

    # ---- checks
    def test_a_falsified_row_is_found(self):
        plan = self.plan()
        results = self.carry_out(plan)
        here, version, cpu = "0.1.0, git 1a2b3c4, a CPU", "0.1.0, git 9999999, a CPU", "0.0.1, another CPU"
        for t in list(results)[::7]:
            again = outcome_of(t)
            self.assertEqual(contradiction(results, t, again), "")
            def said(again=again, **changes):
                changed = copy.deepcopy(results)
                changed[t] |= changes
                return contradiction(changed, t, again)
            def moved(by, at):
                evaluations = [list(e) for e in again["evaluations"]]
                evaluations[at][2] += by
                return {"evaluations": list(map(tuple, evaluations))}
            for changes in (moved(1e-6, 1), {"gap": 0.7}, {"correction": 0.7}, {"dropped": 1}, {"refused": 1}):
                self.assertIn("not the same bits", said(**changes))
            dirty = here.replace("4,", "4-dirty,")
            self.assertEqual(said(again | {"made_by": dirty}, made_by=dirty, **moved(1e-6, 1)), "")
            self.assertEqual(said(made_by=version, **moved(0.005, 1)), "", "within 1 point")
            self.assertIn("evaluation 2", said(made_by=version, **moved(0.02, 1)))
            self.assertEqual(said(made_by=cpu, accuracy=again["accuracy"] + 0.02), "", "within 3 points")
            self.assertIn("may differ by 3 points", said(made_by=cpu, accuracy=again["accuracy"] + 0.04))
            later = [(e, s * 1.01, a) for e, s, a in again["evaluations"]]
            for changes in ({"evaluations": later}, {"delays": [1, 3, 3]}, {"participation": 0.6}):
                self.assertNotEqual(said(made_by=cpu, **changes), "", "what rounding does not change")
            self.assertNotEqual(said(made_by=version, diverged=True), "")
            self.assertEqual(said(made_by=cpu, diverged=True), "")
            both = again | {"diverged": True}
            self.assertEqual(said(both, made_by=version, diverged=True), "")
            self.assertIn("evaluation 1", said(both, made_by=version, diverged=True, **moved(0.02, 0)))

    # ---- plans
    def test_a_plan_is_read(self):
        plan = self.plan(rates=[0.4, 0.1], target=0.5, momenta=[0.9], tuning_epochs=4, clusters=[
            {"name": "even"}, {"name": "uneven", "shape": 10, "slow_share": 0.5, "slow_factor": 4, "bandwidth": 1e9}])
        self.assertEqual((plan.title, plan.rates, plan.epochs, plan.target), ("plan", [0.1, 0.4], 4, 0.5))
        self.assertEqual(list(slow_workers(plan.clusters[1], 5)), [3, 4])

    def test_every_error_of_a_plan_names_its_line(self):
        rest = '{\n"strategies":["asgd"],\n"workers":[1],\n"rates":[0.1]'  # lines 2, 3, 4
        for line5, where, part in (
                ('"epoch":3', 5, '"epoch" is not a field of a plan'), ('"epochs":0', 5, "from 1"),
                ('"epochs":2.5', 5, "whole number"), ('"epochs":"2"', 5, "whole number"),
                ('"epochs":2,\n"tuning_epochs":3', 6, 'at most "epochs"'), ('"epochs":2,\n"epochs":3', 6, "twice"),
                ('"augment":1', 5, "true or false"), ('"model":3', 5, "a text"), ('"dtype":"f16"', 5, "f32 or bf16"),
                ('"target":92', 5, "below 1"), ('"choose_by":"time"', 5, 'needs a "target"'),
                ('"choose_by":"speed"', 5, "accuracy or time"), ('"tuning_seed":5', 5, "below 1001"),
                ('"target":0.5,"epochs":4,\n"tuning_epochs":2,"schedule":"cosine",\n"choose_by":"time"', 7,
                 "two schedules"),
                ('"target":0', 5, "above 0"), ('"clusters":[{"name":"a","shape":0.001}]', 5, "0.001"),
                ('"clusters":[{"name":"a","slow_factor":0.5}]', 5, "only together"), ('"search":0', 5, "from 1"), ('"momenta":[0.9,1]', 5, "below 1"), ('"momenta":[0.9,0.9]', 5, "twice"),
                ('"momenta":[]', 5, "a list"), ('"clusters":[{"shape":1}]', 1, '"name" is missing'),
                ('"clusters":[\n{"name":"a","shap":1}]', 6, "not a field of a cluster"),
                ('"clusters":[{"name":"a"},{"name":"a"}]', 5, "none twice"), ('"clusters":[3]', 5, "an object"),
                ('"clusters":[{"name":"a",\n"slow_share":0.5}]', 5, "only together"), ('"seeds" 3', 5, "delimiter")):
            self.refused(rest + ",\n" + line5 + "\n}", f"bad.json:{where}: ", part)
        self.refused('{\n"strategies":["asgd"],\n"workers":[1]}', "bad.json:1: ", '"rates" is missing')
        self.refused("[1]", "bad.json:1: ", "a plan is an object")
        self.refused('{"strategies":["asgd"],"rates":[0.1],\n"workers":[16,4],\n'
                     '"clusters":[{"name":"a","slow_share":0.2,"slow_factor":2}]}', "bad.json:3: ", "0.2 of 4 workers is none")
        self.refused('{"workers":[16,4],"rates":[0.1],\n"strategies":["quorum:8"]}',
                     "bad.json:2: ", "there are 4 workers")
        for strategy, part in (("agsd", "agsd"), ("asgd:clip={1", "not closed"), ("asgd:clip={1}", "two values"),
                               ("asgd:clip={1,1}", "twice"), ("asgd:clip={0,1}", "clip"),
                               ("ddc-asgd:clamp={on,off}", "a row of its own"),
                               ("ringmaster:R={1,2.5}", "whole number")):
            self.refused('{"workers":[1],"rates":[0.1],\n"strategies":["bsp","' + strategy + '"]}',
                         "bad.json:2: ", part)
        for workers, rates, where, part in (("[0]", "[0.1]", 2, "from 1"), ("[4,4]", "[0.1]", 2, "twice"),
                                            ("[1e300]", "[0.1]", 2, "whole number"), ("[1]", "[0.1,0.3]", 3, "power of two")):
            self.refused('{"strategies":["asgd"],\n"workers":' + workers + ',\n"rates":' + rates + "}",
                         f"bad.json:{where}: ", part)


if __name__ == "__main__":
    unittest.main()
