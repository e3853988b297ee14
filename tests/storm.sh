#!/bin/sh
# tests/storm.sh [SECONDS] [KILLS_AN_HOUR] [STRATEGY]: 16 ranks on 4 hosts (namespaces; without these rights on this one) train under a
# parameter server, and ranks other than 0, drawn at random, are killed and started again by the launcher. Prints the throughput beside that of a
# quarter of the time without kills, the participation (the share of the ranks' time in which they work for the run), and the seconds
# from a kill to the first work of the new process that is used. Never in CI.
set -u
build=${BUILD:-build}
seconds=${1:-1200} kills=${2:-60} strategy=${3:-outer:H=8,momentum=0.3+delayed-nesterov}
there=$(mktemp -d)
trap 'rm -rf "$there"' EXIT
train="$build/fashion_mnist --model lenet5 --batch 32 --lr 0.01 --schedule constant --epochs 1000000"
how="--strategy $strategy --pace 250:100 --restart 100000"
export OMP_NUM_THREADS=1 TANDEM_SILENCE=${TANDEM_SILENCE:-5}

# starts NAME: the job, in the background. Its metrics are NAME.jsonl, what it prints is NAME.log.
starts() {
  if LAUNCHER=1 sh dist/lab/hosts.sh 4 none -- true >"$there/rights" 2>&1; then
    LAUNCHER=1 setsid sh dist/lab/hosts.sh 4 none -- sh -c "exec $build/tandem-run -H host0:4,host1:4,host2:4,host3:4 --ssh \"\$HOSTS_SSH\" $how \
      $train --metrics $there/$1.jsonl" >"$there/$1.log" 2>&1 &
  else
    echo "one host: $(cat "$there/rights")"
    setsid "$build/tandem-run" -n 16 $how $train --metrics "$there/$1.jsonl" >"$there/$1.log" 2>&1 &
  fi
  tries=0
  until grep -q '"event":"start"' "$there/$1.jsonl" 2>/dev/null || [ $tries -eq 600 ]; do tries=$((tries + 1)); sleep 0.1; done
  sleep 5
}
process_of() {  # NAME RANK
  for p in $(pgrep -f -- "$build/fashion_mnist .*$there/$1.jsonl"); do
    [ "$(readlink "/proc/$p/exe")" = "$(readlink -f "$build/fashion_mnist")" ] && tr '\0' '\n' <"/proc/$p/environ" 2>/dev/null | grep -qx "RANK=$2" && echo "$p"
  done
}
stops() {  # NAME: prints steps a second
  kill -TERM "$(process_of "$1" 0)"
  tries=0
  until grep -q '"event":"end"' "$there/$1.jsonl" || [ $tries -eq 600 ]; do tries=$((tries + 1)); sleep 0.1; done
  sleep 2
  sed -n 's/.*"event":"end","steps":\([0-9]*\).*"seconds":\([0-9.]*\).*/\1 \2/p' "$there/$1.jsonl" | awk '{ print $1 / $2 }'
}

starts calm
sleep $((seconds / 4))
calm=$(stops calm)
starts storm
began=$(date +%s) killed=0
while [ $(($(date +%s) - began)) -lt "$seconds" ]; do
  sleep "$(awk -v k="$kills" 'BEGIN { print 3600 / k }')"
  [ "$(process_of storm 0)" ] || { echo "the job has ended by itself after $killed kills:"; tail -n 20 "$there/storm.log"; exit 1; }
  victim=$(process_of storm $(($(od -An -N2 -tu2 /dev/urandom) % 15 + 1)) | head -n 1)
  [ "$victim" ] && kill -KILL "$victim" && killed=$((killed + 1))
done
sleep 10
lasted=$(($(date +%s) - began))
storm=$(stops storm)
sed -n 's/.* works again, \([0-9.]*\) s after it was lost.*/\1/p' "$there/storm.log" >"$there/away"
awk -v killed=$killed -v lasted=$lasted -v calm="$calm" -v storm="$storm" '
  { n++; sum += $1; if ($1 > most) most = $1 }
  END {
    printf "%d kills in %d s; %.1f steps/s, %.1f %% of %.1f without kills\n", killed, lasted, storm, 100 * storm / calm, calm
    if (n) printf "%d came back after %.1f s on average, %.1f at most; participation %.2f %%\n", n, sum / n, most, 100 * (1 - sum / lasted / 16)
    exit !(n && killed - n <= 1 && storm >= 0.9 * calm)
  }' "$there/away" || { tail -n 20 "$there/storm.log"; exit 1; }
