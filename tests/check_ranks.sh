#!/bin/sh
# Real processes under tandem-run, and Debian's mpirun and torchrun: the same weights everywhere, the first failure named, nothing left.
set -u
limit=60
. tests/says.sh
needs_ranks
export OMP_NUM_THREADS=1

train() { echo "$build/fashion_mnist --data $pictures --model mlp --val 1000 --epochs 1 --lr 0.05"; }

# ---- the same everywhere ---------------------------------------------------------------------------------------------
# Two ranks and one train with the same batch and rate: the same accuracy, and one of the ranks prints it.
says 0 'test accuracy' $(train) --batch 64
one=$(sed -n 's/^test accuracy \([0-9.]*\).*/\1/p' "$there/out")
says 0 '2 ranks, all-reduce: batch 64 = 2 × 32, as on one machine' "$build/tandem-run" -n 2 $(train) --batch 64
# once TEXT: one rank's line has it.
once() { [ "$(grep -F -- "$1" "$there/out" | grep -vc '^tandem-run:')" = 1 ] || complain "not one line has '$1': $(cat "$there/out")"; }
once 'test accuracy'
two=$(sed -n 's/.*test accuracy \([0-9.]*\).*/\1/p' "$there/out" | head -n 1)
awk -v a="$one" -v b="$two" 'BEGIN { exit !(a - b < 1 && b - a < 1) }' || complain "one process $one %, two ranks $two %"
says 0 '2 ranks, all-reduce: batch 128 = 2 × 64, lr 0.05 → 0.1 (clipped)' "$build/tandem-run" -n 2 $(train) --batch-per-rank 64
grep -q 'warning: .* steps are few for a batch of 128' "$there/out" || complain "no warning of few steps: $(cat "$there/out")"
says 0 'batch 128 = 2 × 64, lr 0.05 → 0.1 (linear)' "$build/tandem-run" -n 2 $(train) --batch-per-rank 64 --lr-scale linear
says 0 '3 ranks, all-reduce (bf16): batch 64 = 3 × 21 or 22, as on one machine' \
  "$build/tandem-run" -n 3 --strategy all-reduce:wire=bf16 $(train) --batch 64
says 2 '--batch 2 over 3 ranks: a rank would have no picture' "$build/tandem-run" -n 3 $(train) --batch 2
once 'a rank would have no picture: use a larger --batch, or fewer ranks'
says 2 '--lr-scale goes with --batch-per-rank' "$build/tandem-run" -n 3 $(train) --lr-scale linear
says 0 'warning: batch norm has only 8 pictures' "$build/tandem-run" -n 2 \
  "$build/fashion_mnist" --data "$pictures" --model smallcnn-bn --epochs 1 --batch 16 --stop-after 2
# Ranks that have different options.
for option in "--optimizer sgd lars" "--lr-scale sqrt linear"; do
  set -- $option
  says 2 "have different options: $1 $2 and $1 $3" "$build/tandem-run" -n 2 sh -c \
    "exec $(train) --batch-per-rank 64 $1 \$([ \$RANK = 0 ] && echo $2 || echo $3)"
done
# Steps of their own: all ranks end with the same, whatever the exchange.
for strategy in local-sgd:4 post-local-sgd:4 cocod-sgd:4 easgd:4 outer:H=8,momentum=0.5,lr=0.7,stream=2; do
  says 0 "3 ranks, $strategy: batch 192 = 3 × 64, lr 0.05" "$build/tandem-run" -n 3 --strategy $strategy $(train) --batch 192
  once 'test accuracy'
done
# The last layer cut over the ranks of a host: as one process, and what it writes is whole.
for how in "2 hybrid" "4 hybrid+all-reduce --hosts-as 2" "4 hybrid+bsp --hosts-as 2" "4 hybrid+daso:B=0 --hosts-as 2" "4 hybrid+asgd-m --hosts-as 2"; do
  set -- $how
  case $2 in
    hybrid | hybrid+all-reduce) said="hybrid+all-reduce: batch 64 = $1 × $((64 / $1)), as on one machine" within=1 ;;
    hybrid+asgd-m) said=$2 within=50 ;;  # that it learns: how late gradients are depends on the load
    *) said=$2 within=3 ;;
  esac
  says 0 "$1 ranks, $said" "$build/tandem-run" -n $1 --strategy $2 ${3:-} ${4:-} \
    $(train) --batch 64 --checkpoint "$there/hybrid" --export-torch "$there/hybrid.safetensors"
  rm -r "$there/hybrid"
  cut=$(sed -n 's/.*test accuracy \([0-9.]*\).*/\1/p' "$there/out" | head -n 1)
  awk -v a="$one" -v b="$cut" -v d=$within 'BEGIN { exit !(a - b < d && b - a < d) }' || complain "one process $one %, $2 $cut %"
  says 0 "test accuracy $cut" $(train) --evaluate --import-torch "$there/hybrid.safetensors"
