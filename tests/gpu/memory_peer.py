"""PyTorch's pictures a second within the budgets of gpu_check memory, at the minibatches of its rows (its JSON lines are the argument):
channels_last, bf16 autocast; as it is, with save_on_cpu (pinned), and with a checkpoint around every block. Where its allocator may take no
more than the budget and that does not do, the row says so."""
import contextlib
import json
import re
import sys

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torch_models import MODELS, Block, Bottleneck, seconds_of

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def rate(model, n, shape, way):
    images = torch.full((n, *shape), 0.1, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.zeros(n, dtype=torch.long, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad(set_to_none=True)
        saved = torch.autograd.graph.save_on_cpu(pin_memory=True) if way == "save_on_cpu" else contextlib.nullcontext()
        with saved, torch.autocast("cuda", torch.bfloat16):
            y = images
            for layer in model:
                if way == "checkpoint" and isinstance(layer, (Block, Bottleneck)):
                    y = checkpoint(layer, y, use_reentrant=False)
                else:
                    y = layer(y)
            loss = F.cross_entropy(y, labels)
        loss.backward()
        optimizer.step()

    return n / seconds_of(step, 2, 3)


def main():
    total = torch.cuda.get_device_properties(0).total_memory
    rows = {}
    for line in open(sys.argv[1]):
        found = re.match(r"(\w+) bf16 batch (\d+) within ([\d.]+) (\w+)", json.loads(line).get("bench", ""))
        if found and found[1] in MODELS:
            rows[found[0]] = found[1], int(found[2]), float(found[3]) * UNITS[found[4]]
    for name, (kind, n, budget) in rows.items():
        make, shape, _ = MODELS[kind]
        torch.cuda.set_per_process_memory_fraction(budget / total)
        for way in ("as it is", "save_on_cpu", "checkpoint"):
            torch.manual_seed(1)
            said = {"peer": f"{name}, PyTorch {torch.__version__.split('+')[0]}, {way}"}
            try:
                said.update(value=rate(make().cuda().to(memory_format=torch.channels_last), n, shape, way), unit="pictures/s")
            except torch.cuda.OutOfMemoryError:
                said.update(missed="more memory than the budget")
            torch.cuda.empty_cache()
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
