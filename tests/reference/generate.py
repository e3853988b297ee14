#!/usr/bin/env python3
"""Writes the PyTorch results that Tandem's tests compare against.

    python3 generate.py [FOLDER]      (default: the folder of this script)

needs torch and numpy and writes three safetensors files.  Every input is a
float32 value, PyTorch computes in float64, and the result is rounded to
float32, so the stored numbers are the right answers to float32 accuracy.
Each case seeds its own generator with its name: adding a case changes no other.

Tensors are called "CASE/TENSOR"; the file's metadata holds, under CASE, a JSON
object of the case's attributes (numbers, lists of integers, "op").

Layouts are Tandem's: pictures NHWC, convolution filters OHWI (I counts the
channels of one group), linear weights [outputs, inputs].  Flattening a picture
goes in (h, w, c) order.

ops.safetensors: inputs under their own names, the result "y", a random
upstream gradient "dy", and for every input t its gradient "dt".
  conv2d        x w [b]; stride padding dilation groups; padding is one number
                or [height, width]
  max_pool2d    x; kernel stride padding
  avg_pool2d    the same; padding is left out of the mean
  global_avg_pool  x [N,H,W,C], y [N,C]
  batch_norm    x weight bias running_mean running_var [residual]; eps momentum
                training relu; y = relu?(bn(x) + residual?); in training also
                running_mean_after, running_var_after (unbiased variance)
  group_norm    x weight bias; groups eps
  layer_norm    x weight bias (over their axes, the last of x); eps
  linear        x w b
  matmul        a b
  softmax       x; axis
  log_softmax   x; axis
  mse_loss l1_loss huber_loss bce_with_logits  x t; delta
  where         a b mask (I32)
  gather        x index (I32); axis        embedding  w index (I32)
  topk          x; k axis largest; places (I32): the indices
  stack         x0 x1; axis
  cross_entropy x (logits) labels (I32); label_smoothing; mean over the batch
  unary ops     x, and what the op takes (slope, alpha, low, high)
  binary ops    a b, broadcast
  sum mean max  x; axes keepdim
  permute       x; axes        slice  x; start stop step (one of each per axis)
  concat        x0 x1 x2; axis pad    x; before after (one per axis) value

training.safetensors:
  tiny          a network: conv1 (3x3, padding 1, bias) bn1 relu max_pool 2
                conv2 (3x3, stride 2, padding 1) bn2 relu flatten fc.  x, labels,
                the initial parameters, and "PARAMETER.grad", the gradients of
                the first step; running statistics start at 0 and 1
  tiny_*        training on that one batch: losses (each before its update),
                parameters and running statistics after the last step; lr
                momentum nesterov weight_decay steps.  Weight decay spares biases
                and batch norm
  tiny_adamw*   the same with AdamW; conv1.bias does not move (its gradient is nothing but rounding)
  tiny_adam tiny_rmsprop*  the same with these
  tiny_lars     the same with LARS from its formula; vectors learn at `vectors` times the rate
  lr_*          lr (F64): the rate that step 0, 1, ... uses

specials.safetensors: NaN, infinities, zeros of both signs, denormals, numbers whose squares overflow.
  unary         x [K] dy [M]; every unary op has y [K] and dx [M,K], a row per dy
  binary        a [K]; every binary op has y, da, db [K,K] of a[i] and a[j], dy = 1.5
  layers        as in ops.safetensors, with such numbers among x
"""
import json
import math
import os
import struct
import sys
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler


class File:
    """Collects tensors and attributes, then writes them as safetensors."""
    DTYPES = {"float32": "F32", "float64": "F64", "int32": "I32", "int64": "I64"}

    def __init__(self):
        self.tensors, self.metadata = {}, {}

    def add(self, case, **tensors):
        for name, value in tensors.items():
            value = value.detach().numpy() if torch.is_tensor(value) else np.asarray(value)
            self.tensors[f"{case}/{name}"] = np.array(value, order="C")

    def write(self, path):
        header, offset = {"__metadata__": self.metadata}, 0
        # Wide types first, so that every tensor is aligned to its element size.
        tensors = sorted(self.tensors.items(), key=lambda item: -item[1].itemsize)
        for name, value in tensors:
            header[name] = {"dtype": self.DTYPES[value.dtype.name], "shape": list(value.shape),
                            "data_offsets": [offset, offset + value.nbytes]}
            offset += value.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for _, value in tensors:
                out.write(value.astype(value.dtype.newbyteorder("<")).tobytes())
        print(f"{path}: {len(self.metadata)} cases, {len(tensors)} tensors, "
              f"{os.path.getsize(path)} bytes")


