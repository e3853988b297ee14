#!/bin/bash
# run.sh [--from STAGE] [STAGE …]: the bundle's stages on a machine with a GPU, the most valuable evidence first, each at most two
# minutes; it goes on when one fails. What they say goes to $OUT/log.txt, their rows to $OUT/rows.jsonl. A second part of the
# bundle (CIFAR-10, cifar-10-batches-bin below data/) may come later.
#   start  device, libraries, LeNet-5        ops     every operation beside the host    train   losses beside the host
#   learn  Fashion-MNIST to accuracy         bench   milliseconds a step                peer    PyTorch's
#   memcheck  compute-sanitizer              memory  budgets                            air     airbench94, and PyTorch's
set -u
all='start ops learn train bench peer air memcheck memory'
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/results}
mkdir -p "$out"
[ -x "$here/bin/train" ] || python3 -c "import sys, tarfile; tarfile.open(sys.argv[1] + '/programs.tar.xz').extractall(sys.argv[1])" "$here"
if [ "${1:-}" = --from ]; then
  stages=$(echo "$all" | sed -n "s/.*\($2\)/\1/p")
  [ -n "$stages" ] || { echo "run.sh: --from $2: choose of: $all" >&2; exit 2; }
else
  stages=${*:-$all}
fi
# The wheels' cuDNN, cuBLAS and NCCL, else a toolkit's.
wheels=$(python3 -c '
import glob, nvidia, os
print(":".join(sorted({os.path.dirname(f) for p in nvidia.__path__ for f in glob.glob(p + "/**/lib*.so*", recursive=True)})))' 2>/dev/null)
libraries=$here/lib:$wheels:${CUDA_HOME:-/usr/local/cuda}/lib64
export TANDEM_DATA="$here/data"
worst=0
run() {  # run NAME SECONDS COMMAND…
  local name=$1 seconds=$2
  shift 2
  printf '\n==== %s\n' "$name" | tee -a "$out/log.txt"
  timeout -k 3 "$seconds" "$@" >"$out/said" 2>&1
  local status=$?
  cat "$out/said" >>"$out/log.txt"
  tail -n 40 "$out/said"
  grep '^{"peer' "$out/said" >>"$out/rows.jsonl"
  [ $status -eq 0 ] || worst=1
  printf '==== %s: exit status %s\n' "$name" $status | tee -a "$out/log.txt"
}
ours() {
  local name=$1 seconds=$2 program=$3
  shift 3
  run "$name" "$seconds" env LD_LIBRARY_PATH="$libraries" "$here/bin/$program" "$@" --device cuda
}
check() { ours "$1" "$2" gpu_check "$1" --jsonl "$out/rows.jsonl" --seconds $(($2 * 8 / 10)); }
for stage in $stages; do
  case $stage in
    start)
      run machine 20 nvidia-smi
      ours start 40 train --data synthetic --model lenet5 --epochs 1
      ;;
    ops) check ops 80 ;;
    train) check train 60 ;;
    bench) check bench 40 ;;
    memory) check memory 120 ;;
    learn)
      ours "lenet5" 30 train --model lenet5 --epochs 3
      ours "smallcnn bf16" 30 train --model smallcnn --dtype bf16 --epochs 3
      ours "smallcnn-bn f16" 30 train --model smallcnn-bn --dtype f16 --epochs 3
      ;;
    peer)
      run peer 110 python3 "$here/gpu/peer.py" reduce-overhead resnet18 vgg16 resnet20 smallcnn
      run ratios 10 python3 "$here/gpu/ratios.py" "$out/rows.jsonl"
      ;;
    air)
      ours airbench 60 airbench --dtype f16 --runs 10
      run "airbench in PyTorch" 60 python3 "$here/gpu/airbench_peer.py" 5
      ;;
    memcheck)
      run memcheck 60 env LD_LIBRARY_PATH="$libraries" compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        "$here/bin/gpu_check" touch
      ;;
    *) echo "run.sh: $stage: choose of: $all" >&2; exit 2 ;;
  esac
done
exit $worst
