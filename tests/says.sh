# What the checks of programs share; sourced. `there` is a folder that goes with the script, `wrong` its verdict.
build=${BUILD:-build}
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

# needs_ranks: skips the script where ranks cannot be started, or not be found.
needs_ranks() {
  [ -x "$build/tandem-run" ] || { echo 'no tandem-run: built without UCX'; exit 77; }
  command -v pgrep >/dev/null || { echo 'no pgrep. Try: apt-get install procps'; exit 77; }
}
# within TENTHS COMMAND…: repeats the command until it succeeds, for at most so many tenths of a second.
within() {
  tenths=$1
  shift
  until "$@" 2>/dev/null; do
    [ "$tenths" -gt 0 ] || return 1
    tenths=$((tenths - 1))
    sleep 0.1
  done
}
# ends PROCESS STATUS FILE WHAT: it ends with that status; the file has what it printed.
ends() {
  wait "$1"
  got=$?
  [ $got -eq "$2" ] || complain "$4: exit status $got, expected $2: $(cat "$3")"
}
# nothing_left: no process of a training with these metrics is left.
nothing_left() {
  left=$(pgrep -f -- "--metrics $there/metrics" | wc -l)
  [ "$left" -eq 0 ] || complain "$left processes are left"
}
# rank_of LAUNCHER RANK: the process that it started as that rank.
rank_of() {
  for p in $(pgrep -P "$1"); do
    tr '\0' '\n' <"/proc/$p/environ" 2>/dev/null | grep -qx "RANK=$2" && echo "$p"
  done
}
# begins RANK COMMAND…: starts it in the background ($launcher), and waits until it trains; that rank's process is in $victim.
begins() {
  rank=$1
  shift
  rm -f "$there/metrics"
  : >"$there/out"
  "$@" --metrics "$there/metrics" >"$there/out" 2>&1 &
  launcher=$!
  within 300 grep -q '"event": *"step"' "$there/metrics"
  victim=$(rank_of $launcher "$rank")
  [ "$victim" ] || complain "there is no rank $rank: $(cat "$there/out")"
}

# weights CHECKPOINT: a checksum of all that it holds but its header.
weights() { tail -c +$((9 + $(od -An -t u8 -N 8 "$1"))) "$1" | cksum; }