def seed(case):
    """What is drawn from here on belongs to this case, which it returns."""
    torch.manual_seed(zlib.crc32(case.encode()))
    return case


def nchw(x):
    return x.permute(0, 3, 1, 2)  # also takes filters from OHWI to OIHW


def nhwc(x):
    return x.permute(0, 2, 3, 1)


# ---------------------------------------------------------------- operations

ops = File()


def record(case, attributes, function, constants=None, **inputs):
    """Runs function on float64 copies of the inputs (float32) and stores it all.

    constants are stored as they are and not differentiated.
    """
    leaves = {name: value.double().requires_grad_() for name, value in inputs.items()}
    y = function(*leaves.values())
    dy = torch.randn(y.shape)
    y.backward(dy.double())
    ops.metadata[case] = json.dumps(attributes)
    ops.add(case, **inputs, **(constants or {}), y=y.float(), dy=dy,
            **{"d" + name: leaf.grad.float() for name, leaf in leaves.items()})


def conv2d(case, x, w, bias=False, stride=1, padding=0, dilation=1, groups=1):
    case = seed("conv2d_" + case)
    inputs = {"x": torch.randn(x), "w": torch.randn(w) / math.sqrt(w[1] * w[2] * w[3])}
    if bias:
        inputs["b"] = torch.randn(w[0])
    record(case, dict(op="conv2d", stride=stride, padding=padding, dilation=dilation, groups=groups),
           lambda x, w, b=None: nhwc(F.conv2d(nchw(x), nchw(w), b, stride, padding, dilation, groups)), **inputs)


conv2d("plain", (2, 9, 7, 16), (32, 3, 3, 16), padding=1)
conv2d("stride2", (2, 9, 8, 5), (6, 3, 3, 5), stride=2, padding=1)
conv2d("dilation2", (2, 9, 8, 4), (5, 3, 3, 4), padding=2, dilation=2)
conv2d("groups2", (2, 6, 5, 8), (6, 3, 3, 4), padding=1, groups=2)
conv2d("depthwise", (2, 7, 6, 10), (10, 3, 3, 1), padding=1, groups=10)
conv2d("depthwise_stride2", (2, 7, 6, 10), (10, 3, 3, 1), stride=2, padding=1, groups=10)
conv2d("5x5", (2, 9, 8, 3), (4, 5, 5, 3), padding=2)
conv2d("5x5_valid", (2, 9, 8, 3), (4, 5, 5, 3))
conv2d("1x1", (2, 5, 4, 8), (12, 1, 1, 8))
conv2d("1x1_stride2", (2, 7, 6, 8), (12, 1, 1, 8), stride=2)
conv2d("bias", (2, 6, 7, 3), (8, 3, 3, 3), bias=True, padding=1)
conv2d("padding_2_1", (2, 6, 7, 4), (5, 3, 3, 4), padding=[2, 1])
conv2d("1x5", (2, 6, 7, 4), (5, 1, 5, 4), padding=[0, 2])


def pool(op, case, function, kernel, stride, padding):
    record(seed(f"{op}_{case}"), dict(op=op, kernel=kernel, stride=stride, padding=padding),
           lambda x: nhwc(function(nchw(x), kernel, stride, padding)), x=torch.randn(2, 8, 9, 5))


def avg_pool2d(x, kernel, stride, padding):
    return F.avg_pool2d(x, kernel, stride, padding, count_include_pad=False)


for op, function in (("max_pool2d", F.max_pool2d), ("avg_pool2d", avg_pool2d)):
    pool(op, "2_2", function, 2, 2, 0)
    pool(op, "3_2_pad1", function, 3, 2, 1)

record(seed("global_avg_pool"), dict(op="global_avg_pool"), lambda x: x.mean((1, 2)), x=torch.randn(3, 5, 4, 20))


