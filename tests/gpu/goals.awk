# The mean of airbench's runs beside its goals, of what it printed: 94 % and, on a GPU (gpu=1), 2.0 s. Its seconds go to the
# file `jsonl`, beside the peer's. Exits with 1 where a goal is not reached. Without a GPU nothing is judged.
/^run [0-9]+: test accuracy / {
  hundredths += int($5 * 100 + 0.5)  # whole numbers for 10,000 pictures: no rounding lifts a mean to the goal
  seconds += $7
  runs++
}
function goal(what, value, sign, want, unit, reached) {
  printf "%-72s %10.3f %s %-9s %s  %s\n", "airbench94, mean of " runs " runs: " what, value, sign, want, unit,
         !gpu ? "not judged: no GPU" : reached ? "reached" : "NOT REACHED"
  missed += gpu && !reached
}
END {
  if (!runs) { print "airbench printed no runs"; exit 1 }
  goal("test accuracy", hundredths / runs / 100, "≥", "94", "%", hundredths >= 9400 * runs)
  goal("seconds", seconds / runs, "≤", "2.0", "s", seconds <= 2.0 * runs)
  if (jsonl) printf "{\"bench\":\"airbench94, mean of %d runs\",\"value\":%.4f,\"unit\":\"s\",\"accuracy\":%.6f}\n",
                    runs, seconds / runs, hundredths / runs / 1e4 >> jsonl
  exit missed > 0
}
