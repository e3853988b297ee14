#!/bin/bash
# tests/bench/network.sh [host] [hosts] [steps] [server]: the network beside its peers in the same run: ours, theirs, ours, theirs, $TURNS
# times (default 3), medians. Prints tables, and writes $BUILD/bench-network.jsonl. A peer that is not installed is left out.
#   host    all-reduce beside Open MPI and Gloo on one host, 2 and 4 ranks
#   hosts   the same on 2 and 4 hosts at 1 Gbit/s; `link` is what plain TCP streams round the same hosts get (peers/link.py)
#   steps   training on 2 hosts at 1 Gbit/s and 200 Mbit/s, beside PyTorch's DDP on Gloo
#   server  push and pull with one server and one worker: on one host beside memory copy, through memory that both see and over
#           loopback; on 2 hosts beside the link
# The hosts are those of dist/lab/hosts.sh, and need its rights.
set -u
build=${BUILD:-build}
turns=${TURNS:-3}
cores=$(nproc)
out=$build/bench-network.jsonl
parts=" ${*:-host hosts server steps} "
there=$(mktemp -d)
trap 'rm -rf "$there"' EXIT
python=${PYTHON:-/usr/bin/python3}
root=$([ "$(id -u)" -eq 0 ] && echo --allow-run-as-root)
command -v mpicc >/dev/null && mpicc -O2 tests/bench/peers/network_mpi.c -o "$there/mpi" && mpi=1
"$python" -c 'import torch.distributed as d; assert d.is_gloo_available()' 2>/dev/null && gloo=1
# In real time (chrt -f 10, on a machine that other work is using) Gloo's waiting threads never give up a core that they share.
gloo_with() { [ "${gloo:-}" ] && { [ "$1" -le "$cores" ] || ! chrt -p $$ | grep -q FIFO; }; }
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
: >"$out"
one="1024 65536 1048576 16777216 67108864"
many="65536 1048576 16777216 67108864"

strip() { sed -n 's/^\[0@[^]]*\] //; /^[a-z0-9]* [0-9][0-9. ]*$/p'; }
link() { sh dist/lab/hosts.sh "$1" "$2" -- "$python" tests/bench/peers/link.py 16777216 | strip >>"$there/link"; }
gloo_here() { # RANKS SIZES…
  local n=$1 r port=$((20000 + RANDOM % 10000))
  shift
  for ((r = 0; r < n; r++)); do
    RANK=$r WORLD_SIZE=$n MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$python" tests/bench/peers/network_gloo.py "$@" &
  done
  wait
}
ours() { # PLACE N SIZES…
  local place=$1 n=$2
  shift 2
  case $place in
    host) "$build/tandem-run" -n "$n" "$build/bench_network" "$@" | strip >>"$there/ours" ;;
    hosts) COUNTERS=$there/counters sh dist/lab/hosts.sh "$n" 1gbit -- "$build/bench_network" "$@" | strip >>"$there/ours" ;;
  esac
}
peers() {
  local place=$1 n=$2
  shift 2
  case $place in
    host)
      [ "${mpi:-}" ] && mpirun $root --oversubscribe -np "$n" "$there/mpi" "$@" | strip >>"$there/mpi.out"
      gloo_with "$n" && gloo_here "$n" "$@" | strip >>"$there/gloo.out"
      ;;
    hosts)
      local list=host0
      for ((i = 1; i < n; i++)); do list+=,host$i; done
      [ "${mpi:-}" ] && LAUNCHER=1 sh dist/lab/hosts.sh "$n" 1gbit -- sh -c "mpirun $root --mca plm_rsh_agent \"\$HOSTS_SSH\" \
        --mca btl tcp,self --mca mpi_yield_when_idle 1 --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 -H $list -np $n $there/mpi $*" |
        strip >>"$there/mpi.out"
      gloo_with "$n" && GLOO_SOCKET_IFNAME=eth0 sh dist/lab/hosts.sh "$n" 1gbit -- "$python" tests/bench/peers/network_gloo.py "$@" |
        strip >>"$there/gloo.out"
      ;;
  esac
}
median_of() { awk -v s="$2" '$1 == s { print $2 }' "$1" 2>/dev/null | sort -g | awk '{ v[NR] = $1 } END { if (NR) print v[int((NR + 1) / 2)] }'; }

column() { awk -v k="$2" '{ print 1, $k }' "$1" 2>/dev/null >"$there/column"; median_of "$there/column" 1; }

