#!/bin/bash
# All-reduce beside Open MPI and Gloo in the same run: ours, theirs, ours, theirs, three times, medians. One host with 2 and 4
# ranks; and, with the rights for tests/hosts.sh, 2 and 4 hosts at 1 Gbit/s, with the bytes that each interface sent.
# Prints a table, and writes $BUILD/bench-network.jsonl. A peer that is not installed is left out.
set -u
build=${BUILD:-build}
out=$build/bench-network.jsonl
there=$(mktemp -d)
trap 'rm -rf "$there"' EXIT
python=${PYTHON:-/usr/bin/python3}
root=$([ "$(id -u)" -eq 0 ] && echo --allow-run-as-root)
command -v mpicc >/dev/null && mpicc -O2 tests/bench/peers/network_mpi.c -o "$there/mpi" && mpi=1
"$python" -c 'import torch.distributed as d; assert d.is_gloo_available()' 2>/dev/null && gloo=1
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
: >"$out"
one="1024 65536 1048576 16777216 67108864"
many="65536 1048576 16777216"

strip() { sed -n 's/^\[0@[^]]*\] //; /^[0-9]* [0-9.]*$/p'; }
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
    hosts) COUNTERS=$there/counters sh tests/hosts.sh "$n" 1gbit -- "$build/bench_network" "$@" | strip >>"$there/ours" ;;
  esac
}
peers() {
  local place=$1 n=$2
  shift 2
  case $place in
    host)
      [ "${mpi:-}" ] && mpirun $root --oversubscribe -np "$n" "$there/mpi" "$@" | strip >>"$there/mpi.out"
      [ "${gloo:-}" ] && gloo_here "$n" "$@" | strip >>"$there/gloo.out"
      ;;
    hosts)
      local list=host0
      for ((i = 1; i < n; i++)); do list+=,host$i; done
      [ "${mpi:-}" ] && LAUNCHER=1 sh tests/hosts.sh "$n" 1gbit -- sh -c "mpirun $root --mca plm_rsh_agent \"\$HOSTS_SSH\" \
        --mca btl tcp,self --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 -H $list -np $n $there/mpi $*" |
        strip >>"$there/mpi.out"
      [ "${gloo:-}" ] && GLOO_SOCKET_IFNAME=eth0 sh tests/hosts.sh "$n" 1gbit -- "$python" tests/bench/peers/network_gloo.py "$@" |
        strip >>"$there/gloo.out"
      ;;
  esac
}
median_of() { awk -v s="$2" '$1 == s { print $2 }' "$1" 2>/dev/null | sort -g | awk '{ v[NR] = $1 } END { if (NR) print v[int((NR + 1) / 2)] }'; }

printf '%-28s %12s %12s %12s %8s %s\n' all-reduce ours 'Open MPI' Gloo ratio unit
measure() { # PLACE N SIZES…
  local place=$1 n=$2 size
  shift 2
  rm -f "$there"/ours "$there"/*.out
  for turn in 1 2 3; do
    ours "$place" "$n" "$@"
    peers "$place" "$n" "$@"
  done 2>"$there/errors"
  for size in "$@"; do
    awk -v size="$size" -v n="$n" -v place="$place" -v a="$(median_of "$there/ours" "$size")" \
      -v b="$(median_of "$there/mpi.out" "$size")" -v c="$(median_of "$there/gloo.out" "$size")" -v out="$out" '
      function shown(t) { return t == "" ? "-" : sprintf("%.4g", value(t)) }
      function value(t) { return small ? t * 1e6 : 2 * (n - 1) / n * size / t / 1e9 }
      BEGIN {
        small = size < 65536
        label = size < 1048576 ? size / 1024 "KiB" : size / 1048576 "MiB"
        name = "allreduce/" (place == "host" ? n "x1host" : "1x" n "hosts") "/" label
        unit = small ? "us" : "GB/s"
        peer = b == "" ? c : c == "" || b < c ? b : c
        ratio = a == "" || peer == "" ? "" : sprintf("%.3g", peer / a)
        printf "%-28s %12s %12s %12s %8s %s\n", name, shown(a), shown(b), shown(c), ratio == "" ? "-" : ratio, unit
        if (a == "") exit
        printf "{\"bench\":\"%s\",\"ours\":%.6g,\"peer\":%s,\"ratio\":%s,\"unit\":\"%s\"}\n", name, value(a),
          peer == "" ? "null" : sprintf("%.6g", value(peer)), ratio == "" ? "null" : ratio, unit >>out
      }'
  done
}
for n in 2 4; do measure host $n $one; done
if sh tests/hosts.sh 2 1gbit -- true >"$there/rights" 2>&1; then
  for n in 2 4; do
    measure hosts $n $many
    # What the interface of host 0 sent in the last run, beside the bound: 2(n−1)/n·M in each of its all-reduces.
    awk -v n=$n -v sizes="$many" -v out="$out" '/^host0/ {
      k = split(sizes, s, " ")
      for (i = 1; i <= k; i++) { calls = 4194304 / s[i]; calls = calls < 1 ? 1 : calls > 500 ? 500 : int(calls); sum += 8 * calls * s[i] }
      bound = 2 * (n - 1) / n * sum
      printf "%-28s %12.4g %12.4g %12s %8.3g bytes\n", "sent/1x" n "hosts", $2, bound, "(the bound)", bound / $2
      printf "{\"bench\":\"sent/1x%dhosts\",\"ours\":%d,\"peer\":%d,\"ratio\":%.4g,\"unit\":\"bytes\"}\n", n, $2, bound, bound / $2 >>out
    }' "$there/counters"
  done
else
  echo "several hosts: left out ($(cat "$there/rights"))"
fi