done
says 2 'start as many on every host' "$build/tandem-run" -n 3 --hosts-as 2 --strategy hybrid $(train)
says 2 "DASO's option bf16" "$build/tandem-run" -n 2 --hosts-as 2 --strategy hybrid+daso:wire=bf16 $(train)
says 2 "the hybrid cannot be joined with 'easgd:8'" "$build/tandem-run" -n 2 --strategy hybrid+easgd:8 $(train)
says 2 'sample is a number above 0' "$build/tandem-run" -n 2 --strategy hybrid:sample=2 $(train)
# Ranks whose steps are made to take 50 ms, one of them twice as long, under any strategy: 20 steps of both take 2 s.
for strategy in all-reduce local-sgd:4; do
  says 0 'stopped after step 20' "$build/tandem-run" -n 2 --strategy $strategy --pace 50:0 --slow 1:2 $(train) --stop-after 20 --metrics "$there/paced"
  awk -v s="$(sed -n 's/.*"event":"end".*"seconds":\([0-9.]*\).*/\1/p' "$there/paced")" 'BEGIN { exit !(s >= 1.9) }' || complain "paced $strategy took less than 2 s"
done
# Two hosts of two ranks.
two_hosts="$build/tandem-run -n 4 --hosts-as 2 --strategy"
for strategy in daso:B=4,W=1,warm-up=0,cool-down=0 daso:faithful; do
  says 0 "4 ranks, ${strategy%%:*}" $two_hosts $strategy $(train)
  once 'test accuracy'
done
says 0 '3 ranks, daso' "$build/tandem-run" -n 3 --strategy daso $(train)  # one host
says 0 'stopped after step 20' $two_hosts daso:warm-up=0 $(train) --checkpoint "$there/daso" --stop-after 20
says 0 'test accuracy' $two_hosts daso:warm-up=0 $(train) --resume "$there/daso"
says 2 'start as many on every host' "$build/tandem-run" -n 3 --hosts-as 2 --strategy daso $(train)
says 2 "'C=1' is no option of daso" $two_hosts daso:C=1 $(train)
says 0 '4 ranks, half-way' "$build/tandem-run" -n 4 --strategy half-way "$build/own_strategy" --data "$pictures" --model mlp --epochs 1 --batch 128
once 'epoch 1/1'
"$build/tandem-run" --strategies | grep -Fvxf dist/REFERENCE.md && complain 'dist/REFERENCE.md has other lines than tandem-run --strategies'
# A strategy of a program's own has a name, and the settings of others are refused.
says 2 'choose all-reduce, ' "$build/tandem-run" -n 2 --strategy half-weigh "$build/own_strategy" --data synthetic
says 2 'is for a parameter server' "$build/tandem-run" -n 2 --servers 1 --strategy half-way "$build/own_strategy" --data synthetic
says 124 '(SIGTERM)' timeout -s TERM 3 "$build/tandem-run" -n 2 --strategy half-way "$build/own_strategy" --data synthetic --model lenet5 --epochs 100000
says 2 'it has no statistics over all ranks' "$build/tandem-run" -n 2 --strategy local-sgd:8 "$build/fashion_mnist" --data synthetic --sync-bn
says 2 'this model has no batch norm' "$build/tandem-run" -n 2 $(train) --sync-bn
says 2 '--ssh is for ranks on several hosts' "$build/tandem-run" -n 2 --ssh rsh $(train)
says 2 '--port is for ranks on several hosts' "$build/tandem-run" -n 2 --port 29500 $(train)
# What two ranks began three go on with, and then one.
says 0 'test accuracy' "$build/tandem-run" -n 2 $(train) --batch 48 --checkpoint "$there/run"
long=$(train | sed 's/--epochs 1/--epochs 2/')
says 0 'ranks was 2 and is 3' "$build/tandem-run" -n 3 $long --batch 48 --resume "$there/run"
says 0 'ranks was 3 and is 1' $(echo "$long" | sed 's/--epochs 2/--epochs 3/') --batch 48 --resume "$there/run"
if command -v mpirun >/dev/null; then
  root=$([ "$(id -u)" -eq 0 ] && echo --allow-run-as-root)
  says 0 '2 ranks, all-reduce: batch 128' mpirun $root --oversubscribe -np 2 $(train)
  once 'test accuracy'
