"""The models that are measured beside ours, in PyTorch: for tests/gpu/ and tests/bench/."""
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn


def seconds_of(step, warm, rounds, steps=1):
    """Of a step on the GPU: the median of so many rounds of so many steps, behind some for warmth."""
    for _ in range(warm):
        step()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / steps)
    return statistics.median(times)


def conv_bn(i, o, kernel, stride=1):
    return [nn.Conv2d(i, o, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(o)]


class Block(nn.Module):
    """Two 3×3 convolutions; where the shape changes the shortcut is a projection, or subsampled and zero-padded."""

    def __init__(self, i, o, stride, project):
        super().__init__()
        self.c1, self.b1 = conv_bn(i, o, 3, stride)
        self.c2, self.b2 = conv_bn(o, o, 3)
        self.stride, self.widen = stride, (o - i) // 2
        changes = stride > 1 or i != o
        self.down = nn.Sequential(*conv_bn(i, o, 1, stride)) if changes and project else None
        self.padded = changes and not project

    def forward(self, x):
        y = self.b2(self.c2(F.relu(self.b1(self.c1(x)))))
        if self.down is not None:
            x = self.down(x)
        elif self.padded:
            x = F.pad(x[:, :, ::self.stride, ::self.stride], (0, 0, 0, 0, self.widen, self.widen))
        return F.relu(x + y)


class Bottleneck(nn.Module):
    def __init__(self, i, m, stride):
        super().__init__()
        o = 4 * m
        self.c1, self.b1 = conv_bn(i, m, 1)
        self.c2, self.b2 = conv_bn(m, m, 3, stride)
        self.c3, self.b3 = conv_bn(m, o, 1)
        self.down = None if stride == 1 and i == o else nn.Sequential(*conv_bn(i, o, 1, stride))

    def forward(self, x):
        y = self.b3(self.c3(F.relu(self.b2(self.c2(F.relu(self.b1(self.c1(x))))))))
        return F.relu(y + (x if self.down is None else self.down(x)))


def head(features, classes):
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes)]


def cifar_resnet(widths, depth, project):
    """The stem is three layers, as is the head; between them are the blocks."""
    layers, i = [*conv_bn(3, widths[0], 3), nn.ReLU()], widths[0]
    for stage, o in enumerate(widths):
        for b in range(depth):
            layers.append(Block(i, o, 2 if stage and b == 0 else 1, project))
            i = o
    return nn.Sequential(*layers, *head(i, 10))


def imagenet_resnet(depths):
    layers, i = [*conv_bn(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for stage, (m, depth) in enumerate(zip((64, 128, 256, 512), depths)):
        for b in range(depth):
            layers.append(Bottleneck(i, m, 2 if stage and b == 0 else 1))
            i = 4 * m
    return nn.Sequential(*layers, *head(i, 1000))


def vgg(widths):
    """0 in widths: a pooling."""
    layers, i = [], 3
    for o in widths:
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()] if o else [nn.MaxPool2d(2)]
        i = o or i
    return nn.Sequential(*layers, *head(i, 10))


def lenet5():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))


def smallcnn():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136, 128), nn.ReLU(), nn.Linear(128, 10))


def mlp():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


VGG11 = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)
VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
MODELS = {  # builder, shape of one picture, classes
    "mlp": (mlp, (1, 28, 28), 10),
    "lenet5": (lenet5, (1, 28, 28), 10),
    "smallcnn": (smallcnn, (1, 28, 28), 10),
    "vgg11": (lambda: vgg(VGG11), (3, 32, 32), 10),
    "vgg16": (lambda: vgg(VGG16), (3, 32, 32), 10),
    "resnet20": (lambda: cifar_resnet((16, 32, 64), 3, False), (3, 32, 32), 10),
    "resnet110": (lambda: cifar_resnet((16, 32, 64), 18, False), (3, 32, 32), 10),
    "resnet1202": (lambda: cifar_resnet((16, 32, 64), 200, False), (3, 32, 32), 10),
    "resnet18": (lambda: cifar_resnet((64, 128, 256, 512), 2, True), (3, 32, 32), 10),
    "resnet50": (lambda: imagenet_resnet((3, 4, 6, 3)), (3, 224, 224), 1000),
    "resnet152": (lambda: imagenet_resnet((3, 8, 36, 3)), (3, 224, 224), 1000),
}
