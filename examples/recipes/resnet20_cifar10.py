#!/usr/bin/env python3
"""PyTorch twin of Tandem's resnet20_cifar10 recipe, for comparing accuracy.

ResNet-20 in its CIFAR form (He et al. 2016) with parameter-free shortcuts,
batch 128, SGD with Nesterov momentum and a one-cycle learning rate.  Needs
only torch and numpy, and the binary CIFAR-10 files under
DATA/cifar-10-batches-bin (DATA: --data, else $TANDEM_DATA, else data/).

Prints one JSON object per line: "start", an "epoch" per epoch, "end".  Of an
epoch's figures, images_per_second counts training alone (augmentation
included) and seconds covers training and testing.
"""
import argparse
import json
import os
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
PAD = 4


def conv3x3(inputs, outputs, stride=1):
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = conv3x3(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv3x3(outputs, outputs), nn.BatchNorm2d(outputs)
        self.stride, self.added = stride, outputs - inputs

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.added:  # every second pixel; new channels are zero, half on each side
            x = x[:, :, ::self.stride, ::self.stride]
            x = F.pad(x, (0, 0, 0, 0, self.added // 2, self.added - self.added // 2))
        return F.relu(y + x)


class ResNet20(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = conv3x3(3, 16), nn.BatchNorm2d(16)
        blocks, inputs = [], 16
        for outputs, first_stride in ((16, 1), (32, 2), (64, 2)):
            for stride in (first_stride, 1, 1):
                blocks.append(BasicBlock(inputs, outputs, stride))
                inputs = outputs
        self.blocks, self.fc = nn.Sequential(*blocks), nn.Linear(64, 10)

    def forward(self, x):
        x = self.blocks(F.relu(self.bn(self.conv(x))))
        return self.fc(x.mean((2, 3)))


def load(folder, names):
    """Pictures as uint8 NHWC and labels as int64."""
    records = np.concatenate([
        np.fromfile(os.path.join(folder, name), np.uint8).reshape(-1, 3073) for name in names])
    pictures = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pictures), torch.from_numpy(records[:, 0].astype(np.int64))


def normalise(pictures):
    """uint8 NHWC to float32 NCHW; the memory stays NHWC (channels_last)."""
    x = torch.from_numpy(pictures).float()
    x = (x - 255 * torch.tensor(MEAN)).mul_(1 / (255 * torch.tensor(STD)))
    return x.permute(0, 3, 1, 2)


def crops(pictures):
    """View [N, 9, 9, 32, 32, 3] of every crop of the pictures padded with black."""
    padded = np.pad(pictures, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
    n, y, x, c = padded.strides
    shape = (len(pictures), 2 * PAD + 1, 2 * PAD + 1) + pictures.shape[1:]
    return np.lib.stride_tricks.as_strided(padded, shape, (n, y, x, y, x, c), writeable=False)


def augment(windows, index, rng):
    shift = rng.integers(0, 2 * PAD + 1, (2, len(index)))
    batch = windows[index, shift[0], shift[1]]
    flip = rng.random(len(index)) < 0.5
    batch[flip] = batch[flip, :, ::-1]
    return batch


@torch.no_grad()
def evaluate(model, pictures, labels, batch=500):
    model.eval()
    loss = correct = 0
    for i in range(0, len(labels), batch):
        logits, target = model(normalise(pictures[i:i + batch])), labels[i:i + batch]
        loss += F.cross_entropy(logits, target, reduction="sum").item()
        correct += (logits.argmax(1) == target).sum().item()
    return loss / len(labels), correct / len(labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default=os.environ.get("TANDEM_DATA") or "data")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=0, help="0: PyTorch's choice")
    parser.add_argument("--metrics", help="also write the JSON lines to this file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    folder = os.path.join(args.data, "cifar-10-batches-bin")
    try:
        train, train_labels = load(folder, [f"data_batch_{i}.bin" for i in range(1, 6)])
        test, test_labels = load(folder, ["test_batch.bin"])
        metrics = open(args.metrics, "w") if args.metrics else None
    except (OSError, ValueError) as error:
        sys.exit(f"resnet20_cifar10: {error}")

    def report(event, **values):
        line = json.dumps({"event": event, **values})
        print(line, flush=True)
        if metrics:
            print(line, file=metrics, flush=True)

    recipe = dict(batch=128, epochs=args.epochs, max_lr=0.4, pct_start=0.3, div_factor=25,
                  final_div_factor=1e4, momentum=0.9, nesterov=True, weight_decay=5e-4,
                  crop_padding=PAD, flip=0.5)
    report("start", torch=torch.__version__, threads=torch.get_num_threads(),
           seed=args.seed, recipe=recipe)

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    # channels_last measured faster than contiguous on the CPU.
    model = ResNet20().to(memory_format=torch.channels_last)
    decayed = [p for p in model.parameters() if p.dim() > 1]  # conv and linear weights
    others = [p for p in model.parameters() if p.dim() == 1]  # batch norm, biases
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": recipe["weight_decay"]}, {"params": others}],
        lr=recipe["max_lr"], momentum=recipe["momentum"], nesterov=recipe["nesterov"])
    batch = recipe["batch"]
    steps = len(train_labels) // batch  # the incomplete last batch is dropped
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=recipe["max_lr"], total_steps=args.epochs * steps,
        pct_start=recipe["pct_start"], anneal_strategy="cos", div_factor=recipe["div_factor"],
        final_div_factor=recipe["final_div_factor"], cycle_momentum=False)

    windows, best, begin = crops(train), 0.0, time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        model.train()
        started, loss_sum, correct = time.perf_counter(), 0.0, 0
        order = rng.permutation(len(train_labels))[:steps * batch].reshape(steps, batch)
        for index in order:
            x, target = normalise(augment(windows, index, rng)), train_labels[index]
            optimizer.zero_grad(set_to_none=True)
            logits = model(x)
            loss = F.cross_entropy(logits, target)
            loss.backward()
            optimizer.step()
            schedule.step()
            loss_sum += loss.item()
            correct += (logits.argmax(1) == target).sum().item()
        trained = time.perf_counter()
        test_loss, test_accuracy = evaluate(model, test, test_labels)
        best = max(best, test_accuracy)
        report("epoch", epoch=epoch, train_loss=round(loss_sum / steps, 5),
               train_accuracy=round(correct / (steps * batch), 5),
               test_loss=round(test_loss, 5), test_accuracy=round(test_accuracy, 4),
               images_per_second=round(steps * batch / (trained - started), 1),
               seconds=round(time.perf_counter() - started, 2))
    report("end", epochs=args.epochs, test_loss=round(test_loss, 5),
           test_accuracy=round(test_accuracy, 4), best_test_accuracy=round(best, 4),
           seconds=round(time.perf_counter() - begin, 2))


if __name__ == "__main__":
    main()