fi
# As Debian's PyTorch 1.13 spells it, whose default of -r and -t fails under Debian's Python.
if command -v torchrun >/dev/null; then
  says 0 '2 ranks, all-reduce' torchrun --standalone -r 1 -t 1 --nproc_per_node 2 --no_python $(train)
fi
says 0 '3 ranks:' "$build/tandem-run" -n 3 --check
says 0 '1 rank:' "$build/tandem-run" -n 1 --check

# ---- what is refused -------------------------------------------------------------------------------------------------
says 2 'unknown option --modle' "$build/tandem-run" -n 3 "$build/fashion_mnist" --modle x
once '@'
says 2 'which program?' "$build/tandem-run" -n 2
says 2 'expected a whole number from 1 to 4096' "$build/tandem-run" -n 0 true
says 2 'unknown option --nodes' "$build/tandem-run" --nodes 2 true
says 2 'choose all-reduce' "$build/tandem-run" -n 2 --strategy half-way $(train)
says 2 'H is STEPS, from 1' "$build/tandem-run" -n 2 --strategy easgd:0 $(train)
says 2 'weights travel, as f32' "$build/tandem-run" -n 2 --strategy local-sgd:4,wire=bf16 $(train)
says 2 'is for a parameter server' "$build/tandem-run" -n 2 --strategy local-sgd:4,snapshots=1 $(train)
says 2 'RANK=0 is set, but WORLD_SIZE is not' env RANK=0 $(train)
says 127 'cannot be started' "$build/tandem-run" -n 2 "$there/no-such-program"
says 1 'these ranks are missing: 1' env RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 TANDEM_JOB="check $$" TANDEM_START_TIMEOUT=1 $(train)
says 3 'rank 1 on' "$build/tandem-run" -n 3 sh -c 'echo "I am $RANK"; [ $RANK != 1 ] || exit 3; sleep 30'
grep -q '^\[2@.*\] I am 2' "$there/out" || complain "no prefix: $(cat "$there/out")"
says 0 'done 0' "$build/tandem-run" -n 2 --on-failure continue sh -c '[ $RANK = 0 ] || exit 0; sleep 1; echo done $RANK'

# ---- containers ------------------------------------------------------------------------------------------------------
(unset OMP_NUM_THREADS; says 0 'threads 1' taskset -c 0 "$build/tandem-run" -n 1 sh -c 'echo threads $OMP_NUM_THREADS'; exit $wrong) || wrong=1
if unshare --mount --pid --fork --mount-proc true 2>/dev/null; then
  shm() { says "$1" "$2" unshare --mount sh -c "mount -t tmpfs -o size=$3 tmpfs /dev/shm && $4 exec $build/tandem-run -n 3 $(train)"; }
  shm 0 'test accuracy' 1m ''
  shm 0 'test accuracy' 40m 'head -c 40M /dev/zero >/dev/shm/full;'
  shm 1 '/dev/shm has 1 MiB' 1m 'UCX_TLS=self,posix'
  container='unshare --pid --fork --mount-proc'
  # Two with one network and one number for their jobs do not meet: mpirun's, torchrun's, that of a parent.
  for job in PMIX_NAMESPACE=alike-$$ TORCHELASTIC_RUN_ID=none NONE=; do
    apart="$job WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 TANDEM_START_TIMEOUT=2 $container"
    env RANK=1 LOCAL_RANK=1 $apart $(train) >/dev/null 2>&1 &
    says 1 'these ranks are missing: 1' env RANK=0 LOCAL_RANK=0 $apart $(train)
    wait $!
  done
  # Ranks of one job may be in a container each.
  says 0 'test accuracy' "$build/tandem-run" -n 2 $container $(train)