measure() { # PLACE N SIZES…
  local place=$1 n=$2 size
  shift 2
  rm -f "$there"/ours "$there"/*.out "$there/link"
  for ((turn = 0; turn < turns; turn++)); do
    [ "$place" = hosts ] && link "$n" 1gbit
    ours "$place" "$n" "$@"
    peers "$place" "$n" "$@"
  done 2>"$there/errors"
  for size in "$@"; do
    awk -v size="$size" -v n="$n" -v place="$place" -v a="$(median_of "$there/ours" "$size")" \
      -v b="$(median_of "$there/mpi.out" "$size")" -v c="$(median_of "$there/gloo.out" "$size")" \
      -v l="$(median_of "$there/link" 16777216)" -v out="$out" '
      function shown(t) { return t == "" ? "-" : sprintf("%.4g", value(t)) }
      function value(t) { return small ? t * 1e6 : 2 * (n - 1) / n * size / t / 1e9 }
      BEGIN {
        small = size < 65536
        label = size < 1048576 ? size / 1024 "KiB" : size / 1048576 "MiB"
        name = "allreduce/" (place == "host" ? n "x1host" : "1x" n "hosts") "/" label
        unit = small ? "us" : "GB/s"
        peer = b == "" ? c : c == "" || b < c ? b : c
        ratio = a == "" || peer == "" ? "" : sprintf("%.3g", peer / a)
        bound = l == "" || small ? "" : 16777216 / l / 1e9
        printf "%-28s %10s %10s %10s %8s %10s %9s %s\n", name, shown(a), shown(b), shown(c), ratio == "" ? "-" : ratio,
          bound == "" ? "-" : sprintf("%.4g", bound), bound == "" || a == "" ? "-" : sprintf("%.3g", value(a) / bound), unit
        if (a == "") exit
        printf "{\"bench\":\"%s\",\"ours\":%.6g,\"peer\":%s,\"ratio\":%s,%s\"unit\":\"%s\"}\n", name, value(a),
          peer == "" ? "null" : sprintf("%.6g", value(peer)), ratio == "" ? "null" : ratio,
          bound == "" ? "" : sprintf("\"bound\":%.6g,", bound), unit >>out
      }'
  done
}
# The training step on 2 hosts: no longer than 1.15 times the longer of computing and sending, and the first and last bucket.
steps() { # RATE MODEL BATCH
  local rate=$1 model=$2 batch=$3
  rm -f "$there"/{ours,gloo.out,link}
  for ((turn = 0; turn < turns; turn++)); do
    link 2 "$rate"
    sh dist/lab/hosts.sh 2 "$rate" -- "$build/bench_distributed" "$model" "$batch" | strip >>"$there/ours"
    gloo_with 2 && GLOO_SOCKET_IFNAME=eth0 sh dist/lab/hosts.sh 2 "$rate" -- "$python" tests/bench/peers/step_ddp.py \
      "$model" "$batch" | strip >>"$there/gloo.out"
  done 2>"$there/errors"
  awk -v compute="$(column "$there/ours" 3)" -v step="$(column "$there/ours" 4)" -v bytes="$(column "$there/ours" 5)" \
    -v bucket="$(column "$there/ours" 6)" -v exposed="$(column "$there/ours" 7)" -v theirs="$(column "$there/gloo.out" 3)" \
    -v peer="$(column "$there/gloo.out" 4)" -v l="$(median_of "$there/link" 16777216)" \
    -v name="step/2x1host/$rate/$model" -v out="$out" '
    BEGIN {
      if (step == "" || l == "") { print name ": no result"; exit }
      per_byte = l * 1e3 / 16777216
      sent = bytes * per_byte  # 2(n−1)/n of them, n = 2
      bound = 1.15 * (compute > sent ? compute : sent) + 2 * bucket * per_byte
      printf "%-28s %10.1f %10s %8s %10.1f %10.1f %10.1f %9.2f %10s\n", name, step, peer == "" ? "-" : sprintf("%.1f", peer),
        peer == "" ? "-" : sprintf("%.2f", peer / step), compute, sent, bound, bound / step, theirs == "" ? "-" : sprintf("%.1f", theirs)
      printf "{\"bench\":\"%s\",\"ours\":%.6g,\"peer\":%s,\"ratio\":%s,\"bound\":%.6g,\"compute\":%.6g,\"link\":%.6g,\"exposed\":%.6g,\"unit\":\"ms\"}\n",
        name, step, peer == "" ? "null" : sprintf("%.6g", peer), peer == "" ? "null" : sprintf("%.3g", peer / step), bound,
        compute, sent, exposed >>out
    }'
}

# Push and pull: NAME, and what the bytes of both divided by their time are held against, in bytes a second.
server() {
  awk -v name="$1" -v push="$(column "$there/ours" 2)" -v pull="$(column "$there/ours" 3)" -v n="$(column "$there/ours" 1)" \
    -v bound="$2" -v what="$3" -v out="$out" '
    BEGIN {
      if (push == "" || bound == "") { print name ": no result"; exit }
      rate = 8 * n / (push + pull)
      printf "%-28s %10.2f %10.2f %10.4g %10.4g %9.3f %s\n", name, push * 1e3, pull * 1e3, rate / 1e9, bound / 1e9, rate / bound, what
      printf "{\"bench\":\"%s\",\"floats\":%d,\"push\":%.6g,\"pull\":%.6g,\"rate\":%.6g,\"bound\":%.6g,\"share\":%.4g,\"unit\":\"s and bytes/s\"}\n",
        name, n, push, pull, rate, bound, rate / bound >>out
    }'
}

wants() { case $parts in *" $1 "*) ;; *) return 1 ;; esac; }
title() { printf '%-28s %10s %10s %10s %8s %10s %9s %s\n' all-reduce ours 'Open MPI' Gloo ratio link 'of it' unit; }
if wants host; then
  title
  for n in 2 4; do measure host $n $one; done
fi
if wants server; then
  printf '%-28s %10s %10s %10s %10s %9s\n' 'server' 'push, ms' 'pull, ms' GB/s bound 'of it'
  rm -f "$there/ours"
  for ((turn = 0; turn < turns; turn++)); do
    "$build/tandem-run" -n 2 --strategy asgd --servers 1 "$build/bench_server" 10000000 | strip >>"$there/ours"
  done 2>"$there/errors"
  copy() { awk -v n="$(column "$there/ours" 1)" -v t="$(column "$there/ours" 4)" 'BEGIN { print 4 * n / t }'; }
  server server/1host "$(copy)" 'memory copy'
  # The shape of ps-lite's own benchmark: over loopback, since one of the two has another name and shared memory of its own.
  if unshare --ipc --uts --mount true 2>/dev/null; then
    rm -f "$there/ours"
    for ((turn = 0; turn < turns; turn++)); do
      loopback() { env TANDEM_STRATEGY=asgd:servers=1 WORLD_SIZE=2 RANK="$1" MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
        TANDEM_TOKEN="$token" "${@:2}" "$build/bench_server" 10000000; }
      port=$((20000 + RANDOM % 10000)) token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
      loopback 1 unshare --ipc --uts --mount sh -c 'hostname elsewhere; mount -t tmpfs none /dev/shm; exec "$@"' sh &
      loopback 0 | strip >>"$there/ours"
      wait
    done 2>"$there/errors"
    server server/loopback "$(copy)" 'memory copy'
  fi
fi
wants hosts || wants steps || wants server || exit 0
sh dist/lab/hosts.sh 2 1gbit -- true >"$there/rights" 2>&1 || { echo "several hosts: left out ($(cat "$there/rights"))"; exit 0; }
if wants hosts; then
  title
  for n in 2 4; do
    measure hosts $n $many
    # What the interface of host 0 sent in the last run, beside the bound: 2(n−1)/n·M in each of its all-reduces.
    awk -v n=$n -v sizes="$many" -v out="$out" '/^host0/ {
      k = split(sizes, s, " ")
      for (i = 1; i <= k; i++) { calls = 4194304 / s[i]; calls = calls < 1 ? 1 : calls > 500 ? 500 : int(calls); sum += 8 * calls * s[i] }
      bound = 2 * (n - 1) / n * sum
      printf "%-28s %10.4g %10.4g %10s %8.3g bytes\n", "sent/1x" n "hosts", $2, bound, "(the bound)", bound / $2
      printf "{\"bench\":\"sent/1x%dhosts\",\"ours\":%d,\"peer\":%d,\"ratio\":%.4g,\"unit\":\"bytes\"}\n", n, $2, bound, bound / $2 >>out
    }' "$there/counters"
  done
fi
if wants server; then
  rm -f "$there/ours" "$there/link"
  for ((turn = 0; turn < turns; turn++)); do
    link 2 1gbit
    TANDEM_STRATEGY=asgd:servers=1 sh dist/lab/hosts.sh 2 1gbit -- "$build/bench_server" 4000000 | strip >>"$there/ours"
  done 2>"$there/errors"
  server server/1x2hosts "$(awk -v l="$(median_of "$there/link" 16777216)" 'BEGIN { print 16777216 / l }')" link
fi
if wants steps; then
  printf '%-28s %10s %10s %8s %10s %10s %10s %9s %10s\n' 'training step, ms' ours DDP ratio compute link bound 'in it' "DDP's compute"
  for rate in 1gbit 200mbit; do
    for model in ${MODELS:-smallcnn resnet20 vgg11}; do steps $rate $model "${BATCH:-128}"; done
  done
fi
