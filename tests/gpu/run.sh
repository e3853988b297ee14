#!/bin/bash
# run.sh [--from STAGE] [STAGE …]: checks and measures on the GPU of this machine, the most valuable evidence first, each stage at
# most a few minutes; it goes on when one fails. In a checkout (`make gpu-check`) it builds the programs for this GPU first, with
# CUDA that is installed or pip's wheels; in a bundle (`make gpu-bundle`) they lie in bin/. What they print goes to $OUT/log.txt,
# their rows to $OUT/rows.jsonl. Exit status 0: everything was done, and holds; 1: something does not hold; 2: nothing was begun;
# 3: what was done holds, but parts were left out or had no time, which the last line lists.
#   start  device, libraries, LeNet-5        ops     every operation beside the host    train   losses beside the host
#   learn  Fashion-MNIST to accuracy         bench   milliseconds a step                peer    PyTorch's
#   memcheck  compute-sanitizer              memory  budgets                            air     airbench94, and PyTorch's
# DEVICE=cpu tries the script itself, on the programs in $BUILD.  LIMIT: seconds for everything (default 1800).  PYTHON: with
# torch for PyTorch's times, and with the wheels (default python3).
set -u
all='start ops learn train bench peer air memcheck memory'
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
ends=$(($(date +%s) + ${LIMIT:-1800}))
stages=${*:-$all}
[ "${1:-}" != --from ] || stages=$(echo "$all" | sed -n "s/.*\(${2:-?}\)/\1/p")
for stage in ${stages:-none}; do
  case " $all " in *" $stage "*) ;; *) echo "run.sh: $stage: choose of: $all" >&2; exit 2 ;; esac
done
if [ "$device" = cuda ]; then
  card=$(timeout 60 nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>&1 | grep -xE '[0-9]+\.[0-9]+' | head -n 1)
  [ -n "$card" ] || { echo "run.sh: no GPU: nvidia-smi shows none, so nothing was checked" >&2; exit 2; }
fi
failed= left_out=
# run NAME SECONDS COMMAND…: at most so long, and no longer than there is time.
run() {
  local name=$1 seconds=$2 most=$((ends - $(date +%s)))
  shift 2
  printf '\n==== %s\n' "$name" | tee -a "$out/log.txt"
  [ $most -ge "$seconds" ] || seconds=$most
  [ "$seconds" -ge 3 ] || { left_out="$left_out $name;" && return 1; }
  timeout -k 3 "$seconds" "$@" >"$out/said" 2>&1
  local status=$?
  cat "$out/said" >>"$out/log.txt"
  tail -n 60 "$out/said"
  grep '^{"peer' "$out/said" >>"$out/rows.jsonl"
  case $status in 0) ;; 3) left_out="$left_out $name;" ;; *) failed="$failed $name;" ;; esac
  printf '==== %s: exit status %s\n' "$name" $status | tee -a "$out/log.txt"
  return $status
}
ours() {  # ours NAME SECONDS PROGRAM …
  local name=$1 seconds=$2 program=$3
  shift 3
  run "$name" "$seconds" env LD_LIBRARY_PATH="$libraries" "$bin/$program" "$@" --device "$device"
}
check() { ours "$1" "$2" gpu_check "$1" --jsonl "$out/rows.jsonl" --seconds $(($2 * 8 / 10)); }
torch() {  # torch NAME SECONDS SCRIPT …
  local name=$1 seconds=$2 script=$3
  shift 3
  if $python -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then run "$name" "$seconds" "$python" "$scripts/$script" "$@"
  else left_out="$left_out $name;"; fi
}

