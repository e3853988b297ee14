#!/usr/bin/env python3
"""What each strategy would bring on a cluster: runs a training program on hosts that this machine lays out (hosts.sh,
as root), once for each strategy and link, and prints time, bytes, exposed exchange and accuracy, predicted beside
measured.

    python3 dist/lab/rehearse.py --hosts 4 --ranks 2 --link 200mbit,1gbit --strategy 'all-reduce ddc-asgd' \\
      -- build/fashion_mnist --epochs 2

The prediction for a link comes from the strategy's run without a limit. Let C be that run's seconds, W the bytes that
one host sent divided by the link's rate, o the share of C during which the exchange may run beside computation, and b
the share of W that must wait for the end of that (the answer of a parameter server):
    seconds = C + max(0, (1 - b) W - o C) + b W
The model is our choice. It leaves out latency and what ranks lose by waiting for each other.
"""
import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile

HOSTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hosts.sh")


class Failed(Exception):
    """This run failed; the others are made."""


def refuse(text):
    print("rehearse: " + text, file=sys.stderr)
    raise SystemExit(2)


# ---- Links and the model ---------------------------------------------------------------------------------------------
def bytes_per_second(link):
    """The bytes per second of a rate in tc's notation; raises ValueError."""
    if link == "none":
        return math.inf
    rate = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([gmk])bit", link)
    if not rate or float(rate[1]) == 0:
        raise ValueError(f"a link of {link}: expected a rate like 200mbit or 1gbit, or none")
    return float(rate[1]) * {"g": 1e9, "m": 1e6, "k": 1e3}[rate[2]] / 8


def overlap_of(strategy):
    """o and b of the prediction."""
    backward = 2 / 3  # of a step: two products for each one forward
    for words, overlap in ((("naive",), (0, 1)), (("daso", "cocod", "stream="), (1, 0)),
                           (("local-sgd", "outer", "easgd"), (0, 1)), (("all-reduce",), (backward, 0))):
        if any(word in strategy for word in words):
            return overlap
    return backward, 0.5  # a parameter server


def predicted_seconds(unlimited, link):
    wire, (beside, after) = unlimited["bytes"] / bytes_per_second(link), overlap_of(unlimited["strategy"])
    return unlimited["seconds"] + max(0, (1 - after) * wire - beside * unlimited["seconds"]) + after * wire


def steps_between(all_reduce, link, share=0.05):
    """The steps between two exchanges of all weights (a strategy's H) with which waiting takes at most `share` of the
    time. all_reduce: its run without a limit, in which each step exchanges as many bytes as the weights have."""
    steps = max(1, all_reduce["steps"])
    exchange, step = all_reduce["bytes"] / steps / bytes_per_second(link), all_reduce["seconds"] / steps
    return max(1, math.ceil(exchange * (1 - share) / (share * step))) if step else 1


# ---- One run ---------------------------------------------------------------------------------------------------------
def setup_of(chosen):
    parts = [f"{chosen.hosts} hosts × {chosen.ranks} ranks"]
    shown = {"delay {:g} ms": chosen.delay, "a step in {:g} ms": chosen.pace, "to {:g} %": chosen.target}
    parts += [text.format(value) for text, value in shown.items() if value > 0]
    return ", ".join(parts) + "".join(" '" + word.replace("'", "'\\''") + "'" for word in chosen.program)


def run(command, settings, output):
    """Returns the command's exit status. A signal ends the command, which cleans up, and then this program."""
    child, came = None, []

    def end(number, _):
        came.append(number)
        if child:
            child.terminate()

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        signal.signal(number, end if handler != signal.SIG_IGN else handler)  # under nohup it stays ignored
    child = subprocess.Popen(command, env=os.environ | settings, stdout=output, stderr=subprocess.STDOUT,
                             start_new_session=True)
    if came:  # a signal arrived before the child was started
        child.terminate()
    status = child.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    if came:
        raise SystemExit(128 + came[0])
    return status if status >= 0 else 128 - status


