"""What dist/lab/rehearse.py computes, writes and refuses, and its runs by a script that stands for hosts.sh."""
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest

sys.path.insert(0, "dist/lab")
import rehearse as lab

PROGRAM = os.path.abspath("dist/lab/rehearse.py")

# Runs the command once, and says that its two hosts sent 10 and 20 bytes.
HOSTS = """#!/bin/sh
trap 'echo cleared >"$0.cleared"; exit 143' TERM
shift 3
echo "$RANKS $DELAY $TANDEM_STRATEGY" >>"$0.settings"
"$@" & wait $! || exit $?
printf 'host0 10 1\\nhost1 20 1\\n' >"$COUNTERS"
"""
# A program with --metrics that learns; not under the strategy "bad", and for ever under "slow".
TRAINS = """#!/bin/sh
for metrics; do :; done
[ "${TANDEM_STRATEGY%:pace*}" != bad ] || { echo 'it diverged'; exit 3; }
[ "${TANDEM_STRATEGY%:pace*}" != slow ] || { echo >"$0.begun"; sleep 100; }
for e in 1 2 3; do echo "{\\"event\\":\\"epoch\\",\\"seconds\\":2,\\"test_accuracy\\":0.${e}5}"; done >"$metrics"
[ "${TANDEM_STRATEGY%:pace*}" = cut ] ||
  echo '{"event":"end","seconds":7.12345678,"exposed_seconds":0.5,"steps":30}' >>"$metrics"
"""


def run(strategy, link, seconds, accuracy, sent=0, steps=100, reached=None):
    return {"setup": "", "strategy": strategy, "link": link, "seconds": seconds, "exposed": 0, "bytes": sent,
            "steps": steps, "accuracy": accuracy, "reached": reached}


