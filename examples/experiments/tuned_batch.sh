#!/bin/sh
# The effect of a larger minibatch on a slow link: 4 ranks under the parameter server, each on a host of its own, with a memory budget in
# which the base minibatch of 32 just fits. Four ways with equal numbers of epochs; the learning rate grows with the pictures of a push:
#   base         minibatch 32
#   half more    minibatch 48, which the memory plan makes fit
#   three times  minibatch 96, which the memory plan makes fit
#   accumulated  three times 32 pictures a push (--accumulate 3)
# The script first prints the choice of build/tune. A run is a line of tuned_batch.csv; a run that is there is not repeated. Needs root
# (namespaces).
#
#   sh examples/experiments/tuned_batch.sh [LINK] [MODELS] [EPOCHS] [SEEDS]     for example 1gbit "smallcnn resnet20" 4 1
set -eu
link=${1:-100mbit} models=${2:-resnet20} epochs=${3:-4} seeds=${4:-1 2 3}
build=${BUILD:-build} there=$(dirname "$0")/tuned_batch.csv
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
[ -e "$there" ] || echo "link,model,way,seed,batch,lr,seconds_per_epoch,pushes_per_epoch,accuracy" >"$there"
for model in $models; do
  case $model in resnet*) data=cifar10 rate=0.1 ;; *) data=fashion-mnist rate=0.025 ;; esac
  tune="$build/tune --data-set $data --model $model --threads 1 --lr $rate --base-batch 32"
  budget=$($tune --batches 32 --memory-budget 1T --swap off | awk '$1 == 32 { print $2 * ($3 == "GiB" ? 1024 : 1) + 1 "M" }')
  $tune --memory-budget "$budget" --ranks 4 --link "$(echo "$link" | sed 's/gbit/G/; s/mbit/M/')" >"$out/tuned"
  sed "s/^/# $model: /" "$out/tuned"
  for seed in $seeds; do for way in base "half more" "three times" accumulated; do
    grep -q "^$link,$model,$way,$seed," "$there" && continue
    case $way in
      base) pictures=32 how="--batch 32" ;;
      "half more") pictures=48 how="--batch 48" ;;
      "three times") pictures=96 how="--batch 96" ;;
      accumulated) pictures=96 how="--batch 32 --accumulate 3" ;;
    esac
    lr=$(awk "BEGIN { print $rate * $pictures / 32 }")
    TANDEM_STRATEGY=asp+ddc-asgd sh "$(dirname "$0")/../../dist/lab/hosts.sh" 4 "$link" -- "$build/train" --data-set $data --model "$model" $how --lr "$lr" \
      --threads 1 --epochs "$epochs" --seed "$seed" --memory-budget "$budget" --metrics "$out/metrics" >"$out/said" 2>&1 || { cat "$out/said"; exit 1; }
    python3 - "$out/metrics" "$link,$model,$way,$seed,$pictures" "$lr" "$epochs" <<'PY' | tee -a "$there"
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
epochs = [l for l in lines if l.get("event") == "epoch"]
end = [l for l in lines if l.get("event") == "end"][-1]
print(f'{sys.argv[2]},{sys.argv[3]},{end["seconds"] / int(sys.argv[4]):.2f},{end["steps"] / int(sys.argv[4]):.0f},{100 * epochs[-1]["test_accuracy"]:.2f}')
PY
  done; done
done
