#!/bin/sh
# tests/storm.sh [SECONDS] [KILLS_AN_HOUR] [STRATEGY]: 16 ranks on 4 hosts (namespaces; without these rights on this one) train under a
# parameter server, and ranks other than 0, drawn at random, are killed and started again by the launcher. Prints the throughput beside that of a
# quarter of the time without kills (70 s at least), the participation (the share of the ranks' time in which they work for the run), and the seconds
# from a kill to the first work of the new process that is used. Never in CI.
#
#   STORM_LOGS=FOLDER  what the jobs print, their metrics and the kills are kept there
#   STORM_KILLS=HOW    one (default); two: two ranks at once; heir: a rank, and after 0.3 s the next one, which takes over its shards;
#                      again: a rank, and its new process while it is on its way back
set -u
. tests/says.sh
seconds=${1:-1200} kills=${2:-60} strategy=${3:-outer:H=8,momentum=0.3+delayed-nesterov}
how_killed=${STORM_KILLS:-one}
keep() { [ "${STORM_LOGS:-}" ] && mkdir -p "$STORM_LOGS" && cp "$there"/*.log "$there"/*.jsonl "$there"/kills "$STORM_LOGS"; }
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
  within 600 grep -q '"event":"start"' "$there/$1.jsonl"
  sleep 5
}
process_of() {  # NAME RANK
  for p in $(pgrep -f -- "$build/fashion_mnist .*$there/$1.jsonl"); do
    [ "$(readlink "/proc/$p/exe")" = "$(readlink -f "$build/fashion_mnist")" ] && tr '\0' '\n' <"/proc/$p/environ" 2>/dev/null | grep -qx "RANK=$2" && echo "$p"
  done
}
# stops NAME: prints steps a second, of whole epochs after the first: at the end of a run the rounds that are not pushed yet are not counted,
# and at its beginning ranks wait for each other.
stops() {
  kill -TERM "$(process_of "$1" 0)"
  within 600 grep -q '"event":"end"' "$there/$1.jsonl"
  sleep 2
  sed -n 's/.*"event":"epoch","epoch":\([0-9]*\).*"images_per_second":\([0-9.e+]*\),"seconds":\([0-9.]*\).*/\1 \2 \3/p' "$there/$1.jsonl" |
    awk '$1 > 1 { images += $2 * $3; seconds += $3 } END { print seconds ? images / seconds / 32 : 0 }'
}
# kills RANK: a kill, where it is there.
kills() {
  victim=$(process_of storm "$1" | head -n 1)
  [ "$victim" ] && kill -KILL "$victim" && killed=$((killed + 1)) && echo "$(($(date +%s) - began)) $1" >>"$there/kills"
}

starts calm
sleep $((seconds / 4 > 70 ? seconds / 4 : 70))  # two epochs at least
calm=$(stops calm)
starts storm
began=$(date +%s) killed=0
: >"$there/kills"
while [ $(($(date +%s) - began)) -lt "$seconds" ]; do
  sleep "$(awk -v k="$kills" 'BEGIN { print 3600 / k }')"
  [ "$(process_of storm 0)" ] || { echo "the job has ended by itself after $killed kills:"; keep; tail -n 20 "$there/storm.log"; exit 1; }
  r=$(($(od -An -N2 -tu2 /dev/urandom) % 15 + 1))
  kills $r
  case $how_killed in
    two) kills $((r % 15 + 1)) ;;
    heir) sleep 0.3; kills $((r % 15 + 1)) ;;
    again) sleep "$(awk -v r="$r" 'BEGIN { print 0.6 + 0.15 * r }')"; kills $r ;;
  esac
done
sleep 10
lasted=$(($(date +%s) - began))
storm=$(stops storm)
keep
# Who is killed before it works again is away until it does, and comes back once.
awk -v killed=$killed -v lasted=$lasted -v calm="$calm" -v storm="$storm" '
  match($0, /rank [0-9]+ on/) { rank = substr($0, RSTART + 5, RLENGTH - 8) }
  /was killed by SIGKILL/ { away[rank] = 1 }
  / works again, [0-9.e+]* s after it was lost/ {
    sub(/.* works again, /, "")
    n++; sum += $1; if ($1 > most) most = $1
    delete away[rank]
  }
  END {
    for (r in away) left++
    printf "%d kills in %d s; %.1f steps/s, %.1f %% of %.1f without kills\n", killed, lasted, storm, (calm > 0 ? 100 * storm / calm : 0), calm
    if (n) printf "%d came back after %.1f s on average, %.1f at most, %d did not; participation %.2f %%\n", n, sum / n, most, left, 100 * (1 - sum / lasted / 16)
    exit !(n && left <= 1 && storm >= 0.9 * calm)
  }' "$there/storm.log" || { tail -n 20 "$there/storm.log"; exit 1; }