def batch_norm(case, training, residual=False, relu=False):
    case = seed("batch_norm_" + case)
    shape, eps, momentum = (4, 5, 3, 10), 1e-5, 0.1
    channels = shape[-1]
    inputs = dict(x=2 * torch.randn(shape) + torch.randn(channels),
                  weight=torch.rand(channels) + 0.5, bias=torch.randn(channels))
    if residual:
        inputs["residual"] = torch.randn(shape)
    constants = dict(running_mean=torch.randn(channels), running_var=torch.rand(channels) + 0.5)
    mean, var = (value.double() for value in constants.values())

    def function(x, weight, bias, residual=None):
        y = nhwc(F.batch_norm(nchw(x), mean, var, weight, bias, training, momentum, eps))
        y = y if residual is None else y + residual
        return F.relu(y) if relu else y

    record(case, dict(op="batch_norm", training=int(training), eps=eps, momentum=momentum, relu=int(relu)),
           function, constants, **inputs)
    if training:  # PyTorch has updated them in place
        ops.add(case, running_mean_after=mean.float(), running_var_after=var.float())


batch_norm("training", True)
batch_norm("training_relu", True, relu=True)
batch_norm("training_residual_relu", True, residual=True, relu=True)
batch_norm("eval", False)

for case, shape, groups in (("group_norm", (3, 5, 4, 12), 4), ("group_norm_each", (2, 3, 3, 6), 6),
                            ("group_norm_one", (2, 4, 3, 20), 1), ("group_norm_flat", (5, 24), 3)):
    seed(case)
    c = shape[-1]
    x = (2 * torch.randn(shape) + torch.randn(c)).float()
    record(case, dict(op="group_norm", groups=groups, eps=1e-5),
           lambda x, weight, bias: F.group_norm(x.movedim(-1, 1), groups, weight, bias, 1e-5).movedim(1, -1),
           x=x, weight=torch.rand(c) + 0.5, bias=torch.randn(c))
for case, shape, axes in (("layer_norm", (7, 19), 1), ("layer_norm_tokens", (2, 3, 5, 8), 1),
                          ("layer_norm_pictures", (3, 4, 2, 5), 3)):
    seed(case)
    last = shape[-axes:]
    record(case, dict(op="layer_norm", eps=1e-5), lambda x, weight, bias: F.layer_norm(x, last, weight, bias, 1e-5),
           x=2 * torch.randn(shape) + 1, weight=torch.rand(last) + 0.5, bias=torch.randn(last))

record(seed("linear"), dict(op="linear"), F.linear, x=torch.randn(5, 19), w=torch.randn(7, 19), b=torch.randn(7))
for case, a, b in (("2d", (5, 17), (17, 6)), ("batched", (3, 4, 7), (3, 7, 5)), ("broadcast", (2, 1, 3, 4), (3, 4, 5))):
    record(seed("matmul_" + case), dict(op="matmul"), torch.matmul, a=torch.randn(a), b=torch.randn(b))

for op, function in (("softmax", F.softmax), ("log_softmax", F.log_softmax)):
    for axis in (1, 0):
        record(seed(op + ("" if axis else "_0")), dict(op=op, axis=axis), lambda x: function(x, axis),
               x=4 * torch.randn(6, 11))
for op, function in (("mse_loss", F.mse_loss), ("l1_loss", F.l1_loss),
                     ("huber_loss", lambda x, t: F.huber_loss(x, t, delta=0.7)),
                     ("bce_with_logits", F.binary_cross_entropy_with_logits)):
    seed(op)
    t = torch.rand(5, 7) if op == "bce_with_logits" else torch.randn(5, 7)
    record(op, dict(op=op, delta=0.7), function, x=2 * torch.randn(5, 7), t=t)

seed("where")
mask = torch.rand(3, 1) < 0.5
record("where", dict(op="where"), lambda a, b: torch.where(mask, a, b), dict(mask=mask.int()),
       a=torch.randn(2, 3, 4), b=torch.randn(4))
seed("gather")
index = torch.randint(5, (3, 8, 2))  # 8 of 5: some several times
record("gather", dict(op="gather", axis=1), lambda x: x.gather(1, index), dict(index=index.int()),
       x=torch.randn(3, 5, 2))
seed("embedding")
rows = torch.randint(6, (3, 4))
record("embedding", dict(op="embedding"), lambda w: F.embedding(rows, w), dict(index=rows.int()), w=torch.randn(6, 5))
for case, largest in (("topk", True), ("topk_smallest", False)):
    seed(case)
    x = torch.randn(4, 9, 2)
    record(case, dict(op="topk", k=3, axis=1, largest=int(largest)), lambda x: x.topk(3, 1, largest).values,
           dict(places=x.topk(3, 1, largest).indices.int()), x=x)
