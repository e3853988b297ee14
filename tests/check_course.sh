#!/bin/sh
# The exercises of examples/course: as they are handed out nothing is written yet, the solutions pass, usual mistakes get their hint,
# and the solutions pass on real processes.
limit=400
. tests/says.sh
set -- env -u MAKEFLAGS -u MAKELEVEL make --no-print-directory course BUILD="$build" CXX="${CXX:-g++}"

"$@" >"$there/out" 2>&1
[ "$(grep -c 'not written yet: ' "$there/out")" -eq 8 ] || complain "make course: $(cat "$there/out")"
grep -qx '0 of 8 passed' "$there/out" || complain "make course passes something"
"$@" SOLUTIONS=1 >"$there/out" 2>&1 || complain "make course SOLUTIONS=1: $(cat "$there/out")"
"$@" N=2 SOLUTIONS=1 JSON=1 2>&1 | grep -qF '{"exercise": 2, "title": "momentum on the flat vector", "result": "passed"' ||
  complain "make course JSON=1: $("$@" N=2 SOLUTIONS=1 JSON=1 2>&1)"

# Wrong bodies: the solution of an exercise, changed by sed, and what is to be said of it. One make builds and runs the first
# mistakes of all exercises, another one the second, with a body that does not compile, and another one the third.
cat >"$there/mistakes" <<'END'
1_backward | s/ - (x\[i\] - mean) \/ root \* mean_dyy// | The variance depends on x, too
2_momentum | s/v\[i\], d);/v[i], (1 - o.momentum) * d);/ | without a factor (1 - mu)
3_ring | s/Work sent = \(.*\);/\1.wait();/; /sent.wait/d | rank 1 waits for rank 0
3_ring | s/out = piece(r - step)/out = piece(r - step + 1)/ | sends piece r - s
3_ring | s/step < 2 \* (n - 1)/step < n - 1/ | The first half is right
4_data_parallel | s/g \*= mine \/ all/g \/= ranks.size()/ | the shares differ in size
5_late_gradients | s/return sent_\[.*\] = w_/return w_/ | pull() has to remember
6_local_steps | s/s % H != 0/(s + 1) % H != 0/ | The mean comes one step early
6_local_steps | s/2 \* waited/waited/ | count 2W times
7_cut_softmax | /all_reduce(buffer(sums))/d | over this rank's classes only
7_cut_softmax | /all_reduce(buffer(d.dx))/d | the share of this rank's classes
8_memory | s/std::max(best\[i\]\[r\], best\[i\]/std::max(best[i][r], best[i + 1]/ | A tensor is kept once
END
# each COMMAND: runs it with the fields of every line of mistakes: $exercise, $round (1, 2, …: how often it was there), $change, $hint.
each() {
  before=
  while IFS='|' read -r exercise change hint <&3; do
    exercise=${exercise% } hint=${hint# }
    [ "$exercise" = "$before" ] || round=0
    before=$exercise round=$((round + 1))
    "$1"
  done 3<"$there/mistakes"
}
write() {
  mkdir -p "$there/$exercise"
  sed "$change" "examples/course/$exercise/solution.h" >"$there/$exercise/wrong$round.h"
  ! cmp -s "$there/$exercise/wrong$round.h" "examples/course/$exercise/solution.h" || complain "$exercise: sed '$change' changes nothing"
}
hinted() {
  grep "^{\"exercise\": ${exercise%%_*}," "$there/wrong$round" | grep -qF -- "$hint" ||
    complain "$exercise: does not say '$hint' but: $(cat "$there/wrong$round")"
}
each write
: >"$there/1_backward/wrong2.h"
for round in 1 2 3; do
  numbers=$(cd "$there" && ls */wrong$round.h | cut -c 1 | tr -d '\n')
  says 2 '"exercise": ' "$@" JSON=1 N="[$numbers]" BODY="$there/%/wrong$round.h"
  cp "$there/out" "$there/wrong$round"
done
each hinted
grep -q 'does not compile' "$there/wrong2" || complain "an empty body compiles: $(cat "$there/wrong2")"
if [ -x "$build/tandem-run" ]; then
  for exercise in 3_ring 4_data_parallel 6_local_steps 7_cut_softmax; do
    says 0 "passed" "$build/tandem-run" -n 4 "$build/course/$exercise-solution"
  done
fi
exit $wrong
