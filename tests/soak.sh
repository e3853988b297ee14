#!/bin/sh
# tests/soak.sh FOLDER [SECONDS]: a parameter server at full load for half an hour, never in CI. Four ranks train without a pause;
# once a minute a line of FOLDER/soak.csv says how many steps are done and what resident memory each rank has. Ends with status 0
# when no rank reported an error and the memory of the last quarter is at most 5 % above that of the second.
set -u
. tests/says.sh
folder=${1:?'which folder? sh tests/soak.sh FOLDER [SECONDS]'}
seconds=${2:-1800}
mkdir -p "$folder" || exit 1
rm -f "$folder/metrics.jsonl"
echo 'seconds,epochs,rank0_mib,rank1_mib,rank2_mib,rank3_mib' >"$folder/soak.csv"
"$build/tandem-run" -n 4 --strategy ddc-asgd "$build/fashion_mnist" --model lenet5 --batch 64 --lr 0.005 --schedule constant \
  --epochs 1000000 --metrics "$folder/metrics.jsonl" >"$folder/log" 2>&1 &
launcher=$!
trap 'kill -TERM $launcher 2>/dev/null' INT TERM
mib_of() { awk '/VmRSS/ { print int($2 / 1024) }' "/proc/$(rank_of $launcher "$1")/status" 2>/dev/null; }
every=$((seconds < 600 ? seconds / 10 : 60))
t=0
while [ $t -lt "$seconds" ] && kill -0 $launcher 2>/dev/null; do
  sleep "$every"
  t=$((t + every))
  echo "$t,$(grep -c '"event":"epoch"' "$folder/metrics.jsonl"),$(mib_of 0),$(mib_of 1),$(mib_of 2),$(mib_of 3)" | tee -a "$folder/soak.csv"
done
kill -TERM $launcher 2>/dev/null
wait $launcher
status=$?
[ $status -eq 143 ] || { echo "the job ended by itself, with status $status: $(tail -n 3 "$folder/log")"; exit 1; }
grep -q '"refused":[1-9]' "$folder/metrics.jsonl" && { echo 'gradients were refused'; exit 1; }
sed -n 's/.*"event":"end","steps":\([0-9]*\).*/\1 steps/p' "$folder/metrics.jsonl"
awk -F, 'NR > 1 { n++; all[n] = $3 + $4 + $5 + $6 }
  END {
    q = int(n / 4); if (q < 1) q = 1
    for (i = q + 1; i <= 2 * q; i++) early += all[i] / q
    for (i = n - q + 1; i <= n; i++) late += all[i] / q
    printf "resident memory of all ranks: %.0f MiB in the second quarter, %.0f in the last\n", early, late
    exit late > 1.05 * early
  }' "$folder/soak.csv"
