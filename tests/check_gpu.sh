#!/bin/sh
# What tests/gpu/run.sh will do on a machine with a GPU, as far as it shows without one: its stages on the CPU, what it leaves out
# when the time is up, and CUDA put together from a Python's wheels, of links to the toolkit where there is one.
set -u
. tests/says.sh
limit=120
export OMP_WAIT_POLICY=passive

run="bash tests/gpu/run.sh"
says 2 'choose of: start ops' $run all
says 2 'choose of: start ops' $run --from nowhere
for stage in 'ops train' 'ops;echo done' "ops'; echo done; '"; do
  says 2 'choose one of' make --no-print-directory CUDA=0 gpu-check STAGE="$stage"
  grep -qx done "$there/out" && complain "make gpu-check executes its STAGE: $stage"
done
says 2 'name one stage' "$build/gpu_check" --device nowhere
says 2 'name one stage' "$build/gpu_check" ops train
for seconds in abc 1x -1 nan; do says 2 "--seconds $seconds: expected" "$build/gpu_check" ops --device cpu --seconds "$seconds"; done
says 2 '--jsonl /nowhere/x: cannot be written' "$build/gpu_check" ops --device cpu --jsonl /nowhere/x
says 2 '--jsonl Makefile: is there and holds something else' "$build/gpu_check" ops --device cpu --jsonl Makefile

# ---- no GPU ------------------------------------------------------------------------------------------------------------
mkdir "$there/bin"
before=$(ls tests/bench/results)
nvidia_smi() { printf '#!/bin/sh\necho "%s"\nexit %s\n' "$1" "$2" >"$there/bin/nvidia-smi" && chmod +x "$there/bin/nvidia-smi"; }
for answer in 'No devices were found:0' 'Failed to initialize NVML, Driver/library version mismatch:18' '[N/A]:0' ':0'; do
  nvidia_smi "${answer%:*}" "${answer##*:}"
  says 2 'no GPU: nvidia-smi' env PATH="$there/bin:$PATH" $run ops
done
[ "$(ls tests/bench/results)" = "$before" ] || complain "without a GPU a folder is left in tests/bench/results"

# ---- the stages, dry ---------------------------------------------------------------------------------------------------
try() {  # try STATUS LIMIT STAGE…: its steps are in $there/out
  status=$1 limit_of=$2
  shift 2
  rm -rf "$there/results"
  says "$status" 'kept in' env DEVICE=cpu BUILD="$build" LIMIT="$limit_of" PYTHON=none OUT="$there/results" $run "$@"
  grep -q 'FAILED' "$there/out" && complain "run.sh $* on the CPU: $(grep FAILED "$there/out")"
}
shows() { grep -q -- "$1" "$there/results/log.txt" || complain "run.sh has no line for $1: $(tail -n 9 "$there/out")"; }
try 3 100 ops memcheck
shows 'left out: memcheck; racecheck;'
for op in conv2d batch_norm cross_entropy dropout sgd 'a batch of pictures' 'twelve steps' \
  '2 ranks on one device, sums' '3 ranks on one device, sums' '2 ranks on one device, 18 steps'; do
  shows "^$op.* ≤ "
done
try 3 100 train air
for line in 'losses of steps 1–20' 'second run, deterministic' "inside the host's spread" 'a quarter is allowed' 'not judged: no GPU' \
  'left out: airbench in PyTorch;'; do
  shows "$line"
done
try 3 100 bench peer memory
for line in 'resnet20 f32, swap, pinned.*losses that differ *0 ' 'peak of the budget' ', nothing swapped ' ', 12×, pinned' '  predicted' \
  'left out: peer; PyTorch: as it is'; do
  shows "$line"
done
try 3 1 ops
shows 'left out: ops;'
"$build/gpu_check" ops --device cpu --seconds 0 >"$there/out" 2>&1
[ $? -eq 3 ] && grep -q 'conv2d f32, .* cases *MISSED: the time was up' "$there/out" ||
  complain "without time gpu_check does not say what it missed: $(tail -n 3 "$there/out")"

# ---- ratios ------------------------------------------------------------------------------------------------------------
if command -v python3 >/dev/null; then
  for name in 'resnet18 bf16 batch 512' 'vgg16 bf16 batch 512' 'resnet50 bf16 batch 256' 'resnet20 bf16 batch 128' 'lenet5 bf16 batch 128' \
    'smallcnn bf16 batch 128'; do
    echo "{\"bench\":\"$name\",\"value\":2}"
    echo "{\"peer\":\"$name\",\"value\":6.5}"
  done >"$there/rows.jsonl"
  says 0 '3.25' python3 tests/gpu/ratios.py "$there/rows.jsonl"
  echo '{"peer":"lenet5 bf16 batch 128","value":5}' >>"$there/rows.jsonl"
  says 1 'MISSED' python3 tests/gpu/ratios.py "$there/rows.jsonl"
fi

# ---- goals of airbench94 -----------------------------------------------------------------------------------------------
goals() {  # goals STATUS TEXT ACCURACY SECONDS: of two runs, the other with 94.00 % in 2 s
  printf 'run 1: test accuracy 94.00 %%, 2.000 s  (94 %% is reached)\nrun 2: test accuracy %s %%, %s s\n' "$3" "$4" >"$there/runs"
  says "$1" "$2" awk -v gpu=1 -v jsonl="$there/goals.jsonl" -f tests/gpu/goals.awk "$there/runs"
}
goals 0 'seconds ' 94.00 2.000
grep -q 'NOT' "$there/out" && complain "airbench's goals are reached, and it says: $(cat "$there/out")"
goals 1 '94  ' 93.99 1.900
grep -q 'accuracy.*NOT REACHED' "$there/out" || complain "93.995 % pass for 94: $(cat "$there/out")"
goals 1 's  NOT REACHED' 94.50 2.001
grep -qx '{"bench":"airbench94, mean of 2 runs","value":2.0005,"unit":"s","accuracy":0.942500}' "$there/goals.jsonl" ||
  complain "airbench's seconds are not kept: $(cat "$there/goals.jsonl")"
says 1 'no runs' awk -v gpu=1 -f tests/gpu/goals.awk /dev/null

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
  if ! [ -x /usr/bin/nvcc ]; then
    says 1 'there is no nvcc' env PATH=/usr/bin:/bin CUDA_HOME=/nowhere sh tests/wheels.sh "$there/nowhere" "$there/empty"
    quietly env PATH="/usr/bin:/bin:$cuda/bin" CUDA_HOME=/nowhere sh tests/wheels.sh "$there/nowhere" "$there/empty"
  fi
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
  # shellcheck disable=SC2086  # CXX may be two words: ccache g++
  quietly ${CXX:-g++} "$there/one.o" -L"$there/cuda/lib64" -Wl,-rpath,"$there/cuda/lib64" -lcudart -lcublas -lcudnn -o "$there/one"
  command -v nvidia-smi >/dev/null 2>&1 || quietly "$there/one"
  make --no-print-directory CUDA_HOME="$there/cuda" check-deps >"$there/out"
  for found in CUDA cuDNN; do
    grep -q "^$found .*$there/cuda" "$there/out" || complain "make does not find $found among the wheels: $(grep "^$found" "$there/out")"
  done
fi
exit $wrong