class Rehearsal(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        for name, content in (("hosts.sh", HOSTS), ("train", TRAINS), ("table", "a table\n")):
            with open(os.path.join(self.folder, name), "w") as file:
                file.write(content)
            os.chmod(file.name, 0o755)
        os.symlink(PROGRAM, os.path.join(self.folder, "rehearse.py"))
        self.program = [sys.executable, "-c", "import runpy, sys; sys.argv[0] = 'rehearse.py'; "
                        "main = runpy.run_path('rehearse.py')['main']; "
                        "main.__globals__['HOSTS'] = './hosts.sh'; main()"]

    def rehearse(self, *arguments):
        return subprocess.run(self.program + list(arguments), cwd=self.folder, capture_output=True, text=True,
                              timeout=60)

    def content(self, name):
        with open(os.path.join(self.folder, name)) as file:
            return file.read()

    def test_rates_are_those_of_tc(self):
        self.assertEqual([lab.bytes_per_second(r) for r in ("200mbit", "1.5gbit", "8kbit", "none")],
                         [25e6, 187.5e6, 1000, math.inf])
        for bad in ("200", "fast", "-1gbit", "mbit", "nanmbit", "0mbit", "1e3mbit", "", "1gbit "):
            self.assertRaisesRegex(ValueError, "expected a rate like 200mbit", lab.bytes_per_second, bad)

    def test_an_exchange_is_hidden_behind_backward_and_no_more(self):
        every = run("all-reduce", "none", 9, 0.9, 100e6)  # backward: 6 s
        self.assertAlmostEqual(lab.predicted_seconds(every, "1gbit"), 9)  # 0.8 s on the wire
        self.assertAlmostEqual(lab.predicted_seconds(every, "100mbit"), 9 + 8 - 6)
        self.assertAlmostEqual(lab.predicted_seconds(run("ddc-asgd", "none", 9, 0.9, 100e6), "100mbit"),
                               9 + 4)  # half of it is the answer
        self.assertAlmostEqual(lab.predicted_seconds(run("local-sgd:8", "none", 9, 0.9, 10e6), "100mbit"), 9 + 0.8)
        self.assertAlmostEqual(lab.predicted_seconds(run("daso", "none", 9, 0.9, 100e6), "100mbit"), 9)
        self.assertAlmostEqual(lab.predicted_seconds(run("naive+all-reduce", "none", 9, 0.9, 100e6), "100mbit"), 9 + 8)

    def test_steps_between_exchanges_keep_their_share(self):
        every = run("all-reduce", "none", 10, 0.9, 1e9, 1000)  # a step: 10 ms, 1 MB
        for link in ("10mbit", "100mbit", "1gbit"):
            exchange, h = 1e6 / lab.bytes_per_second(link), lab.steps_between(every, link)
            self.assertLessEqual(exchange / (exchange + h * 0.01), 0.05)
            self.assertTrue(h == 1 or exchange / (exchange + (h - 1) * 0.01) > 0.05)

    def test_the_fastest_is_one_that_is_accurate(self):
        chosen = types.SimpleNamespace(strategies=["all-reduce", "daso", "local-sgd:64"], links=["none", "100mbit"],
                                       target=0)
        runs = [run(*one) for link in chosen.links
                for one in (("all-reduce", link, 10, 0.9), ("daso", link, 7, 0.898), ("local-sgd:64", link, 5, 0.8))]
        self.assertIn("on 100mbit: daso; exchanges of all weights take 5 % of the time with H = 1\n",
                      lab.table(runs, chosen))
        self.assertIn("daso                                     7.0         7.0 / 7.0\n", lab.table(runs, chosen))
        runs[4]["accuracy"] = 0.8
        self.assertIn("on 100mbit: all-reduce", lab.table(runs, chosen))
        reached = [run("all-reduce", "none", 10, 0.9, reached=8), run("daso", "none", 7, 0.9),
                   run("bsp", "none", 9, 0.9, reached=7)]
        self.assertEqual(lab.fastest(reached, "none")["strategy"], "bsp")

    def test_a_line_comes_back(self):
        a = run("all-reduce", "1gbit", 12.5, 0.75, 1234567, 42, 3.25) | {"setup": "2 hosts × 1 ranks 'a \"b\"'"}
        self.assertEqual(lab.run_of(lab.line_of(a)), a)
        for bad in ("{}", "[]", "1", "", "{", lab.line_of(a | {"seconds": "long"})):
            self.assertRaises(ValueError, lab.run_of, bad)
        for line in self.lines("examples/experiments/slow_links.jsonl"):
            self.assertGreater(lab.run_of(line)["seconds"], 0)

    def lines(self, path):
        with open(path) as file:
            return file.readlines()

    def test_runs_are_made_once_and_failures_do_not_end_the_others(self):
        asked = ["--ranks", "2", "--link", "1gbit,200mbit", "--strategy", "all-reduce bad bsp:wire=bf16 cut",
                 "--target", "20", "--results", "runs", "--pace", "40", "--", "./train"]
        first = self.rehearse(*asked)
        self.assertEqual(first.returncode, 1)
        for part in ("bad on 1gbit ended with status 3:\nit diverged", "6 runs of 12 failed", "metrics have no end"):
            self.assertIn(part, first.stderr)
        lines = [json.loads(line) for line in self.content("runs").splitlines()]
        self.assertEqual(len(lines), 6)
        self.assertIn("2 hosts × 2 ranks", self.content("runs"))
        self.assertIn('"bytes":20,"steps":30,"accuracy":0.35,"reached":4}\n', self.content("runs"))
        self.assertEqual(lines[0], {
            "setup": "2 hosts × 2 ranks, a step in 40 ms, to 20 % './train'", "strategy": "all-reduce", "link": "none",
            "seconds": 7.123457, "exposed": 0.5, "bytes": 20, "steps": 30, "accuracy": 0.35, "reached": 4})
        self.assertEqual(self.content("hosts.sh.settings").splitlines()[0], "2 0 all-reduce:pace=40:0")
        self.assertIn("2 0 bsp:wire=bf16,pace=40:0\n", self.content("hosts.sh.settings"))
        self.assertRegex(first.stdout, r"bsp:wire=bf16 +1gbit +7.1 +0.5 +0.0 +35.00 % +4.0\n")
        ran = len(self.content("hosts.sh.settings").splitlines())
        again = self.rehearse(*asked)
        self.assertEqual(again.stdout, first.stdout)
        self.assertEqual(len(self.content("hosts.sh.settings").splitlines()), ran + 6, "only what failed runs again")
        self.rehearse(*asked[:-1], "./train", "--other")
        self.assertEqual(len(self.content("runs").splitlines()), 12, "another program is another setup")

    def test_a_signal_clears_up_and_ends(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            child = subprocess.Popen(self.program + ["--strategy", "slow", "--", "./train"], cwd=self.folder,
                                     stderr=subprocess.DEVNULL)
            begun, cleared = (os.path.join(self.folder, name) for name in ("train.begun", "hosts.sh.cleared"))
            deadline = time.monotonic() + 20
            while not os.path.exists(begun) and time.monotonic() < deadline:
                time.sleep(0.02)
            child.send_signal(number)
            self.assertEqual(child.wait(20), 128 + number)
            self.assertTrue(os.path.exists(cleared))
            os.remove(begun)
            os.remove(cleared)

    def test_refusals(self):
        for text, *arguments in (
                ("which program",),
                ("which program", "--hosts", "2"),
                ("which program", "--"),
                ("which program", "--strategy", " ", "--", "true"),
                ("--hosts: 0: expected a whole number from 1 to 64", "--hosts", "0", "--", "true"),
                ("from 1 to 64", "--ranks", "2.5", "--", "true"),
                ("expected a rate like 200mbit", "--link", "1gbit,fast", "--", "true"),
                ("expected a number from 0 to 100", "--target", "nan", "--", "true"),
                ("unknown option --bogus", "--bogus", "--", "true"),
                ("which program", "word", "--", "true"),
                ("which program", "build/train"),
                ("cannot be written", "--results", "no/such/file", "--", "true"),
                ("cannot be written", "--results", ".", "--", "true"),
                ("table:1: is no run of rehearse", "--results", "table", "--", "true")):
            done = self.rehearse(*arguments)
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
            self.assertIn(text, done.stderr)
        self.assertEqual(self.content("table"), "a table\n")


if __name__ == "__main__":
    unittest.main(verbosity=0)
