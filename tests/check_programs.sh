#!/bin/sh
# The examples as a user meets them: what they print, what they refuse and in how many words, how they end.
set -u
limit=120 one_line=1
. tests/says.sh

# Training small enough to be over at once.
threads=1
short() {
  status=$1 text=$2
  shift 2
  says "$status" "$text" env OMP_NUM_THREADS=$threads \
    "$build/fashion_mnist" --data "$pictures" --model mlp --epochs 1 --val 1000 "$@"
}

# ---- What they print -------------------------------------------------------------------------------------------------
says 0 'dy/dw = [200, 4000]' "$build/first_gradient"
for bench in memory shared; do
  [ -x "$build/bench_$bench" ] || continue
  says 0 'reads "for SECONDS" from stdin' "$build/bench_$bench" --help
  says 2 'unknown option --bogus' "$build/bench_$bench" --bogus
done
says 0 'refused: ' "$build/first_gradient"
says 0 'gradient agrees' "$build/new_op"
for program in first_gradient perceptron mlp lenet resnet new_op own_loop own_optimizer own_callback own_dataset own_strategy tabular fashion_mnist cifar10 train tune airbench; do
  says 0 '--help' "$build/$program" --help
  says 0 'oneDNN' "$build/$program" --version
  says 2 'unexpected argument word' "$build/$program" word
  says 2 'unknown option --bogus' "$build/$program" --bogus word
done

# ---- Without a GPU: one line with the cause, and never a training on the CPU instead -------------------------------------
if ! [ -e /dev/nvidia0 ]; then
  says 2 'train: --device cuda: ' "$build/train" --data synthetic --device cuda
  says 2 '--tf32 is for --device cuda' "$build/train" --data synthetic --tf32
fi

# ---- What they refuse before they train ------------------------------------------------------------------------------
short 2 '--epochs is given twice (1 and 2)' --epochs 2
says 2 '--exact-conv leaves Winograd' "$build/train" --data synthetic --device reference --exact-conv
says 2 'cannot hold back 60000 of 60000' "$build/fashion_mnist" --data synthetic --val 60000
says 2 'run datasets/get-data.sh cifar-10' "$build/cifar10" --data "$there"
if command -v curl >/dev/null || command -v wget >/dev/null; then
  says 3 'no network' env TANDEM_MIRROR=http://127.0.0.1:9/ sh datasets/get-data.sh fashion-mnist "$there/none"
  [ -e "$there/none" ] && complain "a download that brought nothing left a folder"
fi
short 2 'cannot be written' --metrics "$there/no/such/folder"
echo 'a table' >"$there/table"
for option in metrics trace dot export-torch export-onnx tensorboard; do
  for place in "$there/table/file" /proc/none; do short 2 "--$option $place: cannot be written: " --$option "$place"; done
  [ $option = tensorboard ] || short 2 "--$option $there: cannot be written: " --$option "$there"
done
for option in import-torch resume; do
  for more in '' --evaluate; do short 2 "--$option $there/table: its first 8 bytes give" --$option "$there/table" $more; done
  short 2 "--$option $there/none: " --$option "$there/none"
done
for option in exact-conv sync-bn; do short 2 "--$option: this model has no" --$option; done
short 2 'leave one of them out' --memory-budget 1G --swap recompute --scratch "$there"
short 0 'warning: --partition divides nothing on one rank' --partition equal
says 0 'warning: --sync-bn has no effect on one rank' "$build/fashion_mnist" --data "$pictures" --model smallcnn-bn --stop-after 1 --sync-bn
"$build/simulate" --help | grep -E -- '--resume|ranks|adamw|Nesterov' && complain "simulate --help tells of options that it has not"
short 2 'holds something else than metrics' --metrics "$there/table"
[ "$(cat "$there/table")" = 'a table' ] || complain "a file that held no metrics was written to"

# ---- Learning one batch is a check: only a yes is success --------------------------------------------------------------
says 1 'cannot tell whether the model learns: too few steps' \
  "$build/fashion_mnist" --data "$pictures" --model mlp --overfit-batch --stop-after 2

# ---- The minibatch for a memory --------------------------------------------------------------------------------------
tune="$build/tune --data synthetic --data-set fashion-mnist --model lenet5 --threads 1"
says 0 'build/train --data-set fashion-mnist --model lenet5 --batch 32 --lr 0.025 --data synthetic --memory-budget' \
  $tune --memory-budget 1G --batches 32 --metrics "$there/tune.jsonl"
