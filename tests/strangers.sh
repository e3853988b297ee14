#!/bin/sh
# tests/strangers.sh COUNT: so many connections from somebody who does not belong there (tests/strangers.cpp), while ranks meet and
# while they train. The job must end with the weights of one that was left alone, and hold no descriptors for them. The part with
# several hosts needs the rights of hosts.sh; without them it is left out, and that is said.
set -u
count=${1:-10000}
. tests/says.sh
needs_ranks
command -v ss >/dev/null || { echo 'no ss. Try: apt-get install iproute2'; exit 77; }
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
train="$build/fashion_mnist --data synthetic --model mlp --batch 48 --epochs 1000 --val 59000"
descriptors() { for p in $(pgrep -f -- "--checkpoint $1"); do ls "/proc/$p/fd" 2>/dev/null | wc -l; done | sort -n | tail -n 1; }
# same FOLDER FOLDER WHEN: the weights in both are the same.
same() { [ "$(weights "$1/last.safetensors")" = "$(weights "$2/last.safetensors")" ] || complain "strangers $3 change the result"; }
export build count train

# ---- while ranks meet, on one host -----------------------------------------------------------------------------------
port=$((20000 + $$ % 10000))
rank() { RANK=$1 WORLD_SIZE=2 LOCAL_RANK=$1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port TANDEM_TOKEN=0123456789abcdef0123 \
  $train --stop-after 50 --checkpoint "$2"; }
alone() {
  rank 0 "$1" >"$there/zero" 2>&1 &
  zero=$!
  within 100 sh -c "ss -ltnH | grep -q ':$port '"
}
alone "$there/quiet"
rank 1 "$there/quiet" >"$there/one" 2>&1 || complain "two ranks: $(cat "$there/one")"
wait $zero || complain "two ranks: $(cat "$there/zero")"
alone "$there/met"
"$build/strangers" "$count" 1 "127.0.0.1:$port" >"$there/said" || complain "strangers: exit status $?"
held=$(descriptors "$there/met")
echo "while ranks meet: $(cat "$there/said")"
if [ "$count" -ge 5000 ]; then
  sleep 6
  left=$(descriptors "$there/met")
  [ "$left" -lt 40 ] || complain "$left of $held descriptors are still held"
fi
rank 1 "$there/met" >"$there/one" 2>&1 || complain "strangers keep rank 1 out: $(cat "$there/one")"
wait $zero || complain "strangers end rank 0: $(cat "$there/zero")"
same "$there/quiet" "$there/met" 'while ranks meet'

# ---- while they train, on one host: there is no port -----------------------------------------------------------------
"$build/tandem-run" -n 2 $train --checkpoint "$there/host" --log-every 20 --metrics "$there/metrics" >"$there/out" 2>&1 &
launcher=$!
within 300 grep -q '"event":"step"' "$there/metrics"
for p in $(pgrep -P $launcher); do
  ss -ltnpH | grep "pid=$p," && complain "a rank on one host listens while it trains"
done
kill $launcher
wait $launcher

# ---- while they train, on two hosts, from a third one ----------------------------------------------------------------
sh dist/lab/hosts.sh 3 none -- true >"$there/rights" 2>&1 || { echo "no hosts: $(cat "$there/rights")"; exit $wrong; }
cat >"$there/job" <<'END'
# FOLDER COUNT: the job, and so many strangers on host 2.
begin=$(date +%s%N)
"$build/tandem-run" -H host0:1,host1:1 --ssh "$HOSTS_SSH" $train --stop-after $((400 + count / 4)) --checkpoint "$1" >"$1.out" 2>&1 &
job=$!
tries=0
until [ "$(ss -ltnH | wc -l)" -gt 0 ] && [ -e "$1" ] || [ $tries -eq 300 ]; do tries=$((tries + 1)); sleep 0.1; done
sleep 1
if [ "$2" -gt 0 ]; then
  places=
  for h in host0 host1; do
    for p in $("$HOSTS_SSH" $h ss -ltnH | awk '{ sub(/.*:/, "", $4); print $4 }'); do places="$places $h:$p"; done
  done
  "$HOSTS_SSH" host2 "$(pwd)/$build/strangers" "$2" 2 $places host0:22 >"$1.said" 2>&1
  kill -0 $job 2>/dev/null && echo 'the job still trains' >>"$1.said"
  for p in $(pgrep -f -- "--checkpoint $1"); do ls "/proc/$p/fd" | wc -l; done >"$1.held"
fi
wait $job || exit
echo $((($(date +%s%N) - begin) / 1000000)) >"$1.took"
END
LAUNCHER=1 sh dist/lab/hosts.sh 3 none -- sh "$there/job" "$there/quiet-hosts" 0 >"$there/out" 2>&1 ||
  complain "two hosts: $(cat "$there/out" "$there/quiet-hosts.out")"
LAUNCHER=1 sh dist/lab/hosts.sh 3 none -- sh "$there/job" "$there/hosts" "$count" >"$there/out" 2>&1 ||
  complain "strangers end a job on two hosts: $(cat "$there/out" "$there/hosts.out" "$there/hosts.said")"
echo "while ranks train: $(cat "$there/hosts.said")"
grep -q 'still trains' "$there/hosts.said" || complain "the job ended before the strangers had come"
echo "the job took $(cat "$there/hosts.took") ms with strangers, $(cat "$there/quiet-hosts.took") ms without"
[ "$(sort -n "$there/hosts.held" | tail -n 1)" -lt 60 ] || complain "descriptors held: $(cat "$there/hosts.held")"
same "$there/quiet-hosts" "$there/hosts" 'while ranks train'
exit $wrong
