#!/bin/sh
# Jobs that go on without lost ranks, in real processes: kill -9, a stop that is longer than TANDEM_SILENCE and its end, starts
# again by the launcher and by hand, also on another host.
set -u
. tests/says.sh
needs_ranks
[ -x "$build/tandem_tests" ] || { echo 'no tandem_tests'; exit 77; }
export OMP_NUM_THREADS=1 TANDEM_SILENCE=2 TANDEM_STRATEGY=asgd TANDEM_TEST_END="$there/end"
program="$build/tandem_tests --gtest_also_run_disabled_tests --gtest_filter=Hosts.DISABLED_LossesAndReturns"

# until TEXT [COUNT]: that many lines of the output say so.
until_said() { within 300 says_often "${2:-1}" "$1" || complain "not ${2:-1} times '$1': $(cat "$there/out")"; }
says_often() { [ "$(grep -c -- "$2" "$there/out")" -ge "$1" ]; }
# process RANK INCARNATION, as it has said
process() { sed -n "s/.*rank $1 on .*, process \([0-9]*\), incarnation $2\$/\1/p" "$there/out"; }
ended() {  # asks the program to end, and waits for the launcher
  touch "$TANDEM_TEST_END"
  ends $launcher 0 "$there/out" 'the launcher'
  rm -f "$TANDEM_TEST_END"
}

# ---- one host ----------------------------------------------------------------------------------------------------------
"$build/tandem-run" -n 4 --restart 1 $program >"$there/out" 2>&1 &
launcher=$!
until_said 'hears rank' 16
kill -KILL "$(process 2 0)"
until_said 'tandem-run: rank 2 on .* was killed by SIGKILL: the others go on without it, and it is started again'
until_said 'lost: rank 2 on .* has died: its connection is closed' 3
until_said 'rank 2 on .* is back as 1' 3
until_said 'hears rank 2' 8
stopped=$(process 3 0)
kill -STOP "$stopped"
until_said 'lost: rank 3 on .* has said nothing for 2 s' 3
kill -CONT "$stopped"
until_said 'rank 3 on .* was given up, and the others have gone on without it: rank 3 on'
until_said 'tandem-run: rank 3 on .* ended with exit status 1: the others go on without it, and it is started again'
until_said 'hears rank 3' 8
kill -KILL "$(process 2 1)"
until_said 'killed by SIGKILL: the others go on without it$'
ended
[ "$(grep -c 'ends well' "$there/out")" = 3 ] || complain "not 3 end well: $(cat "$there/out")"
: >"$there/out"
"$build/tandem-run" -n 3 $program >"$there/out" 2>&1 &
launcher=$!
until_said 'hears rank' 9
kill -KILL "$(process 0 0)"
ends $launcher 137 "$there/out" 'rank 0 was killed'
grep -q 'tandem-run: rank 0 on .* failed first: it was killed by SIGKILL' "$there/out" || complain "$(cat "$there/out")"

# ---- several -----------------------------------------------------------------------------------------------------------
sh dist/lab/hosts.sh 2 1gbit -- true >"$there/out" 2>&1
case $? in 77) cat "$there/out"; exit $wrong ;; 0) ;; *) cat "$there/out"; exit 1 ;; esac
# Who comes back on rank 0's host has met it by the loopback interface, and is reached from the others all the same.
LAUNCHER=1 sh dist/lab/hosts.sh 2 none -- sh -c "exec $build/tandem-run -H host0:2,host1:1 --restart 1 --ssh \"\$HOSTS_SSH\" $program" \
  >"$there/out" 2>&1 &
launcher=$!
until_said 'hears rank' 9
kill -KILL "$(process 1 0)"
until_said 'rank 1 on host0 is back as 1' 2
until_said 'hears rank 1 on host0' 6
until_said '^.1@host0.*hears rank' 6
ended
# Four ranks on three hosts: one is killed on host 2, and started by hand on host 1; then host 2, with another, is cut off.
export TANDEM_TOKEN=0123456789abcdef0123456789abcdef
cat >"$there/job" <<END
$build/tandem-run -H host0:2,host1:1,host2:2 --port 29777 --ssh "\$HOSTS_SSH" $program &
launcher=\$!
until [ -e "$there/again" ]; do sleep 0.1; done
"\$HOSTS_SSH" host1 "cd $(pwd) && exec env RANK=3 WORLD_SIZE=5 MASTER_ADDR=host0 MASTER_PORT=29777 TANDEM_TOKEN=$TANDEM_TOKEN \
  TANDEM_SILENCE=2 TANDEM_STRATEGY=asgd TANDEM_INCARNATION=1 TANDEM_TEST_END=$TANDEM_TEST_END $program" | sed -u 's/^/[by hand] /'
wait \$launcher
END
LAUNCHER=1 CUT=2:12 sh dist/lab/hosts.sh 3 1gbit -- sh "$there/job" >"$there/out" 2>&1 &
launcher=$!
until_said 'hears rank' 25
kill -KILL "$(process 3 0)"
until_said 'lost: rank 3 on host2 has died' 4
touch "$there/again"
until_said 'by hand.* rank 3 on host1, process .*, incarnation 1'
until_said '[0-9]@.*rank 3 on host1 is back as 1' 4
until_said 'hears rank 3 on host1' 5
until_said 'by hand.* hears rank' 5
until_said 'lost: rank 4 on host2 has said nothing for 2 s' 4
until_said '4@host2.*rank 0 on host0 has said nothing for 2 s'
ended
[ "$(grep -c 'ends well' "$there/out")" = 4 ] || complain "not 4 end well: $(cat "$there/out")"
exit $wrong
