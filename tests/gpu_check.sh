#!/bin/sh
# tests/gpu_check.sh ops|train|bench: builds for the GPU of this machine, checks or measures, prints one table, and leaves it in
# tests/bench/results/. Needs g++, make, and CUDA with cuDNN: installed, or as pip wheels in a Python's site-packages.
set -u
cd "$(dirname "$0")/.."
stage=${1:-}
case $stage in ops | train | bench) ;; *) echo "gpu-check: STAGE=$stage: choose ops, train or bench" >&2; exit 2 ;; esac
python=${PYTHON:-python3}

# ---- the device ------------------------------------------------------------------------------------------------------
if ! command -v nvidia-smi >/dev/null 2>&1; then
  echo "gpu-check: no GPU: there is no nvidia-smi on this machine, so nothing was checked" >&2
  exit 1
fi
device=$(nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
if [ -z "$device" ]; then
  echo "gpu-check: no GPU: nvidia-smi shows none, so nothing was checked" >&2
  exit 1
fi
arch=$(echo "$device" | sed -n 's/^[^,]*, *\([0-9]*\)\.\([0-9]*\),.*/\1\2/p')

# ---- CUDA: installed, or put together from wheels ---------------------------------------------------------------------
home=${CUDA_HOME:-/usr/local/cuda}
if [ ! -x "$home/bin/nvcc" ] || [ -z "$(ls "$home"/include/cudnn.h /usr/include/cudnn.h /usr/include/*/cudnn.h 2>/dev/null)" ]; then
  site=$($python -c 'import nvidia, os; print(list(nvidia.__path__)[0])' 2>/dev/null)
  home=$PWD/build-gpu/cuda
  rm -rf "$home"
  mkdir -p "$home/include" "$home/lib64"
  for nvcc in "$site"/*/bin/nvcc /usr/local/cuda/bin/nvcc; do
    [ -x "$nvcc" ] || continue
    for f in "$(dirname "$(dirname "$nvcc")")"/*; do  # nvcc looks for its parts beside itself
      case $(basename "$f") in include | lib | lib64) ;; *) ln -sfn "$f" "$home/$(basename "$f")" ;; esac
    done
    break
  done
  for f in "$site"/*/include/*; do [ -e "$f" ] && ln -sfn "$f" "$home/include/$(basename "$f")"; done
  for f in "$site"/*/lib/*.so* "$site"/*/lib/*.a; do
    [ -e "$f" ] || continue
    ln -sfn "$f" "$home/lib64/$(basename "$f")"
    plain=$(basename "$f" | sed 's/\.so\..*/.so/')  # a wheel has libcudart.so.13 without libcudart.so
    [ -e "$home/lib64/$plain" ] || ln -sfn "$f" "$home/lib64/$plain"
  done
  if [ ! -x "$home/bin/nvcc" ]; then
    echo "gpu-check: no nvcc: install the CUDA toolkit, or pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cublas nvidia-cudnn-cu13" >&2
    exit 1
  fi
fi

# ---- build -----------------------------------------------------------------------------------------------------------
build() { make --no-print-directory CUDA=1 CUDA_HOME="$home" CUDA_ARCH="$arch" UCX=0 BUILD=build-gpu "$@"; }
build build-gpu/bench_gpu build-gpu/airbench || exit 1

results=tests/bench/results/gpu-$stage-$(date -u +%Y-%m-%d)
{
  echo "date    $(date -u '+%Y-%m-%d %H:%M') UTC"
  echo "commit  $(git describe --always --dirty 2>/dev/null)"
  echo "device  $device (name, compute capability, driver)"
} >"$results.txt"
rm -f "$results.jsonl"
failed=0
run() {  # shows it, and keeps it
  "$@" >build-gpu/said 2>&1 || failed=1
  tee -a "$results.txt" <build-gpu/said
}

# ---- the stage -------------------------------------------------------------------------------------------------------
run timeout 400 build-gpu/bench_gpu "$stage" "$results.jsonl"
case $stage in
  ops)
    if build -n build-gpu/tandem_tests >/dev/null 2>&1 && [ -n "$(ls /usr/include/gtest/gtest.h 2>/dev/null)" ]; then
      build build-gpu/tandem_tests >build-gpu/log 2>&1 && run timeout 300 build-gpu/tandem_tests --gtest_brief=1 \
        --gtest_filter='OpTable*:Cuda*:Optimizers*:MemoryPool*:-CudaKernels*'
    else
      echo "GoogleTest is not there: the op table was left out" | tee -a "$results.txt"
    fi
    sanitizer=$(command -v compute-sanitizer || ls "$home/bin/compute-sanitizer" 2>/dev/null)
    if [ -n "$sanitizer" ]; then
      for tool in memcheck racecheck; do
        run timeout 200 "$sanitizer" --tool "$tool" --error-exitcode 9 build-gpu/airbench --data synthetic \
          --val 49800 --batch 64 --epochs 1 --device cuda
      done
    else
      echo "compute-sanitizer is not there: memcheck and racecheck were left out" | tee -a "$results.txt"
    fi
    ;;
  bench)
    if $python -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
      timeout 300 "$python" tests/bench/gpu_peer.py >build-gpu/peer 2>build-gpu/peer.log || echo "the peer did not finish: see build-gpu/peer.log"
      cat build-gpu/peer >>"$results.jsonl"
      run "$python" - "$results.jsonl" <<'PY'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
ours = {r["bench"]: r["value"] for r in rows if "bench" in r}
wanted = {"resnet18 bf16 batch 512": 1.1, "resnet50 bf16 batch 256": 1.0, "resnet20 bf16 batch 128": 2,
          "lenet5 bf16 batch 128": 3, "smallcnn bf16 batch 128": 3}
print(f"{'model':28} {'ours ms':>9} {'torch ms':>9} {'ratio':>6} {'goal':>5}")
for r in rows:
    if "peer" in r and r["peer"] in ours:
        mine = ours[r["peer"]]
        print(f"{r['peer']:28} {mine:9.3f} {r['value']:9.3f} {r['value'] / mine:6.2f} {wanted[r['peer']]:5}")
PY
    else
      echo "no peer: $python has no torch with CUDA" | tee -a "$results.txt"
    fi
    if [ -n "${TANDEM_DATA:-}" ]; then run timeout 100 build-gpu/airbench --device cuda --dtype bf16; fi
    ;;
esac
echo "kept in $results.txt and .jsonl"
[ "$failed" -eq 0 ]