grep -q '"event":"memory"' "$there/tune.jsonl" || complain "tune --metrics wrote no memory: $(cat "$there/tune.jsonl")"
says 0 'not measured on a simulated device' $tune --memory-budget 20M --on h200 --batches 1x,4x --ranks 4 --link 1G
says 2 'too small: a minibatch of 8 needs' $tune --memory-budget 1M
says 2 '--link 10: expected bit/s' $tune --ranks 2 --link 10
says 2 'expected bytes, or with a unit' $tune --memory-budget 64m
says 2 'there are 60000 pictures' $tune --memory-budget 1G --batches 70000
echo 'not a page' >"$there/notes.txt"
says 2 'holds something else than metrics' $tune --memory-budget 20971520 --batches 8 --metrics "$there/notes.txt"
cp "$there/tune.jsonl" "$there/before.jsonl"
says 2 'too small: a minibatch of 8 needs' $tune --memory-budget 1M --metrics "$there/tune.jsonl"
cmp -s "$there/tune.jsonl" "$there/before.jsonl" || complain "a tune that was refused changed the file of an earlier one"
says 2 '--metrics /proc/none: cannot be written' $tune --memory-budget 1G --metrics /proc/none
grep -q 'gradient noise' "$there/out" && complain "tune finds out at its end that its file cannot be written"
says 2 'say --optimizer lars' $tune --rate-rule lars
says 0 '--batch auto: ' "$build/train" --data synthetic --data-set fashion-mnist --model mlp --epochs 1 --val 55000 --batch auto --memory-budget 30M
says 2 '--batch auto: expected a whole number' "$build/fashion_mnist" --data synthetic --batch auto

# ---- Any data set ----------------------------------------------------------------------------------------------------
mkdir -p "$there/all/cat" "$there/all/dog"
for i in 0 1 2 3 4 5 6 7 8 9; do
  printf 'P6 8 8 255\n%192s' "$i" >"$there/all/cat/$i.ppm"
  printf 'P6 9 8 255\n%216s' "$i" >"$there/all/dog/$i.ppm"
done
if ! grep -q 'stb_image off' "$build/summary"; then
  says 2 'bring all to one size with --size' "$build/train" --data-set "$there/all"
  says 0 'all: 18 + 2 pictures, 8 × 8, 3 channels, 2 classes' "$build/train" --data-set "$there/all" --size 8 \
    --model mlp --epochs 1 --batch 6 --augment
  printf 'P6 8 8 255\ncut' >"$there/all/cat/3.ppm"
  says 2 'cat/3.ppm: is damaged' "$build/train" --data-set "$there/all" --size 8
fi
says 2 'choose one of mnist' "$build/train" --data-set imagenet
# A refusal names its option.
for bad in '--reflect' '--partition dirichlet:-1' '--schedule step:0:3' '--model foo'; do
  says 2 "train: $bad" "$build/train" --data synthetic $bad
done
says 0 'synthetic-cifar-10: 50000 + 10000 pictures, 32 × 32, 3 channels, 10 classes' env OMP_NUM_THREADS=$threads \
  "$build/train" --data-set cifar10 --data synthetic --model mlp --epochs 1 --val 49000

# ---- A trained model at work -----------------------------------------------------------------------------------------
short 0 "test accuracy" --checkpoint "$there/trained" --export-torch "$there/mlp.safetensors"
printf 'P5 40 30 255\n%1200s' ' ' >"$there/grey.pgm"
for weights in trained/best mlp; do
  if grep -q 'stb_image off' "$build/summary"; then continue; fi
  says 0 'grey.pgm: ' "$build/predict" --weights "$there/$weights.safetensors" "$there/grey.pgm" "$there/grey.pgm" --top 2
  [ "$(grep -c ' %, .* %$' "$there/out")" -eq 2 ] || complain "predict --top 2: $(cat "$there/out")"
  says 2 'table: ' "$build/predict" --weights "$there/$weights.safetensors" "$there/table"
done
says 2 'does not fit this model' "$build/predict" --weights "$there/mlp.safetensors" --model lenet5 "$there/grey.pgm"
says 2 'does not say the' "$build/predict" --weights tests/reference/interop.safetensors "$there/grey.pgm"
says 2 "no model 'foo'" "$build/predict" --weights "$there/mlp.safetensors" --model foo "$there/grey.pgm"
says 2 'which pictures' "$build/predict" --weights "$there/mlp.safetensors"
says 2 'Name a checkpoint with --weights' "$build/predict" "$there/grey.pgm"
says 2 'unknown option --bogus' "$build/predict" --bogus "$there/grey.pgm"
says 0 'epoch 1' env OMP_NUM_THREADS=1 "$build/own_loop" --data "$pictures" --model mlp --checkpoint "$there/own"
says 0 'epoch 2' env OMP_NUM_THREADS=1 "$build/own_loop" --data "$pictures" --model mlp --epochs 2 --checkpoint "$there/own"
grep -q 'epoch 1' "$there/out" && complain "own_loop began again in spite of its checkpoint"

