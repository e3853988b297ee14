#!/bin/sh
# tests/drill.sh COUNT SEED: so many accidents, drawn from the seed: a rank of a training job is killed or stopped, or a host is
# cut off, at some moment. Each time the job must end within its deadline, every other rank must name the right one, and
# nothing may be left. Cuts need the rights of hosts.sh; without them there are only kills and stops, and it says so.
set -u
count=${1:-50} seed=${2:-1}
. tests/says.sh
needs_ranks
export OMP_NUM_THREADS=1 TANDEM_SILENCE=2
sh dist/lab/hosts.sh 2 none -- true >"$there/rights" 2>&1 && kinds=3 || { kinds=2; echo "no cuts: $(cat "$there/rights")"; }
train="$build/fashion_mnist --data synthetic --model mlp --epochs 100000"
killed=0 stopped=0 cut=0 slowest=0
complain() { echo "drill $drill (seed $seed): $*"; wrong=$((wrong + 1)); }

# named VICTIM RANKS: every rank but the victim says its name.
named() {
  for r in $(seq 0 $(($2 - 1))); do
    [ "$r" -eq "$1" ] || grep -qE "^\[$r@.*rank $1 on " "$there/out" || complain "rank $r does not name rank $1: $(tail -n 6 "$there/out")"
  done
}

for drill in $(seq 0 $((count - 1))); do
  set -- $(awk -v s="$seed" -v d="$drill" -v k="$kinds" 'BEGIN { srand(s * 1000 + d); rand()
    ranks = 2 + int(3 * rand()); print int(k * rand()), ranks, int(ranks * rand()), 0.1 + 1.4 * rand() }')
  kind=$1 ranks=$2 victim=$3 after=$4
  if [ "$kind" -eq 2 ]; then
    victim=$((victim % 2))
    CUT=$victim:$(awk -v a="$after" 'BEGIN { print 2 + a }') timeout --foreground 40 sh dist/lab/hosts.sh 2 none -- $train >"$there/out" 2>&1
    status=$?
    [ $status -eq 1 ] || complain "host $victim cut off: exit status $status: $(tail -n 4 "$there/out")"
    named 0 2
    grep -q '^\[0@.*rank 1 on ' "$there/out" || complain "rank 0 does not name rank 1"
    cut=$((cut + 1))
  else
    rm -f "$there/metrics"
    "$build/tandem-run" -n "$ranks" $train --metrics "$there/metrics" >"$there/out" 2>&1 &
    launcher=$!
    within 200 grep -q start "$there/metrics"
    sleep "$after"
    pid=$(rank_of $launcher "$victim")
    [ "$pid" ] || { complain "there is no rank $victim: $(tail -n 4 "$there/out")"; kill $launcher; }
    began=$(date +%s%N)
    if [ "$kind" -eq 0 ]; then
      [ "$pid" ] && kill -KILL "$pid"
      killed=$((killed + 1)) limit=6
    else
      [ "$pid" ] && kill -STOP "$pid"
      stopped=$((stopped + 1)) limit=9
    fi
    wait $launcher
    status=$?
    took=$((($(date +%s%N) - began) / 1000000))
    [ $status -ne 0 ] || complain "the job ended well"
    [ $took -le $((limit * 1000)) ] || complain "it took $took ms to end"
    [ $took -le $slowest ] || slowest=$took
    # When rank 0 itself is stopped, nobody hears from the others either, and they say so of rank 0.
    named "$victim" "$ranks"
    [ "$kind" -ne 0 ] || grep -q "rank $victim on .* failed first: it was killed by SIGKILL" "$there/out" ||
      complain "the launcher names another: $(tail -n 2 "$there/out")"
    nothing_left
  fi
done
echo "$count drills: $killed kills, $stopped stops, $cut cuts; the slowest end took $slowest ms; $wrong wrong"
[ $wrong -eq 0 ]
