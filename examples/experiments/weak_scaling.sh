#!/bin/sh
# Weak scaling: the test accuracy of n ranks with 128 pictures each (--batch-per-rank 128), by rules for the learning rate.
# One process computes the results of n ranks: --accumulate n adds up the gradients of the n ranks' batches, and batch norm
# normalises each batch separately. The schedule is one-cycle, which has a warm-up, so a rule is a rate and a clipping norm.
#
#   weak_scaling.sh MODELS RANKS RULES [SEEDS]    e.g. weak_scaling.sh 'mlp lenet5 smallcnn' '1 4 8 16' 'clipped linear' '1 2 3'
#
# A run is a line in weak_scaling.txt: model, ranks, rule, seed, accuracy in % (or "diverged"). A run that is there is not repeated.
set -u
there=$(dirname "$0")/weak_scaling.txt
build=${BUILD:-build}
for model in $1; do for n in $2; do for rule in $3; do for seed in ${4:-1}; do
  [ "$n" != 1 ] || rule=none
  grep -q "^$model $n $rule $seed " "$there" 2>/dev/null && continue
  program="fashion_mnist" rate=0.05
  [ "$model" != resnet20 ] || program="cifar10 --dtype bf16" rate=0.4
  case $rule in
    none) factor=1 clip=0 ;;
    sqrt) factor="sqrt($n)" clip=0 ;;
    linear) factor=$n clip=0 ;;
    clipped) factor=$n clip=$(awk "BEGIN { print 4 / $n }") ;;
    clipped:*) factor=$n clip=${rule#clipped:} ;;
    *) echo "no rule $rule: none, sqrt, linear, clipped or clipped:NORM"; exit 2 ;;
  esac
  lr=$(awk "BEGIN { print $rate * $factor }")
  said=$("$build/"$program --model "$model" --accumulate "$n" --lr "$lr" --clip "$clip" --seed "$seed" 2>&1)
  accuracy=$(echo "$said" | sed -n 's/^test accuracy \([0-9.]*\).*/\1/p')
  [ "$accuracy" ] || ! echo "$said" | grep -q 'not finite' || accuracy=diverged
  [ "$accuracy" ] || { echo "$said"; exit 1; }
  echo "$model $n $rule $seed $accuracy" | tee -a "$there"
done; done; done; done
