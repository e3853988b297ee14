#!/bin/sh
# Several hosts, laid out on this machine by hosts.sh: the same weights everywhere, no byte too many, a cut link named.
set -u
. tests/says.sh
needs_ranks
sh dist/lab/hosts.sh 2 1gbit -- true >"$there/out" 2>&1
case $? in 77) cat "$there/out"; exit 77 ;; 0) ;; *) cat "$there/out"; exit 1 ;; esac
export TANDEM_SILENCE=3
train="$build/fashion_mnist --data $pictures --model mlp --val 1000 --epochs 1 --lr 0.05"

# hosts …: hosts.sh, for at most a minute.
hosts() { timeout --foreground 60 sh dist/lab/hosts.sh "$@" >"$there/out" 2>&1; }
endless="$build/fashion_mnist --data synthetic --model mlp --epochs 100000"
# trains COMMAND…: one rank prints the accuracy. That all have the same weights, they have found out themselves.
trains() {
  timeout --foreground 120 "$@" >"$there/out" 2>&1 || complain "$*: exit status $?: $(cat "$there/out")"
  [ "$(grep -c 'test accuracy' "$there/out")" = 1 ] || complain "$*: not one accuracy: $(cat "$there/out")"
}
trains sh dist/lab/hosts.sh 2 1gbit -- $train
RANKS=2 trains sh dist/lab/hosts.sh 2 1gbit -- $train
# A host as one worker of the parameter server.
RANKS=2 TANDEM_STRATEGY=machines+bsp trains sh dist/lab/hosts.sh 2 1gbit -- $train
LAUNCHER=1 trains sh dist/lab/hosts.sh 2 1gbit -- sh -c "$build/tandem-run -H host0:1,host1:2 --ssh \"\$HOSTS_SSH\" $train"

# A rehearsal: every strategy on every link, and on no link at all, from which the predictions come; what has run is not run again.
rehearsed() { timeout --foreground 120 python3 dist/lab/rehearse.py --hosts 2 --link 200mbit --results "$there/runs" --strategy 'all-reduce bsp' -- $train >"$there/out" 2>&1; }
if command -v python3 >/dev/null; then
  rehearsed && [ "$(grep -c '"accuracy":[0-9]' "$there/runs")" = 2 ] || complain "rehearse: $(cat "$there/out")"
  rehearsed && [ "$(wc -l <"$there/runs")" = 2 ] || complain "rehearse, again: $(cat "$there/out")"
  python3 dist/lab/rehearse.py --strategy none -- $train >"$there/out" 2>&1 && complain "rehearse, where every run failed: status 0"
  grep -q '1 run of 1 failed' "$there/out" || complain "rehearse, where every run failed: $(cat "$there/out")"
fi

# Every collective, from 4 B to 256 MiB, on 2, 3 and 4 hosts, and on 2 of 2 ranks.
if [ -x "$build/tandem_tests" ]; then
  for many in '2 1' '3 1' '4 1' '2 2'; do
    RANKS=${many#* } timeout --foreground 120 sh dist/lab/hosts.sh "${many% *}" none -- "$build/tandem_tests" \
      --gtest_filter=Hosts.DISABLED_Collectives --gtest_also_run_disabled_tests >"$there/out" 2>&1 &&
      [ "$(grep -c 'PASSED.* 1 test' "$there/out")" = $((${many% *} * ${many#* })) ] ||
      complain "collectives on $many: $(cat "$there/out")"
  done
fi

# Links of 10 Mbit/s that are full for seconds: heartbeats come through, and nobody counts as dead.
if [ -x "$build/tandem_tests" ]; then
  hosts 2 10mbit -- "$build/tandem_tests" --gtest_filter=Hosts.DISABLED_HeartbeatsUnderLoad --gtest_also_run_disabled_tests &&
    [ "$(grep -c 'longest silence' "$there/out")" = 4 ] || complain "heartbeats on slow links: $(cat "$there/out")"
fi

# Ten all-reduces of 1 MiB: each host may send 2(n−1)/n MiB in each, and a little for finding each other.
for hosts in 2 3; do
  COUNTERS=$there/counters hosts $hosts 1gbit -- "$build/tandem-run" --check-rank || complain "--check-rank on $hosts hosts: $(cat "$there/out")"
  awk -v n=$hosts '{ bound = 10 * 2 * (n - 1) / n * 1048576
                     if ($2 > 1.05 * bound) { print $1 " sent " $2 " bytes, " $2 / bound " of the bound"; bad = 1 } }
                   END { exit bad || NR != n }' "$there/counters" || complain "bytes between $hosts hosts"
done

# A link that is cut: both sides end, and name each other; of two halves rank 0's writes what is left.
CUT=1:6 hosts 2 1gbit -- $endless --checkpoint "$there/halves"
[ $? -eq 1 ] || complain "a cut link: exit status $?: $(cat "$there/out")"
grep -q '0@host0.*rank 1 on host1' "$there/out" || complain "host 0 does not name rank 1: $(cat "$there/out")"
grep -q '1@host1.*rank 0 on host0' "$there/out" || complain "host 1 does not name rank 0: $(cat "$there/out")"
[ "$(grep -o 'rank . on host. has written' "$there/out")" = 'rank 0 on host0 has written' ] ||
  complain "not rank 0 alone has written: $(cat "$there/out")"
# The same where hosts exchange weights now and then, with an exchange under way for most of the time.
for strategy in daso:B=4,W=3,warm-up=0,cool-down=0 outer:H=20,stream=2; do
  RANKS=2 CUT=1:6 TANDEM_STRATEGY=$strategy hosts 2 1gbit -- $endless
  [ $? -eq 1 ] || complain "$strategy, a cut link: exit status $?: $(cat "$there/out")"
  grep -q '@host0.*rank [23] on host1' "$there/out" || complain "$strategy: host 0 names no rank of host 1: $(cat "$there/out")"
  grep -q '@host1.*rank [01] on host0' "$there/out" || complain "$strategy: host 1 names no rank of host 0: $(cat "$there/out")"
done
# Of three hosts those that have lost rank 0 are the majority. The cut falls into the first epoch, whose steps nobody has saved.
CUT=0:6 hosts 3 1gbit -- $endless --batch 32 --checkpoint "$there/thirds"
[ "$(grep -o 'rank . on host. has written' "$there/out")" = 'rank 1 on host1 has written' ] ||
  complain "not rank 1 alone has written: $(cat "$there/out")"
exit $wrong
