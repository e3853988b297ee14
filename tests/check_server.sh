#!/bin/sh
# Training by the parameter server, in real processes: every strategy ends with the same weights everywhere; workers that die, are
# stopped, start again or are asked to end; what is refused.
set -u
limit=60
. tests/says.sh
needs_ranks
export OMP_NUM_THREADS=1
run="$build/tandem-run"
train="$build/fashion_mnist --data $pictures --model mlp --epochs 1 --lr 0.02 --batch 50"

# ---- every strategy trains to its end -------------------------------------------------------------------------------------
# trains TEXT COMMAND…: it says so, and one rank prints the accuracy.
trains() {
  says 0 "$@"
  [ "$(grep -c 'test accuracy' "$there/out")" = 1 ] || complain "not one rank prints the accuracy: $(cat "$there/out")"
}
trains '3 ranks, ddc-asgd: batch 50 a push, lr 0.02' "$run" -n 3 --strategy ddc-asgd $train
trains '3 ranks, ssp:2+ddc-asgd: batch 50 a push, lr 0.02' "$run" -n 3 --strategy ssp:2 $train
trains '2 ranks, bsp+asgd-m: batch 50 = 2 × 25, as on one machine' "$run" -n 2 --strategy bsp $train
trains '2 ranks, bsp+asgd-m: batch 100 = 2 × 50, lr 0.02 → 0.04 (clipped)' "$run" -n 2 --strategy bsp ${train% --batch 50} --batch-per-rank 50
trains '3 ranks, asgd, 1 of them serve' "$run" -n 3 --servers 1 --strategy asgd $train
trains '2 ranks, ddc-asgd (bf16)' "$run" -n 2 --strategy ddc-asgd:wire=bf16 $train
trains '3 ranks, outer:H=10,momentum=0.3,lr=0.7+delayed-nesterov:every=3: batch 50 a push' "$run" -n 3 \
  --strategy outer:H=10+delayed-nesterov $train
says 2 'go with an update rule alone' "$run" -n 2 --strategy outer:H=10+bsp $train
trains 'lr=0.7+quorum:2,grace=0.1+delayed-nesterov:every=1: batch 50 a push' "$run" -n 3 --strategy outer:H=10+quorum:2,grace=0.1 $train
says 2 'there are 2 workers' "$run" -n 3 --servers 1 --strategy quorum:3 $train
says 2 'choose the pushes of a step by itself' "$run" -n 4 --hosts-as 2 --strategy machines+quorum:2 $train
# A machine as one worker: each of its ranks has a part of the exchange.
trains '4 ranks, machines+ddc-asgd: batch 50 = 2 × 25, lr 0.02' "$run" -n 4 --hosts-as 2 --strategy machines+ddc-asgd $train
says 2 'start as many on every host' "$run" -n 3 --hosts-as 2 --strategy machines+asgd $train
says 2 'all ranks serve' "$run" -n 2 --servers 1 --strategy machines+asgd $train
says 2 'a host leaves as a whole' "$run" -n 2 --restart 1 --strategy machines+asgd $train
says 2 'hosts-as 3: expected a whole number from 1 to 2' "$run" -n 2 --hosts-as 3 --strategy machines+asgd $train
# Paced, who is four times as slow does about a quarter of what the other does.
says 0 '2 ranks, asgd' "$run" -n 2 --strategy asp+asgd --pace 20 --slow 1:4 $train --metrics "$there/paced" --trace "$there/trace"
exchanges() { sed -n "s/.*\"rank\":$1,.*\"exchanges\":\([0-9]*\).*/\1/p" "$there/paced"; }
[ "$(exchanges 0)" -gt $((2 * $(exchanges 1))) ] || complain "paced ranks exchanged $(exchanges 0) and $(exchanges 1) times"
grep -q '"push and pull"' "$there/trace" || complain 'the trace has no push and pull'
# An evaluation that takes longer than the deadline kills nobody.
says 0 '2 ranks, bsp+asgd-m' env TANDEM_DEADLINE=0.5 "$run" -n 2 --strategy bsp \
  $build/fashion_mnist --data synthetic --model lenet5 --val 59000 --epochs 1 --batch 50
# Rank 0 is slow: epochs that the others ended before it looked are one line.
says 0 'epoch 1-' "$run" -n 3 --strategy ddc-asgd --pace 10 --slow 0:100 \
  $build/fashion_mnist --data $pictures --model mlp --val 5000 --epochs 4 --batch 50