# ---- the programs ----------------------------------------------------------------------------------------------------
libraries=
if [ -f "$here/programs.tar.xz" ]; then
  bin=$here/bin scripts=$here/gpu out=${OUT:-$here/results}
  [ -x "$bin/train" ] || $python -c "import sys, tarfile; tarfile.open(sys.argv[1] + '/programs.tar.xz').extractall(sys.argv[1])" "$here"
  # The wheels' cuDNN, cuBLAS and NCCL, else a toolkit's.
  wheels=$($python -c '
import glob, nvidia, os
print(":".join(sorted({os.path.dirname(f) for p in nvidia.__path__ for f in glob.glob(p + "/**/lib*.so*", recursive=True)})))' 2>/dev/null)
  libraries=$here/lib:$wheels:${CUDA_HOME:-/usr/local/cuda}/lib64
  export TANDEM_DATA="$here/data"
  mkdir -p "$out"
else
  cd "$here/../.." || exit 2
  bin=$PWD/${BUILD:-build} scripts=tests/gpu out=${OUT:-tests/bench/results/gpu-$(date -u +%Y-%m-%d-%H%M%S)}
  mkdir -p "$out"
  if [ "$device" = cuda ]; then
    bin=$PWD/build-gpu home=${CUDA_HOME:-/usr/local/cuda}
    if [ ! -x "$home/bin/nvcc" ] || [ -z "$(ls "$home"/include/cudnn.h /usr/include/cudnn.h /usr/include/*/cudnn.h 2>/dev/null)" ]; then
      site=$($python -c 'import nvidia, os; print(os.path.dirname(list(nvidia.__path__)[0]))' 2>/dev/null)
      home=$bin/cuda
      run "CUDA, of wheels" 60 sh tests/wheels.sh "$site" "$home" || exit 1
    fi
    run build 600 make --no-print-directory CUDA=1 CUDA_HOME="$home" CUDA_ARCH="${card/./}" UCX=0 BUILD=build-gpu \
      build-gpu/{gpu_check,airbench,train} || exit 1
  fi
fi

# ---- the stages ------------------------------------------------------------------------------------------------------
for stage in $stages; do
  case $stage in
    start)
      [ "$device" != cuda ] || run machine 20 nvidia-smi
      ours start 40 train --data synthetic --model lenet5 --epochs 1
      ;;
    ops) check ops 120 ;;
    train) check train 120 ;;
    bench) check bench 60 ;;
    memory)
      check memory 300
      torch "PyTorch: as it is, save_on_cpu, checkpoint" 160 memory_peer.py "$out/rows.jsonl"
      ;;
    learn)
      ours "lenet5" 30 train --model lenet5 --epochs 3
      ours "smallcnn bf16" 30 train --model smallcnn --dtype bf16 --epochs 3
      ours "smallcnn-bn f16" 30 train --model smallcnn-bn --dtype f16 --epochs 3
      ;;
    peer)
      torch peer 110 peer.py reduce-overhead resnet18 vgg16 resnet20 smallcnn
      ! grep -q '"peer"' "$out/rows.jsonl" 2>/dev/null || run ratios 10 "$python" "$scripts/ratios.py" "$out/rows.jsonl"
      ;;
    air)
      # Another type, other pictures: on the GPU itself the run is the recipe's.
      recipe="--dtype f16 --runs 10"
      [ "$device" = cuda ] || recipe="--data synthetic --val 49800 --batch 100 --epochs 1 --runs 2"
      # shellcheck disable=SC2086
      if ours airbench 150 airbench $recipe; then
        cp "$out/said" "$out/airbench"
        run goals 10 awk -v gpu="$([ "$device" != cuda ] || echo 1)" -v jsonl="$out/rows.jsonl" -f "$scripts/goals.awk" "$out/airbench"
      fi
      torch "airbench in PyTorch" 60 airbench_peer.py 5
      ;;
    memcheck)
      # Errors that cuDNN provokes and handles while it tries its engines are not ours. Our kernels have tandem in their names.
      sanitizer=$(command -v compute-sanitizer || ls "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" 2>/dev/null)
      [ "$device" = cuda ] && [ -n "$sanitizer" ] || { left_out="$left_out memcheck; racecheck;" && continue; }
      run memcheck 130 env LD_LIBRARY_PATH="$libraries" "$sanitizer" --tool memcheck --report-api-errors no --error-exitcode 9 \
        "$bin/gpu_check" touch
      run racecheck 130 env LD_LIBRARY_PATH="$libraries" "$sanitizer" --tool racecheck --kernel-name kns=tandem --error-exitcode 9 \
        "$bin/gpu_check" touch
      ;;
  esac
done
echo "${failed:+FAILED:$failed }${left_out:+left out:$left_out }kept in $out" | tee -a "$out/log.txt"
[ -z "$failed" ] || exit 1
[ -z "$left_out" ] || exit 3