def rehearse(chosen, strategy, link):
    """One run, as it is written to --results. Raises Failed."""
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        metrics, counters, said = (os.path.join(folder, name) for name in ("metrics", "counters", "said"))
        settings = {"RANKS": str(chosen.ranks), "COUNTERS": counters, "TANDEM_STRATEGY": strategy,
                    "DELAY": f"{chosen.delay:g}"}
        if chosen.pace > 0:
            options = "," if ":" in strategy.split("+")[-1] else ":"
            settings["TANDEM_STRATEGY"] += f"{options}pace={chosen.pace:g}:0"
        with open(said, "w") as output:
            program = [*chosen.program, "--metrics", metrics]
            status = run(["sh", HOSTS, str(chosen.hosts), link, "--", *program], settings, output)
        with open(said, errors="replace") as output:
            end = output.read()[-1500:].rstrip("\n")
        if status == 77:
            refuse("hosts cannot be laid out here: " + end)
        if status != 0:
            raise Failed(f"{strategy} on {link} ended with status {status}:\n{end}")
        measured = read_run(metrics, counters, chosen.target)
        return {"setup": setup_of(chosen), "strategy": strategy, "link": link} | measured


def read_run(metrics, counters, target):
    """seconds of training, exposed: those in which rank 0 waited for exchanges, bytes: of the host that sent most,
    accuracy on the test pictures, reached: seconds until the target."""
    trained, accuracy, reached, end = 0, None, None, None
    try:
        with open(metrics) as file:
            for line in map(json.loads, file):
                if not isinstance(line, dict):
                    raise ValueError("a line is no object")
                if line.get("event") == "epoch":
                    trained += line.get("seconds") or 0
                    accuracy = line.get("test_accuracy", accuracy)
                    if target and reached is None and (accuracy or 0) >= target / 100:
                        reached = trained
                end = line if line.get("event") == "end" else end
    except (OSError, ValueError) as error:
        raise Failed(f"the program's metrics cannot be read: {error}. It has to know --metrics") from None
    if end is None:
        raise Failed("the program's metrics have no end: it did not train to its end")
    with open(counters) as file:  # lines: host, bytes out, bytes in
        sent = max((float(line.split()[1]) for line in file), default=0)
    numbers = {"seconds": end.get("seconds") or 0, "exposed": end.get("exposed_seconds") or 0, "bytes": sent,
               "steps": end.get("steps") or 0, "accuracy": accuracy, "reached": reached}
    return {name: value if value is None else rounded(value) for name, value in numbers.items()}


def rounded(value):
    value = float(f"{value:.7g}")
    return int(value) if value.is_integer() else value


# ---- Tables ----------------------------------------------------------------------------------------------------------
def find(runs, strategy, link):
    return next((r for r in runs if (r["strategy"], r["link"]) == (strategy, link)), None)


def fastest(runs, link):
    """The fastest on this link of those whose accuracy is at most 0.3 points below that of all-reduce."""
    base = find(runs, "all-reduce", link) or {"accuracy": None, "reached": None}
    good = [r for r in runs if r["link"] == link and not (base["reached"] is not None and r["reached"] is None)
            and not (base["accuracy"] is not None and (r["accuracy"] or 0) < base["accuracy"] - 0.003)]
    return min(good, key=lambda r: r["seconds"] if r["reached"] is None else r["reached"], default=None)


def table(runs, chosen):
    """The runs; with several links, seconds predicted beside measured; for every link the fastest strategy."""
    head = f"{'strategy':26}       link   seconds   exposed    MB a host   test accuracy"
    text = head + (f"   s to {chosen.target:.3g} %" if chosen.target else "") + "\n"
    for r in runs:
        text += f"{r['strategy']:26}{r['link']:>11} {r['seconds']:9.1f} {r['exposed']:9.1f} {r['bytes'] / 1e6:12.1f}"
        text += f"{'-':>16}" if r["accuracy"] is None else f"{100 * r['accuracy']:14.2f} %"
        if chosen.target:
            text += f"{'-':>13}" if r["reached"] is None else f"{r['reached']:13.1f}"
        text += "\n"
    if len(chosen.links) > 1:
        text += f"\nseconds, predicted / measured\n{'strategy':26}"
        text += "".join(f"{link:>18}" for link in chosen.links) + "\n"
        for strategy in chosen.strategies:
            cells, unlimited = [], find(runs, strategy, "none")
            for link in chosen.links:
                r = find(runs, strategy, link)
                cell = f"{r['seconds']:.1f}" if r else "-"
                if link != "none" and unlimited:
                    cell = f"{predicted_seconds(unlimited, link):.1f} / {cell}"
                cells.append(cell)
            text += f"{strategy:26}" + "".join(f"{cell:>18}" for cell in cells) + "\n"
    base = find(runs, "all-reduce", "none")
    for link in chosen.links:
        best = fastest(runs, link)
        if best:
            text += f"on {link}: {best['strategy']}"
            if base and link != "none":
                text += f"; exchanges of all weights take 5 % of the time with H = {steps_between(base, link)}"
            text += "\n"
    return text