record(seed("stack"), dict(op="stack", axis=1), lambda x0, x1: torch.stack((x0, x1), 1),
       x0=torch.randn(3, 4), x1=torch.randn(3, 4))
for smoothing in (0.0, 0.1):
    case = seed("cross_entropy" + ("_smoothing" if smoothing else ""))
    labels = torch.randint(11, (6,))
    record(case, dict(op="cross_entropy", label_smoothing=smoothing),
           lambda x: F.cross_entropy(x, labels, label_smoothing=smoothing),
           dict(labels=labels.int()), x=4 * torch.randn(6, 11))


UNARY = {
    "relu": F.relu, "leaky_relu": lambda x: F.leaky_relu(x, 0.01), "elu": F.elu, "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "softplus": F.softplus, "exp": torch.exp, "log": torch.log,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "abs": torch.abs, "neg": torch.neg, "square": torch.square,
    "sin": torch.sin, "cos": torch.cos, "reciprocal": torch.reciprocal, "clamp": lambda x: x.clamp(-0.5, 0.5)}
CONSTANTS = {"leaky_relu": {"slope": 0.01}, "elu": {"alpha": 1.0}, "clamp": {"low": -0.5, "high": 0.5}}
BINARY = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum,
          "minimum": torch.minimum, "pow": torch.pow}
for op, function in UNARY.items():
    seed(op)
    x = 2 * torch.randn(3, 37)  # odd sizes exercise the tails of vector loops
    x[0, :4] = torch.tensor([-8.0, -1e-3, 1e-3, 8.0])
    if op in ("log", "sqrt", "rsqrt", "reciprocal"):
        x = x.abs() + 0.01
    record(op, dict(op=op, **CONSTANTS.get(op, {})), function, x=x)

SHAPES = {"same": ((2, 3, 4), (2, 3, 4)), "3x1": ((2, 3, 4), (3, 1)), "4": ((2, 3, 4), (4,)),
          "1": ((2, 3, 4), (1,)), "outer": ((3, 1), (2, 1, 4))}
for op, function in BINARY.items():
    for name, (shape_a, shape_b) in SHAPES.items():
        case = seed(f"{op}_{name}")
        a, b = torch.randn(shape_a), torch.randn(shape_b)
        if op == "div":  # keep the divisor away from zero
            b = b + 0.5 * b.sign()
        elif op == "pow":  # positive base
            a = a.abs() + 0.1
        record(case, dict(op=op), function, a=a, b=b)

for op, function in (("sum", torch.sum), ("mean", torch.mean), ("max", torch.amax)):
    for axes in ([0], [1], [2], [0, 2], [1, 2], [0, 1, 2]):
        for keepdim in (0, 1):
            record(seed(f"{op}_{''.join(map(str, axes))}" + ("_keepdim" if keepdim else "")),
                   dict(op=op, axes=axes, keepdim=keepdim), lambda x: function(x, dim=axes, keepdim=bool(keepdim)),
                   x=torch.randn(3, 5, 7))

for axes in ([1, 0], [0, 2, 1], [2, 0, 1], [0, 3, 1, 2]):
    record(seed("permute_" + "".join(map(str, axes))), dict(op="permute", axes=axes), lambda x: x.permute(axes),
           x=torch.randn((2, 3, 4, 5)[:len(axes)]))

for case, step in (("slice", [1, 1, 1]), ("slice_step", [1, 2, 3])):
    start, stop = [1, 0, 2], [3, 5, 6]
    record(seed(case), dict(op="slice", start=start, stop=stop, step=step),
           lambda x: x[tuple(map(slice, start, stop, step))], x=torch.randn(4, 5, 6))

for axis in (0, 1, 2):
    case = seed(f"concat_{axis}")
    shapes = [[2, 3, 4] for _ in range(3)]
    for i, shape in enumerate(shapes):
        shape[axis] = i + 1
    record(case, dict(op="concat", axis=axis), lambda x0, x1, x2: torch.cat((x0, x1, x2), axis),
           **{f"x{i}": torch.randn(shape) for i, shape in enumerate(shapes)})