fi
# A warning of the batch system goes to all ranks, which stop together.
"$build/tandem-run" -n 2 "$build/fashion_mnist" --data synthetic --model mlp --epochs 100000 --log-every 1 --metrics "$there/warned" >"$there/out" 2>&1 &
until grep -q '"step"' "$there/warned" 2>/dev/null; do sleep 0.2; done
kill -s USR1 $!
ends $! 138 "$there/out" SIGUSR1
grep -q '(SIGUSR1)' "$there/out" || complain "SIGUSR1: $(cat "$there/out")"
# After it ranks have the time that they need, one longer than another; SIGTERM then stops them, and a second one ends them.
"$build/tandem-run" -n 2 sh -c 'trap "sleep $((RANK * 6)); echo saved; exit 138" USR1; echo began; while :; do sleep 0.1; done' >"$there/out" 2>&1 &
until [ "$(grep -c began "$there/out")" = 2 ]; do sleep 0.1; done
kill -s USR1 $!
wait $!
[ "$(grep -c saved "$there/out")" = 2 ] || complain "ranks that stop after a warning are killed: $(cat "$there/out")"
"$build/tandem-run" -n 2 sh -c 'trap "" USR1 TERM; echo began; sleep 60' >"$there/out" 2>&1 &
until [ "$(grep -c began "$there/out")" = 2 ]; do sleep 0.1; done
since=$(date +%s)
for signal in USR1 TERM TERM; do kill -s $signal $!; sleep 0.3; done
wait $!
[ $(($(date +%s) - since)) -lt 20 ] || complain "after a warning a second SIGTERM does not end tandem-run"

# ---- a rank that dies, or stops --------------------------------------------------------------------------------------
# begun RANK OPTIONS…: a long training of three ranks ($ranks) in the background; the process of that rank is in $victim.
begun() {
  rank=$1
  shift
  begins "$rank" "$build/tandem-run" ${ranks:--n 3} --pace 5 $endless --log-every ${every:-100} "$@"
}
endless="$build/fashion_mnist --data synthetic --model mlp --batch 48 --epochs 100000"
# ended SECONDS TEXT…: the launcher ends by itself, with all its ranks, and says so.
ended() {
  at_most=$1
  shift
  began=$(date +%s)
  wait $launcher
  got=$?
  took=$(($(date +%s) - began))
  [ $got -ne 0 ] || complain "the launcher ended well"
  [ $took -le "$at_most" ] || complain "the rest took $took s to end"
  for text in "$@"; do grep -qE -- "$text" "$there/out" || complain "does not say '$text' but: $(tail -n 8 "$there/out")"; done
  nothing_left
}
# killed SECONDS TEXT…: the victim is killed, and the job ends as for ended.
killed() {
  kill -KILL "$victim"
  ended "$@"
}
# step_written: the step after which a rank wrote what was left.
step_written() {
  step=$(sed -n 's/.*the run after step \([0-9]*\).*/\1/p' "$there/out")
  : "${step:=0}"
}
export TANDEM_SILENCE=2
for strategy in all-reduce daso:B=4,W=3,warm-up=0,cool-down=0 outer:H=50,stream=2; do
  export TANDEM_STRATEGY=$strategy TANDEM_HOSTS_AS=3
  begun 1
  kill -STOP "$victim"
  ended 9 'rank 1 on .* has said nothing for 2 s'
done
unset TANDEM_SILENCE
# Hosts that train beside each other: a rank is killed, then all ranks of a host, in a phase in which each batch waits and with
# an exchange under way. What is left writes, and the run goes on from there.
ranks='-n 4'
for strategy in daso daso:B=4,W=3,warm-up=0,cool-down=0 outer:H=50,stream=2; do
  export TANDEM_STRATEGY=$strategy TANDEM_HOSTS_AS=2
  begun 3
  killed 9 'rank 3 on .* failed first: it was killed by SIGKILL'
  rm -rf "$there/host"
  begun 2 --checkpoint "$there/host"
  kill -KILL "$victim" $(rank_of $launcher 3)
  ended 9 'rank [23] on .* failed first: it was killed by SIGKILL' 'rank 0 on .* has written .*/last.safetensors'
  step_written
  says 0 "stopped after step $((step + 30))" "$build/tandem-run" -n 4 $endless --resume "$there/host" --stop-after $((step + 30))
done
unset ranks TANDEM_STRATEGY TANDEM_HOSTS_AS
begun 1
kill -TERM $launcher
ended 15