# A resumed epoch's loss is of all of it.
once="$build/fashion_mnist --data $pictures --model mlp --val 1000 --epochs 2 --lr 0.02 --batch 50 --deterministic --threads 1"
says 0 'epoch 2/2' "$run" -n 2 --servers 1 --strategy ddc-asgd $once
second=$(grep -o 'epoch 2/2  loss [0-9.]*' "$there/out")
says 0 'epoch 2/2' "$run" -n 4 --hosts-as 2 --strategy machines+bsp $once
machines=$(grep -o 'epoch 2/2  loss [0-9.]*' "$there/out")
says 0 'stopped after step 150' "$run" -n 2 --servers 1 --strategy ddc-asgd $once --checkpoint "$there/half" --stop-after 150
says 0 "$second" "$run" -n 2 --servers 1 --strategy ddc-asgd $once --resume "$there/half"
says 0 'stopped after step 150' "$run" -n 4 --hosts-as 2 --strategy machines+bsp $once --checkpoint "$there/part" --stop-after 150
says 0 "$machines" "$run" -n 4 --hosts-as 2 --strategy machines+bsp $once --resume "$there/part"
# A checkpoint goes on, with other ranks too.
says 0 'stopped after step 100 of 120' "$run" -n 2 --strategy ddc-asgd $train --checkpoint "$there/run" --stop-after 100
says 0 'ranks was 2 and is 3' "$run" -n 3 --strategy ddc-asgd $train --resume "$there/run"

# ---- losses ----------------------------------------------------------------------------------------------------------------
endless="$build/fashion_mnist --data synthetic --model mlp --batch 50 --lr 0.001 --epochs 100000"
# begun RANK OPTIONS…: a long training of three ranks in the background; that rank's process is in $victim.
begun() {
  rank=$1
  shift
  begins "$rank" "$run" -n 3 --strategy ddc-asgd --pace 5 "$@" $endless --log-every 50
}
steps() { sed -n 's/.*"step","step":\([0-9]*\).*/\1/p' "$there/metrics" | tail -n 1; }
# goes_on: more steps come.
goes_on() {
  before=$(steps)
  within 100 beyond $((before + 200)) || complain "after $before steps nothing goes on: $(cat "$there/out")"
}
beyond() { [ "$(steps)" -gt "$1" ]; }
said() { within 150 grep -qE -- "$1" "$there/out" || complain "does not say '$1' but: $(cat "$there/out")"; }
# ended STATUS: after a signal, well, and nothing is left.
ended() {
  ends $launcher "$1" "$there/out" 'the launcher'
  nothing_left
}
# goes_on_to_its_end: more steps come, and the launcher is asked to end.
goes_on_to_its_end() {
  goes_on
  kill -TERM $launcher
  ended 143
}
begun 2
kill -KILL "$victim"
said 'rank 2 on .* was killed by SIGKILL: the others go on without it'
goes_on_to_its_end
grep -q '"adopted_shards":1' "$there/metrics" || complain "nobody adopted the shard: $(tail -n 3 "$there/metrics")"
for strategy in outer:H=10+delayed-nesterov outer:H=10+quorum:2,grace=0.1 ddc-asgd; do
  begun 1 --restart 1 --strategy $strategy
  kill -KILL "$victim"
  said 'and it is started again'
  sleep 3
  goes_on_to_its_end
done
tail -n 4 "$there/metrics" | grep '"rank":1,' | grep -q '"exchanges":[1-9][0-9]' || complain "rank 1 did not come back: $(tail -n 4 "$there/metrics")"
# A worker with pictures of its own takes them along, and brings them back.
plain=$endless
endless="$plain --partition dirichlet:0.5"
begun 1 --restart 1 --strategy asgd
kill -KILL "$victim"
said 'the others go on without it and without its [0-9]* pictures, of classes [0-9]'
said 'rank 1 on .* is back, with its [0-9]* pictures, of classes [0-9]'
goes_on_to_its_end
# Killed in a round over own epochs: the checkpoint has the weights before the round, and a resumed run begins it anew.
rounds="$build/fashion_mnist --data $pictures --model mlp --batch 50 --lr 0.01 --partition dirichlet:0.5"
endless="$rounds --epochs 100000 --checkpoint $there/rounds"
begun 1 --strategy fedavg:epochs=2
until grep -q '"event":"epoch"' "$there/metrics" || ! kill -0 $launcher; do sleep 0.1; done
kill -KILL "$victim"
ended 137
said '^.0@.* rank 1 on .* has died'
endless=$plain
says 2 'the partition was dirichlet:alpha=0.5 among 3 workers and is dirichlet:alpha=0.5 among 2 workers' \
  "$run" -n 2 --strategy fedavg:epochs=2 $rounds --epochs 40 --resume "$there/rounds"