for case, value in (("pad_zero", 0.0), ("pad_value", 0.5)):
    before, after = [0, 1, 2], [1, 0, 3]
    amounts = [n for pair in zip(before[::-1], after[::-1]) for n in pair]  # last axis first
    record(seed(case), dict(op="pad", before=before, after=after, value=value),
           lambda x: F.pad(x, amounts, value=value), x=torch.randn(2, 3, 4))


# ------------------------------------------------------------------ training

training = File()


def tiny_network():
    """Parameters in Tandem's layouts (float32), running statistics."""
    seed("tiny")
    he = lambda *shape: torch.randn(shape) * math.sqrt(2 / math.prod(shape[1:]))
    parameters = {"conv1.weight": he(4, 3, 3, 1), "conv1.bias": 0.1 * torch.randn(4),
                  "bn1.weight": torch.rand(4) + 0.5, "bn1.bias": 0.1 * torch.randn(4),
                  "conv2.weight": he(8, 3, 3, 4),
                  "bn2.weight": torch.rand(8) + 0.5, "bn2.bias": 0.1 * torch.randn(8),
                  "fc.weight": he(10, 32), "fc.bias": 0.1 * torch.randn(10)}
    statistics = {"bn1.running_mean": torch.zeros(4), "bn1.running_var": torch.ones(4),
                  "bn2.running_mean": torch.zeros(8), "bn2.running_var": torch.ones(8)}
    return parameters, statistics


def tiny_logits(x, p, s):
    def norm(x, name):
        return F.relu(F.batch_norm(x, s[name + ".running_mean"], s[name + ".running_var"],
                                   p[name + ".weight"], p[name + ".bias"], training=True))

    x = norm(F.conv2d(nchw(x), nchw(p["conv1.weight"]), p["conv1.bias"], padding=1), "bn1")
    x = F.max_pool2d(x, 2)
    x = norm(F.conv2d(x, nchw(p["conv2.weight"]), None, stride=2, padding=1), "bn2")
    return F.linear(nhwc(x).flatten(1), p["fc.weight"], p["fc.bias"])


parameters, statistics = tiny_network()
x, labels = torch.randn(8, 8, 8, 1), torch.randint(10, (8,))
training.metadata["tiny"] = json.dumps(dict(op="network", eps=1e-5, momentum=0.1))
training.add("tiny", x=x, labels=labels.int(), **parameters, **statistics)


def train_tiny(case, attributes, update, state_of):
    """Steps of an optimizer on that network and batch."""
    p = {name: value.double().requires_grad_() for name, value in parameters.items()}
    s = {name: value.double() for name, value in statistics.items()}
    state, losses = state_of(p), []
    for step in range(attributes["steps"]):
        for v in p.values():
            v.grad = None
        loss = F.cross_entropy(tiny_logits(x.double(), p, s), labels)
        loss.backward()
        if case == "tiny_sgd" and step == 0:
            training.add("tiny", **{name + ".grad": v.grad.float() for name, v in p.items()})
        update(state, p)
        losses.append(loss.item())
    training.metadata[case] = json.dumps(attributes)
    training.add(case, losses=np.float32(losses), **{name: v.float() for name, v in {**p, **s}.items()})


def optimized(case, op, optimizer, weight_decay, spared=(), steps=12, attributes=None, **options):
    """PyTorch's optimizer; vectors do not decay, and what is spared does not move."""
    shown = options if attributes is None else attributes
    train_tiny(case, dict(op=op, **shown, weight_decay=weight_decay, steps=steps), lambda state, p: state.step(),
               lambda p: optimizer([{"params": [v for v in p.values() if v.dim() > 1], "weight_decay": weight_decay},
                                    {"params": [v for n, v in p.items() if v.dim() == 1 and n not in spared],
                                     "weight_decay": 0.0}], **options))


for case, momentum, nesterov, weight_decay in (
        ("tiny_sgd", 0.0, False, 0.0), ("tiny_momentum", 0.9, False, 0.0), ("tiny_nesterov", 0.9, True, 0.0),
        ("tiny_weight_decay", 0.9, False, 5e-4)):
    optimized(case, "sgd", torch.optim.SGD, weight_decay, steps=5, lr=0.1, momentum=momentum, nesterov=nesterov,
              attributes=dict(lr=0.1, momentum=momentum, nesterov=int(nesterov)))
