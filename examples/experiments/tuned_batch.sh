#!/bin/sh
# The effect of a tuned minibatch on a slow link: 4 ranks under the parameter server, each on a host of its own with 1 Gbit/s and a memory
# budget in which the base minibatch of 32 just fits. Three ways with equal numbers of epochs:
#   base         minibatch 32
#   tuned        the minibatch and the learning rate that build/tune names for this budget
#   accumulated  as many pictures a push in two halves (--accumulate 2); if the tuner chooses 32: four times 32 with four times the rate
# A run is a line of tuned_batch.csv; a run that is there is not repeated. Needs root (namespaces).
#
#   sh examples/experiments/tuned_batch.sh [MODELS] [EPOCHS] [SEEDS]
set -eu
models=${1:-smallcnn resnet20} epochs=${2:-5} seeds=${3:-1 2 3}
build=${BUILD:-build} there=$(dirname "$0")/tuned_batch.csv
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
[ -e "$there" ] || echo "model,way,seed,batch,lr,seconds_per_epoch,pushes_per_epoch,accuracy" >"$there"
field() { sed -n "s/.*\"$1\":\([0-9.e+-]*\).*/\1/p"; }
for model in $models; do
  case $model in resnet*) data=cifar10 rate=0.1 ;; *) data=fashion-mnist rate=0.025 ;; esac
  tune="$build/tune --data-set $data --model $model --threads 1 --lr $rate --base-batch 32"
  budget=$($tune --batches 32 --memory-budget 1T --swap off | awk '$1 == 32 { print $2 * ($3 == "GiB" ? 1024 : 1) + 1 "M" }')
  $tune --memory-budget "$budget" --ranks 4 --link 1G >"$out/tuned"
  sed "s/^/# $model: /" "$out/tuned"
  batch=$(sed -n 's/.*--batch \([0-9]*\).*/\1/p' "$out/tuned" | tail -1) lr=$(sed -n 's/.*--lr \([0-9.e-]*\).*/\1/p' "$out/tuned" | tail -1)
  for seed in $seeds; do for way in base tuned accumulated; do
    grep -q "^$model,$way,$seed," "$there" && continue
    [ "$way" != tuned ] || [ "$batch" != 32 ] || continue
    case $way in
      base) how="--batch 32 --lr $rate" pictures=32 ;;
      tuned) how="--batch $batch --lr $lr" pictures=$batch ;;
      accumulated) times=$((batch > 32 ? 2 : 4)) part=$((batch > 32 ? batch / 2 : 32))
        how="--batch $part --accumulate $times --lr $(awk "BEGIN { print $rate * $part * $times / 32 }")" pictures=$((times * part)) ;;
    esac
    TANDEM_STRATEGY=asp+ddc-asgd sh "$(dirname "$0")/../../dist/lab/hosts.sh" 4 1gbit -- "$build/train" --data-set $data --model "$model" $how \
      --threads 1 --epochs "$epochs" --seed "$seed" --memory-budget "$budget" --metrics "$out/metrics" >"$out/said" 2>&1 || { cat "$out/said"; exit 1; }
    python3 - "$out/metrics" "$model,$way,$seed,$pictures" "${how##* }" "$epochs" <<'PY' | tee -a "$there"
import json, statistics, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
epochs = [l for l in lines if l.get("event") == "epoch"]
end = [l for l in lines if l.get("event") == "end"][-1]
print(f'{sys.argv[2]},{sys.argv[3]},{end["seconds"] / int(sys.argv[4]):.2f},{end["steps"] / int(sys.argv[4]):.0f},{100 * epochs[-1]["test_accuracy"]:.2f}')
PY
  done; done
done
