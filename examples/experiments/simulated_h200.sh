#!/bin/sh
# Predicted speed far beyond the memory: a simulated H200 (layers/train/choose_batch.cpp), minibatches of 4, 8 and 12 times the largest that
# needs no plan, within 120 of its 141 GB.
#
#   sh examples/experiments/simulated_h200.sh [FOLDER] >examples/experiments/simulated_h200.txt
#
# FOLDER: pictures for ResNet-152 at 224 × 224 (their contents do not matter).
set -eu
folder=${1:-${TANDEM_DATA:-data}/cifar10-jpeg/test}
tune="${BUILD:-build}/tune --on h200 --batches 1x,4x,8x,12x"
for dtype in f32 bf16; do
  $tune --model resnet152 --data-set "$folder" --size 224 --memory-budget 120G --dtype $dtype
  $tune --model resnet1202 --data-set cifar-10 --memory-budget 120G --dtype $dtype
done
