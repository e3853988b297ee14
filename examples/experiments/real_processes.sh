#!/bin/sh
# Compares real processes with the simulator: LeNet-5 on Fashion-MNIST, two epochs over all workers, 4 and 8 of them, steps of 40 ms (Gamma,
# shape 100), all equally fast or the last half of them four times slower. Writes a line of real_processes.jsonl for each run: delays (the
# number of pushes with each), accuracies and times after each epoch. Then prints a table: mean delays, the distance of the two histograms
# of delays (total variation: the share of pushes to move), seconds and accuracies. A run that is in the file is not repeated.
#
#   sh examples/experiments/real_processes.sh DATA
set -eu
here=$(dirname "$0") data=$1
results=${RESULTS:-$here/real_processes.jsonl}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
touch "$results"

record() {  # KIND STRATEGY WORKERS CLUSTER: of $scratch/metrics
  awk -v key="\"kind\":\"$1\",\"strategy\":\"$2\",\"workers\":$3,\"cluster\":\"$4\"" '
    function of(name) { return match($0, "\"" name "\":[^,}]*") ? substr($0, RSTART + length(name) + 3, RLENGTH - length(name) - 3) : "" }
    /"event":"epoch"/ { time += of("seconds"); at = at (at ? "," : "") sprintf("%.4g", time); acc = acc (acc ? "," : "") of("test_accuracy") }
    /"event":"end"/ {
      while (match($0, /"delay_[0-9a-z_]*":[0-9]*/)) {
        d = d (d ? "," : "") substr($0, RSTART, RLENGTH); $0 = substr($0, 1, RSTART - 1) "x" substr($0, RSTART + RLENGTH) }
      printf "{%s,\"mean_delay\":%s,\"participation\":%s,\"seconds\":[%s],\"test_accuracy\":[%s],%s}\n", key, of("mean_delay"), of("participation"), at, acc, d
    }' "$scratch/metrics" >> "$results"
}

for workers in 4 8; do
  for cluster in even uneven; do
    [ $cluster = even ] && slow='' || slow='--slow half:4'
    for strategy in ddc-asgd asgd ringmaster:R=$workers fedbuff:B=4; do
      options="--data $data --data-set fashion-mnist --model lenet5 --no-augment --epochs 2 --batch 64 --lr 0.02 --momentum 0.9
        --weight-decay 0.0005 --schedule warmup:0.5+cosine --metrics $scratch/metrics"
      known() { grep -qF "\"kind\":\"$1\",\"strategy\":\"$strategy\",\"workers\":$workers,\"cluster\":\"$cluster\"" "$results"; }
      known real || {
        build/tandem-run -n $workers --pace 40:100 $slow --strategy $strategy build/train $options > "$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
        record real $strategy $workers $cluster
      }
      known simulated || {
        build/simulate $options --threads 1 --workers $workers --compute 40 --shape 100 $slow --strategy $strategy > "$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
        record simulated $strategy $workers $cluster
      }
    done
  done
done

awk '
  function of(name) { return match($0, "\"" name "\":[^,}]*") ? substr($0, RSTART + length(name) + 3, RLENGTH - length(name) - 3) : "" }
  function last(name) { match($0, "\"" name "\":\\[[^]]*"); n = split(substr($0, RSTART + length(name) + 4, RLENGTH - length(name) - 4), v, ","); return v[n] }
  BEGIN { print "| strategy | workers | cluster | mean delay, real | simulated | distance | participation, real | simulated | s, real | simulated | test %, real | simulated |"
          print "|---|---|---|---|---|---|---|---|---|---|---|---|" }
  { key = of("strategy") "|" of("workers") "|" of("cluster"); gsub(/"/, "", key); kind = of("kind"); gsub(/"/, "", kind)
    if (!(key in seen)) { seen[key] = 1; order[++keys] = key }
    mean[key, kind] = of("mean_delay"); share[key, kind] = of("participation"); time[key, kind] = last("seconds"); accuracy[key, kind] = last("test_accuracy")
    rest = $0; all[key, kind] = 0
    while (match(rest, /"delay_[0-9a-z_]*":[0-9]*/)) {
      split(substr(rest, RSTART, RLENGTH), p, /"?:/); rest = substr(rest, RSTART + RLENGTH)
      count[key, kind, p[1]] = p[2]; all[key, kind] += p[2]; names[p[1]] = 1 } }
  END { for (k = 1; k <= keys; k++) { key = order[k]; far = 0
      for (d in names) { x = count[key, "real", d] / all[key, "real"] - count[key, "simulated", d] / all[key, "simulated"]; far += x < 0 ? -x : x }
      split(key, p, "|")
      printf "| %s | %s | %s | %.2f | %.2f | %.3f | %.1f | %.1f | %.1f | %.1f | %.2f | %.2f |\n", p[1], p[2], p[3], mean[key, "real"], mean[key, "simulated"],
        far / 2, 100 * share[key, "real"], 100 * share[key, "simulated"], time[key, "real"], time[key, "simulated"],
        100 * accuracy[key, "real"], 100 * accuracy[key, "simulated"] } }' "$results"
