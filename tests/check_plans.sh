#!/bin/sh
# cuDNN has plans for every graph of the op table's convolutions and of two models, on GPUs that are only described; `make cuda-plans`
# asks for all models. A GPU that is too old shows that a graph without a plan is found, and named.
set -u
. tests/says.sh
plans=${BUILD:-build}/cuda_plans
limit=120
[ -x "$plans" ] || { echo 'there is no cuDNN, or a build that cannot use it'; exit 77; }
says 0 'every graph has a plan, deterministic or not' "$plans" --first --gpu sm_80 lenet5 resnet20
says 0 'every graph has a plan, deterministic or not' "$plans" --first --gpu sm_90 ops lenet5 resnet20
says 1 'NO PLAN on sm_60: conv2d forward, pictures [128, 32, 32, 3], filters [6, 5, 5, 3], bf16' "$plans" --gpu sm_60 lenet5
says 2 'choose sm_80, sm_90 or sm_60' "$plans" --gpu sm_61 lenet5
says 2 'there is no convolution' "$plans" mlp
says 2 "no model 'lenet6'" "$plans" lenet5 lenet6
exit $wrong
