"""Pages that examples/report.py makes, parsed and counted by hand."""
import html.parser
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as xml

PROGRAM, BUILD = os.path.abspath("examples/report.py"), os.path.abspath(os.environ.get("BUILD", "build"))
LOGS = os.path.abspath("examples/recipes/logs/resnet20_cifar10_")
spec = importlib.util.spec_from_file_location("report", PROGRAM)
report = importlib.util.module_from_spec(spec)
sys.modules["report"] = report
spec.loader.exec_module(report)


class Tags(html.parser.HTMLParser):
    """Tags of HTML and SVG open and close in order."""
    def __init__(self, page):
        super().__init__()
        self.open, self.seen, self.wrong = [], [], ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong = self.wrong or f"</{tag}> at {self.getpos()}"


def charts(page):
    """By title: the charts of a page, as XML."""
    found = [xml.fromstring(svg) for svg in re.findall(r'<svg class="chart" .*?</svg>', page, re.S)]
    return {svg.get("aria-label"): svg for svg in found}


def lines(svg, kind):
    return [g for g in svg.iter("g") if kind in g.get("class").split()]


def dots(svg):
    return [p for p in svg.iter("path") if p.get("class") == "dot"]


def texts(svg, kind):
    return [t for t in svg.iter("text") if kind in t.get("class").split()]


def numbers(path):
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path.get("d"))]


START = {"event": "start", "batches_per_epoch": 10}


def epoch(number, **more):
    return {"event": "epoch", "epoch": number, "train_loss": 1.5, "test_loss": 2, "test_accuracy": 0.4,
            "images_per_second": 5000, "seconds": 10} | more


END = {"event": "end", "steps": 30, "stopped": 0}


