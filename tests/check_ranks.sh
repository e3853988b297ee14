#!/bin/sh
# Real processes under tandem-run and Debian's mpirun: the same weights everywhere, the first failure named, nothing left.
set -u
build=${BUILD:-build}
[ -x "$build/tandem-run" ] || { echo 'no tandem-run: built without UCX'; exit 77; }
command -v pgrep >/dev/null || { echo 'no pgrep. Try: apt-get install procps'; exit 77; }
limit=60
. tests/says.sh
export OMP_NUM_THREADS=1 TANDEM_SILENCE=2

train() { echo "$build/fashion_mnist --data synthetic --model mlp --val 55000 --epochs 1 --lr 0.05"; }

# ---- the same everywhere ---------------------------------------------------------------------------------------------
# Two ranks and one, with the same batch over all ranks: the same accuracy, and both ranks print it.
says 0 'test accuracy' $(train) --global-batch 64
one=$(sed -n 's/^test accuracy \([0-9.]*\).*/\1/p' "$there/out")
says 0 'test accuracy' "$build/tandem-run" -n 2 $(train) --global-batch 64
[ "$(sed -n 's/.*test accuracy \([0-9.]*\).*/\1/p' "$there/out" | sort | uniq -c | awk '{ print $1 }')" = 2 ] ||
  complain "two ranks print different accuracies: $(cat "$there/out")"
two=$(sed -n 's/.*test accuracy \([0-9.]*\).*/\1/p' "$there/out" | head -n 1)
awk -v a="$one" -v b="$two" 'BEGIN { exit !(a - b < 1 && b - a < 1) }' || complain "one process $one %, two ranks $two %"
says 0 '2 ranks, all-reduce: batch 128 = 2 × 64, lr 0.05 → 0.1' "$build/tandem-run" -n 2 $(train) --batch 64
says 0 '3 ranks, all-reduce (bf16)' env TANDEM_WIRE=bf16 "$build/tandem-run" -n 3 $(train) --batch 64
# What two ranks began three go on with, and then one.
says 0 'test accuracy' "$build/tandem-run" -n 2 $(train) --global-batch 48 --checkpoint "$there/run"
long=$(train | sed 's/--epochs 1/--epochs 2/')
says 0 'ranks was 2 and is 3' "$build/tandem-run" -n 3 $long --global-batch 48 --resume "$there/run"
says 0 'ranks was 3 and is 1' $(echo "$long" | sed 's/--epochs 2/--epochs 3/') --global-batch 48 --resume "$there/run"
if command -v mpirun >/dev/null; then
  root=$([ "$(id -u)" -eq 0 ] && echo --allow-run-as-root)
  says 0 '2 ranks, all-reduce: batch 128' mpirun $root --oversubscribe -np 2 $(train) --batch 64
fi
says 0 '3 ranks:' "$build/tandem-run" -n 3 --check

# ---- what is refused -------------------------------------------------------------------------------------------------
says 2 'which program?' "$build/tandem-run" -n 2
says 2 'expected a number of ranks' "$build/tandem-run" -n 0 true
says 2 'unknown option --nodes' "$build/tandem-run" --nodes 2 true
says 2 'choose all-reduce' "$build/tandem-run" -n 2 --strategy gossip $(train)
says 2 'RANK=0 is set, but WORLD_SIZE is not' env RANK=0 $(train)
says 127 'cannot be started' "$build/tandem-run" -n 2 "$there/no-such-program"
says 1 'these ranks are missing: 1' env RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 TANDEM_JOB="check $$" TANDEM_START_TIMEOUT=1 $(train)
says 3 'rank 1 on' "$build/tandem-run" -n 3 --log-dir "$there/logs" sh -c 'echo "I am $RANK"; [ $RANK != 1 ] || exit 3; sleep 30'
[ "$(cat "$there/logs/rank-2.log")" = "I am 2" ] || complain "the log of rank 2: $(cat "$there/logs/rank-2.log")"
grep -q '^\[2@.*\] I am 2' "$there/out" || complain "no prefix: $(cat "$there/out")"
says 0 'done 0' "$build/tandem-run" -n 2 --on-failure continue sh -c '[ $RANK = 0 ] || exit 0; sleep 1; echo done $RANK'

# ---- a rank that dies, or stops --------------------------------------------------------------------------------------
# begun: a long training of three ranks in the background; the process of rank 1 is in $victim.
begun() {
  rm -f "$there/metrics"
  "$build/tandem-run" -n 3 "$build/fashion_mnist" --data synthetic --model mlp --epochs 100000 --metrics "$there/metrics" \
    >"$there/out" 2>&1 &
  launcher=$!
  tries=0
  until grep -q epoch_ "$there/metrics" 2>/dev/null || grep -q '"epoch"' "$there/metrics" 2>/dev/null || [ $tries -eq 150 ]; do
    tries=$((tries + 1))
    sleep 0.2
  done
  victim=
  for p in $(pgrep -P $launcher); do
    tr '\0' '\n' <"/proc/$p/environ" 2>/dev/null | grep -qx 'RANK=1' && victim=$p
  done
  [ "$victim" ] || complain "there is no rank 1: $(cat "$there/out")"
}
# ended SECONDS TEXT…: the launcher ends by itself, with all its ranks, and says so.
ended() {
  limit=$1
  shift
  began=$(date +%s)
  wait $launcher
  got=$?
  took=$(($(date +%s) - began))
  [ $got -ne 0 ] || complain "the launcher ended well"
  [ $took -le "$limit" ] || complain "the rest took $took s to end"
  for text in "$@"; do grep -qE -- "$text" "$there/out" || complain "does not say '$text' but: $(tail -n 8 "$there/out")"; done
  left=$(pgrep -f -- "--metrics $there/metrics" | wc -l)
  [ "$left" -eq 0 ] || complain "$left processes are left"
}
begun
kill -KILL "$victim"
ended 6 'rank 1 on .* failed first: it was killed by SIGKILL' 'rank 1 on .* has died'
begun
kill -STOP "$victim"
ended 9 'rank 1 on .* has said nothing for 2 s'
begun
kill -TERM $launcher
ended 15
exit $wrong
