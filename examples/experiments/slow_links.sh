#!/bin/sh
# Training on four hosts of two ranks behind slow links, by strategy: time, bytes, accuracy, and the time to a fixed accuracy. Hosts are
# namespaces of this machine (as root), and their eight ranks share its cores. A run is a line of slow_links.jsonl; a run that is there is
# not repeated. STRATEGIES: these instead of all of them.
#
#   sh examples/experiments/slow_links.sh [NETWORKS] [LINKS] [STRATEGIES]
set -u
networks=${1:-smallcnn resnet20 vgg11} links=${2:-200mbit 1gbit}
there=$(dirname "$0")/slow_links.jsonl
for network in $networks; do
  # H: steps of a rank between two exchanges of local methods, eight rounds an epoch. These have a smaller learning rate, since each rank
  # makes steps with an eighth of the batch.
  case $network in
    smallcnn) how="build/fashion_mnist --epochs 6" target=90 H=58 ;;
    resnet20) how="build/train --data-set cifar-10 --model resnet20 --dtype bf16 --epochs 4" target=65 H=48 ;;
    vgg11) how="build/train --data-set cifar-10 --model vgg11 --dtype bf16 --batch 512 --epochs 3" target=60 H=12 ;;
  esac
  for link in $links; do
    for strategy in ${3:-all-reduce all-reduce:wire=bf16 daso:warm-up=1,cool-down=1 daso:faithful,warm-up=1,cool-down=1 machines+ddc-asgd \
      hybrid+ddc-asgd local-sgd:qsr:0.2:$H outer:H=$H,momentum=0.9,stream=2}; do
      case $strategy in *local-sgd* | outer*) rate='--lr 0.02' ;; *) rate= ;; esac
      python3 "$(dirname "$0")/../../dist/lab/rehearse.py" --hosts 4 --ranks 2 --link "$link" --strategy "$strategy" --target $target --results "$there" -- $how $rate
    done
  done
done
