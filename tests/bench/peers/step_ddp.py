# PyTorch's DistributedDataParallel over Gloo, timed as tests/bench/distributed.cpp times ours: for every model a line
# MODEL BATCH COMPUTE STEP, milliseconds. Ranks by RANK, WORLD_SIZE, MASTER_ADDR; arguments: MODEL BATCH …
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
import peer  # noqa: E402

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
dist.init_process_group("gloo", init_method="env://")


def helpers_first():  # as ours: see tests/bench/distributed.cpp
    if os.sched_getscheduler(0) != os.SCHED_FIFO:
        return
    above = os.sched_param(os.sched_getparam(0).sched_priority + 1)
    for task in map(int, os.listdir("/proc/self/task")):
        if task != os.getpid():
            os.sched_setscheduler(task, os.SCHED_FIFO, above)


def block(trainer, steps):
    dist.barrier()
    return trainer.run(steps)


def agreed(number):  # rank 0's
    x = torch.tensor([float(number)])
    dist.broadcast(x, 0)
    return x.item()


for name, batch in zip(sys.argv[1::2], map(int, sys.argv[2::2])):
    trials = {}
    for form in ("contiguous", "channels_last"):
        trainer = peer.Trainer(name, batch, "f32", form)
        trainer.run(1)
        trials[form] = agreed(block(trainer, 2))
    form = min(trials, key=trials.get)
    alone, shared = (peer.Trainer(name, batch, "f32", form) for _ in range(2))
    shared.model = torch.nn.parallel.DistributedDataParallel(shared.model, gradient_as_bucket_view=True)
    block(alone, 1)
    once = block(shared, 3)
    helpers_first()
    steps = int(agreed(min(20.0, max(1.0, 300 / once))))
    compute, step = [], []
    for _ in range(5):
        compute.append(block(alone, steps))
        step.append(block(shared, steps))
    if dist.get_rank() == 0:
        print(name, batch, "%.4f %.4f" % (statistics.median(compute), statistics.median(step)), flush=True)
