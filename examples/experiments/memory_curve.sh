#!/bin/sh
# The peak and the time of a training step against the budget: ten budgets from the least possible one to more than the step takes, each
# in a memory cgroup of its own whose limit is the budget and 64 MiB (the program, threads, the mover's buffers). Needs root and cgroups.
#
#   sh examples/experiments/memory_curve.sh [MODEL] [BATCH] [SWAP] >examples/experiments/memory_curve.csv
set -eu
model=${1:-resnet110} batch=${2:-128} swap=${3:-auto}
worker=${BUILD:-build}/bench_memory
folder=${TMPDIR:-/tmp}
if [ -d /sys/fs/cgroup/memory ]; then  # version 1
  group=/sys/fs/cgroup/memory$(sed -n 's/^[0-9]*:memory://p' /proc/self/cgroup)/tandem-$$
  limit=memory.limit_in_bytes peak=memory.max_usage_in_bytes cache='total_cache'
else
  group=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)/tandem-$$
  limit=memory.max peak=memory.peak cache='file'
fi
field() { sed "s/.*\"$1\": \([0-9.e+-]*\).*/\1/"; }

first=$(echo | "$worker" --model "$model" --batch "$batch")
within=$(echo | "$worker" --model "$model" --batch "$batch" --budget "$(echo "$first" | field peak)" --swap "$swap")
least=$(echo "$within" | field least) most=$(echo "$first" | field peak)
echo "# $model, batch $batch, --swap $swap; the least budget is $least, without a plan the step takes $most"
echo "budget,peak,cgroup_peak,cgroup_cache,ms,predicted_ms,stall_ms,predicted_stall_ms,swapped,recomputed"
for k in 0 1 2 3 4 5 6 7 8 9; do
  budget=$((least + (most - least) * k / 8))
  mkdir "$group"
  echo $((budget + (64 << 20))) >"$group/$limit"
  said=$(sh -c "echo \$\$ >$group/cgroup.procs; echo 'for 3' | exec $worker --model $model --batch $batch --budget $budget --swap $swap --scratch $folder" | tail -1)
  taken=$(cat "$group/$peak") cached=$(awk -v f=$cache '$1 == f { print $2 }' "$group/memory.stat")
  rmdir "$group"
  echo "$said" | awk -v b=$budget -v t="$taken" -v c="$cached" '
    function f(name) { match($0, "\"" name "\": [0-9.e+-]*"); s = substr($0, RSTART, RLENGTH); sub(/.*: /, "", s); return s + 0 }
    { printf "%d,%d,%d,%d,%.0f,%.0f,%.0f,%.0f,%d,%d\n", b, f("peak"), t, c, 1e3 * f("seconds"), 1e3 * f("predicted"), 1e3 * f("stall"), 1e3 * f("predicted_stall"), f("swapped"), f("recomputed") }'
done