trains '3 ranks, fedavg:epochs=2' "$run" -n 3 --strategy fedavg:epochs=2 $rounds --epochs 40 --resume "$there/rounds"
says 0 'stopped after step 60' "$run" -n 3 --strategy asgd $rounds --epochs 1 --stop-after 60 --checkpoint "$there/parts"
trains '3 ranks, asgd' "$run" -n 3 --strategy asgd $rounds --epochs 1 --resume "$there/parts"
trains '10 ranks, fedavg:epochs=1' "$run" -n 10 --strategy fedavg:epochs=1 ${rounds% *} classes:k=1 --epochs 2
says 0 'no worker has pictures of class 9' "$run" -n 3 --strategy asgd ${rounds% *} classes:k=1 --epochs 1
# Of machines, each leaves as a whole.
for strategy in machines+ddc-asgd hybrid+ddc-asgd; do
  begun 3 -n 4 --hosts-as 2 --strategy $strategy
  kill -KILL "$victim"
  said 'rank 2 on .* ended with exit status 1: the others go on without it'
  goes_on
  kill -TERM "$(rank_of $launcher 1)"
  ended 0
  said 'stopped after step [0-9]* of'
done
# Without --on-failure the others go on; where it says stop, the first that fails ends the job.
begun 2 --on-failure stop
kill -KILL "$victim"
ended 137
grep -q 'rank 2 on .* failed first' "$there/out" || complain "--on-failure stop: $(cat "$there/out")"
says 2 'with --on-failure stop no rank is started again' "$run" -n 2 --strategy ddc-asgd --on-failure stop --restart 1 $train
# Before all have met there is nothing to go on with.
says 3 'failed first: it ended with exit status 3' "$run" -n 3 --strategy ddc-asgd --restart 1 \
  sh -c '[ "$RANK" = 1 ] && sleep 1 && exit 3; exec "$@"' sh $train
export TANDEM_SILENCE=2
begun 1
kill -STOP "$victim"
goes_on
sleep 3
goes_on
kill -CONT "$victim"
goes_on_to_its_end
unset TANDEM_SILENCE
# A worker that is asked to end asks all of them.
begun 2
kill -TERM "$victim"
ended 0
said 'stopped after step [0-9]* of'
# Rank 0 keeps the list: without it nobody goes on.
forever=$endless
endless="$forever --checkpoint $there/left"
begun 0
goes_on
kill -KILL "$victim"
ended 137
said 'rank 0 on .* has died'
said 'rank 1 on .* has written .*/left/last.safetensors: the run after step [1-9]'
# Stopped, neither: nobody is started again for nothing.
endless=$forever
TANDEM_SILENCE=2 begun 0 --restart 1
kill -STOP "$victim"
ended 1
said 'rank 0 on .* has said nothing'
! grep -q 'started again' "$there/out" || complain "ranks are started again: $(cat "$there/out")"
# Of one rank alone, that it does not hear rank 0 is its own trouble, and it is started again.
cat >"$there/one" <<'END'
[ "$RANK" = 1 ] && [ -z "${TANDEM_INCARNATION:-}" ] || exec "$@"
"$@" &
sleep 4
kill -KILL $!
echo 'rank 0 on its host has said nothing for 2 s' >&2
exit 1
END
endless="sh $there/one $forever"
TANDEM_SILENCE=2 begun 0 --restart 1
said 'rank 1 on .* ended with exit status 1: the others go on without it, and it is started again'
goes_on_to_its_end
endless=$forever

# ---- a loop of one's own: its checkpoint has the momentum, which lies on the servers ----------------------------------------
own="$build/own_loop --data $pictures --model mlp --batch 500 --checkpoint $there/own"
says 0 'epoch 1' "$run" -n 2 --strategy asgd-m $own --epochs 1
! command -v python3 >/dev/null || python3 - "$there/own/own_loop.safetensors" <<'END' || complain 'own_loop saved no momentum'
import array, json, struct, sys
b = open(sys.argv[1], 'rb').read()
n = 8 + struct.unpack('<Q', b[:8])[0]
at = json.loads(b[8:n])['optimizer/velocity/fc1.weight']['data_offsets']
sys.exit(not any(array.array('f', b[n + at[0]:n + at[1]])))
END
says 0 'epoch 2' "$run" -n 2 --strategy asgd-m $own --epochs 2
says 2 'none only serves' "$run" -n 2 --strategy asgd-m --servers 1 $own --epochs 1

# ---- what is refused -------------------------------------------------------------------------------------------------------
says 2 'one at least must train' "$run" -n 2 --strategy asgd --servers 2 $train
says 2 'Choose --optimizer sgd' "$run" -n 2 --strategy ddc-asgd $train --optimizer adamw
says 2 'it has no statistics over all ranks' "$run" -n 2 --strategy ddc-asgd $train --sync-bn
says 2 'choose ahead=, clamp=' "$run" -n 2 --strategy ddc-asgd:kapa=1 $train
says 2 'write ssp:steps=NUMBER' "$run" -n 2 --strategy ssp $train
exit $wrong