# ---- a rank that dies with its slices: the others write nothing, and the last checkpoint goes on, on another number of ranks --------
endless_before=$endless endless="$build/fashion_mnist --data $pictures --model mlp --val 5000 --batch 48 --epochs 100000"
for strategy in hybrid+all-reduce hybrid+daso:B=4,W=3,warm-up=0,cool-down=0; do
  rm -rf "$there/cut"
  ranks="-n 4 --hosts-as 2 --strategy $strategy" begun 3 --checkpoint "$there/cut"
  until [ -e "$there/cut/last.safetensors" ] || ! kill -0 $launcher; do sleep 0.1; done
  killed 6 'rank 3 on .* failed first: it was killed by SIGKILL' 'rank 3 on .* has died' 'a layer is cut over ranks'
  says 0 'nothing is left to do' $endless --resume "$there/cut" --stop-after 1
  step=$(sed -n 's/.* done, \([0-9]*\) steps.*/\1/p' "$there/out")
  says 0 'ranks was 4 and is 3' "$build/tandem-run" -n 3 --strategy hybrid $endless --resume "$there/cut" --stop-after $((step + 10))
  says 0 "strategy was hybrid+all-reduce and is one machine" $endless --resume "$there/cut" --stop-after $((step + 20))
done
endless=$endless_before

# ---- what is left is written by the lowest rank of the majority, and goes on as if nothing had happened ---------------------
# The two commands of dist/REFERENCE.md, as they stand there but for folders and data: the ranks differ, and nothing else.
shown() { sed -n "s|^build/tandem-run -n $1 build/\(.*\) --$2 run\$|$build/\1 --data synthetic|p" dist/REFERENCE.md; }
endless_before=$endless endless=$(shown 3 checkpoint)
[ "$endless" ] && [ "$endless" = "$(shown 2 resume)" ] || complain "dist/REFERENCE.md: '$endless' is resumed by '$(shown 2 resume)'"
begun 2 --checkpoint "$there/killed-2"
killed 6 'rank 2 on .* failed first: it was killed by SIGKILL' 'rank 2 on .* has died' 'rank 0 on .* has written'
step_written
says 0 '2 ranks, all-reduce: batch 128 = 2 × 64, as on one machine' \
  "$build/tandem-run" -n 2 $endless --resume "$there/killed-2" --stop-after $((step + 20))
once 'ranks was 3 and is 2'
[ "$(grep -c ' was .* and is ' "$there/out")" = 1 ] || complain "more differs than the ranks: $(cat "$there/out")"
endless=$endless_before
begun 0 --checkpoint "$there/killed"
killed 6 'rank 0 on .* failed first: it was killed by SIGKILL' 'rank 1 on .* has written .*/last.safetensors'
step_written
# same FOLDER FOLDER: their runs have the same weights and optimizer's state.
same() { [ "$(weights "$there/$1/last.safetensors")" = "$(weights "$there/$2/last.safetensors")" ]; }
# whole FOLDER STEPS: a run that nothing happens to.
whole() { says 0 "stopped after step $2 of" "$build/tandem-run" -n 3 $endless --checkpoint "$there/$1" --stop-after "$2"; }
cp -r "$there/killed" "$there/left"
says 0 "stopped after step $((step + 50)) of" "$build/tandem-run" -n 3 $endless --resume "$there/killed" --stop-after $((step + 50))
grep -q "$step steps" "$there/out" || complain "resumed elsewhere than after step $step: $(cat "$there/out")"
whole whole $((step + 50))
if ! same killed whole; then
  complain "a run that was killed after step $step and resumed has other weights"
  whole again $((step + 50))
  whole until "$step"
  same whole again || complain "and so has every run: they do not repeat"
  same left until || complain "and what was written after step $step is not what a whole run has there"
fi

# ---- a signal to one rank while all evaluate, which here is nearly all of the time, stops all at the same step ---------------
endless="$build/fashion_mnist --data synthetic --model smallcnn --val 59000 --batch 50 --epochs 1000" every=3
begun 1 --checkpoint "$there/signal"
sleep 0.5
kill -TERM "$victim"
ended 25 'stopped after step [0-9]* of .*another rank' 'rank 1 on .* ended with exit status 143'
[ -e "$there/signal/last.safetensors" ] || complain "a signal in an evaluation leaves no checkpoint"
exit $wrong
