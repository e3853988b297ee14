#!/usr/bin/env python3
"""PyTorch's side of the training-step benchmark, driven over stdin and stdout.

    peer.py --threads N [--keep-memory]

It stays alive so that the benchmark can alternate its own steps with
PyTorch's and both meet the same machine.  A step is zero_grad, forward,
cross-entropy, backward and SGD with momentum on one fixed random batch.  Which
PyTorch is measured is decided by the Python that runs this (1.13 or newer).
One line in, one line out; the first line out is "torch VERSION threads N".

  MODEL DTYPE BATCH [FORMAT]   builds a model, times both memory formats, keeps
                 the faster:  ready FORMAT CONTIGUOUS_MS CHANNELS_LAST_MS MODE
                 MODEL  one of tests/gpu/torch_models.py
                 DTYPE  f32; bf16-autocast: float32 weights under torch.autocast;
                        bf16-cast: everything bfloat16, weights and SGD too;
                        bf16: the faster of the two
                 FORMAT contiguous or channels_last tries only that (the other
                        time is nan)
                 MODE   f32, autocast or cast; the times are this mode's
  step K         runs K steps:  ms MEAN
  for SECONDS    runs steps for so long:  ms MEAN
  memory         bytes PEAK: peak resident memory of the model named last, above
                 what the process held at the start, after one tiny step had
                 loaded PyTorch's code.  Use a fresh process and name the FORMAT
  quit
Whatever fails answers "error TEXT" and leaves the process usable.

--keep-memory stops the C library from handing freed memory back to the system
after every step, which spares PyTorch many page faults on large activations.
"""
import argparse
import contextlib
import ctypes
import gc
import os
import sys
import time

try:
    import torch
    import torch.nn.functional as F
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../gpu"))
    from torch_models import MODELS
except ImportError as error:
    print(f"error {error}", flush=True)
    sys.exit(1)

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
MODES = {"f32": ["f32"], "bf16": ["autocast", "cast"], "bf16-autocast": ["autocast"],
         "bf16-cast": ["cast"]}


class Trainer:
    def __init__(self, model, batch, mode, memory_format):
        torch.manual_seed(1)
        build, shape, classes = MODELS[model]
        dtype = torch.bfloat16 if mode == "cast" else torch.float32
        memory_format = FORMATS[memory_format]
        self.model = build().to(dtype=dtype, memory_format=memory_format).train()
        self.x = torch.randn(batch, *shape).to(dtype=dtype, memory_format=memory_format)
        self.target = torch.randint(classes, (batch,))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.autocast = mode == "autocast"

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            loss = F.cross_entropy(self.model(self.x).float(), self.target)
        loss.backward()
        self.optimizer.step()

    def run(self, steps):
        """Mean milliseconds of a step."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - begin) / steps * 1e3

    def run_for(self, seconds):
        steps, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            self.step()
            steps += 1
        return (time.perf_counter() - begin) / steps * 1e3

    def trial(self):
        """Milliseconds of a step: the median of up to 15, after up to 3 to warm up."""
        first = self.run(1)
        self.run(2 if first < 3000 else 1)
        times, begin = [], time.perf_counter()
        while len(times) < 3 or (len(times) < 15 and time.perf_counter() - begin < 3):
            times.append(self.run(1))
        return sorted(times)[len(times) // 2]


def libc():
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") else None


def resident(field):
    """VmRSS (now) or VmHWM (peak) of this process in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))


def reset_peak():
    """Makes VmHWM start again from VmRSS; where that is refused it covers the whole life."""
    gc.collect()
    if libc():
        libc().malloc_trim(0)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")


def prepare(model, dtype, batch, only=None):
    """Builds the fastest trainer; returns it and the answer."""
    if model not in MODELS:
        raise ValueError(f"no model '{model}' (have {' '.join(MODELS)})")
    if dtype not in MODES:
        raise ValueError(f"no dtype '{dtype}' (have {' '.join(MODES)})")
    if only and only not in FORMATS:
        raise ValueError(f"no format '{only}' (have {' '.join(FORMATS)})")
    if not batch.isdigit() or not int(batch):
        raise ValueError(f"batch '{batch}' is not a positive number")
    times = {(mode, name): float("nan") for mode in MODES[dtype] for name in FORMATS}
    tried = [key for key in times if only in (None, key[1])]
    if len(tried) > 1:
        for key in tried:
            times[key] = Trainer(model, int(batch), *key).trial()
    mode, name = min(tried, key=times.get)
    reset_peak()
    trainer = Trainer(model, int(batch), mode, name)
    if len(tried) > 1:
        trainer.run(1)
    else:
        times[mode, name] = trainer.trial()
    return trainer, (f"ready {name} {times[mode, 'contiguous']:.3f} "
                     f"{times[mode, 'channels_last']:.3f} {mode}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--keep-memory", action="store_true")
    args = parser.parse_args()
    if args.threads < 1:
        parser.error("--threads must be positive")
    torch.set_num_threads(args.threads)
    if args.keep_memory and libc():
        libc().mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap
        libc().mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: and stay there
        libc().mallopt(-2, 2**28)  # M_TOP_PAD: which grows in large pieces
    # One tiny step loads the code that any model needs: that is not the model's memory.
    Trainer("lenet5", 1, "f32", "contiguous").step()
    reset_peak()
    baseline, trainer = resident("VmRSS"), None

    def answer(text):
        print(text, flush=True)

    answer(f"torch {torch.__version__} threads {torch.get_num_threads()}")
    for line in iter(sys.stdin.readline, ""):
        words = line.split()
        try:
            if not words:
                continue
            if words == ["quit"]:
                break
            if words[0] in ("step", "for", "memory"):
                if trainer is None:
                    raise ValueError(f"{words[0]} before a model was named")
                if words == ["memory"]:
                    answer(f"bytes {max(0, resident('VmHWM') - baseline)}")
                elif words[0] == "for" and len(words) == 2 and float(words[1]) > 0:
                    answer(f"ms {trainer.run_for(float(words[1])):.4f}")
                elif len(words) == 2 and words[1].isdigit() and int(words[1]):
                    answer(f"ms {trainer.run(int(words[1])):.4f}")
                else:
                    raise ValueError("want: step K, for SECONDS, or: memory")
            elif len(words) in (3, 4):
                trainer = None  # free the old model before building the next
                trainer, text = prepare(*words)
                answer(text)
            else:
                raise ValueError("want: MODEL DTYPE BATCH [FORMAT], step K, for SECONDS, memory or quit")
        except Exception as error:  # whatever it was, the benchmark can go on
            answer("error " + " ".join(str(error).split()))


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.stderr.close()  # no complaint about the closed pipe
        sys.exit(1)
