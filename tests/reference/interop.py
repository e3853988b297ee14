#!/usr/bin/env python3
"""Weights and graphs, exchanged with PyTorch and onnxruntime: both directions, for six models.

    make build/bench_interop
    python3 -m venv --system-site-packages venv && venv/bin/pip install 'numpy<2' safetensors onnx onnxruntime
    venv/bin/python tests/reference/interop.py [MODEL …]

Builds each model in PyTorch with random weights and statistics, and prints the largest difference of the logits, relative to the
largest logit: PyTorch → Tandem (import), Tandem → PyTorch (export of its own draw), Tandem → ONNX → onnxruntime. Exits with 1
when one exceeds 1e-4, or a weight does not come back bit for bit. `--dump FILE` writes a thin network with an input and its
logits for the tests, as safetensors' own library writes them.
"""
import argparse
import subprocess
import sys
import tempfile
from collections import OrderedDict

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.models import resnet
from torchvision.models import vgg as torchvision_vgg


def named(**layers):
    return nn.Sequential(OrderedDict(layers))


def lenet5(classes, channels, side):
    return named(
        conv1=nn.Conv2d(channels, 6, 5, padding=2 if side == 28 else 0), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5), relu2=nn.ReLU(), pool2=nn.MaxPool2d(2), flat=nn.Flatten(), fc1=nn.Linear(400, 120),
        relu3=nn.ReLU(), fc2=nn.Linear(120, 84), relu4=nn.ReLU(), fc3=nn.Linear(84, classes))


def smallcnn(classes, channels, side):
    return named(
        conv1=nn.Conv2d(channels, 32, 3, padding=1), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, 3, padding=1), relu2=nn.ReLU(), pool2=nn.MaxPool2d(2), flat=nn.Flatten(),
        fc1=nn.Linear(64 * (side // 4) ** 2, 128), relu3=nn.ReLU(), fc2=nn.Linear(128, classes))


class PadShortcut(nn.Module):  # He et al.'s option A
    def __init__(self, stride, widen):
        super().__init__()
        self.stride, self.widen = stride, widen

    def forward(self, x):
        w = self.widen
        return nn.functional.pad(x[:, :, ::self.stride, ::self.stride], (0, 0, 0, 0, w, w))


def resnet_cifar(depth):
    def make(classes, channels, side):
        width, stages = 16, {}
        stem = {"conv1": nn.Conv2d(channels, 16, 3, padding=1, bias=False), "bn1": nn.BatchNorm2d(16), "relu": nn.ReLU()}
        for stage, out in enumerate((16, 32, 64)):
            blocks = []
            for b in range((depth - 2) // 6):
                first = b == 0 and stage > 0
                down = PadShortcut(2, (out - width) // 2) if first else None
                blocks.append(resnet.BasicBlock(width, out, 2 if first else 1, down))
                width = out
            stages[f"layer{stage + 1}"] = nn.Sequential(*blocks)
        return named(**stem, **stages, pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), fc=nn.Linear(64, classes))
    return make


def torchvision_resnet(make_net):
    def make(classes, channels, side):
        net = make_net(num_classes=classes)
        if side < 64:  # the stem for small pictures
            net.conv1, net.maxpool = nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.Identity()
        return net
    return make


def vgg11(classes, channels, side):
    net = torchvision_vgg.vgg11_bn(num_classes=classes)
    if side < 224:  # the form for small pictures: one Linear behind the mean
        net.avgpool, net.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(512, classes)
    return net


MODELS = {  # name: build, classes, channels, side
    "lenet5": (lenet5, 10, 1, 28),
    "smallcnn": (smallcnn, 10, 1, 28),
    "vgg11": (vgg11, 10, 3, 32),
    "resnet20": (resnet_cifar(20), 10, 3, 32),
    "resnet18": (torchvision_resnet(resnet.resnet18), 10, 3, 32),
    "resnet50": (torchvision_resnet(resnet.resnet50), 1000, 3, 224),
}


def randomise(net):
    """No layer is the identity, and every statistic differs from its default."""
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 1.0)
            nn.init.normal_(m.bias, 0, 0.1)
            nn.init.normal_(m.running_mean, 0, 0.1)
            nn.init.uniform_(m.running_var, 0.5, 1.5)
    return net.eval()


def error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max())


def check(name, program):
    import onnx
    import onnxruntime
    build, classes, channels, side = MODELS[name]
    torch.manual_seed(1)
    net = randomise(build(classes, channels, side))
    x = torch.randn(3, channels, side, side)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        want = net(x)
        save_file({k: v.contiguous() for k, v in net.state_dict().items()}, f"{folder}/weights.safetensors")
        save_file({"input": x}, f"{folder}/dump.safetensors")

        def run(weights):
            subprocess.run([program, name, str(classes), str(channels), str(side), weights,
                            f"{folder}/dump.safetensors", f"{folder}/out"], check=True)
            return load_file(f"{folder}/out.logits.safetensors")["logits"]

        def session(model):
            onnx.checker.check_model(model, full_check=True)
            return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])

        imported = error(run(f"{folder}/weights.safetensors"), want)
        back = load_file(f"{folder}/out.weights.safetensors")
        state = net.state_dict()
        exact = set(back) == set(state) and all(
            torch.equal(back[k], state[k]) for k in state if not k.endswith("num_batches_tracked"))
        graph = error(session(f"{folder}/out.onnx").run(["output"], {"input": x.numpy()})[0], want)

        ours = run("-")  # the other way round: Tandem's own draw
        net.load_state_dict(load_file(f"{folder}/out.weights.safetensors"), strict=True)
        exported = error(net(x), ours)
        one = session(f"{folder}/out.onnx")
        own_graph = error(np.concatenate([one.run(None, {"input": x[i:i + 1].numpy()})[0] for i in range(3)]), ours)
    worst = max(imported, exported, graph, own_graph)
    print(f"{name:10} import {imported:.1e}  export {exported:.1e}  ONNX {max(graph, own_graph):.1e}  "
          f"weights back {'bit for bit' if exact else 'DIFFERENT'}", flush=True)
    return exact and worst < 1e-4


class Thin(nn.Module):
    """What LeNet-5 has not: batch norm, a padded shortcut, groups, average pooling. tests/test_interop.cpp has its twin."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.shortcut = PadShortcut(2, 4)
        self.conv3 = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.fc1, self.fc2 = nn.Linear(64, 12), nn.Linear(12, 4)

    def forward(self, x):
        x = self.bn1(self.conv1(x)).relu()
        x = (self.bn2(self.conv2(x)) + self.shortcut(x)).relu()
        x = nn.functional.avg_pool2d(self.conv3(x), 2)
        return self.fc2(self.fc1(x.flatten(1)).relu())


def dump(file):
    torch.manual_seed(2)
    net, x = randomise(Thin()), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        tensors = {"thin/logits": net(x), "thin/input": x}
    tensors.update({f"thin/state/{k}": v.contiguous() for k, v in net.state_dict().items()})
    save_file(tensors, file, metadata={"made_by": "safetensors, the Python library"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--program", default="build/bench_interop")
    parser.add_argument("--dump")
    options = parser.parse_args()
    if options.dump:
        dump(options.dump)
    else:
        good = [check(name, options.program) for name in options.models or MODELS]
        sys.exit(not all(good))