# ---- The program -----------------------------------------------------------------------------------------------------
class Arguments(argparse.ArgumentParser):
    def error(self, message):
        refuse(message + ". Try: --help")


def between(low, high, kind):
    def read(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            whole = "whole " if kind is int else ""
            raise argparse.ArgumentTypeError(f"{text}: expected a {whole}number from {low} to {high:g}")
        return value
    return read


def links_of(text):
    links = text.split(",")
    try:
        for link in links:
            bytes_per_second(link)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    links = list(dict.fromkeys(links))
    return links if len(links) == 1 or "none" in links else ["none"] + links  # predictions come from it


def arguments():
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                       usage="rehearse.py [OPTIONS] -- PROGRAM [ARGUMENTS]")
    add = parser.add_argument
    add("--hosts", type=between(1, 64, int), default=2, metavar="N", help="how many (2)")
    add("--ranks", type=between(1, 64, int), default=1, metavar="N", help="of each host (1)")
    add("--link", type=links_of, default=["none"], dest="links", metavar="RATES",
        help="rate of each host's link, or several: 50mbit,1gbit; none: no limit (none)")
    add("--delay", type=between(0, 10000, float), default=0, metavar="MS", help="of a link (0)")
    add("--strategy", type=lambda text: list(dict.fromkeys(text.split())), default=["all-reduce"],
        dest="strategies", metavar="NAMES",
        help="or several, with spaces between: 'all-reduce all-reduce:wire=bf16 ddc-asgd' (all-reduce)")
    add("--pace", type=between(0, 1e6, float), default=0, metavar="MS",
        help="milliseconds that a step takes before its exchange, where ranks share cores (0: as it comes)")
    add("--target", type=between(0, 100, float), default=0, metavar="PERCENT",
        help="test accuracy: prints the time to it")
    add("--results", metavar="FILE",
        help="file for the runs; those that it holds are not run again (.jsonl)")
    words = sys.argv[1:]
    own = words.index("--") if "--" in words else len(words)
    chosen, others = parser.parse_known_args(words[:own])
    chosen.program = words[own + 1:]
    if others and others[0].startswith("-"):
        refuse(f"unknown option {others[0]}. Try: --help")
    if others or not chosen.program or not chosen.strategies:
        refuse("which program, and which strategy? rehearse.py --link 1gbit -- build/fashion_mnist --epochs 1")
    return chosen


def known_runs(path):
    runs = []
    if os.path.isfile(path):
        with open(path, encoding="utf-8", errors="replace") as file:
            for i, line in enumerate(file, 1):
                try:
                    runs.append(run_of(line))
                except (ValueError, RecursionError) as error:
                    refuse(f"{path}:{i}: is no run of rehearse: {error}. Remove the line, or name another file")
    return runs


def run_of(line):
    r = json.loads(line)
    if not isinstance(r, dict):
        raise ValueError("it is no object")
    r = {"accuracy": None, "reached": None} | r
    numbers = ["seconds", "exposed", "bytes", "steps"] + [name for name in ("accuracy", "reached") if r[name] is not None]
    for kind, names in ((str, ["setup", "strategy", "link"]), ((int, float), numbers)):
        if wrong := [name for name in names if not isinstance(r.get(name), kind)]:
            raise ValueError(f"its {wrong[0]} is missing, or not what it should be")
    return r


def line_of(r):
    return json.dumps(r, ensure_ascii=False, separators=(",", ":")) + "\n"


def main():
    chosen = arguments()
    runs, known, failed, results = [], [], 0, None
    try:
        if chosen.results:
            known = [r for r in known_runs(chosen.results) if r["setup"] == setup_of(chosen)]
            results = open(chosen.results, "a", encoding="utf-8")
    except OSError as error:
        refuse(f"--results {chosen.results}: cannot be written: {error.strerror}")
    for strategy in chosen.strategies:
        for link in chosen.links:
            r = find(known, strategy, link)
            try:
                if r is None:
                    r = rehearse(chosen, strategy, link)
                    if results:
                        results.write(line_of(r))
                        results.flush()
            except Failed as error:
                print(error, file=sys.stderr)
                failed += 1
                continue
            runs.append(r)
            print(f"{strategy} on {link}: {r['seconds']:.1f} s", file=sys.stderr)
    print(table(runs, chosen), end="")
    if failed:
        sys.exit(f"rehearse: {failed} run{'s' * (failed > 1)} of {len(chosen.strategies) * len(chosen.links)} failed")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # a full disk
        sys.exit(f"rehearse: {error}")
