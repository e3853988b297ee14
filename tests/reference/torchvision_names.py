#!/usr/bin/env python3
"""Writes torchvision_names.txt: the names and shapes of torchvision's models, which ours have to have.

    python3 torchvision_names.py [FILE]      needs torch and torchvision

Of each model a line `MODEL ENTRIES HASH`: the number of entries of its state_dict, and FNV-1a, 64 bits, of the lines
`NAME SIZES...` of all of them, sorted. Filters are in PyTorch's order, OIHW; the counters num_batches_tracked, which
hold no shape, are left out. `--entries` prints those lines as well, to compare with what the test prints.
"""
import os
import sys

MODELS = ("vgg11_bn", "vgg16_bn", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")


def fnv(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


if __name__ == "__main__":
    import torchvision.models

    names = [a for a in sys.argv[1:] if a != "--entries"]
    path = names[0] if names else os.path.splitext(os.path.abspath(__file__))[0] + ".txt"
    with open(path, "w") as file:
        for model in MODELS:
            lines = sorted(" ".join([name, *map(str, value.shape)])
                           for name, value in getattr(torchvision.models, model)().state_dict().items()
                           if not name.endswith("num_batches_tracked"))
            print(model, len(lines), fnv("".join(line + "\n" for line in lines)), file=file)
            if "--entries" in sys.argv:
                print(model, *lines, sep="\n")