class Report(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def file(self, name, *content, encoding="utf-8"):
        """Lines as objects, or text as it is."""
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding=encoding) as file:
            file.write("".join(c if isinstance(c, str) else json.dumps(c) + "\n" for c in content))
        return path

    def run_program(self, *arguments):
        return subprocess.run([sys.executable, PROGRAM, *arguments], cwd=self.folder, capture_output=True, text=True,
                              timeout=60)

    def page(self, *arguments):
        done = self.run_program(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(os.path.join(self.folder, "report.html"), encoding="utf-8") as file:
            page = file.read()
        tags = Tags(page)
        self.assertEqual((tags.wrong, tags.open), ("", []))
        for never in ("script", "link", "img", "iframe"):
            self.assertNotIn(never, tags.seen)
        for never in ("http", "nan", "None", "inf "):
            self.assertFalse(never in page, never)
        for svg in charts(page).values():
            for x, y in (point for path in svg.iter("path") for point in numbers(path)):
                self.assertTrue(0 <= x <= report.WIDTH and 0 <= y <= report.HEIGHT, (svg.get("aria-label"), x, y))
        self.said = done.stderr
        return page

    def shows(self, page, part):
        self.assertTrue(part in page, part)

    def refused(self, text, *arguments):
        done = self.run_program(*arguments)
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
        self.assertIn(text, done.stderr)

    # ---- numbers, labels, colours ------------------------------------------------------------------------------------
    def test_ticks_are_round_and_cover_the_range(self):
        self.assertEqual(report.round_ticks(3, 97, 5), [0, 20, 40, 60, 80, 100])
        for low, high in ((1e-9, 3e-9), (-7.3, 12.1), (5, 5), (0, 0), (1e20, 2e20), (41.2, 128.6)):
            ticks = report.round_ticks(low, high, 5)
            self.assertTrue(2 <= len(ticks) <= 12, ticks)
            self.assertTrue(ticks[0] <= low + 1e-9 * abs(low) and ticks[-1] >= high - 1e-9 * abs(high), ticks)

    def test_numbers_for_people(self):
        for value, most, text in ((21500, 4, "21.5k"), (0.32998, 4, "0.33"), (math.nan, 4, "–"), (5000, 3, "5k"),
                                  (999, 3, "999"),
                                  (1.2e-6, 4, "1.2e-6"), (1e-100, 4, "1e-100"), (-25e6, 4, "-25M"), (0, 4, "0")):
            self.assertEqual(report.short(value, most), text)
        self.assertEqual([report.size(v) for v in (0, 1536, 3 << 20)], ["0 B", "1.5 KiB", "3 MiB"])
        self.assertEqual([report.duration(v) for v in (1, 600, 36000)], ["1.0 s", "10.0 min", "10.0 h"])

    def test_labels_tell_files_apart_and_lie_apart(self):
        for paths, labels in ((["a/run_seed1.jsonl", "a/run_seed2.jsonl"], ["seed1", "seed2"]),
                              (["a/x.jsonl", "b/x.jsonl"], ["a", "b"]),
                              (["x_1_y.jsonl", "x_22_y.jsonl"], ["1", "22"]),
                              (["one.jsonl"], ["one"]),
                              (["a.jsonl", "a_b.jsonl"], ["a", "a_b"])):
            self.assertEqual(report.labels_of(paths), labels)
        for heights in ([220] * 11 + [50], [46] * 12, [], [100, 90, 95]):
            y = sorted(report.separate(list(heights), 14, 52, 220))
            self.assertTrue(all(b - a >= 14 for a, b in zip(y, y[1:])), y)
            self.assertTrue(all(52 <= v <= 220 for v in y), y)

    def test_nine_colours_are_told_apart_and_readable(self):
        def colour(text):
            part = [int(text[i:i + 2], 16) / 255 for i in (1, 3, 5)]
            r, g, b = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in part)
            xyz = (0.4124 * r + 0.3576 * g + 0.1805 * b, 0.2126 * r + 0.7152 * g + 0.0722 * b,
                   0.0193 * r + 0.1192 * g + 0.9505 * b)
            x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116
                       for v in (xyz[0] / 0.9505, xyz[1], xyz[2] / 1.0888))
            return xyz[1], (116 * y - 16, 500 * (x - y), 200 * (y - z))
        for colours, paper in ((report.LIGHT, "#ffffff"), (report.DARK, "#1c1f25")):
            self.assertEqual(len(colours), 9)
            for i, one in enumerate(map(colour, colours)):
                dim, bright = sorted((one[0], colour(paper)[0]))
                self.assertGreater((bright + 0.05) / (dim + 0.05), 4.5, colours[i])
                for other in colours[:i]:  # CIELAB: below about 20 two thin lines are easily taken for one
                    self.assertGreater(math.dist(one[1], colour(other)[1]), 25, (colours[i], other))

    # ---- charts ------------------------------------------------------------------------------------------------------
    def test_a_chart_draws_every_point_and_gaps_where_there_is_none(self):
        svg = xml.fromstring(report.chart("Loss & <more>", "epoch", "",
                                          [report.Line("a", [(1, 3), (2, math.nan), (3, 1), (4, 2)]),
                                                                         report.Line("b", [(1, 2), (4, 2)], 1)]))
        self.assertEqual(len(dots(svg)), 5)
        self.assertEqual([g.find("path").get("d").count("M") for g in svg.iter("g")], [2, 1])
        self.assertEqual([t.text for t in texts(svg, "end")], ["a", "b"])
        for points in ([], [(1, math.nan)], [(math.nan, 1)]):
            self.assertIn("no values", report.chart("t", "x", "", [report.Line("n", points)]))
        for points in ([(1, 5)], [(1, 0), (2, 0)], [(0, -1e-3), (1e9, -1e-3)], [(1, -1e299), (1e-299, 1e299)]):
            self.assertEqual(len(dots(xml.fromstring(report.chart("t", "x", "", [report.Line("n", points)])))),
                             len(points))

    def test_many_steps_are_thinned_and_keep_their_extremes(self):
        steps = [{"event": "step", "step": i, "loss": {4321: 1000, 4322: -1000}.get(i, i % 7)} for i in range(1, 50001)]
        page = self.page(self.file("run.jsonl", START, *steps, epoch(1), END))
        svg = charts(page)["Loss by epoch"]
        self.assertLess(len(page), 100_000)
        heights = [y for _, y in numbers(lines(svg, "faint")[0].find("path"))]
        self.assertEqual((len(heights), min(heights), max(heights)), (800, report.TOP, report.BOTTOM))

    # ---- pages -------------------------------------------------------------------------------------------------------
    def test_what_programs_write(self):
        if not os.path.exists(BUILD + "/fashion_mnist"):
            self.skipTest("no programs in " + BUILD)
        train = "--data synthetic --model mlp --val 55000 --epochs 2 --log-every 10 --threads 1 --metrics run.jsonl"
        tune = ("--data synthetic --data-set fashion-mnist --model lenet5 --threads 1 --memory-budget 1G "
                "--batches 16,32 --metrics tuned.jsonl")
        for command in ("fashion_mnist " + train, "tune " + tune):
            subprocess.run([f"{BUILD}/{command.split()[0]}", *command.split()[1:]], cwd=self.folder, check=True,
                           capture_output=True)
        page = self.page("run.jsonl", "tuned.jsonl")
        self.assertEqual((self.said, len(charts(page))), ("", 11))
        for chart in ("Loss by epoch", "Accuracy by epoch", "Learning rate by epoch", "Throughput by epoch",
                      "Time of a sample by minibatch"):
            self.assertEqual({len(numbers(line.find("path"))) for line in lines(charts(page)[chart], "solid")}, {2},
                             chart)
        memory = next(svg for label, svg in charts(page).items() if label.startswith("Memory over one iteration"))
        self.assertEqual(len(lines(memory, "area")), 4)

    def test_runs_of_the_recipe(self):
        logs = [LOGS + name + ".jsonl" for name in ("tandem_seed1", "torch_seed1", "torch_seed2")]
        page = self.page(*logs, "--title", "ResNet-20 <CIFAR-10>")
        for part in ("87.27 %", "ResNet-20 &lt;CIFAR-10&gt;", "recipe.max_lr", 'class="differs"', 'class="same"',
                     "prefers-color-scheme", "@media print"):
            self.shows(page, part)
        self.assertEqual(self.said, "")
        for label in ("tandem_<wbr>seed1", "torch_<wbr>seed1", "torch_<wbr>seed2"):
            self.assertEqual(page.count(label), 3, "in the list of runs and in both tables")
        self.assertEqual(len(dots(charts(page)["Accuracy by epoch"])), 3 * 2 * 10)
        self.assertEqual([len(texts(svg, "end")) for svg in charts(page).values()], [3] * 4 + [1] * 2 + [3] * 2)

    def test_whole_epochs_and_one_meaning_of_a_stroke(self):
        page = self.page(self.file("run.jsonl", START, epoch(1, val_accuracy=0.3),
                                   epoch(2, images_per_second=7000), epoch(3, images_per_second=9000), END))
        self.assertEqual(len(charts(page)), 6)
        loss, accuracy = charts(page)["Loss by epoch"], charts(page)["Accuracy by epoch"]
        self.assertEqual([t.text for t in texts(loss, "note")], ["solid: test, dashed: training", "epoch"])
        self.assertEqual([t.text for t in texts(accuracy, "note")], ["solid: test, dotted: validation", "epoch"])
        self.assertEqual([t.text for t in texts(loss, "tick")][-3:], ["1", "2", "3"])
        self.assertEqual((len(dots(loss)), len(dots(accuracy))), (6, 4))
        self.shows(page, "<title>test, epoch 2: 40 %</title>")
        self.shows(page, "<td>7000</td><td>30.0 s</td>")
        self.shows(page, "<title>run, seconds of training 30: 9000 images/s</title>")

    def test_the_best_of_several_and_what_differs(self):
        a = self.file("a.jsonl", START | {"lr": 0.1, "data": "x", "nested": {"on": True, "list": [1, 0.5]}},
                      epoch(1, test_accuracy=0.5), END)
        b = self.file("b.jsonl", START | {"lr": 0.2, "data": "x"},
                      epoch(1, test_loss=3, val_accuracy=0.9, test_accuracy=None),
                      END | {"exposed_seconds": 3})
        page = self.page(a, b)
        best = re.findall(r'<td class="best">([^<]*)</td>', page)
        self.assertEqual(best, ["2", "50.00 %", "5000", "90.00 %", "5000"])
        self.assertEqual(re.findall(r'<tr class="(\w+)"><th>([^<]*)</th>', page),
                         [("same", "batches_per_epoch"), ("differs", "lr"), ("same", "data"), ("same", "nested.on"),
                          ("same", "nested.list")])
        self.shows(page, "<td>yes</td><td>–</td>")
        self.shows(page, "<td>1, 0.5</td>")
        self.shows(page, "<td>3.0 s</td>")

    def test_thirty_runs(self):
        runs = [self.file(f"r{i}.jsonl", START, epoch(1, test_loss=i), epoch(2, test_loss=30 - i), END)
                for i in range(30)]
        page = self.page(*runs)
        looks = re.findall(r'<li><svg class="chart swatch".*?<g class="(c\d) .*?<path class="dot" d="M[\d. ]+([^"]*)"',
                           page)
        self.assertEqual((len(looks), len(set(looks))), (30, 30), "each run has a colour and a marker of its own")
        self.assertEqual(texts(charts(page)["Loss by epoch"], "end"), [], "labels have no room")

    def test_texts_are_only_texts(self):
        evil = "<script>alert(1)</script> & \" ' "
        name = self.file("<script>&'.jsonl", START | {evil: evil, "classes": [evil]}, epoch(1),
                         {"event": "warning", "text": evil},
                         {"event": "tuned", "minibatch": 8, "model": evil},
                         {"event": "budget", "means": evil, "budget": 1, "seconds": 1})
        other = self.file("run.jsonl", START | {evil: evil, "classes": [evil]}, epoch(1),
                          {"event": "not_finite", "reason": evil})
        self.assertGreater(self.page(name, other, "--title", evil).count("&lt;script&gt;alert(1)"), 8)
        strange = self.file("s.jsonl", START | {"a": [{"b": 1}, None, "\0\x1b[1m\ud83d"]}, epoch(1), END)
        self.shows(self.page(strange), "<td>–, –,   [1m?</td>")

    def test_what_tune_has_found(self):
        fits = {"peak": 1 << 20, "swapped": 0, "recomputed": 512, "seconds": 0.25, "stall": 0.125, "exposed": 0,
                "sample_seconds": 0.03125}
        rows = [{"event": "minibatch", "minibatch": 8} | fits,
                {"event": "minibatch", "minibatch": 16, "least": 3 << 20}]
        memory = [{"event": "memory", "seconds": s, "rest": 1 << 20, "kept": 1 << 20, "recomputed": r,
                   "swapped": 1 << 20}
                  for s, r in ((0.001, 0), (0.003, 1 << 20))]
        budgets = [{"event": "budget", "means": m, "budget": b << 20, "seconds": 1 / b} for m in ("swap", "recompute")
                   for b in (1, 2, 4)]
        tuned = {"event": "tuned", "model": "m", "device": "here", "budget": 4 << 20, "minibatch": 8,
                 "learning_rate": 0.1, "noise_scale": None}
        page = self.page(self.file("t.jsonl", tuned, *rows, *budgets, *memory))
        cells = ["8", "1 MiB", "0 B", "512 B", "250", "125", "0", "31.25", "–"]
        self.shows(page, '<tr class="best">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        self.shows(page, "does not fit: at least 3 MiB")
        over_time, against, samples = charts(page).values()
        tops = [[y for _, y in numbers(area.find("path"))] for area in lines(over_time, "area")]
        quarter = (report.BOTTOM - report.TOP) / 4  # of 4 MiB
        for area, levels in zip(tops, ((3, 3, 4, 4), (2, 2, 3, 3), (2, 2, 2, 2), (1, 1, 1, 1))):
            for y, level in zip(area, levels):
                self.assertAlmostEqual(y, report.BOTTOM - level * quarter, delta=0.1)
        self.assertEqual([t.text for t in texts(over_time, "end")],
                         ["swapped", "recomputed", "kept", "the rest", "budget"])
        self.assertEqual((len(dots(against)), len(dots(samples))), (6, 1))

    # ---- files that are damaged, and refusals ------------------------------------------------------------------------
    def test_damaged_files_are_shown_as_far_as_they_go(self):
        cut = self.file("cut.jsonl", START, epoch(1), '{"event":"epo')
        page = self.page(cut)
        self.assertEqual(self.said, f"{cut}:3: cut off in the middle of the line\n"
                         f"{cut}: no end line: the run was killed, or is still going\n")
        self.shows(page, "cut.jsonl:3: cut off")
        step = {"event": "step", "step": 5, "loss": 2}
        bad = self.file("bad.jsonl", step, START, '{"event" 1}\n\n', epoch(1), epoch(1), "[1]\n", step,
                        '{"event":"step","step":6,"loss":NaN}\n',
                        epoch("2"), {"event": "of others"}, END | {"stopped": 1})
        page = self.page(bad)
        for number, why in ((1, "before the start line"), (3, "at column 10"), (6, "epoch 1 after epoch 1"),
                            (7, 'no "event"'), (9, "NaN")):
            self.assertRegex(self.said, f"bad.jsonl:{number}: .*{why}")
        self.assertIn("bad.jsonl: 1 more lines could not be used", self.said)
        self.assertEqual(len(re.findall(r"bad.jsonl:\d", self.said)), 5)
        self.shows(page, "the run was stopped before its last epoch")
        self.assertFalse("no end line" in page)
        young = self.page(self.file("young.jsonl", START))
        self.assertEqual(charts(young), {})
        extremes = epoch(1, train_loss=10**400, test_loss=5e-324), epoch(2, train_loss=-1e308, test_loss=0)
        self.page(self.file("strange.jsonl", "\ufeff", START | {"x": "\ud83d\ude00 é"}, *extremes, "\x00" * 50 + "\n",
                            "[" * 10**5 + "\n", END))
        self.assertEqual(re.findall(r"strange.jsonl:(\d)", self.said), ["4", "5"])
        latin = self.file("latin.jsonl", '{"event":"start","name":"caf\xe9"}\n', encoding="latin-1")
        self.shows(self.page(latin), "caf�")

    def test_a_resumed_run_replaces_what_it_trains_again(self):
        resume = {"event": "resume", "step": 10, "batches_per_epoch": 10}
        again = [epoch(2, test_loss=7), {"event": "step", "step": 15, "loss": 7}]
        page = self.page(self.file("r.jsonl", START, epoch(1), epoch(2), {"event": "step", "step": 15, "loss": 3},
                                   END | {"stopped": 1}, resume, *again, END))
        self.assertEqual(self.said, "")
        self.shows(page, "<title>test, epoch 2: 7</title>")
        self.assertEqual(len(numbers(lines(charts(page)["Loss by epoch"], "faint")[0].find("path"))), 1)
        self.page(self.file("killed.jsonl", START, epoch(1), END, resume))
        self.assertIn("no end line", self.said)

    def test_refusals(self):
        run, other = self.file("run.jsonl", START, epoch(1), END), self.file("other.jsonl", START)
        os.link(run, os.path.join(self.folder, "again.jsonl"))
        notes = self.file("notes.html", "my notes")
        for text, *arguments in (
                ("which runs?",),
                ("none.jsonl: cannot be read", "none.jsonl"),
                (": cannot be read", self.folder),
                ("empty.jsonl: empty", self.file("empty.jsonl", "")),
                ("text.jsonl:1: ", self.file("text.jsonl", "hello\n")),
                ("these are not metrics", self.file("json.jsonl", {"a": 1})),
                ("alien.jsonl: no line is about a run", self.file("alien.jsonl", {"event": "alien"})),
                ("are the same run: name it once", run, "again.jsonl"),
                ("are the same run: name it once", run, "./run.jsonl"),
                ("would overwrite a run", run, other, "-o", "other.jsonl"),
                ("holds something else than a page", run, "-o", notes),
                ("-o is given twice (a.html and b.html)", run, "-o", "a.html", "-o", "b.html"),
                ("expected one argument", run, "--title", "-o"),
                ("--bogus", run, "--bogus"),
                ("cannot be written", run, "-o", "no/such/page.html"),
                ("cannot be written", run, "-o", self.folder)):
            self.refused(text, *arguments)
        with open(notes) as file:
            self.assertEqual(file.read(), "my notes")
        for _ in range(2):  # its own page is replaced
            self.page("-o", "report.html", run)


if __name__ == "__main__":
    unittest.main(verbosity=0)
