#!/usr/bin/env python3
"""Writes torchvision_names.txt: the names and shapes of torchvision's models, which ours have to have.

    python3 torchvision_names.py [FILE]      needs torch and torchvision

One line per entry of the model's state_dict: MODEL NAME EXTENTS...  Filters are in PyTorch's order, OIHW; the counters
num_batches_tracked, which hold no shape, are left out.
"""
import os
import sys

import torchvision.models

path = sys.argv[1] if len(sys.argv) > 1 else os.path.splitext(os.path.abspath(__file__))[0] + ".txt"
with open(path, "w") as out:
    for model in ("vgg11_bn", "vgg16_bn", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"):
        for name, value in getattr(torchvision.models, model)().state_dict().items():
            if not name.endswith("num_batches_tracked"):
                print(model, name, *value.shape, file=out)