# conv1.bias stands before a batch norm: its gradient is rounding, which the others would blow up to a full step.
for case, op, optimizer, lr, betas, weight_decay in (
        ("tiny_adamw", "adamw", torch.optim.AdamW, 0.01, (0.9, 0.999), 0.1),
        ("tiny_adamw_plain", "adamw", torch.optim.AdamW, 0.003, (0.8, 0.95), 0.0),
        ("tiny_adam", "adam", torch.optim.Adam, 0.01, (0.9, 0.999), 0.1)):
    optimized(case, op, optimizer, weight_decay, ("conv1.bias",), lr=lr, betas=betas,
              attributes=dict(lr=lr, beta1=betas[0], beta2=betas[1]))
for case, momentum, weight_decay in (("tiny_rmsprop", 0.0, 0.0), ("tiny_rmsprop_momentum", 0.8, 0.05)):
    optimized(case, "rmsprop", torch.optim.RMSprop, weight_decay, ("conv1.bias",), lr=0.002, alpha=0.95,
              momentum=momentum)


def lars(state, p, lr=2.0, momentum=0.9, weight_decay=0.01, trust=0.02):
    """You, Gitman and Ginsburg 2017, algorithm 1; vectors are neither adapted nor decayed."""
    with torch.no_grad():
        for name, w in p.items():
            g, rate, decay = w.grad, lr, 0.0
            if w.dim() > 1:
                decay = weight_decay
                rate *= trust * w.norm() / (g.norm() + decay * w.norm())
            else:
                rate *= 0.01 / lr  # the test scales the learning rate of these
            state[name] = momentum * state[name] + rate * (g + decay * w)
            w -= state[name]


train_tiny("tiny_lars", dict(op="lars", lr=2.0, momentum=0.9, weight_decay=0.01, trust=0.02, vectors=0.005, steps=12),
           lars, lambda p: {name: torch.zeros_like(w) for name, w in p.items()})


def rates(case, attributes, schedule, lr, steps=100):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    schedule, sequence = schedule(optimizer), []
    for step in range(steps):
        sequence.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step + 1 < steps:
            schedule.step()
    training.metadata[case] = json.dumps(dict(op=case, base_lr=lr, steps=steps, **attributes))
    training.add(case, lr=np.float64(sequence))


def warmup_cosine(step, warmup=5, total=100):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


rates("lr_step", dict(step_size=30, gamma=0.1), lambda o: lr_scheduler.StepLR(o, 30, 0.1), 0.1)
rates("lr_multistep", dict(milestones=[30, 60, 80], gamma=0.2),
      lambda o: lr_scheduler.MultiStepLR(o, [30, 60, 80], 0.2), 0.1)
rates("lr_cosine", dict(total=100, min_lr=0.0), lambda o: lr_scheduler.CosineAnnealingLR(o, 100), 0.1)
rates("lr_one_cycle", dict(max_lr=0.4, total=100, pct_start=0.3, div_factor=25.0, final_div_factor=1e4),
      lambda o: lr_scheduler.OneCycleLR(o, 0.4, 100, pct_start=0.3, anneal_strategy="cos", div_factor=25.0,
                                        final_div_factor=1e4, cycle_momentum=False), 0.4)
rates("lr_warmup_cosine",
      dict(warmup=5, total=100,
           formula="step < warmup ? base_lr * (step + 1) / warmup : base_lr / 2 * "
                   "(1 + cos(pi * (step - warmup) / (total - warmup)))"),
      lambda o: lr_scheduler.LambdaLR(o, warmup_cosine), 0.1)

folder = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
ops.write(os.path.join(folder, "ops.safetensors"))
training.write(os.path.join(folder, "training.safetensors"))

# ------------------------------------------------------------------ specials

specials = File()
nan, inf = math.nan, math.inf
X = torch.tensor([1.5, -2, -3, 1e-4, -1e-4, 0.0, -0.0, 1e-40, -1e-40, 1e-30, 1e30, inf, -inf, nan])
DY = torch.tensor([1.5, 0.0, inf, -inf, nan])
specials.metadata["unary"] = specials.metadata["binary"] = "{}"
specials.add("unary", x=X, dy=DY)
more = {"scale": lambda x: -1.5 * x + 0.25, "div_by": lambda x: x / 0.7, "power": lambda x: x.pow(2.5)}
for op, function in (UNARY | more).items():
    x = X.double().requires_grad_()
    y = function(x)
    dx = [torch.autograd.grad(y, x, torch.full_like(y, float(dy)), retain_graph=True)[0] for dy in DY]
    specials.metadata[op] = "{}"
    specials.add(op, y=y.float(), dx=torch.stack(dx).float())

