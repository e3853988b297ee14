"""Pages that examples/report.py makes, and the lines and areas that it draws."""
import base64
import contextlib
import html.parser
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import xml.etree.ElementTree as xml

PROGRAM, BUILD = os.path.abspath("examples/report.py"), os.path.abspath(os.environ.get("BUILD", "build"))
LOGS = os.path.abspath("examples/recipes/logs/resnet20_cifar10_")
sys.path.insert(0, "examples")
import report


class Tags(html.parser.HTMLParser):
    """Tags open and close in order."""
    def __init__(self, page):
        super().__init__()
        self.open, self.seen, self.wrong = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong = self.wrong or f"</{tag}> at {self.getpos()}"


START = {"event": "start", "batches_per_epoch": 10}
END = {"event": "end", "steps": 30, "stopped": 0}


def epoch(number, **more):
    return {"event": "epoch", "epoch": number, "train_loss": 1.5, "test_loss": 2, "test_accuracy": 0.4,
            "images_per_second": 5000, "seconds": 10} | more


def drawn(axes):
    """By label: the points of the lines."""
    return {line.get_label(): [tuple(p) for p in line.get_xydata()] for line in axes.lines}


class Report(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def file(self, name, *content, encoding="utf-8"):
        """Lines as objects, or text as it is."""
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding=encoding) as file:
            file.write("".join(c if isinstance(c, str) else json.dumps(c) + "\n" for c in content))
        return path

    def run_program(self, *arguments):
        """Exit status, standard output and standard error."""
        out, error, status = io.StringIO(), io.StringIO(), 0
        with (contextlib.chdir(self.folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error),
              unittest.mock.patch("sys.argv", [PROGRAM, *arguments])):
            try:
                report.main()
            except SystemExit as end:
                status = end.code
        return status, out.getvalue(), error.getvalue()

    def page(self, *arguments):
        status, _, self.printed = self.run_program(*arguments)
        self.assertEqual(status, 0, self.printed)
        with open(os.path.join(self.folder, "report.html"), encoding="utf-8") as file:
            page = file.read()
        tags = Tags(page)
        self.assertEqual((tags.wrong, tags.open), ("", []))
        for never in ("script", "link", "iframe"):
            self.assertNotIn(never, tags.seen)
        self.pictures = [xml.fromstring(base64.b64decode(data)) for data in re.findall('base64,([^"]*)"', page)]
        text = re.sub('src="[^"]*"', "", page)
        for never in ("http", "nan", "None", "inf "):
            self.assertFalse(never in text, never)
        return text

    def shows(self, page, *parts):
        for part in parts:
            self.assertTrue(part in page, part)

    def training(self, *lines):
        """What is drawn for one run: the axes by epoch and by time of each quantity."""
        run = report.Run(self.file("run.jsonl", *lines))
        run.label = "run"
        return report.draw_training([run]).axes

    def test_labels_tell_files_apart(self):
        for paths, labels in ((["a/run_seed1.jsonl", "a/run_seed2.jsonl"], ["seed1", "seed2"]),
                              (["a/x.jsonl", "b/x.jsonl"], ["a", "b"]), (["one.jsonl"], ["one"]),
                              (["x_1_y.jsonl", "x_22_y.jsonl"], ["1", "22"]), (["a.jsonl", "a_b.jsonl"], ["a", "a_b"])):
            self.assertEqual(report.labels_of(paths), labels)
        self.assertEqual([report.size(v) for v in (0, 1536, 3 << 20, math.nan)], ["0 B", "1.5 KiB", "3 MiB", "–"])

    def test_each_quantity_is_drawn_by_epoch_and_by_time(self):
        step = {"event": "step", "step": 15, "loss": 3}
        axes = self.training(START, epoch(1, val_accuracy=0.3), step, epoch(2, seconds=20),
                             epoch(3, images_per_second=9000), END)
        self.assertEqual([a.get_title() for a in axes],
                         [t for t in ("Loss", "Accuracy in %", "Images per second") for _ in range(2)])
        loss = drawn(axes[0])
        self.assertEqual((loss["run test"], loss["run train"]), ([(1, 2), (2, 2), (3, 2)], [(1, 1.5), (2, 1.5), (3, 1.5)]))
        self.assertIn([(1.5, 3)], loss.values())
        self.assertEqual(drawn(axes[3])["run test"], [(10, 40), (30, 40), (40, 40)])
        self.assertEqual(drawn(axes[2])["run val"][0], (1, 30))
        self.assertEqual(drawn(axes[5])["run"][2], (40, 9000))

    def test_a_resumed_run_replaces_what_it_trains_again(self):
        resume = {"event": "resume", "step": 10, "batches_per_epoch": 10}
        first, again = [epoch(2), {"event": "step", "step": 15, "loss": 3}], {"event": "step", "step": 15, "loss": 7}
        loss = drawn(self.training(START, epoch(1), *first, END, resume, epoch(2, test_loss=7), again, END)[0])
        self.assertEqual(loss["run test"], [(1, 2), (2, 7)])
        self.assertIn([(1.5, 7)], loss.values())
        self.page(self.file("killed.jsonl", START, epoch(1), END, resume))
        self.assertIn("no end line", self.printed)

    def test_classes_of_workers_are_a_map(self):
        run = self.file("parts.jsonl", START | {"pictures_of_workers": [[10, 0], [3, 7]]},
                        epoch(1, class_accuracy=[0.5, None]), END)
        figure = report.draw_classes([report.Run(run)])
        pictures, accuracy = figure.axes
        self.assertEqual(pictures.images[0].get_array().tolist(), [[10, 0], [3, 7]])
        self.assertEqual(accuracy.lines[0].get_ydata()[0], 50)
        self.assertTrue(math.isnan(accuracy.lines[0].get_ydata()[1]))
        for bad in ([[1, 2], [3]], [], "no", [["x"]], [[math.nan]]):
            self.assertEqual(report.rectangle(bad), [])

    def test_what_programs_write(self):
        if not os.path.exists(BUILD + "/fashion_mnist"):
            self.skipTest("no programs in " + BUILD)
        train = "--data synthetic --model mlp --val 55000 --epochs 2 --log-every 10 --threads 1 --metrics run.jsonl"
        tune = ("--data synthetic --data-set fashion-mnist --model lenet5 --threads 1 --memory-budget 1G "
                "--batches 16,32 --metrics tuned.jsonl")
        for command in ("fashion_mnist " + train, "tune " + tune):
            subprocess.run([f"{BUILD}/{command.split()[0]}", *command.split()[1:]], cwd=self.folder, check=True,
                           capture_output=True)
        self.shows(self.page("run.jsonl", "tuned.jsonl"), "The minibatch: tuned", "<td>32</td>")
        self.assertEqual((self.printed, len(self.pictures)), ("", 3))  # the second is the accuracy of each class

    def test_runs_of_the_recipe(self):
        logs = [LOGS + name + ".jsonl" for name in ("tandem_seed1", "torch_seed1", "torch_seed2")]
        page = self.page(*logs, "--title", "ResNet-20 <CIFAR-10>")
        self.shows(page, "87.27 %", "ResNet-20 &lt;CIFAR-10&gt;", "recipe.max_lr")
        self.assertEqual((self.printed, page.count("<th>torch_seed1</th>")), ("", 1))

    def test_final_numbers_and_what_differs(self):
        a = self.file("a.jsonl", START | {"lr": 0.1, "data": "x", "nested": {"on": True, "list": [1, 0.5]}},
                      epoch(1, test_accuracy=0.5), END)
        b = self.file("b.jsonl", START | {"lr": 0.2, "data": "x"}, epoch(1, val_accuracy=0.9, test_accuracy=None),
                      END | {"exposed_seconds": 3})
        page = self.page(a, b)
        self.assertEqual(re.findall(r'<tr class="?bold"?><td>([^<]*)</td>', page), ["lr"])
        self.shows(page, "<td>50.00 %</td>", "<td>90.00 %</td>", "<td>nested.on</td><td>yes</td><td>–</td>",
                   "<td>1, 0.5</td>", "<th>seconds of exchange</th>")

    def test_a_run_that_is_not_finite_is_in_the_table_and_the_legend(self):
        good = self.file("good.jsonl", START, epoch(1), END)
        stop = {"event": "not_finite", "step": 5, "reason": "the loss"}, END | {"stopped": 1}
        for lines in ((START, *stop), (START, epoch(1, train_loss=None, test_loss=None), END)):
            bad = self.file("bad.jsonl", *lines)
            self.shows(self.page(good, bad), "<th>ended</th>", "<td>not finite</td>")
            runs = [report.Run(path) for path in (good, bad)]
            runs[0].label, runs[1].label = "good", "bad"
            loss = drawn(report.draw_training(runs).axes[0])
            self.assertIn("good test", loss)
            self.assertIn("bad test: not finite", loss)
        resumed = self.file("resumed.jsonl", START, *stop, {"event": "resume", "step": 0}, epoch(1), END)
        self.assertNotIn("<th>ended</th>", self.page(good, resumed))

    def test_ticks_are_epochs_and_minibatches(self):
        ticks = self.training(START, epoch(1), epoch(2), epoch(3), END)[0].get_xticks()
        self.assertTrue(all(tick == int(tick) for tick in ticks), ticks)
        rows = [{"event": "minibatch", "minibatch": n, "sample_seconds": 0.5} for n in (8, 16, 24)]
        samples = report.draw_tuned(report.Run(self.file("t.jsonl", {"event": "tuned", "minibatch": 8}, *rows))).axes[2]
        self.assertEqual([tick.get_text() for tick in samples.get_xticklabels()], ["8", "16", "24"])
        self.assertEqual(list(drawn(samples)), ["predicted"])

    def test_thirty_runs(self):
        runs = [report.Run(self.file(f"r{i}.jsonl", START, epoch(1), epoch(2, test_loss=i), END)) for i in range(30)]
        loss = report.draw_training(runs).axes[0]
        looks = {(line.get_color(), line.get_marker()) for line in loss.lines if line.get_linestyle() == "-"}
        self.assertGreaterEqual(len(looks), 30, "each run has a colour and a marker of its own")
        self.assertIsNone(loss.get_legend(), "labels have no room")

    def test_texts_are_only_texts(self):
        evil = "<script>alert(1)</script> & \" ' $x_"
        name = self.file("<script>&'.jsonl", START | {evil: evil, "classes": [evil]}, epoch(1),
                         {"event": "warning", "text": evil}, {"event": "tuned", "minibatch": 8, "model": evil},
                         {"event": "budget", "means": evil, "budget": 1, "seconds": 1})
        other = self.file("run.jsonl", START | {evil: evil, "classes": [evil]}, epoch(1),
                          {"event": "not_finite", "reason": evil})
        self.assertGreater(self.page(name, other, "--title", evil).count("&lt;script&gt;alert(1)"), 5)
        strange = self.file("s.jsonl", START | {"a": [{"b": 1}, None, "\0\x1b[1m\ud83d"]}, epoch(1), END)
        self.shows(self.page(strange), "<td>–, –,   [1m")

    def test_what_tune_has_found(self):
        fits = {"peak": 1 << 20, "swapped": 0, "recomputed": 512, "seconds": 0.25, "stall": 0.125, "exposed": 0,
                "sample_seconds": 0.03125}
        rows = [{"event": "minibatch", "minibatch": 8} | fits, {"event": "minibatch", "minibatch": 16, "least": 3 << 20}]
        memory = [{"event": "memory", "seconds": s, "rest": 1 << 20, "kept": 1 << 20, "recomputed": r,
                   "swapped": 1 << 20} for s, r in ((0.001, 0), (0.003, 1 << 20))]
        budgets = [{"event": "budget", "means": m, "budget": b << 20, "seconds": 1 / b} for m in ("swap", "recompute")
                   for b in (1, 2, 4)]
        tuned = {"event": "tuned", "model": "m", "device": "here", "budget": 4 << 20, "minibatch": 8,
                 "learning_rate": 0.1, "noise_scale": None}
        path = self.file("t.jsonl", tuned, *rows, *budgets, *memory)
        cells = ["8", "1 MiB", "0 B", "512 B", "250", "125", "0", "31.25", "–"]
        self.shows(self.page(path), "".join(f"<td>{cell}</td>" for cell in cells), "does not fit: at least 3 MiB")
        over_time, against, samples = report.draw_tuned(report.Run(path)).axes
        areas = {area.get_label(): area.get_data() for area in over_time.patches}
        for name, top, bottom in (("rest", [1, 1], [0, 0]), ("kept", [2, 2], [1, 1]), ("recomputed", [2, 3], [2, 2]),
                                  ("swapped", [3, 4], [2, 3])):
            self.assertEqual((list(areas[name].values), list(areas[name].edges), list(areas[name].baseline)),
                             (top, [0, 1, 4], bottom))
        self.assertEqual(drawn(against), {m: [(b, 1000 / b) for b in (1, 2, 4)] for m in ("swap", "recompute")})
        self.assertEqual(drawn(samples)["predicted"], [(8, 31.25)])

    def test_damaged_files_are_shown_as_far_as_they_go(self):
        cut = self.file("cut.jsonl", START, epoch(1), '{"event":"epo')
        page = self.page(cut)
        self.assertEqual(self.printed, f"{cut}:3: cut off in the middle of the line\n"
                         f"{cut}: no end line: the run was killed, or is still going\n")
        self.shows(page, "cut.jsonl:3: cut off")
        step = {"event": "step", "step": 5, "loss": 2}
        bad = self.file("bad.jsonl", step, START, '{"event" 1}\n\n', epoch(1), epoch(1), "[1]\n", epoch("2"), "x\n",
                        {"event": "of others"}, END | {"stopped": 1})
        page = self.page(bad)
        for number, why in ((1, "before the start line"), (3, "column 10"), (6, "epoch 1 after"), (7, 'no "event"')):
            self.assertRegex(self.printed, f"bad.jsonl:{number}: .*{why}")
        self.assertIn("bad.jsonl: 1 more lines could not be used", self.printed)
        self.assertEqual(len(re.findall(r"bad.jsonl:\d", self.printed)), 5)
        self.shows(page, "the run was stopped before its last epoch")
        self.assertFalse("no end line" in page)
        self.page(self.file("young.jsonl", START))
        self.assertEqual(self.pictures, [])
        extremes = epoch(1, train_loss=10**400, test_loss=5e-324), epoch(2, train_loss=-1e308, test_loss=0)
        self.page(self.file("strange.jsonl", "\ufeff", START | {"x": "\ud83d\ude00 é"}, *extremes, "\x00" * 50 + "\n",
                            "[" * 10**5 + "\n", END))
        self.assertEqual(re.findall(r"strange.jsonl:(\d)", self.printed), ["4", "5"])
        latin = self.file("latin.jsonl", '{"event":"start","name":"caf\xe9"}\n', encoding="latin-1")
        self.shows(self.page(latin), "caf�")

    def test_refusals(self):
        run, notes = self.file("run.jsonl", START, epoch(1), END), self.file("notes.html", "my notes")
        for text, *arguments in (("required: RUN.jsonl",), ("none.jsonl: cannot be read", "none.jsonl"),
                                 ("these are not metrics", self.file("empty.jsonl", "")),
                                 ("text.jsonl:1: ", self.file("text.jsonl", "hello\n")),
                                 ("these are not metrics", self.file("json.jsonl", {"a": 1})),
                                 ("alien.jsonl: no line is about a run", self.file("alien.jsonl", {"event": "alien"})),
                                 ("holds something else than a page", run, "-o", "run.jsonl"),
                                 ("holds something else than a page", run, "-o", notes),
                                 ("--bogus", run, "--bogus"), ("cannot be written", run, "-o", "no/such/page.html")):
            status, out, error = self.run_program(*arguments)
            self.assertEqual((status, out), (2, ""), error)
            self.assertIn(text, error)
        with open(notes) as file:
            self.assertEqual(file.read(), "my notes")
        for _ in range(2):  # its own page is replaced
            self.page("-o", "report.html", run)


if __name__ == "__main__":
    unittest.main(verbosity=0)
