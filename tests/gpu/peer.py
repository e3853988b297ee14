"""PyTorch's milliseconds for the models of gpu_check: channels_last, bf16 autocast, torch.compile, data on the device.
Prints one JSON object a line: {"peer": "resnet18 bf16 batch 512", "value": 12.3, "unit": "ms"}."""
import json
import statistics
import sys
import time

import torch
from torch import nn
import torch.nn.functional as F


class SmallCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.f1, self.f2 = nn.Linear(64 * 49, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.max_pool2d(F.relu(self.c2(x)), 2)
        return self.f2(F.relu(self.f1(x.flatten(1))))


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.f1, self.f2, self.f3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.max_pool2d(F.relu(self.c2(x)), 2)
        return self.f3(F.relu(self.f2(F.relu(self.f1(x.flatten(1))))))


class Block(nn.Module):
    def __init__(self, i, o, stride, project):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.c2, self.b2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.stride, self.widen = stride, (o - i) // 2
        same = stride == 1 and i == o
        self.down = None if same or not project else nn.Sequential(
            nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))
        self.padded = not same and not project

    def forward(self, x):
        y = self.b2(self.c2(F.relu(self.b1(self.c1(x)))))
        if self.down is not None:
            x = self.down(x)
        elif self.padded:
            x = F.pad(x[:, :, ::self.stride, ::self.stride], (0, 0, 0, 0, self.widen, self.widen))
        return F.relu(x + y)


def cifar_net(widths, depth, project):
    layers, i = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()], widths[0]
    for stage, o in enumerate(widths):
        for b in range(depth):
            layers.append(Block(i, o, 2 if stage and b == 0 else 1, project))
            i = o
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 10))


def vgg16():
    layers, i = [], 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if width == 0:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(i, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            i = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Bottleneck(nn.Module):
    def __init__(self, i, m, stride):
        super().__init__()
        o = 4 * m
        self.c1, self.b1 = nn.Conv2d(i, m, 1, bias=False), nn.BatchNorm2d(m)
        self.c2, self.b2 = nn.Conv2d(m, m, 3, stride, 1, bias=False), nn.BatchNorm2d(m)
        self.c3, self.b3 = nn.Conv2d(m, o, 1, bias=False), nn.BatchNorm2d(o)
        self.down = None if stride == 1 and i == o else nn.Sequential(
            nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x):
        y = self.b3(self.c3(F.relu(self.b2(self.c2(F.relu(self.b1(self.c1(x))))))))
        return F.relu(y + (x if self.down is None else self.down(x)))


def resnet50():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    i = 64
    for stage, (m, n) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for b in range(n):
            layers.append(Bottleneck(i, m, 2 if stage and b == 0 else 1))
            i = 4 * m
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 1000))


CASES = {
    "lenet5 bf16 batch 128": (LeNet, (128, 1, 28, 28), 10),
    "smallcnn bf16 batch 128": (SmallCNN, (128, 1, 28, 28), 10),
    "resnet20 bf16 batch 128": (lambda: cifar_net([16, 32, 64], 3, False), (128, 3, 32, 32), 10),
    "resnet18 bf16 batch 512": (lambda: cifar_net([64, 128, 256, 512], 2, True), (512, 3, 32, 32), 10),
    "vgg16 bf16 batch 512": (vgg16, (512, 3, 32, 32), 10),
    "resnet50 bf16 batch 256": (resnet50, (256, 3, 224, 224), 1000),
}


def main():
    torch.backends.cudnn.benchmark = True
    print(json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name()}), flush=True)
    for name, (make, shape, classes) in CASES.items():
        if len(sys.argv) > 2 and name.split()[0] not in sys.argv[2:]:
            continue
        model = make().cuda().to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
        x = torch.full(shape, 0.1, device="cuda").to(memory_format=torch.channels_last)
        labels = torch.zeros(shape[0], dtype=torch.long, device="cuda")
        compiled = torch.compile(model, mode=sys.argv[1] if len(sys.argv) > 1 else "max-autotune-no-cudagraphs"
                                 if shape[2] > 100 else "reduce-overhead")

        def step():
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(compiled(x), labels)
            loss.backward()
            optimizer.step()

        times, n = [], 5 if shape[2] > 100 else 50
        for _ in range(10):
            step()
        for _ in range(7):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(n):
                step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / n)
        print(json.dumps({"peer": name, "value": 1e3 * statistics.median(times), "unit": "ms"}), flush=True)


if __name__ == "__main__":
    main()