says 0 '88.0 % after ' env OMP_NUM_THREADS=$threads "$build/own_callback" --data synthetic --model mlp
grep -q 'stopped after step' "$there/out" || complain "own_callback does not stop: $(cat "$there/out")"

# ---- No data set ---------------------------------------------------------------------------------------------------------
case $build in /*) here=$build ;; *) here=$PWD/$build ;; esac
if [ -e "$here/../datasets/fashion-mnist-small" ] && ! grep -q '^  zlib off' "$build/summary"; then
  mkdir "$there/empty"
  says 0 'fashion-mnist-small: 6000 + 1000 pictures' env -u TANDEM_DATA OMP_NUM_THREADS=$threads \
    sh -c "cd '$there/empty' && '$here/train' --model mlp --epochs 1"
  grep -q 'was not found in data/fashion-mnist, data: these are its first pictures' "$there/out" ||
    complain "train without a data set does not say so: $(cat "$there/out")"
  says 2 'run datasets/get-data.sh fashion-mnist' "$build/train" --data "$there/empty"
fi

# ---- Rows of numbers -----------------------------------------------------------------------------------------------------
says 0 'test loss 0.0' "$build/tabular"
says 2 '--features and --targets go together' "$build/tabular" --targets z
says 2 'needs your own --features' "$build/tabular" --task classes
if command -v python3 >/dev/null; then
  python3 -c '
import struct, sys
def save(name, kind, shape, values):
    header = str({"descr": kind, "fortran_order": False, "shape": shape}).ljust(117) + "\n"
    with open(sys.argv[1] + "/" + name, "wb") as out:
        out.write(b"\x93NUMPY\x01\0" + struct.pack("<H", 118) + header.encode() + struct.pack("<" + values[0], *values[1]))
save("x.npy", "<f4", (200, 2), ("400f", [v for i in range(200) for v in (i % 2 + 0.5, i)]))
save("kinds.npy", "<i8", (200,), ("200q", [i % 2 for i in range(200)]))' "$there"
  says 0 'test 100.00 %' "$build/tabular" --features "$there/x.npy" --targets "$there/kinds.npy" --task classes
  says 2 'holds classes' "$build/tabular" --features "$there/x.npy" --targets "$there/kinds.npy"
fi

# ---- Weights of another program, and what they reach ---------------------------------------------------------------------
short 0 'test accuracy' --resume "$there/trained" --evaluate
reached=$(tail -n 1 "$there/out")
short 0 "$reached" --import-torch "$there/mlp.safetensors" --evaluate
grep -q epoch "$there/out" && complain "--evaluate trains: $(cat "$there/out")"
short 0 'test accuracy' --import-torch "$there/mlp.safetensors" --evaluate --mean 0.5 --std 0.25
grep -qx "$reached" "$there/out" && complain "--mean and --std make no difference"
short 2 '--mean: 3 numbers, but fashion-mnist' --mean 0.4,0.5,0.6
short 2 '--std 0: expected' --std 0
short 2 '--evaluate has nothing to evaluate' --evaluate
short 2 '--evaluate trains nothing: it writes no' --resume "$there/trained" --evaluate --metrics "$there/none"
if /usr/bin/python3 -c 'import torch' 2>/dev/null; then
  # A training's checkpoint of a wrapped model, with a quote in its name, as PyTorch saves it.
  /usr/bin/python3 - "$there/mlp.safetensors" "$there/Ann's.th" <<'END'
import json, struct, sys, torch
data = open(sys.argv[1], "rb").read()
size = struct.unpack("<Q", data[:8])[0]
state = {"module." + k: torch.frombuffer(bytearray(data[8 + size + v["data_offsets"][0]:8 + size + v["data_offsets"][1]]),
                                         dtype=torch.float32).reshape(v["shape"])
         for k, v in json.loads(data[8:8 + size]).items() if k != "__metadata__"}
torch.save({"epoch": 3, "optimizer": {"state": {}, "param_groups": []}, "state_dict": state}, sys.argv[2])
END
  one_line=
  short 2 'If you trust it, convert it' --import-torch "$there/Ann's.th"
  one_line=1
  sed '1d; s#^  python3#/usr/bin/python3#' "$there/out" >"$there/convert"
  (cd "$there" && sh convert) || complain "the command that converts PyTorch's file fails: $(cat "$there/convert")"
  short 0 "$reached" --import-torch "$there/Ann's.safetensors" --evaluate
fi

# ---- Nothing the user had is lost ------------------------------------------------------------------------------------
short 0 'test accuracy' --metrics "$there/kept.jsonl"
for key in model data optimizer learning_rate batch schedule dtype strategy seed version host; do
  head -n 1 "$there/kept.jsonl" | grep -q "\"$key\":[^,]" || complain "the metrics do not tell the $key: $(head -n 1 "$there/kept.jsonl")"
done
cp "$there/kept.jsonl" "$there/before.jsonl"
short 2 'holds something else than a picture of a tape' --metrics "$there/kept.jsonl" --dot "$there/table"
short 2 'holds something else than a trace' --metrics "$there/kept.jsonl" --trace "$there/table"
cmp -s "$there/kept.jsonl" "$there/before.jsonl" || complain "a refused command changed the metrics of an earlier run"

# ---- Surroundings ----------------------------------------------------------------------------------------------------
for threads in abc 1000; do short 0 'test accuracy'; done
threads=1
if [ -w /dev/full ]; then
  short 1 '/dev/full: the metrics could not be written: No space left' --metrics /dev/full
  "$build/first_gradient" >/dev/full 2>"$there/said" && complain "a full disk under standard output goes unnoticed"
  grep -q 'standard output could not be written' "$there/said" || complain "a full disk: $(cat "$there/said")"
fi
ulimit -S -f 1000  # of 512 bytes: less than a checkpoint
short 1 'last.safetensors: could not be written: File too large; nothing was written' --checkpoint "$there/run"
ulimit -S -f unlimited
[ -z "$(ls "$there/run")" ] || complain "a file that grew too large leaves $(ls "$there/run")"

# ---- Signals ---------------------------------------------------------------------------------------------------------
# begun ARGUMENTS…: starts a long training in the background ($!) and returns once it trains.
begun() {
  rm -f "$there/metrics"
  # In the background of a shell SIGINT is ignored; env gives it back.
  OMP_NUM_THREADS=1 env --default-signal=INT "$build/fashion_mnist" --data "$pictures" --epochs 100000 \
    --metrics "$there/metrics" "$@" >"$there/begun" 2>&1 &
  within 600 grep -q start "$there/metrics"
  sleep 0.5
}
begun --model mlp
short 2 'writes its metrics there: wait for its end' --metrics "$there/metrics"
kill -s TERM $!
wait $!
for signal in INT=130 TERM=143 HUP=129 USR1=138 USR2=140 XCPU=152; do
  begun --model mlp
  kill -s "${signal%=*}" $!
  ends $! "${signal#*=}" "$there/begun" "SIG${signal%=*}"
  tail -n 1 "$there/metrics" | grep -q "\"event\":\"end\".*\"stopped\":1,\"reason\":\"SIG${signal%=*}\"" ||
    complain "SIG${signal%=*}: the metrics end with $(tail -n 1 "$there/metrics")"
done
begun --model mlp  # a batch system may warn again and again
for i in 1 2 3 4; do kill -s XCPU $!; sleep 0.2; done 2>/dev/null
ends $! 152 "$there/begun" 'SIGXCPU repeated'
# As nohup starts a program: the terminal may go.
(trap '' HUP; exec "$build/fashion_mnist" --data synthetic --model mlp --epochs 100000 --metrics "$there/nohup" >"$there/begun" 2>&1) &
until grep -q start "$there/nohup" 2>/dev/null; do sleep 0.2; done
kill -s HUP $!
sleep 0.3
kill -0 $! || complain "SIGHUP ended a program whose parent ignored it: $(cat "$there/begun")"
kill -s TERM $!
wait $!

# ---- The same command again, as a batch system starts it: three times, with kills between, and the weights of a run without ---------
again="$build/fashion_mnist --data $pictures --model mlp --val 1000 --epochs 60 --threads 1 --deterministic --resume auto"
says 0 'test accuracy' $again --checkpoint "$there/undisturbed"
for signal in KILL=137 TERM=143; do
  $again --checkpoint "$there/requeued" --metrics "$there/requeued.jsonl" >"$there/begun" 2>&1 &
  lines=$(grep -c epoch "$there/requeued.jsonl" 2>/dev/null)
  until [ "$(cat "$there/requeued.jsonl" 2>/dev/null | grep -c '"event":"epoch"')" -gt "${lines:-0}" ] && [ -e "$there/requeued/last.safetensors" ]; do
    sleep 0.05
  done
  kill -s "${signal%=*}" $!
  ends $! "${signal#*=}" "$there/begun" "requeued, SIG${signal%=*}"
done
says 0 'test accuracy' $again --checkpoint "$there/requeued" --metrics "$there/requeued.jsonl"
[ "$(weights "$there/requeued/last.safetensors")" = "$(weights "$there/undisturbed/last.safetensors")" ] ||
  complain "a run that was started three times has other weights"
says 0 'nothing is left to do' $again --checkpoint "$there/requeued" --metrics "$there/requeued.jsonl"
short 0 'test accuracy' --checkpoint "$there/both" --resume "$there/both"
short 0 'nothing is left to do' --checkpoint "$there/both" --resume "$there/both"
rm -r "$there/both"
short 0 'test accuracy' --checkpoint "$there/both" --resume "$there/./both/"
short 2 '--resume auto: goes on with the last checkpoint in the folder of --checkpoint' --resume auto
short 2 'name the checkpoint that is to be evaluated' --resume auto --evaluate
short 0 'holds no checkpoint: the run begins' --checkpoint "$there/new" --resume auto
# What a kill may leave: half a file is removed; a damaged checkpoint is not replaced, and what the refusal says works.
touch "$there/new/last.safetensors.1.tmp"
truncate -s 3000 "$there/new/last.safetensors"
short 2 "to go on with $there/new/best.safetensors remove $there/new/last.safetensors" --checkpoint "$there/new" --resume auto
rm "$there/new/last.safetensors"
says 0 'best.safetensors: 1 of 2 epochs are done' "$build/fashion_mnist" --data "$pictures" --model mlp --val 1000 --epochs 2 \
  --checkpoint "$there/new" --resume auto
[ -e "$there/new/last.safetensors.1.tmp" ] && complain "half a checkpoint of a killed run stays"
ln -sf nowhere "$there/new/last.safetensors"
short 2 'there is no' --checkpoint "$there/new" --resume auto

# The batch script for Slurm: the warning brings a checkpoint and a place in the queue; the second start ends the run.
slurm="$PWD/examples/launch/slurm.sbatch"
mkdir "$there/slurm"
ln -s "$(cd "$build" && pwd)" "$there/slurm/build"
printf '#!/bin/sh\necho $$ >task\nexec "$@" --data synthetic --model mlp --threads 1 --val 20000\n' >"$there/slurm/srun"
printf '#!/bin/sh\necho "$@" >>queue\n' >"$there/slurm/scontrol"
chmod +x "$there/slurm/srun" "$there/slurm/scontrol"
start_job() { (cd "$there/slurm" && PATH="$PWD:$PATH" SLURM_JOB_ID=7 SLURM_CPUS_PER_TASK=1 exec bash "$slurm") >"$there/begun" 2>&1; }
start_job &
until grep -q epoch "$there/slurm/run.jsonl" 2>/dev/null; do sleep 0.05; done
kill -s USR1 "$(cat "$there/slurm/task")"
wait $!
start_job || complain "the batch script's second start: $(cat "$there/begun")"
grep -q 'epochs are done' "$there/begun" || complain "the batch script begins again: $(cat "$there/begun")"
printf '#!/bin/sh\nexit 139\n' >"$there/slurm/srun"  # a crash would come again
start_job
[ "$(cat "$there/slurm/queue")" = 'requeue 7' ] || complain "the batch script queued '$(cat "$there/slurm/queue")': $(cat "$there/begun")"

# ---- Closed standard streams: no file of ours gets their numbers -------------------------------------------------------
for closed in '<&-' '>&-' '2>&-' '<&- >&- 2>&-'; do
  rm -f "$there/closed"
  (eval "exec $closed"; exec "$build/fashion_mnist" --data "$pictures" --model mlp --epochs 1 --val 5000 --log-every 1 --metrics "$there/closed") >/dev/null 2>&1
  grep -vq '^{.*}$' "$there/closed" && complain "with $closed the metrics hold: $(grep -v '^{.*}$' "$there/closed")"
  grep -q '"event":"end"' "$there/closed" || complain "with $closed the run did not end"
done
begun --model resnet18 --device reference  # a step takes minutes: only the second signal can end it
kill -s TERM $!
sleep 0.5
kill -0 $! 2>/dev/null || complain "one SIGTERM ended the program within its step"
kill -s TERM $!
ends $! 143 "$there/begun" 'SIGTERM twice'
grep -q '"event":"end"' "$there/metrics" && complain "SIGTERM twice waited for the end of the step"
exit $wrong
