#!/bin/sh
# Published results, repeated: ResNet-20 on CIFAR-10, 160 epochs over all workers, batch 128, weight decay 10⁻⁴, crops and mirroring, five
# epochs of warm-up, a tenth of the learning rate after 80 and after 120. A run takes about three hours of one core; two run at a time.
# With JOBS=1 THREADS=2 one run takes an hour and a half of two cores (with bf16).
# anchors/NAME.jsonl has the metrics of a run (committed: its first and its last lines). An interrupted run continues after its last
# epoch, from anchors/NAME.state.
#
#   sh examples/experiments/anchors.sh DATA [NAME…]        (JOBS: runs at a time; THREADS: of each; SIMULATE: the program)
set -eu
export there="$(dirname "$0")/anchors" data="$1" simulate="${SIMULATE:-build/simulate}"
shift
mkdir -p "$there"
# name, strategy, workers, learning rate, seed
rows='one-1 asgd-m 1 0.1 1
asgd-1 asgd 4 0.5 1
dc-asgd-a-1 dc-asgd-a 4 0.5 1
one-2 asgd-m 1 0.1 2
asgd-2 asgd 4 0.5 2
dc-asgd-a-2 dc-asgd-a 4 0.5 2'
for name; do echo "$rows" | grep -q "^$name " || { echo "anchors.sh: there is no $name, only" $(echo "$rows" | cut -d' ' -f1) >&2; exit 2; }; done
for name in ${*:-$(echo "$rows" | cut -d' ' -f1)}; do echo "$rows" | grep "^$name "; done |
  xargs -r -P "${JOBS:-2}" -L 1 sh -c '
    grep -qs "\"event\":\"end\"" "$there/$0.jsonl" ||
      "$simulate" --data "$data" --data-set cifar-10 --model resnet20 --augment --dtype bf16 --threads "${THREADS:-1}" \
        --epochs 160 --batch 128 --weight-decay 0.0001 --schedule warmup:5+step:80,120:0.1 --evaluate-every 10 \
        --strategy "$1" --workers "$2" --lr "$3" --seed "$4" --metrics "$there/$0.jsonl" --checkpoint "$there/$0.state" > "$there/$0.log" 2>&1'
