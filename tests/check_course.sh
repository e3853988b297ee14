#!/bin/sh
# The exercises of examples/course: as they are handed out nothing is written yet, the solutions pass, usual mistakes get their hint,
# and the solutions pass on real processes.
build=${BUILD:-build} limit=400
. tests/says.sh
set -- env -u MAKEFLAGS -u MAKELEVEL make --no-print-directory course BUILD="$build" CXX="${CXX:-g++}"

"$@" >"$there/out" 2>&1
[ "$(grep -c 'not written yet: ' "$there/out")" -eq 8 ] || complain "make course: $(cat "$there/out")"
grep -qx '0 of 8 passed' "$there/out" || complain "make course passes something"
"$@" SOLUTIONS=1 >"$there/out" 2>&1 || complain "make course SOLUTIONS=1: $(cat "$there/out")"
"$@" N=2 SOLUTIONS=1 JSON=1 2>&1 | grep -qF '{"exercise": 2, "title": "momentum on the flat vector", "result": "passed"' ||
  complain "make course JSON=1: $("$@" N=2 SOLUTIONS=1 JSON=1 2>&1)"

# Wrong bodies: the solution of an exercise, changed by sed, and what is to be said of it.
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
while IFS='|' read -r exercise change hint <&3; do
  exercise=${exercise% } hint=${hint# }
  number=$((number + 1))
  sed "$change" "examples/course/$exercise/solution.h" >"$there/wrong$number.h"
  cmp -s "$there/wrong$number.h" "examples/course/$exercise/solution.h" && complain "$exercise: sed '$change' changes nothing"
  says 2 "$hint" "$@" N="$exercise" BODY="$there/wrong$number.h"
done 3<"$there/mistakes"

# What does not compile, does not end or crashes is a row, too.
says 2 'does not compile' "$@" N=3 BODY=/dev/null
if [ -x "$build/tandem-run" ]; then
  for exercise in 3_ring 4_data_parallel 6_local_steps 7_cut_softmax; do
    says 0 "passed" "$build/tandem-run" -n 4 "$build/course/$exercise-solution"
  done
fi
exit $wrong
