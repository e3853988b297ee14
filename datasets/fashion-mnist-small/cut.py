#!/usr/bin/env python3
"""cut.py FASHION_MNIST: the first 6,000 training and 1,000 test pictures of the official files, into this folder."""
import gzip
import os
import struct
import sys

if len(sys.argv) != 2:
    sys.exit(__doc__)
here = os.path.dirname(os.path.abspath(__file__))
for part, count in (("train", 6000), ("t10k", 1000)):
    for kind, header, size in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
        name = f"{part}-{kind}-ubyte.gz"
        with gzip.open(os.path.join(sys.argv[1], name)) as full:
            start = full.read(header)
            data = full.read(count * size)
        with open(os.path.join(here, name), "wb") as out:
            out.write(gzip.compress(start[:4] + struct.pack(">I", count) + start[8:] + data, 9, mtime=0))
