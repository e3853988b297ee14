#!/bin/sh
# tests/gpu_check.sh [ops|train|bench|memory]: builds for the GPU of this machine, checks or measures, prints one table, and leaves it
# in tests/bench/results/; without a name all four, one after another. Needs g++, make, and CUDA with cuDNN: installed, or as pip wheels in a Python's site-packages.
# Each ends within eight minutes: what was not reached by then is listed. Exit status 0: everything was done, and holds; 1:
# something does not hold; 2: nothing was begun; 3: what was done holds, but parts were left out, which the last line lists.
#
#   PYTHON       with torch for the peers, and with the wheels (default python3)
#   TANDEM_DATA  folder of CIFAR-10, for the seconds to 94 % (train)
#   LIMIT        seconds for everything (default 470)
#   DEVICE=cpu   tries the script itself, on programs that are built in $BUILD, and keeps nothing
set -u
cd "$(dirname "$0")/.."
stage=$*
if [ -z "$stage" ]; then
  worst=0
  for stage in ops train bench memory; do
    sh tests/gpu_check.sh "$stage"
    status=$?
    case $status in
      0) ;;
      1) worst=1 ;;
      3) [ $worst -eq 1 ] || worst=3 ;;
      *) exit $status ;;  # nothing was begun, or a signal
    esac
  done
  exit $worst
fi
case $stage in ops | train | bench | memory) ;; *) echo "gpu-check: STAGE=$stage: choose ops, train, bench or memory" >&2; exit 2 ;; esac
python=${PYTHON:-python3}
target=${DEVICE:-cuda}
limit=${LIMIT:-470}
begun=$(date +%s)
left() { echo $((limit - $(date +%s) + begun)); }

# ---- the device ------------------------------------------------------------------------------------------------------
no_gpu() { echo "gpu-check: no GPU: $*, so nothing was checked" >&2; exit 2; }
scratch=
if [ "$target" = cuda ]; then
  build=build-gpu
  command -v nvidia-smi >/dev/null 2>&1 || no_gpu "there is no nvidia-smi on this machine"
  # Its errors come on stdout, too: only a row with a compute capability is a device.
  rows=$(timeout 60 nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader 2>&1) ||
    no_gpu "nvidia-smi fails: $(echo "$rows" | head -n 1)"
  device=$(echo "$rows" | grep -E '^[^,]+, *[0-9]+\.[0-9]+, *[0-9][0-9.]*$' | head -n 1)
  [ -n "$device" ] || no_gpu "nvidia-smi shows none: $(echo "$rows" | head -n 1)"
  results=tests/bench/results/gpu-$stage-$(date -u +%Y-%m-%d-%H%M%S)
else
  build=${BUILD:-build}
  device="$target, which is no GPU: this tries the script itself"
  scratch=$(mktemp -d)
  results=$scratch/try
fi
child=
stopped() {  # stopped STATUS SIGNAL: what runs is ended with its children, and the table says that it is none
  trap '' HUP INT TERM
  if [ -n "$child" ]; then kill "$child" 2>/dev/null; wait "$child"; fi
  echo "STOPPED by $2: this table is not whole" | tee -a "$results.txt"
  [ -z "$scratch" ] || rm -rf "$scratch"
  exit "$1"
}
trap 'stopped 129 SIGHUP' HUP
trap 'stopped 130 SIGINT' INT
trap 'stopped 143 SIGTERM' TERM
mkdir -p "$build"
if ! (set -C && : >"$results.txt") 2>/dev/null; then  # an earlier table stays
  echo "gpu-check: $results.txt is there already or cannot be written" >&2
  exit 2
fi
{
  echo "date    $(date -u '+%Y-%m-%d %H:%M') UTC"
  echo "commit  $(git describe --always --dirty 2>/dev/null)"
  echo "device  $device$([ "$target" = cuda ] && echo ' (name, compute capability, driver)')"
} | tee "$results.txt"

# ---- steps -----------------------------------------------------------------------------------------------------------
# step NAME SECONDS COMMAND…: runs it, at most so long and no longer than there is time, and keeps what it says and how it went.
verdicts= failed= lacks=
note() {  # note NAME VERDICT
  verdicts="$verdicts$(printf '  %-34s %s' "$1" "$2")
"
}
fails() { note "$1" "FAILED: $2" && failed="${failed:+$failed; }$1"; }
misses() { note "$1" "MISSED: $2" && lacks="${lacks:+$lacks; }$1"; }
left_out() { note "$1" "left out: $2" && lacks="${lacks:+$lacks; }$1"; }
step() {
  name=$1 asked=$2
  shift 2
  most=$asked
  : >"$build/said"
  [ "$most" -le "$(left)" ] || most=$(left)
  if [ "$most" -lt 3 ]; then
    misses "$name" "the time was up"
    return 1
  fi
  # Beside the script, which a signal reaches at once only while it waits.
  timeout -k 5 "$most" "$@" >"$build/said" 2>&1 &
  child=$!
  wait "$child"
  status=$?
  child=
  tee -a "$results.txt" <"$build/said"
  case $status in
    0) note "$name" "ok" && return 0 ;;
    3) misses "$name" "some lines, for which there was no time" ;;
    124 | 137)
      if [ "$most" -lt "$asked" ]; then misses "$name" "only $most of $asked s were left for it"
      else fails "$name" "stopped after $most s"; fi ;;
    *) fails "$name" "exit status $status" ;;
  esac
  return 1
}
finish() {
  {
    printf 'steps of %s, %d s\n%s' "$stage" $(($(date +%s) - begun)) "$verdicts"
    if [ -n "$failed" ]; then echo "verdict: FAILED: $failed${lacks:+ (and left out or missed: $lacks)}"
    elif [ -n "$lacks" ]; then echo "verdict: what was done holds, but left out or missed: $lacks"
    else echo "verdict: everything was done, and holds"; fi
  } | tee -a "$results.txt"
  if [ -n "$scratch" ]; then rm -rf "$scratch"; else echo "kept in $results.txt and .jsonl"; fi
  [ -z "$failed" ] || exit 1
  [ -z "$lacks" ] || exit 3
  exit 0
}