A = torch.tensor([1.5, -2, 0.0, -0.0, 1e-40, 1e30, -1e-30, inf, -inf, nan])
specials.add("binary", a=A)
for op, function in BINARY.items():
    a, b = (v.double().clone().requires_grad_() for v in torch.meshgrid(A, A, indexing="ij"))
    y = function(a, b)
    y.backward(torch.full_like(y, 1.5))
    specials.metadata[op] = "{}"
    specials.add(op, y=y.float(), da=a.grad.float(), db=b.grad.float())

ops = specials  # where record() writes from now on


def planted(shape):
    """Random pictures or rows; each but the first holds one special number, in the middle."""
    x = torch.randn(shape)
    for row, special in zip(x[1:], (nan, inf, -inf, 1e-40, -0.0)):
        row.view(-1)[row.numel() // 2] = special
    return x


def layer(case, op, function, shape, **inputs):
    seed("special_" + case)
    record(case, dict(op=op), function, x=planted(shape), **{name: torch.randn(s) for name, s in inputs.items()})


def normalised(x, weight, bias, training):
    return F.batch_norm(x, torch.zeros(10).double(), torch.ones(10).double(), weight, bias, training)


labels = torch.tensor([1, 0, 3, 2, 4, 0])
layer("linear_relu", "linear", lambda x, w, b: F.relu(F.linear(x, w, b)), (6, 7), w=(5, 7), b=(5,))
layer("matmul", "matmul", torch.matmul, (6, 7), b=(7, 3))
layer("conv2d_relu", "conv2d", lambda x, w, b: nhwc(F.relu(F.conv2d(nchw(x), nchw(w), b, padding=1))),
      (6, 3, 4, 10), w=(6, 3, 3, 10), b=(6,))
layer("max_pool", "max_pool2d", lambda x: nhwc(F.max_pool2d(nchw(x), 3, 2, 1)), (6, 5, 5, 2))
layer("max_pool_relu", "max_pool2d", lambda x: nhwc(F.relu(F.max_pool2d(nchw(x), 2))), (6, 4, 4, 2))
layer("average_pool", "average_pool2d", lambda x: nhwc(avg_pool2d(nchw(x), 3, 2, 1)), (6, 5, 5, 2))
layer("global_average_pool", "global_average_pool", lambda x: x.mean((1, 2)), (6, 3, 3, 2))
for op, function in (("sum", torch.sum), ("mean", torch.mean), ("max", torch.amax)):
    layer(op + "_rows", op, lambda x: function(x, dim=1), (6, 5))
layer("softmax", "softmax", lambda x: F.softmax(x, 1), (6, 5))
layer("where", "where", lambda x, other: torch.where(torch.arange(5) % 2 == 0, x, other), (6, 5), other=(6, 5))
layer("mse_loss", "mse_loss", F.mse_loss, (6, 5), t=(6, 5))
layer("huber_loss", "huber_loss", F.huber_loss, (6, 5), t=(6, 5))
layer("bce_with_logits", "bce_with_logits", F.binary_cross_entropy_with_logits, (6, 5), t=(6, 5))
layer("log_softmax", "log_softmax", lambda x: F.log_softmax(x, 1), (6, 5))
layer("cross_entropy", "cross_entropy", lambda x: F.cross_entropy(x, labels), (6, 5))
layer("batch_norm_training", "batch_norm", lambda x, w, b: F.relu(normalised(x, w, b, True)), (6, 10), w=(10,), b=(10,))
layer("batch_norm_eval", "batch_norm", lambda x, w, b: F.relu(normalised(x, w, b, False)), (6, 10), w=(10,), b=(10,))
layer("batch_norm_residual", "batch_norm", lambda x, w, b, residual: F.relu(normalised(residual, w, b, True) + x),
      (6, 10), w=(10,), b=(10,), residual=(6, 10))
layer("group_norm", "group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), (6, 10), w=(10,), b=(10,))
layer("layer_norm", "layer_norm", lambda x, w, b: F.layer_norm(x, (10,), w, b), (6, 10), w=(10,), b=(10,))
specials.write(os.path.join(folder, "specials.safetensors"))
