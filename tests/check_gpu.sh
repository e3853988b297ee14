#!/bin/sh
# What `make gpu-check` will do on a machine with a GPU, as far as it shows without one: its stages on the CPU, what it says when
# the time is up, and CUDA put together from a Python's wheels, of links to the toolkit where there is one.
set -u
. tests/says.sh
build=${BUILD:-build}
limit=120
export OMP_WAIT_POLICY=passive

says 2 'choose ops, train or bench' sh tests/gpu_check.sh all
if ! command -v nvidia-smi >/dev/null 2>&1; then says 1 'no GPU: there is no nvidia-smi' sh tests/gpu_check.sh ops; fi
says 2 'name one stage' "$build/gpu_check" --device cpu

# ---- the stages, dry ---------------------------------------------------------------------------------------------------
try() {  # try STATUS LIMIT STAGE: its steps are in $there/out
  says "$1" "steps of $3" env DEVICE=cpu LIMIT="$2" PYTHON=none sh tests/gpu_check.sh "$3"
  grep -q 'FAILED' "$there/out" && complain "gpu-check $3 on the CPU: $(grep FAILED "$there/out")"
  for what in $4; do grep -q "^  $what" "$there/out" || complain "gpu-check $3 has no step $what: $(tail -n 9 "$there/out")"; done
}
try 0 100 ops 'ops touch memcheck racecheck'
for op in conv2d batch_norm cross_entropy dropout sgd 'a batch of pictures' 'twelve steps'; do
  grep -q "^$op.* ≤ " "$there/out" || complain "gpu-check ops has no line for $op"
done
try 0 100 train 'train airbench the.same.recipe'
for line in 'losses of steps 1–20' 'second run, deterministic' "beyond the host's spread"; do
  grep -q "$line" "$there/out" || complain "gpu-check train has no line for $line"
done
try 0 100 bench 'bench PyTorch'
try 1 4 ops 'ops touch'
grep -q 'MISSED' "$there/out" || complain "gpu-check in 4 seconds missed nothing: $(cat "$there/out")"
"$build/gpu_check" ops --device cpu --seconds 0 >"$there/out" 2>&1
[ $? -eq 3 ] && grep -q 'conv2d f32, .* cases *MISSED: the time was up' "$there/out" ||
  complain "without time gpu_check does not say what it missed: $(tail -n 3 "$there/out")"

# ---- ratios ------------------------------------------------------------------------------------------------------------
if command -v python3 >/dev/null; then
  for name in 'resnet18 bf16 batch 512' 'resnet50 bf16 batch 256' 'resnet20 bf16 batch 128' 'lenet5 bf16 batch 128' \
    'smallcnn bf16 batch 128'; do
    echo "{\"bench\":\"$name\",\"value\":2}"
    echo "{\"peer\":\"$name\",\"value\":6.5}"
  done >"$there/rows.jsonl"
  says 0 '3.25' python3 tests/gpu/ratios.py "$there/rows.jsonl"
  echo '{"peer":"lenet5 bf16 batch 128","value":5}' >>"$there/rows.jsonl"
  says 1 'MISSED' python3 tests/gpu/ratios.py "$there/rows.jsonl"
fi

quietly() { "$@" >"$there/out" 2>&1 || complain "$*: exit status $?: $(cat "$there/out")"; }

# ---- wheels ------------------------------------------------------------------------------------------------------------
# CUDA 12's layout, a folder for each library, and 13's; libraries have their version in their names only.
cuda=${CUDA_HOME:-/usr/local/cuda}
if [ -x "$cuda/bin/nvcc" ] && [ -e "$cuda/include/cublas_v2.h" ]; then
  cudnn=$(ls "$cuda"/include/cudnn.h /usr/include/cudnn.h /usr/include/*/cudnn.h 2>/dev/null | head -n 1)
  site=$there/site/nvidia
  mkdir -p "$site/cuda_nvcc" "$site/cuda_runtime/include" "$site/cuda_runtime/lib" "$site/cublas/include" "$site/cublas/lib" \
    "$site/cudnn/include" "$site/cudnn/lib"
  # nvcc itself is copied: through a link it would find the toolkit that it came from.
  mkdir "$site/cuda_nvcc/bin"
  ln -s "$cuda/nvvm" "$site/cuda_nvcc/nvvm"
  for f in "$cuda"/bin/*; do ln -s "$f" "$site/cuda_nvcc/bin/"; done
  for f in nvcc nvcc.profile; do cp --remove-destination "$cuda/bin/$f" "$site/cuda_nvcc/bin/$f"; done
  for f in "$cuda"/include/*; do
    case $(basename "$f") in
      cublas*) ln -s "$f" "$site/cublas/include/" ;;
      cudnn*) ;;
      *) ln -s "$f" "$site/cuda_runtime/include/" ;;
    esac
  done
  for f in "$(dirname "$cudnn")"/cudnn*.h; do ln -s "$f" "$site/cudnn/include/"; done
  library() { ls "$cuda"/lib64/"$1".so.* /usr/lib/*/"$1".so.* 2>/dev/null | head -n 1; }
  for pair in libcudart:cuda_runtime libcublas:cublas libcublasLt:cublas libcudnn:cudnn; do
    found=$(library "${pair%:*}")
    [ -n "$found" ] && ln -s "$found" "$site/${pair#*:}/lib/$(basename "$found")"
  done
  says 1 'there is no nvcc' env PATH="$PATH" sh -c 'sed "s#/usr/local/cuda/bin/nvcc##" tests/wheels.sh >"$1/wheels.sh"
    sh "$1/wheels.sh" "$1/nowhere" "$1/empty"' sh "$there"
  quietly sh tests/wheels.sh "$there/site" "$there/cuda"
  cat >"$there/one.cu" <<'END'
#include <cublas_v2.h>
#include <cudnn.h>
__global__ void nothing() {}
int main() {
  cublasHandle_t handle = nullptr;
  return cudnnGetVersion() / 10000 == 9 && cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS ? 0 : 7;  // without a GPU
}
END
  quietly "$there/cuda/bin/nvcc" -arch=sm_80 -c "$there/one.cu" -o "$there/one.o"
  quietly "${CXX:-g++}" "$there/one.o" -L"$there/cuda/lib64" -Wl,-rpath,"$there/cuda/lib64" -lcudart -lcublas -lcudnn -o "$there/one"
  command -v nvidia-smi >/dev/null 2>&1 || quietly "$there/one"
  make --no-print-directory CUDA_HOME="$there/cuda" check-deps >"$there/out"
  for found in CUDA cuDNN; do
    grep -q "^$found .*$there/cuda" "$there/out" || complain "make does not find $found among the wheels: $(grep "^$found" "$there/out")"
  done
fi
exit $wrong