# ---- build -----------------------------------------------------------------------------------------------------------
if [ "$target" = cuda ]; then
  home=${CUDA_HOME:-/usr/local/cuda}
  if [ ! -x "$home/bin/nvcc" ] || [ -z "$(ls "$home"/include/cudnn.h /usr/include/cudnn.h /usr/include/*/cudnn.h 2>/dev/null)" ]; then
    site=$($python -c 'import nvidia, os; print(os.path.dirname(list(nvidia.__path__)[0]))' 2>/dev/null)
    home=$PWD/$build/cuda
    step "CUDA, of wheels" 60 sh tests/wheels.sh "$site" "$home" || finish
  fi
  arch=$(echo "$device" | sed 's/^[^,]*, *\([0-9]*\)\.\([0-9]*\),.*/\1\2/')
  step "build" 400 make --no-print-directory CUDA=1 CUDA_HOME="$home" CUDA_ARCH="$arch" UCX=0 BUILD="$build" \
    "$build/gpu_check" "$build/airbench" || { failed=${failed:-build, so that nothing was checked}; finish; }
fi
# check STAGE SECONDS: the program knows when to stop, and is stopped when it does not.
check() {
  most=$2
  [ "$most" -le "$(left)" ] || most=$(left)
  step "$1" "$2" "$build/gpu_check" "$1" --device "$target" --jsonl "$results.jsonl" --seconds $((most - most / 10 - 1))
}
peer() {  # peer NAME SECONDS SCRIPT ARGUMENT…
  name=$1 most=$2
  shift 2
  if $python -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    step "$name" "$most" "$python" "$@"
    grep '^{' "$build/said" >>"$results.jsonl"
  else
    left_out "$name" "$python has no torch with CUDA"
  fi
}

# ---- the stage -------------------------------------------------------------------------------------------------------
case $stage in
  ops)
    check ops 200
    if [ "$target" = cpu ]; then
      step touch 60 "$build/gpu_check" touch --device cpu
      left_out memcheck "there is no GPU"
      left_out racecheck "there is no GPU"
    else
      sanitizer=$(command -v compute-sanitizer || ls "$home/bin/compute-sanitizer" 2>/dev/null)
      if [ -n "$sanitizer" ]; then
        # Errors that cuDNN provokes and handles while it tries its engines are none of ours. Our kernels have tandem in
        # their names; the option that picks them by it has been called differently.
        filter=$("$sanitizer" --help 2>&1 | grep -o -e '--kernel-regex' -e '--kernel-name' -e '--filter' | head -n 1)
        step memcheck 130 "$sanitizer" --tool memcheck --report-api-errors no --error-exitcode 9 \
          "$build/gpu_check" touch --device "$target"
        step racecheck 130 "$sanitizer" --tool racecheck ${filter:+"$filter" kns=tandem} --error-exitcode 9 \
          "$build/gpu_check" touch --device "$target"
      else
        left_out memcheck "compute-sanitizer is not there"
        left_out racecheck "compute-sanitizer is not there"
      fi
    fi
    ;;
  train)
    check train 220
    # Another type, other pictures: on the GPU itself the run is the recipe's.
    recipe="--device cuda --dtype f16 --runs 20"
    [ "$target" = cuda ] || recipe="--device cpu --data synthetic --val 49800 --batch 100 --epochs 1 --runs 2"
    if [ -n "${TANDEM_DATA:-}" ] || [ "$target" = cpu ]; then
      # shellcheck disable=SC2086
      if step "airbench, mean of 20 runs" 150 "$build/airbench" $recipe; then
        cp "$build/said" "$build/airbench.said"
        step "goals of airbench94" 10 awk -v gpu="$([ "$target" = cuda ] && echo 1)" -v jsonl="$results.jsonl" \
          -f tests/gpu/goals.awk "$build/airbench.said"
      else
        left_out "goals of airbench94" "there is no mean"
      fi
      peer "the same recipe in PyTorch" 150 tests/gpu/airbench_peer.py 20
    else
      left_out "airbench, mean of 20 runs" "TANDEM_DATA names no folder with CIFAR-10"
      left_out "goals of airbench94" "TANDEM_DATA names no folder with CIFAR-10"
      left_out "the same recipe in PyTorch" "TANDEM_DATA names no folder with CIFAR-10"
    fi
    ;;
  bench)
    check bench 150
    peer "PyTorch" 300 tests/gpu/peer.py
    if grep -q '"peer"' "$results.jsonl" 2>/dev/null; then step "ratios" 10 "$python" tests/gpu/ratios.py "$results.jsonl"
    else left_out "ratios" "there is nothing of PyTorch's to compare with"; fi
    ;;
  memory)
    check memory 300
    peer "PyTorch: as it is, save_on_cpu, checkpoint" 160 tests/gpu/memory_peer.py "$results.jsonl"
    ;;
esac
finish
