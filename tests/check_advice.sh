#!/bin/sh
# What a refusal or a warning names works: each command below is refused, and runs with exactly what the text names. Where the text
# names a number or a whole command, that is taken from the text.
set -u
limit=120
. tests/says.sh
needs_ranks
export OMP_NUM_THREADS=1
train="$build/fashion_mnist --data $pictures --model mlp --val 5000 --epochs 1 --batch 50"
small="$build/fashion_mnist --data $pictures --model mlp --val 5000 --epochs 1 --stop-after 1"
run="$build/tandem-run -n 2"

# pair STATUS TEXT COMMAND… -- COMMAND…: the first ends with that status and says the text, the second ends well; there {} is what stands
# behind the text. The second is in $good.
pair() {
  first=$1 text=$2 bad=
  shift 2
  while [ "$1" != -- ]; do
    bad="$bad $1"
    shift
  done
  shift
  # shellcheck disable=SC2086
  says "$first" "$text" $bad
  named=$(sed -n "s|.*$text *\([^ ,;)]*\).*|\1|p" "$there/out" | head -n 1)
  good=$(echo "$*" | sed "s|{}|$named|g")
  # shellcheck disable=SC2086
  says 0 '' $good
}
# advice TEXT COMMAND… -- COMMAND…: the first is refused with that text, the second is not.
advice() { pair 2 "$@"; }
# warned TEXT COMMAND… -- COMMAND…: the first warns, the second no more.
warned() {
  pair 0 "$@"
  ! grep -qF -- "$1" "$there/out" || complain "$good: still warns '$1'"
}
pictures() {  # FOLDER SIDE NUMBER: black ones and grey ones, of an own class each
  for class in black grey; do
    mkdir -p "$1/$class"
    level=$([ $class = black ] && echo 10 || echo 200)
    for i in $(seq "$3"); do
      { printf 'P5 %d %d 255\n' "$2" "$2"; awk -v n=$(($2 * $2)) -v l="$level" 'BEGIN { for (i = 0; i < n; i++) printf "%c", l }'; } \
        >"$1/$class/$2-$i.pgm"
    done
  done
}

