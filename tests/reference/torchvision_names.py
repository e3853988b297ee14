#!/usr/bin/env python3
"""Writes torchvision_names.txt: the names and shapes of torchvision's models, which ours have to have.

    python3 torchvision_names.py [FILE]      needs torch and torchvision

Of each model a line `MODEL ENTRIES HASH`, and of two a line for each entry of its state_dict, `MODEL NAME SIZES...`.
The hash is FNV-1a, 64 bits, of the lines `NAME SIZES...` of all entries, sorted. Filters are in PyTorch's order, OIHW;
the counters num_batches_tracked, which hold no shape, are left out.
"""
import os
import sys

MODELS = ("vgg11_bn", "vgg16_bn", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
WHOLE = ("vgg11_bn", "resnet18")


def fnv(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def write(entries, out):
    """entries: of each model, its lines "NAME SIZES..." """
    for model in MODELS:
        print(model, len(entries[model]), fnv("".join(line + "\n" for line in sorted(entries[model]))), file=out)
    for model in WHOLE:
        for line in entries[model]:
            print(model, line, file=out)


if __name__ == "__main__":
    import torchvision.models

    path = sys.argv[1] if len(sys.argv) > 1 else os.path.splitext(os.path.abspath(__file__))[0] + ".txt"
    states = {model: getattr(torchvision.models, model)().state_dict() for model in MODELS}
    with open(path, "w") as file:
        write({model: [" ".join([name, *map(str, value.shape)]) for name, value in state.items()
                       if not name.endswith("num_batches_tracked")] for model, state in states.items()}, file)
