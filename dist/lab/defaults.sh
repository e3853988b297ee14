#!/bin/sh
# sh dist/lab/defaults.sh [STRATEGY…]: trains LeNet-5 on Fashion-MNIST for 4 epochs on 4 ranks of this host, at the program's default
# rate and each strategy's default constants. Prints a table of test accuracy and seconds for the named strategies, or for all. If a
# strategy prints a note that names other options, it is also run with these. The exit status is 1 if the last run of a strategy ends at
# 85 % or below. Ranks count as two hosts if a strategy is for several.
# OPTIONS: options of every run, as in OPTIONS=--deterministic. dist/lab/DEFAULTS.md holds the results.
set -u
build=${BUILD:-build}
[ $# -gt 0 ] || set -- all-reduce all-reduce:wire=bf16 all-reduce:wire=topk:0.01 all-reduce:wire=powersgd:2 \
  local-sgd:8 local-sgd:qsr:0.1:4 post-local-sgd:8 cocod-sgd:8 easgd:8 outer outer:H=20 outer:H=20,stream=4 daso daso:faithful \
  hybrid hybrid:sample=0.5 hybrid+daso hybrid+ddc-asgd \
  ddc-asgd asgd asgd-m sa-asgd delay-adaptive rescaled gap-aware dc-asgd-c dc-asgd-a dc-asgd-k dana-slim dana-dc delayed-nesterov heloco \
  bsp ssp:4 quorum:3 ringmaster:R=4 fedbuff:B=4 rennala:B=4 machines+ddc-asgd machines+bsp \
  outer:H=20+quorum:3 outer:H=20+asgd outer:H=20+delayed-nesterov outer:H=20+delay-adaptive outer:H=20+rescaled outer:H=20+heloco
there=$(mktemp -d)
trap 'rm -rf "$there"' EXIT
few=0
# run STRATEGY OPTIONS…: its accuracy and seconds are in $accuracy and $seconds.
run() {
  hosts= strategy=$1
  shift
  case $strategy in *daso* | machines+* | hybrid+*) hosts='--hosts-as 2' ;; esac
  # shellcheck disable=SC2086
  "$build/tandem-run" -n 4 $hosts --strategy "$strategy" "$build/fashion_mnist" --model lenet5 --epochs 4 \
    --threads 1 --metrics "$there/metrics" ${OPTIONS:-} "$@" >"$there/out" 2>&1
  accuracy=$(sed -n 's/.*test accuracy \([0-9.]* %\).*/\1/p' "$there/out" | head -n 1)
  : "${accuracy:=$(grep -q 'not finite' "$there/out" && echo diverged || tail -n 1 "$there/out" | tr '|' ' ')}"
  seconds=$(sed -n 's/.*"event":"end".*"seconds":\([0-9.]*\).*/\1/p' "$there/metrics" | head -n 1)
}
enough() { awk -v a="$accuracy" 'BEGIN { exit !(a + 0 > 85) }'; }
echo '| strategy | test accuracy | seconds | what its note tries |'
echo '|---|---|---|---|'
for strategy; do
  note=
  run "$strategy"
  printf '| `%s` | %s | %.0f |' "$strategy" "$accuracy" "${seconds:-0}"
  try=$(sed -n 's/.*note: .* Try \(--.*\)/\1/p' "$there/out" | head -n 1)
  if [ "$try" ]; then
    case $try in
      --strategy*) run "${try#--strategy }" ;;
      *) run "$strategy" $try ;;
    esac
    note="\`$try\`: $accuracy"
  fi
  echo " $note |"
  enough || few=1
done
exit $few