# ---- options of every training program -------------------------------------------------------------------------------
advice 'add --memory-budget, say --memory-budget' $train --swap recompute -- $train --swap recompute --memory-budget {}
advice 'the smallest that would do is' $train --memory-budget 100K -- $train --memory-budget {}
plain="$build/fashion_mnist --data $pictures --model mlp --epochs 1"
advice 'add --val, say --val' $plain --patience 2 -- $plain --patience 2 --val {}
advice 'add --metrics' $train --log-every 5 -- $train --log-every 5 --metrics "$there/advised.jsonl"
advice 'name a checkpoint with' $train --evaluate -- $train --checkpoint "$there/saved"
says 0 'test accuracy' $train --evaluate --resume "$there/saved"
says 2 'was saved with --optimizer sgd' $train --optimizer adam --resume "$there/saved"
says 0 'nothing is left to do' $train --optimizer sgd --resume "$there/saved"
tune="$build/tune --data synthetic --data-set fashion-mnist --model mlp"
within="$tune --threads 1 --memory-budget"
advice 'a minibatch of 8 needs --memory-budget' $within 1M --batches 8 -- $within {} --batches 8
advice 'say --optimizer' $within 100M --batches 32 --rate-rule lars -- $within 100M --batches 32 --rate-rule lars --optimizer {} --lr 1
advice 'Say --memory-budget' $tune --on h200 --batches 32 -- $tune --on h200 --batches 32 --memory-budget {}
# The tuner's last line is a command.
says 0 '' $within 100M --batches 500
command=$(sed -n "s|.*\(build/train .*\)|\1|p" "$there/out" | head -n 1)
[ "$command" ] || complain "tune names no command: $(cat "$there/out")"
says 0 'test accuracy' $build/${command#build/} --epochs 1
warned 'batches, so each epoch makes one smaller step' $train --accumulate 200 -- $train --accumulate 20
few="$run $build/fashion_mnist --data $pictures --model smallcnn-bn --epochs 1 --batch 16 --stop-after 2"
says 0 'batch norm has only 8 pictures' $few
warned 'batch norm has only' $few -- $few --sync-bn
warned 'more --epochs, or --batch' $run ${train% --batch 50} --batch-per-rank 25 -- $run ${train% --batch 50} --batch {}

# ---- pictures --------------------------------------------------------------------------------------------------------
pictures "$there/few" 12 6
pictures "$there/mixed" 12 10
pictures "$there/mixed" 16 2
once="$build/train --model mlp --epochs 1 --data-set"
advice 'for example --size' $once "$there/mixed" -- $once "$there/mixed" --size {}
says 0 '--batch 4 instead' $once "$there/few"
advice 'do not fill a batch of 64: use a smaller' $once "$there/few" --batch 64 -- $once "$there/few" --batch 4
mkdir "$there/outer" && cp -r "$there/few" "$there/outer/only"
advice 'did you mean' $once "$there/outer" -- $once "$there/outer/only"
says 2 'datasets/get-data.sh fashion-mnist' "$build/fashion_mnist" --data "$there" --model mlp
[ -x datasets/get-data.sh ] || sh -n datasets/get-data.sh || complain 'datasets/get-data.sh is no script'

# ---- several ranks ---------------------------------------------------------------------------------------------------
advice 'use a larger --batch, or fewer ranks' $run $small --batch 1 -- $run $train --stop-after 1
advice '--lr-scale goes with' $run $train --stop-after 1 --lr-scale linear -- $run $small --batch-per-rank 25 --lr-scale linear
advice 'say how long a step takes too: --pace' $run --slow 1:2 $train --stop-after 2 -- $run --slow 1:2 --pace 5 $train --stop-after 2
advice 'as in --slow' $run --pace 5 --slow 3 $train --stop-after 2 -- $build/tandem-run -n 4 --pace 5 --slow {} $train --stop-after 2
advice 'a rank come back (--strategy' $run --restart 1 $train --stop-after 2 -- $run --restart 1 --strategy {} $train --stop-after 2
advice 'such as --strategy' $run --servers 1 --strategy local-sgd:4 $train -- $run --servers 1 --strategy {} $train
normed="$build/fashion_mnist --data $pictures --model smallcnn-bn --val 5000 --epochs 1 --batch 50 --stop-after 2 --sync-bn"
advice 'leave it out, or choose' $run --strategy local-sgd:4 $normed -- $run --strategy {} $normed
advice 'Choose --optimizer' $run --strategy ddc-asgd $train --optimizer adamw -- $run --strategy ddc-asgd $train --optimizer {}
advice 'start as many on every host' $build/tandem-run -n 3 --hosts-as 2 --strategy hybrid $train -- \
  $build/tandem-run -n 4 --hosts-as 2 --strategy hybrid $train
# Every name in the list of strategies, and every form that a refusal asks for.
says 2 'choose all-reduce' $run --strategy nothing $train
for form in hybrid:sample=0.5 local-sgd:4 post-local-sgd:4 cocod-sgd:4 easgd:4 outer:H=8,momentum=0.5,lr=0.7,stream=2,overlap=2 \
  ssp:3 quorum:1,grace=0.1 ringmaster:R=4 fedbuff:B=2 rennala:B=2 machines+asgd outer:H=8+delayed-nesterov daso:faithful \
  daso:B=4,W=1,warm-up=4,cool-down=4 \
  $("$build/tandem-run" --strategies | sed -n 's/^| `\([a-z-]*\)`.*/\1/p' | grep -vE '^(ssp|quorum|ringmaster|fedbuff|rennala|fedavg|fedprox|scaffold|fednova)$'); do
  "$build/tandem-run" -n 2 --strategy "$form" $train --stop-after 2 >"$there/form" 2>&1 || complain "$form: $(cat "$there/form")"
done
for form in fedavg fedprox scaffold fednova; do
  advice 'add --partition' $run --strategy $form:epochs=1 $train -- $run --strategy $form:epochs=1 $train --partition {}
done
advice 'write quorum:workers=NUMBER' $run --strategy quorum $train -- $run --strategy quorum:workers=2 $train --stop-after 2
for wire in f32 bf16 topk:0.1 powersgd:2; do
  says 0 'ranks, all-reduce' $run --strategy all-reduce:wire=$wire $train --stop-after 2
done
exit $wrong
