#!/bin/sh
# Every command that a README or a REFERENCE page shows behind a `$` is run as it stands there, in a folder of its own with the tree beside it.
# It must end well, or still be at work when its time is over (a training need not be waited for): what this catches are
# options, files and programs that are not what the text says. And tests/README.md says what every test holds to account.
#
#   DOCUMENT_SECONDS  for each command (default 2)
set -u
build=${BUILD:-build}
limit=${DOCUMENT_SECONDS:-2}
there=$(mktemp -d)
trap 'rm -rf "$there"' EXIT
tree=$(pwd)
for entry in "$tree"/* ; do ln -s "$entry" "$there/"; done
rm -f "$there/build"
mkdir "$there/build"  # what commands write there is theirs
for program in "$tree/$build"/*; do ln -s "$program" "$there/build/"; done
[ "${TANDEM_DATA:-}" ] || { [ -d data/fashion-mnist ] && [ -d data/cifar-10-batches-bin ]; } || synthetic=1

# In the text of a README: lines behind `$` within fences, continued by a backslash. Prints FILE:LINE, tab, command, tab,
# the line below it: a refusal that the text shows is no fault.
commands() {
  awk '
    function flush(below) { if (ready) print at "\t" command "\t" below; command = ""; ready = 0 }
    FNR == 1          { flush(""); fenced = 0 }
    /^```/            { flush(""); fenced = !fenced; next }
    !fenced           { next }
    ready             { flush($0) }
    command != ""     { command = command $0 }
    /^\$ /            { command = substr($0, 3); at = FILENAME ":" FNR }
    command == ""     { next }
    /\\$/             { sub(/\\$/, "", command); next }
    { sub(/  +#.*$/, "", command); ready = 1 }
    END               { flush("") }' "$@"
}

# These are run by the gate itself, need a machine of their own, or would change this one.
elsewhere='^(make( |$)|sudo |apt-get |cmake |git clone|cd |ssh |sbatch |kubectl |docker |pip |python3? -m venv)'

wrong=0 ran=0
commands $(git ls-files '*README.md' '*REFERENCE.md' 2>/dev/null || find . -name README.md -o -name REFERENCE.md) >"$there/commands"
tab=$(printf '\t')
while IFS="$tab" read -r at command below <&3; do
  echo "$command" | grep -qE "$elsewhere" && continue
  ran=$((ran + 1))
  (cd "$there" && exec timeout -k 5 "$limit" sh -c "$command") >"$there/said" 2>&1 </dev/null
  status=$?
  case $status in
    0 | 124 | 137) ;;
    77) echo "  $command: $(tail -n 1 "$there/said")" >&2 ;;  # without the rights it needs it says so
    *)
      [ "$below" ] && grep -qF -- "$below" "$there/said" && continue
      # Without pictures, what only lacks them is not wrong.
      if [ "${synthetic:-}" ] && grep -q 'get-data.sh' "$there/said"; then continue; fi
      # Nor is what only lacks a part that this build was made without, or a package of Python that the tests do without.
      grep -qE 'this build has no|is missing: apt-get install' "$there/said" && continue
      echo "$at: $command: exit status $status: $(tail -n 3 "$there/said")"
      wrong=1
      ;;
  esac
done 3<"$there/commands"
# The code that stands beside the formulas is that of the sources.
awk '/^```/ { code = !code; next } code && !/…/ { sub(/^ +/, ""); print }' dist/FORMULAS.md >"$there/code"
while IFS= read -r line <&3; do
  grep -qF -- "$line" dist/strategies/*.cpp dist/server/rules.cpp examples/course/*/solution.h tests/naive.h tests/test_dist_rounds.cpp tests/test_partition.cpp || { echo "dist/FORMULAS.md: no source has: $line"; wrong=1; }
done 3<"$there/code"
# The fields of a plan that are documented are those that are read.
sed -n 's/^| `\([a-z_]*\)` |.*/\1/p' dist/lab/PLAN.md | sort -u >"$there/documented"
sed -n '/^FIELDS = {/,/^CLUSTER_FIELDS/p' dist/lab/experiment.py | grep -oE '"[a-z_]+":' | tr -d '":' | sort -u >"$there/read"
diff "$there/documented" "$there/read" || { echo "dist/lab/PLAN.md: < is documented and not read, > is read and not documented"; wrong=1; }
[ $ran -gt 0 ] || { echo "no README shows a command"; exit 1; }
for test in tests/test_*.cpp tests/check_*.sh; do
  grep -qF "${test#tests/}" tests/README.md || { echo "tests/README.md says nothing of $test"; wrong=1; }
done
exit $wrong
