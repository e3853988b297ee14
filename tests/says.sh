# What the checks of programs share; sourced. `there` is a folder that goes with the script, `wrong` its verdict.
there=$(mktemp -d)
trap 'rm -rf "$there"' EXIT
wrong=0
# Fashion-MNIST's first 6,000 + 1,000 pictures: a run on them is over at once. Unpacked: a build without zlib reads them, too.
pictures=$there/pictures
mkdir "$pictures"
for packed in datasets/fashion-mnist-small/*.gz; do gzip -dc "$packed" >"$pictures/$(basename "$packed" .gz)"; done
complain() { echo "$*"; wrong=1; }

# says STATUS TEXT COMMAND…: it ends with that status within $limit seconds, and prints the text; where one_line is set, a
# refusal (2) is one line.
says() {
  status=$1 text=$2
  shift 2
  timeout --foreground "$limit" "$@" >"$there/out" 2>&1
  got=$?
  [ $got -eq "$status" ] || complain "$*: exit status $got, expected $status: $(cat "$there/out")"
  grep -qF -- "$text" "$there/out" || complain "$*: does not say '$text' but: $(cat "$there/out")"
  [ "$status" -ne 2 ] || [ -z "${one_line:-}" ] || [ "$(wc -l <"$there/out")" -eq 1 ] ||
    complain "$*: more than one line: $(cat "$there/out")"
}

# rank_of LAUNCHER RANK: the process that it started as that rank.
rank_of() {
  for p in $(pgrep -P "$1"); do
    tr '\0' '\n' <"/proc/$p/environ" 2>/dev/null | grep -qx "RANK=$2" && echo "$p"
  done
}
# begins LAUNCHER RANK: waits for the first "step" in $there/metrics; that rank's process is in $victim.
begins() {
  tries=0
  until grep -q '"event": *"step"' "$there/metrics" 2>/dev/null || [ $tries -eq 300 ]; do
    tries=$((tries + 1))
    sleep 0.1
  done
  victim=$(rank_of "$1" "$2")
  [ "$victim" ] || complain "there is no rank $2: $(cat "$there/out")"
}

# weights CHECKPOINT: a checksum of all that it holds but its header.
weights() { tail -c +$((9 + $(od -An -t u8 -N 8 "$1"))) "$1" | cksum; }
