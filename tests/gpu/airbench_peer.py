"""The recipe of examples/airbench.h in PyTorch, on the same card: so many runs, seconds and accuracy of each, and their mean.
f16, channels_last, torch.compile; the clock runs over whitening, training and the last test, after one short run.

    airbench_peer.py RUNS [--small]     --small: a few steps on the CPU, to try the script itself
"""
import json
import math
import os
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

RUNS, SMALL = int(sys.argv[1]), "--small" in sys.argv
DEVICE, HALF = ("cpu", torch.float32) if SMALL else ("cuda", torch.float16)
BATCH, EPOCHS, RATE, DECAY, MOMENTUM = (64, 1, 1.5, 0.00133, 0.85) if SMALL else (1024, 10, 1.5, 0.00133, 0.85)
MEAN = torch.tensor([0.49139968, 0.48215841, 0.44653091]).view(1, 3, 1, 1)
DEVIATION = torch.tensor([0.24703223, 0.24348513, 0.26158784]).view(1, 3, 1, 1)


def pictures(names):
    if SMALL:
        draw = np.random.default_rng(1)
        images, labels = draw.integers(0, 256, (256, 3, 32, 32), dtype=np.uint8), draw.integers(0, 10, 256)
    else:
        folder = os.path.join(os.environ["TANDEM_DATA"], "cifar-10-batches-bin")
        rows = np.concatenate([np.fromfile(os.path.join(folder, n), np.uint8).reshape(-1, 3073) for n in names])
        images, labels = rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]
    x = (torch.from_numpy(np.ascontiguousarray(images)).float() / 255 - MEAN) / DEVIATION
    return x.to(DEVICE, HALF).to(memory_format=torch.channels_last), torch.from_numpy(labels.astype(np.int64)).to(DEVICE)


class Group(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(i, o, 3, padding=1, bias=False), nn.Conv2d(o, o, 3, padding=1, bias=False)
        self.n1, self.n2 = nn.BatchNorm2d(o, 1e-12, 0.4), nn.BatchNorm2d(o, 1e-12, 0.4)

    def forward(self, x):
        x = F.gelu(self.n1(F.max_pool2d(self.c1(x), 2)))
        return F.gelu(self.n2(self.c2(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.groups = nn.Sequential(Group(24, 64), Group(64, 256), Group(256, 256))
        self.head = nn.Linear(256, 10, bias=False)

    def forward(self, x):
        x = self.groups(F.gelu(self.whiten(x)))
        return self.head(F.max_pool2d(x, 3).flatten(1)) / 9


def whiten(x):
    patches = x.float().unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (vectors / torch.sqrt(values + 5e-4)).T.reshape(12, 3, 2, 2)
    return torch.cat([filters, -filters])


def crops(x):
    n = len(x)
    padded = F.pad(x, (2,) * 4, "reflect")
    dy, dx = torch.randint(5, (2, n), device=x.device)
    rows = dy[:, None] + torch.arange(32, device=x.device)
    columns = dx[:, None] + torch.arange(32, device=x.device)
    out = padded.permute(0, 2, 3, 1)[torch.arange(n, device=x.device)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return out.permute(0, 3, 1, 2)  # channels last


def accuracy(model, x, y):
    model.eval()
    right = 0
    with torch.no_grad():
        for a, labels in zip(x.split(2000), y.split(2000)):
            padded, both = F.pad(a, (1,) * 4, "reflect"), lambda v: model(v) + model(v.flip(3))
            logits = 0.25 * both(a) + 0.125 * (both(padded[:, :, :32, :32]) + both(padded[:, :, 2:, 2:]))
            right += (logits.argmax(1) == labels).sum()
    model.train()
    return right.item() / len(y)


def build():
    model = Net().to(DEVICE).to(memory_format=torch.channels_last).to(HALF)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.float()
            m.weight.requires_grad = False
    for g in model.groups:
        for c in (g.c1, g.c2):
            nn.init.dirac_(c.weight.data[:c.weight.size(1)])
    model.whiten.weight.requires_grad = False
    return model


def train(model, step_of, train_set, test_set, most):
    (x, y), begin = train_set, time.perf_counter()
    model.whiten.weight.data.copy_(whiten(x[:5000]))
    norms = [p for n, p in model.named_parameters() if ".n" in n and p.requires_grad]
    others = [p for n, p in model.named_parameters() if ".n" not in n and p.requires_grad]
    optimizer = torch.optim.SGD([{"params": norms, "lr": 64 * RATE, "weight_decay": DECAY / 64}, {"params": others, "lr": RATE}],
                                lr=RATE, momentum=MOMENTUM, nesterov=True, weight_decay=DECAY)
    peaks = [g["lr"] for g in optimizer.param_groups]
    per_epoch = len(x) // BATCH
    total, done = math.ceil(0.99 * EPOCHS * per_epoch), 0
    slow = {k: v.clone() for k, v in model.state_dict().items() if v.is_floating_point()}

    def pull(decay):
        with torch.no_grad():
            for k, v in model.state_dict().items():
                if k in slow:
                    slow[k].lerp_(v, 1 - decay)
                    v.copy_(slow[k])

    mirrored = torch.rand(len(x), device=x.device) < 0.5
    model.train()
    for epoch in range(EPOCHS):
        pixels = crops(torch.where((mirrored ^ bool(epoch % 2)).view(-1, 1, 1, 1), x.flip(3), x))
        order = torch.randperm(len(x), device=x.device)
        for k in range(per_epoch):
            if done >= min(total, most):
                break
            t = done / total
            for g, peak in zip(optimizer.param_groups, peaks):
                g["lr"] = peak * (0.2 + 0.8 * t / 0.23 if t < 0.23 else 1 - 0.93 * (t - 0.23) / 0.77)
            rows = order[k * BATCH:(k + 1) * BATCH]
            optimizer.zero_grad(set_to_none=True)
            # A sum, as f16 wants it: its gradients are divided again, in f32, by the rate.
            loss = F.cross_entropy(step_of(pixels[rows].contiguous(memory_format=torch.channels_last)).float(), y[rows],
                                   label_smoothing=0.2)
            (loss * BATCH).backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.div_(BATCH)
            if epoch >= 3:
                model.whiten.bias.grad = None  # frozen, without compiling anything anew
            optimizer.step()
            done += 1
            if done % 5 == 0:
                pull(0.95**5 * (done / total)**3)
    pull(1)
    right = accuracy(model, *test_set)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return right, time.perf_counter() - begin


def main():
    torch.backends.cudnn.benchmark = True
    train_set, test_set = pictures([f"data_batch_{i}.bin" for i in range(1, 6)]), pictures(["test_batch.bin"])
    results = []
    for run in range(RUNS + 1):  # the first is short, and does not count
        torch.manual_seed(run)
        model = build()
        if run == 0:
            compiled_model = model
            step_of = model if SMALL else torch.compile(model, mode="max-autotune")
        else:  # the same module with new weights, so that it is compiled once
            compiled_model.load_state_dict(model.state_dict())
        right, seconds = train(compiled_model, step_of, train_set, test_set, 8 if run == 0 else 1 << 40)
        if run:
            results.append((right, seconds))
            print(f"PyTorch run {run}: test accuracy {100 * right:.2f} %, {seconds:.3f} s", flush=True)
    accuracies, times = zip(*results)
    print(json.dumps({"peer": f"airbench94, mean of {RUNS} runs", "value": sum(times) / RUNS, "unit": "s",
                      "accuracy": sum(accuracies) / RUNS}), flush=True)


if __name__ == "__main__":
    main()
