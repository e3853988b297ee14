# Gloo's all-reduce through PyTorch, timed as tests/bench/network.cpp times ours. Ranks by RANK, WORLD_SIZE, MASTER_ADDR.
import os
import sys
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="env://")
for size in map(int, sys.argv[1:]):
    calls = min(500, max(1, (4 << 20) // size))
    x = torch.zeros(size // 4)
    seconds = []
    for batch in range(-1, 7):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(x)
        if batch >= 0:
            seconds.append((time.perf_counter() - begin) / calls)
    if dist.get_rank() == 0:
        print(size, "%.9f" % sorted(seconds)[3], flush=True)
